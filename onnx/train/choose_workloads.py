"""Chooses the 50 prompts of each workload: those whose plain output does not loop.

A small model at temperature 0 likes to fall into loops, and loops flatter drafters
that look things up. So prompts whose plain output repeats a fifth of its 8-grams
are left out, as are outputs too short to measure. The choice is by the target's
own output alone; no drafter is asked.

    choose_workloads.py POOLS_DIR OUT_DIR MODEL_DIR             in this process
    choose_workloads.py POOLS_DIR OUT_DIR MODEL_DIR http://...  from a server
"""

import json
import pathlib
import sys
import urllib.request

from generate import Model, in_batches, loop_share

COUNT, SHORTEST, MOST_LOOPS = 50, 48, 0.2


def from_server(model, lines, url):
    """As in_batches, but the text comes from an OpenAI-compatible server."""
    for line in lines:
        path = "/v1/chat/completions" if line["route"] == "chat" else "/v1/completions"
        request = urllib.request.Request(
            url.rstrip("/") + path, json.dumps(line["body"]).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            choice = json.load(answer)["choices"][0]
        text = choice["message"]["content"] if line["route"] == "chat" else choice["text"]
        yield line, model.prompt_ids(line), model.tokenizer.encode(text).ids


def main():
    pools, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    model = Model(sys.argv[3])
    out.mkdir(parents=True, exist_ok=True)
    for pool in sorted(pools.glob("*.jsonl")):
        lines = [json.loads(line) for line in open(pool)]
        order = {json.dumps(line): i for i, line in enumerate(lines)}
        chosen, tried = {}, 0
        for start in range(0, len(lines), 64):
            part = lines[start:start + 64]
            texts = from_server(model, part, sys.argv[4]) if len(sys.argv) > 4 else in_batches(model, part)
            for line, prompt, output in texts:
                tried += 1
                if len(output) >= SHORTEST and loop_share(prompt, output) < MOST_LOOPS:
                    chosen[order[json.dumps(line)]] = line
            if len(chosen) >= COUNT:
                break
        kept = [chosen[i] for i in sorted(chosen)][:COUNT]
        with open(out / pool.name, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in kept)
        print(f"{pool.stem}: {len(kept)} of {tried} tried, {len(chosen)} do not loop", flush=True)
        if len(kept) < COUNT:
            sys.exit(f"{pool.stem}: the pool is too small")


if __name__ == "__main__":
    main()
