"""Figures of compared sides: speeds and their ratios over the same prompts, and their printing."""

import collections
import random
import re
import sys

from sides import FIXED, named

FIRST = 10
RESAMPLES = 2000


def speed(answers):
    return sum(a["tokens"] for a in answers) / sum(a["seconds"] for a in answers)


def decoding(answers):
    """Tokens per second after the first text, of answers with text."""
    found = [a for a in answers if a["first"] is not None]
    return sum(a["tokens"] - 1 for a in found) / sum(a["seconds"] - a["first"] for a in found)


def resampled(pairs, of):
    """`of` the prompts' pairs, with the 95 % interval of resampled prompts; None without pairs."""
    if not pairs:
        return None
    rng = random.Random(1)
    drawn = sorted(of(rng.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    low, high = drawn[int(RESAMPLES * 0.025)], drawn[int(RESAMPLES * 0.975)]
    return {"ratio": of(pairs), "low": low, "high": high, "n": len(pairs)}


def whole(*sides):
    """The prompts that none of the sides failed to answer, with all their answers."""
    return [given for given in zip(*sides) if not any("failed" in a for a in given)]


def ratio(over, under, by=speed):
    """The ratio of two sides' speeds over the same prompts."""
    return resampled(whole(over, under), lambda sample: by([a for a, _ in sample]) / by([b for _, b in sample]))


def lasting(before, after):
    """Later ratio of two sides' speeds ÷ earlier ratio; each a pair of sides, over the same
    prompts."""
    def of(sample):
        over, under, later_over, later_under = (speed(given) for given in zip(*sample))
        return later_over / later_under / (over / under)
    return resampled(whole(*before, *after), of)


def over_best(answers):
    """`auto` against the best fixed length: best on the measured requests, so chance favours it."""
    fixed = {name: speed(given) for name, side in answers.items()
             if FIXED.fullmatch(name) and (given := [a for a in side if "failed" not in a])}
    if not fixed or not answers.get("auto"):
        return None
    best = max(fixed, key=fixed.get)
    return {"best": best, **(ratio(answers["auto"], answers[best]) or {})}


def figures(answers, direct):
    """The figures of one setting over some of its requests."""
    given = [a for a in answers if "failed" not in a]
    if not given:
        return {"requests": len(answers), "failed": len(answers)}
    rounds, drafted, accepted = (sum(a[key] for a in given) for key in ("rounds", "drafted", "accepted"))
    how = collections.Counter(f"{a['path']} ({a['reason']})" if a["reason"] else a["path"] or "direct" for a in given)
    same = [a["text"] == b["text"] and a["tokens"] == b["tokens"] for a, b in whole(answers, direct)]
    first = sorted(a["first"] or a["seconds"] for a in given)
    return {"requests": len(answers), "failed": len(answers) - len(given), "tokens_per_second": speed(given),
            "over_direct": ratio(answers, direct), "first_token_ms": first[len(first) // 2] * 1e3,
            "speculated": sum(a["rounds"] > 0 for a in given) / len(given), "rounds": rounds, "drafted": drafted,
            "accepted": accepted, "e_n": (accepted + rounds) / rounds if rounds else None,
            "drafted_per_round": drafted / rounds if rounds else None, "identical": sum(same), "compared": len(same),
            "ends": dict(how)}


def conclude(answers, first=FIRST):
    """Figures of all sides, of the first requests and of the rest, and of auto against the best
    fixed length."""
    parts = {"first": slice(0, first), "rest": slice(first, None)}
    sides = {name: {part: figures(given[cut], answers["direct"][cut]) for part, cut in parts.items() if given[cut]}
             for name, given in answers.items()}
    against = {part: over_best({name: given[cut] for name, given in answers.items()}) for part, cut in parts.items()}
    return sides, {part: found for part, found in against.items() if found}


def kept(metrics, cell):
    """Measured ÷ requested time of plain steps and of verify requests, from the target's
    counters."""
    found = dict(re.findall(r"^foretell_target_(\S+) (\S+)$", metrics, re.MULTILINE))
    count, seconds = ((lambda kind, what=what: float(found.get(f'step_seconds_{what}{{kind="{kind}"}}', 0)))
                      for what in ("count", "sum"))
    value, unit = re.fullmatch(r"([\d.]+)(us|ms|s)", cell["step"]).groups()
    step = float(value) * {"us": 1e-6, "ms": 1e-3, "s": 1}[unit]
    drafted = float(found.get("verify_drafted_tokens_total", 0))
    asked = {"decode": step * count("decode"),
             "verify": step * (float(cell["base"]) * count("verify") + float(cell["node"]) * drafted)}
    return {kind: seconds(kind) / asked[kind] if asked[kind] else None for kind in asked}


def between(found, digits=2):
    """A ratio and its interval in words."""
    if not found or "ratio" not in found:
        return "–"
    ratio, low, high = (number(found[key], digits) for key in ("ratio", "low", "high"))
    return f"{ratio} ({low} – {high})"


def number(value, digits=2):
    return "–" if value is None else f"{value:.{digits}f}"


def table(rows):
    """Prints rows of cells: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) if not at else cell.rjust(width)
                        for at, (cell, width) in enumerate(zip(row, widths))))


def ends(found):
    """Numbers of a side's requests by path and reason, in words."""
    return ", ".join(f"{how} {times}" for how, times in sorted(found.get("ends", {}).items()))


def report(text, result):
    requests = sum(part["requests"] for part in result["sides"]["direct"].values())
    print(f"{text}: {requests} requests a side, the first {result['first']} apart; in brackets 95 % of resampled prompts")
    heading = ("setting", "first tok/s", "÷ direct", "rest tok/s", "÷ direct", "first token ms", "speculated", "E[N]", "drafted", "identical")
    rows = [heading]
    for name, parts in result["sides"].items():
        row = [named(name)]
        for part in ("first", "rest"):
            found = parts.get(part, {})
            row += [number(found.get("tokens_per_second"), 1), between(found.get("over_direct"))]
        last = parts.get("rest") or parts["first"]
        row += [number(last.get("first_token_ms"), 0), f"{100 * last.get('speculated', 0):.0f} %", number(last.get("e_n")), number(last.get("drafted_per_round"), 1),
                f"{sum(p.get('identical', 0) for p in parts.values())}/{sum(p['requests'] for p in parts.values())}"]
        rows.append(row)
    table(rows)
    for part, found in result["auto_over_best"].items():
        print(f"auto ÷ fixed {found['best']}, the best fixed length, {part}: {between(found)}")
    for part, found in result["sides"].get("auto", {}).items():
        print(f"auto ended, {part}: {ends(found)}")
    for at, found in enumerate(result["kept"], 1):
        print(f"target {at}: plain steps took {number(found['decode'])} of the requested time, verify requests {number(found['verify'])}")
    sys.stdout.flush()


def wrong(text, result):
    for name, parts in result["sides"].items():
        for part, found in parts.items():
            if found["failed"]:
                yield f"{text}: {name}, {part}: {found['failed']} requests failed"
            if found.get("identical") != found.get("compared"):
                yield f"{text}: {name}, {part}: {found['compared'] - found['identical']} texts differ"
