#!/usr/bin/env python3
"""An hour of mixed requests at a modest rate: leaks of memory, descriptors and connections.

    soak.py [--foretell BIN] [--minutes N] [--rate N]

A fake vLLM behind `foretell serve`. RATE requests per second: streams and whole answers that are
speculated on, passthrough ones, errors, clients that disconnect in mid-stream, new and kept
connections. Resident memory every ten seconds. Bounds: a slope of at most 1 MiB per hour after the
first ten minutes; at the end open descriptors, connections, requests in flight and the memory of
bodies as they were before.
"""

import asyncio
import contextlib
import json
import random
import sys
import time

import kit

MORE = """corpus: { bytes: 4MiB, ttl: 5m }
drain: { delay: 0s, grace: 1s }"""
POLICY = """version: 1
name: soak
mode: auto
drafters:
  - { kind: prompt_lookup, ngram: { min: 1, max: 8 } }
  - { kind: suffix, scope: tenant }
gamma: { max: 8, fixed: 4 }
holdback: { start: 0, floor: 0 }
"""
WARM = 600


def body(rng, stream):
    words = [100 + rng.randrange(8) for _ in range(rng.randrange(16, 200))]
    request = {"model": "toy", "prompt": words, "max_tokens": rng.randrange(8, 48), "temperature": 0, "stream": stream}
    return json.dumps(request).encode()


async def one(address, rng, counts):
    """One request on a new connection, of a random kind."""
    kind = rng.choices(["stream", "whole", "passthrough", "error", "leaves"], [4, 2, 8, 1, 1])[0]
    reader, writer = await asyncio.open_connection(*address)
    try:
        for _ in range(rng.choice([1, 1, 3])):
            if kind == "leaves":
                writer.write(kit.post("/v1/completions", body(rng, True)))
                await reader.read(rng.randrange(1, 2000))
                counts["left"] += 1
                return
            path, data = {"passthrough": ("/tokenize", b'{"prompt": "some words", "model": "toy"}'),
                          "error": ("/v1/completions", b'{"prompt": 1e999, ')}.get(kind, ("/v1/completions", body(rng, kind == "stream")))
            status, _, _, whole = await kit.ask(reader, writer, kit.post(path, data))
            counts[kind] += 1
            if not whole or (kind != "error" and status != 200) or (kind == "error" and not 400 <= status < 500):
                counts["failed"] += 1
    except (OSError, EOFError) as error:
        counts["failed"] += 1
        print(f"  {kind}: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        writer.close()


async def loaded(address, seconds, rate, rng, counts, each=None):
    """Open loop: a request every 1/rate seconds."""
    begun, running, number, due = time.monotonic(), set(), 0, 0.0
    while (now := time.monotonic() - begun) < seconds:
        task = asyncio.ensure_future(one(address, rng, counts))
        running.add(task)
        task.add_done_callback(running.discard)
        number += 1
        if each and now >= due:
            due += 10
            each(now)
        await asyncio.sleep(max(0.0, begun + number / rate - time.monotonic()))
    while running:
        await asyncio.wait(running, timeout=60)


def standing(proxy):
    """Figures that have to be as before once there are no requests."""
    page = {name: proxy.metric(name) for name in ("foretell_requests_in_flight", "foretell_streams_in_flight",
                                                  "foretell_replica_requests_in_flight", "foretell_memory_bytes")}
    return {"descriptors": proxy.descriptors(), "threads": proxy.threads(), **page}


def settled(proxy):
    """The minimum of each in ten seconds, after ten without requests.

    Scrapes sometimes take a descriptor."""
    time.sleep(10)
    looks = []
    for _ in range(20):
        looks.append(standing(proxy))
        time.sleep(0.5)
    return {name: min(look[name] for look in looks) for name in looks[0]}


def slope(samples):
    """Least squares, per hour."""
    n = len(samples)
    mean_t, mean_v = sum(t for t, _ in samples) / n, sum(v for _, v in samples) / n
    over = sum((t - mean_t) * (v - mean_v) for t, v in samples)
    return over / sum((t - mean_t) ** 2 for t, _ in samples) * 3600


def soak(args, numbers):
    rng, counts, samples = random.Random(1), dict.fromkeys(["stream", "whole", "passthrough", "error", "left", "failed"], 0), []
    with contextlib.ExitStack() as stack:
        engine = kit.fake_engine(stack, "vllm", "--pace-us", 2000)
        proxy = kit.Proxy(stack, args.foretell, kit.toy(engine), MORE, {"soak.yaml": POLICY})
        proxy.recognised("vllm")
        asyncio.run(loaded(proxy.address, 20, args.rate, rng, counts))
        base, used = settled(proxy), kit.processor(proxy.pid)

        def sample(now):
            samples.append((now, proxy.resident()))
            if len(samples) % 30 == 1:
                late = [(t, v / kit.MIB) for t, v in samples if t >= WARM]
                so_far = f", slope {slope(late):.2f} MiB/h" if len(late) > 1 else ""
                print(f"  {now / 60:.0f} min: {samples[-1][1] / kit.MIB:.2f} MiB{so_far}, {proxy.descriptors()} descriptors, "
                      f"{sum(counts.values())} requests, {counts['failed']} failed, load {kit.load():.0f}", flush=True)

        asyncio.run(loaded(proxy.address, args.minutes * 60, args.rate, rng, counts, sample))
        used = kit.processor(proxy.pid) - used
        after = settled(proxy)
        rounds = proxy.metric("foretell_verify_requests_total")
    late = [(t, v / kit.MIB) for t, v in samples if t >= WARM] or [(t, v / kit.MIB) for t, v in samples]
    numbers.note(10, "requests", sum(counts.values()))
    print("  " + ", ".join(f"{kind} {count:,}" for kind, count in counts.items()) + f"; {rounds:,.0f} rounds")
    numbers.note(10, "processor time of foretell", 100 * used / (args.minutes * 60), "% of a core")
    numbers.note(10, "resident at the end", late[-1][1], "MiB")
    numbers.at_most(10, "failed requests", counts["failed"], 0)
    numbers.at_most(10, "slope of resident memory after ten minutes", slope(late), 1.0, "MiB/h")
    for name in base:
        numbers.at_most(10, f"{name} at the end, more than before (before: {base[name]:,.0f})", after[name] - base[name], 0)


if __name__ == "__main__":
    kit.main(soak, __doc__, ("minutes", 60.0, "minutes of load"), ("rate", 12.0, "requests begun per second"))
