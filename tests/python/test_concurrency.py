"""The figures and bounds of tests/bench/concurrency.py. Run: python tests/python/test_concurrency.py"""

import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/bench"))

import concurrency  # noqa: E402


def answers(count, seconds, first=0.1, reason=None, path="speculated"):
    return [{"tokens": 10, "seconds": seconds, "first": first, "path": path, "reason": reason}] * count


class Concurrency(unittest.TestCase):
    def test_speed_is_tokens_per_second_of_a_client_and_the_range_is_that_of_the_pairs(self):
        result = concurrency.compared([answers(4, 1.0), answers(4, 2.0)], [answers(4, 1.0), answers(4, 1.0)])
        self.assertAlmostEqual(result["auto"], 80 / 12)
        self.assertAlmostEqual(result["ratio"], 2 / 3)
        self.assertEqual((result["low"], result["high"]), (0.5, 1.0))
        self.assertEqual(result["ends"], {"speculated": 8})

    def test_the_first_token_is_compared_at_its_95th_percentile(self):
        auto = answers(95, 1.0) + answers(5, 1.0, first=0.3)
        self.assertAlmostEqual(concurrency.compared([auto], [answers(100, 1.0)])["first"], 3.0)
        self.assertEqual(list(concurrency.short({"through": concurrency.compared([auto], [answers(100, 1.0)])})),
                         ["through: first token p95 3.000 of mode off, at most 1.05"])

    def test_a_speed_below_its_bound_is_short(self):
        def at(seconds):
            return concurrency.compared([answers(4, seconds)], [answers(4, 1.0)])
        self.assertEqual(list(concurrency.short({"through": at(1.0), "direct": at(1.01)})), [])
        self.assertEqual(len(list(concurrency.short({"through": at(1.03)}))), 1)
        self.assertEqual(len(list(concurrency.short({"through": at(1.1)}))), 2)
        self.assertEqual(len(list(concurrency.short({"direct": at(1.03)}))), 1)

    def test_failures_and_faults_of_verify_requests_are_short(self):
        faults = concurrency.compared([answers(4, 1.0, reason="verify_fault")], [answers(4, 1.0)])
        self.assertEqual(list(concurrency.short({"through": faults})), ["through: 0 failed, 4 ended by a fault of a verify request"])
        failed = concurrency.compared([[*answers(3, 1.0), {"failed": "HTTP 500"}]], [answers(4, 1.0)])
        self.assertEqual(list(concurrency.short({"direct": failed})), ["direct: 1 failed, 0 ended by a fault of a verify request"])


if __name__ == "__main__":
    unittest.main()
