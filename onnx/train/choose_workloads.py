"""Chooses the 50 prompts of each workload: those whose plain output does not loop.

A small model at temperature 0 often falls into loops, and loops flatter drafters that look things
up. So a prompt is kept only if less than a fifth of the 8-grams of its plain output repeat an
earlier one, cut shorter (96, then 64 tokens) where the loop comes late, and if enough is left to
measure. The choice is by the target's own output, without drafters, except for `hostile`: its pool
is the prompts that the other pools leave over (and its own), and of it the 50 outputs of which
prompt lookup and the drafter with the same vocabulary guess the least. (Tables of checksums would
be hostile to a large model; this one answers them with loops.)

    choose_workloads.py POOLS_DIR OUT_DIR MODELS_DIR             in this process
    choose_workloads.py POOLS_DIR OUT_DIR MODELS_DIR http://...  from a server
"""

import json
import os
import pathlib
import sys
import urllib.request

from gate import GAMMA, lookup
from generate import Model
from make_workloads import loop_share
from traffic import rounds

COUNT, SHORTEST, MOST_LOOPS, BATCH = 50, 48, 0.2, 32
CUTS = (96, 64)
MOST_TRIED = {"rewrite": 320, "completion": 900, "prose": 900, "chat": 1200, "hostile": 32}
LEFT_OVER = {"rewrite": 0, "completion": 60, "prose": 15, "chat": 15, "hostile": 0}


def in_process(model, lines):
    """(line, prompt ids, output ids) by this process's own decoding."""
    ids = [model.prompt_ids(line) for line in lines]
    return zip(lines, ids, model.greedy(ids, [line["body"]["max_tokens"] for line in lines]))


def from_server(model, lines, url):
    """The same from an OpenAI-compatible server."""
    for line in lines:
        chat = line["route"] == "chat"
        request = urllib.request.Request(
            url.rstrip("/") + ("/v1/chat/completions" if chat else "/v1/completions"),
            json.dumps(line["body"]).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            choice = json.load(answer)["choices"][0]
        text = choice["message"]["content"] if chat else choice["text"]
        yield line, model.prompt_ids(line), model.tokenizer.encode(text).ids


def guessed(drafter, prompt, output):
    """Mean acceptance length of the better of prompt lookup and the drafter."""
    guesses = drafter.guesses(prompt + output)
    hits = [guesses[i - 1] == t for i, t in enumerate(prompt + output)][len(prompt):]
    _, _, _, looked = lookup(prompt, output, GAMMA)
    return len(hits) / min(rounds(hits, GAMMA), looked)


def without_loop(line, prompt, output):
    """(prompt, output, line) at the longest limit at which nothing loops, or None."""
    for limit in (line["body"]["max_tokens"], *CUTS):
        part = output[:limit]
        if len(part) >= SHORTEST and loop_share(prompt, part) < MOST_LOOPS:
            limit = min(limit, line["body"]["max_tokens"])
            return prompt, part, {**line, "body": {**line["body"], "max_tokens": limit}}
    return None


def choose(name, pools, texts):
    """Prompts that do not loop, in the pool's order, until there are enough."""
    lines = [json.loads(line) for line in open(pools / f"{name}.jsonl")][:MOST_TRIED[name]]
    found, tried = [], 0
    for start in range(0, len(lines), BATCH):
        part = lines[start:start + BATCH]
        found += filter(None, (without_loop(*answer) for answer in texts(part)))
        tried += len(part)
        if len(found) >= COUNT + LEFT_OVER[name]:
            break
    print(f"{name}: {len(found)} of {tried} do not loop", flush=True)
    return found


def main():
    pools, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    threads = int(os.environ.get("OMP_NUM_THREADS", "2"))
    model = Model(pathlib.Path(sys.argv[3]) / "target", threads)
    url = sys.argv[4] if len(sys.argv) > 4 else None
    out.mkdir(parents=True, exist_ok=True)
    rest = []
    for name in ("rewrite", "completion", "prose", "chat", "hostile"):
        found = choose(name, pools, lambda part: from_server(model, part, url) if url else in_process(model, part))
        if name == "hostile":
            drafter = Model(pathlib.Path(sys.argv[3]) / "draft-same", threads)
            found = sorted(found + rest, key=lambda one: guessed(drafter, one[0], one[1]))
        else:
            rest += found[COUNT:] if name != "rewrite" else []
        lines = [line for _, _, line in found[:COUNT]]
        limits = sorted(line["body"]["max_tokens"] for line in lines)
        print(f"{name}: {len(lines)} chosen, limits {limits[:1]} to {limits[-1:]}", flush=True)
        with open(out / f"{name}.jsonl", "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
