#!/usr/bin/env python3
"""Memory of slow heads: thousands of clients that have sent half a request head.

    tests/reliability/slow_heads.py [--binary target/release/foretell] [--count 9000] [--limit-mib 64]

Prints the growth of resident memory, and the part of it that is left when the connections have
ended. Exits 2 where it grows by more than the limit, or where more than half of the growth stays.
"""

import argparse
import asyncio
import sys

from proxy import Proxy, descriptors, settled

HALF = (b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer sk-0123456789abcdef\r\nx-slow: ")


async def half(port):
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HALF)
    return writer


async def drip(writers):
    """A byte from time to time, as slow clients send."""
    while True:
        await asyncio.sleep(2)
        for writer in writers:
            writer.write(b"a")


async def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binary", default="target/release/foretell")
    parser.add_argument("--count", type=int, default=9000)
    parser.add_argument("--limit-mib", type=float, default=64)
    args = parser.parse_args()
    descriptors(2 * args.count + 256)
    timeout = "timeouts: { header: 10m }\n"
    with Proxy(args.binary, 1, f"limits: {{ connections: {args.count + 64} }}\n{timeout}") as proxy:
        before = await settled(proxy)
        opened = []
        while len(opened) < args.count:
            more = min(500, args.count - len(opened))
            opened += await asyncio.gather(*(half(proxy.port) for _ in range(more)))
        dripping = asyncio.create_task(drip(opened))
        await asyncio.sleep(5)
        during = await settled(proxy)
        dripping.cancel()
        for writer in opened:
            writer.close()
        after = await settled(proxy, below=before + (during - before) // 2)
    grown, left = (during - before) / (1 << 20), (after - before) / (1 << 20)
    print(f"{args.count} slow heads: resident memory grew by {grown:.1f} MiB (limit {args.limit_mib:g}), "
          f"{grown * 1024 / args.count:.1f} KiB each; {left:.1f} MiB of it are left after they have ended")
    return 2 if grown > args.limit_mib or left > grown / 2 else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
