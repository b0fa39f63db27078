#!/usr/bin/env python3
"""Gain and cost of relaxed accept rules, by temperature and load: real controller.

    ears.py [--foretell BIN] [--pace COSTS] [--workload W] [--tokens N] [--temperatures LIST] [--loads LIST]
            [--requests N] [--rules LIST] [--smollm2] [--json F] [--svg F]

One paced target (`foretell target --pace`) with LANES lanes, one `foretell serve` in front of it
with a policy for each rule, chosen by a header, and both drafters; with --smollm2 that model at its
own pace and its head (after `make real-models`). The rules are compared with drafts of GAMMA tokens
(a head's: HEAD_GAMMA) at every position; `auto` is EARS with lengths chosen by the controller,
which stops drafting concurrently with others' requests once too many of its tokens are refused;
`ears_allowed` and `auto_allowed` have no curves and ALLOWED drift for 100 tokens; `plain` never
drafts. The last lines compare what the controller chooses with the better of `plain` and the fixed
length.
Other clients keep enough lanes busy, directly, to make the requested load. A first turn at each
load is not counted. Then the rules take turns, request by request, at each temperature. No request
has a seed: a seeded one is never relaxed.

The tolerance is the product of two curves (CURVES): it grows with the temperature, as published for
EARS, and with the load. Per rule, temperature and load, from `usage.foretell` and
`POST /api/explain`:

load       as Foretell measures it, at the end of the turn
tolerance  value of the policy's curves there
gamma      drafted tokens per round or plain token, with a plain token as gamma 0
accepted   share of the drafted tokens
tokens     per second of one client, and the ratio to that by the exact rule
drift      total variation charged per output token
substituted  share of the output that the target had not chosen: tokens accepted beyond the exact
           rule, without the noise of comparing different texts

Exits 2 if a request failed, if anything is relaxed at temperature 0 or by the exact rule, if more
is charged than allowed, or if EARS does not accept more and more beyond the exact rule as the
temperature rises, over all loads, and at the highest load than at the lowest. Needs the exports of
`make -s print-env`.
"""

import argparse
import contextlib
import json
import pathlib
import sys
import threading
import urllib.request

import gamma
import paced
import real_prompts
import real_servers as servers
import sides

PACE = "step=10ms,base=1.35,node=0.025,growth=0.005,prompt=0.1ms"
LANES = 20
GAMMA, HEAD_GAMMA = "8", "4"
CURVES = "{ temperature: [[0.0, 0.0], [0.4, 0.2], [0.7, 0.35], [1.0, 0.5]], load: [[0.0, 0.4], [1.0, 1.0]], max: 0.5 }"
RULES = {
    "exact": "{ rule: exact }",
    "ears": f"{{ rule: ears, tolerance: {CURVES}, drift_per_100_tokens: 100 }}",
    "ears_kappa": f"{{ rule: ears, kappa: 0.3, tolerance: {CURVES}, drift_per_100_tokens: 100 }}",
}
# as Medusa's authors published it, and within the default limits of drift
TYPICAL = "rule: typical, tolerance: { temperature: [[0.0, 0.0], [0.01, 1.0]], max: 1.0 }"
RULES["typical"] = f"{{ {TYPICAL}, drift_per_100_tokens: 100 }}"
RULES["typical_bounded"] = f"{{ {TYPICAL} }}"
RULES["auto"] = RULES["ears"]
# with the allowance of policies/examples/drafts-lossy.yaml
ALLOWED = 2
RULES["ears_allowed"] = RULES["auto_allowed"] = f"{{ rule: ears, drift_per_100_tokens: {ALLOWED} }}"
RULES["plain"] = RULES["exact"]
COMPARED = ("exact", "ears", "ears_kappa", "auto", "ears_allowed", "auto_allowed", "plain")
# the same rule with lengths chosen by the controller, and with a fixed one
CHOSEN = {"auto": "ears", "auto_allowed": "ears_allowed"}


def policy(rule, smollm2):
    gamma_fixed, drafters = (HEAD_GAMMA, servers.HEADS["head"]) if smollm2 else (GAMMA, sides.DRAFTERS["both"])
    setting = "auto" if rule in CHOSEN else rule if rule == "plain" else gamma_fixed
    text = sides.policy(rule.replace("_", "-"), drafters, setting, f"match: {{ headers: {{ x-rule: [{rule}] }} }}\n")
    return text.replace("accept: { rule: exact }", f"accept: {RULES[rule]}")


class Others:
    """Direct clients of the engine that keep `count` lanes busy until `end`."""

    def __init__(self, target, prompts, count):
        self.over = threading.Event()
        self.threads = [threading.Thread(target=self.keep_asking, args=(target, prompts, index), daemon=True) for index in range(count)]
        for thread in self.threads:
            thread.start()

    def keep_asking(self, target, prompts, index):
        side = sides.Side(f"other {index}", target)
        while not self.over.is_set():
            entry = prompts[index % len(prompts)]
            side.ask(sides.changed(entry, temperature=0.7, max_tokens=256, ignore_eos=True))
            index += 1
        side.connection.close()

    def end(self):
        self.over.set()
        for thread in self.threads:
            thread.join()


def explained(admin, rule, entry):
    """Load and tolerance of the request as the running proxy reports them now."""
    call = urllib.request.Request(f"http://127.0.0.1:{admin}/api/explain?route={entry['route']}",
                                  data=json.dumps(entry["body"]).encode(),
                                  headers={"content-type": "application/json", "x-rule": rule})
    with urllib.request.urlopen(call, timeout=10) as answer:
        reply = json.load(answer)
    return reply["now"]["load"], reply["accept"]["tolerance"]


def measured(rule, temperature, wanted, answers, load, tolerance):
    whole = [answer for answer in answers if "failed" not in answer]
    rounds, drafted, accepted, tokens = (sum(a[key] for a in whole) for key in ("rounds", "drafted", "accepted", "tokens"))
    drift = sum(a["drift"].get("charged", 0) for a in whole)
    substituted = sum(a["drift"].get("substitutions", 0) for a in whole)
    return {"rule": rule, "temperature": temperature, "wanted": wanted, "load": load, "tolerance": tolerance,
            "requests": len(whole), "failed": len(answers) - len(whole), "tokens": tokens, "rounds": rounds,
            "gamma": drafted / (tokens - accepted) if tokens > accepted else 0, "accepted": accepted / drafted if drafted else None,
            "per_second": tokens / sum(a["seconds"] for a in whole) if whole else None,
            "drift": drift / tokens if tokens else 0, "substituted": substituted / tokens if tokens else 0}


def run(args):
    cell = {part.partition("=")[0]: part.partition("=")[2] for part in args.pace.split(",")}
    if args.smollm2:
        prompts = real_prompts.load(servers.PROMPTS, args.workload, args.requests, model=servers.engines.NAME)
    else:
        prompts = sides.read_workload(args.workload)
    policies = {rule: policy(rule, args.smollm2) for rule in args.rules}
    cells = []
    with contextlib.ExitStack() as stack:
        if args.smollm2:
            target = servers.address_of(stack.enter_context(servers.start("onnx", "smollm2", args.foretell, servers.REAL)))
        else:
            target = paced.start_target(stack, args.foretell, cell, LANES)
        proxy = sides.start_proxy(stack, args.foretell, target, paced.BACKEND, policies, "auto")
        asking = {rule: sides.Side(rule, proxy.address, {"x-rule": rule}) for rule in args.rules}

        def turn(temperature, requests):
            for side in asking.values():
                side.answers = []
            for number in range(requests):
                entry = sides.changed(prompts[number % len(prompts)], temperature=temperature, max_tokens=args.tokens)
                for side in asking.values():
                    side.answers.append(side.ask(entry))
            return entry

        for wanted in args.loads:
            others = Others(target, prompts, max(round(wanted * LANES) - 1, 0))
            try:
                turn(args.temperatures[-1], 2)
                for temperature in args.temperatures:
                    entry = turn(temperature, args.requests)
                    for rule, side in asking.items():
                        cells.append(measured(rule, temperature, wanted, side.answers, *explained(proxy.admin, rule, entry)))
                        say(cells[-1], cells)
            finally:
                others.end()
    return cells


HEADING = f"{'load':>5} {'T':>4}  {'rule':<10} {'tolerance':>9} {'gamma':>6} {'accepted':>9} {'tokens/s':>9} {'÷ exact':>8} {'drift':>7} {'substituted':>11}"


def cell_of(cell, rule, cells):
    """The cell of another rule at the same temperature and load."""
    return next(c for c in cells if (c["rule"], c["temperature"], c["wanted"]) == (rule, cell["temperature"], cell["wanted"]))


def chosen_of(cell, cells):
    return cell["per_second"] / max(cell_of(cell, rule, cells)["per_second"] for rule in ("plain", CHOSEN[cell["rule"]]))


def say(cell, cells):
    ratio = cell["per_second"] / cell_of(cell, "exact", cells)["per_second"]
    accepted = gamma.number(cell["accepted"], ".3f")
    print(f"{cell['load']:>5.2f} {cell['temperature']:>4}  {cell['rule']:<10} {cell['tolerance']:>9.3f} {cell['gamma']:>6.2f} {accepted:>9} "
          f"{cell['per_second']:>9.1f} {ratio:>8.2f} {cell['drift']:>7.3f} {cell['substituted']:>11.3f}", flush=True)


def wrong(cells):
    """Requirements of exactness and of the published behaviour that the cells do not meet, in
    words."""
    for cell in cells:
        where = f"{cell['rule']} at T={cell['temperature']}, load {cell['wanted']}"
        if cell["failed"]:
            yield f"{where}: {cell['failed']} requests failed"
        if cell["tolerance"] == 0 and (cell["drift"] or cell["substituted"]):
            yield f"{where}: relaxed without tolerance"
        if (cell["rule"] == "exact" or cell["temperature"] == 0) and cell["tolerance"] != 0:
            yield f"{where}: has a tolerance"
        if cell["rule"].endswith("_allowed") and 100 * cell["drift"] > ALLOWED:
            yield f"{where}: charges {100 * cell['drift']:.2f} for 100 tokens"
    ears = [c for c in cells if c["rule"] == "ears"]
    if len({(c["temperature"], c["wanted"]) for c in ears}) < 2:
        return
    for axis, ends in (("temperature", False), ("wanted", True)):
        values = sorted({c[axis] for c in ears})
        share = [sum(c["substituted"] * c["tokens"] for c in ears if c[axis] == v) / sum(c["tokens"] for c in ears if c[axis] == v) for v in values]
        share = [share[0], share[-1]] if ends else share
        if any(later <= earlier for earlier, later in zip(share, share[1:])):
            yield f"ears accepts no more with the {axis}: {', '.join(f'{s:.4f}' for s in share)}"


def drawn(cells, title):
    """One SVG: tolerance, gamma, additional acceptance and drift over temperature, a line per
    load."""
    ears = [{**c, "clients": c["wanted"]} for c in cells if c["rule"] == "ears"]
    auto = [{**c, "clients": c["wanted"]} for c in cells if c["rule"] == "auto"]
    loads = sorted({c["wanted"] for c in ears})
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1280 {gamma.BOTTOM + 30}" font-family="system-ui, sans-serif" '
           f'font-size="13"><rect width="100%" height="100%" fill="#fff"/><text x="44" y="20" fill="{gamma.INK}">{title}</text>']
    for index, load in enumerate(loads):
        left = 980 + 90 * index
        svg.append(f'<circle cx="{left}" cy="16" r="4" fill="{gamma.LINES[index]}"/><text x="{left + 8}" y="20" fill="{gamma.SOFT}">load {load}</text>')
    longest = max(c["gamma"] for c in auto)
    most = next(most for most in (2, 4, 8, 16, 32) if most >= longest)
    share = lambda value: f"{value:.1%}"
    top = lambda key: next(top for top in (0.02, 0.04, 0.1, 0.2, 0.4, 0.8, 1) if top >= max(c[key] for c in ears))
    svg += gamma.panel(40, 310, "tolerance τ", 0.5, lambda value: f"{value:.2f}", ears, "tolerance")
    svg += gamma.panel(360, 630, "gamma as chosen, 0 is plain", most, lambda value: f"{value:g}", auto, "gamma")
    svg += gamma.panel(680, 950, "accepted beyond exact, of the output", top("substituted"), share, ears, "substituted")
    svg += gamma.panel(1000, 1270, "drift charged per token", top("drift"), share, ears, "drift")
    return "\n".join(svg) + "\n</svg>\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--foretell", default=str(sides.ROOT / "target/dist/foretell"), metavar="BIN")
    parser.add_argument("--pace", default=PACE, metavar="COSTS")
    parser.add_argument("--workload", default="completion", metavar="W")
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="maximum tokens of an output")
    parser.add_argument("--temperatures", type=gamma.numbers(float, 0), default="0,0.4,0.7,1.0", metavar="LIST")
    parser.add_argument("--loads", type=gamma.numbers(float, 0), default="0,0.5,0.9", metavar="LIST")
    parser.add_argument("--requests", type=int, default=8, metavar="N", help="for each rule, temperature and load")
    parser.add_argument("--rules", type=sides.some_of(RULES), default=COMPARED, metavar="LIST", help="compared with exact")
    parser.add_argument("--smollm2", action="store_true")
    parser.add_argument("--json", type=pathlib.Path, metavar="F")
    parser.add_argument("--svg", type=pathlib.Path, metavar="F")
    args = parser.parse_args()
    args.rules = ["exact", *(rule for rule in args.rules if rule != "exact")]
    if args.svg and not {"ears", "auto"} <= set(args.rules):
        parser.error("--svg draws the rules ears and auto")
    served = "SmolLM2 and its head" if args.smollm2 else f"{args.pace}, {LANES} lanes, both drafters"
    print(f"{args.workload}, {args.tokens} tokens, {served}\n{HEADING}", flush=True)
    try:
        cells = run(args)
    except (sides.Wrong, OSError) as error:
        print(f"ears.py: {error}", file=sys.stderr)
        return 64
    if args.json:
        args.json.write_text(json.dumps({"pace": args.pace, "workload": args.workload, "tokens": args.tokens, "cells": cells}, indent=1) + "\n")
    if args.svg:
        args.svg.write_text(drawn(cells, f"EARS by temperature and load: {args.workload}, {args.pace}"))
    for rule in (rule for rule in CHOSEN if {rule, "plain", CHOSEN[rule]} <= set(args.rules)):
        ratios = [chosen_of(cell, cells) for cell in cells if cell["rule"] == rule]
        print(f"{rule} ÷ the better of plain and {CHOSEN[rule]}: {', '.join(f'{ratio:.2f}' for ratio in ratios)}; least {min(ratios):.2f}")
    found = list(wrong(cells))
    for line in found:
        print(line)
    return 2 if found else 0


if __name__ == "__main__":
    sys.exit(main())
