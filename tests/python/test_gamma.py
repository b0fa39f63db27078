"""The figures and the plot of tests/bench/gamma.py. Run: python tests/python/test_gamma.py"""

import argparse
import pathlib
import sys
import unittest
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/bench"))

import gamma  # noqa: E402


def answer(rounds, drafted, accepted, tokens=20):
    return {"text": "a", "tokens": tokens, "first": 0.1, "seconds": 2.0, "path": "speculated", "reason": None,
            "rounds": rounds, "drafted": drafted, "accepted": accepted}


class Measured(unittest.TestCase):
    def test_lengths_are_of_rounds_and_shares_of_tokens(self):
        result = gamma.measured(0.7, 4, [answer(2, 8, 3), answer(2, 12, 3), {"failed": "gone"}])
        self.assertEqual((result["gamma"], result["accepted"], result["plain"]), (5.0, 1.5, 0.75))
        self.assertEqual(result["drafted"], 20 / 34, "four rounds and thirty plain tokens")
        self.assertEqual((result["requests"], result["failed"], result["seconds_per_token"]), (2, 1, 0.1))

    def test_without_a_round_there_is_no_length(self):
        result = gamma.measured(0, 1, [answer(0, 0, 0)])
        self.assertEqual((result["gamma"], result["drafted"], result["plain"]), (None, 0.0, 1.0))
        self.assertIsNone(gamma.measured(0, 1, [])["plain"])


class Drawn(unittest.TestCase):
    def test_there_is_a_line_for_each_number_of_clients_in_each_panel(self):
        cells = [gamma.measured(temperature, clients, [answer(2, 16 - 8 * temperature, 2)]) for clients in (1, 4) for temperature in (0, 1.0)]
        cells.append(gamma.measured(0, 16, [answer(0, 0, 0)]))
        root = xml.etree.ElementTree.fromstring(gamma.drawn(cells, "completion, step=20ms"))
        lines = [line.get("points") for line in root.iter("{http://www.w3.org/2000/svg}polyline")]
        self.assertEqual(len(lines), 9)
        self.assertEqual(lines[5], "", "no gamma without rounds")
        left, right = (float(point.split(",")[1]) for point in lines[0].split())
        self.assertLess(left, right, "longer is higher")

    def test_lists_are_read_and_refused(self):
        self.assertEqual(gamma.numbers(float, 0)("0,0.7"), [0.0, 0.7])
        for wrong in ("-1", "0.5,0.5"):
            with self.assertRaises(argparse.ArgumentTypeError):
                gamma.numbers(float, 0)(wrong)


if __name__ == "__main__":
    unittest.main()
