"""Writes a Hugging Face directory of a llama with tied embeddings in 16 bits as one of our model
directories.

    from_hf.py HF_DIR OUT_DIR
"""

import json
import pathlib
import sys

import bundle


def export(source, out):
    source = pathlib.Path(source)
    settings = json.loads((source / "config.json").read_text())
    if settings["model_type"] != "llama" or not settings["tie_word_embeddings"]:
        raise ValueError("our graph is that of a llama with tied embeddings")
    bundle.write_common(source, out, settings)
    bundle.write_onnx(out, bundle.read_safetensors(source / "model.safetensors"), settings)


if __name__ == "__main__":
    export(sys.argv[1], sys.argv[2])
