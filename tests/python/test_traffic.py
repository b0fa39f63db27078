"""Training on recorded traffic: onnx/train/traffic.py. Run: python tests/python/test_traffic.py

The training itself needs PyTorch, which `make test-python` does not install; without it those tests are skipped.
"""

import argparse
import importlib.util
import io
import json
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import unittest

import numpy as np
import onnxruntime as ort

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "onnx/export"), str(ROOT / "onnx/train")]

import graph  # noqa: E402
import reference  # noqa: E402
import traffic  # noqa: E402
import traffic_data as data  # noqa: E402
import traffic_report  # noqa: E402

MODELS = ROOT / "onnx/models"
SCRIPT = ROOT / "onnx/train/traffic.py"
HAS_TORCH = importlib.util.find_spec("torch") is not None


def request(prompt, output, group="g"):
    return data.Request(np.array(prompt, np.int32), np.array(output, np.int32), group)


def lines(count, seed=3):
    """Recorded requests whose output repeats a pattern that the prompt names."""
    rng, made = np.random.default_rng(seed), []
    for index in range(count):
        first = 100 + int(rng.integers(0, 6))
        output = [first, *(200 + (first + step) % 16 for step in range(24)), 0]
        made.append({"prompt": [2, first, 300 + index, 8, 9, 3], "output": output, "group": ("even", "odd")[index % 2]})
    return "".join(json.dumps(one) + "\n" for one in made)


class Split(unittest.TestCase):
    def test_a_tenth_is_held_out_the_same_each_time_within_limits(self):
        requests = [request([1], [index]) for index in range(9000)]
        held = lambda count: [int(r.output[0]) for r in data.split(requests[:count])[1]]  # noqa: E731
        self.assertEqual(held(1000), held(1000))
        self.assertTrue(70 < len(held(1000)) < 130)
        self.assertTrue(8 <= len(held(50)) < 15)
        self.assertEqual(len(held(9000)), 200)

    def test_the_parts_are_disjoint_and_whole(self):
        requests = [request([1], [index]) for index in range(300)]
        train, held = ({int(r.output[0]) for r in part} for part in data.split(requests))
        self.assertFalse(train & held)
        self.assertEqual(train | held, set(range(300)))

    def test_what_was_trained_on_is_not_held_out_when_the_oldest_are_deleted(self):
        requests = [request([1], [index]) for index in range(1000)]
        [(train, _), (_, held)] = data.split(requests), data.split(requests[62:] + [request([2], [1])])
        self.assertFalse({int(r.output[0]) for r in train} & {int(r.output[0]) for r in held if r.prompt[0] == 1})

    def test_equal_requests_are_on_one_side(self):
        requests = [request([1], [index]) for index in range(60)]
        train, held = ([int(r.output[0]) for r in part] for part in data.split(requests * 3))
        self.assertFalse(set(train) & set(held))
        self.assertEqual((len(set(train)), len(train), len(held)), (60 - len(held), 3 * len(set(train)), len(set(held))))


class Reading(unittest.TestCase):
    def refused(self, text):
        with self.assertRaises(data.Refused) as caught:
            data.read(io.StringIO(text), 8192)
        return str(caught.exception)

    def test_requests_without_output_are_left_out(self):
        text = lines(60) + '{"prompt":[1],"output":[],"group":"even"}\n\n'
        read = data.read(io.StringIO(text), 8192)
        self.assertEqual(len(read), 60)
        self.assertEqual({r.group for r in read}, {"even", "odd"})

    def test_too_few_are_refused_with_their_number(self):
        self.assertIn("49 different recorded requests", self.refused(lines(49) + lines(49)))

    def test_errors_name_a_line_and_no_token(self):
        for wrong in ('{"prompt":[777777],"output":[1]}', '{"prompt":[777777]}', "[777777",
                      '{"prompt":["777777"],"output":[-1]}'):
            message = self.refused(lines(50) + wrong)
            self.assertIn("line 51", message)
            self.assertNotIn("777777", message)


class Windows(unittest.TestCase):
    def test_a_short_request_is_one_window(self):
        self.assertEqual(data.windows(10, 30, 512), [(0, 30, 1)])
        self.assertEqual(data.windows(0, 1, 512), [])

    def test_every_output_token_is_a_target_once_with_context_before_it(self):
        for prompt, total in ((10, 2000), (600, 700), (0, 1500), (3000, 3001), (5, 514), (511, 513)):
            with self.subTest(prompt=prompt, total=total):
                times = np.zeros(total, int)
                for start, stop, first in data.windows(prompt, total, 512):
                    self.assertLessEqual(stop - start, 513)
                    self.assertTrue(start == 0 or first - start >= 128)
                    times[first:stop] += 1
                self.assertTrue((times[max(prompt, 1):] == 1).all())
                self.assertLessEqual(times.max(), 1)


class Batches(unittest.TestCase):
    def setUp(self):
        rng = np.random.default_rng(2)
        self.requests = [request(rng.integers(0, 50, rng.integers(1, 900)), rng.integers(0, 60, rng.integers(1, 900)))
                         for _ in range(40)]
        self.kept = data.Kept(np.arange(55), 64)

    def test_an_epoch_trains_on_every_output_token_once(self):
        batches, total = data.Batches(self.requests, self.kept), 0.0
        while batches.at[data.WINDOW][0] == 0:
            x, y, weights = batches.next(data.WINDOW)
            self.assertLessEqual(x.size, data.BATCH + data.WINDOW)
            self.assertFalse(weights[y == len(self.kept)].any())
            total += (weights == 1).sum()
        self.assertEqual(total, sum((r.output < 55).sum() for r in self.requests))

    def test_the_order_goes_on_from_a_saved_place(self):
        batches = data.Batches(self.requests, self.kept)
        for _ in range(5):
            batches.next(data.WINDOW)
        again = data.Batches(self.requests, self.kept)
        again.at = {length: list(place) for length, place in batches.at.items()}
        for _ in range(5):
            for one, other in zip(batches.next(data.WINDOW), again.next(data.WINDOW)):
                np.testing.assert_array_equal(one, other)

    def test_prompt_tokens_weigh_less(self):
        batches = data.Batches([request([1, 2, 3], [4, 5])], self.kept)
        _, y, weights = batches.next(data.WINDOW)
        self.assertEqual(y.tolist(), [[2, 3, 4, 5]])
        np.testing.assert_allclose(weights, [[0.1, 0.1, 1, 1]])


class Kept(unittest.TestCase):
    def test_the_most_frequent_tokens_have_rows_in_ascending_order(self):
        requests = [request([9, 9, 9, 4], [4, 7]), request([5], [9, 4, 5])]
        kept = data.Kept.most_frequent(requests, 12, most=3)
        self.assertEqual(kept.ids.tolist(), [4, 5, 9])
        self.assertEqual(kept.rows.tolist(), [3, 3, 3, 3, 0, 1, 3, 3, 3, 2, 3, 3])
        self.assertEqual(data.Kept.most_frequent(requests, 12).ids.tolist(), [4, 5, 7, 9])


class Acceptance(unittest.TestCase):
    def test_rounds_of_hand_made_runs(self):
        for hits, drafted, count in (("", 4, 0), ("0", 4, 1), ("000", 4, 3), ("11111", 4, 1), ("111111", 4, 2),
                                     ("1101", 4, 2), ("0111", 2, 2), ("1111", 1, 2), ("1111", 4, 1)):
            with self.subTest(hits=hits, drafted=drafted):
                self.assertEqual(traffic.rounds([hit == "1" for hit in hits], drafted), count)

    def test_the_mean_is_over_tokens_and_not_over_groups(self):
        results = [("a", [True] * 5), ("a", [False] * 5), ("b", [False, False])]
        self.assertEqual(traffic.acceptance(results, 4), ({"a": round(10 / 6, 4), "b": 1.0}, 1.5))


class KeptGraph(unittest.TestCase):
    """The graph of an embedding of some tokens, against numpy."""

    def test_logits_cover_the_vocabulary(self):
        some, size = [2, 3, 5, 8, 13, 21, 34], 40
        config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                  "head_dim": 16, "intermediate_size": 96, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
                  "max_position_embeddings": 64, "vocab_size": size, "tie_word_embeddings": True}
        weights = graph.random_weights({**config, "vocab_size": len(some) + 1}, 6)
        made = graph.build(weights, config, kept=np.array(some))
        ids = [3, 34, 7, 2, 39, 0, 21]  # 7, 39 and 0 have no row
        count = len(ids)
        feeds = {"input_ids": np.array([ids]), "positions": np.arange(count)[None], "write_index": np.array([0]),
                 "kv_len": np.array([count]), "rows": np.array([[0, 3, 6]]),
                 "mask": np.where(np.tri(count), 0, -1e9).astype(np.float32)[None, None]}
        feeds |= {f"past_{kind}.{layer}": np.zeros((1, 2, count, 16), np.float32) for layer in range(2) for kind in "kv"}
        options = ort.SessionOptions()
        options.log_severity_level = 3
        got = ort.InferenceSession(made.SerializeToString(), options).run(["logits"], feeds)[0]
        self.assertEqual(got.shape, (1, 3, size))
        rows = [some.index(token) if token in some else len(some) for token in ids]
        want = reference.logits(weights, {**config, "vocab_size": len(some) + 1}, rows)[[0, 3, 6]]
        np.testing.assert_allclose(got[0][:, some], want[:, :-1], atol=1e-3 * np.abs(want).max())
        others = np.delete(got[0], some, axis=1)
        self.assertTrue((others == np.float32(-1e9)).all())


class Report(unittest.TestCase):
    def test_names_are_escaped_and_nothing_is_loaded(self):
        class Trained:
            args = argparse.Namespace(drafted=4)
            best = {"groups": {"<b>&": 2.5}, "mean": 2.5, "share": 1.0}
            curve = [[0.0, {"<b>&": 1.2}, 1.2], [1.0, {"<b>&": 2.5}, 2.5]]
            before = {"groups": {"<b>&": 1.2}, "mean": 1.2}
            compared = traffic.Training.compared

        facts = {"date": "2026-01-01", "requests": 60, "trained": 52, "held": 8, "tokens": 900, "seconds": 60.0,
                 "groups": ["<b>&"], "parameters": 1000}
        page = traffic_report.report(Trained(), facts)
        self.assertIn("&lt;b&gt;&amp;", page)
        self.assertNotIn("<b>", page)
        self.assertIsNone(re.search(r"(src|href)=|url\(|@import|https?:", page))
        self.assertIn("prefers-color-scheme: dark", page)


class Layers(unittest.TestCase):
    def test_a_token_begins_as_the_same_token_or_as_its_pieces(self):
        from tokenizers import Tokenizer

        theirs, own = (Tokenizer.from_file(str(MODELS / name / "tokenizer.json")) for name in ("draft-same", "draft-other"))
        layers = traffic.Layers(MODELS / "draft-same")
        kept = data.Kept(np.arange(200, 6000, 7), 6144)
        weights = layers.start(kept, MODELS / "draft-other")
        table = weights["model.embed_tokens.weight"]
        self.assertEqual(table.shape, (len(kept) + 1, layers.size["hidden_size"]))
        same = {row: theirs.token_to_id(own.id_to_token(token)) for row, token in enumerate(kept.ids.tolist())}
        shared = {row: token for row, token in same.items() if token is not None}
        self.assertTrue(100 < len(shared) < len(kept))
        for row, token in shared.items():
            np.testing.assert_array_equal(table[row], layers.table[token])
        row = next(row for row, token in same.items() if token is None)
        pieces = theirs.encode(own.decode([int(kept.ids[row])])).ids
        self.assertGreater(len(pieces), 1)
        np.testing.assert_allclose(table[row], layers.table[pieces].mean(0))
        self.assertEqual(layers.size, traffic.sizes(256, 2))


@unittest.skipUnless(HAS_TORCH, "PyTorch is not installed (onnx/train/requirements.txt)")
class Training(unittest.TestCase):
    """Whole runs of a few seconds."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def command(self, *more, budget=4, tokenizer=MODELS / "target", out="out"):
        return [sys.executable, str(SCRIPT), "--tokenizer", str(tokenizer), "--out", str(self.folder / out),
                "--work", str(self.folder / "work"), "--budget", str(budget), "--hidden", "64", "--layers", "1", *more]

    def events(self, *more, text=None, code=0, **settings):
        done = subprocess.run(self.command(*more, **settings), input=text or lines(80), capture_output=True, text=True)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def test_it_learns_and_the_folder_is_whole(self):
        events = self.events(budget=20)
        self.assertEqual(events[0] | {"tokens": 0}, {"event": "read", "requests": 80, "tokens": 0, "validation": 9,
                                                     "vocabulary": 8192, "occurring": events[0]["occurring"]})
        done = events[-1]
        self.assertEqual((done["event"], set(done["groups"])), ("done", {"even", "odd"}))
        self.assertIsNone(done["mean"]["before"])
        self.assertGreater(done["mean"]["after"], 2)
        self.assertLessEqual({"model.onnx", "config.json", "tokenizer.json", "README.md", "report.html"},
                             {path.name for path in (self.folder / "out").iterdir()})
        # Who asked removes it, once the drafter is in its place.
        self.assertEqual([path.name for path in (self.folder / "work").iterdir()], ["last.pt"])
        self.assertEqual(sorted(path.name for path in self.folder.iterdir()), ["out", "work"])
        config = json.loads((self.folder / "out/config.json").read_text())
        self.assertEqual((config["vocab_size"], config["eos_token_id"]), (8192, 0))
        # the result is itself a base, and is what the next training says it began with
        again = self.events("--base", str(self.folder / "out"), budget=2)[-1]
        self.assertEqual(again["mean"]["before"], done["mean"]["after"])

    def test_a_base_of_all_tokens_and_one_with_another_tokenizer(self):
        done = self.events("--base", str(MODELS / "draft-same"), budget=3)[-1]
        self.assertGreaterEqual(done["mean"]["before"], 1)
        self.assertLessEqual({"even", "odd"}, {name for name, one in done["groups"].items() if one["before"] >= 1})
        done = self.events("--layers-of", str(MODELS / "draft-same"), tokenizer=MODELS / "draft-other", budget=3)[-1]
        self.assertEqual((done["event"], done["mean"]["before"]), ("done", None))
        error, = self.events("--base", str(MODELS / "draft-other"), code=1)
        self.assertIn("another tokenizer", error["message"])

    def test_a_stopped_run_goes_on_with_the_same_data_only(self):
        process = subprocess.Popen(self.command(budget=60), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        process.stdin.write(lines(80))
        process.stdin.close()
        for line in process.stdout:
            if json.loads(line)["event"] == "progress":
                break
        process.send_signal(signal.SIGTERM)
        rest = [json.loads(line) for line in process.stdout]
        process.stdout.close()
        self.assertEqual((process.wait(), rest[-1]["event"]), (1, "error"))
        self.assertFalse((self.folder / "out").exists())
        kept = (self.folder / "work/last.pt").read_bytes()
        self.assertEqual([path.name for path in (self.folder / "work").iterdir()], ["last.pt"])
        resumed = [event for event in self.events(budget=6) if event["event"] == "resumed"]
        self.assertGreater(resumed[0]["share"], 0.2)
        (self.folder / "work/last.pt").write_bytes(kept)
        other = self.events(budget=3, text=lines(80, seed=4))
        self.assertNotIn("resumed", {event["event"] for event in other})

    def test_errors_are_events(self):
        error, = self.events(text=lines(10), code=1)
        self.assertEqual(error["event"], "error")
        self.assertIn("10 different recorded requests", error["message"])
        error, = self.events(code=1, tokenizer=self.folder)
        self.assertIn("tokenizer.json", error["message"])


if __name__ == "__main__":
    unittest.main()
