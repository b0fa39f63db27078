"""Batches: kinds of text, their shares and their order.

Rows are of five kinds. From text alone a small model learns to copy late, if at all; random tokens
that are repeated leave copying as the only thing to learn, and a few such rows in the mix keep it.
"""

import numpy as np
import torch

END_ID = 0
REWRITE_ID = 5
FIRST_TEXT_ID = 6
MIX = {"code": 0.49, "prose": 0.12, "chat": 0.09, "rewrite": 0.25, "repeat": 0.05}


class Data:
    def __init__(self, folder, vocabulary, seed, part="train"):
        self.rng = np.random.default_rng(seed)
        self.vocabulary = vocabulary
        self.ids, self.offsets, self.at = {}, {}, {}
        for kind in ("code", "prose", "chat", "rewrite"):
            arrays = np.load(f"{folder}/{part}-{kind}.npz")
            self.ids[kind], self.offsets[kind], self.at[kind] = arrays["ids"], arrays["offsets"], 0

    def stream(self, kind, length):
        """The next `length` tokens of a pool, documents joined end to end."""
        ids = self.ids[kind]
        if self.at[kind] + length > len(ids):
            self.at[kind] = int(self.rng.integers(0, 200))
        row = ids[self.at[kind]:self.at[kind] + length]
        self.at[kind] += length - 1
        return row

    def rewrites(self, length):
        """Whole rewrite documents, so that piece and copy are in one row."""
        ids, offsets, row, n = self.ids["rewrite"], self.offsets["rewrite"], [], 0
        while n < length:
            i = self.at["rewrite"]
            self.at["rewrite"] = (i + 1) % (len(offsets) - 1)
            doc = ids[offsets[i]:offsets[i + 1]]
            if n and n + len(doc) > length and length - n > 160 and len(doc) > 200:
                continue
            if len(doc) <= length:
                row.append(doc)
                n += len(doc)
        return np.concatenate(row)[:length]

    def repeat(self, length, spread=None):
        """Random tokens, a separator, the same tokens; only the copies are learnt.

        `spread` bounds the variation of the distance to the copy. With one distance a head can copy
        by position, which is learnt in dozens of steps; as it is widened step by step, only
        matching the earlier tokens still works, and that is copying."""
        most = (length - 2) // 2
        row, weights = np.zeros(0, np.int64), np.zeros(0, np.float32)
        while len(row) < length:
            if spread is None:
                n = int(self.rng.integers(12, min(most, 200)))
            else:
                n = most - int(self.rng.integers(0, min(spread, most - 8)))
            if spread is not None or self.rng.random() < 0.5:
                piece = self.rng.integers(FIRST_TEXT_ID, self.vocabulary, n)
            else:
                code = self.ids["code"]
                piece = code[self.rng.integers(0, len(code), n)]
            # copied once, then an end: a third copy would teach loops
            row = np.concatenate([row, piece, [REWRITE_ID], piece, [END_ID]])
            weights = np.concatenate([weights, np.zeros(n + 2), np.ones(n)])
        # weights belong to the predicted token, so they start at the second one
        return row[:length], weights[1:length].astype(np.float32)

    def batch(self, rows, length, mix=None, spread=None):
        """(inputs, targets, weights) of `rows` rows of `length` tokens."""
        mix = mix or MIX
        kinds = self.rng.choice(list(mix), rows, p=np.array(list(mix.values())) / sum(mix.values()))
        ids = np.empty((rows, length + 1), np.int64)
        weights = np.ones((rows, length), np.float32)
        for r, kind in enumerate(kinds):
            if kind == "repeat":
                ids[r], weights[r] = self.repeat(length + 1, spread)
            elif kind == "rewrite":
                ids[r] = self.rewrites(length + 1)
            else:
                ids[r] = self.stream(kind, length + 1)
        ids = torch.from_numpy(ids)
        return ids[:, :-1], ids[:, 1:], torch.from_numpy(weights)
