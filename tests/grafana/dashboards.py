"""The dashboards and alert rules as files, and every expression in them with its location."""

import functools
import json
import pathlib

import promql

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

FOLDER = ROOT / "grafana/dashboards"
RULES = promql.RULES
NAMES = ("drafts", "health", "helping", "why")


@functools.cache
def boards():
    """Every dashboard by the name of its file; a missing one is an error."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
    if missing := set(NAMES) - set(found):
        raise FileNotFoundError(f"{FOLDER} lacks {', '.join(sorted(missing))}")
    return found


@functools.cache
def rules():
    """Every alert rule of the file."""
    return [rule for rule in promql.rules() if "alert" in rule]


def panels(board):
    """The panels of a dashboard, including those of closed rows, without the rows."""
    for panel in board["panels"]:
        yield from panels(panel) if panel.get("panels") else ()
        if panel["type"] != "row":
            yield panel


def expressions():
    """(location, expression of the file) of all panels, annotations and variables."""
    for name, board in boards().items():
        for panel in panels(board):
            for target in panel["targets"]:
                yield f"{name}: {panel['title']}", target["expr"]
        for annotation in board["annotations"]["list"]:
            if "expr" in annotation:
                yield f"{name}: annotation {annotation['name']}", annotation["expr"]
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                selector, label = promql.selected(variable["query"]["query"])
                yield f"{name}: variable {variable['name']}", f"count by ({label}) ({selector})"
