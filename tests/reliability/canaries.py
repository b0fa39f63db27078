#!/usr/bin/env python3
"""Marked requests over reused connections in front of a faulty backend: no answer reaches another.

    canaries.py [--foretell BIN] [--requests N] [--clients N]

Every request has a mark in its path, a header field and its body; the backend answers with all
three, and every seventh answer is broken: shorter or longer than its length, cut, followed by
another answer, preceded by interim answers, or empty. A client must read its own mark alone, or an
error. Bound: no byte of another request's answer.
"""

import asyncio
import collections
import contextlib
import multiprocessing
import random
import re

import kit

MARK = re.compile(rb"canary-\d+-\d+")
BREAKS = ("short", "behind", "cut", "interim", "nothing", "half_chunk", "garbage", "early")


async def serve(reader, writer, opened):
    """Answers with the mark; the path names the fault."""
    opened.value += 1
    while (lines := await kit.read_head(reader)) is not None:
        fields = kit.fields_of(lines)
        body, _ = await kit.read_body(reader, fields)
        path = lines[0].split()[1]
        if b"canary" not in path:
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            continue
        mark, how = MARK.search(path)[0], path.rsplit(b"/", 1)[1].decode()
        answer = b"%s %s %s" % (mark, fields[b"x-mark"], body)
        head = b"HTTP/1.1 200 OK\r\nx-mark: %s\r\ncontent-length: %d\r\n\r\n"
        good = head % (mark, len(answer)) + answer
        chunked = b"HTTP/1.1 200 OK\r\nx-mark: %s\r\ntransfer-encoding: chunked\r\n\r\n" % mark
        if how in ("whole", "chunks"):
            writer.write(good if how == "whole" else chunked + kit.chunk(answer[:9]) + kit.chunk(answer[9:]) + b"0\r\n\r\n")
            await writer.drain()
            continue
        if how == "behind":
            # Another request's answer follows; the connection stays open.
            writer.write(good + head.replace(b"200 OK", b"201 Created") % (b"canary-0-0", 10) + b"canary-0-0")
            await writer.drain()
            continue
        if how == "interim":
            writer.write(b"HTTP/1.1 103 Early Hints\r\nx-mark: %s\r\n\r\n" % mark * 20 + good)
            await writer.drain()
            continue
        writer.write({"short": head % (mark, len(answer) + 50) + answer, "cut": good[:-7], "nothing": b"",
                      "half_chunk": chunked + kit.chunk(answer)[:-6], "garbage": b"\x00\x01 canary-0-0\r\n\r\n",
                      "early": good[:20]}[how])
        return


async def client(number, address, requests, seen):
    rng, streams = random.Random(number), None
    for request in range(requests):
        mark = b"canary-%d-%d" % (number + 1, request)
        how = rng.choice(BREAKS) if rng.randrange(7) == 0 else rng.choice(["whole", "chunks"])
        path = rng.choice(["/v1/files", "/v1/completions", "/v1/embeddings"]) + f"/{mark.decode()}/{how}"
        body = b'{"prompt": "%s", "model": "m"}' % mark
        try:
            if streams is None:
                streams = await asyncio.open_connection(*address)
            request = kit.post(path, body, f"x-mark: {mark.decode()}")
            status, fields, answer, whole = await kit.ask(*streams, request)
        except (OSError, EOFError, ValueError):
            seen["connection ended"] += 1
            streams = None
            continue
        text = answer + b" ".join(fields.values())
        seen["strange"] += any(found != mark for found in MARK.findall(text))
        if how in ("whole", "chunks", "behind", "interim"):
            good = whole and status == 200 and answer == b"%s %s %s" % (mark, mark, body)
            seen["right" if good else "a good answer that was not passed on"] += 1
        else:
            seen["an error" if status >= 500 or not whole else "a broken answer that passed for whole"] += 1
        if not whole or fields.get(b"connection") == b"close":
            streams[1].close()
            streams = None


async def clients(args, address, seen):
    await asyncio.gather(*(client(number, address, args.requests // args.clients, seen) for number in range(args.clients)))


def canaries(args, numbers):
    seen, opened = collections.Counter(), multiprocessing.Value("q")
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(kit.backend(serve, opened))
        proxy = kit.Proxy(stack, args.foretell, kit.before(address))
        asyncio.run(clients(args, proxy.address, seen))
    print("  " + ", ".join(f"{what} {count:,}" for what, count in seen.most_common()))
    numbers.note(18, "connections that the backend accepted", opened.value)
    numbers.at_least(18, "marked requests", args.requests // args.clients * args.clients, args.requests)
    numbers.at_most(18, "answers with bytes of another request", seen["strange"], 0)
    numbers.at_most(18, "broken answers that passed for whole", seen["a broken answer that passed for whole"], 0)
    numbers.at_most(18, "good answers that were not passed on", seen["a good answer that was not passed on"], 0)


if __name__ == "__main__":
    kit.main(canaries, __doc__, ("requests", 100_000, "marked requests"), ("clients", 40, "connections at a time"))
