"""The dashboards against Grafana's published schema.

`grafana-foundation-sdk` holds the types that Grafana generates from the schema of its dashboards
and panels. A dashboard is read into them and written again: fields outside of the schema are lost
on that way, and are reported by their path. The result is then compared with the declared types, so
that a word that is no member of an enumeration is reported too.

Run: PYTHONPATH=.cache/grafana-tests python tests/grafana/test_schema.py
"""

import enum
import json
import pathlib
import types
import typing
import unittest

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard, units

DASHBOARDS = sorted((pathlib.Path(__file__).resolve().parent.parent.parent / "grafana/dashboards").glob("*.json"))
# Fields that Grafana's Prometheus data source reads in an annotation. The schema of annotations
# leaves a data source's own fields open, and the generated types cannot hold them.
OPEN = {"step", "titleFormat", "textFormat", "useValueForTime"}
SCHEMA = "grafana_foundation_sdk."


def lost(given, kept, path="") -> list[str]:
    """The paths of values in `given` that differ in `kept`."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [hit for key, value in given.items() for hit in lost(value, kept.get(key), f"{path}.{key}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [
            hit for index, (one, other) in enumerate(zip(given, kept)) for hit in lost(one, other, f"{path}[{index}]")
        ]
    return [] if given == kept else [f"{path}: {given!r} became {kept!r}"]


def open_field(hit: str) -> bool:
    """True if a hit of `lost` is one of the fields that the schema leaves open."""
    path = hit.split(":", 1)[0]
    return path.startswith(".annotations.list[") and path.rsplit(".", 1)[-1] in OPEN


def mistyped(value, declared, path="") -> list[str]:
    """The paths of values without their declared type, in lists, maps and the schema's classes."""
    origin, parts = typing.get_origin(declared), typing.get_args(declared)
    if origin in (typing.Union, types.UnionType):
        fitting = [part for part in parts if (part is type(None)) == (value is None)]
        return min(
            (mistyped(value, part, path) for part in fitting),
            key=len,
            default=[f"{path}: {value!r} is none of {parts}"],
        )
    if declared is typing.Any or declared is object or isinstance(declared, (str, typing.ForwardRef)):
        return []
    if origin is typing.Literal:
        return [] if value in parts else [f"{path}: {value!r} is none of {parts}"]
    if origin is list and isinstance(value, list):
        return [hit for index, item in enumerate(value) for hit in mistyped(item, parts[0], f"{path}[{index}]")]
    if origin is dict and isinstance(value, dict):
        return [hit for key, item in value.items() for hit in mistyped(item, parts[1], f"{path}.{key}")]
    if isinstance(declared, type) and issubclass(declared, enum.Enum):
        return (
            [] if value in [member.value for member in declared] else [f"{path}: {value!r} is no {declared.__name__}"]
        )
    if declared is float and isinstance(value, int) and not isinstance(value, bool):
        return []
    kind = origin or declared
    if isinstance(value, dict) and kind.__module__.startswith(SCHEMA):
        value = kind.from_json(value)  # a part that the types keep unparsed
    if not isinstance(value, kind):
        return [f"{path}: {value!r} is no {getattr(kind, '__name__', kind)}"]
    if kind.__module__.startswith(SCHEMA):
        return fields(value, path)
    return []


def fields(value, path: str) -> list[str]:
    """The same for the fields of a schema class, and for open fields that a plugin defines."""
    hits = []
    for name, declared in typing.get_type_hints(type(value)).items():
        item = getattr(value, name)
        hits += mistyped(item, declared, f"{path}.{name}")
        if type(item).__module__.startswith(SCHEMA) and declared in (object, typing.Any, typing.Optional[object]):
            hits += fields(item, f"{path}.{name}")
    return hits


class Schema(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        register_default_plugins()

    def read(self, path):
        given = json.loads(path.read_text(encoding="utf-8"))
        model = dashboard.Dashboard.from_json(given)
        return given, model, json.loads(json.dumps(model, cls=JSONEncoder))

    def test_there_are_four_dashboards(self):
        self.assertEqual([path.stem for path in DASHBOARDS], ["drafts", "health", "helping", "why"])

    def test_the_schema_knows_every_field(self):
        for path in DASHBOARDS:
            with self.subTest(path.name):
                given, _, kept = self.read(path)
                self.assertEqual([hit for hit in lost(given, kept) if not open_field(hit)], [])

    def test_every_value_is_of_its_type(self):
        for path in DASHBOARDS:
            with self.subTest(path.name):
                _, model, _ = self.read(path)
                self.assertEqual(mistyped(model, dashboard.Dashboard), [])

    def test_every_unit_is_one_of_grafanas(self):
        known = {value for name, value in vars(units).items() if isinstance(value, str) and not name.startswith("_")}
        self.assertNotIn("version", known)
        for path in DASHBOARDS:
            given, _, _ = self.read(path)
            for panel in given["panels"]:
                if panel["type"] != "row":
                    with self.subTest(f"{path.name}: {panel['title']}"):
                        self.assertIn(panel["fieldConfig"]["defaults"]["unit"], known)

    def test_what_the_schema_does_not_know_is_found(self):
        given = json.loads(DASHBOARDS[0].read_text(encoding="utf-8"))
        panel = next(panel for panel in given["panels"] if panel["type"] == "timeseries")
        panel["fieldConfig"]["defaults"]["custom"]["lineWith"] = 2
        panel["options"]["tooltip"]["mode"] = "many"
        given["refresh"] = 30
        model = dashboard.Dashboard.from_json(given)
        kept = json.loads(json.dumps(model, cls=JSONEncoder))
        self.assertTrue(any("lineWith" in hit for hit in lost(given, kept)))
        found = mistyped(model, dashboard.Dashboard)
        self.assertTrue(any("'many' is no TooltipDisplayMode" in hit for hit in found), found)
        self.assertTrue(any(".refresh: 30" in hit for hit in found), found)


if __name__ == "__main__":
    unittest.main()
