#!/usr/bin/env python3
"""Request smuggling: a corpus of heads and framings through Foretell, nginx and h11.

    smuggling.py [--foretell BIN]

The backend writes down the messages that it reads. Every request is sent with a second one behind
it on the same connection, and the messages that reach the backend are compared: a request that
Foretell passes on must be read by the backend as it was sent: one message, its body as the strict
reader below reads it, the second request as a second message or not at all. nginx and h11 get the
same bytes: where one of them accepts a request that Foretell accepts, both must agree on its end.
Bounds: at least 200 requests, no disagreement, all the listed breaches refused.
"""

import asyncio
import contextlib
import itertools
import pathlib
import shutil
import socket
import subprocess
import tempfile

import kit

NGINX = """worker_processes 1;
daemon off;
error_log /dev/null crit;
pid nginx.pid;
events { worker_connections 256; }
http {
    access_log off;
    client_body_temp_path client_body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
    client_header_timeout 2s; client_body_timeout 2s; keepalive_timeout 2s; lingering_close off;
    server {
        listen 127.0.0.1:%d;
        location / { proxy_pass http://%s; proxy_http_version 1.1; proxy_request_buffering off; proxy_set_header Connection ""; }
    }
}
"""
SECOND = b"GET /second HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
FIRST = "POST /first HTTP/1.1\r\nhost: a\r\n"


def corpus():
    """Pairs of a required outcome and the bytes of a request.

    Outcomes: it is `refused`; it `passes`; `either`, then all read it alike; or it is read by its
    coding alone and the connection `closes` after it (RFC 9112, 6.3; docs/reliability.md)."""
    given = []

    def add(wanted, *texts):
        given.extend((wanted, text.encode("latin-1") if isinstance(text, str) else text) for text in texts)

    chunked = "transfer-encoding: chunked\r\n"
    body = "\r\n2\r\n{}\r\n0\r\n\r\n"
    # Lengths and codings together, twice, or in other spellings.
    for length in ("0", "2", "5", "999"):
        add("closes", f"{FIRST}content-length: {length}\r\n{chunked}{body}", f"{FIRST}{chunked}content-length: {length}\r\n{body}")
    for a, b in itertools.permutations(("0", "2", "3"), 2):
        add("refused", f"{FIRST}content-length: {a}\r\ncontent-length: {b}\r\n\r\n{{}}", f"{FIRST}content-length: {a}, {b}\r\n\r\n{{}}")
    for length in ("+2", "-2", "0x2", "2 2", "2.0", "two", "", "2;", "99999999999999999999", "18446744073709551618", "\t", "2\x00", "²"):
        add("refused", f"{FIRST}content-length: {length}\r\n\r\n{{}}")
    for length in ("02", "2 ", " 2", "\t2", "0000000000000002"):
        add("either", f"{FIRST}content-length: {length}\r\n\r\n{{}}")
    for coding in ("xchunked", "identity", "gzip", "chunked, gzip", "chunked, chunked", "gzip, chunked", "chunked;q=1", "chunked x", '"chunked"', "x, chunked",
                   "chunked,, gzip", "\x0bchunked", "chunked\x00", "cow"):
        add("refused", f"{FIRST}transfer-encoding: {coding}\r\n{body}")
    for coding in ("Chunked", "CHUNKED", " chunked", "chunked ", "\tchunked", ", chunked", "chunked,"):
        add("either", f"{FIRST}transfer-encoding: {coding}\r\n{body}")
    for twice in (("chunked", "chunked"), ("chunked", "identity"), ("identity", "chunked"), ("gzip", "chunked"), ("chunked", "x")):
        add("refused", FIRST + "".join(f"transfer-encoding: {coding}\r\n" for coding in twice) + body)
    for old in ("HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/1.2", "HTTP/11", "http/1.1", "HTTP/1", "HTTP/1.1 x", "XTTP/1.1"):
        add("refused", f"POST /first {old}\r\nhost: a\r\n{chunked}{body}")
    # Names and values that two readers may read differently.
    for name in ("content-length ", "content-length\t", " content-length", "content_length\x00", "content-length\x0b", "content\x7flength",
                 "content-length\r", "content length", "content-length(", "content-length:", "(content-length"):
        add("refused", f"{FIRST}{name}: 2\r\n\r\n{{}}")
    for name in ("transfer-encoding ", "transfer-encoding\t", " transfer-encoding", "transfer encoding", "transfer-encoding\x00", "tränsfer-encoding"):
        add("refused", f"{FIRST}{name}: chunked\r\n{body}")
    for value in ("a\x00b", "a\rb", "a\nb", "a\x0bb", "a\x01b", "a\x7fb"):
        add("refused", f"{FIRST}content-length: 2\r\nx: {value}\r\n\r\n{{}}")
    add("refused", f"{FIRST}content-length: 2\r\nx: a\r\n b\r\n\r\n{{}}", f"{FIRST}content-length: 2\r\nx: a\r\n\tcontent-length: 0\r\n\r\n{{}}",
        f"{FIRST} content-length: 2\r\n\r\n{{}}", f"{FIRST}nocolon\r\ncontent-length: 2\r\n\r\n{{}}", f"{FIRST}: empty\r\ncontent-length: 2\r\n\r\n{{}}")
    # Line ends.
    add("either", f"{FIRST}content-length: 2\n\r\n{{}}".replace("host: a\r\n", "host: a\n"), "POST /first HTTP/1.1\nhost: a\ncontent-length: 2\n\n{}",
        f"{FIRST}content-length: 2\r\n\n{{}}", f"{FIRST}content-length: 2\n\n{{}}", f"{FIRST}x: a\n\r\ncontent-length: 2\r\n\r\n{{}}")
    add("refused", "POST /first HTTP/1.1\rhost: a\rcontent-length: 2\r\r{}", f"{FIRST}content-length: 2\r\r\n\r\n{{}}")
    # Targets, methods and hosts.
    for line in ("POST  /first HTTP/1.1", " POST /first HTTP/1.1", "POST /first  HTTP/1.1", "POST\t/first HTTP/1.1", "POST /fi rst HTTP/1.1", "POST /first",
                 "POST /first\x00 HTTP/1.1", "P(ST /first HTTP/1.1", "POST first HTTP/1.1", "POST /fir\x7fst HTTP/1.1", "POST /first HTTP/1.1 ", "POST"):
        add("refused", f"{line}\r\nhost: a\r\ncontent-length: 2\r\n\r\n{{}}")
    for host in ("", "host: a\r\nhost: b\r\n", "host: a\r\nHost: a\r\n", "host: a b\r\n", "host: a,b\r\n", "host: a/b\r\n", "host: a@b\r\n", "host: a?b\r\n",
                 "host: a#b\r\n", "host: a:x\r\n", "host: [::1\r\n", "host : a\r\n"):
        add("refused", f"POST /first HTTP/1.1\r\n{host}content-length: 2\r\n\r\n{{}}")
    # Chunks.
    for size in ("-2", "+2", "0x2", "2 2", "g", "", " ", "ffffffffffffffff2", "10000000000000002", "2\x00", "2\t2", "2,", "²", "2.", "\r\n2"):
        add("refused", f"{FIRST}{chunked}\r\n{size}\r\n{{}}\r\n0\r\n\r\n")
    for size in ("2;a", "2;a=b", '2;a="b"', "02", "2;", "0000000000000002"):
        add("either", f"{FIRST}{chunked}\r\n{size}\r\n{{}}\r\n0\r\n\r\n")
    for size in ("2;" + "a" * 20_000, "2;a\nb", "2\n"):
        add("refused", f"{FIRST}{chunked}\r\n{size}\r\n{{}}\r\n0\r\n\r\n")
    for rest in ("2\r\n{}0\r\n\r\n", "2\r\n{}x\r\n0\r\n\r\n", "2\r\n{}\n0\r\n\r\n", "2\r\n{}\r0\r\n\r\n", "2\n{}\r\n0\r\n\r\n", "2\r{}\r\n0\r\n\r\n", "1\r\n{}\r\n0\r\n\r\n",
                 "3\r\n{}\r\n0\r\n\r\n"):
        add("refused", f"{FIRST}{chunked}\r\n{rest}")
    for trailers in ("content-length: 9\r\n", "transfer-encoding: chunked\r\n", "host: b\r\n", "x: y\r\n"):
        add("either", f"{FIRST}{chunked}\r\n2\r\n{{}}\r\n0\r\n{trailers}\r\n")
    for trailers in ("x y\r\n", "x\x00: y\r\n", "x : y\r\n"):
        add("refused", f"{FIRST}{chunked}\r\n2\r\n{{}}\r\n0\r\n{trailers}\r\n")
    # A refused upgrade with a body; later bytes must not be read as the other protocol.
    for up in ("upgrade: websocket\r\nconnection: upgrade\r\n", "upgrade: h2c\r\nconnection: upgrade, http2-settings\r\nhttp2-settings: AAMAAABk\r\n",
               "upgrade: x\r\nconnection: upgrade\r\n", "expect: 100-continue\r\n", "connection: content-length\r\n", "connection: transfer-encoding\r\n"):
        add("either", f"{FIRST}{up}content-length: 2\r\n\r\n{{}}", f"{FIRST}{up}{chunked}{body}")
    # Well formed; all of them have to pass.
    for method in ("POST", "PUT", "PATCH", "DELETE", "GET", "REPORT"):
        add("passes", f"{method} /first HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{{}}", f"{method} /first HTTP/1.1\r\nhost: a\r\n{chunked}{body}",
            f"{method} /first HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n", f"{method} /first HTTP/1.1\r\nhost: a\r\n{chunked}\r\n0\r\n\r\n")
    add("passes", f"\r\n{FIRST}content-length: 2\r\n\r\n{{}}", f"{FIRST}{chunked}\r\n1\r\n{{\r\n1\r\n}}\r\n0\r\n\r\n",
        "POST http://a/first HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}", f"{FIRST}x-a: \x80\xff\r\ncontent-length: 2\r\n\r\n{{}}")
    return given


# ---------------------------------------------------------------------------------------- the ends

async def serve(reader, writer, kept):
    """Writes down each message: target and body. `kept` is a file."""
    while (lines := await kit.read_head(reader)) is not None:
        body, whole = await kit.read_body(reader, kit.fields_of(lines))
        if b"/first" in lines[0] or b"/second" in lines[0]:
            with open(kept, "ab") as file:
                file.write(b"%s %s %s\n" % (lines[0].split(b" ")[1], body.hex().encode() or b"-", b"whole" if whole else b"cut"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ndone")
        await writer.drain()


async def statuses(address, request):
    """The answers to the request with the second one behind it."""
    reader, writer = await asyncio.open_connection(*address)
    found = []
    with contextlib.suppress(OSError, EOFError, ValueError, TimeoutError):
        writer.write(request + SECOND)
        async with asyncio.timeout(3):
            while (lines := await kit.read_head(reader)) is not None:
                if (status := int(lines[0].split()[1])) >= 200:
                    found.append(status)
                    await kit.read_body(reader, kit.fields_of(lines))
    writer.close()
    return found


def strict(request):
    """The messages of the bytes by h11: targets and bodies, or None if it refuses them."""
    import h11

    connection, found = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20), []
    connection.receive_data(request + SECOND)
    connection.receive_data(b"")
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                found.append((event.target, b""))
            elif isinstance(event, h11.Data):
                found[-1] = (found[-1][0], found[-1][1] + bytes(event.data))
            elif event is h11.PAUSED:
                connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                connection.start_next_cycle()
            elif isinstance(event, h11.ConnectionClosed) or event is h11.NEED_DATA:
                return found
    except h11.RemoteProtocolError:
        return found and None


def start_nginx(stack, backend):
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if not program:
        raise kit.Wrong("needs nginx (Debian package nginx)")
    folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    port = kit.free_port()
    (folder / "nginx.conf").write_text(NGINX % (port, backend))
    kit.started(stack, [program, "-p", folder, "-c", "nginx.conf"], stderr=subprocess.DEVNULL)
    kit.wait_for("nginx listens", lambda: socket.create_connection(("127.0.0.1", port), 1))
    return ("127.0.0.1", port)


class Way:
    """A proxy in front of a separate backend."""

    def __init__(self, stack, start):
        self.kept = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())) / "seen"
        self.kept.touch()
        self.address = start(stack.enter_context(kit.backend(serve, self.kept)))

    def take(self, request):
        """Statuses, and the messages that reached the backend."""
        found = asyncio.run(statuses(self.address, request))
        seen = [line.split() for line in self.kept.read_bytes().splitlines()]
        self.kept.write_bytes(b"")
        return found, [(target, b"" if body == b"-" else bytes.fromhex(body.decode()), how == b"whole") for target, body, how in seen]


def origin_form(target):
    return target.replace(b"http://a", b"")


def judge(wanted, given, messages, others):
    """The fault in Foretell's handling of a request, or None."""
    first = [m for m in messages if b"/first" in m[0] and m[2]]
    if wanted == "refused":
        return f"passed on as {messages}, answered {given}" if first or 200 in given[:1] else None
    if wanted == "closes" and any(b"/second" in m[0] for m in messages):
        return f"went on: {messages}"
    if wanted == "passes" and not first:
        return f"refused: {given}"
    if len(first) > 1 or any(origin_form(m[0]) not in (b"/first", b"/second") for m in messages):
        return f"became {messages}"
    for name, read in others.items():
        theirs = [(origin_form(target), body) for target, body in (m[:2] for m in read or [])]
        if first and theirs and (origin_form(first[0][0]), first[0][1]) != theirs[0]:
            return f"{messages}, but {name} reads {theirs}"
    return None


def smuggling(args, numbers):
    given = corpus()
    with contextlib.ExitStack() as stack:
        proxies = {}

        def foretell(backend):
            proxies["foretell"] = kit.Proxy(stack, args.foretell, kit.before(backend), "timeouts: { header: 2s, body: 2s, keep_alive: 2s }")
            return proxies["foretell"].address

        ours, nginx = Way(stack, foretell), Way(stack, lambda backend: start_nginx(stack, backend))
        wrong, passed, by_nginx = [], 0, 0
        for wanted, request in given:
            found, messages = ours.take(request)
            _, theirs = nginx.take(request)
            others = {"nginx": [m for m in theirs if m[2]], "h11": strict(request)}
            passed += any(b"/first" in m[0] for m in messages)
            by_nginx += any(b"/first" in m[0] for m in theirs)
            if what := judge(wanted, found, messages, others):
                wrong.append(f"{request[:160]!r} ({wanted}): {what}")
        alive = asyncio.run(statuses(ours.address, b"GET /first HTTP/1.1\r\nhost: a\r\n\r\n"))
    for line in wrong:
        print("  " + line)
    numbers.at_least(17, "requests of the corpus", len(given), 200)
    numbers.note(17, "of them passed on by Foretell", passed)
    numbers.note(17, "of them passed on by nginx", by_nginx)
    numbers.at_most(17, "handled wrongly, or read differently by nginx or h11", len(wrong), 0)
    numbers.at_least(17, "answers afterwards", alive.count(200), 2)


if __name__ == "__main__":
    kit.main(smuggling, __doc__)
