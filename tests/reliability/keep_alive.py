#!/usr/bin/env python3
"""The keep-alive race: a backend closes an idle connection at the moment of the next request.

    keep_alive.py [--foretell BIN] [--requests N] [--clients N] [--idle MS]

The backend closes a connection after IDLE milliseconds without a request; clients send at gaps
around that time, so that many requests meet the end of their connection. Completions, other POSTs
and GETs, streamed and whole. The backend answers and counts every request that it read. Bounds: no
failure of a completion or a GET that a client can see. Requests that may not be sent twice, POSTs
that are no completions, are counted apart; so are completions that the backend has seen twice.
"""

import asyncio
import collections
import contextlib
import multiprocessing
import random

import kit

PATHS = {"completion": "/v1/completions", "post": "/v1/files", "get": "/v1/models"}


async def serve(reader, writer, idle, closed):
    while True:
        try:
            async with asyncio.timeout(idle):
                first = await reader.readexactly(1)
        except asyncio.IncompleteReadError:
            return
        except TimeoutError:
            closed.value += 1
            return
        lines = await kit.read_head(reader)
        if lines is None:
            return
        lines[0] = first + lines[0]
        fields = kit.fields_of(lines)
        body, _ = await kit.read_body(reader, fields)
        answer = body or b"{}"
        if b'"stream"' in body:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                         + kit.chunk(b"data: " + answer + b"\n\n") + kit.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(answer) + answer)
        await writer.drain()


async def client(number, address, requests, idle, seen):
    rng, streams = random.Random(number), None
    await asyncio.sleep(rng.uniform(0, max(2 * idle, 5)))
    for request in range(requests):
        kind = rng.choices(list(PATHS), [6, 1, 3])[0]
        stream = b', "stream": true' if rng.randrange(2) else b""
        body = b'{"model": "m", "prompt": "%d-%d"%s}' % (number, request, stream)
        sent = kit.post(PATHS[kind], body) if kind != "get" else b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n"
        try:
            streams = streams or await asyncio.open_connection(*address)
            status, _, answer, whole = await kit.ask(*streams, sent)
            good = status == 200 and whole and (kind == "get" or b"%d-%d" % (number, request) in answer)
            what = "answered" if good else f"HTTP {status}"
        except (OSError, EOFError) as error:
            streams, what = None, type(error).__name__
        seen[kind, what] += 1
        # Most gaps end within some milliseconds of the backend's idle timeout.
        await asyncio.sleep(max(0.0, rng.gauss(idle, idle / 10) if rng.randrange(4) else rng.uniform(0, 2 * idle)))


def race(args, numbers):
    seen, idle, closed = collections.Counter(), args.idle / 1000, multiprocessing.Value("q")
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(kit.backend(serve, idle, closed))
        proxy = kit.Proxy(stack, args.foretell, kit.before(address))

        async def all_of_them():
            each = args.requests // args.clients
            await asyncio.gather(*(client(number, proxy.address, each, idle, seen) for number in range(args.clients)))

        asyncio.run(all_of_them())
        again = proxy.metric("foretell_replica_retries_total")
    print("  " + ", ".join(f"{kind} {what} {count:,}" for (kind, what), count in sorted(seen.items())))
    numbers.note(23, "requests", sum(seen.values()))
    numbers.note(23, "connections that the backend closed for being idle", closed.value)
    numbers.note(23, "requests sent again", again)
    for kind in ("completion", "get"):
        failed = sum(count for (of, what), count in seen.items() if of == kind and what != "answered")
        numbers.at_most(23, f"failures that a client saw, {kind}s", failed, 0)
    failed = sum(count for (of, what), count in seen.items() if of == "post" and what != "answered")
    numbers.note(23, "failures that a client saw, of POSTs that may not be sent twice", failed)


if __name__ == "__main__":
    kit.main(race, __doc__, ("requests", 100_000, "requests"), ("clients", 60, "clients at a time"),
             ("idle", 20.0, "milliseconds for which the backend keeps an idle connection"))
