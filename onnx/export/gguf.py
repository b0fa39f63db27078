"""Writes a model directory as a GGUF file with the same 16-bit values, for llama.cpp.

Stored as 16 bits unless f32 is given: with 16-bit weights llama.cpp rounds the activations to 16
bits too, which exactness tests must not have.

llama.cpp rotates neighbouring pairs where Hugging Face's layout rotates the two halves of a head,
so the rows of q and k are reordered on the way (and back again by `read`, which the tests use).

    gguf.py MODEL_DIR OUT_FILE [f16|f32]
"""

import json
import pathlib
import sys

import numpy as np

import bundle

# this script has the name of the package that it needs
_here = str(pathlib.Path(__file__).resolve().parent)
_path, sys.path = sys.path, [p for p in sys.path if str(pathlib.Path(p or ".").resolve()) != _here]
_self = sys.modules.pop("gguf", None)
import gguf as package  # noqa: E402

sys.path = _path
if _self is not None:
    sys.modules["gguf"] = _self

NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def gguf_name(name):
    if name in TOP:
        return TOP[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def permute(array, heads):
    """Rows from two halves per head to neighbouring pairs."""
    rows, columns = array.shape
    return array.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def unpermute(array, heads):
    rows, columns = array.shape
    return array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def heads_of(name, config):
    if name.endswith("q_proj.weight"):
        return config["num_attention_heads"]
    if name.endswith("k_proj.weight"):
        return config["num_key_value_heads"]
    return None


def export(model, out, weights=None, config=None, kind="f16"):
    if weights is None:
        weights, config = bundle.load(model)
    model, out = pathlib.Path(model), pathlib.Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    writer = package.GGUFWriter(str(out), "llama")
    writer.add_name(out.stem)
    writer.add_file_type(package.LlamaFileType.ALL_F32 if kind == "f32" else package.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    add_tokenizer(writer, json.loads((model / "tokenizer.json").read_text()), config)
    writer.add_chat_template(json.loads((model / "tokenizer_config.json").read_text())["chat_template"])
    for name, array in weights.items():
        if heads := heads_of(name, config):
            array = permute(array, heads)
        # llama.cpp needs norms in 32 bits; the values stay those of 16 bits
        array = np.ascontiguousarray(array, np.float32 if array.ndim == 1 or kind == "f32" else np.float16)
        writer.add_tensor(gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer, tokenizer, config):
    tokens = [None] * config["vocab_size"]
    for token, index in tokenizer["model"]["vocab"].items():
        tokens[index] = token
    kinds = [package.TokenType.NORMAL] * len(tokens)
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = package.TokenType.CONTROL
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if "Digits" in json.dumps(tokenizer["pre_tokenizer"]) else "gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    ends = config["eos_token_id"]
    writer.add_eos_token_id(ends[0] if isinstance(ends, list) else ends)
    writer.add_add_bos_token(False)


def read(path, config):
    """The weights of a GGUF file under their Hugging Face names, for the tests."""
    back = {gguf_name(n): n for n in names(config)}
    weights = {}
    for tensor in package.GGUFReader(str(path)).tensors:
        name = back[tensor.name]
        array = np.array(tensor.data).reshape([int(n) for n in reversed(tensor.shape)])
        if heads := heads_of(name, config):
            array = unpermute(array, heads)
        weights[name] = array.astype(np.float16)
    return weights


def names(config):
    yield from TOP
    for layer in range(config["num_hidden_layers"]):
        for name in NAMES:
            yield f"model.layers.{layer}.{name}.weight"


if __name__ == "__main__":
    export(sys.argv[1], sys.argv[2], kind=sys.argv[3] if len(sys.argv) > 3 else "f16")
