"""Dashboards and alert rules against the reference of metrics, by a PromQL parser alone."""

import re
import unittest

import dashboards
import promql
import yaml

RUNBOOK = dashboards.ROOT / "docs/runbook.md"
TESTS = [dashboards.RULES.with_name(f"foretell.{name}.test.yaml") for name in ("rules", "days")]
ALERTS = {"ForetellSlowerThanControl", "ForetellAcceptanceCollapse", "ForetellConfigNotSynchronized",
          "ForetellReplicaSilent", "ForetellReplicaDown", "ForetellBreakerOpen", "ForetellErrorRatio", "ForetellOverheadHigh", "ForetellMemoryHigh",
          "ForetellStoreDown", "ForetellDrafterStale", "ForetellRecordingFails"}
# Where the links of alerts lead: the repository of Cargo.toml.
REPOSITORY = re.search(r'^repository = "(.+)"$', (dashboards.ROOT / "Cargo.toml").read_text(), flags=re.M)[1]
DOCS = f"{REPOSITORY}/blob/main/"
PARTS = ("Means", "Users notice", "Look at", "Do", "Clears")


def below(value):
    """A value of a file, and all values in it."""
    yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        yield from below(each)


def chapters():
    """The text of each second-level heading of the runbook, by the anchor of the heading."""
    parts = re.split(r"^## (.+)$", RUNBOOK.read_text(), flags=re.M)[1:]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-"): text for title, text in zip(parts[::2], parts[1::2])}


class Expressions(unittest.TestCase):
    def test_metrics_and_labels_are_those_of_the_reference_and_nothing_is_divided_by_zero(self):
        read, wrong = 0, []
        everything = [*dashboards.expressions(), *((rule["alert"], rule["expr"]) for rule in dashboards.rules()), *promql.recorded().items()]
        for location, expression in everything:
            read += 1
            try:
                promql.check(promql.expanded(expression))
            except ValueError as error:
                wrong.append(f"{location}: {error}")
        self.assertEqual(wrong, [])
        self.assertGreater(read, 120)

    def test_what_is_wrong_is_found(self):
        for wrong in (
            "foretell_requests",
            "foretell_overhead_seconds",
            "sum by (gate) (foretell_requests_total)",
            "sum by (reason) (sum(foretell_requests_total))",
            'foretell_control_group_requests_total{path="plain"}',
            'foretell_gate_open{gate="lod"}',
            'foretell_requests_total{reason="tols"}',
            "rate(foretell_mode[5m])",
            "avg_over_time(foretell_requests_total[5m])",
            "histogram_quantile(0.9, sum by (stage) (rate(foretell_overhead_seconds_bucket[5m])))",
            "sum(foretell_memory_bytes) / sum(foretell_memory_limit_bytes)",
            "sum(foretell_memory_bytes) / (sum(foretell_memory_limit_bytes) > bool 0)",
            "sum(foretell_memory_bytes) / 0",
            "sum by (mode) (foretell_mode) + sum by (backend) (foretell_mode)",
            "foretell_memory_bytes + on (backend) foretell_memory_limit_bytes",
            "sum(foretell_memory_bytes",
        ):
            with self.subTest(wrong), self.assertRaises(ValueError):
                promql.check(wrong)

    def test_variables_are_replaced(self):
        text = promql.expanded('rate(a{job=~"$job", path=~"${path}"}[$__rate_interval]) + increase(b[$__range])')
        self.assertEqual(text, 'rate(a{job=~".*", path=~".*"}[10s]) + increase(b[5m])')


class Dashboards(unittest.TestCase):
    def test_panels_say_their_unit_and_what_they_show(self):
        lacking = []
        for name, board in dashboards.boards().items():
            for panel in dashboards.panels(board):
                if not panel["fieldConfig"]["defaults"].get("unit") or not panel.get("description"):
                    lacking.append(f"{name}: {panel['title']}")
        self.assertEqual(lacking, [])

    def test_ids_of_panels_are_unique(self):
        for name, board in dashboards.boards().items():
            ids = [value["id"] for value in below(board["panels"]) if isinstance(value, dict) and "gridPos" in value]
            self.assertGreater(len(ids), 5)
            self.assertEqual(len(set(ids)), len(ids), name)
        self.assertEqual(len({board["uid"] for board in dashboards.boards().values()}), len(dashboards.boards()))

    def test_the_data_source_is_chosen_by_a_variable_everywhere(self):
        named = set()
        for board in dashboards.boards().values():
            named |= {str(value["datasource"].get("uid")) if isinstance(value["datasource"], dict) else str(value["datasource"])
                      for value in below(board) if isinstance(value, dict) and "datasource" in value}
            self.assertIn("datasource", {variable["type"] for variable in board["templating"]["list"]})
        self.assertEqual(named - {"-- Grafana --"}, {"${datasource}"})

    def test_variables_are_declared(self):
        for name, board in dashboards.boards().items():
            declared = {variable["name"] for variable in board["templating"]["list"]}
            texts = [value for value in below(board) if isinstance(value, str)]
            used = {word for text in texts for word in re.findall(r"\$\{?(\w+)", text)}
            self.assertEqual({word for word in used if not word.startswith("__")} - declared, set(), name)


class Rules(unittest.TestCase):
    def test_each_says_what_it_has_to(self):
        self.assertEqual({rule["alert"] for rule in dashboards.rules()}, ALERTS)
        self.assertEqual(len(dashboards.rules()), len(ALERTS))
        for rule in dashboards.rules():
            with self.subTest(rule["alert"]):
                self.assertIn(rule["labels"]["severity"], ("warning", "critical"))
                self.assertEqual(set(rule["annotations"]), {"summary", "description", "runbook_url"})
                self.assertNotIn("{{", rule["annotations"]["summary"])
                # An instance may be younger than the week that is compared.
                whose = "$labels.job" if "offset 7d" in rule["expr"] else "$labels.instance"
                self.assertIn(whose, rule["annotations"]["description"])
                self.assertTrue(rule["annotations"]["runbook_url"].startswith(DOCS))
                page, _, heading = rule["annotations"]["runbook_url"].removeprefix(DOCS).partition("#")
                self.assertEqual(page, "docs/runbook.md")
                self.assertEqual(heading, rule["alert"].lower())
                self.assertIn(f"\n## {rule['alert']}\n", (dashboards.ROOT / page).read_text())

    def test_the_status_page_leads_to_runbooks_that_exist(self):
        script = (dashboards.ROOT / "src/foretell/admin/page/sections.js").read_text()
        self.assertIn(f'RUNBOOK = "{DOCS}docs/runbook.md"', script)
        named = re.findall(r'"(Foretell\w+)"', script)
        self.assertGreater(len(named), 1)
        for alert in named:
            self.assertIn(f"\n## {alert}\n", RUNBOOK.read_text())

    def test_the_waiting_times_are_those_that_are_promised(self):
        waits = {rule["alert"]: rule.get("for") for rule in dashboards.rules()}
        promised = {"ForetellSlowerThanControl": "10m", "ForetellConfigNotSynchronized": "5m", "ForetellReplicaDown": "2m",
                    "ForetellReplicaSilent": None, "ForetellBreakerOpen": "2m"}
        self.assertEqual({name: waits[name] for name in promised}, promised)

    def test_every_alert_has_a_runbook_with_all_its_parts(self):
        found = chapters()
        for rule in dashboards.rules():
            with self.subTest(rule["alert"]):
                text = found[rule["annotations"]["runbook_url"].partition("#")[2]]
                self.assertEqual([part for part in PARTS if f"**{part}.**" not in text], [])
                self.assertRegex(text, r"```sh\n")
                self.assertTrue(any(name in text for name in promql.registry()))

    def test_a_panel_that_a_runbook_names_exists(self):
        titles = {f"{name}: {panel['title']}" for name, board in dashboards.boards().items() for panel in
                  dashboards.panels(board)}
        named = [(board, title) for board, list_ in re.findall(r"`foretell-(\w+)`,((?:\s+(?:and |, )?“[^”]+”,?)+)",
                                                        RUNBOOK.read_text()) for title in re.findall(r"“([^”]+)”", list_)]
        self.assertGreater(len(named), 20)
        self.assertEqual([f"{board}: {title}" for board, title in named if f"{board}: {title}" not in titles], [])

    def test_every_alert_is_seen_firing_and_clear_by_a_unit_test(self):
        seen = {name: set() for name in ALERTS}
        for test in (test for path in TESTS for test in yaml.safe_load(path.read_text())["tests"]):
            for check in test.get("alert_rule_test", []):
                seen[check["alertname"]].add(bool(check.get("exp_alerts")))
        self.assertEqual({name for name, states in seen.items() if states != {True, False}}, set())


if __name__ == "__main__":
    unittest.main()
