"""The metrics of docs/metrics.md, and a check that an expression of PromQL fits them.

An expression is parsed, and the possible labels of each part's series are derived: so a matcher, a
grouping or a match over a missing label is found, and so is a quotient that may divide by zero.
"""

import functools
import pathlib
import re

import promql_parser as ast
import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

REFERENCE = ROOT / "docs/metrics.md"
RULES = ROOT / "grafana/rules/foretell.rules.yaml"
SCRAPED = {"job", "instance"}
COMPARISONS = {"==", "!=", "<", "<=", ">", ">="}
OF_COUNTERS = {"rate", "increase", "irate"}
OF_GAUGES = {"avg_over_time", "min_over_time", "max_over_time", "changes", "delta", "deriv"}
SCALARS = {"time"}


@functools.cache
def registry():
    """Kind and labels of every metric, by name."""
    rows = re.findall(r"^\| `(\w+)` \| (counter|gauge|histogram) \| ([^|]*) \|", REFERENCE.read_text(), re.M)
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def rules():
    """Every rule of the file, of alerts and of recorded series."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


@functools.cache
def recorded():
    """The expression of every recorded series, by its name."""
    return {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}


@functools.cache
def values():
    """The values of every label with a closed set, by its name; of a metric's own label as `label
    of metric`."""
    rows = re.findall(r"^\| `([^`]+)` \| [^|]* \| ([^|]*) \|$", REFERENCE.read_text().split("## Labels")[1], re.M)
    found = {}
    for label, said in rows:
        if "`" in said:  # rows such as `reason (path passthrough)` share the label
            found.setdefault(label.partition(" (")[0], set()).update(re.findall(r"`([^`]+)`", said))
    return found


def series(name):
    """Kind and labels of a series: a histogram's are `_bucket`, with `le`, `_sum` and `_count`, all
    counters."""
    if name in recorded():
        return "gauge", labels(ast.parse(recorded()[name]))
    known = registry()
    part = re.fullmatch(r"(\w+)_(bucket|sum|count)", name)
    if part and known.get(part[1], ("",))[0] == "histogram":
        return "counter", known[part[1]][1] | ({"le"} if part[2] == "bucket" else set())
    if name not in known or known[name][0] == "histogram":
        raise ValueError(f"{name} is not a series of {REFERENCE.name}")
    return known[name]


def expanded(text, **variables):
    """An expression as sent by Grafana with "all" chosen; `variables` sets others."""
    special = {"__rate_interval": "10s", "__range": "5m", "__interval": "10s", **variables}
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: special.get(found[1] or found[2], ".*"), text)


def selected(text):
    """The selector and the label of `label_values(selector, label)`."""
    found = re.fullmatch(r"label_values\((.*),\s*(\w+)\s*\)", text, re.S)
    if not found:
        raise ValueError(f"not a label_values query: {text}")
    return found[1], found[2]


def check(text):
    """Raises ValueError for an invalid expression."""
    labels(ast.parse(text))


def labels(node):
    """The possible labels of an expression's series; None for a scalar."""
    if isinstance(node, (ast.NumberLiteral, ast.StringLiteral)):
        return None
    if isinstance(node, (ast.ParenExpr, ast.UnaryExpr, ast.SubqueryExpr)):
        return labels(node.expr)
    if isinstance(node, ast.MatrixSelector):
        return labels(node.vector_selector)
    if isinstance(node, ast.VectorSelector):
        return of_selector(node)
    if isinstance(node, ast.Call):
        return of_call(node)
    if isinstance(node, ast.AggregateExpr):
        return of_aggregation(node)
    return of_operator(node)


def of_selector(node):
    if node.name is None:
        raise ValueError(f"a selector without a name: {node}")
    known = series(node.name)[1] | SCRAPED
    for matcher in node.matchers.matchers:
        if matcher.name not in known:
            raise ValueError(f"{node.name} has no label {matcher.name}")
        closed = values().get(f"{matcher.name} of {node.name}", values().get(matcher.name))
        asked = set(matcher.value.split("|")) if re.fullmatch(r"[\w|]+", matcher.value) else set()
        if closed and asked - closed:
            raise ValueError(f"{matcher.name} of {node.name} is never {', '.join(sorted(asked - closed))}")
    return known


def of_call(node):
    name, found = node.func.name, [labels(argument) for argument in node.args]
    for argument in node.args:
        if isinstance(argument, ast.MatrixSelector):
            kind = series(argument.vector_selector.name)[0]
            if kind == "gauge" and name in OF_COUNTERS or kind == "counter" and name in OF_GAUGES:
                raise ValueError(f"{name} of a {kind}: {node}")
    if name in SCALARS:
        return None
    if name == "vector":
        return set()
    if name == "histogram_quantile":
        if "le" not in found[1]:
            raise ValueError(f"histogram_quantile without le: {node}")
        return found[1] - {"le"}
    if name not in OF_COUNTERS | OF_GAUGES:
        raise ValueError(f"{name}: say in of_call which labels it leaves")
    return found[0]


def of_aggregation(node):
    found = labels(node.expr)
    named = set(node.modifier.labels) if node.modifier else set()
    if named - found:
        raise ValueError(f"grouped by {', '.join(sorted(named - found))}, which is not there: {node}")
    if str(node.op) in ("topk", "bottomk"):
        return found
    without = node.modifier and node.modifier.type == ast.AggModifierType.Without
    return found - named if without else named


def of_operator(node):
    left, right = labels(node.lhs), labels(node.rhs)
    operator = str(node.op)
    if operator in ("/", "%"):
        guarded(node)
    if left is None or right is None:
        return right if left is None else left
    if operator == "or":
        return left | right
    if operator in ("and", "unless"):
        matched(node, left, right)
        return left
    on_left, kept = matched(node, left, right)
    card = node.modifier.card if node.modifier else ast.VectorMatchCardinality.OneToOne
    if card == ast.VectorMatchCardinality.ManyToOne:
        return left | set(node.modifier.group_labels or ())
    if card == ast.VectorMatchCardinality.OneToMany:
        return right | set(node.modifier.group_labels or ())
    if on_left != kept:
        raise ValueError(f"matched over {sorted(on_left)} and {sorted(kept)}: {node}")
    return on_left


def matched(node, left, right):
    """The labels by which both sides of an operator are matched."""
    matching = node.modifier.matching if node.modifier else None
    if matching is None:
        return left, right
    named = set(matching.labels)
    if named - (left | right):
        raise ValueError(f"matched by {', '.join(sorted(named - (left | right)))}, which is not there: {node}")
    if matching.type == ast.LabelModifierType.Include:
        return named, named
    return left - named, right - named


def guarded(node):
    """Refuses a quotient whose divisor is neither a number nor limited from below."""
    divisor = node.rhs
    while isinstance(divisor, ast.ParenExpr):
        divisor = divisor.expr
    if isinstance(divisor, ast.NumberLiteral) and divisor.val != 0:
        return
    above = isinstance(divisor, ast.BinaryExpr) and str(divisor.op) == ">" and isinstance(divisor.rhs, ast.NumberLiteral)
    if not (above and divisor.rhs.val >= 0 and not (divisor.modifier and divisor.modifier.return_bool)):
        raise ValueError(f"may divide by nothing: {node}")
