#!/usr/bin/env python3
"""A thousand speculated streams at a time: resident memory of each.

    speculating.py [--foretell BIN] [--streams N]

A fake vLLM with long steps, so that all streams are in flight together. Bounds: at most 256 KiB
each, every stream complete with the requested number of tokens.
"""

import asyncio
import contextlib
import json
import random

import kit

POLICY = """version: 1
name: active
drafters:
  - { kind: prompt_lookup, ngram: { min: 1, max: 8 } }
gamma: { max: 8, fixed: 4 }
gates: { waiting: 1000000, kv: 1.0, stale: 24h, control: 10 }
holdback: { start: 0, floor: 0 }
"""
TOKENS = 48


async def one(address, number, begun):
    rng = random.Random(number)
    request = {"model": "toy", "prompt": [100 + rng.randrange(8) for _ in range(500)], "max_tokens": TOKENS, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}}
    reader, writer = await asyncio.open_connection(*address)
    writer.write(kit.post("/v1/completions", json.dumps(request).encode()))
    lines = await kit.read_head(reader)
    begun.append(number)
    body, whole = await kit.read_body(reader, kit.fields_of(lines))
    writer.close()
    events = [json.loads(line[6:]) for line in body.split(b"\n\n") if line.startswith(b"data: {")]
    usage = next((event["usage"] for event in events if event.get("usage")), {})
    return whole and usage.get("completion_tokens") == TOKENS, (usage.get("foretell") or {}).get("rounds", 0)


async def active(args, proxy):
    begun, most, at_once = [], 0, 0
    tasks = [asyncio.ensure_future(one(proxy.address, number, begun)) for number in range(args.streams)]
    while not all(task.done() for task in tasks):
        most = max(most, proxy.resident())
        at_once = max(at_once, await asyncio.to_thread(proxy.metric, "foretell_streams_in_flight"))
        await asyncio.sleep(0.5)
    return [task.result() if not task.exception() else (False, 0) for task in tasks], most, at_once


def speculating(args, numbers):
    with contextlib.ExitStack() as stack:
        engine = kit.fake_engine(stack, "vllm", "--pace-us", 500_000)
        proxy = kit.Proxy(stack, args.foretell, kit.toy(engine), policies={"active.yaml": POLICY})
        proxy.recognised("vllm")
        asyncio.run(one(proxy.address, 0, []))
        base = proxy.resident()
        ends, most, at_once = asyncio.run(active(args, proxy))
    numbers.note(7, "streams at a time, as Foretell counts them", at_once)
    numbers.note(7, "rounds per stream", sum(rounds for _, rounds in ends) / len(ends))
    numbers.at_most(7, "streams that were not whole", sum(not whole for whole, _ in ends), 0)
    numbers.at_least(7, "streams that were speculated on", sum(rounds > 0 for _, rounds in ends), args.streams)
    numbers.at_most(7, "resident memory per stream that is speculated on", (most - base) / kit.KIB / args.streams, 256.0, "KiB")


if __name__ == "__main__":
    kit.main(speculating, __doc__, ("streams", 1000, "streams at a time"))
