"""The figures of tests/bench/paced.py and its cells. Run: python tests/python/test_paced.py"""

import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/bench"))

import figures  # noqa: E402
import paced  # noqa: E402


def answers(seconds, text="a", rounds=0, accepted=0):
    return [{"text": text, "tokens": 10, "first": 0.1, "seconds": s, "path": "speculated", "reason": None,
             "rounds": rounds, "drafted": 4 * rounds, "accepted": accepted} for s in seconds]


class Cells(unittest.TestCase):
    def test_every_cell_of_the_list_is_one(self):
        for cell in paced.CELLS:
            self.assertTrue(paced.read_cell(cell)["path"].is_file())

    def test_what_is_no_cell_is_refused(self):
        whole = paced.CELLS[0]
        for wrong in ("", "step=60ms", whole + ",step=60ms", whole + ",speed=2", whole.replace("lookup", "all"),
                      whole.replace("rewrite", "poems"), whole.replace("128", "many")):
            with self.assertRaises(paced.Wrong, msg=wrong):
                paced.read_cell(wrong)


class Figures(unittest.TestCase):
    def test_a_ratio_is_one_of_whole_sums_within_its_interval(self):
        direct, twice = answers([1.0, 3.0, 2.0, 2.0] * 5), answers([0.5, 1.5, 1.0, 1.0] * 5)
        found = figures.ratio(twice, direct)
        self.assertEqual((found["ratio"], found["low"], found["high"], found["n"]), (2.0, 2.0, 2.0, 20))
        mixed = figures.ratio(answers([0.5, 3.0, 1.0, 2.0] * 5), direct)
        self.assertAlmostEqual(mixed["ratio"], 8 / 6.5)
        self.assertTrue(1.0 < mixed["low"] < mixed["ratio"] < mixed["high"] < 2.0, mixed)

    def test_a_request_that_failed_is_left_out_of_ratios_and_counted(self):
        direct, through = answers([1.0] * 4), answers([0.5] * 3) + [{"failed": "gone"}]
        self.assertEqual(figures.ratio(through, direct)["n"], 3)
        found = figures.figures(through, direct)
        self.assertEqual((found["failed"], found["requests"], found["compared"]), (1, 4, 3))
        self.assertIsNone(figures.ratio([{"failed": "gone"}], direct))

    def test_auto_is_held_against_the_best_fixed_length_of_each_part(self):
        sides = {"direct": answers([1.0] * 20), "auto": answers([0.5] * 20, rounds=2, accepted=6),
                 "2": answers([0.4] * 10 + [0.8] * 10), "8": answers([0.8] * 10 + [0.4] * 10), "plain": answers([0.1] * 20)}
        result, against = figures.conclude(sides)
        self.assertEqual((against["first"]["best"], against["rest"]["best"]), ("2", "8"))
        self.assertAlmostEqual(against["rest"]["ratio"], 0.8)
        self.assertEqual((result["auto"]["rest"]["e_n"], result["auto"]["rest"]["speculated"]), (4.0, 1.0))

    def test_another_text_is_reported(self):
        sides = {"direct": answers([1.0] * 10), "auto": answers([1.0] * 9) + answers([1.0], text="b")}
        result, _ = figures.conclude(sides)
        self.assertEqual(list(figures.wrong("cell", {"sides": result})), ["cell: auto, first: 1 texts differ"])

    def test_kept_is_what_steps_took_over_what_was_asked_for(self):
        metrics = ('foretell_target_step_seconds_sum{kind="decode"} 1.2\nforetell_target_step_seconds_count{kind="decode"} 10\n'
                   'foretell_target_step_seconds_sum{kind="verify"} 0.35\nforetell_target_step_seconds_count{kind="verify"} 2\n'
                   'foretell_target_verify_drafted_tokens_total 10\n')
        found = figures.kept(metrics, {"step": "100ms", "base": "1.25", "node": "0.1"})
        self.assertAlmostEqual(found["decode"], 1.2)
        self.assertAlmostEqual(found["verify"], 1.0)


if __name__ == "__main__":
    unittest.main()
