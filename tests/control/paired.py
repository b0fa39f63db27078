#!/usr/bin/env python3
"""Two builds of the controller on the same tables and seeds, in virtual time: mean difference with its 95 % interval.

    paired.py OLD NEW [--tables NAME,NAME] [--seeds N] [--fixed] [--json FILE]

OLD and NEW are two foretell-lab. Each seed is played by both, with the same texts, arrivals and noise, so that the
difference between them does not contain the luck of the seed. One seed of one table shows nothing: a change of the
controller shifts every later random number.
"""

import argparse
import concurrent.futures
import json
import math
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
FIGURES = ("ratio", "of_best", "p50", "p95", "others_p50", "others_p95", "first_p50", "first_p95", "first_token", "computed")


def played(binary, table, seed, fixed):
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        argv = [binary, "sim", "--workload", table, "--seed", str(seed), "--json", out.name, *(["--fixed"] if fixed else [])]
        done = subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode not in (0, 2):
            raise SystemExit(f"{table}: {done.stderr}")
        return json.load(open(out.name))["tables"][0]["figures"]


def interval(values):
    """(mean, half of the 95 % interval)."""
    mean = sum(values) / len(values)
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1))
    return mean, 1.96 * spread / math.sqrt(len(values))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--tables", default="")
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--fixed", action="store_true", help="compare with fixed lengths as well (of_best)")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    names = args.tables.split(",") if args.tables else sorted(path.stem for path in HERE.glob("*.yaml"))
    report = {}
    print(f"{'table':28} {'figure':12} {'old':>8} {'new':>8} {'new - old':>18} {'worst':>7}")
    for name in names:
        table, seeds = HERE / f"{name}.yaml", range(1, args.seeds + 1)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            both = [list(pool.map(lambda seed: played(binary, table, seed, args.fixed), seeds)) for binary in (args.old, args.new)]
        for figure in FIGURES:
            pairs = [(old.get(figure), new.get(figure)) for old, new in zip(*both)]
            pairs = [pair for pair in pairs if None not in pair]
            if not pairs:
                continue
            old, new = (sum(pair[side] for pair in pairs) / len(pairs) for side in (0, 1))
            mean, half = interval([pair[1] - pair[0] for pair in pairs])
            worst = (min if figure in ("ratio", "of_best") else max)(pair[1] for pair in pairs)
            report.setdefault(name, {})[figure] = {"old": old, "new": new, "difference": mean, "half": half, "worst": worst}
            print(f"{name:28} {figure:12} {old:8.3f} {new:8.3f} {mean:+9.3f} ± {half:.3f} {worst:9.3f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
