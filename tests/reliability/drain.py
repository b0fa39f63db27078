#!/usr/bin/env python3
"""SIGTERM under a thousand streams: none is cut within the grace; later ones are cut and counted.

    drain.py [--foretell BIN] [--streams N]

Three runs. In the first, all streams end by themselves within the grace: complete, exit code 0. In
the second they never end: they are cut after the grace, and the log has their number. In the third
a second signal ends the process at once.
"""

import asyncio
import contextlib
import re
import signal
import tempfile
import time

import kit

EVENTS = 60


async def serve(reader, writer):
    """Sixty events, one each half second; or a single one."""
    while (lines := await kit.read_head(reader)) is not None:
        body, _ = await kit.read_body(reader, kit.fields_of(lines))
        if b"stream" not in body:
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            continue
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for number in range(EVENTS):
            writer.write(kit.chunk(b"data: %d\n\n" % number))
            await writer.drain()
            await asyncio.sleep(0.5 if b"endless" not in body else 3600)
        writer.write(kit.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def begun(address, kind, begins):
    reader, writer = await asyncio.open_connection(*address)
    writer.write(kit.post("/v1/completions", b'{"model": "m", "stream": true, "user": "%s"}' % kind))
    lines = await kit.read_head(reader)
    begins.append(1)
    body, whole = await kit.read_body(reader, kit.fields_of(lines or []))
    writer.close()
    return whole and body.count(b"data: ") == EVENTS + 1 and body.endswith(b"[DONE]\n\n")


async def signalled(proxy, streams, kind, signals):
    """Number of complete streams, and seconds from the first signal to the process's end."""
    begins = []
    tasks = [asyncio.ensure_future(begun(proxy.address, kind, begins)) for _ in range(streams)]
    while len(begins) < streams:
        await asyncio.sleep(0.1)
    ready = await asyncio.to_thread(proxy.page, "/readyz")
    first = time.monotonic()
    for pause in signals:
        await asyncio.sleep(pause)
        proxy.process.send_signal(signal.SIGTERM)
    # Not ready at once; the admin listener answers until the end.
    until, not_ready = time.monotonic() + 5, None
    while not_ready is None and time.monotonic() < until and proxy.process.poll() is None:
        with contextlib.suppress(OSError):
            if not await asyncio.to_thread(proxy.page, "/readyz"):
                not_ready = time.monotonic() - first
        await asyncio.sleep(0.01)
    whole = sum(given is True for given in await asyncio.gather(*tasks, return_exceptions=True))
    code = await asyncio.to_thread(proxy.process.wait, 300)
    return whole, bool(ready), not_ready, time.monotonic() - first, code


def run(stack, args, grace, kind, *signals):
    address = stack.enter_context(kit.backend(serve))
    log = stack.enter_context(tempfile.TemporaryFile("w+"))
    proxy = kit.Proxy(stack, args.foretell, kit.before(address), f"drain: {{ delay: 0s, grace: {grace} }}\nobserve: {{ log: text, level: info, share: 0.0 }}", log=log)
    result = asyncio.run(signalled(proxy, args.streams, kind, signals))
    log.seek(0)
    return *result, log.read()


def drain(args, numbers):
    with contextlib.ExitStack() as stack:
        whole, ready, not_ready, took, code, _ = run(stack, args, "120s", b"ends", 0)
    numbers.at_least(28, "streams that came whole after SIGTERM", whole, args.streams)
    numbers.at_most(28, "seconds until it is not ready", not_ready if ready and not_ready is not None else 9e9, 1.0, "s")
    numbers.at_most(28, "seconds until the process ended", took, 120.0, "s")
    numbers.at_most(28, "exit code", code, 0)
    with contextlib.ExitStack() as stack:
        whole, _, _, took, _, log = run(stack, args, "5s", b"endless", 0)
    cut = max((int(n) for n in re.findall(r"cut[^0-9\n]*?(\d+)", re.sub(r"\x1b\[[0-9;]*m", "", log))), default=0)
    numbers.at_least(28, "endless streams that the log says were cut after a grace of 5 s", cut, args.streams)
    numbers.at_most(28, "seconds until that process ended", took, 15.0, "s")
    with contextlib.ExitStack() as stack:
        *_, took, _, _ = run(stack, args, "120s", b"endless", 0, 2)
    numbers.at_most(28, "seconds to the end by a second signal 2 s after the first", took, 5.0, "s")


if __name__ == "__main__":
    kit.main(drain, __doc__, ("streams", 1000, "streams"))
