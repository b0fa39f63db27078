#!/usr/bin/env python3
"""Checks that the exactness runs detect faults: planted proxies in front of a real engine.

    self_test.py llama|vllm|onnx [--foretell BIN]

The honest proxy must pass, the one that slips must fail at T=0, the one that accepts everything
must fail the chi-square; and the statistics must give the values of the textbooks. The vLLM
recipe's requirements on a machine are tested too, with machines that lack them; `python3 -m
unittest self_test`, in this folder, runs these without an engine.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

import engine as engines
import exact
import mutant
import stats
import vllm_check
import wire


class Statistics(unittest.TestCase):
    def test_the_tables_values_of_chi_square_come_out(self):
        for value, freedom, p in ((3.8415, 1, 0.05), (18.307, 10, 0.05), (29.588, 10, 0.001), (124.342, 100, 0.05)):
            self.assertAlmostEqual(stats.chi_square(value, freedom), p, places=4)

    def test_equal_counts_are_homogeneous_and_moved_ones_are_not(self):
        same = {"a": 500, "b": 300, "c": 2, "d": 1}
        self.assertGreater(stats.homogeneity(same, same)[0], 0.99)
        self.assertLess(stats.homogeneity(same, {"a": 300, "b": 500, "c": 3})[0], 1e-6)

    def test_small_cells_are_merged_and_none_is_lost(self):
        left, right = {i: 1 for i in range(40)}, {i: 1 for i in range(40)}
        cells = stats.merged({**left, "x": 100}, {**right, "x": 100})
        self.assertEqual(sum(a for a, _ in cells), 140)
        self.assertTrue(all((a + b) / 2 >= 5 for a, b in cells))

    def test_more_events_at_the_same_rate_are_no_evidence(self):
        self.assertGreater(stats.more_often(10, 1000, 10, 1000), 0.3)
        self.assertLess(stats.more_often(20, 1000, 1, 1000), 1e-4)
        self.assertEqual(stats.more_often(0, 1000, 5, 1000), 1.0)


OLD = {"sse4_2", "avx", "avx2", "fma"}
SKYLAKE = OLD | {"avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl"}


class Recipe(unittest.TestCase):
    """Requirements on a machine before vLLM is installed or started there."""

    def test_the_library_is_the_one_that_the_package_picks(self):
        pick = vllm_check.library
        self.assertEqual(pick(SKYLAKE | {"avx512_bf16"}), "_C")
        self.assertEqual(pick(SKYLAKE), "_C_AVX512")
        self.assertEqual(pick(SKYLAKE - {"avx512vl"}), "_C_AVX2")
        self.assertEqual(pick(OLD), "_C_AVX2")
        self.assertIsNone(pick(OLD - {"avx2"}))

    def test_the_first_processors_flags_are_read(self):
        text = "processor\t: 0\nflags\t\t: fpu avx2\nvmx flags\t: vnmi\n\nprocessor\t: 1\nflags\t\t: fpu\n"
        self.assertEqual(vllm_check.flags(text), {"fpu", "avx2"})
        self.assertEqual(vllm_check.flags("Features : neon\n"), set())

    def test_deficiencies_of_a_machine_are_named(self):
        def words(environment, has=OLD, machine="x86_64", include=None):
            return "; ".join(vllm_check.lacking(environment, has, machine, include))

        self.assertIn("AVX2", words({}, has={"sse4_2"}))
        self.assertIn("aarch64", words({}, machine="aarch64"))
        gone = words({"CXX": "/no/such/compiler"})
        self.assertIn("/no/such/compiler does not compile (Debian package g++", gone)
        self.assertIn("No such file", gone)
        self.assertIn("dies if it cannot", words({"CXX": "false"}), "a compiler that does not work is none")

    @unittest.skipUnless(shutil.which("g++"), "no g++ here")
    def test_a_compiler_is_tried_and_not_only_found(self):
        self.assertEqual(vllm_check.lacking({}, OLD, "x86_64"), [])
        with tempfile.TemporaryDirectory() as empty:
            found = vllm_check.lacking({}, OLD, "x86_64", empty)
        self.assertEqual(len(found), 1)
        self.assertIn("Debian package python3-dev", found[0])
        self.assertIn("Python.h", found[0])

    def test_the_recipe_stops_before_it_fetches_anything(self):
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "FORETELL_CACHE": cache, "CXX": "/no/such/compiler"}
            done = subprocess.run([engines.HERE / "vllm.sh"], capture_output=True, text=True, env=environment)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("/no/such/compiler", done.stderr)
            self.assertEqual((done.stdout, os.listdir(cache)), ("", []))

    def test_the_message_that_names_the_fault_is_found_in_a_long_one(self):
        text = "In file included from a.hpp:1:\nb.h:3:10: fatal error: Python.h: No such file\ncompilation terminated."
        self.assertEqual(vllm_check.first_error(text), "b.h:3:10: fatal error: Python.h: No such file")
        self.assertEqual(vllm_check.first_error("InvalidCxxCompiler: none\n\nmore"), "InvalidCxxCompiler: none")
        self.assertEqual(vllm_check.first_error(""), "")


def planted(kind, direct, tokens=2000, draws=300):
    """Table lines: (requirement, True if met, figures)."""
    def quiet(_):
        pass

    def through(rule, check):
        server, url = mutant.serve(direct, rule)
        try:
            return check(url)
        finally:
            server.shutdown()

    honest = through("honest", lambda url: exact.greedy(direct, url, tokens, quiet))
    yield "honest proxy passes at T=0", honest["ok"], exact.summary("greedy", honest)
    slip = through("slip", lambda url: exact.greedy(direct, url, tokens, quiet))
    yield "slipping proxy fails at T=0", slip["p"] < 1e-3 and not slip["failures"], exact.summary("greedy", slip)
    distribution = through("honest", lambda url: exact.sampled(direct, url, draws, quiet))
    yield "honest proxy passes the chi-square, accept-all fails it", distribution["ok"], exact.summary("sampled", distribution)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=("llama", "vllm", "onnx"))
    parser.add_argument("--foretell", default=str(engines.ROOT / "target/release/foretell"))
    parser.add_argument("--out", default=str(engines.ROOT / "bench-out/engines"))
    args = parser.parse_args()
    cases = [unittest.defaultTestLoader.loadTestsFromTestCase(case) for case in (Statistics, Recipe)]
    checked = unittest.TextTestRunner(verbosity=0).run(unittest.TestSuite(cases))
    failed = not checked.wasSuccessful()
    with exact.Run(args.kind, args.foretell, pathlib.Path(args.out), sidecar=False) as run:
        for what, good, figures in planted(args.kind, wire.Engine(args.kind, run.url)):
            print(f"{args.kind:6} {'ok' if good else 'FAILED':8} {what}: {figures}", flush=True)
            failed |= not good
    sys.exit(2 if failed else 0)


if __name__ == "__main__":
    main()
