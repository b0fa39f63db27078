"""The alert rules and the configuration of Prometheus by promtool; each alert fires and clears."""

import re
import subprocess
import tempfile
import unittest

import dashboards
import promql


def promtool(*arguments):
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, cwd=dashboards.RULES.parent)
    return done.returncode, done.stdout + done.stderr


class Promtool(unittest.TestCase):
    def passes(self, *arguments):
        code, said = promtool(*arguments)
        self.assertEqual(code, 0, said)
        return said

    def test_the_rules_are_read(self):
        self.assertIn(f"{len(promql.rules())} rules found", self.passes("check", "rules", "--lint=all", "--lint-fatal", dashboards.RULES))

    def test_the_configuration_of_the_readme_is_read_with_its_rules(self):
        path = dashboards.ROOT / "deploy/prometheus.yaml"
        said = self.passes("check", "config", "--lint=all", "--lint-fatal", path)
        self.assertIn("1 rule files found", said)
        self.assertIn(f"{len(promql.rules())} rules found", said)

    def test_alerts_fire_and_clear(self):
        self.assertIn("SUCCESS", self.passes("test", "rules", "foretell.rules.test.yaml", "foretell.days.test.yaml"))

    def test_without_a_cause_no_alert_fires(self):
        """The unit tests detect an alert that does not fire."""
        text = dashboards.RULES.with_name("foretell.rules.test.yaml").read_text()
        text = text.replace("[foretell.rules.yaml]", f"[{dashboards.RULES}]").replace("90x10 50x10", "50x20")
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(text)
            file.flush()
            code, said = promtool("test", "rules", file.name)
        self.assertNotEqual(code, 0)
        self.assertEqual(set(re.findall(r"alertname: ?(\w+)", said)), {"ForetellMemoryHigh"}, said)


if __name__ == "__main__":
    unittest.main()
