"""The gate before any tuning on the models: drafts must be accepted.

Greedy speculation is fully decided by one question per position: given the true text so far, does
the drafter choose the true token? So the rounds are counted on the target's plain greedy output,
without running them, and the count is exact. Outputs that loop are left out: they flatter every
drafter.

    gate.py MODELS_DIR WORKLOADS_DIR REPORT.json [WORKLOAD...]
"""

import json
import pathlib
import sys
import time

import numpy as np

from generate import Model, in_batches
from make_workloads import loop_share
from traffic import rounds

GAMMA = 4


def lookup(prompt, output, gamma, shortest=3):
    """(accepted, tried, tokens, rounds) of drafting the tokens after the longest earlier match."""
    ids, start = list(prompt) + list(output), len(prompt)
    last, accepted, tried, count, at = {}, 0, 0, 0, start
    filled = 0
    while at < len(ids):
        for i in range(filled, at):
            if i >= shortest:
                last[tuple(ids[i - shortest:i])] = last.get(tuple(ids[i - shortest:i]), []) + [i]
        filled = at
        best, length = None, 0
        for i in last.get(tuple(ids[at - shortest:at]), [])[-64:]:
            n = shortest
            while n < 64 and i - n - 1 >= 0 and ids[i - n - 1] == ids[at - n - 1]:
                n += 1
            if n >= length:
                best, length = i, n
        run = 0
        if best is not None:
            while run < gamma and at + run < len(ids) and best + run < at:
                tried += 1
                if ids[best + run] != ids[at + run]:
                    break
                accepted += 1
                run += 1
        at, count = at + run + 1, count + 1
    return accepted, tried, len(output), count


def other_hits(target, drafter, prompt, output):
    """Draft positions where another vocabulary agrees, counted in the drafter's own tokens."""
    text_ids = drafter.tokenizer.encode(target.tokenizer.decode(prompt, skip_special_tokens=False)).ids
    full = drafter.tokenizer.encode(
        target.tokenizer.decode(list(prompt) + list(output), skip_special_tokens=False)).ids
    same = 0
    while same < min(len(text_ids), len(full)) and text_ids[same] == full[same]:
        same += 1
    guesses = drafter.guesses(full)
    return [guesses[i - 1] == full[i] for i in range(max(same, 1), len(full))]


def step_time(model, lanes=1, tokens=1, length=512, repeats=200):
    """Median milliseconds of one run."""
    cache = model.cache(lanes, length)
    at, spent = np.full(lanes, 300), []
    for _ in range(repeats):
        start = time.perf_counter()
        model.run(cache, np.full((lanes, tokens), 9), at, at + tokens, np.tile(np.arange(tokens), (lanes, 1)))
        spent.append(time.perf_counter() - start)
    return 1000 * float(np.median(spent))


def main():
    models, pools = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    target = Model(models / "target")
    drafters = {n: Model(models / n) for n in ("draft-same", "draft-other") if (models / n / "model.onnx").exists()}
    report = {"step_ms": {n: round(step_time(m), 3) for n, m in {"target": target, **drafters}.items()},
              "verify_5_ms": round(step_time(target, tokens=5), 3)}
    for name in sys.argv[4:] or ("completion", "rewrite", "prose", "chat", "hostile"):
        lines = [json.loads(line) for line in open(pools / f"{name}.jsonl")][:96]
        kept = [(p, o) for _, p, o in in_batches(target, lines) if len(o) >= 48 and loop_share(p, o) < 0.2]
        row = {"prompts": len(lines), "not_looping": len(kept)}
        for drafter_name, drafter in drafters.items():
            total = np.zeros(2)
            hits = []
            for prompt, output in kept:
                if drafter_name == "draft-same":
                    guesses = drafter.guesses(prompt + output)
                    hit = [guesses[i - 1] == t for i, t in enumerate(prompt + output)][len(prompt):]
                else:
                    hit = other_hits(target, drafter, prompt, output)
                hits += hit
                total += len(hit), rounds(hit, GAMMA)
            row[drafter_name] = {"E[N]": round(total[0] / max(total[1], 1), 3), "hit": round(float(np.mean(hits)), 3)} if hits else None
        for gamma in (4, 8):
            sums = np.sum([lookup(p, o, gamma) for p, o in kept] or [[0] * 4], 0)
            row[f"lookup_{gamma}"] = {"acceptance": round(sums[0] / max(sums[1], 1), 3),
                                      "E[N]": round(sums[2] / max(sums[3], 1), 3)}
        report[name] = row
        print(name, json.dumps(row), flush=True)
    pathlib.Path(sys.argv[3]).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["step_ms"]), report["verify_5_ms"])


if __name__ == "__main__":
    main()
