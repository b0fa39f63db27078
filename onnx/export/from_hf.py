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
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    other = [name for name in ("attention_bias", "mlp_bias") if settings.get(name)]
    other += ["rope_scaling"] if rope.get("rope_type", rope.get("type", "default")) != "default" else []
    other += ["hidden_act"] if settings.get("hidden_act", "silu") != "silu" else []
    if other:
        raise ValueError(f"our graph has no {', '.join(other)}")
    bundle.write_common(source, out, settings)
    bundle.write_onnx(out, bundle.read_safetensors(source / "model.safetensors"), settings)


if __name__ == "__main__":
    export(sys.argv[1], sys.argv[2])
