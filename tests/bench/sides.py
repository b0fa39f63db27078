"""Ways to reach one server that are compared: the server itself and Foretell with several settings.

Every setting is a separate `foretell serve`, without a control group. Blocks of prompts go to all
sides in turn.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import http.client
import json
import pathlib
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
WORKLOADS = ROOT / "tests/workloads"
LOOKUP = "{ kind: prompt_lookup, ngram: { min: 2, max: 8 } }"
MODEL = "{ kind: model, model: draft-same, vocabulary: same }"
OTHER = "{{ kind: model, model: draft-other, vocabulary: {} }}"
SUFFIX = "{ kind: suffix }"
DRAFTERS = {"lookup": LOOKUP, "suffix": SUFFIX, "model": MODEL, "both": f"{LOOKUP}, {MODEL}", "lookups": f"{LOOKUP}, {SUFFIX}", "merged": f"{LOOKUP}, {SUFFIX}, {MODEL}",
            "two": f"{MODEL}, " + OTHER.format("slem"),
            "slem": OTHER.format("slem"), "other": OTHER.format("auto")}
BUNDLED = {name: ROOT / "onnx/models" / name for name in ("draft-same", "draft-other")}
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
BLOCK = 5
PROCESS = """version: 1
listen: [{{ address: "127.0.0.1:{port}" }}]
admin: {{ address: "127.0.0.1:{admin}" }}
backends:
  - name: target
    replicas: ["http://{target}"]
{backend}drafters: {{ {models} }}
policies: {{ dir: {policies} }}
drain: {{ delay: 0s, grace: 1s }}
observe: {{ log: text, level: error }}
"""
POLICY = """version: 1
name: {name}
mode: {mode}
{match}drafters: [{drafters}]
gamma: {{ max: 32, fixed: {fixed} }}
accept: {{ rule: exact }}
holdback: {{ start: 0, floor: 0 }}
"""
FIXED = re.compile(r"[1-9]|[12]\d|3[0-2]")
Proxy = collections.namedtuple("Proxy", "address admin process")


class Wrong(Exception):
    """A measurement or a setting that cannot be run."""


def settings(text):
    """The settings of an argument.

    `auto`, `plain` (never speculates), or a fixed length in tokens."""
    names = text.split(",")
    for name in names:
        if name not in ("auto", "plain") and not FIXED.fullmatch(name):
            raise argparse.ArgumentTypeError(f"allowed auto, plain, 1 to 32, got {name!r}")
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError("a setting is given twice")
    return names


def some_of(allowed):
    """The type of an argument that lists some of `allowed`."""
    def parse(text):
        names = text.split(",")
        if unknown := [name for name in names if name not in allowed]:
            raise argparse.ArgumentTypeError(f"allowed {', '.join(allowed)}, got {unknown[0]!r}")
        return names
    return parse


def counts(text):
    """The numbers of an argument, each at least 1."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return found


def named(name):
    return "fixed " + name if FIXED.fullmatch(name) else name


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def page(address, path):
    with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
        return answer.read().decode()


# --------------------------------------------------------------------------------------- processes

@contextlib.contextmanager
def running(argv, **more):
    process = subprocess.Popen(argv, **more)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def policy(name, drafters, setting, match=""):
    """The text of a setting's policy; `match` is a whole line."""
    return POLICY.format(name=name, match=match, drafters=drafters, mode=setting if setting in ("plain", "off") else "auto",
                         fixed=setting if FIXED.fullmatch(setting) else "null")


def drafter_models(models, slots):
    return ", ".join(f"{name}: {{ path: {path}, slots: {slots}, context: 2048 }}"
                     for name, path in (BUNDLED if models is None else models).items())


def start_proxy(stack, foretell, target, backend, policies, setting, slots=4, models=None):
    """A `foretell serve` in front of `target`, until the stack ends.

    `backend` holds the lines that describe the target, `policies` texts by name, `slots` the
    requests that a model drafter can draft for at once, and `models` the folders of such drafters
    by name: the bundled ones by default."""
    folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    (folder / "policies").mkdir()
    for name, text in policies.items():
        (folder / "policies" / f"{name}.yaml").write_text(text)
    port, admin = free_port(), free_port()
    path = folder / "foretell.yaml"
    path.write_text(PROCESS.format(port=port, admin=admin, target=target, backend=backend, policies=folder / "policies",
                                   models=drafter_models(models, slots)))
    process = stack.enter_context(running([foretell, "serve", "--config", str(path)], stdout=subprocess.DEVNULL))
    for _ in range(300):
        if process.poll() is not None:
            raise Wrong(f"foretell serve ended with {process.returncode} for setting {setting}")
        with contextlib.suppress(OSError):
            page(f"127.0.0.1:{admin}", "/readyz")
            return Proxy(f"127.0.0.1:{port}", admin, process)
        time.sleep(0.1)
    raise Wrong(f"foretell serve is not ready for setting {setting}")


# ------------------------------------------------------------------------------------------ asking

def read_workload(name):
    lines = (WORKLOADS / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def changed(entry, **fields):
    """The prompt with these fields in its body."""
    return {**entry, "body": {**entry["body"], **fields}}


class Side:
    """One side: the target itself or a setting. Keeps its connection and its answers."""

    def __init__(self, name, address, headers=None):
        self.name, self.address, self.answers = name, address, []
        self.headers = {"content-type": "application/json", **(headers or {})}
        self.connection = http.client.HTTPConnection(address, timeout=600)

    def ask_all(self, entries, clients=1):
        """Keeps the answers to the prompts: of this side's own client, or of several concurrent ones."""
        askers = [self, *(Side(self.name, self.address, self.headers) for _ in range(clients - 1))]
        shares = [entries[place::clients] for place in range(clients)]
        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            found = list(pool.map(lambda one: [one[0].ask(entry) for entry in one[1]], zip(askers, shares)))
        self.answers += [found[place % clients][place // clients] for place in range(len(entries))]

    def ask(self, entry):
        """The answer to a prompt: text, seconds to the first and the last event, figures of its
        usage."""
        body = {**entry["body"], "stream": True, "stream_options": {"include_usage": True}}
        begun, lines = time.perf_counter(), []
        try:
            self.connection.request("POST", PATHS[entry["route"]], json.dumps(body), self.headers)
            answer = self.connection.getresponse()
            while line := answer.readline():
                if line.startswith(b"data: "):
                    lines.append((time.perf_counter() - begun, line[6:].strip()))
        except (OSError, http.client.HTTPException) as error:
            self.connection.close()
            return {"failed": str(error) or type(error).__name__}
        if answer.status != 200 or not lines or lines[-1][1] != b"[DONE]":
            return {"failed": f"HTTP {answer.status}, {len(lines)} events, not complete"}
        return understood(lines)


def said(delta):
    """The text of a chat's event: reasoning, content, names and arguments of calls."""
    functions = [call.get("function") or {} for call in delta.get("tool_calls") or []]
    pieces = [delta.get("reasoning"), delta.get("content"), *(one.get(key) for one in functions for key in ("name", "arguments"))]
    return "".join(filter(None, pieces))


def understood(lines):
    text, usage, first = "", {}, None
    for at, data in lines[:-1]:
        chunk = json.loads(data)
        if "error" in chunk:
            return {"failed": json.dumps(chunk["error"])}
        for choice in chunk.get("choices", []):
            piece = choice.get("text") or said(choice.get("delta", {}))
            first = at if piece and first is None else first
            text += piece
        usage = chunk.get("usage") or usage
    foretell = usage.get("foretell") or {}
    return {"text": text, "tokens": usage["completion_tokens"], "first": first, "seconds": lines[-1][0],
            "path": foretell.get("path"), "reason": foretell.get("reason"), "rounds": foretell.get("rounds", 0),
            "drafted": foretell.get("drafted", 0), "accepted": foretell.get("accepted", 0), "drift": foretell.get("drift") or {}}


def measure(groups, prompts, requests, size=BLOCK, settle=0, clients=1):
    """Sends blocks of prompts to all groups at the same time.

    Each block goes to the group's target (or to each of several), unmeasured, then to its sides, in
    an order of its own for each block: in a fixed cycle one side would always follow the same other
    one, and its cached prompts, unread rounds and spinning threads. `settle`: seconds to wait before
    each side; `clients`: concurrent ones, which share the prompts of a block."""
    def block(group, number, entries):
        targets, group = group
        for target in targets if isinstance(targets, list) else [targets]:
            target.connection.close()
            for entry in entries:
                target.ask(changed(entry, max_tokens=1))
        for side in random.Random(number).sample(group, len(group)):
            time.sleep(settle)
            side.connection.close()  # a connection that was idle for some blocks may have been closed by the peer
            side.ask_all(entries, clients)

    with concurrent.futures.ThreadPoolExecutor(len(groups)) as pool:
        for number in range(requests // size):
            entries = [prompts[index % len(prompts)] for index in range(number * size, (number + 1) * size)]
            list(pool.map(lambda group: block(group, number, entries), groups))
            if sys.stderr.isatty():
                print(f"\r{(number + 1) * size} of {requests} requests a side", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr)


def failures(answers):
    """Words for each failed request, of answers by side."""
    return [f"{name}: {a['failed']}" for name, given in answers.items() for a in given if "failed" in a]
