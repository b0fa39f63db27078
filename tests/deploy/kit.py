"""Shared parts of the deployment tests: tools, rendered objects, live Foretell, streaming engine."""

import contextlib
import functools
import http.client
import http.server
import os
import pathlib
import queue
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time

import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "chart"
KUBERNETES = DEPLOY / "kubernetes"
SHAPES = sorted(path.stem for path in CHART.glob("examples/*.yaml"))
FORETELL = pathlib.Path(os.environ.get("FORETELL", ROOT / "target/release/foretell")).resolve()

# A tokenizer.json, used instead of that of a deployment's model.
TOKENIZER = ROOT / "onnx/models/target/tokenizer.json"

# Seconds to wait for an event that has to happen. It bounds a failure, never a success.
PATIENCE = 60


def tool(name):
    """Path of a program that fetch.sh found or fetched."""
    path = shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin")
    assert path, f"{name} is missing: tests/deploy/fetch.sh fetches it; bin/ of its folder has to be on PATH"
    return path


def run(*command, code=0, **more):
    """Standard output of a command that must end with `code`."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=PATIENCE, **more)
    assert done.returncode == code, f"{command[0]}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + (done.stderr if code else "")


@functools.cache
def rendered(values, *settings):
    """The objects that the chart renders with a file of `examples/`, and `--set` settings, as a
    tuple."""
    chosen = [part for setting in settings for part in ("--set", setting)]
    text = run(tool("helm"), "template", "llm", CHART, "--values", CHART / f"examples/{values}.yaml", *chosen)
    return tuple(each for each in yaml.safe_load_all(text) if each)


def the(objects, kind, name=None):
    """The only object of a kind, and of a name where one is given."""
    found = [each for each in objects if each["kind"] == kind and name in (None, each["metadata"]["name"])]
    assert len(found) == 1, (kind, name, [each["metadata"]["name"] for each in found])
    return found[0]


def pod(objects):
    """The pod that the only Deployment makes."""
    return the(objects, "Deployment")["spec"]["template"]["spec"]


def containers(spec):
    """Every container of a pod, by name."""
    return {each["name"]: each for each in spec.get("initContainers", []) + spec["containers"]}


def process(objects):
    """The config file of the rendered objects, parsed."""
    return yaml.safe_load(the(objects, "ConfigMap", "llm-foretell")["data"]["foretell.yaml"])


def pre_stop(objects):
    """The command of the engine's preStop."""
    return containers(pod(objects))["engine"]["lifecycle"]["preStop"]["exec"]["command"]


def port(address):
    return int(address.rsplit(":", 1)[1])


def seconds(text):
    """A duration of a config file."""
    number, unit = re.fullmatch(r"(\d+)(ms|s|m|h)", text).groups()
    return int(number) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[unit]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def until(condition, what):
    """Waits until a condition is true."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited {PATIENCE} s for {what}"
        time.sleep(0.02)


def status(address, path, method="GET", headers=None):
    """Status and text of an answer; 0 and "" without a listener."""
    connection = http.client.HTTPConnection(*address, timeout=PATIENCE)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except ConnectionError:
        return 0, ""
    finally:
        connection.close()


class Engine(http.server.ThreadingHTTPServer):
    """An engine that streams: event k+1 is sent when the reader confirms event k.

    A proxy that holds an event back holds the stream up for ever. `heads` are the fields of the
    requests for completions."""

    daemon_threads = True

    def __init__(self, events=3, trailer=None):
        super().__init__(("127.0.0.1", 0), Streaming)
        self.events, self.trailer, self.heads, self.read = events, trailer, [], queue.Queue()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, address):
        # Some tests end a proxy in the middle of a connection.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, address)

    @property
    def port(self):
        return self.server_address[1]


class Streaming(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Engine

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.heads.append(self.headers)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        # nginx uses HTTP/1.0 unless configured otherwise; it has no chunks: the body ends with the
        # connection.
        chunked = self.request_version == "HTTP/1.1"
        self.close_connection = not chunked
        if chunked:
            self.send_header("transfer-encoding", "chunked")
        if self.server.trailer:
            self.send_header("trailer", self.server.trailer[0])
        self.end_headers()
        for number in range(self.server.events):
            event = f"data: {number}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event) if chunked else event)
            assert self.server.read.get(timeout=PATIENCE) == number
        trailer = "{}: {}\r\n".format(*self.server.trailer) if self.server.trailer else ""
        self.wfile.write(f"0\r\n{trailer}\r\n".encode() if chunked else b"")


class Stream:
    """A client's stream, read event by event from a raw socket, without reading ahead."""

    def __init__(self, address, fields=""):
        self.socket = socket.create_connection(address, timeout=PATIENCE)
        self.file = self.socket.makefile("rb")
        body = b'{"model":"m","prompt":"p","stream":true}'
        head = f"POST /v1/completions HTTP/1.1\r\nhost: proxy\r\ncontent-length: {len(body)}\r\n{fields}\r\n"
        self.socket.sendall(head.encode() + body)

    def head(self):
        """Status and fields of the answer."""
        status_line = self.file.readline()
        fields = http.client.parse_headers(self.file)
        return int(status_line.split()[1]), fields

    def event(self):
        """The next event's text; waits for its blank line."""
        line = b""
        while not line.startswith(b"data: "):
            line = self.file.readline()
            assert line, "the stream broke off"
        assert self.file.readline() == b"\n"
        return line[6:].decode().strip()

    def rest(self):
        """The rest, up to the end of the chunked body and its trailers."""
        lines = []
        while not lines or lines[-1] != b"\r\n" or b"0\r\n" not in lines:
            lines.append(self.file.readline())
            assert lines[-1], "the stream broke off"
        return b"".join(lines)

    def close(self):
        self.file.close()
        self.socket.close()


CAN_CONFINE = os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0
# As in the manifests: a read-only root, another user, no capabilities, no privilege escalation.
CONFINED = ["unshare", "--mount", "sh", "-c", 'mount -o remount,bind,ro / && cd / && exec setpriv "$@"', "sh", "--reuid", "65532",
            "--regid", "65532", "--clear-groups", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]


class Foretell:
    """A live Foretell with the config file and the policies of rendered objects.

    Its addresses are changed to free ports, and its `drain.delay`, which only gives other machines
    time, to zero."""

    def __init__(self, objects, engine, folder, confined=False, token=None):
        self.folder = pathlib.Path(folder)
        settings = process(objects)
        self.listen, self.admin, self.metrics = (("127.0.0.1", free_port()) for _ in range(3))
        settings["listen"] = [{"address": "{}:{}".format(*self.listen)}]
        settings["admin"] |= {"address": "{}:{}".format(*self.admin)} | ({"token_file": str(token)} if token else {})
        settings["metrics"]["address"] = "{}:{}".format(*self.metrics)
        settings["backends"][0]["replicas"] = [f"http://127.0.0.1:{engine}"]
        for model in settings["backends"][0].get("models", []):
            model["tokenizer"] = str(TOKENIZER)
        settings["drain"]["delay"] = "0ms"
        settings["policies"]["dir"] = str(self.folder / "policies")
        (self.folder / "policies").mkdir()
        for name, text in the(objects, "ConfigMap", "llm-foretell-policies")["data"].items():
            (self.folder / "policies" / name).write_text(text)
        self.file = self.folder / "foretell.yaml"
        self.file.write_text(yaml.safe_dump(settings))
        subprocess.run(["chmod", "-R", "a+rX", str(self.folder)], check=True)
        self.log = open(self.folder / "log", "w+")
        prefix = CONFINED if confined else []
        self.child = subprocess.Popen([*prefix, str(FORETELL), "serve", "--config", str(self.file)], stderr=self.log,
                                      stdout=self.log, env={"PATH": os.environ["PATH"]})

    def started(self):
        until(lambda: self.child.poll() is not None or status(self.metrics, "/healthz")[0] == 200, "/healthz")
        assert self.child.poll() is None, self.log_text()
        return self

    def log_text(self):
        self.log.flush()
        return (self.folder / "log").read_text()

    def end(self):
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait(PATIENCE)
        self.log.close()


@contextlib.contextmanager
def foretell(objects, engine, **more):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        live = Foretell(objects, engine, folder, **more)
        try:
            yield live.started()
        finally:
            live.end()
