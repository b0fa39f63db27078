"""Makes a model more expensive without changing what it computes.

The bundled models are small so that they train in one sitting. Speculation pays by the cost of the
target, so benchmarks need an expensive target that still agrees with its drafters as the small one
does. Depth adds layers whose output projections are zero: they compute and add nothing, and the
result is bit-equal. Width adds residual dimensions that stay zero, feed-forward units and whole KV
groups whose outputs are multiplied by zero; a norm over D instead of d dimensions sees a mean d/D
as large, so its weight is scaled by sqrt(d/D) and eps by d/D, and with D/d a power of four both are
exact in any binary format.

    inflate.py --model onnx/models/target --depth 8 --width 1 --out DIR --format onnx|safetensors|gguf
"""

import argparse
import pathlib

import numpy as np

import bundle

OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def noise(rng, shape):
    return (rng.standard_normal(shape, np.float32) * 0.02).astype(np.float16)


def deepen(weights, config, factor, seed=8):
    """`factor` times the layers: each real layer is followed by idle ones."""
    rng = np.random.default_rng(seed)
    out = {n: w for n, w in weights.items() if not n.startswith("model.layers.")}
    at = 0
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        own = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
        for copy in range(factor):
            for name, array in own.items():
                if copy == 0:
                    new = array
                elif name in OUTPUTS:
                    new = np.zeros_like(array)
                elif array.ndim == 1:
                    new = np.ones_like(array)
                else:
                    new = noise(rng, array.shape)
                out[f"model.layers.{at}.{name}"] = new
            at += 1
    return out, {**config, "num_hidden_layers": at}


def widen(weights, config, factor, seed=16):
    """`factor` times the residual, feed-forward and head dimensions; 4 or 16."""
    if factor not in (4, 16):
        raise ValueError("width is 4 or 16: only then are the scaled norms exact")
    rng = np.random.default_rng(seed)
    root = np.float16(factor ** -0.5)
    out = {}
    for name, array in weights.items():
        if array.ndim == 1:
            new = np.ones(array.shape[0] * factor, np.float16)
            new[:array.shape[0]] = array * root
        else:
            rows, columns = array.shape
            if name == "model.embed_tokens.weight":
                new = np.zeros((rows, columns * factor), np.float16)
            elif name.endswith(OUTPUTS):
                # rows write the residual, columns read the added units: both must stay zero
                new = np.zeros((rows * factor, columns * factor), np.float16)
            else:
                new = noise(rng, (rows * factor, columns * factor))
            new[:rows, :columns] = array
        out[name] = new
    wide = {key: config[key] * factor for key in
            ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")}
    return out, {**config, **wide, "rms_norm_eps": config["rms_norm_eps"] / factor}


def inflate(weights, config, depth=1, width=1):
    if width > 1:
        weights, config = widen(weights, config, width)
    if depth > 1:
        weights, config = deepen(weights, config, depth)
    return weights, config


def write(model, out, form, weights, config, kind="f16"):
    if form == "safetensors":
        import safetensors
        safetensors.export(model, out, weights, config)
    elif form == "gguf":
        import gguf
        gguf.export(model, pathlib.Path(out) / "model.gguf", weights, config, kind)
    else:
        bundle.write_common(model, out, config)
        bundle.write_onnx(out, weights, config)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--width", type=int, default=1, choices=(1, 4, 16))
    parser.add_argument("--out", required=True)
    parser.add_argument("--format", default="onnx", choices=("onnx", "safetensors", "gguf"))
    parser.add_argument("--type", default="f16", choices=("f16", "f32"), help="of a GGUF file's matrices")
    args = parser.parse_args()
    weights, config = inflate(*bundle.load(args.model), args.depth, args.width)
    write(args.model, args.out, args.format, weights, config, args.type)


if __name__ == "__main__":
    main()
