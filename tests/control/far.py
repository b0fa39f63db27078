#!/usr/bin/env python3
"""The controller behind long round trips, in virtual time: speed ÷ plain and ÷ the best fixed length.

    far.py LAB          LAB is a foretell-lab; exits 2 if a cell is below 0.95 of the best fixed length
"""

import itertools
import pathlib
import re
import subprocess
import sys
import tempfile

TABLE = """version: 1
name: {name}
about: rewriting, one client
for: 200s
engine: {{ paced: {{ step: {step}ms, base: {base}, node: {node} }} }}
network: {{ rtt: {rtt}ms }}
verify: [score]
drafters: lookup
traffic:
  - {{ whose: ours, clients: 1, text: rewrite }}
expect:
  ratio: {{ min: 1 }}
  of_best: {{ min: 0.95 }}
"""

with tempfile.TemporaryDirectory() as folder:
    out = pathlib.Path(folder)
    (out / "traces").symlink_to(pathlib.Path(__file__).parent.resolve() / "traces")
    tables = []
    for rtt, step, base, node in itertools.product((30, 80), (15, 40), (1.1, 1.35), (0.005, 0.02)):
        name = f"far-{rtt}-{step}-{base}-{node}"
        tables.append(out / f"{name}.yaml")
        tables[-1].write_text(TABLE.format(name=name, rtt=rtt, step=step, base=base, node=node))
    done = subprocess.run([sys.argv[1], "sim", "--workload", ",".join(map(str, tables))], stdout=subprocess.PIPE, text=True)
for line in done.stdout.splitlines():
    if re.match(r"far|  ratio  |  of_best  ", line):
        print(line)
sys.exit(done.returncode)
