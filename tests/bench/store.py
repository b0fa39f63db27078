#!/usr/bin/env python3
"""Time that a fleet store which hangs adds to a request: two proxies in turn, one without a store.

    store.py --foretell BIN --engine target/release/examples/fake [--pairs 5000]

The store accepts connections and never answers. Prints the median and the 99th percentile of the
time of a completion of one token through each, ms. Exits 2 if the 99th percentile is more than
0.1 ms later with the store.
"""

import argparse
import http.client
import json
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

MOST_MS = 0.1


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def hang():
    """A server that accepts connections and never answers; returns its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    held = []

    def accept():
        while True:
            held.append(listener.accept())

    threading.Thread(target=accept, daemon=True).start()
    return listener.getsockname()[1]


def started(args, folder, engine, fleet):
    """A proxy; returns its process and its port."""
    folder.mkdir()
    front = free_port()
    (folder / "foretell.yaml").write_text(
        f"version: 1\nlisten: [{{ address: '127.0.0.1:{front}' }}]\nadmin: {{ address: '127.0.0.1:{free_port()}' }}\n"
        f"backends: [{{ name: fake, replicas: ['http://127.0.0.1:{engine}'], probe: {{ when: never }} }}]\n{fleet}"
        "observe: { level: error }\n")
    return subprocess.Popen([args.foretell, "serve", "--config", folder / "foretell.yaml"]), front


def connect(port):
    until = time.monotonic() + 30
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def timed(connection):
    body = json.dumps({"model": "toy", "prompt": [100, 101, 102, 103], "max_tokens": 1, "temperature": 0})
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    took = time.perf_counter() - began
    if answer.status != 200:
        sys.exit(f"status {answer.status}")
    return took * 1e3


def measure(ports, pairs):
    connections = [connect(port) for port in ports]
    for _ in range(200):
        for connection in connections:
            timed(connection)
    times = [[], []]
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 else (1, 0):
            times[side].append(timed(connections[side]))
    p99 = []
    for name, found in zip(("without a store", "store hangs"), times):
        p99.append(statistics.quantiles(found, n=100)[98])
        print(f"{name:<16} {len(found)} requests: median {statistics.median(found):.3f} ms, p99 {p99[-1]:.3f} ms")
    print(f"p99 added: {p99[1] - p99[0]:.3f} ms, at most {MOST_MS}")
    return 0 if p99[1] - p99[0] <= MOST_MS else 2


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--foretell", default="target/release/foretell")
    parser.add_argument("--engine", default="target/release/examples/fake")
    parser.add_argument("--pairs", type=int, default=5000)
    args = parser.parse_args()
    port = free_port()
    processes = [subprocess.Popen([args.engine, "vllm", "--port", str(port)], stdout=subprocess.DEVNULL)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            fleet = f"fleet: {{ store: 'redis://127.0.0.1:{hang()}', sync: 1s }}\n"
            sides = [started(args, folder / "alone", port, ""), started(args, folder / "store", port, fleet)]
            processes += [process for process, _ in sides]
            sys.exit(measure([front for _, front in sides], args.pairs))
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


if __name__ == "__main__":
    main()
