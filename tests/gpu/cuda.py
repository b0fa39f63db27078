"""What `foretell target` does on a CUDA device: placement, accuracy, step and verify times, the demo.

    cuda.py --foretell BIN --steps BIN [--parts small,plain,1b,8b,demo] [--out DIR]

BIN are `foretell` and the example `step_times`. Needs numpy and onnx, the library of onnxruntime-gpu
in ORT_DYLIB_PATH, CUDA and cuDNN in LD_LIBRARY_PATH. Models of 1 and 8 billion parameters are made of
the bundled one, whose choices they keep (onnx/export/inflate.py); of the large one the idle layers
share their weights in the file, which costs a step the same. Everything is loopback.
"""

import argparse
import collections
import json
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.append(str(ROOT / "onnx/export"))
TARGET = ROOT / "onnx/models/target"
# memory bandwidth of an H100 SXM, bytes per second (NVIDIA's data sheet)
BANDWIDTH = 3.35e12


def run(what, command, seconds):
    print(f"\n### {what}", flush=True)
    began = time.time()
    try:
        subprocess.run([str(part) for part in command], timeout=seconds, check=False, stderr=subprocess.STDOUT)
    except subprocess.TimeoutExpired:
        print(f"not done after {seconds} s")
    print(f"[{time.time() - began:.1f} s]", flush=True)


def placement(prefix):
    """Nodes by device and operator, and seconds in them, from the runtime's profile."""
    for path in pathlib.Path(prefix.parent).glob(prefix.name + "*.json"):
        try:
            events = json.loads(path.read_text())
        except json.JSONDecodeError:
            events = json.loads(path.read_text().rstrip().rstrip(",") + "]")
        count, spent = collections.Counter(), collections.Counter()
        for event in events:
            provider = event.get("args", {}).get("provider")
            if event.get("cat") == "Node" and provider:
                key = (provider.removesuffix("ExecutionProvider"), event["args"]["op_name"])
                count[key] += 1
                spent[key] += event["dur"] / 1e6
        for key in sorted(count):
            print(f"{key[0]} {key[1]}: {count[key]} runs, {spent[key]:.4f} s")
        path.unlink()


def inflated(out, depth, width, **form):
    """The bundled model with its dimensions multiplied; idle layers share one set of weights."""
    import bundle
    import inflate

    weights, config = inflate.inflate(*bundle.load(TARGET), 1, width)
    if depth > 1:
        layers = config["num_hidden_layers"]
        deep, first = {}, {name: None for name in weights if name.startswith("model.layers.0.")}
        for name, array in weights.items():
            if name.startswith("model.layers."):
                _, _, layer, rest = name.split(".", 3)
                deep[f"model.layers.{int(layer) * depth}.{rest}"] = array
            else:
                deep[name] = array
        import numpy as np
        for name in first:
            rest = name.split(".", 3)[3]
            array = weights[name]
            idle = np.zeros_like(array) if name.endswith(inflate.OUTPUTS) else array
            for layer in range(layers * depth):
                deep.setdefault(f"model.layers.{layer}.{rest}", idle)
        weights, config = deep, {**config, "num_hidden_layers": layers * depth}
    out.mkdir(parents=True)
    bundle.write_common(TARGET, out, config)
    bundle.write_onnx(out, weights, config, **form)
    parameters = sum(array.size for name, array in weights.items() if "embed" not in name)
    floor = parameters * 4 / BANDWIDTH * 1e3
    print(f"\n{out.name}: {parameters / 1e9:.2f} G parameters in layers, {floor:.2f} ms a step by bandwidth in 32 bits", flush=True)
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--foretell", type=pathlib.Path)
    parser.add_argument("--steps", type=pathlib.Path, required=True)
    parser.add_argument("--parts", default="small,plain,1b,demo")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    parts = args.parts.split(",")
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        steps = [args.steps, "--device", args.device]
        short = ["--lanes", "1,8,64", "--tokens", "1,5,17"]
        long = ["--lanes", "1,8,32", "--tokens", "1,5,9,17,33,65", "--rounds", "30"]
        if "small" in parts:
            run("accuracy against the CPU", [args.steps, TARGET, "--device", args.device, "--compare"], 60)
            run("step times, bundled target", [steps[0], TARGET, *steps[1:], *short, "--rounds", "40"], 60)
            run("profile", [steps[0], TARGET, *steps[1:], "--lanes", "1", "--tokens", "1,5", "--rounds", "5",
                            "--profile", work / "profile"], 60)
            placement(work / "profile")
        if "plain" in parts:
            plain = inflated(work / "plain", 1, 1, plain_attention=True)
            run("plain attention: accuracy", [args.steps, plain, "--device", args.device, "--compare"], 60)
            run("plain attention: step times", [steps[0], plain, *steps[1:], *short, "--rounds", "40"], 60)
        for name, depth in (("1b", 1), ("8b", 8)):
            if name in parts or f"{name}-plain" in parts:
                form = {"plain_attention": True} if f"{name}-plain" in parts else {}
                model = inflated(work / name, depth, 16, **form)
                run(f"{name}: step times", [steps[0], model, *steps[1:], *long], 150)
                if "demo" in parts and args.foretell:
                    run(f"{name}: demo", [args.foretell, "demo", "--once", "--target", model], 90)


if __name__ == "__main__":
    main()
