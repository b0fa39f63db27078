#!/usr/bin/env python3
"""The controller on a machine with given costs: its own choice against fixed lengths and plain.

    paced.py [--foretell BIN] [--requests N] [--settings LIST] [--at-once N] [--json F] [CELL ...]

A CELL is `step=60ms,base=1.35,node=0.025,workload=completion,drafters=model,tokens=128`: a plain
step takes `step`, a verify request of n drafted tokens step·(base + node·n); drafters are those of
sides.py. Without `tokens` each prompt keeps its own limit; `growth` and `prompt` are those of
`foretell target --pace`, and so are `profile=h100-70b,slow=4` in place of step, base and node.
`delay=20ms` puts a network in front of the target with this round-trip time; `clients=16` sends as
many requests at a time, and N requests of each. `slow` is for machines that cannot keep up; bounds
in seconds, such as 20 ms for first tokens, are as many times tighter with it. Without a CELL the six
of `make bench-paced`.

For each cell one paced target (`foretell target --pace`) and one `foretell serve` per setting, each
with a separate policy and no control group: `auto`, fixed lengths (`2` is gamma.fixed 2), `plain`
(never speculates). Blocks of 5 prompts are sent to the target itself and to each setting in turn,
with the order changing from block to block; prompts are read once, untimed, before. The first 10
requests of each setting, in which it learns, are reported apart from the rest; with several
clients, whose blocks have 4 prompts for each, it is the first block.

The target sleeps instead of computing, so the costs are the same on any machine that is not slower
than they are; the last line of a cell gives the time of steps and verify requests divided by the
requested one. --at-once N deals the settings to N targets that are used at the same time, for a
machine with cores to spare. Exits 2 if a request failed or a text is not the target's own.

Needs the exports of `make -s print-env`.
"""

import argparse
import contextlib
import json
import pathlib
import re
import subprocess
import sys

import delay
import figures
import sides
from sides import BLOCK, ROOT, Side, Wrong

CELLS = ("step=60ms,base=1.35,node=0.01,workload=rewrite,drafters=lookup,tokens=128",
         "step=60ms,base=1.35,node=0.025,workload=completion,drafters=model,tokens=128",
         "step=20ms,base=1.1,node=0.005,workload=chat,drafters=both",
         "step=20ms,base=1.5,node=0.1,workload=prose,drafters=both",
         "step=60ms,base=4,node=0.4,workload=completion,drafters=both",
         "step=20ms,base=1.35,node=0.025,workload=rewrite,drafters=both")
PACE = ("profile", "slow", "step", "base", "node", "growth", "prompt")
FIELDS = (*PACE, "workload", "drafters", "tokens", "delay", "clients")
READY = re.compile(r"target (\S+) ready on http://(\S+) ")
BACKEND = """    engine: onnx
    probe: { when: never }
"""


def read_cell(text):
    """The fields of a cell, with the checks that the target does not make itself."""
    cell = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or key not in FIELDS or key in cell:
            raise Wrong(f"{text}: {part!r}: allowed {', '.join(FIELDS)}, each once as KEY=VALUE")
        cell[key] = value
    costs = ("profile",) if "profile" in cell else ("step", "base", "node")
    for key in (*costs, "workload", "drafters"):
        if key not in cell:
            raise Wrong(f"{text}: {key} is missing")
    if cell["drafters"] not in sides.DRAFTERS:
        raise Wrong(f"{text}: drafters: allowed {', '.join(sides.DRAFTERS)}, got {cell['drafters']}")
    for key in ("tokens", "clients"):
        if not cell.get(key, "1").isdigit() or cell.get(key) == "0":
            raise Wrong(f"{text}: {key}: allowed whole numbers from 1, got {cell[key]}")
    if not re.fullmatch(r"\d+ms", cell.get("delay", "0ms")):
        raise Wrong(f"{text}: delay: allowed whole milliseconds, as 20ms, got {cell['delay']}")
    cell["path"] = sides.WORKLOADS / f"{cell['workload']}.jsonl"
    if not cell["path"].is_file():
        raise Wrong(f"{text}: no workload {cell['path']}")
    return cell


def start_target(stack, foretell, cell, lanes=None):
    pace = ",".join(f"{key}={cell[key]}" for key in PACE if key in cell)
    argv = [foretell, "target", "--model", str(ROOT / "onnx/models/target"), "--name", "foretell-target", "--listen",
            "127.0.0.1:0", "--device", "cpu", "--threads", "1", "--log-level", "error"]
    argv += ["--pace", pace] if pace else []
    argv += ["--lanes", str(lanes)] if lanes else []
    process = stack.enter_context(sides.running(argv, stdout=subprocess.PIPE, text=True))
    stack.callback(process.stdout.close)
    ready = READY.match(process.stdout.readline())
    if not ready:
        raise Wrong(f"no target at this pace: {pace}")
    return ready.group(2)


def run(text, args):
    cell = read_cell(text)
    fields = {"temperature": 0, **({"max_tokens": int(cell["tokens"])} if int(cell.get("tokens", 0)) else {})}
    prompts = [sides.changed(entry, **fields) for entry in sides.read_workload(cell["workload"])]
    clients = int(cell.get("clients", 1))
    first, size = (figures.FIRST, BLOCK) if clients == 1 else (4 * clients, 4 * clients)
    with contextlib.ExitStack() as stack:
        names = ["direct", *args.settings]
        machines = [start_target(stack, args.foretell, cell, 2 * max(clients, 8)) for _ in range(min(args.at_once, len(names)))]
        seconds = int(cell.get("delay", "0ms")[:-2]) / 1000
        targets = [stack.enter_context(delay.before(target, seconds)) if seconds else target for target in machines]
        asked = []
        for index, name in enumerate(names):
            address = target = targets[index % len(targets)]
            if name != "direct":
                policies = {"paced": sides.policy("paced", sides.DRAFTERS[cell["drafters"]], name)}
                address = sides.start_proxy(stack, args.foretell, target, BACKEND, policies, name, max(clients, 4)).address
            asked.append(Side(name, address))
        groups = [(Side("unmeasured", target), asked[index::len(targets)]) for index, target in enumerate(targets)]
        sides.measure(groups, prompts, args.requests * clients, size, clients=clients)
        answers = {side.name: side.answers for side in asked}
        by_side, against = figures.conclude(answers, first)
        return {"cell": text, "sides": by_side, "auto_over_best": against, "failures": sides.failures(answers),
                "first": first,
                "kept": [figures.kept(sides.page(target, "/metrics"), cell) for target in machines if "step" in cell]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cells", nargs="*", metavar="CELL")
    parser.add_argument("--foretell", default=str(ROOT / "target/dist/foretell"), metavar="BIN")
    parser.add_argument("--requests", type=int, default=30, metavar="N", help="requests of each side, a multiple of 5")
    parser.add_argument("--settings", type=sides.settings, default="auto,2,4,8,16,31,plain", metavar="LIST")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="targets that are used at the same time")
    parser.add_argument("--json", type=pathlib.Path, metavar="F")
    args = parser.parse_args()
    if args.requests < BLOCK or args.requests % BLOCK or args.at_once < 1:
        parser.error(f"--requests: a multiple of {BLOCK}; --at-once: at least 1")
    results, bad = [], []
    try:
        for text in args.cells or CELLS:
            read_cell(text)
        for text in args.cells or CELLS:
            results.append(run(text, args))
            figures.report(text, results[-1])
            bad += [*figures.wrong(text, results[-1]), *results[-1]["failures"][:3]]
            if args.json:
                args.json.write_text(json.dumps({"cells": results}, indent=1) + "\n")
            print()
    except Wrong as error:
        print(f"paced.py: {error}", file=sys.stderr)
        return 64
    print("\n".join(bad) if bad else "every text is the target's own")
    return 2 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
