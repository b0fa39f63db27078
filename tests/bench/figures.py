"""Figures of `paced.py`: speeds and their ratios over the same prompts, and how they are printed."""

import random
import re

FIRST = 10
RESAMPLES = 2000


def speed(answers):
    return sum(a["tokens"] for a in answers) / sum(a["seconds"] for a in answers)


def ratio(over, under):
    """The ratio of two sides' speeds over the same prompts, with the 95 % interval of resampled prompts."""
    pairs = [(a, b) for a, b in zip(over, under) if "failed" not in a and "failed" not in b]
    if not pairs:
        return None
    dice = random.Random(1)

    def of(sample):
        return speed([a for a, _ in sample]) / speed([b for _, b in sample])
    resampled = sorted(of(dice.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    low, high = resampled[int(RESAMPLES * 0.025)], resampled[int(RESAMPLES * 0.975)]
    return {"ratio": of(pairs), "low": low, "high": high, "n": len(pairs)}


def figures(answers, direct):
    """The figures of one setting over some of its requests."""
    whole = [a for a in answers if "failed" not in a]
    if not whole:
        return {"requests": len(answers), "failed": len(answers)}
    rounds, drafted, accepted = (sum(a[key] for a in whole) for key in ("rounds", "drafted", "accepted"))
    ends = {}
    for a in whole:
        how = f"{a['path']} ({a['reason']})" if a["reason"] else a["path"] or "direct"
        ends[how] = ends.get(how, 0) + 1
    same = [a["text"] == b["text"] and a["tokens"] == b["tokens"] for a, b in zip(answers, direct)
            if "failed" not in a and "failed" not in b]
    first = sorted(a["first"] or a["seconds"] for a in whole)
    return {"requests": len(answers), "failed": len(answers) - len(whole), "tokens_per_second": speed(whole),
            "over_direct": ratio(answers, direct), "first_token_ms": first[len(first) // 2] * 1e3,
            "leapt": sum(a["rounds"] > 0 for a in whole) / len(whole), "rounds": rounds, "drafted": drafted,
            "accepted": accepted, "e_n": (accepted + rounds) / rounds if rounds else None,
            "drafted_per_round": drafted / rounds if rounds else None, "identical": sum(same), "compared": len(same),
            "ends": ends}


def conclude(answers):
    """Figures of all sides, of the first requests and of the rest, and of auto against the best fixed length: best on the
    very requests that it is judged by, so that chance is on its side."""
    parts = {"first": slice(0, FIRST), "rest": slice(FIRST, None)}
    sides = {name: {part: figures(given[cut], answers["direct"][cut]) for part, cut in parts.items() if given[cut]}
             for name, given in answers.items()}
    against = {}
    for part, cut in parts.items():
        fixed = {name: side[part]["tokens_per_second"] for name, side in sides.items()
                 if name.isdigit() and "tokens_per_second" in side.get(part, {})}
        if fixed and "auto" in answers and answers["auto"][cut]:
            best = max(fixed, key=fixed.get)
            against[part] = {"best": best, **(ratio(answers["auto"][cut], answers[best][cut]) or {})}
    return sides, against


def kept(metrics, cell):
    """Measured ÷ asked for, of plain steps and of verify calls, from the target's own counters."""
    found = dict(re.findall(r"^foretell_target_(\S+) (\S+)$", metrics, re.MULTILINE))
    count, seconds = ((lambda kind, what=what: float(found.get(f'step_seconds_{what}{{kind="{kind}"}}', 0)))
                      for what in ("count", "sum"))
    value, unit = re.fullmatch(r"([\d.]+)(us|ms|s)", cell["step"]).groups()
    step = float(value) * {"us": 1e-6, "ms": 1e-3, "s": 1}[unit]
    drafted = float(found.get("verify_drafted_tokens_total", 0))
    asked = {"decode": step * count("decode"),
             "verify": step * (float(cell["base"]) * count("verify") + float(cell["node"]) * drafted)}
    return {kind: seconds(kind) / asked[kind] if asked[kind] else None for kind in asked}


def between(found):
    return f"{found['ratio']:.2f} ({found['low']:.2f} – {found['high']:.2f})" if found and "ratio" in found else "–"


def number(value, digits=2):
    return "–" if value is None else f"{value:.{digits}f}"


def report(text, result):
    requests = sum(part["requests"] for part in result["sides"]["direct"].values())
    print(f"{text}: {requests} requests a side, the first {FIRST} apart; in brackets 95 % of resampled prompts")
    heading = ("setting", "first tok/s", "÷ direct", "rest tok/s", "÷ direct", "leapt", "E[N]", "drafted", "identical")
    rows = [heading]
    for name, parts in result["sides"].items():
        row = ["fixed " + name if name.isdigit() else name]
        for part in ("first", "rest"):
            told = parts.get(part, {})
            row += [number(told.get("tokens_per_second"), 1), between(told.get("over_direct"))]
        last = parts.get("rest") or parts["first"]
        row += [f"{100 * last.get('leapt', 0):.0f} %", number(last.get("e_n")), number(last.get("drafted_per_round"), 1),
                f"{sum(p.get('identical', 0) for p in parts.values())}/{sum(p['requests'] for p in parts.values())}"]
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(heading))]
    for row in rows:
        print("  ".join(cell.ljust(width) if not at else cell.rjust(width)
                        for at, (cell, width) in enumerate(zip(row, widths))))
    for part, told in result["auto_over_best"].items():
        print(f"auto ÷ fixed {told['best']}, the best fixed length, {part}: {between(told)}")
    for part, told in result["sides"].get("auto", {}).items():
        print(f"auto ended, {part}: {', '.join(f'{how} {times}' for how, times in sorted(told.get('ends', {}).items()))}")
    print("; ".join(f"target {at}: plain steps took {number(told['decode'])} of what was asked for, verify calls "
                    f"{number(told['verify'])}" for at, told in enumerate(result["kept"], 1)), flush=True)


def wrong(text, result):
    for name, parts in result["sides"].items():
        for part, told in parts.items():
            if told["failed"]:
                yield f"{text}: {name}, {part}: {told['failed']} requests failed"
            if told.get("identical") != told.get("compared"):
                yield f"{text}: {name}, {part}: {told['compared'] - told['identical']} texts differ"
