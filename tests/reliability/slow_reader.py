#!/usr/bin/env python3
"""Clients that read 1 KB/s from a fast backend: buffered bytes per stream, and backpressure.

    slow_reader.py [--foretell BIN] [--clients N] [--seconds S]

Both ends have small socket buffers, so that the kernel's buffers do not hide the process's own.
Bounds: at most 128 KiB of resident memory per stream, a backend whose writes block, no stream cut.
"""

import asyncio
import contextlib
import multiprocessing
import socket
import time

import kit

PIECE = b"x" * 4096


async def serve(reader, writer, written):
    """Writes without end; `written` counts the bytes that were taken."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * kit.KIB)
    writer.transport.set_write_buffer_limits(high=0)
    while (lines := await kit.read_head(reader)) is not None:
        if b"POST" not in lines[0]:
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            continue
        await kit.read_body(reader, kit.fields_of(lines))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(kit.chunk(b"data: %s\n\n" % PIECE))
            await writer.drain()
            with written.get_lock():
                written.value += len(PIECE)


async def slow(address, seconds, read):
    """Reads 1 KB/s; false if the stream ends."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 * kit.KIB)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, address)
    await loop.sock_sendall(sock, kit.post("/v1/completions", b'{"model": "m", "stream": true}'))
    for _ in range(int(seconds)):
        given = await loop.sock_recv(sock, 1000)
        if not given:
            return False
        read[0] += len(given)
        await asyncio.sleep(1)
    sock.close()
    return True


async def clients(args, proxy, written):
    read, tasks = [0], []
    for _ in range(args.clients):
        tasks.append(asyncio.ensure_future(slow(proxy.address, args.seconds, read)))
        await asyncio.sleep(0.005)
    most, before_last = 0, None
    begun = time.monotonic()
    while not all(task.done() for task in tasks):
        await asyncio.sleep(1)
        most = max(most, proxy.resident())
        if before_last is None and time.monotonic() - begun > args.seconds * 3 / 4:
            before_last = (written.value, read[0])
    return sum(await asyncio.gather(*tasks)), most, before_last, (written.value, read[0])


def slow_readers(args, numbers):
    written = multiprocessing.Value("q")
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(kit.backend(serve, written))
        proxy = kit.Proxy(stack, args.foretell, kit.before(address))
        asyncio.run(slow(proxy.address, 1, [0]))
        base = proxy.resident()
        whole, most, (written_before, read_before), (written_end, read_end) = asyncio.run(clients(args, proxy, written))
    numbers.at_least(9, "streams that lasted to the end", whole, args.clients)
    numbers.at_most(9, "resident memory per stream", (most - base) / kit.KIB / args.clients, 128.0, "KiB")
    numbers.note(9, "in transit per stream at the end, including the kernel's buffers", (written_end - read_end) / kit.KIB / args.clients, "KiB")
    # Backpressure: once the kernel's buffers are full the backend can write hardly more than was
    # read.
    numbers.at_most(9, "written by the backend in the last quarter, more than was read, per stream",
                 max(written_end - written_before - (read_end - read_before), 0) / kit.KIB / args.clients, 128.0, "KiB")


if __name__ == "__main__":
    kit.main(slow_readers, __doc__, ("clients", 200, "clients at a time"), ("seconds", 120.0, "seconds of reading"))
