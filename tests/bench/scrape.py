#!/usr/bin/env python3
"""Time of a scrape of /metrics with 1,000 label sets: 10 replicas, 20 policies, 6 gates each.

    scrape.py --foretell BIN [--scrapes 200]

Prints the number of series and label sets, and the median, 99th percentile and maximum of the time
of a scrape over one connection, ms. Exits 2 if the median is not below 10 ms.
"""

import argparse
import http.client
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time

REPLICAS, POLICIES = 10, 20


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--foretell", default="target/release/foretell")
    parser.add_argument("--scrapes", type=int, default=200)
    args = parser.parse_args()
    front, admin = free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "policies").mkdir()
        for number in range(POLICIES):
            (folder / f"policies/{number:02}.yaml").write_text(f"version: 1\nname: policy-{number:02}\n")
        replicas = ", ".join(f"'http://127.0.0.1:{free_port()}'" for _ in range(REPLICAS))
        (folder / "foretell.yaml").write_text(
            f"version: 1\nlisten: [{{ address: '127.0.0.1:{front}' }}]\nadmin: {{ address: '127.0.0.1:{admin}' }}\n"
            f"backends: [{{ name: many, replicas: [{replicas}] }}]\npolicies: {{ dir: policies }}\n"
            "observe: { level: error }\n")
        server = subprocess.Popen([args.foretell, "serve", "--config", folder / "foretell.yaml"])
        try:
            sys.exit(measure(admin, args.scrapes))
        finally:
            server.terminate()
            server.wait()


def connect(port):
    until = time.monotonic() + 30
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/healthz")
            connection.getresponse().read()
            return connection
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def measure(port, scrapes):
    connection, times, page = connect(port), [], b""
    for _ in range(scrapes):
        begun = time.perf_counter()
        connection.request("GET", "/metrics")
        page = connection.getresponse().read()
        times.append(1e3 * (time.perf_counter() - begun))
    lines = [line for line in page.decode().splitlines() if line and not line.startswith("#")]
    sets = {line.rsplit(" ", 1)[0].replace("_bucket{", "{").split(',le="')[0] for line in lines}
    times.sort()
    median = statistics.median(times)
    print(f"{len(lines)} series, {len(sets)} label sets, {len(page)} bytes: median {median:.2f} ms, "
          f"p99 {times[int(0.99 * len(times))]:.2f} ms, max {times[-1]:.2f} ms of {scrapes} scrapes")
    if len(sets) < 1000:
        print("fewer than 1,000 label sets")
        return 2
    return 0 if median < 10 else 2


if __name__ == "__main__":
    main()
