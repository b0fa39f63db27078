#!/usr/bin/env python3
"""Reloads under load: their effect on requests, and the time until a change is active.

    reload.py [--foretell BIN] [--reloads N] [--clients N] [--seconds S] [--changes N]

One paced target, one `foretell serve` in front of it. Clients send requests without a pause. Turns
of S seconds with reloads (a file renamed over, then `POST /api/reload`) and without alternate until
N reloads are made. Every answer has to be complete and name one policy revision, in the header and
in `usage.foretell`, that was in force during the request.

Then N changes of each kind: written in place, renamed over, and swapped as a Kubernetes ConfigMap
does; the time from the file's being in place to its revision's being in `/api/policies`.

Exits 2 if a request failed or named another revision, if the ratio of medians has an interval
without 1, or if a change took more than a second. Needs the exports of `make -s print-env`.
"""

import argparse
import contextlib
import hashlib
import http.client
import json
import pathlib
import random
import statistics
import sys
import threading
import time
import urllib.request

import paced
import sides

PACE = "step=5ms,base=1.35,node=0.025,prompt=0.1ms"


def policy(number):
    """A policy with a separate revision and the same effect as all others."""
    return sides.policy("reloaded", sides.DRAFTERS["lookup"], "auto") + f"# {number}\n"


def label(text):
    return "reloaded@" + hashlib.sha256(text.encode()).hexdigest()[:8]


class Client(threading.Thread):
    def __init__(self, address, prompts, number, state):
        super().__init__(daemon=True)
        self.connection = http.client.HTTPConnection(address, timeout=60)
        self.prompts, self.number, self.state, self.times, self.wrong = prompts, number, state, [], []

    def run(self):
        while not self.state["over"]:
            entry = self.prompts[self.number % len(self.prompts)]
            body = {**entry["body"], "temperature": 0, "max_tokens": 24, "stream": False}
            self.number += 1
            begun, known = time.perf_counter(), len(self.state["labels"])
            try:
                self.connection.request("POST", sides.PATHS[entry["route"]], json.dumps(body), {"content-type": "application/json"})
                answer = self.connection.getresponse()
                reply = json.loads(answer.read())
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.wrong.append(str(error) or type(error).__name__)
                continue
            self.times.append((self.state["turn"], time.perf_counter() - begun))
            name = answer.headers.get("x-foretell-policy")
            allowed = self.state["labels"][max(known - 2, 0):]
            # Only speculated answers have it in their usage.
            said = reply.get("usage", {}).get("foretell", {}).get("policy", name)
            if answer.status != 200 or name not in allowed or said != name:
                self.wrong.append(f"HTTP {answer.status}, {name}")


def command(admin, path):
    with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{admin}{path}", data=b""), timeout=30) as answer:
        return json.load(answer)


def renamed(path, text):
    new = path.with_suffix(".tmp")
    new.write_text(text)
    new.replace(path)


def swapped(folder, number, text):
    """As the kubelet does it."""
    data = folder / f"..data_{number}"
    data.mkdir()
    (data / "reloaded.yaml").write_text(text)
    link = folder / "..data_tmp"
    link.symlink_to(data.name)
    link.replace(folder / "..data")
    file = folder / "reloaded.yaml"
    if not file.is_symlink():
        file.unlink()
        file.symlink_to("..data/reloaded.yaml")


def until_active(admin, text):
    begun, wanted = time.perf_counter(), label(text).split("@")[1]
    while time.perf_counter() - begun < 30:
        reply = json.loads(sides.page(f"127.0.0.1:{admin}", "/api/policies"))
        if reply["policies"][0]["revision"] == wanted:
            return time.perf_counter() - begun
        time.sleep(0.005)
    raise sides.Wrong("a change was never active")


def interval(with_reloads, without):
    """Ratio of medians and its 95 % interval by the bootstrap."""
    rng, ratios = random.Random(1), []
    for _ in range(1000):
        a, b = (statistics.median(rng.choices(times, k=len(times))) for times in (with_reloads, without))
        ratios.append(a / b)
    ratios.sort()
    return statistics.median(with_reloads) / statistics.median(without), ratios[24], ratios[974]


def run(args):
    found, prompts = [], sides.read_workload("completion")
    with contextlib.ExitStack() as stack:
        cell = {part.partition("=")[0]: part.partition("=")[2] for part in PACE.split(",")}
        target = paced.start_target(stack, args.foretell, cell)
        proxy = sides.start_proxy(stack, args.foretell, target, paced.BACKEND, {"reloaded": policy(0)}, "auto", args.clients)
        folder = pathlib.Path(json.loads(sides.page(f"127.0.0.1:{proxy.admin}", "/api/policies"))["dir"])
        state = {"over": False, "turn": "without", "labels": [label(policy(0))]}
        clients = [Client(proxy.address, prompts, number, state) for number in range(args.clients)]
        for client in clients:
            client.start()
        made, turns = 0, 0
        time.sleep(args.seconds)
        for client in clients:
            client.times.clear()
        while made < args.reloads:
            state["turn"] = "with"
            until, pause = time.monotonic() + args.seconds, args.seconds * args.turns / args.reloads
            while time.monotonic() < until and made < args.reloads:
                made += 1
                text = policy(made)
                state["labels"].append(label(text))
                renamed(folder / "reloaded.yaml", text)
                command(proxy.admin, "/api/reload")
                time.sleep(pause / 2)
            state["turn"] = "without"
            time.sleep(args.seconds)
            turns += 1
        state["over"] = True
        for client in clients:
            client.join()
        wrong = [line for client in clients for line in client.wrong]
        times = {turn: [t for client in clients for which, t in client.times if which == turn] for turn in ("with", "without")}
        ratio, low, high = interval(times["with"], times["without"])
        print(f"{made} reloads in {turns} turns, {len(times['with'])} requests with and {len(times['without'])} without: {len(wrong)} wrong; "
              f"median with ÷ without {ratio:.3f} ({low:.3f} to {high:.3f})", flush=True)
        found += wrong[:10]
        if not low <= 1 <= high:
            found.append(f"reloads change the median: {ratio:.3f} ({low:.3f} to {high:.3f})")
        number = made
        for name in ("written", "renamed", "swapped"):
            took = []
            for _ in range(args.changes):
                number += 1
                text = policy(number)
                if name == "written":
                    (folder / "reloaded.yaml").write_text(text)
                elif name == "renamed":
                    renamed(folder / "reloaded.yaml", text)
                else:
                    swapped(folder, number, text)
                took.append(until_active(proxy.admin, text))
                time.sleep(random.Random(number).uniform(0, 0.3))
            print(f"{name}: active after {statistics.median(took) * 1e3:.0f} ms, {max(took) * 1e3:.0f} ms at most, of {len(took)}", flush=True)
            if max(took) > 1:
                found.append(f"{name}: {max(took):.2f} s")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--foretell", default=str(sides.ROOT / "target/dist/foretell"), metavar="BIN")
    parser.add_argument("--reloads", type=int, default=1000, metavar="N")
    parser.add_argument("--turns", type=int, default=10, metavar="N", help="over which they are spread")
    parser.add_argument("--clients", type=int, default=4, metavar="N")
    parser.add_argument("--seconds", type=float, default=5, metavar="S", help="of a turn")
    parser.add_argument("--changes", type=int, default=20, metavar="N", help="of each kind")
    args = parser.parse_args()
    try:
        found = run(args)
    except (sides.Wrong, OSError) as error:
        print(f"reload.py: {error}", file=sys.stderr)
        return 64
    for line in found:
        print(line)
    return 2 if found else 0


if __name__ == "__main__":
    sys.exit(main())
