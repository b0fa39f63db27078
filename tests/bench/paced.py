#!/usr/bin/env python3
"""What the controller makes of a machine whose costs are given: leaping as it sees fit against fixed lengths and riding.

    paced.py [--foretell BIN] [--requests N] [--settings LIST] [--at-once N] [--json F] [CELL ...]

A CELL is `step=60ms,base=1.35,node=0.025,workload=completion,drafters=model,tokens=128`: a plain step takes `step`, a verify
call of n drafted tokens step·(base + node·n); drafters are lookup, model or both. Without `tokens` each prompt keeps its own
limit; `growth` and `prompt` are those of `foretell target --pace`. Without a CELL the six of `make bench-paced`.

For each cell one paced target (`foretell target --pace`) and one `foretell serve` per setting, each with a policy of its own
and no control group: `auto`, fixed lengths (`2` is gamma.fixed 2), `ride` (never leaps). Blocks of 5 prompts are sent to the
target itself and to each setting in turn, who goes first changes from block to block; prompts are read once, untimed,
before. The first 10 requests of each setting, in which it learns, are reported apart from the rest.

The target sleeps instead of computing, so the costs are the same on any machine that is not slower than they are; the last
line of a cell says how long steps and verify calls took compared with what was asked for. --at-once N deals the settings to
N targets that are asked at the same time, for a machine with cores to spare. Exits 2 if a request failed or a text is not
that of the target asked directly.

Needs the exports of `make -s print-env`.
"""

import argparse
import concurrent.futures
import contextlib
import http.client
import json
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

import figures

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CELLS = ("step=60ms,base=1.35,node=0.01,workload=rewrite,drafters=lookup,tokens=128",
         "step=60ms,base=1.35,node=0.025,workload=completion,drafters=model,tokens=128",
         "step=20ms,base=1.1,node=0.005,workload=chat,drafters=both",
         "step=20ms,base=1.5,node=0.1,workload=prose,drafters=both",
         "step=60ms,base=4,node=0.4,workload=completion,drafters=both",
         "step=20ms,base=1.35,node=0.025,workload=rewrite,drafters=both")
LOOKUP = "{ kind: prompt_lookup, ngram: { min: 2, max: 8 } }"
MODEL = "{ kind: model, model: draft-same, vocabulary: same }"
DRAFTERS = {"lookup": LOOKUP, "model": MODEL, "both": f"{LOOKUP}, {MODEL}"}
PACE = ("step", "base", "node", "growth", "prompt")
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
READY = re.compile(r"target (\S+) ready on http://(\S+) ")
BLOCK = 5
PROCESS = """version: 1
listen: [{{ address: "127.0.0.1:{port}" }}]
admin: {{ address: "127.0.0.1:{admin}" }}
backends:
  - name: target
    dialect: onnx
    replicas: ["http://{target}"]
    probe: {{ when: never }}
drafters: {{ draft-same: {{ path: {root}/onnx/models/draft-same, slots: {slots}, context: 2048 }} }}
policies: {{ dir: {policies} }}
drain: {{ delay: 0s, grace: 1s }}
observe: {{ log: text, level: error }}
"""
POLICY = """version: 1
name: paced
mode: {mode}
drafters: [{drafters}]
gamma: {{ max: 32, fixed: {fixed} }}
accept: {{ rule: exact }}
holdback: {{ start: 0, floor: 0 }}
"""


class Wrong(Exception):
    """A cell or a setting that cannot be run."""


def read_cell(text):
    """The fields of a cell, checked as far as the target does not check them itself."""
    cell = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or key not in (*PACE, "workload", "drafters", "tokens") or key in cell:
            raise Wrong(f"{text}: {part!r}: allowed {', '.join(PACE)}, workload, drafters, tokens, each once as KEY=VALUE")
        cell[key] = value
    for key in ("step", "base", "node", "workload", "drafters"):
        if key not in cell:
            raise Wrong(f"{text}: {key} is missing")
    if cell["drafters"] not in DRAFTERS:
        raise Wrong(f"{text}: drafters: allowed {', '.join(DRAFTERS)}, got {cell['drafters']}")
    if not cell.get("tokens", "1").isdigit():
        raise Wrong(f"{text}: tokens: not a number")
    cell["path"] = ROOT / "tests/workloads" / f"{cell['workload']}.jsonl"
    if not cell["path"].is_file():
        raise Wrong(f"{text}: no workload {cell['path']}")
    return cell


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def page(address, path):
    with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
        return answer.read().decode()


# ------------------------------------------------------------------------------------------------ processes

@contextlib.contextmanager
def running(argv, **more):
    process = subprocess.Popen(argv, **more)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def start_target(stack, foretell, cell):
    pace = ",".join(f"{key}={cell[key]}" for key in PACE if key in cell)
    argv = [foretell, "target", "--model", str(ROOT / "onnx/models/target"), "--name", "foretell-target", "--listen",
            "127.0.0.1:0", "--device", "cpu", "--threads", "1", "--log-level", "error", "--pace", pace]
    process = stack.enter_context(running(argv, stdout=subprocess.PIPE, text=True))
    stack.callback(process.stdout.close)
    ready = READY.match(process.stdout.readline())
    if not ready:
        raise Wrong(f"no target at this pace: {pace}")
    return ready.group(2)


def start_proxy(stack, foretell, target, cell, setting):
    folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    (folder / "policies").mkdir()
    policy = POLICY.format(mode="ride" if setting == "ride" else "auto", drafters=DRAFTERS[cell["drafters"]],
                           fixed=setting if setting.isdigit() else "null")
    (folder / "policies" / "paced.yaml").write_text(policy)
    port, admin = free_port(), free_port()
    path = folder / "foretell.yaml"
    path.write_text(PROCESS.format(port=port, admin=admin, target=target, root=ROOT, policies=folder / "policies",
                                   slots=cell.get("slots", 4)))
    process = stack.enter_context(running([foretell, "serve", "--config", str(path)], stdout=subprocess.DEVNULL))
    for _ in range(300):
        if process.poll() is not None:
            raise Wrong(f"foretell serve ended with {process.returncode} for setting {setting}")
        with contextlib.suppress(OSError):
            page(f"127.0.0.1:{admin}", "/readyz")
            return f"127.0.0.1:{port}"
        time.sleep(0.1)
    raise Wrong(f"foretell serve is not ready for setting {setting}")


# ------------------------------------------------------------------------------------------------ asking

class Side:
    """One way to ask: the target itself or a setting. Keeps its connection and its answers."""

    def __init__(self, name, address):
        self.name, self.address, self.answers = name, address, []
        self.connection = http.client.HTTPConnection(address, timeout=600)

    def ask(self, entry, tokens, **sampling):
        """The answer to a prompt as it came: text, seconds to the first and the last event, what the usage tells."""
        body = {**entry["body"], "stream": True, "stream_options": {"include_usage": True}, "temperature": 0, **sampling}
        if tokens:
            body["max_tokens"] = tokens
        begun, lines = time.perf_counter(), []
        try:
            self.connection.request("POST", PATHS[entry["route"]], json.dumps(body), {"content-type": "application/json"})
            answer = self.connection.getresponse()
            while line := answer.readline():
                if line.startswith(b"data: "):
                    lines.append((time.perf_counter() - begun, line[6:].strip()))
        except (OSError, http.client.HTTPException) as error:
            self.connection.close()
            return {"failed": str(error) or type(error).__name__}
        if answer.status != 200 or not lines or lines[-1][1] != b"[DONE]":
            return {"failed": f"HTTP {answer.status}, {len(lines)} events, not complete"}
        return understood(lines)


def understood(lines):
    text, usage, first = "", {}, None
    for at, data in lines[:-1]:
        chunk = json.loads(data)
        if "error" in chunk:
            return {"failed": json.dumps(chunk["error"])}
        for choice in chunk.get("choices", []):
            piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
            first = at if piece and first is None else first
            text += piece
        usage = chunk.get("usage") or usage
    told = usage.get("foretell") or {}
    return {"text": text, "tokens": usage["completion_tokens"], "first": first, "seconds": lines[-1][0],
            "path": told.get("path"), "reason": told.get("reason"), "rounds": told.get("rounds", 0),
            "drafted": told.get("drafted", 0), "accepted": told.get("accepted", 0)}


def measure(groups, prompts, tokens, requests):
    """Sends blocks of prompts to all groups at the same time: to the target, unmeasured, then to its sides in turn."""
    def block(group, number, entries):
        target, group = group
        target.connection.close()
        for entry in entries:
            target.ask(entry, 1)
        turn = number % len(group)
        for side in group[turn:] + group[:turn]:
            side.connection.close()  # what was idle for some blocks may have been closed at the other end
            side.answers += [side.ask(entry, tokens) for entry in entries]

    with concurrent.futures.ThreadPoolExecutor(len(groups)) as pool:
        for number in range(requests // BLOCK):
            entries = [prompts[place % len(prompts)] for place in range(number * BLOCK, (number + 1) * BLOCK)]
            list(pool.map(lambda group: block(group, number, entries), groups))
            if sys.stderr.isatty():
                print(f"\r{(number + 1) * BLOCK} of {requests} requests a side", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr)


def run(text, args):
    cell = read_cell(text)
    prompts = [json.loads(line) for line in cell["path"].read_text().splitlines() if line.strip()]
    with contextlib.ExitStack() as stack:
        names = ["direct", *args.settings]
        targets = [start_target(stack, args.foretell, cell) for _ in range(min(args.at_once, len(names)))]
        sides = []
        for place, name in enumerate(names):
            target = targets[place % len(targets)]
            address = target if name == "direct" else start_proxy(stack, args.foretell, target, cell, name)
            sides.append(Side(name, address))
        groups = [(Side("unmeasured", target), sides[place::len(targets)]) for place, target in enumerate(targets)]
        measure(groups, prompts, int(cell.get("tokens", 0)), args.requests)
        answers = {side.name: side.answers for side in sides}
        sides, against = figures.conclude(answers)
        failed = [f"{name}: {a['failed']}" for name, given in answers.items() for a in given if "failed" in a]
        return {"cell": text, "sides": sides, "auto_over_best": against, "failures": failed,
                "kept": [figures.kept(page(target, "/metrics"), cell) for target in targets]}


def settings(text):
    names = text.split(",")
    for name in names:
        if name not in ("auto", "ride") and not (name.isdigit() and 1 <= int(name) <= 32):
            raise argparse.ArgumentTypeError(f"allowed auto, ride, 1 to 32, got {name!r}")
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError("a setting is given twice")
    return names


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cells", nargs="*", metavar="CELL")
    parser.add_argument("--foretell", default=str(ROOT / "target/dist/foretell"), metavar="BIN")
    parser.add_argument("--requests", type=int, default=30, metavar="N", help="requests of each side, a multiple of 5")
    parser.add_argument("--settings", type=settings, default="auto,2,4,8,16,31,ride", metavar="LIST")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="targets that are asked at the same time")
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
    print("\n".join(bad) if bad else "every text is that of the target asked directly")
    return 2 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
