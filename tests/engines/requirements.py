"""Requirements on the controller with real engines, checked on the figures of control.py."""

import collections
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "bench"))

import figures  # noqa: E402
import sides  # noqa: E402

BEST = 0.90
OVER_DIRECT = {"rewrite": 2.8, "completion": 1.3}
ROUND = 4
MAX_ROUND_COST = 1.6
MIN_SPECULATED = 20 / 25
LASTS = 0.95
NO_LOSS, NO_LOSS_LOW = 0.98, 0.95
# maximum acceptance in the probe's own prediction
ACCEPTANCE = 0.9
UNGUESSABLE = "unguessable"
SPEEDS = {"all": "tokens per second", "decoding": "tokens per second after the first text"}
Judged = collections.namedtuple("Judged", "word text")


def compared(answers, exact):
    """The figures of one workload at temperature 0; `exact`: a text that differs from direct is
    wrong."""
    direct = answers["direct"]
    part = {name: figures.figures(given, direct) for name, given in answers.items()}
    wrong = sides.failures(answers)
    differ = {name: side["compared"] - side["identical"] for name, side in part.items() if "compared" in side}
    wrong += [f"{sides.named(name)}: {count} texts differ" for name, count in differ.items() if exact and count]
    return {"sides": part, "auto_over_best": figures.over_best(answers), "brings": brings(part), "wrong": wrong}


def guessed(answers):
    """The figures of unguessable text. Its length is random, so seconds are taken per token."""
    auto, direct = answers["auto"], answers["direct"]
    part = {name: figures.figures(given, direct) for name, given in answers.items()}
    return {"sides": part, "wrong": sides.failures(answers), "all": figures.ratio(auto, direct),
            "decoding": figures.ratio(auto, direct, figures.decoding)}


def brings(part):
    """(mean acceptance length of a round of four drafted tokens, True if this was measured)."""
    measured = part.get(str(ROUND), {}).get("e_n")
    return (measured, True) if measured else (sum(ACCEPTANCE**n for n in range(ROUND + 1)), False)


def round_cost(probe):
    """Cost in steps of a round of four, by the probe's calls of its first method; None without
    calls."""
    method = probe["verify"][0]["method"]
    rounds = [call["ms"] for call in probe["verify"] if (call["method"], call["gamma"]) == (method, ROUND)]
    steps = [call["ms"] for call in probe["times"]["token"]]
    return sum(rounds) / len(rounds) / (sum(steps) / len(steps)) if rounds and steps else None


def judge(what, found, minimum, low=None):
    """A ratio with its interval against its bound, and against that of the interval's lower end."""
    good = found and "ratio" in found and found["ratio"] >= minimum and (low is None or found["low"] >= low)
    bound = f"at least {minimum:.2f}" + (f", its lower bound {low:.2f}" if low else "")
    return Judged("ok" if good else "short", f"{what}: {figures.between(found, 3)}, {bound}")


def judgements(report):
    """A judgement for each requirement; for one that does not apply or was not measured, the
    reason."""
    cost = report["round_cost"]
    for name in OVER_DIRECT:
        if name not in report["workloads"]:
            yield Judged("–", f"{name}: not measured")
    for name, part in report["workloads"].items():
        yield from of_workload(name, part, cost)
    if "completion" in report["workloads"]:
        yield of_rest(report)
    if not report.get(UNGUESSABLE):
        yield Judged("–", f"{UNGUESSABLE}: not measured")
        return
    for by, words in SPEEDS.items():
        yield judge(f"{UNGUESSABLE}: auto ÷ direct, {words}", report[UNGUESSABLE][by], NO_LOSS, NO_LOSS_LOW)


def of_workload(name, part, cost):
    auto, best = part["sides"]["auto"], part["auto_over_best"]
    costs = f"a round of {ROUND} costs {cost:.2f} steps"
    if best:
        yield judge(f"{name}: auto ÷ fixed {best['best']}, the best fixed length", best, BEST)
    else:
        yield Judged("–", f"{name}: auto ÷ the best fixed length: no fixed length was measured")
    if name in OVER_DIRECT and cost <= MAX_ROUND_COST:
        yield judge(f"{name}: auto ÷ direct", auto.get("over_direct"), OVER_DIRECT[name])
    elif name in OVER_DIRECT:
        yield Judged("–", f"{name}: auto ÷ direct at least {OVER_DIRECT[name]:.2f}: does not apply, {costs}, more than {MAX_ROUND_COST}")
    if name == "completion" and cost <= MAX_ROUND_COST:
        answered = auto["requests"] - auto["failed"]
        speculated = round(auto.get("speculated", 0) * answered)
        yield Judged("ok" if answered and speculated >= MIN_SPECULATED * auto["requests"] else "short",
                      f"{name}: {speculated} of {auto['requests']} sessions were speculated on, at least {MIN_SPECULATED:.0%}")
    elif name == "completion":
        yield Judged("–", f"{name}: {MIN_SPECULATED:.0%} of sessions are speculated on: does not apply, {costs}, more than {MAX_ROUND_COST}")
    tokens, measured = part["brings"]
    says = f"{costs} and brings {tokens:.1f} tokens" + ("" if measured else f" at acceptance {ACCEPTANCE}")
    if cost > tokens:
        yield judge(f"{name}: auto ÷ direct where a round costs more than it brings ({says})", auto.get("over_direct"),
                    NO_LOSS, NO_LOSS_LOW)
    else:
        yield Judged("–", f"{name}: auto ÷ direct at least {NO_LOSS}: does not apply, {says}")


def of_rest(report):
    rest = report["rest"]
    if "why" in rest:
        return Judged("–", f"completion after idle time: does not apply, {rest['why']}")
    return judge(f"completion: auto ÷ direct after {rest['seconds']} s of idle time ÷ before", rest["lasting"], LASTS)


def short(report):
    """Failures of a run: requirements that were not met, requests that failed, texts that differ."""
    parts = {**report["workloads"], UNGUESSABLE: report.get(UNGUESSABLE) or {}}
    wrong = [f"{name}: {words}" for name, part in parts.items() for words in part.get("wrong", [])]
    wrong += [f"rest: {words}" for words in report.get("rest", {}).get("wrong", [])]
    return wrong + [judged.text for judged in judgements(report) if judged.word == "short"]
