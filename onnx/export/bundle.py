"""A model directory as plain arrays: the source of every export and test.

`model.onnx` is the only committed copy of the weights. Its initializers carry Hugging Face's names,
layouts and 16-bit values, so reading it back needs no PyTorch and every other format can be written
from it.
"""

import json
import pathlib
import shutil
import struct

import numpy as np

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SAFETENSORS_KINDS = {"float16": "F16", "bfloat16": "BF16"}


def is_weight(name):
    return name.startswith("model.") and name.endswith(".weight")


def load(folder):
    """(weights by name as float16, config) of a model directory."""
    import onnx
    from onnx import numpy_helper

    folder = pathlib.Path(folder)
    config = json.loads((folder / "config.json").read_text())
    graph = onnx.load(folder / "model.onnx").graph
    weights = {t.name: numpy_helper.to_array(t) for t in graph.initializer if is_weight(t.name)}
    for name, array in weights.items():
        if array.dtype != np.float16:
            raise ValueError(f"{name} is {array.dtype}, expected float16")
    return weights, config


def write_common(source, out, config):
    """Writes the config and tokenizer files of an export."""
    source, out = pathlib.Path(source), pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for name in TOKENIZER_FILES:
        if (source / name).exists() and source.resolve() != out.resolve():
            shutil.copyfile(source / name, out / name)


def write_safetensors(path, weights):
    """Writes the safetensors format by hand: a length, a JSON header, the raw arrays."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, array in sorted(weights.items()):
        header[name] = {"dtype": SAFETENSORS_KINDS[array.dtype.name], "shape": list(array.shape),
                        "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, array in sorted(weights.items()):
            file.write(np.ascontiguousarray(array).tobytes())


def read_safetensors(path):
    data = pathlib.Path(path).read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    weights = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        weights[name] = np.frombuffer(data[8 + size + start:8 + size + end], "<f2").reshape(entry["shape"])
    return weights


def write_onnx(folder, weights, config, **form):
    """Writes the committed form with the graph builder; `form`: what else its `build` takes."""
    import sys

    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "train"))
    import graph

    graph.save(graph.build(weights, config, **form), pathlib.Path(folder) / "model.onnx")
