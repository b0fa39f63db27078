"""Turns a training checkpoint into a model directory: the committed, 16-bit form.

Values are rounded to float16 once, here; every other format is written from the result and so holds
the same ones.

    export.py CHECKPOINT TOKENIZER_DIR OUT_DIR
"""

import pathlib
import sys

import numpy as np
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "export"))

import bundle  # noqa: E402
from model import config  # noqa: E402


def main():
    checkpoint, tokenizer, out = sys.argv[1:4]
    state = torch.load(checkpoint, map_location="cpu", weights_only=False)
    weights = {n.replace("._orig_mod", ""): p.float().numpy().astype(np.float16)
               for n, p in state["model"].items()}
    settings = config(state["size"])
    bundle.write_common(tokenizer, out, settings)
    bundle.write_onnx(out, weights, settings)
    print(out, sum(w.size for w in weights.values()), "parameters", state.get("report", ""))


if __name__ == "__main__":
    main()
