"""PromQL for the panels.

Names and labels come from `docs/metrics.md`, which a test compares with the program: an unknown name, or a label that
the metric does not have, is an error when the dashboards are built. Every selector is narrowed by those variables of
the dashboard for which the metric has a label.
"""

import functools
import pathlib
import re

REFERENCE = pathlib.Path(__file__).resolve().parent.parent.parent / "docs/metrics.md"
ENTRY = re.compile(r"^\| `(?P<name>\w+)` \| (?P<kind>counter|gauge|histogram) \| (?P<labels>[^|]*) \|", re.MULTILINE)
# Labels that have a variable of the same name; every metric has `job` and `instance`.
VARIABLES = ("model", "policy", "backend", "replica")
SCRAPED = ("job", "instance")
NAME = re.compile(r"\b(?:foretell|gen_ai|process)_\w+")


@functools.cache
def registry() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Kind and labels of every metric, by name."""
    entries = ENTRY.finditer(REFERENCE.read_text(encoding="utf-8"))
    return {entry["name"]: (entry["kind"], tuple(re.findall(r"`(\w+)`", entry["labels"]))) for entry in entries}


def metric(series: str) -> str:
    """The metric of a series: the histogram for `_bucket`, `_sum` or `_count`, else the series itself."""
    base = re.sub(r"_(bucket|sum|count)$", "", series)
    name = base if registry().get(base, ("",))[0] == "histogram" else series
    if name not in registry():
        raise ValueError(f"{series} is not in {REFERENCE.name}")
    return name


def metrics(expression: str) -> list[str]:
    """The metrics in an expression, each once, in order of appearance."""
    return list(dict.fromkeys(metric(series) for series in NAME.findall(expression)))


def of_processes(series: str) -> str:
    """The series of a metric from the processes that the variables select; the other variables have no effect."""
    chosen = ", ".join(f'{name}=~"${name}"' for name in SCRAPED)
    metric(series)
    return f"{series}{{{chosen}}}"


def of(series: str, *matchers: str) -> str:
    """The series of a metric that the variables select, narrowed by matchers such as `bound="low"`."""
    labels = registry()[metric(series)][1]
    for matcher in matchers:
        if (label := re.split(r"[=!]", matcher)[0]) not in labels:
            raise ValueError(f"{series} has no label {label}")
    chosen = [f'{name}=~"${name}"' for name in SCRAPED + tuple(name for name in VARIABLES if name in labels)]
    return f"{series}{{{', '.join([*chosen, *matchers])}}}"


def grouped(function: str, by: str, inner: str) -> str:
    """An aggregation that keeps the labels in `by` ("" for none)."""
    return f"{function} by ({by}) ({inner})" if by else f"{function}({inner})"


def rate(series: str, *matchers: str, by: str = "") -> str:
    """Increase of a counter per second."""
    return grouped("sum", by, f"rate({of(series, *matchers)}[$__rate_interval])")


def increase(series: str, *matchers: str, by: str = "", over: str = "$__range") -> str:
    """Increase of a counter within `over`; by default within the whole time range."""
    return grouped("sum", by, f"increase({of(series, *matchers)}[{over}])")


def ratio(over: str, under: str, match: str = "") -> str:
    """A quotient, absent where the divisor is 0. `match` is the vector matching for different labels."""
    return f"{over} / {match + ' ' if match else ''}({under} > 0)"


def share(series: str, by: str, *matchers: str) -> str:
    """The share of each value of a label in the rate of a counter."""
    return ratio(rate(series, *matchers, by=by), rate(series, *matchers), f"ignoring ({by}) group_left ()")


def quantile(rank: float, histogram: str, *matchers: str, by: str = "") -> str:
    """A quantile of a histogram. The comparison drops NaN, the value of a time without observations."""
    buckets = rate(f"{histogram}_bucket", *matchers, by=f"{by}, le" if by else "le")
    return f"histogram_quantile({rank}, {buckets}) >= 0"
