#!/usr/bin/env python3
"""Cost of one step of the inflated model on an engine, by the calls that a verification can use.

    cost.py llama|vllm [--depth N --width 1|4|16] [--context N]

Prints medians and minima in ms: a decode step, a one-token call with a warm prefix, Score (vLLM:
prompt logprobs at the tail) at several draft lengths, FanOut of five prompts. INFLATE in engine.py
was chosen with these figures.
"""

import argparse
import random
import time

import engine as engines
import exact
import stats
import wire


def clock(what, ask, rounds=9):
    """Prints the cost of `ask(i)`; calls that the engine refused are counted, not timed."""
    taken, refused = [], 0
    for i in range(rounds):
        began = time.perf_counter()
        try:
            ask(i)
            taken.append(1000 * (time.perf_counter() - began))
        except wire.Refused:
            refused += 1
    shown = f"{stats.median(taken):8.1f} {min(taken):8.1f}" if taken else "       -        -"
    print(f"{what:32} {shown}" + (f"  ({refused} refused)" if refused else ""), flush=True)


def decode(direct, ids):
    seconds = [s for s, event in wire.Stream(direct.url, "/v1/completions", {
        "model": direct.model, "prompt": ids, "max_tokens": 41, "temperature": 0}) if event["choices"]]
    gaps = [1000 * (b - a) for a, b in zip(seconds, seconds[1:])]
    print(f"{'decode step':32} {stats.median(gaps):8.1f} {min(gaps):8.1f}", flush=True)


def drafted(ids, count, rng=random.Random(1)):
    return ids + [rng.randrange(6, 8000) for _ in range(count)]


def score(direct, ids):
    sampling = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 1, "skip_reading_prefix_cache": False,
                "detokenize": False}
    return wire.call(direct.url, "/inference/v1/generate",
                     {"model": direct.model, "token_ids": ids, "sampling_params": sampling})


def fan_out(direct, prompts):
    if direct.kind == "llama":
        return wire.call(direct.url, "/completion", {"prompt": prompts, "n_predict": 1, "temperature": 0,
                                                     "return_tokens": True, "response_fields": ["tokens"]})
    return wire.call(direct.url, "/v1/completions", {"model": direct.model, "prompt": prompts, "max_tokens": 1,
                                                     "temperature": 0, "return_token_ids": True})


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=engines.ENGINES)
    parser.add_argument("--depth", type=int)
    parser.add_argument("--width", type=int, choices=(1, 4, 16))
    parser.add_argument("--context", type=int, default=300)
    args = parser.parse_args()
    depth, width = engines.INFLATE[args.kind]
    engines.INFLATE[args.kind] = (args.depth or depth, args.width or width)
    log = engines.CACHE / "engines" / f"cost-{args.kind}.log"
    with engines.start(args.kind, "inflated", engines.free_port(), log) as server:
        direct = wire.Engine(args.kind, server.url)
        text = "\n".join(body.get("prompt", "") for body, _ in zip(exact.prompts(), range(12)))
        ids = direct.words(text)[:args.context]
        began = time.perf_counter()
        direct.generate(ids, 1, temperature=0)
        print(f"{args.kind}, depth x{engines.INFLATE[args.kind][0]}, width x{engines.INFLATE[args.kind][1]}, "
              f"{len(ids)} tokens read in {time.perf_counter() - began:.2f} s\n{'ms':32}   median    least")
        out, _ = direct.generate(ids, 40, temperature=0)
        decode(direct, ids)
        clock("one token, warm", lambda i: direct.generate(ids + out[:i + 1], 1, temperature=0))
        if args.kind == "vllm":
            for count in (0, 2, 4, 8):
                clock(f"Score, {count} drafts", lambda i: score(direct, drafted(ids + out[:i + 1], count)))
        else:
            wire.call(direct.url, "/completion", {"prompt": ids, "n_cmpl": 5, "n_predict": 1, "temperature": 0})
        clock("FanOut, 5 prompts", lambda i: fan_out(direct, [drafted(ids + out[:i], k) for k in range(5)]))


if __name__ == "__main__":
    main()
