"""Greedy text from a model directory, through ONNX Runtime, many prompts at once.

The gate and the choice of workloads must use the committed 16-bit models, not a checkpoint; and
neither should depend on the server.
"""

import json
import pathlib

import numpy as np
import onnxruntime as ort
from tokenizers import Tokenizer


class Model:
    def __init__(self, folder, threads=2):
        folder = pathlib.Path(folder)
        self.config = json.loads((folder / "config.json").read_text())
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.session = ort.InferenceSession(
            str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
        self.end = self.config["eos_token_id"]

    def prompt_ids(self, line):
        """Token ids of one line of a workload."""
        body = line["body"]
        if line["route"] == "chat":
            text = "".join(
                f"<|{m['role']}|>\n{m['content']}" + ("<|endoftext|>" if m["role"] == "assistant" else "<|end|>\n")
                for m in body["messages"]) + "<|assistant|>\n"
        else:
            text = body["prompt"]
        return self.tokenizer.encode(text).ids

    def cache(self, lanes, length):
        """One tensor per layer and side, bound as input and output alike."""
        c = self.config
        shape = (lanes, c["num_key_value_heads"], length, c["head_dim"])
        return {f"{kind}.{i}": ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32))
                for i in range(c["num_hidden_layers"]) for kind in "kv"}

    def run(self, cache, ids, index, counts, rows):
        """Writes ids [lanes, tokens] at rows `index`; returns logits of the tokens named by `rows`."""
        ids, index, counts = (np.asarray(a, np.int64) for a in (ids, index, counts))
        length = next(iter(cache.values())).shape()[2]
        at = index[:, None] + np.arange(ids.shape[1])
        seen = np.minimum(at, counts[:, None] - 1)
        mask = np.where(np.arange(length) <= seen[..., None], 0.0, -1e9).astype(np.float32)[:, None]
        binding = self.session.io_binding()
        for name, array in (("input_ids", ids), ("positions", np.minimum(at, 2047)), ("write_index", index),
                            ("kv_len", counts), ("mask", mask), ("rows", np.asarray(rows, np.int64))):
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
        for name, value in cache.items():
            binding.bind_ortvalue_input(f"past_{name}", value)
            binding.bind_ortvalue_output(f"present_{name}", value)
        binding.bind_output("logits")
        self.session.run_with_iobinding(binding)
        return binding.get_outputs()[-1].numpy()  # outputs are in the order of binding

    def greedy(self, prompts, limits):
        """Plain outputs at temperature 0, without the end token."""
        lanes, width = len(prompts), max(map(len, prompts))
        cache = self.cache(lanes, width + max(limits) + 1)
        counts = np.array([len(p) for p in prompts])
        padded = np.array([p + [0] * (width - len(p)) for p in prompts])
        logits = self.run(cache, padded, np.zeros(lanes), counts, counts[:, None] - 1)[:, 0]
        out, live = [[] for _ in prompts], np.ones(lanes, bool)
        while True:
            token = logits.argmax(-1)
            for lane in np.flatnonzero(live):
                if token[lane] == self.end:
                    live[lane] = False
                else:
                    out[lane].append(int(token[lane]))
                    live[lane] = len(out[lane]) < limits[lane]
            if not live.any():
                return out
            logits = self.run(cache, token[:, None], counts, counts + 1, np.zeros((lanes, 1)))[:, 0]
            counts = counts + live

    def guesses(self, ids):
        """The most likely next token after every prefix of `ids`."""
        n = len(ids)
        logits = self.run(self.cache(1, n), [ids], [0], [n], [range(n)])
        return logits[0].argmax(-1)


def in_batches(model, lines, size=16):
    """(line, prompt ids, output ids), longest prompts together."""
    jobs = sorted(((len(ids), i, ids) for i, ids in enumerate(map(model.prompt_ids, lines))), reverse=True)
    for start in range(0, len(jobs), size):
        part = jobs[start:start + size]
        outputs = model.greedy([ids for _, _, ids in part], [lines[i]["body"]["max_tokens"] for _, i, _ in part])
        for (_, i, ids), output in zip(part, outputs):
            yield lines[i], ids, output
