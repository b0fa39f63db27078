"""What is asked of the controller before real engines, and whether the figures of a run of control.py show it."""

import collections
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "bench"))

import figures  # noqa: E402
import sides  # noqa: E402

BEST = 0.90
OVER_DIRECT = {"rewrite": 2.8, "completion": 1.3}
ROUND = 4
CHEAP = 1.6
LEAPT = 20 / 25
LASTS = 0.95
NO_LOSS, NO_LOSS_LOW = 0.98, 0.95
# what the probe's own prediction takes for the most
ACCEPTANCE = 0.9
UNGUESSABLE = "unguessable"
SPEEDS = {"all": "tokens per second", "decoding": "tokens per second after the first text"}
Verdict = collections.namedtuple("Verdict", "word text")


def compared(answers, exact):
    """The figures of one workload at temperature 0; `exact`: a text that is not that of the engine asked directly is wrong."""
    direct = answers["direct"]
    told = {name: figures.figures(given, direct) for name, given in answers.items()}
    wrong = sides.failures(answers)
    differ = {name: side["compared"] - side["identical"] for name, side in told.items() if "compared" in side}
    wrong += [f"{sides.named(name)}: {count} texts differ" for name, count in differ.items() if exact and count]
    return {"sides": told, "auto_over_best": figures.over_best(answers), "brings": brings(told), "wrong": wrong}


def guessed(answers):
    """The figures of text that nobody can guess. Its length is chance, so seconds are taken per token."""
    auto, direct = answers["auto"], answers["direct"]
    told = {name: figures.figures(given, direct) for name, given in answers.items()}
    return {"sides": told, "wrong": sides.failures(answers), "all": figures.ratio(auto, direct),
            "decoding": figures.ratio(auto, direct, figures.decoding)}


def brings(told):
    """(tokens that a round of four drafted ones brings, whether this was measured)."""
    measured = told.get(str(ROUND), {}).get("e_n")
    return (measured, True) if measured else (sum(ACCEPTANCE**n for n in range(ROUND + 1)), False)


def round_cost(probe):
    """Steps that a round of four costs by the probe's calls of its first plan; None if it made none."""
    plan = probe["verify"][0]["plan"]
    rounds = [call["ms"] for call in probe["verify"] if (call["plan"], call["gamma"]) == (plan, ROUND)]
    steps = [call["ms"] for call in probe["times"]["token"]]
    return sum(rounds) / len(rounds) / (sum(steps) / len(steps)) if rounds and steps else None


def judge(what, found, least, low=None):
    """A ratio with its interval against what is asked of it, and of the interval's lower end."""
    good = found and "ratio" in found and found["ratio"] >= least and (low is None or found["low"] >= low)
    bound = f"at least {least:.2f}" + (f", its lower bound {low:.2f}" if low else "")
    return Verdict("ok" if good else "short", f"{what}: {figures.between(found, 3)}, {bound}")


def verdicts(report):
    """A verdict for each thing asked for; where one does not apply, or was not measured, that and why."""
    cost = report["round_cost"]
    for name in OVER_DIRECT:
        if name not in report["workloads"]:
            yield Verdict("–", f"{name}: not measured")
    for name, told in report["workloads"].items():
        yield from of_workload(name, told, cost)
    if "completion" in report["workloads"]:
        yield of_rest(report)
    if not report.get(UNGUESSABLE):
        yield Verdict("–", f"{UNGUESSABLE}: not measured")
        return
    for by, words in SPEEDS.items():
        yield judge(f"{UNGUESSABLE}: auto ÷ direct, {words}", report[UNGUESSABLE][by], NO_LOSS, NO_LOSS_LOW)


def of_workload(name, told, cost):
    auto, best = told["sides"]["auto"], told["auto_over_best"]
    costs = f"a round of {ROUND} costs {cost:.2f} steps"
    if best:
        yield judge(f"{name}: auto ÷ fixed {best['best']}, the best fixed length", best, BEST)
    else:
        yield Verdict("–", f"{name}: auto ÷ the best fixed length: no fixed length was measured")
    if name in OVER_DIRECT and cost <= CHEAP:
        yield judge(f"{name}: auto ÷ direct", auto.get("over_direct"), OVER_DIRECT[name])
    elif name in OVER_DIRECT:
        yield Verdict("–", f"{name}: auto ÷ direct at least {OVER_DIRECT[name]:.2f}: does not apply, {costs}, more than {CHEAP}")
    if name == "completion" and cost <= CHEAP:
        answered = auto["requests"] - auto["failed"]
        leapt = round(auto.get("leapt", 0) * answered)
        yield Verdict("ok" if answered and leapt >= LEAPT * auto["requests"] else "short",
                      f"{name}: {leapt} of {auto['requests']} sessions leapt, at least {LEAPT:.0%}")
    elif name == "completion":
        yield Verdict("–", f"{name}: {LEAPT:.0%} of sessions leap: does not apply, {costs}, more than {CHEAP}")
    tokens, measured = told["brings"]
    says = f"{costs} and brings {tokens:.1f} tokens" + ("" if measured else f" at acceptance {ACCEPTANCE}")
    if cost > tokens:
        yield judge(f"{name}: auto ÷ direct where a round costs more than it brings ({says})", auto.get("over_direct"),
                    NO_LOSS, NO_LOSS_LOW)
    else:
        yield Verdict("–", f"{name}: auto ÷ direct at least {NO_LOSS}: does not apply, {says}")


def of_rest(report):
    rest = report["rest"]
    if "why" in rest:
        return Verdict("–", f"completion after a rest: does not apply, {rest['why']}")
    return judge(f"completion: auto ÷ direct after {rest['seconds']} s of rest ÷ before", rest["lasting"], LASTS)


def short(report):
    """What makes a run a failure: verdicts that fell short, requests that failed, texts that differ."""
    parts = {**report["workloads"], UNGUESSABLE: report.get(UNGUESSABLE) or {}}
    wrong = [f"{name}: {words}" for name, part in parts.items() for words in part.get("wrong", [])]
    wrong += [f"rest: {words}" for words in report.get("rest", {}).get("wrong", [])]
    return wrong + [verdict.text for verdict in verdicts(report) if verdict.word == "short"]
