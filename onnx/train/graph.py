#!/usr/bin/env python3
"""Builds the slot-cache ONNX graph of a Llama model from HF-named arrays and the HF config.

    build(weights, config, plain_attention=False, taps=(), kept=None) -> onnx.ModelProto     (needs numpy and onnx)

The contract of the graph, which `src/onnx/runtime/model.rs` runs (B lanes, T new tokens, L cache length, R rows):

    input_ids   i64 [B,T]     new tokens; shorter lanes are padded at the end with any valid token
    positions   i64 [B,T]     absolute positions, 0 <= p < max_position_embeddings; in a tree, depth and not
                              cache row
    write_index i64 [B]       cache row of each lane's first new token; write_index + T <= L or the whole run is
                              refused
    kv_len      i64 [B]       cache rows that hold something after the write (write_index + real new tokens);
                              rows at and beyond it are never read
    mask        f32 [B,1,T,L] added to the scores: 0 where a new token may look, -1e9 elsewhere; causality is
                              the caller's, so any tree fits
    rows        i64 [B,R]     which of the T new tokens' logits are wanted (R >= 1): prefill does not pay the
                              output projection for every token
    past_k.{i}, past_v.{i}        f32 [B,kv_heads,L,head_dim]
    -> logits   f32 [B,R,V]
    -> taps     f32 [B,R,n*hidden]  of the same rows, the states after n of the layers; only where a head reads them
    -> present_k.{i}, present_v.{i}  the same tensors with T rows written; bind them to the same memory

Cache rows beyond a length must hold finite numbers (start zeroed): NaN leaks through the masked product.
Initializers are float16 under their exact HF names, in HF's [out, in] layout, behind Cast -> Transpose, which
ONNX Runtime folds at load. So the file is small and its tensors compare byte by byte with the safetensors.

With `kept`, ids in ascending order, the embedding has a row for each of these tokens and a last one for every
other. The inputs and outputs stay those of the whole vocabulary V: the initializer `vocabulary.rows` holds the
row of each token, and the logit of a token without a row is -1e9. The projection then costs as much as the
tokens that the text uses, and not as much as the vocabulary.

    python graph.py --random --hidden 256 --layers 6 --out DIR    writes DIR/model.onnx, DIR/config.json
"""

import argparse
import json
import pathlib

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 24
IR_VERSION = 11
MOST_BYTES = 1_900_000_000  # of one protobuf message, which ends at 2 GiB
ROWS = "vocabulary.rows"  # initializer: the row of each token in an embedding of some tokens
NEVER = -1e9  # logit of a token that the model cannot choose


class Graph:
    """Collects nodes and initializers and names the values in between."""

    def __init__(self):
        self.nodes, self.initializers, self.count = [], {}, 0

    def op(self, kind, *inputs, outputs=None, **attributes):
        self.count += 1
        names = outputs or [f"{kind}_{self.count}"]
        self.nodes.append(helper.make_node(kind, list(inputs), names, **attributes))
        return names[0] if len(names) == 1 else names

    def constant(self, name, array):
        if name not in self.initializers:
            self.initializers[name] = numpy_helper.from_array(np.ascontiguousarray(array), name)
        return name

    def ints(self, *values):
        return self.constant("ints_" + "_".join(map(str, values)), np.array(values, np.int64))


def head_dim(config):
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def rope_theta(config):
    """The base of the rotary frequencies, from the field of this version of the HF config."""
    return config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta") or 10000.0


def rope_cache(config):
    """cos and sin [max_position_embeddings, head_dim / 2], rotate_half convention."""
    half = head_dim(config) // 2
    frequency = 1.0 / (float(rope_theta(config)) ** (np.arange(half, dtype=np.float64) / half))
    angle = np.arange(config["max_position_embeddings"], dtype=np.float64)[:, None] * frequency[None, :]
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rows_of(kept, vocabulary):
    """The row of each token in an embedding of the tokens `kept` and one row for the others, its last."""
    rows = np.full(vocabulary, len(kept), np.int32)
    rows[kept] = np.arange(len(kept), dtype=np.int32)
    return rows


class Builder:
    """One Llama graph: `run` walks the layers in order."""

    def __init__(self, weights, config, plain_attention, taps, kept=None):
        self.g, self.w, self.c, self.plain, self.taps = Graph(), weights, config, plain_attention, taps
        self.kept = kept
        self.heads = config["num_attention_heads"]
        self.kv = config.get("num_key_value_heads") or self.heads
        self.d = head_dim(config)
        cos, sin = rope_cache(config)
        self.cos, self.sin = self.g.constant("rope_cos", cos), self.g.constant("rope_sin", sin)

    def stored(self, name):
        return self.g.constant(name, np.asarray(self.w[name]).astype(np.float16))

    def matrix(self, *names):
        """One [in, sum of out] matrix from HF matrices that share their input."""
        parts = [self.stored(name) for name in names]
        joined = self.g.op("Concat", *parts, axis=0) if len(parts) > 1 else parts[0]
        return self.g.op("Transpose", self.g.op("Cast", joined, to=TensorProto.FLOAT), perm=[1, 0])

    def norm(self, x, name):
        scale = self.g.op("Cast", self.stored(name), to=TensorProto.FLOAT)
        return self.g.op("RMSNormalization", x, scale, axis=-1, epsilon=float(self.c["rms_norm_eps"]))

    def split_heads(self, x, heads):
        """[B,T,heads*d] -> [B,heads,T,d]"""
        return self.g.op("Transpose", self.g.op("Reshape", x, self.g.ints(0, 0, heads, self.d)), perm=[0, 2, 1, 3])

    def rotate(self, x):
        return self.g.op("RotaryEmbedding", x, self.cos, self.sin, "positions", interleaved=0)

    def write(self, kind, layer, update):
        """Writes the new rows into the cache, in place when past and present share their memory."""
        return self.g.op("TensorScatter", f"past_{kind}.{layer}", update, "write_index",
                         outputs=[f"present_{kind}.{layer}"], axis=2, mode="linear")

    def attend(self, q, k, v):
        scale = self.d ** -0.5
        if not self.plain:
            return self.g.op("Attention", q, k, v, "mask", "", "", "kv_len", scale=scale, is_causal=0)
        g, group = self.g, self.heads // self.kv
        q = g.op("Reshape", q, g.ints(0, self.kv, group, -1, self.d))
        k = g.op("Transpose", g.op("Unsqueeze", k, g.ints(2)), perm=[0, 1, 2, 4, 3])
        scores = g.op("Mul", g.op("MatMul", q, k), g.constant("scale", np.array(scale, np.float32)))
        weights = g.op("Softmax", g.op("Add", scores, g.op("Unsqueeze", "mask", g.ints(1))), axis=-1)
        mixed = g.op("MatMul", weights, g.op("Unsqueeze", v, g.ints(2)))
        return g.op("Reshape", mixed, g.ints(0, self.heads, -1, self.d))

    def attention(self, x, layer):
        g, prefix = self.g, f"model.layers.{layer}.self_attn."
        joined = self.matrix(prefix + "q_proj.weight", prefix + "k_proj.weight", prefix + "v_proj.weight")
        sizes = g.ints(self.heads * self.d, self.kv * self.d, self.kv * self.d)
        q, k, v = g.op("Split", g.op("MatMul", x, joined), sizes, axis=-1,
                       outputs=[f"{kind}.{layer}" for kind in ("q", "k", "v")])
        q, k = self.rotate(self.split_heads(q, self.heads)), self.rotate(self.split_heads(k, self.kv))
        keys, values = self.write("k", layer, k), self.write("v", layer, self.split_heads(v, self.kv))
        mixed = g.op("Transpose", self.attend(q, keys, values), perm=[0, 2, 1, 3])
        mixed = g.op("Reshape", mixed, g.ints(0, 0, self.heads * self.d))
        return g.op("MatMul", mixed, self.matrix(prefix + "o_proj.weight"))

    def feed_forward(self, x, layer):
        g, prefix = self.g, f"model.layers.{layer}.mlp."
        inner = self.c["intermediate_size"]
        joined = self.matrix(prefix + "gate_proj.weight", prefix + "up_proj.weight")
        gate, up = g.op("Split", g.op("MatMul", x, joined), g.ints(inner, inner), axis=-1,
                        outputs=[f"gate.{layer}", f"up.{layer}"])
        active = g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up)
        return g.op("MatMul", active, self.matrix(prefix + "down_proj.weight"))

    def row_of_each_token(self):
        return self.g.constant(ROWS, rows_of(self.kept, self.c["vocab_size"]))

    def inputs(self):
        """The rows of the embedding for the new tokens."""
        if self.kept is None:
            return "input_ids"
        return self.g.op("Gather", self.row_of_each_token(), "input_ids", axis=0)

    def project(self, x, head):
        """The logits of the whole vocabulary."""
        if self.kept is None:
            self.g.op("MatMul", x, self.matrix(head), outputs=["logits"])
            return
        # a float32 near -1e9 is a multiple of 64: the sum with the last row's logit is -1e9 itself
        never = self.g.constant("never", np.array([0.0] * len(self.kept) + [NEVER], np.float32))
        some = self.g.op("Add", self.g.op("MatMul", x, self.matrix(head)), never)
        self.g.op("Gather", some, self.row_of_each_token(), axis=2, outputs=["logits"])

    def run(self):
        g = self.g
        embedding = self.stored("model.embed_tokens.weight")
        x = g.op("Cast", g.op("Gather", embedding, self.inputs(), axis=0), to=TensorProto.FLOAT)
        rows, tapped = g.op("Unsqueeze", "rows", g.ints(2)), []
        for layer in range(self.c["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            x = g.op("Add", x, self.attention(self.norm(x, prefix + "input_layernorm.weight"), layer))
            x = g.op("Add", x, self.feed_forward(self.norm(x, prefix + "post_attention_layernorm.weight"), layer))
            if layer in self.taps:
                tapped.append(g.op("GatherND", x, rows, batch_dims=1))
        if tapped:
            g.op("Concat", *tapped, axis=-1, outputs=["taps"])
        x = g.op("GatherND", x, rows, batch_dims=1)
        x = self.norm(x, "model.norm.weight")
        tied = self.c.get("tie_word_embeddings", False) or "lm_head.weight" not in self.w
        head = "model.embed_tokens.weight" if tied else "lm_head.weight"
        self.project(x, head)
        return g


def signature(config, taps):
    """The graph's inputs and outputs."""
    i64, f32 = TensorProto.INT64, TensorProto.FLOAT
    kv, d = config.get("num_key_value_heads") or config["num_attention_heads"], head_dim(config)
    info = helper.make_tensor_value_info
    inputs = [info("input_ids", i64, ["B", "T"]), info("positions", i64, ["B", "T"]), info("write_index", i64, ["B"]),
              info("kv_len", i64, ["B"]), info("mask", f32, ["B", 1, "T", "L"]), info("rows", i64, ["B", "R"])]
    outputs = [info("logits", f32, ["B", "R", config["vocab_size"]])]
    if taps:
        outputs.append(info("taps", f32, ["B", "R", len(taps) * config["hidden_size"]]))
    for layer in range(config["num_hidden_layers"]):
        for kind in ("k", "v"):
            inputs.append(info(f"past_{kind}.{layer}", f32, ["B", kv, "L", d]))
            outputs.append(info(f"present_{kind}.{layer}", f32, ["B", kv, "L", d]))
    return inputs, outputs


def build(weights, config, plain_attention=False, taps=(), kept=None):
    """The model as a ModelProto. `plain_attention` spells attention out as MatMul and Softmax; `taps` are
    the layers whose states are an output; `kept` are the tokens that the embedding has rows for, all if None."""
    graph = Builder(weights, config, plain_attention, taps, kept).run()
    return model(graph, *signature(config, taps))


def model(graph, inputs, outputs):
    """A graph as a ModelProto."""
    proto = helper.make_graph(graph.nodes, "foretell", inputs, outputs, list(graph.initializers.values()))
    opsets = [helper.make_opsetid(domain, version) for domain, version in (("", OPSET), ("com.microsoft", 1))
              if domain in {node.domain for node in graph.nodes}]
    made = helper.make_model(proto, opset_imports=opsets, ir_version=IR_VERSION, producer_name="foretell")
    if size(made) < MOST_BYTES:
        onnx.checker.check_model(made)
    return made


def size(model):
    """Bytes of its weights."""
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer)


def save(model, path):
    """Writes the file, and the weights that it cannot hold to a second one in its folder."""
    if size(model) < MOST_BYTES:
        onnx.save(model, path)
    else:
        onnx.save(model, path, save_as_external_data=True, location=path.name + ".data")


def random_weights(config, seed=0):
    """Weights of the right shapes with uneven logits; for tests of the runtime, not for text."""
    rng = np.random.default_rng(seed)
    hidden, inner, d = config["hidden_size"], config["intermediate_size"], head_dim(config)
    heads, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d

    def draw(out, width, gain=1.0):
        return (rng.standard_normal((out, width)) * gain / np.sqrt(width)).astype(np.float16)

    def scale():
        return (1.0 + 0.1 * rng.standard_normal(hidden)).astype(np.float16)

    weights = {"model.embed_tokens.weight": draw(config["vocab_size"], hidden, 2.0), "model.norm.weight": scale()}
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        weights[p + "input_layernorm.weight"] = scale()
        weights[p + "post_attention_layernorm.weight"] = scale()
        for name, out, width in [("self_attn.q_proj", heads, hidden), ("self_attn.k_proj", kv, hidden),
                                 ("self_attn.v_proj", kv, hidden), ("self_attn.o_proj", hidden, heads),
                                 ("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden),
                                 ("mlp.down_proj", hidden, inner)]:
            weights[f"{p}{name}.weight"] = draw(out, width)
    return weights


def main():
    parser = argparse.ArgumentParser(description="a random-weight model for tests of the runtime")
    parser.add_argument("--random", action="store_true", required=True)
    for name, default in [("hidden", 256), ("layers", 6), ("heads", 4), ("kv-heads", 2), ("head-dim", 64),
                          ("inner", 0), ("vocab", 8192), ("context", 2048), ("seed", 0)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--plain-attention", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    a = parser.parse_args()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": a.hidden,
              "num_hidden_layers": a.layers, "num_attention_heads": a.heads, "num_key_value_heads": a.kv_heads,
              "head_dim": a.head_dim, "intermediate_size": a.inner or a.hidden * 8 // 3 // 32 * 32,
              "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": a.context,
              "vocab_size": a.vocab, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0,
              "hidden_act": "silu", "torch_dtype": "float16"}
    a.out.mkdir(parents=True, exist_ok=True)
    onnx.save(build(random_weights(config, a.seed), config, a.plain_attention), a.out / "model.onnx")
    (a.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
