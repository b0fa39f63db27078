#!/usr/bin/env python3
"""Speed on real engines at the cost of a bigger model: direct, through Foretell, native.

    speed.py llama|vllm [--parts native,through] [--prompts N] [--max-tokens N] [--alternations N] [--workloads W,W] [--merged]
             [--gamma N]

native    a plain server and, at the same time, one with the engine's n-gram lookup, then one with
          its draft model: each prompt is sent to both in turn, so that a machine that slows down
          slows both. E[N] = tokens per drafted step, from the engine's counters; V = seconds of a
          drafted step ÷ seconds of a plain one, steps without a draft counted as plain ones.
through   `foretell bench`, alternating direct and through: rewrite with prompt_lookup alone,
          completion with draft-same, hostile with both; with --merged every workload with
          prompt_lookup, suffix and draft-same. The formula's costs are those of Foretell's own
          probe; V is that of the rounds that were run.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

import engine as engines
import exact
import wire

WORKLOADS = ("rewrite", "completion", "hostile")
LOOKUP = "{ kind: prompt_lookup, ngram: { min: 2, max: 8 } }"
DRAFT = "{ kind: model, model: draft-same, vocabulary: same }"
DRAFTERS = {"rewrite": LOOKUP, "completion": DRAFT, "hostile": f"{LOOKUP}, {DRAFT}"}
ALL = f"{LOOKUP}, {{ kind: suffix, scope: request }}, {DRAFT}"
POLICY = """version: 1
name: speed
mode: auto
drafters: [{drafters}]
gamma: {{ max: {gamma} }}
accept: {{ rule: exact }}
holdback: {{ start: 0, floor: 0 }}
"""
COUNTERS = {"vllm": ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total",
                     "vllm:spec_decode_num_accepted_tokens_total"),
            "llama": ("llamacpp:spec_decode_num_drafts_total", "llamacpp:spec_decode_num_draft_tokens_total",
                      "llamacpp:spec_decode_num_accepted_tokens_total")}
TOKENS = 5


def ngram(kind):
    """Arguments for the engine's own n-gram lookup in the request."""
    if kind == "vllm":
        lookup = {"method": "ngram", "num_speculative_tokens": TOKENS, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
        return ["--speculative-config", json.dumps(lookup)]
    return ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", str(TOKENS)]


def native(kind):
    """(name, extra arguments) of the engine's own speculation modes."""
    draft = str(engines.model(kind, "plain", "draft-same"))
    yield "ngram", ngram(kind)
    if kind == "vllm":
        model = {"method": "draft_model", "model": draft, "num_speculative_tokens": TOKENS}
        yield "draft", ["--speculative-config", json.dumps(model)]
    else:
        yield "draft", ["--spec-type", "draft-simple", "-md", draft, "--spec-draft-n-max", str(TOKENS)]


def counters(direct):
    found = dict.fromkeys(COUNTERS[direct.kind], 0.0)
    for line in wire.call(direct.url, "/metrics").splitlines():
        name, _, value = line.rpartition(" ")
        if name.partition("{")[0] in found:
            found[name.partition("{")[0]] += float(value)
    return [found[name] for name in COUNTERS[direct.kind]]


def bodies(name, count, tokens):
    with open(engines.ROOT / f"tests/workloads/{name}.jsonl") as file:
        for line in list(file)[:count]:
            body = json.loads(line)["body"]
            yield {**body, "temperature": 0, "max_tokens": min(tokens, body["max_tokens"])}


def timed(direct, body):
    """(tokens after the first, seconds for them, text) of one answer."""
    began = time.perf_counter()
    got = wire.ask(direct.url, direct.kind, body, stream=True)
    return got.usage["completion_tokens"] - 1, time.perf_counter() - began - got.first, got.text


def clocked(plain, direct, name, count, tokens):
    """Decoding of one workload by both servers alternately, and the second one's counters."""
    asked = list(bodies(name, count, tokens))
    for body in asked:  # read once, so that only decoding is timed
        for server in (plain, direct):
            wire.ask(server.url, server.kind, {**body, "max_tokens": 1}, stream=False)
    before, pairs = counters(direct), []
    for number, body in enumerate(asked):
        order = (plain, direct) if number % 2 else (direct, plain)
        got = {server.url: timed(server, body) for server in order}
        pairs.append((got[plain.url], got[direct.url]))
    drafts, drafted, accepted = (b - a for a, b in zip(before, counters(direct)))
    runs = [{"tokens": sum(p[side][0] for p in pairs), "seconds": sum(p[side][1] for p in pairs),
             "texts": [p[side][2] for p in pairs]} for side in (0, 1)]
    return runs[0], {**runs[1], "drafts": drafts, "drafted": drafted, "accepted": accepted}


def figures(run, plain):
    """Speed against plain, E[N] and V of one run."""
    step = plain["seconds"] / plain["tokens"]
    out = {"ms_per_token": 1000 * run["seconds"] / run["tokens"], "plain_ms": 1000 * step, "ratio": step * run["tokens"] / run["seconds"],
           "same_texts": sum(a == b for a, b in zip(run["texts"], plain["texts"])) / len(plain["texts"])}
    if run["drafts"]:
        alone = run["tokens"] - run["accepted"] - run["drafts"]
        out |= {"e_n": 1 + run["accepted"] / run["drafts"], "drafted_share": run["drafts"] / (run["drafts"] + max(0, alone)),
                "v": (run["seconds"] - max(0, alone) * step) / run["drafts"] / step}
    return out


def compare_native(kind, out, count, tokens, ways, workloads):
    report = {}
    with engines.start(kind, "inflated", engines.free_port(), out / f"speed-{kind}-plain.log") as alone:
        plain = wire.Engine(kind, alone.url)
        for name, extra in native(kind):
            if name not in ways:
                continue
            try:
                log = out / f"speed-{kind}-{name}.log"
                with engines.start(kind, "inflated", engines.free_port(), log, extra) as server:
                    direct = wire.Engine(kind, server.url)
                    report[name] = {}
                    for w in workloads:
                        base, run = clocked(plain, direct, w, count, tokens)
                        report[name][w] = figures(run, base)
                        print(line(kind, name, w, report[name][w]), flush=True)
            except (RuntimeError, wire.Refused, OSError) as error:
                report[name] = {"error": str(error)[-400:]}
                print(f"{kind} {name}: {error}", file=sys.stderr)
    return report


def line(kind, name, workload, f):
    tail = f"  E[N] {f['e_n']:.2f}  V {f['v']:.2f}  drafted steps {f['drafted_share']:.0%}" if "e_n" in f else ""
    return (f"{kind:6} {name:6} {workload:11} {f['plain_ms']:6.1f} -> {f['ms_per_token']:6.1f} ms/token  x{f['ratio']:.2f}  "
            f"texts as plain {f['same_texts']:.0%}{tail}")


def probed(run, limit=60):
    """The report of Foretell's own probe of its engine."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        replica = json.loads(engines.get(f"http://127.0.0.1:{run.admin}/api/replicas"))["replicas"][0]
        if (replica.get("probe") or {}).get("verify"):
            return replica["probe"]
        time.sleep(0.5)
    raise RuntimeError("the engine was not probed")


def compare_through(kind, foretell, out, alternations, tokens, workloads, merged=False, gamma=8):
    report = {}
    for workload in workloads:
        policy = POLICY.format(drafters=ALL if merged else DRAFTERS[workload], gamma=gamma)
        with exact.Run(kind, foretell, out / f"speed-{workload}", "inflated", policy) as run:
            probe = probed(run)
            figures_file, probe_file = (out / f"{what}-{kind}-{workload}.json" for what in ("bench", "probe"))
            probe_file.write_text(json.dumps(probe))
            print(f"{kind:6} through {workload:11} {probe['conclusion']}", flush=True)
            argv = [foretell, "bench", "--direct", run.url, "--through", run.through, "--concurrency", "1",
                    "--workload", str(engines.ROOT / f"tests/workloads/{workload}.jsonl"), "--temperature", "0",
                    "--alternations", str(alternations), "--max-tokens", str(tokens), "--json", str(figures_file),
                    "--metrics-through", f"http://127.0.0.1:{run.admin}/metrics", "--probe", str(probe_file)]
            subprocess.run(argv, check=False)
            report[workload] = json.loads(figures_file.read_text()) if figures_file.exists() else {"error": "no figures"}
            sessions = json.loads(engines.get(f"http://127.0.0.1:{run.admin}/api/sessions"))["sessions"]
            report[workload] |= {"probe": probe, "v": round_cost(sessions, probe), "reasons": reasons(sessions)}
            print(through_line(kind, workload, report[workload]), flush=True)
    return report


def round_cost(sessions, probe):
    """V of the last sessions' rounds: seconds of a verify request ÷ seconds of a plain step as
    probed."""
    rounds = [r["verify_ms"] for s in sessions for r in s["rounds"]]
    steps = [t["ms"] for t in probe["times"]["token"]]
    return sum(rounds) / len(rounds) / (sum(steps) / len(steps)) if rounds and steps else None


def reasons(sessions):
    """Number of the last sessions with each path and reason at their end."""
    counts = {}
    for s in sessions:
        word = s["path"] + (f" ({s['reason']})" if s["reason"] else "")
        counts[word] = counts.get(word, 0) + 1
    return counts


def through_line(kind, workload, report):
    run = (report.get("runs") or [{}])[0]
    values = {"ratio": (run.get("ratio") or {}).get("median"), "E[N]": run.get("e_n"), "V": report["v"],
            "formula": run.get("formula"), "of formula": run.get("gain_over_formula")}
    shown = "  ".join(f"{name} {value:.2f}" for name, value in values.items() if value is not None)
    return f"{kind:6} through {workload:11} {shown}  {report['reasons']}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=engines.ENGINES)
    parser.add_argument("--parts", default="native,through")
    parser.add_argument("--ways", default="ngram,draft", help="of native speculation")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--alternations", type=int, default=4)
    parser.add_argument("--merged", action="store_true", help="through: every drafter, merged")
    parser.add_argument("--gamma", type=int, default=8, help="through: maximum drafted tokens of a round")
    parser.add_argument("--foretell", default=str(engines.ROOT / "target/dist/foretell"))
    parser.add_argument("--out", default=str(engines.ROOT / "bench-out/engines"))
    args = parser.parse_args()
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    workloads = args.workloads.split(",")
    depth, width = engines.INFLATE[args.kind]
    report = {"engine": args.kind, "date": time.strftime("%Y-%m-%d"), "depth": depth, "width": width}
    if "native" in args.parts:
        report["native"] = compare_native(args.kind, out, args.prompts, args.max_tokens, args.ways.split(","), workloads)
    if "through" in args.parts:
        report["through"] = compare_through(args.kind, args.foretell, out, args.alternations, args.max_tokens,
                                            workloads, args.merged, args.gamma)
    (out / f"speed-{args.kind}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
