#!/usr/bin/env python3
"""Effect of speculation on all clients of a busy server: Foretell in `auto` against mode `off`.

    concurrency.py [--foretell BIN] [--model DIR] [--pace COSTS] [--clients N] [--direct SHARE] [--workload W] [--tokens N]
             [--requests N] [--turns N] [--json F]

One target (`foretell target`, paced where COSTS are given) and two `foretell serve` in front of it,
one that speculates as its controller decides and one that only passes requests through; no control group. N clients
send requests at the same time, each its next prompt when the last one is answered: a SHARE of them
to the target itself, the others to Foretell. Turns of N requests per client alternate, auto off off
auto, after one of each that is not counted. Compared are the clients of Foretell in `auto` with
those in `off`, and the direct ones during `auto` with those during `off`: tokens per second of a
client, in brackets minimum and maximum of the pairs of turns; the first token's 95th percentile;
and the answers that were not complete.

Exits 2 if a client of Foretell gets less than 0.98 of its speed in `off` (0.95 in a pair of turns)
or its first token takes more than 1.05 times as long, a direct one loses more than 2 %, or a
request fails or ends by a fault of a verify request. Needs the exports of `make -s print-env`.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import json
import pathlib
import subprocess
import sys

import paced
import sides

RATIO, PAIR, FIRST, DIRECT = 0.98, 0.95, 1.05, 0.98
FAULT = "verify_fault"


def start_target(stack, args):
    argv = [args.foretell, "target", "--model", str(args.model), "--name", "foretell-target", "--listen", "127.0.0.1:0",
            "--device", "cpu", "--log-level", "error", "--lanes", str(max(args.clients, 8))]
    if args.pace:
        argv += ["--threads", "1", "--pace", args.pace]
    process = stack.enter_context(sides.running(argv, stdout=subprocess.PIPE, text=True))
    stack.callback(process.stdout.close)
    ready = paced.READY.match(process.stdout.readline())
    if not ready:
        raise sides.Wrong("the target did not start")
    return ready.group(2)


def turn(target, proxy, prompts, args, number):
    """The answers of one turn: of the clients of Foretell, and of the direct clients of the
    target."""
    direct = round(args.clients * args.direct)

    def client(index):
        side = sides.Side(str(index), target if index < direct else proxy)
        first = (number * args.clients + index) * args.requests
        asked = [prompts[(first + nth) % len(prompts)] for nth in range(args.requests)]
        answers = [side.ask(sides.changed(entry, max_tokens=args.tokens, temperature=0)) for entry in asked]
        side.connection.close()
        return answers

    with concurrent.futures.ThreadPoolExecutor(args.clients) as pool:
        answers = list(pool.map(client, range(args.clients)))
    both = {"direct": answers[:direct], "through": answers[direct:]}
    return {group: [answer for client in clients for answer in client] for group, clients in both.items()}


def speed(answers):
    """Tokens per second of a client."""
    whole = [answer for answer in answers if "failed" not in answer]
    return sum(a["tokens"] for a in whole) / sum(a["seconds"] for a in whole) if whole else None


def late(answers):
    """The 95th percentile of the seconds to the first token."""
    firsts = sorted(a["first"] for a in answers if a.get("first") is not None)
    return firsts[min(int(0.95 * len(firsts)), len(firsts) - 1)] if firsts else None


def compared(auto, off):
    """The same clients in turns of `auto` and of `off`, pair by pair."""
    pairs = [speed(with_auto) / speed(with_off) for with_auto, with_off in zip(auto, off)]
    auto, off = (sum(turns, []) for turns in (auto, off))
    ends = collections.Counter(f"{a['path']} ({a['reason']})" if a["reason"] else a["path"] or "direct"
                               for a in auto if "failed" not in a)
    return {"auto": speed(auto), "off": speed(off), "ratio": speed(auto) / speed(off), "low": min(pairs), "high": max(pairs),
            "first_auto": late(auto), "first_off": late(off), "first": late(auto) / late(off), "requests": len(auto),
            "failed": sum("failed" in a for a in auto + off), "faults": sum(a.get("reason") == FAULT for a in auto),
            "ends": dict(ends.most_common())}


def short(groups):
    """Figures beyond their bounds, in words."""
    for name, group in groups.items():
        if group["failed"] or group["faults"]:
            yield f"{name}: {group['failed']} failed, {group['faults']} ended by a fault of a verify request"
    through, direct = groups.get("through"), groups.get("direct")
    if through and through["ratio"] < RATIO:
        yield f"through: {through['ratio']:.3f} of mode off, at least {RATIO}"
    if through and through["low"] < PAIR:
        yield f"through: {through['low']:.3f} of mode off in a pair of turns, at least {PAIR}"
    if through and through["first"] > FIRST:
        yield f"through: first token p95 {through['first']:.3f} of mode off, at most {FIRST}"
    if direct and direct["ratio"] < DIRECT:
        yield f"direct: {direct['ratio']:.3f} of that during mode off, at least {DIRECT}"


def run(args):
    prompts = sides.read_workload(args.workload)
    with contextlib.ExitStack() as stack:
        target = start_target(stack, args)
        proxies = {}
        for mode in ("auto", "off"):
            policies = {"all": sides.policy("all", sides.DRAFTERS["both"], mode)}
            proxy = sides.start_proxy(stack, args.foretell, target, paced.BACKEND, policies, mode, max(args.clients, 4))
            proxies[mode] = proxy.address
        for mode, address in proxies.items():
            turn(target, address, prompts, args, 0)
        turns = {"auto": [], "off": []}
        for number in range(args.turns):
            for mode in ("auto", "off") if number % 2 == 0 else ("off", "auto"):
                turns[mode].append(turn(target, proxies[mode], prompts, args, number))
            if sys.stderr.isatty():
                print(f"\r{number + 1} of {args.turns} pairs of turns", end="", file=sys.stderr)
        of = {group: [[one[group] for one in turns[mode]] for mode in ("auto", "off")] for group in ("through", "direct")}
        return {group: compared(auto, off) for group, (auto, off) in of.items() if auto[0]}


def report(args, groups):
    where = f"paced {args.pace}" if args.pace else args.model.name
    print(f"{args.workload}, {args.clients} clients, {round(args.clients * args.direct)} of them direct, {where}, "
          f"{args.turns} pairs of turns of {args.requests} requests a client")
    print(f"{'clients':8} {'off tok/s':>9} {'auto tok/s':>10}  auto ÷ off          {'first p95':>9} {'':>6}  ended")
    for name, group in groups.items():
        ends = ", ".join(f"{how} {times}" for how, times in group["ends"].items())
        print(f"{name:8} {group['off']:9.1f} {group['auto']:10.1f}  {group['ratio']:.2f} ({group['low']:.2f} – {group['high']:.2f})  "
              f"{group['first_auto'] * 1e3:6.0f} ms {group['first']:6.2f}  {ends}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--foretell", default=str(sides.ROOT / "target/dist/foretell"), metavar="BIN")
    parser.add_argument("--model", type=pathlib.Path, default=sides.ROOT / "onnx/models/target", metavar="DIR")
    parser.add_argument("--pace", metavar="COSTS")
    parser.add_argument("--clients", type=int, default=16, metavar="N")
    parser.add_argument("--direct", type=float, default=0.5, metavar="SHARE", help="of the clients")
    parser.add_argument("--workload", default="completion", metavar="W")
    parser.add_argument("--tokens", type=int, default=48, metavar="N", help="maximum tokens of an output")
    parser.add_argument("--requests", type=int, default=4, metavar="N", help="of each client in a turn")
    parser.add_argument("--turns", type=int, default=6, metavar="N", help="pairs of turns")
    parser.add_argument("--json", type=pathlib.Path, metavar="F")
    args = parser.parse_args()
    if args.clients < 1 or args.requests < 1 or args.turns < 1 or not 0 <= args.direct <= 1:
        parser.error("--clients, --requests, --turns: at least 1; --direct: 0 to 1")
    try:
        groups = run(args)
    except sides.Wrong as error:
        print(f"concurrency.py: {error}", file=sys.stderr)
        return 64
    report(args, groups)
    if args.json:
        args.json.write_text(json.dumps({"arguments": {k: str(v) for k, v in vars(args).items()}, "groups": groups}, indent=1) + "\n")
    wrong = list(short(groups))
    print("\n".join(wrong) if wrong else "all figures are within their bounds")
    return 2 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
