"""The bundled models compute the same in every form that they are written in.

The reference is numpy in double precision on the safetensors export; nothing here needs PyTorch.
Run: python tests/python/test_models.py
"""

import json
import pathlib
import struct
import sys
import tempfile
import unittest

import ml_dtypes
import numpy as np
import onnxruntime as ort
import tokenizers

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "onnx/export"), str(ROOT / "onnx/train")]

import bundle  # noqa: E402
import from_gguf  # noqa: E402
import gguf  # noqa: E402
import graph  # noqa: E402
import head  # noqa: E402
import inflate  # noqa: E402
import reference  # noqa: E402
import safetensors  # noqa: E402

MODELS = ROOT / "onnx/models"
NAMES = ("target", "draft-same", "draft-other")
TEXT = "def read_lines(path):\n    with open(path) as file:\n        return [line.strip() for line in file]\n"


class Slots:
    """A slot cache around an ONNX session, as in the runtime, in a few lines of numpy."""

    def __init__(self, model, config, lanes, length):
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3  # this cache is copied, not bound in place
        self.session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.length, self.layers = length, config["num_hidden_layers"]
        shape = (lanes, config["num_key_value_heads"], length, config["head_dim"])
        self.cache = {f"past_{kind}.{i}": np.zeros(shape, np.float32)
                      for i in range(self.layers) for kind in "kv"}

    def run(self, ids, positions, index, count, mask):
        """Writes `ids` at row `index` of every lane; `mask` is boolean [lanes, tokens, length]."""
        ids = np.asarray(ids, np.int64)
        feeds = {
            "input_ids": ids, "positions": np.asarray(positions, np.int64),
            "write_index": np.asarray(index, np.int64), "kv_len": np.asarray(count, np.int64),
            "mask": np.where(mask, 0.0, -1e9).astype(np.float32)[:, None],
            "rows": np.tile(np.arange(ids.shape[1]), (len(ids), 1)), **self.cache,
        }
        names = [o.name for o in self.session.get_outputs()]
        out = dict(zip(names, self.session.run(None, feeds)))
        self.cache = {n: out[n.replace("past", "present")] for n in self.cache}
        return out["logits"]

    def commit(self, lane, rows, index):
        """Moves the rows of an accepted branch together, from `index` on."""
        for array in self.cache.values():
            array[lane, :, index:index + len(rows)] = array[lane][:, rows].copy()


def causal(starts, counts, width, length):
    """Each lane's new tokens see the rows up to their own."""
    mask = np.zeros((len(starts), width, length), bool)
    for lane, (start, count) in enumerate(zip(starts, counts)):
        for i in range(width):
            mask[lane, i, :start + min(i, count - 1) + 1] = True
    return mask


def chain_logits(model, config, ids):
    """Logits of one whole sequence in one run."""
    slots = Slots(model, config, 1, len(ids))
    return slots.run([ids], [range(len(ids))], [0], [len(ids)], causal([0], [len(ids)], len(ids), len(ids)))[0]


def relative_error(got, want):
    return np.abs(got - want).max() / np.abs(want).max()


def token_ids(name, text=TEXT):
    from tokenizers import Tokenizer
    return Tokenizer.from_file(str(MODELS / name / "tokenizer.json")).encode(text).ids


class Logits(unittest.TestCase):
    """ONNX against the reference, on the safetensors of the same model."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def parts(self, name):
        safetensors.export(MODELS / name, self.folder.name)
        weights = bundle.read_safetensors(pathlib.Path(self.folder.name) / "model.safetensors")
        return weights, bundle.load(MODELS / name)[1], str(MODELS / name / "model.onnx")

    def test_batch_of_different_lengths(self):
        for name in NAMES:
            with self.subTest(name):
                weights, config, model = self.parts(name)
                ids = token_ids(name)
                lanes = [ids[:7], ids, ids[3:15]]
                width, counts = max(map(len, lanes)), [len(lane) for lane in lanes]
                padded = [lane + [0] * (width - len(lane)) for lane in lanes]
                got = Slots(model, config, 3, 64).run(
                    padded, [range(width)] * 3, [0] * 3, counts, causal([0] * 3, counts, width, 64))
                for lane, tokens in enumerate(lanes):
                    want = reference.logits(weights, config, tokens)
                    self.assertLess(relative_error(got[lane, :len(tokens)], want), 1e-3)

    def test_with_past(self):
        for name in NAMES:
            with self.subTest(name):
                weights, config, model = self.parts(name)
                ids = token_ids(name)
                want, at = reference.logits(weights, config, ids), 0
                slots = Slots(model, config, 1, 64)
                for step in (9, 1, 5, len(ids) - 15):
                    got = slots.run([ids[at:at + step]], [range(at, at + step)], [at], [at + step],
                                    causal([at], [step], step, 64))
                    self.assertLess(relative_error(got[0], want[at:at + step]), 1e-3)
                    at += step

    def test_tree_mask_and_commit_of_a_side_branch(self):
        for name in NAMES:
            with self.subTest(name):
                weights, config, model = self.parts(name)
                ids = token_ids(name)
                past, n = ids[:10], 10
                # two branches under the last token: rows 10, 11, 12 and rows 13, 14, 15 (the true
                # text)
                wrong, right = [7, 8, 9], ids[10:13]
                slots = Slots(model, config, 1, 64)
                slots.run([past], [range(n)], [0], [n], causal([0], [n], n, 64))
                mask = np.zeros((1, 6, 64), bool)
                mask[0, :, :n] = True
                for branch in (0, 3):
                    for i in range(3):
                        mask[0, branch + i, n + branch:n + branch + i + 1] = True
                got = slots.run([wrong + right], [[10, 11, 12] * 2], [n], [n + 6], mask)[0]
                for branch, tokens in ((0, wrong), (3, right)):
                    want = reference.logits(weights, config, past + tokens)[n:]
                    self.assertLess(relative_error(got[branch:branch + 3], want), 1e-3)
                full = np.tri(16, dtype=bool)
                full[n:, n:] = mask[0, :, n:n + 6]
                want = reference.logits(weights, config, past + wrong + right,
                                        [*range(n), 10, 11, 12, 10, 11, 12], full)[n:]
                self.assertLess(relative_error(got, want), 1e-3)
                slots.commit(0, [13, 14, 15], n)
                got = slots.run([ids[13:16]], [range(13, 16)], [13], [16], causal([13], [3], 3, 64))[0]
                want = reference.logits(weights, config, ids[:16])[13:]
                self.assertLess(relative_error(got, want), 1e-3)

    def test_plain_attention_computes_the_same(self):
        weights, config, model = self.parts("target")
        ids = token_ids("target")
        plain = graph.build(weights, config, plain_attention=True).SerializeToString()
        self.assertLess(relative_error(chain_logits(plain, config, ids), chain_logits(model, config, ids)), 1e-4)


class Formats(unittest.TestCase):
    """Every format holds the same 16-bit values."""

    def test_safetensors_and_gguf_hold_the_committed_values(self):
        for name in NAMES:
            with self.subTest(name), tempfile.TemporaryDirectory() as folder:
                out = pathlib.Path(folder)
                weights, config = bundle.load(MODELS / name)
                safetensors.export(MODELS / name, out)
                gguf.export(MODELS / name, out / "model.gguf")
                for read in (bundle.read_safetensors(out / "model.safetensors"),
                             gguf.read(out / "model.gguf", config)):
                    self.assertEqual(sorted(read), sorted(weights))
                    for tensor, array in weights.items():
                        self.assertEqual(read[tensor].tobytes(), array.tobytes(), tensor)

    def test_q_and_k_are_reordered_for_neighbouring_pairs(self):
        rows = np.arange(16, dtype=np.float16)[:, None]
        moved = gguf.permute(rows, 2)
        self.assertEqual(moved[:, 0].tolist()[:8], [0, 4, 1, 5, 2, 6, 3, 7])
        self.assertTrue((gguf.unpermute(moved, 2) == rows).all())


class ForeignFiles(unittest.TestCase):
    """A foreign GGUF file becomes a model directory with the same metadata and results."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.out = pathlib.Path(folder.name)

    def test_there_and_back_is_the_same_model(self):
        source, back = MODELS / "draft-other", self.out / "back"
        gguf.export(source, self.out / "model.gguf")
        from_gguf.export(self.out / "model.gguf", back, "onnx")
        weights, config = bundle.load(source)
        read, settings = bundle.load(back)
        self.assertEqual(sorted(read), sorted(weights))
        for name, array in weights.items():
            self.assertEqual(read[name].tobytes(), array.tobytes(), name)
        ends = config.pop("eos_token_id")
        self.assertEqual(settings["eos_token_id"][0], ends)
        self.assertEqual({k: settings[k] for k in settings if k in config}, {k: config[k] for k in settings if k in config})
        self.assertEqual((back / "chat_template.jinja").read_text(), (source / "chat_template.jinja").read_text().rstrip("\n"))
        ours, theirs = (tokenizers.Tokenizer.from_file(str(f / "tokenizer.json")) for f in (back, source))
        for text in (TEXT, "<|user|>\n Zwölf 12345 \t\n  x<|end|>\n"):
            self.assertEqual(ours.encode(text).ids, theirs.encode(text).ids)
            self.assertEqual(ours.decode(ours.encode(text).ids), theirs.decode(theirs.encode(text).ids))

    def test_quantised_matrices_are_as_near_as_their_steps(self):
        array = np.random.default_rng(4).standard_normal((8, 64), np.float32)
        kind = gguf.package.GGMLQuantizationType.Q4_1
        writer = gguf.package.GGUFWriter(str(self.out / "q.gguf"), "llama")
        writer.add_tensor("token_embd.weight", gguf.package.quants.quantize(array, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        read = from_gguf.weights(from_gguf.Foreign(self.out / "q.gguf"), {}, np.float16)["model.embed_tokens.weight"]
        blocks, got = array.reshape(-1, 32), read.astype(np.float32).reshape(-1, 32)
        step = (blocks.max(1) - blocks.min(1)) / 15
        self.assertEqual(read.shape, array.shape)
        self.assertLess((np.abs(blocks - got).max(1) / step).max(), 0.6)
        self.assertGreater(np.abs(blocks - got).max(), 0)

    def test_a_value_beyond_16_bits_is_refused(self):
        writer = gguf.package.GGUFWriter(str(self.out / "big.gguf"), "llama")
        writer.add_tensor("output_norm.weight", np.array([1.0, 1e6], np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with self.assertRaisesRegex(ValueError, "model.norm.weight does not fit float16"):
            from_gguf.weights(from_gguf.Foreign(self.out / "big.gguf"), {}, np.float16)

    def test_biases_and_heads_have_their_names(self):
        self.assertEqual(from_gguf.hugging_name("blk.12.attn_k.bias"), "model.layers.12.self_attn.k_proj.bias")
        self.assertEqual(from_gguf.hugging_name("output.weight"), "lm_head.weight")

    def test_digits_stand_alone_where_the_file_says_so(self):
        for name, words in (("smollm", ["1", "2"]), ("qwen2", ["1", "2"]), ("gpt-2", ["12"])):
            normalizer, before = from_gguf.PRE[name]
            model = {"type": "BPE", "vocab": {"1": 0, "2": 1, "12": 2}, "merges": [["1", "2"]]}
            settings = {"version": "1.0", "added_tokens": [], "normalizer": normalizer, "pre_tokenizer": before, "model": model}
            self.assertEqual(tokenizers.Tokenizer.from_str(json.dumps(settings)).encode("12").tokens, words, name)

    def test_safetensors_hold_bfloat16(self):
        array = np.array([[1.5, -3.0]], ml_dtypes.bfloat16)
        bundle.write_safetensors(self.out / "m.safetensors", {"lm_head.weight": array})
        data = (self.out / "m.safetensors").read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        self.assertEqual(json.loads(data[8:8 + size])["lm_head.weight"]["dtype"], "BF16")
        self.assertEqual(data[8 + size:], struct.pack("<2H", 0x3FC0, 0xC040))


def silu(x):
    return x / (1 + np.exp(-x))


class Heads(unittest.TestCase):
    """tests/exports/head: a model with a head, both of random weights."""

    FOLDER = ROOT / "tests/exports/head"

    def test_the_taps_are_the_states_after_the_tapped_layers(self):
        weights, config = bundle.load(self.FOLDER)
        ids = [3, 14, 15, 92, 65, 35]
        count = len(ids)
        session = ort.InferenceSession(str(self.FOLDER / "model.onnx"))
        feeds = {"input_ids": np.array([ids]), "positions": np.arange(count)[None], "write_index": np.array([0]),
                 "kv_len": np.array([count]), "rows": np.arange(count)[None], "mask": np.where(causal([0], [count], count, 128), 0, -1e9).astype(np.float32)[:, None]}
        empty = np.zeros((1, config["num_key_value_heads"], 128, config["head_dim"]), np.float32)
        feeds |= {f"past_{kind}.{layer}": empty for layer in range(config["num_hidden_layers"]) for kind in "kv"}
        logits, taps = session.run(["logits", "taps"], feeds)
        self.assertLess(relative_error(logits[0], reference.logits(weights, config, ids)), 1e-3)
        hidden = config["hidden_size"]
        last = reference.norm(taps[0, :, hidden:].astype(np.float64), weights["model.norm.weight"].astype(np.float64),
                              config["rms_norm_eps"])
        again = last @ weights["model.embed_tokens.weight"].astype(np.float64).T
        self.assertLess(relative_error(again, logits[0]), 1e-3)
        self.assertEqual(taps.shape[-1], 2 * hidden)

    def test_a_head_drafts_what_its_formula_says(self):
        weights, config = bundle.load(self.FOLDER)
        parts = head.restored(np.load(self.FOLDER / "parts/head.npz"))
        rng = np.random.default_rng(5)
        taps = rng.standard_normal((7, 2 * config["hidden_size"])).astype(np.float32)
        token = rng.integers(0, config["vocab_size"], 7)
        session = ort.InferenceSession(str(self.FOLDER / "heads/model.onnx"))
        self.assertEqual(session.get_modelmeta().custom_metadata_map["frequent"],
                         ",".join(map(str, parts["frequent"].tolist())))
        drawn = 0.8 * rng.gumbel(size=(7, head.STEPS, len(parts["frequent"]))).astype(np.float32)
        for noise in (np.zeros_like(drawn), drawn):
            with self.subTest(drawn=bool(noise.any())):
                self.check(session, (weights, config), parts, taps, token, noise)

    def test_medusa_heads_draft_what_their_formula_says(self):
        weights, config = bundle.load(self.FOLDER)
        rng, hidden = np.random.default_rng(6), config["hidden_size"]
        made = dict(np.load(self.FOLDER / "parts/head.npz"))
        drawn = {name: array for name, array in head.restored(np.load(self.FOLDER / "parts/head.npz")).items()
                 if not name.startswith("step.") and name != "frequent"}
        drawn |= {f"medusa.{k}": rng.standard_normal((hidden, hidden)).astype(np.float32) * hidden ** -0.5 for k in range(head.STEPS)}
        with tempfile.TemporaryDirectory() as folder:
            head.kept(pathlib.Path(folder) / "head.npz", drawn, made["frequent"])
            file = np.load(pathlib.Path(folder) / "head.npz")
            graph = head.build(file, weights["model.embed_tokens.weight"], config)
            parts = head.restored(file)
        session = ort.InferenceSession(graph.SerializeToString())
        taps = rng.standard_normal((7, 2 * hidden)).astype(np.float32)
        noise = 0.8 * rng.gumbel(size=(7, head.STEPS, len(parts["frequent"]))).astype(np.float32)
        self.check(session, (weights, config), parts, taps, rng.integers(0, config["vocab_size"], 7), noise)

    def check(self, session, model, parts, taps, token, noise):
        weights, config = model
        tokens, shares = session.run(None, {"taps": taps, "token": token, "noise": noise})
        self.assertEqual(tokens.shape, (7, head.STEPS, head.WIDTH))
        embedding, eps = weights["model.embed_tokens.weight"].astype(np.float64), config["rms_norm_eps"]
        states = reference.norm(taps.reshape(7, 2, -1).astype(np.float64), 1.0, eps) * parts["taps.norm"]
        begun = state = states.reshape(7, -1) @ parts["taps.weight"].T

        def after(state, token):
            read = np.concatenate([reference.norm(embedding[token], parts["step.token_norm"], eps),
                                   reference.norm(state, parts["step.state_norm"], eps)], -1)
            return state + (silu(read @ parts["step.gate"].T) * (read @ parts["step.up"].T)) @ parts["step.down"].T

        for step in range(head.STEPS):
            medusa = parts.get(f"medusa.{step}")
            state = after(state, token) if medusa is None else begun + silu(begun @ medusa.T)
            logits = reference.norm(state, parts["out.norm"], eps) @ parts["out.weight"].T + noise[:, step]
            share = np.exp(logits - logits.max(-1, keepdims=True))
            share /= share.sum(-1, keepdims=True)
            # products with weights in 8 bits round the other factor too
            np.testing.assert_allclose(shares[:, step, 0], share.max(-1), atol=0.05)
            np.testing.assert_allclose(np.take_along_axis(share, np.searchsorted(parts["frequent"], tokens[:, step]), 1),
                                       shares[:, step], atol=0.05)
            token = tokens[:, step, 0]


class Inflate(unittest.TestCase):
    """A more expensive model, the same function, in all three formats."""

    def check(self, depth, width, equal):
        name = "draft-same"
        weights, config = bundle.load(MODELS / name)
        ids = token_ids(name)
        want = chain_logits(str(MODELS / name / "model.onnx"), config, ids)
        bigger, wide = inflate.inflate(weights, config, depth, width)
        for form in ("onnx", "safetensors", "gguf"):
            with self.subTest(form), tempfile.TemporaryDirectory() as folder:
                out = pathlib.Path(folder)
                inflate.write(MODELS / name, out, form, bigger, wide)
                if form == "onnx":
                    model = str(out / "model.onnx")
                else:
                    read = (bundle.read_safetensors(out / "model.safetensors") if form == "safetensors"
                            else gguf.read(out / "model.gguf", wide))
                    model = graph.build(read, wide).SerializeToString()
                got = chain_logits(model, wide, ids)
                if equal:
                    self.assertTrue((got == want).all())
                else:
                    self.assertLess(relative_error(got, want), 1e-5)

    def test_depth_is_bit_equal(self):
        self.check(8, 1, True)

    def test_width_changes_nothing(self):
        self.check(1, 4, False)

    def test_depth_and_width_together(self):
        self.check(2, 4, False)

    def test_idle_layers_do_compute(self):
        weights, config = inflate.deepen(*bundle.load(MODELS / "draft-same"), 2)
        self.assertEqual(config["num_hidden_layers"], 2 * bundle.load(MODELS / "draft-same")[1]["num_hidden_layers"])
        self.assertTrue(np.abs(weights["model.layers.1.self_attn.q_proj.weight"]).max() > 0)
        self.assertFalse(weights["model.layers.1.self_attn.o_proj.weight"].any())


if __name__ == "__main__":
    unittest.main()
