#!/usr/bin/env python3
"""Cost of a round at long contexts: bytes on the wire and the proxy's own CPU time.

    contexts.py [--foretell BIN] [--fake BIN] [--lengths 1024,8192,32000] [--json FILE]

A fake vLLM (20 ms a step) behind Foretell with forced drafts of 4; between them a proxy that counts
bytes. For each verification method and length of context, with the default bounds (8,192 tokens,
2 MiB a round) and with bounds that let all of it through: rounds, bytes of a round's request and
answer, CPU milliseconds of the proxy per round, and the reason of plain requests. Exits 2 if a
request beyond its bounds was speculated on, or one within them was not.
"""

import argparse
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
SAID = {"temperature": 0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "repetition_penalty": 1.0, "ignore_eos": True}
TOKENS = 64


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Counter:
    """Passes bytes on and counts them in each direction."""

    def __init__(self, to):
        self.to, self.sent, self.received = to, 0, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            client, _ = self.listener.accept()
            server = socket.create_connection(("127.0.0.1", self.to))
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self.pass_on, args=(client, server, "sent"), daemon=True).start()
            threading.Thread(target=self.pass_on, args=(server, client, "received"), daemon=True).start()

    def pass_on(self, source, target, counter):
        try:
            while data := source.recv(1 << 16):
                setattr(self, counter, getattr(self, counter) + len(data))
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


def cpu(pid):
    """CPU seconds of a process so far."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_for(url, limit=30):
    end = time.monotonic() + limit
    while True:
        try:
            return urllib.request.urlopen(url, timeout=1).read()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def ask(port, body):
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", data,
                                     {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def config(folder, port, admin, backend, method, bounds):
    (folder / "policies").mkdir(exist_ok=True)
    (folder / "policies" / "forced.yaml").write_text(
        "version: 1\nname: forced\ndrafters: [{ kind: prompt_lookup, ngram: { min: 1, max: 8 } }]\n"
        "gamma: { max: 8, fixed: 4 }\n")
    path = folder / "foretell.yaml"
    path.write_text(
        f"version: 1\nlisten: [{{ address: \"127.0.0.1:{port}\" }}]\nadmin: {{ address: \"127.0.0.1:{admin}\" }}\n"
        f"policies: {{ dir: {folder / 'policies'} }}\nbackends:\n  - name: fake\n    engine: vllm\n"
        f"    replicas: [\"http://127.0.0.1:{backend}\"]\n"
        f"    models: [{{ id: toy, tokenizer: {ROOT / 'onnx/models/target'} }}]\n"
        f"    load: {{ every: 60s }}\n    probe: {{ when: never }}\n"
        f"    verify: {{ allow: [{method}], {bounds} }}\n")
    return path


def measure(args, engine_port, method, bounds, lengths):
    rows = []
    counter = Counter(engine_port)
    with tempfile.TemporaryDirectory() as folder:
        port, admin = free_port(), free_port()
        path = config(pathlib.Path(folder), port, admin, counter.port, method, bounds)
        proxy = subprocess.Popen([args.foretell, "serve", "--config", path], stdout=subprocess.DEVNULL,
                                 stderr=subprocess.DEVNULL)
        try:
            wait_for(f"http://127.0.0.1:{admin}/readyz")
            time.sleep(1)
            for length in lengths:
                rng = random.Random(length)
                block = [rng.randrange(300, 8000) for _ in range(997)]
                prompt = (block * (length // len(block) + 1))[:length]
                body = {"model": "toy", "prompt": prompt, "max_tokens": TOKENS, **SAID}
                plain = ask(engine_port, body)
                before = (counter.sent, counter.received, cpu(proxy.pid))
                got = ask(port, body)
                time.sleep(0.2)
                after = (counter.sent, counter.received, cpu(proxy.pid))
                usage = got["usage"].get("foretell", {"path": "plain", "reason": None, "rounds": 0})
                first = len(json.dumps(body))
                rounds = max(1, usage["rounds"])
                rows.append({"method": method, "bounds": bounds, "context": length, "path": usage["path"],
                             "reason": usage["reason"], "rounds": usage["rounds"], "tokens": TOKENS,
                             "request_bytes": max(0, (after[0] - before[0] - first)) // rounds,
                             "answer_bytes": (after[1] - before[1]) // rounds,
                             "cpu_ms": 1000 * (after[2] - before[2]) / rounds,
                             "same": got["choices"][0]["text"] == plain["choices"][0]["text"]})
        finally:
            proxy.terminate()
            proxy.wait()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--foretell", default=str(ROOT / "target/dist/foretell"))
    parser.add_argument("--fake", default=str(ROOT / "target/release/examples/fake"))
    parser.add_argument("--lengths", default="1024,8000,32000")
    parser.add_argument("--json")
    args = parser.parse_args()
    lengths = [int(length) for length in args.lengths.split(",")]
    port = free_port()
    engine = subprocess.Popen([args.fake, "vllm", "--port", str(port), "--version", "0.29.0", "--scale-out",
                               "--pace-us", "20000", "--eos-every", "0"], stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL)
    rows = []
    try:
        wait_for(f"http://127.0.0.1:{port}/health")
        for method in ("score", "fan_out"):
            for bounds in ("context_max: 8192, bytes_max: 2MiB", "context_max: 40000, bytes_max: 16MiB",
                           "context_max: 40000, bytes_max: 256KiB"):
                rows += measure(args, port, method, bounds, lengths)
    finally:
        engine.terminate()
        engine.wait()
    print(f"{'method':8} {'bounds':38} {'context':>8} {'rounds':>7} {'request B':>10} {'answer B':>9} {'CPU ms':>7}  how")
    wrong = []
    for row in rows:
        how = row["path"] + (f" ({row['reason']})" if row["reason"] else "")
        if not row["rounds"]:
            row["request_bytes"] = row["answer_bytes"] = 0
        print(f"{row['method']:8} {row['bounds']:38} {row['context']:8} {row['rounds']:7} {row['request_bytes']:10} "
              f"{row['answer_bytes']:9} {row['cpu_ms']:7.2f}  {how}")
        beyond = "8192" in row["bounds"] and row["context"] > 8192
        if not row["same"]:
            wrong.append(f"{row['context']} tokens, {row['method']}: another text")
        if beyond and (row["rounds"] or row["reason"] != "context_too_long"):
            wrong.append(f"{row['context']} tokens were speculated on beyond context_max")
        if "16MiB" in row["bounds"] and not row["rounds"]:
            wrong.append(f"{row['context']} tokens were not speculated on within the bounds: {row['reason']}")
        if "256KiB" in row["bounds"] and row["request_bytes"] > 256 << 10:
            wrong.append(f"a round of {row['request_bytes']} bytes was sent beyond bytes_max")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    print("\n".join(wrong) if wrong else "every request within its bounds was speculated on, every other was plain")
    return 2 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
