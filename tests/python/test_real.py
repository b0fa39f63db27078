"""The bench of real models, without models: its prompts, its parts, its handling of differences."""

import gzip
import json
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests/bench"), str(ROOT / "tests/engines")]

import real  # noqa: E402
import real_prompts as prompts  # noqa: E402
import sides  # noqa: E402
import wire  # noqa: E402

PROBLEM = {"prompt": "def total(numbers, start):\n    \"\"\" Sum. \"\"\"\n", "entry_point": "total",
           "canonical_solution": "    found = start\n    for one in numbers:\n        found = found + one\n    return found\n"}


class Prompts(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        with gzip.open(self.folder / "human-eval.jsonl.gz", "wt") as file:
            file.writelines(json.dumps({**PROBLEM, "task_id": n}) + "\n" for n in range(7))
        questions = [{"turns": [f"question {n}", "second"]} for n in range(10)]
        (self.folder / "mt-bench.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
        case = {"question": [[{"role": "user", "content": "How far?"}]], "function": [{"name": "far"}, {"name": "near"}]}
        (self.folder / "bfcl.jsonl").write_text(json.dumps(case) + "\n")

    def content(self, name, count=1):
        return [entry["body"]["messages"][0]["content"] for entry in prompts.load(self.folder, name, count)]

    def test_the_variable_that_stands_most_often_is_renamed(self):
        self.assertEqual(prompts.variable(PROBLEM), "found")
        text, = self.content("edit")
        self.assertIn("`found` to `renamed_value`", text)
        self.assertIn(PROBLEM["prompt"] + PROBLEM["canonical_solution"], text)

    def test_prompts_are_spread_evenly_and_always_the_same(self):
        self.assertEqual(self.content("talk", 3), ["question 0", "question 3", "question 6"])
        self.assertEqual(len(self.content("talk", 99)), 10)

    def test_functions_are_declared_as_text(self):
        text, = self.content("tools")
        self.assertIn('{"name": "far"}\n{"name": "near"}', text)
        self.assertIn("How far?", text)

    def test_a_completion_goes_on_from_the_task_itself(self):
        entry, = prompts.load(self.folder, "completion", 1, 16, model="m")
        self.assertEqual(entry["route"], "completions")
        self.assertEqual(entry["body"], {"prompt": PROBLEM["prompt"], "stop": prompts.STOPS, "max_tokens": 16,
                                         "temperature": 0, "model": "m"})
        self.assertLessEqual(len(prompts.STOPS), 4)  # vLLM refuses more

    def test_the_mixture_takes_turns_and_has_everything(self):
        every = prompts.mixed(self.folder)
        self.assertEqual(len(every), 7 * 3 + 10 + 1)
        self.assertEqual([entry["route"] for entry in every[:5]], ["chat", "chat", "completions", "chat", "chat"])


class Direct:
    """An engine whose tokens are characters."""

    kind, url = "vllm", "direct"

    def __init__(self, gap):
        self.distance = gap

    def tokenize(self, _):
        return []

    def text(self, ids):
        return "".join(map(chr, ids))

    def gap(self, _):
        return self.distance


def answer(text, drafted=0):
    usage = {"completion_tokens": len(text), "foretell": {"drafted": drafted, "accepted": drafted}}
    return wire.Answer(text, "stop", list(map(ord, text)), usage)


class Exactness(unittest.TestCase):
    def compared(self, through, gap=0.5):
        given = {"direct": answer("ABCDEF"), "through": answer(through, 3)}
        with mock.patch.object(wire, "ask", lambda url, *_, **__: given[url]):
            return real.compared(Direct(gap), "through", {"max_tokens": 6}, 0)

    def test_the_same_text_counts_whole(self):
        self.assertEqual(self.compared("ABCDEF"), (6, 3, 3, None))

    def test_a_difference_is_found_at_its_token_with_its_gap(self):
        tokens, _, _, difference = self.compared("ABCxyz")
        self.assertEqual((tokens, difference["at"], difference["gap"]), (4, 3, 0.5))

    def test_a_text_cut_short_differs(self):
        self.assertEqual(self.compared("ABCD")[3]["at"], 4)

    def test_only_a_near_tie_explains_a_difference(self):
        tie, flaw = ({"prompt": 1, "at": 2, "gap": gap, "plain": "a", "through": "b"} for gap in (1e-5, 0.3))
        self.assertEqual(real.unexplained([tie, flaw]), [flaw])


class Parts(unittest.TestCase):
    def test_a_beginning_names_all_parts_that_begin_so(self):
        self.assertEqual(real.parts("exact"), [f"exact-{pair}" for pair in real.PAIRS])
        self.assertEqual(real.parts("speed-vllm-qwen,agree"), ["speed-vllm-qwen", "agree"])
        self.assertEqual(real.parts("all"), list(real.PARTS))
        with self.assertRaises(Exception):
            real.parts("speech")

    def test_every_pair_has_its_counts(self):
        self.assertEqual(set(real.COUNTS), set(real.PAIRS))

    def test_a_table_shows_ratios_and_what_failed(self):
        direct = [{"text": "ab", "tokens": 2, "seconds": 2.0, "first": 1.0, "path": None, "reason": None, "rounds": 0,
                   "drafted": 0, "accepted": 0}] * 6
        lookups = [{**one, "seconds": 1.0, "path": "speculated", "rounds": 1, "drafted": 4, "accepted": 1} for one in direct]
        given = {"direct": direct, "lookups": lookups}
        result = {name: real.figures.figures(some, direct) for name, some in given.items()}
        lines = list(real.table("pair, edit", {"sides": result, "failed": ["lookups: HTTP 500"]}))
        self.assertTrue(lines[0].startswith("**pair, edit**: 6 prompts"))
        self.assertIn("| lookups | 2.0 | 2.00 (2.00 – 2.00) | 6/6 | 2.00 | 4.0 | 6/6 | speculated 6 |", lines)
        self.assertIn("lookups: HTTP 500", lines)
        few = real.figures.figures(lookups[:5], direct[:5])["over_direct"]
        self.assertEqual(real.over_direct(few), "2.00", "five prompts have no interval")


class Proxies(unittest.TestCase):
    def test_a_proxy_has_the_models_that_it_is_given(self):
        text = sides.PROCESS.format(port=1, admin=2, target="t", backend="", policies="p",
                                    models=sides.drafter_models({"mini": "/m"}, 3))
        self.assertIn("drafters: { mini: { path: /m, slots: 3, context: 2048 } }", text)
        self.assertIn("draft-same", sides.drafter_models(None, 1))


if __name__ == "__main__":
    unittest.main()
