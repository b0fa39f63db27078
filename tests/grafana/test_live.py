"""Every expression of the dashboards returns data from a Prometheus that scrapes a live Foretell.

Foretell runs under load. Each expression is queried until it has returned data once, since each of
the events that it needs recurs. Nothing waits for a fixed time: the deadline is only for data that
never comes.
"""

import contextlib
import math
import subprocess
import tempfile
import time
import unittest

import dashboards
import promql
import stand

# Seconds, for data that never come.
DEADLINE = 180
# The process drains this many seconds before the deadline, whatever data is missing.
LAST = 15
# The second replica is killed once this share of the expressions has returned data.
ENOUGH = 0.9
# Alerts whose causes occur in this test: their expressions have to match too.
CAUSED = ("ForetellReplicaDown", "ForetellBreakerOpen", "ForetellConfigNotSynchronized", "ForetellStoreDown")


def holds(result):
    """True if a result is data: a series with a value that is a number."""
    return any(math.isfinite(float(series["value"][1])) for series in result)


class Live(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if not stand.FORETELL.exists():
            raise RuntimeError(f"{stand.FORETELL} is not built: make build, or name it by FORETELL")
        cls.waiting = {}
        alerts = [(rule["alert"], rule["expr"]) for rule in dashboards.rules() if rule["alert"] in CAUSED]
        for location, expression in [*dashboards.expressions(), *alerts]:
            cls.waiting.setdefault(promql.expanded(expression), []).append(location)
        cls.all = len(cls.waiting)
        stack = contextlib.ExitStack()
        cls.addClassCleanup(stack.close)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        cls.stand = stand.Stand(stack, folder)
        with stand.Load(cls.stand) as cls.load:
            cls.run_until(time.monotonic() + DEADLINE)
        cls.rules = cls.stand.rules()

    @classmethod
    def run_until(cls, deadline):
        """Runs the load and queries until every expression has returned data; the drain is last."""
        happenings, killed, ill, drained = cls.load.happenings(), False, False, False
        while cls.waiting and time.monotonic() < deadline:
            if not drained:
                next(happenings)
            cls.ask()
            done = 1 - len(cls.waiting) / cls.all
            if not killed and done > ENOUGH:
                cls.page = stand.fetch(f"{cls.stand.admin}/metrics")[1]
                cls.load.kill("second")
                killed = True
            if killed and not ill and cls.returned_data("ForetellReplicaDown"):
                cls.stand.fall_ill("second")
                ill = True
            others = [expression for expression in cls.waiting if "foretell_draining" not in expression]
            if not drained and (not others or time.monotonic() > deadline - LAST):
                stand.fetch(f"{cls.stand.admin}/api/drain", {})
                drained = True
            time.sleep(0.5)

    @classmethod
    def returned_data(cls, alert):
        """True if the expression of an alert has returned data."""
        return not any(alert in locations for locations in cls.waiting.values())

    @classmethod
    def ask(cls):
        for expression in list(cls.waiting):
            if holds(cls.stand.query(expression)):
                del cls.waiting[expression]

    def test_every_expression_returned_data(self):
        lacking = [f"{', '.join(locations)}: {expression}" for expression, locations in self.waiting.items()]
        self.assertEqual(lacking, [], "\n" + "\n".join(lacking))
        self.assertGreater(self.all, 100)

    def test_every_rule_was_evaluated(self):
        self.assertEqual(set(self.rules), {rule["alert"] for rule in dashboards.rules()} | set(promql.recorded()))
        self.assertEqual({name: rule["health"] for name, rule in self.rules.items()}, dict.fromkeys(self.rules, "ok"))

    def test_the_load_was_served(self):
        self.assertGreater(self.load.answered, 50)
        self.assertEqual(self.load.unexplained(), [])

    def test_the_page_of_metrics_is_in_the_format_of_prometheus(self):
        done = subprocess.run(["promtool", "check", "metrics"], input=self.page, capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout), (0, ""), done.stderr)


if __name__ == "__main__":
    unittest.main()
