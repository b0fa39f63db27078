"""Shared parts of the scripts of `make reliability`: proxy and figures, backend, bounds.

Loopback only. A script prints a line for each number, and ends with 2 if one is beyond its bound.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PATIENCE = 120
KIB, MIB = 1 << 10, 1 << 20
FAKE = pathlib.Path(os.environ.get("FAKE", ROOT / "target/release/examples/fake"))


class Wrong(Exception):
    """A measurement that is not possible."""


# ----------------------------------------------------------------------------------------- numbers

class Numbers:
    """The numbers of a script, each printed when it is measured."""

    def __init__(self):
        self.beyond = 0

    def at_most(self, row, what, measured, asked, unit=""):
        self._line(row, what, measured, f"at most {shown(asked)}", unit, measured <= asked)

    def at_least(self, row, what, measured, asked, unit=""):
        self._line(row, what, measured, f"at least {shown(asked)}", unit, measured >= asked)

    def note(self, row, what, measured, unit=""):
        """A number without a bound."""
        self._line(row, what, measured, None, unit, True)

    def _line(self, row, what, measured, asked, unit, good):
        self.beyond += not good
        asked = f" (asked: {asked})" if asked else ""
        print(f"#{row} {what}: {shown(measured)}{unit and ' ' + unit}{asked}{'' if good else '  BEYOND'}", flush=True)


def shown(number):
    return f"{number:,.3g}" if isinstance(number, float) and abs(number) < 1000 else f"{number:,.0f}"


def main(script, doc, *more):
    """Runs `script(args, numbers)`; `more` are further arguments as (name, default, help)."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--foretell", type=lambda path: str(pathlib.Path(path).resolve()), default=ROOT / "target/release/foretell", metavar="BIN")
    for name, default, text in more:
        parser.add_argument(f"--{name}", type=type(default), default=default, metavar="N", help=text)
    args, numbers = parser.parse_args(), Numbers()
    # A script that is ended ends its child processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(64))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        script(args, numbers)
    except (Wrong, OSError) as error:
        print(f"{pathlib.Path(sys.argv[0]).name}: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(64)
    sys.exit(2 if numbers.beyond else 0)


def quantile(values, at):
    values = sorted(values)
    return values[min(int(len(values) * at), len(values) - 1)]


# --------------------------------------------------------------------------------------- processes

def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def wait_for(what, found, limit=PATIENCE, every=0.05):
    """Polls until `found` returns a true value; connection errors are retried."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            if given := found():
                return given
        time.sleep(every)
    raise Wrong(f"not within {limit} s: {what}")


def started(stack, argv, **more):
    """Starts a process that ends with the stack."""
    process = subprocess.Popen([str(part) for part in argv], **more)

    def end():
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    stack.callback(end)
    return process


class Proxy:
    """A `foretell serve` that ends with the stack."""

    def __init__(self, stack, foretell, backends, more="", policies=None, log=subprocess.DEVNULL, wait="/healthz"):
        self.folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.port, self.admin = free_port(), free_port()
        self.address = ("127.0.0.1", self.port)
        lines = [f'version: 1\nlisten: [{{ address: "127.0.0.1:{self.port}" }}]' if "listen:" not in more else "version: 1",
                 f'admin: {{ address: "127.0.0.1:{self.admin}" }}', backends, more]
        if "observe:" not in more:
            lines.append("observe: { log: text, level: error }")
        if policies is not None:
            (self.folder / "policies").mkdir()
            for name, text in policies.items():
                (self.folder / "policies" / name).write_text(text)
            lines.append(f"policies: {{ dir: {self.folder}/policies }}")
        (self.folder / "foretell.yaml").write_text("\n".join(lines) + "\n")
        begun = time.perf_counter()
        self.process = started(stack, [foretell, "serve", "--config", self.folder / "foretell.yaml"], stdout=log, stderr=log,
                               cwd=self.folder)
        self.pid = self.process.pid

        def is_up():
            if self.process.poll() is not None:
                raise Wrong(f"foretell serve ended with {self.process.returncode}: see `foretell check --config` of its file")
            return self.page(wait)

        wait_for(f"{wait} of foretell", is_up, every=0.002)
        self.up_after = time.perf_counter() - begun

    def page(self, path, data=None):
        request = urllib.request.Request(f"http://127.0.0.1:{self.admin}{path}", data=data)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            if error.code == 503:
                return ""
            raise Wrong(f"{path}: HTTP {error.code}: {error.read().decode()[:300]}") from None

    def metric(self, name):
        """The sum of all samples whose line begins with `name` and the given labels."""
        lines = [line for line in self.page("/metrics").splitlines() if line.startswith(name)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def recognised(self, dialect):
        """Waits until the replica is identified as `dialect` and has a verification method."""
        wait_for(f"the replica is recognised as {dialect}",
                 lambda: f'"engine":"{dialect}"' in self.page("/api/replicas").replace(": ", ":"), every=0.2)

    def resident(self):
        return status(self.pid, "VmRSS")

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def threads(self):
        return status(self.pid, "Threads") // KIB


def before(address, more=""):
    """The lines of one backend."""
    return f'backends: [{{ name: b, replicas: ["http://{address}"]{more and ", " + more} }}]'


def toy(address):
    """The lines of a fake engine with the model of `fake_engine`."""
    return before(address, f'models: [{{ id: toy, tokenizer: {ROOT}/onnx/models/target }}], probe: {{ when: never }}')


def status(pid, name):
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith(name + ":")).split()[1]) * KIB


def processor(pid):
    """Processor seconds so far of its live threads, to the nanosecond (`stat` has hundredths)."""
    return sum(int(times.read_text().split()[0]) for times in pathlib.Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def load():
    return os.getloadavg()[0]


def fake_engine(stack, kind, *arguments):
    """A strict fake of an engine (tests/fakes), built by `make reliability`; its address."""
    if not FAKE.exists():
        raise Wrong("no fake: cargo build --release --package foretell-fakes --example fake")
    port = free_port()
    more = ["--scale-out", "--prompt-tokens-details"] if kind == "vllm" else []
    started(stack, [FAKE, kind, "--port", port, "--eos-every", 0, *more, *arguments], stdout=subprocess.DEVNULL)
    wait_for(f"the fake {kind} listens", lambda: socket.create_connection(("127.0.0.1", port), 1).close() or True)
    return f"127.0.0.1:{port}"


# ---------------------------------------------------------------------------------------- the wire

async def read_head(reader):
    """Lines of a head, or None where the connection ended before its first byte."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        if getattr(error, "partial", b""):
            raise ConnectionError(f"ended inside a head: {error.partial[:80]!r}") from None
        return None
    return head[:-4].split(b"\r\n")


def fields_of(lines):
    return {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}


async def read_body(reader, fields, until_end=False):
    """The body of a message, and True if it is complete."""
    try:
        if fields.get(b"transfer-encoding", b"").lower() == b"chunked":
            body = []
            while size := int((await reader.readline()).split(b";")[0], 16):
                body.append((await reader.readexactly(size + 2))[:-2])
            await reader.readuntil(b"\r\n")
            return b"".join(body), True
        if b"content-length" in fields:
            return await reader.readexactly(int(fields[b"content-length"])), True
        return (await reader.read(), True) if until_end else (b"", True)
    except (asyncio.IncompleteReadError, ValueError, ConnectionError):
        return b"", False


def post(path, body, *more):
    head = [f"POST {path} HTTP/1.1", "host: api", "content-type: application/json", f"content-length: {len(body)}", *more]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


async def ask(reader, writer, request):
    """One request over a kept connection: status, fields, body, whole."""
    writer.write(request)
    await writer.drain()
    lines = await read_head(reader)
    if lines is None:
        raise ConnectionError("no answer")
    fields = fields_of(lines)
    body, whole = await read_body(reader, fields, until_end=True)
    return int(lines[0].split()[1]), fields, body, whole


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


# ------------------------------------------------------------------------------------- the backend

@contextlib.contextmanager
def backend(serve, *arguments):
    """A process that hands each connection to `serve(reader, writer, *arguments)`; its address."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(listener, serve, arguments), daemon=True)
    process.start()
    port = listener.getsockname()[1]
    listener.close()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.join()


def _serve(listener, serve, arguments):
    async def connection(reader, writer):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            await serve(reader, writer, *arguments)
        writer.close()

    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    async def run():
        server = await asyncio.start_server(connection, sock=listener, limit=MIB)
        await server.serve_forever()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())
