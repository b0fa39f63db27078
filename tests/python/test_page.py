"""The figures and bounds of tests/bench/page.py. Run: python tests/python/test_page.py"""

import argparse
import contextlib
import io
import os
import pathlib
import re
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/bench"))

import page  # noqa: E402

ARGS = argparse.Namespace(requests=120, idle=60)


def short(**more):
    result = {"ratios": [1.0, 1.01, 0.99], "failures": [], "share": 0.001, "idle": 0.002, "looks": 30, **more}
    with contextlib.redirect_stdout(io.StringIO()):
        return page.report(result, ARGS)


class Page(unittest.TestCase):
    def test_the_interval_is_that_of_students_t_on_logarithms(self):
        middle, low, high = page.interval([0.9, 1.0, 1.1])
        self.assertAlmostEqual(middle, 0.9967, places=3)
        self.assertAlmostEqual(high / middle, 1.2832, places=3)
        self.assertAlmostEqual(middle / low, high / middle)
        self.assertEqual(page.interval([1.2])[1:], (0.0, float("inf")))

    def test_what_is_beyond_its_bound_is_short(self):
        self.assertEqual(short(), [])
        self.assertEqual(len(short(ratios=[1.1, 1.11, 1.12])), 1)
        self.assertEqual(len(short(share=0.011)), 1)
        self.assertEqual(short(failures=["gone"]), ["gone"])
        self.assertEqual(short(ratios=[]), ["nothing was compared"])

    def test_the_looks_are_those_of_the_page(self):
        script = (ROOT / "src/foretell/admin/page/page.js").read_text()
        self.assertIn(f"EVERY_MS = {page.EVERY * 1000:.0f};", script)
        self.assertIn(f"{{ replicas: {page.REPLICAS}, policies: {page.POLICIES}, coverage: {page.COVERAGE} }}", script)
        asked = set(re.findall(r'get\([`"](/api/[a-z]+)', script))
        self.assertEqual(asked, {"/api/status", "/api/replicas", "/api/policies", "/api/sessions", "/api/coverage"})

    def test_the_time_of_a_process_rises(self):
        before = page.cpu_seconds(os.getpid())
        sum(range(10_000_000))
        self.assertGreater(page.cpu_seconds(os.getpid()), before)


if __name__ == "__main__":
    unittest.main()
