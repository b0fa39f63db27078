"""Reads a foreign GGUF file, dequantises it and writes it as one of our model directories.

The file's metadata become config, tokenizer and chat template; nothing else is read. A llama model
with tied embeddings becomes an ONNX directory in 16 bits, from which `safetensors.py` and `gguf.py`
write the other forms with the same values. Any model of FAMILIES becomes a Hugging Face directory
in bfloat16, for vLLM.

    from_gguf.py FILE OUT_DIR onnx|safetensors
"""

import json
import pathlib
import re
import sys

import ml_dtypes
import numpy as np

import bundle
import gguf

QWEN_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
              r"|\s*[\r\n]+|\s+(?!\S)|\s+")
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
SPLIT = {"type": "Split", "pattern": {"Regex": QWEN_WORDS}, "behavior": "Isolated", "invert": False}
# by tokenizer.ggml.pre: (normalizer, pre-tokenizer)
PRE = {
    "gpt-2": (None, BYTES),
    "smollm": (None, {"type": "Sequence", "pretokenizers": [DIGITS, BYTES]}),
    "qwen2": ({"type": "NFC"}, {"type": "Sequence", "pretokenizers": [SPLIT, {**BYTES, "use_regex": False}]}),
}
# by general.architecture: (Hugging Face's class, whether llama.cpp wants q and k reordered)
FAMILIES = {"llama": ("LlamaForCausalLM", True), "qwen2": ("Qwen2ForCausalLM", False)}
TOP = {gguf_name: name for name, gguf_name in gguf.TOP.items()} | {"output.weight": "lm_head.weight"}
LAYER = {gguf_name: name for name, gguf_name in gguf.NAMES.items()}
# llama.cpp treats these as ends of a text, in addition to the file's own
ENDS = ("<|endoftext|>", "<|im_end|>")


class Foreign:
    """One GGUF file: its metadata by name, and its tensors."""

    def __init__(self, path):
        self.reader = gguf.package.GGUFReader(str(path))
        self.family = self["general.architecture"]
        self.hugging, self.reordered = FAMILIES[self.family]

    def __getitem__(self, key):
        return self.reader.fields[key].contents()

    def get(self, key, otherwise):
        return self[key] if key in self.reader.fields else otherwise

    def own(self, key):
        return self[f"{self.family}.{key}"]

    def ends(self):
        """Ids that end a text, the file's own first."""
        tokens = self["tokenizer.ggml.tokens"]
        own = self["tokenizer.ggml.eos_token_id"]
        return [own, *(i for i in map(tokens.index, filter(tokens.__contains__, ENDS)) if i != own)]


def config(file):
    heads = file.own("attention.head_count")
    names = {tensor.name for tensor in file.reader.tensors}
    return {
        "architectures": [file.hugging], "model_type": file.family,
        "hidden_size": file.own("embedding_length"), "num_hidden_layers": file.own("block_count"),
        "num_attention_heads": heads, "num_key_value_heads": file.own("attention.head_count_kv"),
        "head_dim": file.own("embedding_length") // heads, "intermediate_size": file.own("feed_forward_length"),
        "vocab_size": len(file["tokenizer.ggml.tokens"]), "hidden_act": "silu",
        "max_position_embeddings": file.own("context_length"),
        # stored in 32 bits: 1e-05 reads 9.999999747378752e-06
        "rms_norm_eps": float(f"{file.own('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(file.own("rope.freq_base")), "rope_scaling": None,
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": file["tokenizer.ggml.bos_token_id"], "eos_token_id": file.ends(),
        "torch_dtype": "float16", "use_cache": True,
    }


def hugging_name(name):
    if name in TOP:
        return TOP[name]
    layer, part, kind = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name).groups()
    return f"model.layers.{layer}.{LAYER[part]}.{kind}"


def weights(file, settings, kind):
    """Every tensor under Hugging Face's name and layout, rounded once to `kind`."""
    out = {}
    for tensor in file.reader.tensors:
        name = hugging_name(tensor.name)
        array = gguf.package.quants.dequantize(tensor.data, tensor.tensor_type)
        if file.reordered and (heads := gguf.heads_of(name, settings)):
            array = gguf.unpermute(array, heads)
        with np.errstate(over="ignore"):
            out[name] = array.astype(kind)
        if not np.isfinite(out[name]).all():
            raise ValueError(f"{name} does not fit {np.dtype(kind).name}")
    return out


def added(file):
    """The added tokens: control tokens, and those that the model's maker added as text."""
    kinds = gguf.package.TokenType
    for index, (token, kind) in enumerate(zip(file["tokenizer.ggml.tokens"], file["tokenizer.ggml.token_type"])):
        if kind in (kinds.CONTROL, kinds.USER_DEFINED):
            yield {"id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
                   "normalized": False, "special": kind == kinds.CONTROL}


def tokenizer(file):
    normalizer, words = PRE[file["tokenizer.ggml.pre"]]
    unused = gguf.package.TokenType.UNUSED
    pairs = zip(file["tokenizer.ggml.tokens"], file["tokenizer.ggml.token_type"])
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": list(added(file)),
        "normalizer": normalizer, "pre_tokenizer": words, "post_processor": {**BYTES, "trim_offsets": False},
        "decoder": BYTES,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {token: index for index, (token, kind) in enumerate(pairs) if kind != unused},
                  "merges": [merge.split(" ") for merge in file["tokenizer.ggml.merges"]]},
    }


def tokenizer_config(file):
    tokens = file["tokenizer.ggml.tokens"]
    words = {name: tokens[file[f"tokenizer.ggml.{key}_token_id"]] for name, key in
             (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"))
             if f"tokenizer.ggml.{key}_token_id" in file.reader.fields}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": file.get("tokenizer.ggml.add_bos_token", False),
        "add_prefix_space": False, **words, "unk_token": None, "clean_up_tokenization_spaces": False,
        "model_max_length": file.own("context_length"), "chat_template": file["tokenizer.chat_template"],
        "added_tokens_decoder": {str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in added(file)},
    }


def write_words(file, out):
    """Tokenizer and chat template."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.json").write_text(json.dumps(tokenizer(file), ensure_ascii=False, indent=1) + "\n")
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(file), ensure_ascii=False, indent=1) + "\n")
    (out / "chat_template.jinja").write_text(file["tokenizer.chat_template"])


def export(path, out, form):
    file, out = Foreign(path), pathlib.Path(out)
    settings = config(file)
    write_words(file, out)
    if form == "safetensors":
        import safetensors
        settings["torch_dtype"] = "bfloat16"
        safetensors.export(out, out, weights(file, settings, ml_dtypes.bfloat16), settings)
        return
    if not file.reordered or not settings["tie_word_embeddings"]:
        raise ValueError("our graph is that of a llama with tied embeddings")
    bundle.write_common(out, out, settings)
    bundle.write_onnx(out, weights(file, settings, np.float16), settings)


if __name__ == "__main__":
    export(*sys.argv[1:4])
