"""A live Foretell that fills every panel of its dashboards, scraped each second by Prometheus.

It is in front of the bundled target. The setup makes every counter count: two replicas, of which
one is killed and comes back failing, more requests than lanes, one slot for the model drafter, a
hosted service, policies of every mode, a lossy rule, a collector of spans that does not exist, and
an engine that takes drafts into its steps.
The target is paced, so that speculation pays on any machine.
"""

import contextlib
import http.client
import http.server
import itertools
import json
import math
import os
import pathlib
import socket
import struct
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FORETELL = pathlib.Path(os.environ.get("FORETELL", ROOT / "target/release/foretell")).resolve()
MODEL = "foretell-target"
PACE = "step=8ms,base=1.2,node=0.02,growth=0.01"
CLIENTS = 6
# Direct requests to the engine: more than it has lanes.
DIRECT_REQUESTS = 12

PROCESS = """version: 1
listen: [{{ address: "127.0.0.1:{front}" }}]
admin: {{ address: "127.0.0.1:{admin}" }}
limits: {{ memory: 64MiB }}
drain: {{ delay: 60s, grace: 1s }}
tenant: {{ header: x-tenant, trusted_peers: ["127.0.0.1"] }}
backends:
  - name: target
    replicas: ["http://127.0.0.1:{first}", "http://127.0.0.1:{second}"]
    models: [{{ id: {model} }}]
  - name: hosted
    engine: openai
    replicas: ["http://127.0.0.1:{hosted}"]
    models: [{{ id: hosted-model }}]
drafters: {{ draft-same: {{ path: {root}/onnx/models/draft-same, slots: 1, context: 1024 }} }}
corpus: {{ bytes: 16MiB, ttl: 1m }}
fleet: {{ store: "redis://127.0.0.1:9", sync: 1s }}  # nobody answers there
policies: {{ dir: policies }}
drafts: {{ listen: "unix:{socket}" }}
observe: {{ log: text, level: error, otlp: "http://127.0.0.1:{nobody}" }}
"""
POLICIES = {
    "10-forced": """match: { headers: { x-kind: [forced] }, tenants: [acme] }
drafters: [{ kind: prompt_lookup }, { kind: suffix, scope: tenant }, { kind: model, model: draft-same, vocabulary: same }]
gamma: { fixed: 4 }
""",
    "20-lossy": """match: { headers: { x-kind: [lossy] } }
drafters: [{ kind: prompt_lookup }, { kind: model, model: draft-same, vocabulary: same }]
gamma: { fixed: 4 }
accept: { rule: ears, tolerance: { max: 0.5 }, max_drift: 1, drift_per_100_tokens: 50 }
""",
    "30-shadow": """mode: shadow
match: { headers: { x-kind: [shadow] } }
drafters: [{ kind: prompt_lookup }]
""",
    # half is the control group, so that there are pairs to compare soon, and no loss ends the comparison
    "40-rest": """drafters: [{ kind: prompt_lookup }]
gates: { control: 10, reprobe: 1s }
holdback: { start: 0.5, floor: 0.5 }
""",
}
# A request for a hosted service, which is passed through.
HOSTED = {"model": "hosted-model", "max_tokens": 4, "temperature": 0, "messages": [{"role": "user", "content": "Hello"}]}
SCRAPES = """global: {{ scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s }}
rule_files: ["{rules}"]
scrape_configs: [{{ job_name: foretell, static_configs: [{{ targets: ["127.0.0.1:{admin}"] }}] }}]
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fetch(url, body=None):
    """Status and text of a URL's answer, of errors too."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def workload(name):
    """The prompts of a file of tests/workloads."""
    return [json.loads(line) for line in (ROOT / f"tests/workloads/{name}.jsonl").read_text().splitlines()]


class Ill(http.server.BaseHTTPRequestHandler):
    """An engine that reports health, and closes the connection on every request."""

    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self):
        self.close_connection = True

    def log_message(self, *_):
        pass


class Steps(threading.Thread):
    """An engine that takes drafts into its steps (deploy/plugins/protocol.md): one row after the other, each of a text
    that repeats itself, half of whose drafts it accepts."""

    HELLO = struct.pack("<8sHHIIH", b"foretell", 1, 8, 1000, 4096, 4) + b"".join(
        struct.pack("<H", len(word)) + word for word in (b"vllm", b"0.32.0", b"model"))
    TEXT = [7 + at % 50 for at in range(4000)]

    def __init__(self, path):
        super().__init__(daemon=True)
        self.path, self.sequence, self.over = str(path), 0, threading.Event()

    def run(self):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as self.connection:
            self.connection.connect(self.path)
            self.exchange(1, self.HELLO)
            for row in itertools.count(1):
                if self.over.is_set():
                    return
                self.send(2, struct.pack("<IIfH", row, 200, 0.0, 5) + b"a-b-c")
                self.send(3, struct.pack("<III200i", row, 0, 200, *self.TEXT[:200]))
                length, drafted = 200, 0
                while length < 800 and not self.over.wait(0.01):
                    length, drafted = self.step(row, length, drafted)
                self.send(5, struct.pack("<HI", 1, row))

    def step(self, row, length, drafted):
        """One step: the new length of the row, and the draft tokens for the next step."""
        new = 1 + drafted // 2
        self.sequence += 1
        head = struct.pack("<QIIIHBH", self.sequence, 20_000, 100, self.sequence // 50, 1, 0, 1)
        listed = struct.pack(f"<IHHHIH{new}i", row, drafted, new, 8, length + new, new, *self.TEXT[length:length + new])
        body = self.exchange(4, head + listed)
        return length + new, body[18] if len(body) > 18 else 0

    def send(self, kind, body):
        self.connection.sendall(struct.pack("<IB", 1 + len(body), kind) + body)

    def exchange(self, kind, body):
        """The answer to a frame, without its length."""
        self.send(kind, body)
        size = int.from_bytes(self.connection.recv(4, socket.MSG_WAITALL), "little")
        return self.connection.recv(size, socket.MSG_WAITALL)


class Stand:
    """The processes; `stack` ends them, each by itself."""

    def __init__(self, stack, folder):
        self.stack, self.folder = stack, pathlib.Path(folder)
        ports = ("front", "admin", "first", "second", "hosted", "nobody", "prometheus")
        self.ports = {name: free_port() for name in ports}
        self.front = f"127.0.0.1:{self.ports['front']}"
        self.admin = f"http://127.0.0.1:{self.ports['admin']}"
        self.prometheus = f"http://127.0.0.1:{self.ports['prometheus']}"
        (self.folder / "policies").mkdir()
        for name in POLICIES:
            self.write(name)
        config = self.folder / "foretell.yaml"
        self.socket = self.folder / "drafts.sock"
        config.write_text(PROCESS.format(root=ROOT, model=MODEL, socket=self.socket, **self.ports))
        scrapes = self.folder / "prometheus.yaml"
        rules = ROOT / "grafana/rules/foretell.rules.yaml"
        scrapes.write_text(SCRAPES.format(rules=rules, admin=self.ports["admin"]))
        self.targets = {name: self.target(name) for name in ("first", "second", "hosted")}
        for name in self.targets:
            self.wait(f"http://127.0.0.1:{self.ports[name]}/health")
        self.start("foretell", FORETELL, "serve", "--config", config)
        self.wait(f"{self.admin}/readyz")
        steps = Steps(self.socket)
        steps.start()
        self.stack.callback(steps.over.set)
        self.start("prometheus", "prometheus", "--config.file", scrapes, "--web.listen-address",
                   f"127.0.0.1:{self.ports['prometheus']}", "--storage.tsdb.path", self.folder / "tsdb")
        self.wait(f"{self.prometheus}/-/ready")

    def target(self, name):
        served = "hosted-model" if name == "hosted" else MODEL
        return self.start(name, FORETELL, "target", "--model", ROOT / "onnx/models/target", "--name", served, "--listen",
                          f"127.0.0.1:{self.ports[name]}", "--lanes", "8", "--threads", "1", "--pace", PACE)

    def start(self, name, *command):
        log = self.stack.enter_context(open(self.folder / f"{name}.log", "w"))
        process = subprocess.Popen([str(word) for word in command], stdout=log, stderr=log)
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        return process

    def fall_ill(self, name):
        """Replaces a killed target by one that can be reached and answers nothing."""
        server = http.server.ThreadingHTTPServer(("127.0.0.1", self.ports[name]), Ill)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        self.stack.callback(server.server_close)
        self.stack.callback(thread.join)
        self.stack.callback(server.shutdown)

    def wait(self, url):
        """Waits until a server answers; raises an error with its log if it never does."""
        until = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                if fetch(url)[0] == 200:
                    return
            if time.monotonic() > until:
                logs = {path.name: path.read_text()[-1000:] for path in self.folder.glob("*.log")}
                raise RuntimeError(f"{url} does not answer; {logs}")
            time.sleep(0.1)

    def write(self, name, more=""):
        path = self.folder / f"policies/{name}.yaml"
        path.write_text(f"version: 1\nname: {name}\n{POLICIES[name]}{more}")

    def query(self, expression):
        """The result of an instant query: a list of series."""
        answer = json.loads(fetch(f"{self.prometheus}/api/v1/query?" + urllib.parse.urlencode({"query": expression}))[1])
        if answer["status"] != "success":
            raise ValueError(f"{answer['error']}: {expression}")
        return answer["data"]["result"]

    def rules(self):
        """The rules as Prometheus has evaluated them, by name."""
        groups = json.loads(fetch(f"{self.prometheus}/api/v1/rules")[1])["data"]["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}


class Load:
    """Clients that send requests without a pause, with occasional events."""

    def __init__(self, stand):
        self.stand, self.over, self.answered, self.failures = stand, threading.Event(), 0, []
        # start and end of the kill of a replica, by the monotonic clock
        self.killed = (math.inf, math.inf)
        self.threads = [threading.Thread(target=self.client, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        for thread in self.threads:
            thread.join()

    def asked(self, number):
        """The requests of a client, without end: body, route and headers."""
        names = ("rewrite", "completion", "hostile", "prose", "chat", "rewrite")
        files = {name: itertools.cycle(workload(name)) for name in set(names)}
        for turn in itertools.count(number):
            entry = next(files[names[turn % len(names)]])
            body = {**entry["body"], "max_tokens": 40, "stream": turn % 2 == 0}
            # half of the clients send only requests that are compared with the control group
            kind = ("forced", "lossy", "shadow", "odd")[turn % 4] if number % 2 else "rest"
            if kind == "lossy":
                body["temperature"] = 1
            if kind == "odd":
                body["logit_bias" if turn % 3 else "not_known"] = {"5": 1}
            yield entry["route"], body, {"x-kind": kind, "x-tenant": "acme"}

    def client(self, number):
        paths = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
        for route, body, headers in self.asked(number):
            if self.over.is_set():
                return
            began = time.monotonic()
            status = self.send(self.stand.front, paths[route], body, headers)
            self.answered += 1
            if status not in (200, 400, 502):
                self.failures.append((f"{status} for {headers['x-kind']}", began, time.monotonic()))

    def kill(self, name):
        """Kills a target in the middle of its answers."""
        begun = time.monotonic()
        self.stand.targets[name].kill()
        self.stand.targets[name].wait()
        self.killed = (begun, time.monotonic())

    def unexplained(self):
        """Failures except those of answers that a killed target was sending: they end with the
        target."""
        begun, done = self.killed
        return [what for what, start, end in self.failures if not (what.startswith("0 ") and start < done and end > begun)]

    @staticmethod
    def send(address, path, body, headers=None):
        """The status of a request that is read to its end; 0 without one."""
        connection = http.client.HTTPConnection(address, timeout=120)
        try:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            answer.read()
            return answer.status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def happenings(self):
        """The events that recur while expressions wait for data; each step is short."""
        stand = self.stand
        for turn in itertools.count():
            self.leaves()
            self.headless()
            self.send(stand.front, "/v1/chat/completions", HOSTED)
            yield
            stand.write("40-rest", f"# {turn}\n")
            assert fetch(f"{stand.admin}/api/reload", {})[0] == 200
            yield
            (stand.folder / "policies/50-bad.yaml").write_text("version: 1\nnot_a_setting: 1\n")
            assert fetch(f"{stand.admin}/api/reload", {})[0] == 422
            yield
            (stand.folder / "policies/50-bad.yaml").unlink()
            assert fetch(f"{stand.admin}/api/reload", {})[0] == 200
            yield
            self.load_engine()
            yield
            assert fetch(f"{stand.admin}/api/mode", {"mode": "observe", "ttl": "1s"})[0] == 200
            yield

    @staticmethod
    def prompt(name):
        return workload(name)[0]["body"]

    def leaves(self):
        """A client that disconnects after the first piece of its answer."""
        connection = http.client.HTTPConnection(self.stand.front, timeout=60)
        with contextlib.suppress(OSError, http.client.HTTPException):
            body = {**self.prompt("rewrite"), "stream": True, "max_tokens": 200}
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            connection.getresponse().read(1)
        connection.close()

    def headless(self):
        """A request without the mandatory field."""
        with socket.create_connection(("127.0.0.1", self.stand.ports["front"]), timeout=60) as connection:
            connection.sendall(b"GET /v1/models HTTP/1.1\r\n\r\n")
            connection.recv(4096)

    def load_engine(self):
        """Direct requests to the engine, more than it has lanes."""
        address = f"127.0.0.1:{self.stand.ports['first']}"
        body = {**self.prompt("prose"), "max_tokens": 30}
        others = [threading.Thread(target=self.send, args=(address, "/v1/completions", body)) for _ in range(DIRECT_REQUESTS)]
        self.threads += others
        for other in others:
            other.start()
