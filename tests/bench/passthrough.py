#!/usr/bin/env python3
"""Foretell against nginx as plain reverse proxies: latency and requests per second, by wrk in turn.

    passthrough.py [--foretell BIN] [--pairs N] [--seconds S] [--connections N]

Both are in front of the same nginx, which answers with one kilobyte, and each turn goes to one of
them. The ratios are those of a pair of turns, judged by their median, so slow changes of the machine
cancel out. Exits 2 if the ratio of the median latencies is above 1.15. Needs nginx and wrk (Debian
packages).
"""

import argparse
import contextlib
import pathlib
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import sides

HERE = sides.ROOT / "tests/passthrough"
MAX_P50 = 1.15
UNITS = {"us": 1, "ms": 1_000, "s": 1_000_000}
BACKEND = """worker_processes 1; daemon off; error_log stderr crit; pid backend.pid; events { worker_connections 4096; }
http { access_log off; client_body_temp_path a; proxy_temp_path b; fastcgi_temp_path c; uwsgi_temp_path d; scgi_temp_path e;
server { listen 127.0.0.1:%d; keepalive_requests 100000000; default_type application/json; location / { return 200 '%s'; } } }
"""


def nginx(stack, folder, name, text):
    """Starts nginx with the configuration `text`."""
    file = pathlib.Path(folder, f"{name}.conf")
    file.write_text(text)
    pathlib.Path(folder, name).mkdir()
    stack.enter_context(sides.running(["nginx", "-p", pathlib.Path(folder, name), "-c", file]))


def wait_for(port):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    sys.exit(f"nothing listens at port {port}")


def turn(port, args):
    """Latency at 50 and 99 % in microseconds, and requests per second."""
    said = subprocess.run(["wrk", "-t1", f"-c{args.connections}", f"-d{args.seconds}s", "--latency", f"http://127.0.0.1:{port}/v1/models"],
                          capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in said or "Socket errors" in said:
        sys.exit(f"requests failed:\n{said}")
    at = {share: float(n) * UNITS[unit] for share, n, unit in re.findall(r"(\d+)%\s+([\d.]+)(us|ms|s)", said)}
    return at["50"], at["99"], float(re.search(r"Requests/sec:\s+([\d.]+)", said)[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--foretell", default=str(sides.ROOT / "target/dist/foretell"), metavar="BIN")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=8)
    args = parser.parse_args()
    backend, other, ours, admin = (sides.free_port() for _ in range(4))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        nginx(stack, folder, "backend", BACKEND % (backend, "a" * 1024))
        proxy = (HERE / "nginx.conf").read_text().replace("127.0.0.1:18080", f"127.0.0.1:{backend}")
        nginx(stack, folder, "proxy", proxy.replace("127.0.0.1:18081", f"127.0.0.1:{other}"))
        stack.enter_context(sides.running(
            [args.foretell, "serve", "--config", HERE / "foretell.yaml", "--backend", f"http://127.0.0.1:{backend}",
             "--listen", f"127.0.0.1:{ours}", "--admin", f"127.0.0.1:{admin}"]))
        for port in (backend, other, ours):
            wait_for(port)
        pairs = [(turn(other, args), turn(ours, args)) for _ in range(args.pairs)]
    print("              nginx   Foretell      ratio")
    ratios = []
    for index, name in enumerate(("p50, us", "p99, us", "requests/s")):
        ratios.append(statistics.median(mine[index] / theirs[index] for theirs, mine in pairs))
        print(f"{name:10} {statistics.median(a[index] for a, _ in pairs):9.0f} {statistics.median(b[index] for _, b in pairs):10.0f} {ratios[-1]:10.3f}")
    sys.exit(0 if ratios[0] <= MAX_P50 else 2)


if __name__ == "__main__":
    main()
