"""The figures and requirements of tests/engines/control.py, from given answers.

Run: python tests/python/test_control.py
"""

import argparse
import contextlib
import io
import pathlib
import sys
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests/bench"), str(ROOT / "tests/engines")]

import control  # noqa: E402
import figures  # noqa: E402
import requirements  # noqa: E402


def answers(seconds, text="a", rounds=0, accepted=0, tokens=10, first=0.1):
    return [{"text": text, "tokens": tokens, "first": first, "seconds": s, "path": "speculated", "reason": None,
             "rounds": rounds, "drafted": 4 * rounds, "accepted": accepted} for s in seconds]


def even(seconds, count=25, **more):
    return answers([seconds] * count, **more)


def probe(ms, method="score", pays=True):
    """The probe's report of an engine with steps of 100 ms."""
    calls = [{"method": method, "gamma": 0, "ms": 110.0}, {"method": method, "gamma": 4, "ms": ms - 10},
             {"method": method, "gamma": 4, "ms": ms + 10}, {"method": "fan_out", "gamma": 4, "ms": 900.0}]
    return {"verify": calls, "times": {"token": [{"ms": 90.0}, {"ms": 110.0}]}, "pays": pays, "conclusion": "words"}


def report(cost=1.5, auto=0.4, exact=False, rest=0.95, hot=1.0, **sides):
    """A run in which `auto` takes this many seconds per second of the engine, or gave these
    answers."""
    auto = auto if isinstance(auto, list) else even(auto, rounds=4, accepted=6)
    given = {"direct": even(1.0), "auto": auto, "2": even(0.5, rounds=5, accepted=5),
             "4": even(0.4, rounds=4, accepted=6), **sides}
    sampled = {"direct": even(1.0, 30), "auto": even(hot, 30)}
    return {"engine": "vllm", "round_cost": cost, "workloads": {"completion": requirements.compared(given, exact)},
            "rest": {"seconds": 60, "lasting": {"ratio": rest, "low": 0.9, "high": 1.0, "n": 5}, "wrong": []},
            requirements.UNGUESSABLE: requirements.guessed(sampled)}


def said(result):
    return [f"{word} {text}" for word, text in requirements.judgements(result)]


def the(result, *words):
    """the only judgement that has all the words."""
    found = [line for line in said(result) if all(word in line for word in words)]
    assert len(found) == 1, (words, said(result))
    return found[0]


class Figures(unittest.TestCase):
    def test_decoding_begins_with_the_first_text(self):
        slow_start = answers([3.0, 3.0], first=2.1)
        self.assertAlmostEqual(figures.decoding(slow_start), 10.0)
        self.assertAlmostEqual(figures.decoding(slow_start + answers([5.0], first=None)), 10.0)

    def test_seconds_per_token_are_compared_where_lengths_differ(self):
        direct, auto = even(4.1, tokens=41), even(2.1, tokens=21)
        self.assertAlmostEqual(figures.ratio(auto, direct, figures.decoding)["ratio"], 1.0)
        result = requirements.guessed({"direct": direct, "auto": even(2.35, tokens=21, first=0.35)})
        self.assertAlmostEqual(result["decoding"]["ratio"], 1.0)
        self.assertAlmostEqual(result["all"]["ratio"], 21 / 2.35 / 10)

    def test_what_lasts_is_a_ratio_of_ratios_over_the_same_prompts(self):
        before, after = (even(0.5, 5), even(1.0, 5)), (even(1.0, 5), even(1.6, 5))
        found = figures.lasting(before, after)
        self.assertAlmostEqual(found["ratio"], 0.8)
        self.assertEqual(found["n"], 5)
        self.assertEqual(figures.lasting((before[0], [{"failed": "gone"}, *before[1][1:]]), after)["n"], 4)

    def test_the_cost_of_a_round_is_that_of_the_probes_first_method(self):
        self.assertAlmostEqual(requirements.round_cost(probe(150.0)), 1.5)
        self.assertAlmostEqual(requirements.round_cost(probe(440.0, "fan_out")), (430 + 450 + 900) / 300)
        untimed = {**probe(150.0), "verify": [{"method": "score", "gamma": 0, "ms": 110.0}]}
        self.assertIsNone(requirements.round_cost(untimed))

    def test_the_acceptance_length_is_measured_or_the_maximum_of_a_probes_prediction(self):
        self.assertEqual(requirements.brings({"4": {"e_n": 2.5}}), (2.5, True))
        tokens, measured = requirements.brings({"auto": {"e_n": 3.0}})
        self.assertAlmostEqual(tokens, 4.0951)
        self.assertFalse(measured)


class Requirements(unittest.TestCase):
    def test_where_all_is_well_nothing_is_short(self):
        result = report()
        self.assertEqual(requirements.short(result), [])
        self.assertTrue(the(result, "best fixed length").startswith("ok completion: auto ÷ fixed 4"))
        self.assertTrue(the(result, "auto ÷ direct: 2.500").startswith("ok"))
        self.assertTrue(the(result, "25 of 25 sessions were speculated on").startswith("ok"))
        self.assertTrue(the(result, "60 s of idle time").startswith("ok"))
        self.assertTrue(the(result, "rewrite", "not measured").startswith("–"))

    def test_each_thing_asked_for_can_fall_short_by_itself(self):
        self.assertTrue(the(report(auto=0.45), "best fixed length: 0.889").startswith("short"))
        slow = report(auto=0.8, **{"2": even(0.8), "4": even(0.8, rounds=4, accepted=6)})
        self.assertTrue(the(slow, "auto ÷ direct: 1.250").startswith("short"))
        self.assertTrue(the(slow, "best fixed length").startswith("ok"))
        few = report(auto=even(0.4, 19, rounds=4) + even(0.4, 6))
        self.assertTrue(the(few, "19 of 25 sessions were speculated on").startswith("short"))
        enough = report(auto=even(0.4, 20, rounds=4) + even(0.4, 5))
        self.assertTrue(the(enough, "20 of 25 sessions were speculated on").startswith("ok"))
        self.assertTrue(the(report(rest=0.949), "60 s of idle time").startswith("short"))
        hot = [line for line in said(report(hot=1.05)) if line.startswith("short")]
        self.assertEqual(len(hot), 2, hot)
        for result in (report(auto=0.45), slow, few, report(rest=0.949), report(hot=1.05)):
            self.assertTrue(requirements.short(result))

    def test_rewrite_is_asked_for_more_than_completion(self):
        result = report()
        result["workloads"]["rewrite"] = result["workloads"]["completion"]
        self.assertTrue(the(result, "rewrite: auto ÷ direct: 2.500").startswith("short"))
        self.assertFalse([line for line in said(result) if line.startswith("short completion")])

    def test_an_expensive_round_requires_no_gain_and_no_loss(self):
        result = report(cost=4.0, auto=1.01)
        for words in (("at least 1.30",), ("80% of sessions",)):
            line = the(result, *words)
            self.assertTrue(line.startswith("–") and "costs 4.00 steps, more than 1.6" in line, line)
        self.assertTrue(the(result, "costs more than it brings", "brings 2.5 tokens").startswith("ok"))
        self.assertTrue(the(report(cost=4.0, auto=1.03), "costs more than it brings").startswith("short"))
        self.assertTrue(the(report(cost=2.0, auto=1.03), "at least 0.98: does not apply").startswith("–"))

    def test_no_loss_is_asked_of_the_lower_bound_too(self):
        noisy = [2.0] + [0.96] * 24
        self.assertTrue(the(report(cost=4.0, auto=answers(noisy)), "costs more than it brings").startswith("short"))
        found = {"ratio": 0.99, "low": 0.949, "high": 1.1}
        self.assertEqual(requirements.judge("it", found, 0.98, 0.95).word, "short")
        self.assertEqual(requirements.judge("it", {**found, "low": 0.95}, 0.98, 0.95).word, "ok")
        self.assertEqual(requirements.judge("it", {**found, "ratio": 0.979, "low": 0.95}, 0.98, 0.95).word, "short")
        self.assertEqual(requirements.judge("it", None, 0.98).word, "short")

    def test_without_fixed_lengths_the_probes_prediction_decides_and_the_best_is_not_measured(self):
        given = {"direct": even(1.0), "auto": even(1.0)}
        result = {**report(cost=4.4), "workloads": {"completion": requirements.compared(given, True)},
                "rest": {"why": "auto never speculated"}}
        self.assertTrue(the(result, "no fixed length was measured").startswith("–"))
        self.assertTrue(the(result, "brings 4.1 tokens at acceptance 0.9").startswith("ok"))
        self.assertTrue(the(result, "after idle time", "auto never speculated").startswith("–"))
        self.assertTrue(the({**result, "round_cost": 4.0}, "4.00 steps and brings 4.1").startswith("–"))

    def test_a_text_that_differs_fails_a_run_only_where_texts_are_exact(self):
        other = even(0.4, 24, rounds=4) + even(0.4, 1, text="b", rounds=4)
        self.assertEqual(requirements.short(report(exact=True, auto=other)), ["completion: auto: 1 texts differ"])
        self.assertEqual(requirements.short(report(exact=False, auto=other)), [])

    def test_a_request_that_failed_fails_a_run(self):
        broken = even(0.4, 24, rounds=4) + [{"failed": "gone"}]
        self.assertEqual(requirements.short(report(auto=broken)), ["completion: auto: gone"])
        nobody = report(auto=[{"failed": "gone"}] * 25)
        self.assertIn("completion: 0 of 25 sessions were speculated on, at least 80%", requirements.short(nobody))
        self.assertIn("rest: auto: gone", requirements.short({**report(), "rest": {**report()["rest"], "wrong": ["auto: gone"]}}))


class Runs(unittest.TestCase):
    def proxies(self, wanted, pays):
        started = []

        def start(stack, kind, target, setting, args):
            started.append(setting)
            return f"proxy {setting}", probe(150.0, pays=pays)
        args = argparse.Namespace(settings=wanted)
        with mock.patch.object(control, "start_proxy", start), contextlib.redirect_stdout(io.StringIO()):
            found, probes = control.start_proxies(None, "vllm", "engine", args)
        self.assertEqual((list(found), list(probes)), (started, started))
        return started

    def test_fixed_lengths_are_left_out_where_no_round_pays_unless_they_are_named(self):
        self.assertEqual(self.proxies(None, True), ["auto", "2", "4", "8"])
        self.assertEqual(self.proxies(None, None), ["auto", "2", "4", "8"])
        self.assertEqual(self.proxies(None, False), ["auto"])
        self.assertEqual(self.proxies(["auto", "4"], False), ["auto", "4"])

    def test_prompts_are_sent_at_the_workloads_temperature_with_no_more_tokens_than_asked_for_and_no_seed(self):
        for name, temperature in (("completion", 0), ("unguessable", 1.2)):
            bodies = [entry["body"] for entry in control.prompts(name, 70)]
            self.assertEqual(len(bodies), 50)
            self.assertEqual({body["temperature"] for body in bodies}, {temperature})
            self.assertEqual(max(body["max_tokens"] for body in bodies), 70)
            self.assertEqual(min(body["max_tokens"] for body in bodies), 64)
            self.assertFalse([body for body in bodies if "seed" in body])

    def rested(self, before, after, seconds=60):
        asked = []

        def measure(addresses, names, workload, entries, requests, size):
            asked.append((names, workload, entries, requests, size))
            return after
        with mock.patch.object(control, "measure", measure), mock.patch.object(control.time, "sleep") as slept:
            found = control.rest({}, list(range(20)), before, seconds)
        return found, asked, slept.call_args_list

    def test_after_a_rest_the_last_block_is_asked_again_prompt_by_prompt(self):
        before = {"auto": even(9.0, 20, rounds=1) + even(0.5, 5, rounds=1), "direct": even(1.0)}
        found, asked, slept = self.rested(before, {"auto": even(0.8, 5), "direct": even(1.0, 5)})
        self.assertEqual(asked, [(("auto", "direct"), "completion", [0, 1, 2, 3, 4], 5, 1)])
        self.assertEqual(slept, [mock.call(60)])
        self.assertAlmostEqual(found["lasting"]["ratio"], 0.5 / 0.8)

    def test_the_idle_time_is_skipped_without_speculation(self):
        never = {"auto": even(1.0), "direct": even(1.0)}
        self.assertEqual(self.rested(never, None), ({"why": "auto never speculated"}, [], []))
        speculated = {**never, "auto": even(1.0, rounds=1)}
        self.assertEqual(self.rested(speculated, None, 0), ({"why": "--rest 0"}, [], []))

    def test_impossible_measurements_are_refused(self):
        for check, wrong in ((control.workloads, "poems"), (control.workloads, "rewrite,rewrite"), (control.settings, "2,4"),
                             (control.settings, "auto,33"), (control.settings, "auto,auto")):
            with self.assertRaises(argparse.ArgumentTypeError, msg=wrong):
                check(wrong)
        self.assertEqual(control.workloads("unguessable,hostile"), ["unguessable", "hostile"])
        self.assertEqual(control.settings("auto,31"), ["auto", "31"])


if __name__ == "__main__":
    unittest.main()
