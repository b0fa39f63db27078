"""Allowed differences in tests/control/record.py --check. Run: python tests/python/test_record.py"""

import pathlib
import sys
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/control"))

import record  # noqa: E402

KEPT = {"prompt": [1, 2], "output": [5, 6, 7, 8], "choices": [5, 9, 7, 8], "margins": [1.0, 0.01, 2.0, 3.0]}


def target(written, logprobs):
    """A server with a given output for each number of recorded tokens before it; it scores
    tokens."""
    def ask(_, __, body):
        tokens = body["prompt"]
        if "prompt_logprobs" in body:
            return {"choices": [{"prompt_logprobs": [None] * (len(tokens) - 1) + [
                {str(tokens[-1]): {"logprob": logprobs[tokens[-1]]}}]}]}
        return {"choices": [{"prompt_token_ids": tokens, "token_ids": written[len(tokens) - 2]}]}
    return ask


class Noise(unittest.TestCase):
    def test_it_is_the_noise_of_the_target(self):
        # Values of src/onnx/noise.rs.
        for seed, position, token, noise in ((0, 0, 0, 0.09627294808926974), (1, 5, 9, 0.3090246338265206),
                                          (42, 1023, 8191, -0.9940151572007916)):
            self.assertAlmostEqual(record.noise(seed, position, token), noise, places=12)


class Forks(unittest.TestCase):
    def found(self, written, logprobs, temperature=0.0):
        with mock.patch.object(record, "ask", target(written, logprobs)):
            return list(record.forks("t", KEPT, written[0], temperature, 3))

    def test_the_same_text_has_none(self):
        self.assertEqual(self.found({0: [5, 6, 7, 8]}, {}), [])

    def test_behind_one_it_goes_on_from_the_recorded_text(self):
        written = {0: [5, 4, 3, 3], 2: [7, 2]}
        found = self.found(written, {4: -1.0, 6: -1.01, 2: -1.0, 8: -3.0})
        self.assertEqual([(position, token) for position, token, _ in found], [(1, 4), (3, 2)])
        self.assertAlmostEqual(found[0][2], 0.01)
        self.assertAlmostEqual(found[1][2], 2.0)

    def test_a_sample_is_scored_with_its_noise(self):
        (_, _, by), = self.found({0: [5, 6, 7, 4]}, {4: -1.0, 8: -3.0}, 0.5)
        self.assertAlmostEqual(by, 4.0 + record.noise(3, 5, 4) - record.noise(3, 5, 8))

    def test_a_text_that_ends_early_is_no_close_draw(self):
        (position, token, by), = self.found({0: [5, 6]}, {})
        self.assertEqual((position, token, by), (2, None, float("inf")))


class Differences(unittest.TestCase):
    def test_only_a_close_choice_may_be_another(self):
        again = [5, 8, 7, 8]
        self.assertEqual(list(record.differences(KEPT, again, [1.01, 0.0, 2.0, 3.0])), [])
        found = list(record.differences(KEPT, [4, 9, 7, 8], [1.0, 0.01, 2.1, 3.0]))
        self.assertEqual(found, ["position 0: choice 4 instead of 5", "position 2: margin 2.1 instead of 2.0"])


if __name__ == "__main__":
    unittest.main()
