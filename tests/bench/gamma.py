#!/usr/bin/env python3
"""Draft length and plain share of the output, by temperature and load: real controller and target.

    gamma.py [--foretell BIN] [--pace COSTS] [--workload W] [--tokens N] [--temperatures LIST] [--clients LIST]
             [--seconds S] [--json F] [--svg F]

One paced target (COSTS are those of `foretell target --pace`) and one `foretell serve` in front of
it, with both drafters, no control group and nothing learnt. A first turn at temperature 0 with each
number of clients teaches it the costs. Then every number of clients sends requests at every
temperature for S seconds; the first third of that time is not counted. Temperatures take turns
within each number of clients, so that each temperature is learnt at each load.

Per temperature and number of clients, from `usage.foretell`, as a table, as JSON, and as one SVG
with a line for each number of clients, the same as that of `foretell-lab sim`:

drafted  drafted tokens per round or plain token: gamma, with a plain token as gamma 0
gamma    drafted tokens per round; where few rounds are made, that of the few texts that have some
plain    share of the output that no round produced (a round yields the accepted tokens plus one)

Every request has a seed. This target's noise is known to the drafter, which then draws with it and
so agrees more often than a greedy one: drafts get shorter with the temperature by less than in
front of an engine with its own noise, which `foretell-lab sim` simulates at the same costs and with the
same prompts (tests/control/friendly-sampled.yaml).

Exits 2 if a request failed. Needs the exports of `make -s print-env`.
"""

import argparse
import concurrent.futures
import contextlib
import json
import pathlib
import sys
import time

import paced
import sides

PACE = "step=20ms,base=1.35,node=0.025,growth=0.02,prompt=0.1ms"
LEFT_OUT = 1 / 3


class Client:
    """One client: sends a request, waits for the end of its answer, sends the next."""

    def __init__(self, number, address, prompts, tokens):
        self.side, self.prompts, self.tokens, self.asked = sides.Side(str(number), address), prompts, tokens, number * 7

    def turn(self, temperature, seconds):
        """The answers to requests that were sent after the uncounted part, and before the end."""
        begun, kept = time.monotonic(), []
        while (at := time.monotonic() - begun) < seconds:
            entry = self.prompts[self.asked % len(self.prompts)]
            answer = self.side.ask(sides.changed(entry, temperature=temperature, seed=self.asked, max_tokens=self.tokens))
            self.asked += 1
            if at >= seconds * LEFT_OUT or "failed" in answer:
                kept.append(answer)
            if "failed" in answer:
                break
        self.side.connection.close()
        return kept


def turn(clients, temperature, seconds):
    with concurrent.futures.ThreadPoolExecutor(len(clients)) as pool:
        kept = pool.map(lambda client: client.turn(temperature, seconds), clients)
        return [answer for answers in kept for answer in answers]


def measured(temperature, clients, answers):
    """The figures of a turn."""
    whole = [answer for answer in answers if "failed" not in answer]
    rounds, drafted, accepted, tokens = (sum(a[key] for a in whole) for key in ("rounds", "drafted", "accepted", "tokens"))
    plain = tokens - accepted - rounds
    ends = {}
    for answer in whole:
        how = f"{answer['path']} ({answer['reason']})" if answer["reason"] else answer["path"] or "direct"
        ends[how] = ends.get(how, 0) + 1
    return {"temperature": temperature, "clients": clients, "requests": len(whole), "failed": len(answers) - len(whole),
            "tokens": tokens, "rounds": rounds, "drafted": drafted / (rounds + plain) if tokens else None,
            "gamma": drafted / rounds if rounds else None, "accepted": accepted / rounds if rounds else None,
            "plain": plain / tokens if tokens else None,
            "seconds_per_token": sum(a["seconds"] for a in whole) / tokens if tokens else None, "ends": ends}


def run(args):
    cell = {part.partition("=")[0]: part.partition("=")[2] for part in args.pace.split(",")}
    prompts = sides.read_workload(args.workload)
    policies = {"gamma": sides.policy("gamma", sides.DRAFTERS["both"], "auto")}
    cells = []
    with contextlib.ExitStack() as stack:
        target = paced.start_target(stack, args.foretell, cell)
        proxy = sides.start_proxy(stack, args.foretell, target, paced.BACKEND, policies, "auto", max(args.clients))
        clients = [Client(number, proxy.address, prompts, args.tokens) for number in range(max(args.clients))]
        for count in args.clients:
            turn(clients[:count], 0, args.seconds)
        for count in args.clients:
            for temperature in args.temperatures:
                cells.append(measured(temperature, count, turn(clients[:count], temperature, args.seconds)))
                say(cells[-1])
    return cells


# ----------------------------------------------------------------------------------------- showing

HEADING = f"{'clients':>7}  {'T':>4}  {'requests':>8}  {'rounds':>6}  {'drafted':>7}  {'gamma':>6}  {'accepted':>8}  {'plain':>6}  ms/token  ended"


def number(value, form):
    return "–" if value is None else format(value, form)


def say(cell):
    ends = ", ".join(f"{how} {times}" for how, times in sorted(cell["ends"].items(), key=lambda end: -end[1]))
    milliseconds = cell["seconds_per_token"] and cell["seconds_per_token"] * 1e3
    print(f"{cell['clients']:>7}  {cell['temperature']:>4}  {cell['requests']:>8}  {cell['rounds']:>6}  "
          f"{number(cell['drafted'], '.2f'):>7}  {number(cell['gamma'], '.2f'):>6}  {number(cell['accepted'], '.2f'):>8}  "
          f"{number(cell['plain'], '.0%'):>6}  {number(milliseconds, '.1f'):>8}  {ends}", flush=True)


INK, SOFT, LINE, LINES = "#1f2933", "#66727f", "#d9dee4", ("#0b7a75", "#2563eb", "#c2410c", "#7c3aed", "#a16207")
TOP, BOTTOM = 62, 300


def panel(left, right, title, most, label, cells, key):
    """One plot over the temperature, with a line for each number of clients."""
    hottest = max(max(cell["temperature"] for cell in cells), 0.1)
    temperatures = sorted({cell["temperature"] for cell in cells})
    counts = sorted({cell["clients"] for cell in cells})

    def x(temperature):
        return left + 14 + (right - left - 28) * temperature / hottest

    def y(value):
        return BOTTOM - (BOTTOM - TOP) * value / most

    yield f'<text x="{left}" y="{TOP - 14}" fill="{INK}">{title}</text>'
    for step in range(5):
        at = y(most * step / 4)
        yield f'<line x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="{LINE}"/>'
        yield f'<text x="{left - 6}" y="{at + 4:.1f}" fill="{SOFT}" text-anchor="end">{label(most * step / 4)}</text>'
    for temperature in temperatures:
        yield f'<text x="{x(temperature):.1f}" y="{BOTTOM + 18}" fill="{SOFT}" text-anchor="middle">T={temperature}</text>'
    for index, count in enumerate(counts):
        ink = LINES[index % len(LINES)]
        points = [(x(cell["temperature"]), y(cell[key])) for cell in cells if cell["clients"] == count and cell[key] is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in sorted(points))
        yield f'<polyline fill="none" stroke="{ink}" stroke-width="2" points="{path}"/>'
        for at, value in points:
            yield f'<circle cx="{at:.1f}" cy="{value:.1f}" r="3.5" fill="{ink}"/>'


def drawn(cells, title):
    """One SVG with three panels: gamma with plain tokens as 0, gamma of rounds, plain share."""
    longest = max((cell["gamma"] or 0 for cell in cells), default=0)
    most = next(most for most in (2, 4, 8, 12, 16, 24, 32) if most >= longest)
    counts = sorted({cell["clients"] for cell in cells})
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {BOTTOM + 30}" font-family="system-ui, sans-serif" '
           f'font-size="13"><rect width="100%" height="100%" fill="#fff"/><text x="44" y="20" fill="{INK}">{title}</text>']
    for index, count in enumerate(counts):
        ink, left = LINES[index % len(LINES)], 740 + 50 * index
        svg.append(f'<circle cx="{left}" cy="16" r="4" fill="{ink}"/><text x="{left + 8}" y="20" fill="{SOFT}">{count}'
                   f'{" clients" if index == len(counts) - 1 else ""}</text>')
    svg += panel(36, 300, "gamma, plain is 0", most, lambda value: f"{value:g}", cells, "drafted")
    svg += panel(356, 620, "gamma of rounds", most, lambda value: f"{value:g}", cells, "gamma")
    svg += panel(686, 950, "plain, of the output", 1, lambda value: f"{value:.0%}", cells, "plain")
    return "\n".join(svg) + "\n</svg>\n"


def numbers(kind, least):
    def read(text):
        values = [kind(part) for part in text.split(",")]
        if min(values) < least or len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"allowed different numbers from {least} on, got {text}")
        return values
    return read


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--foretell", default=str(sides.ROOT / "target/dist/foretell"), metavar="BIN")
    parser.add_argument("--pace", default=PACE, metavar="COSTS")
    parser.add_argument("--workload", default="prose", metavar="W")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="maximum tokens of an output")
    parser.add_argument("--temperatures", type=numbers(float, 0), default="0,0.4,0.7,1.0", metavar="LIST")
    parser.add_argument("--clients", type=numbers(int, 1), default="1,4,16", metavar="LIST")
    parser.add_argument("--seconds", type=float, default=45, metavar="S", help="for each temperature and number of clients")
    parser.add_argument("--json", type=pathlib.Path, metavar="F")
    parser.add_argument("--svg", type=pathlib.Path, metavar="F")
    args = parser.parse_args()
    print(f"{args.workload}, {args.tokens} tokens, {args.pace}, both drafters\n{HEADING}", flush=True)
    try:
        cells = run(args)
    except (sides.Wrong, OSError) as error:
        print(f"gamma.py: {error}", file=sys.stderr)
        return 64
    if args.json:
        args.json.write_text(json.dumps({"pace": args.pace, "workload": args.workload, "tokens": args.tokens,
                                         "cells": cells}, indent=1) + "\n")
    if args.svg:
        args.svg.write_text(drawn(cells, f"{args.workload}, {args.pace}"))
    failed = sum(cell["failed"] for cell in cells)
    if failed:
        print(f"{failed} requests failed")
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
