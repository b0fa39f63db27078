"""The dashboards that grafana/build.py makes. Run: python tests/python/test_dashboards.py"""

import contextlib
import io
import json
import pathlib
import re
import sys
import tempfile
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "grafana"))

import build  # noqa: E402
from boards import promql  # noqa: E402


def run(*arguments):
    with mock.patch.object(sys, "argv", ["build.py", *arguments]), contextlib.redirect_stderr(io.StringIO()) as said:
        return build.main(), said.getvalue()


class Expressions(unittest.TestCase):
    def test_a_selector_has_the_variables_that_the_metric_has_labels_for(self):
        self.assertEqual(
            promql.of("foretell_replica_load", 'signal="kv"'),
            'foretell_replica_load{job=~"$job", instance=~"$instance", replica=~"$replica", signal="kv"}',
        )

    def test_what_the_reference_does_not_have_is_refused(self):
        for series, matcher in (
            ("foretell_requests", None),
            ("foretell_requests_total_bucket", None),
            ("foretell_requests_total", 'gate="load"'),
        ):
            with self.subTest(series), self.assertRaises(ValueError):
                promql.of(series, *[matcher] * (matcher is not None))

    def test_the_series_of_a_histogram_are_known(self):
        self.assertEqual(
            promql.metrics(promql.quantile(0.5, "foretell_overhead_seconds")), ["foretell_overhead_seconds"]
        )


class Dashboards(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.boards = {board.name: board.json() for board in (make() for make in build.BOARDS)}

    def panels(self):
        for name, board in self.boards.items():
            for panel in board["panels"]:
                if panel["type"] != "row":
                    yield f"{name}: {panel['title']}", panel

    def test_the_files_are_what_would_be_written(self):
        self.assertEqual(run("--check"), (0, ""))

    def test_a_file_that_differs_or_is_too_many_is_named(self):
        with tempfile.TemporaryDirectory() as root:
            folder = pathlib.Path(root) / "grafana/dashboards"
            folder.mkdir(parents=True)
            with mock.patch.object(build, "FOLDER", folder):
                self.assertEqual(run()[0], 0)
                self.assertEqual(run("--check")[0], 0)
                (folder / "why.json").write_text("{}", encoding="utf-8")
                (folder / "old.json").write_text("{}", encoding="utf-8")
                code, said = run("--check")
        self.assertEqual(code, 1)
        self.assertEqual(re.findall(r"\w+\.json", said), ["why.json", "old.json"])

    def test_identifiers_are_unique_and_panels_do_not_overlap(self):
        self.assertEqual(len({board["uid"] for board in self.boards.values()}), 4)
        for name, board in self.boards.items():
            with self.subTest(name):
                self.assertEqual(len({panel["id"] for panel in board["panels"]}), len(board["panels"]))
                boxes = [panel["gridPos"] for panel in board["panels"]]
                cells = [
                    (x, y)
                    for at in boxes
                    for x in range(at["x"], at["x"] + at["w"])
                    for y in range(at["y"], at["y"] + at["h"])
                ]
                self.assertEqual(len(set(cells)), len(cells))
                self.assertLessEqual(max(x for x, _ in cells), 23)

    def test_every_variable_of_a_query_is_declared_and_no_data_source_is_named(self):
        for name, board in self.boards.items():
            with self.subTest(name):
                declared = {variable["name"] for variable in board["templating"]["list"]}
                text = json.dumps([board["panels"], board["annotations"]])
                used = set(re.findall(r'=~\\"\$(\w+)\\"', text)) | {"datasource"}
                self.assertEqual(used, declared)
                self.assertEqual(set(re.findall(r'"uid": "([^"]*)"', text)), {"${datasource}"})

    def test_every_panel_says_what_it_shows_and_what_to_do(self):
        for name, panel in self.panels():
            with self.subTest(name):
                defaults = panel["fieldConfig"]["defaults"]
                self.assertTrue(defaults["unit"] and defaults["noValue"])
                for part in ("**Good:** ", "**Otherwise:** ", "**Metrics:** `"):
                    self.assertIn(part, panel["description"])

    def test_nothing_is_divided_by_what_may_be_zero(self):
        for name, panel in self.panels():
            for target in panel["targets"]:
                with self.subTest(name):
                    unquoted = re.sub(r'"[^"]*"', '""', target["expr"])
                    for divisor in unquoted.split(" / ")[1:]:
                        self.assertRegex(divisor, r"^(ignoring \(\w+(, \w+)*\) group_left \(\) )?\(.* > 0\)")


if __name__ == "__main__":
    unittest.main()
