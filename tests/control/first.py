#!/usr/bin/env python3
"""What the control group costs a new user's first 50 requests, in virtual time: speed with it ÷ without it.

    first.py LAB [--seeds N]    LAB is a foretell-lab; exits 2 if a table is below 0.97
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile

REQUESTS = 50
LEAST = 0.97
ENGINES = {
    "paced": "paced: { step: 20ms, base: 1.1, node: 0.005 }",
    "cpu": "paced: { step: 40ms, base: 1.5, node: 0.1 }",
    "70b": "profile: h100-70b",
}
TRAFFIC = {"rewrite": (1, "rewrite"), "chat": (1, "chat"), "prose": (1, "prose"), "eight": (8, "rewrite")}
TABLE = """version: 1
name: {name}
about: the first requests
for: {seconds}s
seeds: {seeds}
engine: {{ {engine} }}
policy: |
  version: 1
  name: default
  holdback: {{ start: {start}, floor: {floor} }}
traffic:
  - {{ whose: ours, clients: {clients}, text: {text} }}
expect:
  ratio: {{ min: 0.01 }}
"""


def played(lab, out, tables):
    """By name: (speed ÷ plain, requests of a seed)."""
    files = []
    for name, keys in tables.items():
        files.append(out / f"{name}.yaml")
        files[-1].write_text(TABLE.format(name=name, **keys))
    said = subprocess.run([lab, "sim", "--workload", ",".join(map(str, files)), "--json", out / "out.json"], check=True, stdout=subprocess.PIPE, text=True).stdout
    requests = [int(found) for found in re.findall(r"(\d+) requests", said)]
    report = json.load(open(out / "out.json"))["tables"]
    return {table["name"]: (table["figures"]["ratio"], count / keys["seeds"]) for table, count, keys in zip(report, requests, tables.values())}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lab")
    parser.add_argument("--seeds", type=int, default=30)
    args = parser.parse_args()
    cells = {f"{engine}-{text}": (ENGINES[engine], *TRAFFIC[text]) for engine in ENGINES for text in TRAFFIC}

    def tables(seconds, seeds, start, floor):
        keys = ("engine", "clients", "text")
        return {name: {**dict(zip(keys, cell)), "seconds": seconds[name], "seeds": seeds, "start": start, "floor": floor} for name, cell in cells.items()}

    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder)
        (out / "traces").symlink_to(pathlib.Path(__file__).parent.resolve() / "traces")
        trial_run = played(args.lab, out, tables(dict.fromkeys(cells, 60), 1, 0, 0))
        seconds = {name: max(2, round(60 * REQUESTS / count)) for name, (_, count) in trial_run.items()}
        without, with_group = (played(args.lab, out, tables(seconds, args.seeds, *share)) for share in ((0, 0), (0.2, 0.002)))
    kept = {name: with_group[name][0] / without[name][0] for name in cells}
    for name, share in kept.items():
        print(f"{name:16} ÷ plain {without[name][0]:.2f}, with its control group {with_group[name][0]:.2f}: {share:.3f}, {with_group[name][1]:.0f} requests")
    print(f"least {min(kept.values()):.3f}, at least {LEAST} is required")
    return 0 if min(kept.values()) >= LEAST else 2


if __name__ == "__main__":
    sys.exit(main())
