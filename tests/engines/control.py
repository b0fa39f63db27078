#!/usr/bin/env python3
"""The controller on a real engine: its own choice against fixed lengths and the engine alone.

    control.py llama|vllm|all [--workloads LIST] [--settings LIST] [--requests N] [--max-tokens N] [--rest S]
               [--foretell BIN] [--out DIR] [--json F]

One engine (variant inflated) and one `foretell serve` per setting, started and probed one after the
other: `auto` and fixed lengths (`4` is gamma.fixed 4), without control groups.
Blocks of 5 prompts are sent to the engine itself and to each setting in turn, with the order
changing from block to block; prompts are read once, untimed, before. Without --settings the fixed
lengths are 2, 4 and 8, and none where the probe finds that no round pays.

rewrite, completion, hostile   at temperature 0, with the drafters of speed.py
rest                           part of completion: its last 5 prompts once more after S seconds
                               without requests
unguessable                    the prompts of hostile at temperature 1.2 without a seed, `auto`
                               against the engine alone

For each requirement on the controller it prints that it is met (`ok`) or not (`short`), or why it
does not apply (`–`). Exits 2 if one was not met, a request failed, or, on llama-server, a text at
temperature 0 differs from the engine's own; vLLM inflated computes in bf16, where the size of a
batch may change a text.
"""

import argparse
import contextlib
import json
import pathlib
import sys
import time

import engine as engines
import exact
import speed
import stats
import requirements
import wire
from requirements import UNGUESSABLE, figures, sides

FIXED = ("2", "4", "8")
REQUESTS, UNGUESSABLE_REQUESTS = 25, 30
PROMPTS = {UNGUESSABLE: "hostile"}
TEMPERATURE = {UNGUESSABLE: 1.2}
HEADER = "x-workload"
ENGINES = {"llama": "llamacpp", "vllm": "vllm"}
# on two cores a call with a long prompt takes seconds
LIMITS = "    probe: { within: 2m }\n"
PROBED_WITHIN = 180


def address_of(url):
    return url.removeprefix("http://")


def prompts(workload, tokens):
    """The workload's requests: with its temperature and at most `tokens` tokens."""
    for entry in sides.read_workload(PROMPTS.get(workload, workload)):
        yield sides.changed(entry, temperature=TEMPERATURE.get(workload, 0),
                            max_tokens=min(tokens, entry["body"].get("max_tokens", tokens)))


def start_proxy(stack, kind, target, setting, args):
    """Foretell with one setting and a policy for each workload, and the report of its probe."""
    backend = (f"    engine: {ENGINES[kind]}\n" + exact.VERIFY.get(kind, "") + exact.MODELS.format(root=engines.ROOT)
               + LIMITS)
    policies = {name: sides.policy(name, speed.DRAFTERS[PROMPTS.get(name, name)], setting,
                                   f"match: {{ headers: {{ {HEADER}: [{name}] }} }}\n") for name in args.workloads}
    proxy = sides.start_proxy(stack, args.foretell, target, backend, policies, setting)
    probe = speed.probed(proxy, PROBED_WITHIN)
    cost = requirements.round_cost(probe)
    print(f"{kind}, {sides.named(setting)}: a round of {requirements.ROUND} costs {figures.number(cost)} steps. {probe['conclusion']}",
          flush=True)
    return proxy, probe


def start_proxies(stack, kind, target, args):
    """All settings, one after the other, so that no probe disturbs another.

    Without --settings the probe of `auto` decides on fixed lengths."""
    found = {}
    for setting in args.settings or ("auto", *FIXED):
        found[setting] = start_proxy(stack, kind, target, setting, args)
        if not args.settings and setting == "auto" and found["auto"][1]["pays"] is False:
            print(f"{kind}: fixed lengths are left out, no round pays", flush=True)
            break
    return {name: proxy for name, (proxy, _) in found.items()}, {name: probe for name, (_, probe) in found.items()}


def asked(addresses, names, workload):
    return [sides.Side(name, addresses[name], {HEADER: workload}) for name in names]


def measure(addresses, names, workload, entries, requests, size=sides.BLOCK):
    """The answers of each side to blocks of the prompts, alternating."""
    group = asked(addresses, names, workload)
    sides.measure([(sides.Side("unmeasured", addresses["direct"]), group)], entries, requests, size)
    return {side.name: side.answers for side in group}


def rest(addresses, entries, before, seconds):
    """The last block's prompts again after a pause, alternating prompt by prompt."""
    if not seconds:
        return {"why": "--rest 0"}
    if not any(answer.get("rounds") for answer in before["auto"]):
        return {"why": "auto never speculated"}
    time.sleep(seconds)
    last = [entries[n % len(entries)] for n in range(len(before["auto"]) - sides.BLOCK, len(before["auto"]))]
    after = measure(addresses, ("auto", "direct"), "completion", last, sides.BLOCK, 1)
    pair = [[answers[name][-sides.BLOCK:] for name in ("auto", "direct")] for answers in (before, after)]
    return {"seconds": seconds, "lasting": figures.lasting(*pair), "answers": without_texts(after), "wrong": sides.failures(after),
            "before": figures.ratio(*pair[0]), "after": figures.ratio(*pair[1])}


def without_texts(answers):
    """The answers without their texts, for the JSON file."""
    return {name: [{key: value for key, value in a.items() if key != "text"} for a in given] for name, given in answers.items()}


def costs(proxies, probes, workload):
    """Measured cost in steps of each setting's rounds in the workload's last sessions; None without
    any."""
    out = {}
    for name, proxy in proxies.items():
        page = json.loads(sides.page(f"127.0.0.1:{proxy.admin}", "/api/sessions"))
        own = [s for s in page["sessions"] if (s["policy"] or "").startswith(workload + "@")]
        out[name] = speed.round_cost(own, probes[name])
    return out


def show(kind, workload, part):
    requests = part["sides"]["direct"]["requests"]
    print(f"\n{kind}, {workload}, T={TEMPERATURE.get(workload, 0)}: {requests} requests a side; in brackets 95 % of "
          "resampled prompts; V: cost of a round in steps")
    rows = [("setting", "tok/s", "÷ direct", "first ms", "speculated", "E[N]", "drafted", "V", "texts as direct")]
    for name, side in part["sides"].items():
        answered = side["requests"] - side["failed"]
        same = f"{side.get('identical', 0)}/{side.get('compared', 0)}" if workload != UNGUESSABLE else "–"
        rows.append((sides.named(name), figures.number(side.get("tokens_per_second"), 1), figures.between(side.get("over_direct")),
                     figures.number(side.get("first_token_ms"), 0), f"{side.get('speculated', 0) * answered:.0f}/{side['requests']}",
                     figures.number(side.get("e_n")), figures.number(side.get("drafted_per_round"), 1),
                     figures.number(part["v"].get(name)), same))
    figures.table(rows)
    for name, side in part["sides"].items():
        if name != "direct":
            print(f"{sides.named(name)} ended: {figures.ends(side)}", flush=True)


def run(kind, args):
    report = {"engine": kind, "date": time.strftime("%Y-%m-%d"), "inflated": engines.INFLATE[kind], "workloads": {}}
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(engines.start(kind, "inflated", engines.free_port(), args.out / f"control-{kind}.log"))
        proxies, probes = start_proxies(stack, kind, address_of(server.url), args)
        cost = [c for c in map(requirements.round_cost, probes.values()) if c]
        if not cost:
            raise sides.Wrong("no probe has timed a round of four")
        report |= {"probes": probes, "round_cost": stats.median(cost)}
        addresses = {"direct": address_of(server.url), **{name: proxy.address for name, proxy in proxies.items()}}
        for workload in args.workloads:
            entries = list(prompts(workload, args.max_tokens))
            names = ("direct", "auto") if workload == UNGUESSABLE else tuple(addresses)
            requests = args.requests or (UNGUESSABLE_REQUESTS if workload == UNGUESSABLE else REQUESTS)
            answers = measure(addresses, names, workload, entries, requests)
            part = requirements.guessed(answers) if workload == UNGUESSABLE else requirements.compared(answers, kind == "llama")
            part |= {"answers": without_texts(answers), "v": costs({n: p for n, p in proxies.items() if n in names}, probes, workload)}
            if workload == UNGUESSABLE:
                report[UNGUESSABLE] = part
            else:
                report["workloads"][workload] = part
            show(kind, workload, part)
            if workload == "completion":
                report["rest"] = rest(addresses, entries, answers, args.rest)
    report["seconds"] = time.monotonic() - began
    return report


def conclude(kind, report):
    if "lasting" in report.get("rest", {}):
        print(f"auto ÷ direct on the last block of completion: {figures.between(report['rest']['before'])}, after the idle time: "
              f"{figures.between(report['rest']['after'])}")
    print(f"\n{kind}: a round of {requirements.ROUND} costs {report['round_cost']:.2f} steps by the probes; "
          f"{report['seconds'] / 60:.0f} minutes")
    for word, text in requirements.judgements(report):
        print(f"{word:5}  {text}", flush=True)


def workloads(text):
    names, known = text.split(","), (*speed.DRAFTERS, UNGUESSABLE)
    if not set(names) <= set(known) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"allowed {', '.join(known)}, each once, got {text!r}")
    return names


def settings(text):
    names = sides.settings(text)
    if "auto" not in names:
        raise argparse.ArgumentTypeError("auto is required: it is the setting under test")
    return names


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=(*engines.ENGINES, "all"))
    parser.add_argument("--workloads", type=workloads, default=f"rewrite,completion,{UNGUESSABLE}", metavar="LIST")
    parser.add_argument("--settings", type=settings, metavar="LIST", help="auto and fixed lengths")
    parser.add_argument("--requests", type=int, metavar="N", help=f"of each side, a multiple of 5; without it {REQUESTS}, of "
                        f"unguessable text {UNGUESSABLE_REQUESTS}")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="maximum tokens of an answer")
    parser.add_argument("--rest", type=int, default=60, metavar="S", help="idle seconds; 0: leave this out")
    parser.add_argument("--foretell", default=str(engines.ROOT / "target/dist/foretell"), metavar="BIN")
    parser.add_argument("--out", type=pathlib.Path, default=engines.ROOT / "bench-out/engines", metavar="DIR")
    parser.add_argument("--json", type=pathlib.Path, metavar="F")
    args = parser.parse_args()
    if args.requests is not None and (args.requests < sides.BLOCK or args.requests % sides.BLOCK):
        parser.error(f"--requests: a multiple of {sides.BLOCK}")
    reports, bad, code = [], [], 0
    for kind in engines.ENGINES if args.kind == "all" else (args.kind,):
        if why := engines.absent(kind):
            print(f"{kind}: skipped, {why}", flush=True)
            code = code or (0 if args.kind == "all" else 1)
            continue
        try:
            reports.append(run(kind, args))
        except (sides.Wrong, RuntimeError, OSError, wire.Refused) as error:
            print(f"control.py: {kind}: {error}", file=sys.stderr)
            code = 1
            continue
        conclude(kind, reports[-1])
        bad += [f"{kind}: {words}" for words in requirements.short(reports[-1])]
        if args.json:
            args.json.write_text(json.dumps({"engines": reports}, indent=1) + "\n")
    if bad:
        print("\nshort:\n" + "\n".join(bad))
    return 2 if bad else code


if __name__ == "__main__":
    sys.exit(main())
