"""Text that the target writes itself, for distillation.

Drafts continue the target's text, which is not the corpus: greedy output is plainer and repeats
itself more. Rows are a training prompt and the target's continuation up to the start of a loop, or
the drafter would mostly learn loops; the continuation counts five times the prompt.

    own_text.py MODEL_DIR IDS_DIR OUT.npz MINUTES
"""

import sys
import time

import numpy as np

from data import Data
from generate import Model

LENGTH, LANES = 512, 64
SEED = 22
MIX = {"code": 0.6, "prose": 0.15, "chat": 0.25}


def prompts(data, rng):
    """Beginnings of training texts: 40 to 120 tokens, chat up to the answer."""
    for _ in range(LANES):
        kind = rng.choice(list(MIX), p=list(MIX.values()))
        ids, offsets = data.ids[kind], data.offsets[kind]
        i = rng.integers(0, len(offsets) - 1)
        doc = ids[offsets[i]:offsets[i + 1]]
        if kind == "chat":
            answer = np.flatnonzero(doc == 3)
            yield doc[:answer[0] + 2].tolist() if len(answer) and answer[0] < 250 else doc[:80].tolist()
        else:
            start = rng.integers(0, max(1, len(doc) - 200))
            yield doc[start:start + rng.integers(40, 120)].tolist()


def loop_start(output, n=6):
    """Position where the output first repeats n of its tokens (the repeat itself is kept once)."""
    seen = set()
    for i in range(n, len(output) + 1):
        gram = tuple(output[i - n:i])
        if gram in seen:
            return i
        seen.add(gram)
    return len(output)


def main():
    model, data = Model(sys.argv[1]), Data(sys.argv[2], 8192, SEED)
    rng, stop = np.random.default_rng(SEED), time.time() + 60 * float(sys.argv[4])
    rows, weights = [], []
    while time.time() < stop:
        batch = list(prompts(data, rng))
        outputs = model.greedy(batch, [112] * len(batch))
        row, weight = [], []
        for prompt, output in zip(batch, outputs):
            output = output[:loop_start(output)]
            if len(output) < 8:
                continue
            row += [*prompt, *output]
            weight += [0.2] * (len(prompt) - 1) + [1.0] * len(output) + [0.0]
            if len(row) >= LENGTH:
                rows.append(row[:LENGTH])
                weights.append(weight[:LENGTH])
                row, weight = [], []
        print(len(rows), "rows", flush=True)
    np.savez(sys.argv[3], ids=np.array(rows, np.uint16), weights=np.array(weights, np.float16))


if __name__ == "__main__":
    main()
