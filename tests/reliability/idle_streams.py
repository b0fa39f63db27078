#!/usr/bin/env python3
"""Memory of an idle stream: thousands of clients wait in the middle of an SSE answer.

    tests/reliability/idle_streams.py [--binary target/release/foretell] [--count 4500] [--limit-kib 40]

Each stream is one client connection and one connection to the backend. Prints the growth of
resident memory per stream, including that of the connections after it has ended, and exits 2 where
a stream takes more than the limit.
"""

import argparse
import asyncio
import sys

from proxy import Proxy, descriptors, settled

BODY = b'{"model":"m","prompt":"a","stream":true}'
REQUEST = (b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\naccept: text/event-stream\r\n"
           b"authorization: Bearer sk-0123456789abcdef\r\nuser-agent: idle-streams\r\ncontent-length: %d\r\n\r\n" % len(BODY)) + BODY
EVENT = b'data: {"id":"c","object":"text_completion","choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def backend(reader, writer):
    """One event for every completion, then silence; 404 for everything else."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            await reader.readexactly(int(length[0].split(b":")[1]) if length else 0)
            if not head.startswith(b"POST /v1/completions"):
                writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                continue
            writer.write(HEAD + b"%x\r\n%s\r\n" % (len(EVENT), EVENT))
            await reader.read()
            return
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def stream(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST)
    await reader.readuntil(b"\n\n")
    return writer


async def streams(port, count):
    """Opens them a hundred at a time."""
    opened = []
    while len(opened) < count:
        more = min(100, count - len(opened))
        opened += await asyncio.gather(*(stream(port) for _ in range(more)))
    return opened


async def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binary", default="target/release/foretell")
    parser.add_argument("--count", type=int, default=4500)
    parser.add_argument("--limit-kib", type=float, default=40)
    args = parser.parse_args()
    descriptors(2 * args.count + 256)
    server = await asyncio.start_server(backend, "127.0.0.1", 0, backlog=4096)
    with Proxy(args.binary, server.sockets[0].getsockname()[1]) as proxy:
        # One-time allocations of the first requests are not counted to streams.
        for writer in await streams(proxy.port, 50):
            writer.close()
        before = await settled(proxy)
        opened = await streams(proxy.port, args.count)
        during = await settled(proxy)
        for writer in opened:
            writer.close()
        after = await settled(proxy, below=before + (during - before) // 2)
    each = (during - before) / args.count / 1024
    print(f"{args.count} idle streams: {each:.1f} KiB each (limit {args.limit_kib:g}); resident memory "
          f"{before >> 20} -> {during >> 20} -> {after >> 20} MiB after they have ended")
    return 2 if each > args.limit_kib else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
