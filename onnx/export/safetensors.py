"""Writes a model directory as a Hugging Face one, for vLLM and SGLang.

    safetensors.py MODEL_DIR OUT_DIR
"""

import json
import pathlib
import sys

import bundle


def export(model, out, weights=None, config=None):
    if weights is None:
        weights, config = bundle.load(model)
    bundle.write_common(model, out, config)
    bundle.write_safetensors(pathlib.Path(out) / "model.safetensors", weights)
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    (pathlib.Path(out) / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")


if __name__ == "__main__":
    export(sys.argv[1], sys.argv[2])
