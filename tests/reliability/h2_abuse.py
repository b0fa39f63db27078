#!/usr/bin/env python3
"""HTTP/2 protocol abuse, with frames by hand: the end of the connection, its time and its cost.

    h2_abuse.py [--foretell BIN]

Rapid reset, CONTINUATION without an end, floods of SETTINGS, PING, PRIORITY and empty DATA, an
HPACK bomb, a window that stays at zero, and breaches of the framing that RFC 9113 calls connection
errors (sections in the table). Bounds: rapid reset and CONTINUATION end within a second of the
flood; no flood adds more than 16 MiB; every breach is an error; another client is answered
throughout.
"""

import contextlib
import socket
import struct
import time
import urllib.request

import kit

DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 1, 1, 4, 8, 32
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
ERRORS = {0: "NO_ERROR", 1: "PROTOCOL_ERROR", 2: "INTERNAL_ERROR", 3: "FLOW_CONTROL_ERROR", 4: "SETTINGS_TIMEOUT", 5: "STREAM_CLOSED",
          6: "FRAME_SIZE_ERROR", 7: "REFUSED_STREAM", 8: "CANCEL", 9: "COMPRESSION_ERROR", 11: "ENHANCE_YOUR_CALM"}
BODY = 1 << 20


def frame(kind, flags=0, stream=0, payload=b""):
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name, value):
    """A field that is neither indexed nor compressed (RFC 7541, 6.2.2)."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def block(method=b"GET", path=b"/", *more):
    fields = [(b":method", method), (b":scheme", b"http"), (b":authority", b"api"), (b":path", path), *more]
    return b"".join(literal(name, value) for name, value in fields)


class H2:
    def __init__(self, address, settings=b""):
        self.socket = socket.create_connection(address, 30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.send(PREFACE + frame(SETTINGS, payload=settings))

    def send(self, data):
        """False once the other end has closed."""
        try:
            self.socket.sendall(data)
            return True
        except OSError:
            return False

    def frames(self, limit):
        """Frames within `limit` seconds, and None at the end of the connection."""
        left, until = b"", time.monotonic() + limit
        while (now := time.monotonic()) < until:
            while len(left) >= 9 and len(left) >= 9 + (size := int.from_bytes(left[:3], "big")):
                yield left[3], left[4], int.from_bytes(left[5:9], "big") & 0x7FFFFFFF, left[9:9 + size]
                left = left[9 + size:]
            self.socket.settimeout(until - now)
            try:
                data = self.socket.recv(1 << 16)
            except TimeoutError:
                return
            except OSError:
                data = b""
            if not data:
                yield None
                return
            left += data

    def end(self, limit=5, stream=None):
        """End of the connection or the stream: an error's name, `closed`, `answered`, or `open`."""
        for found in self.frames(limit):
            if found is None:
                return "closed"
            kind, _, on, payload = found
            if kind == GOAWAY and (error := int.from_bytes(payload[4:8], "big")):
                return ERRORS.get(error, str(error))
            if kind == RST and on == stream:
                return ERRORS.get(int.from_bytes(payload[:4], "big"), "reset")
            if kind == HEADERS and on == stream:
                return "answered"
        return "open"


async def serve(reader, writer):
    while (lines := await kit.read_head(reader)) is not None:
        await kit.read_body(reader, kit.fields_of(lines))
        body = b"x" * BODY if b"/large" in lines[0] else b"{}"
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()


# ------------------------------------------------------------------------------------------ floods

def rapid_reset(n):
    stream = 2 * n + 1
    return frame(HEADERS, END_HEADERS | END_STREAM, stream, block()) + frame(RST, 0, stream, struct.pack(">I", 8))


def flood(address, first, each, seconds=8, batch=100):
    """Sends frames until the connection ends; returns seconds, frames sent, and its end."""
    peer, begun, sent = H2(address), time.monotonic(), 0
    peer.send(first)
    peer.socket.settimeout(seconds)
    while time.monotonic() - begun < seconds:
        if not peer.send(b"".join(each(n) for n in range(sent, sent + batch))):
            break
        sent += batch
    took = time.monotonic() - begun
    return took, sent, peer.end(2)


FLOODS = {  # name: (first bytes, frames, must end)
    "rapid reset": (b"", rapid_reset, True),
    "CONTINUATION without an end": (frame(HEADERS, 0, 1, block()), lambda n: frame(CONTINUATION, 0, 1, literal(b"x-%04d" % (n % 9999), b"v" * 100)), True),
    "empty CONTINUATION": (frame(HEADERS, 0, 1, block()), lambda n: frame(CONTINUATION, 0, 1), True),
    "SETTINGS": (b"", lambda n: frame(SETTINGS), False),
    "PING": (b"", lambda n: frame(PING, 0, 0, b"pingpong"), False),
    "PRIORITY": (b"", lambda n: frame(PRIORITY, 0, 2 * n + 1, struct.pack(">IB", 0, 1)), False),
    "empty DATA": (frame(HEADERS, END_HEADERS, 1, block(b"POST")), lambda n: frame(DATA, 0, 1), False),
}


def bomb():
    """A field of 4,000 bytes, put into the table once and named 8,000 times in 8,000 bytes."""
    first = b"\x40" + b"\x01x" + b"\x7f" + bytes([0x80 | ((4000 - 127) & 0x7F), (4000 - 127) >> 7]) + b"v" * 4000
    return block() + first + b"\xbe" * 8000


# ---------------------------------------------------------------------------------------- breaches

def headers(stream=1, flags=END_HEADERS | END_STREAM, data=None):
    return frame(HEADERS, flags, stream, block() if data is None else data)


def setting(key, value):
    return struct.pack(">HI", key, value)


BREACHES = {
    "4.2 a frame above the largest size": frame(DATA, 0, 1, b"x" * 16385),
    "4.2 SETTINGS of a size that is no multiple of six": frame(SETTINGS, 0, 0, b"xxx"),
    "4.3 a header block that cannot be decoded": headers(data=b"\xff\xff\xff\xff\xff\xff\xff\xff"),
    "4.3 an index that no field has": headers(data=block() + b"\xfe"),
    "4.3 an interrupted header block": headers(flags=END_STREAM) + frame(PING, 0, 0, b"pingpong"),
    "4.3 a header block that another stream goes on with": headers(flags=END_STREAM) + frame(CONTINUATION, END_HEADERS, 3, b""),
    "5.1 DATA on a stream that is idle": frame(DATA, 0, 1, b"x"),
    "5.1 RST_STREAM on a stream that is idle": frame(RST, 0, 1, struct.pack(">I", 8)),
    "5.1 WINDOW_UPDATE on a stream that is idle": frame(WINDOW, 0, 1, struct.pack(">I", 1)),
    "5.1 CONTINUATION on a stream that is idle": frame(CONTINUATION, END_HEADERS, 1, b""),
    "5.1.1 a stream with an even number": headers(2),
    "5.1.1 a number below an earlier one": headers(5) + headers(3),
    "6.1 DATA on stream 0": frame(DATA, 0, 0, b"x"),
    "6.1 DATA with more padding than payload": headers(flags=END_HEADERS) + frame(DATA, PADDED, 1, b"\x0a1234"),
    "6.2 HEADERS on stream 0": headers(0),
    "6.2 HEADERS with more padding than payload": frame(HEADERS, END_HEADERS | PADDED, 1, b"\xff" + block()),
    "6.3 PRIORITY on stream 0": frame(PRIORITY, 0, 0, b"\0\0\0\0\0"),
    "6.4 RST_STREAM on stream 0": frame(RST, 0, 0, struct.pack(">I", 8)),
    "6.4 RST_STREAM of another size": headers(flags=END_HEADERS) + frame(RST, 0, 1, b"xxx"),
    "6.5 SETTINGS on a stream": frame(SETTINGS, 0, 1),
    "6.5 an acknowledgement with a payload": frame(SETTINGS, ACK, 0, setting(3, 1)),
    "6.5.2 ENABLE_PUSH of 2": frame(SETTINGS, 0, 0, setting(2, 2)),
    "6.5.2 INITIAL_WINDOW_SIZE above 2^31-1": frame(SETTINGS, 0, 0, setting(4, 1 << 31)),
    "6.5.2 MAX_FRAME_SIZE below 2^14": frame(SETTINGS, 0, 0, setting(5, 100)),
    "6.5.2 MAX_FRAME_SIZE above 2^24-1": frame(SETTINGS, 0, 0, setting(5, 1 << 24)),
    "6.6 PUSH_PROMISE from a client": headers(flags=END_HEADERS) + frame(PUSH, END_HEADERS, 1, struct.pack(">I", 2) + block()),
    "6.7 PING on a stream": frame(PING, 0, 1, b"pingpong"),
    "6.7 PING of another size": frame(PING, 0, 0, b"ping"),
    "6.8 GOAWAY on a stream": frame(GOAWAY, 0, 1, b"\0" * 8),
    "6.9 WINDOW_UPDATE of 0": frame(WINDOW, 0, 0, struct.pack(">I", 0)),
    "6.9 WINDOW_UPDATE of another size": frame(WINDOW, 0, 0, b"xxx"),
    "6.9.1 a window above 2^31-1": frame(WINDOW, 0, 0, struct.pack(">I", 0x7FFFFFFF)) * 2,
    "3.4 a preface that is none": None,
    # Stream errors and a connection error are both correct.
    "5.3 a stream that depends on itself": frame(HEADERS, END_HEADERS | WITH_PRIORITY | END_STREAM, 1, struct.pack(">IB", 1, 1) + block()),
    "5.1 HEADERS after the end of the stream": headers() + headers(),
    "8.1 trailers without an end": headers(flags=END_HEADERS) + headers(flags=END_HEADERS, data=literal(b"x", b"y")),
    "8.2.1 a field name in capitals": headers(data=block() + literal(b"X-Test", b"v")),
    "8.2.1 a line break in a value": headers(data=block() + literal(b"x", b"v\r\nw: 1")),
    "8.2.2 a field of the connection": headers(data=block() + literal(b"connection", b"keep-alive")),
    "8.2.2 transfer-encoding": headers(data=block() + literal(b"transfer-encoding", b"chunked")),
    "8.2.2 TE other than trailers": headers(data=block() + literal(b"te", b"gzip")),
    "8.3 an unknown pseudo-field": headers(data=block() + literal(b":x", b"v")),
    "8.3 a pseudo-field of answers": headers(data=block() + literal(b":status", b"200")),
    "8.3 a pseudo-field after the others": headers(data=literal(b"x", b"y") + block()),
    "8.3.1 no :method": headers(data=literal(b":scheme", b"http") + literal(b":path", b"/") + literal(b":authority", b"a")),
    "8.3.1 no :path": headers(data=literal(b":scheme", b"http") + literal(b":method", b"GET") + literal(b":authority", b"a")),
    "8.3.1 an empty :path": headers(data=block(path=b"")),
    "8.3.1 :method twice": headers(data=literal(b":method", b"GET") + block()),
    "8.1.1 a body of another length than content-length": headers(flags=END_HEADERS, data=block(b"POST", b"/", (b"content-length", b"5")))
    + frame(DATA, END_STREAM, 1, b"x"),
}


def breach(address, data):
    if data is None:
        peer = H2.__new__(H2)
        peer.socket = socket.create_connection(address, 30)
        peer.send(b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n")
        return peer.end(3)
    peer = H2(address)
    peer.send(data)
    streams = {1: 0, 3: 0}
    for found in peer.frames(3):
        if found is None:
            return "closed"
        kind, _, on, payload = found
        if kind == GOAWAY and (error := int.from_bytes(payload[4:8], "big")):
            return ERRORS.get(error, str(error))
        if kind == RST:
            return ERRORS.get(int.from_bytes(payload[:4], "big"), "reset")
        if kind == HEADERS and on in streams:
            # 400 by entry 12 of the static table, 408, 411 and others by literals that begin with
            # the name's index 8.
            return "HTTP 200" if 0x88 in payload[:2] else "refused"
    return "open"


# ----------------------------------------------------------------------------------------- the run

def answered(address):
    try:
        with urllib.request.urlopen(f"http://{address[0]}:{address[1]}/", timeout=10) as answer:
            return answer.status == 200
    except OSError:
        return False


def floods(proxy, numbers):
    for name, (first, each, must_end) in FLOODS.items():
        before = proxy.resident()
        took, sent, how = flood(proxy.address, first, each)
        rose = (proxy.resident() - before) / kit.MIB
        print(f"  {name}: {sent:,} frames in {took:.2f} s, then {how}; {rose:+.1f} MiB")
        if must_end:
            numbers.at_most(15, f"{name}: seconds until the connection ends", took, 1.0, "s")
        numbers.at_most(15, f"{name}: memory", max(rose, 0.0), 16.0, "MiB")
        numbers.at_most(15, f"{name}: others that were not answered after it", sum(not answered(proxy.address) for _ in range(5)), 0)


def stalls(proxy, numbers):
    before = proxy.resident()
    peer = H2(proxy.address)
    peer.send(headers(data=bomb()[:16384]))
    how = peer.end(5, 1)
    numbers.at_most(15, "HPACK bomb: memory", max((proxy.resident() - before) / kit.MIB, 0.0), 16.0, "MiB")
    print(f"  HPACK bomb: {how}")
    # With a window of zero, no answer can be sent; `keep_alive` is 3 s here.
    peers = [H2(proxy.address, setting(4, 0)) for _ in range(100)]
    begun = time.monotonic()
    for peer in peers:
        peer.send(headers(data=block(b"GET", b"/large")))
    while proxy.metric("foretell_requests_in_flight") > 0 and time.monotonic() - begun < 60:
        time.sleep(0.2)
    numbers.at_most(15, "100 windows of nothing: seconds until no request is in flight", time.monotonic() - begun, 10.0, "s")
    for peer in peers:
        peer.socket.close()


def abuse(args, numbers):
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(kit.backend(serve))
        proxy = kit.Proxy(stack, args.foretell, kit.before(address), "timeouts: { keep_alive: 3s }")
        for _ in range(20):
            answered(proxy.address)
        floods(proxy, numbers)
        stalls(proxy, numbers)
        wrong = {}
        for name, data in BREACHES.items():
            how = breach(proxy.address, data)
            if how in ("open", "HTTP 200", "answered"):
                wrong[name] = how
        for name, how in wrong.items():
            print(f"  taken: {name}: {how}")
        numbers.note(15, "breaches of RFC 9113", len(BREACHES))
        numbers.at_most(15, "breaches that were accepted", len(wrong), 0)
        numbers.at_most(15, "others that were not answered after them", sum(not answered(proxy.address) for _ in range(5)), 0)


if __name__ == "__main__":
    kit.main(abuse, __doc__)
