"""Panels and dashboards as Grafana stores them (its dashboard schema, as of Grafana 11.6).

The description of a panel says what it shows, which values are good and what to do otherwise; the names of its metrics
are added from its expressions. Positions on the grid, identifiers, variables and annotations are computed here.
"""

import dataclasses
import re
import typing

from . import promql

SCHEMA = 41
TAG = "foretell"
WIDTH = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
Json = dict[str, typing.Any]
# Colours by lower bound: `((None, "green"), (0.98, "yellow"))` is green below 0.98, yellow from there.
Steps = tuple[tuple[float | None, str], ...]
PLAIN: Steps = ((None, "green"),)
# 1 is good, 0 is bad.
YES: Steps = ((None, "red"), (1, "green"))
# 0 is good, anything above it is bad.
NONE: Steps = ((None, "green"), (1e-9, "red"))
States = dict[int, tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Query:
    """An expression and the name of its lines; with `once` it is evaluated only at the end of the time range."""

    expression: str
    legend: str = "__auto"
    once: bool = False
    form: typing.Literal["time_series", "table", "heatmap"] = "time_series"

    def json(self, index: int) -> Json:
        return {
            "refId": chr(ord("A") + index),
            "datasource": SOURCE,
            "expr": self.expression,
            "legendFormat": self.legend,
            "format": self.form,
            "instant": self.once,
            "range": not self.once,
            "editorMode": "code",
        }


@dataclasses.dataclass(frozen=True)
class Panel:
    """A panel without its position. `says`, `good` and `otherwise` make up its description."""

    kind: str
    title: str
    unit: str
    queries: tuple[Query, ...]
    says: str
    good: str
    otherwise: str
    options: Json
    custom: Json = dataclasses.field(default_factory=dict)
    steps: Steps = PLAIN
    states: States = dataclasses.field(default_factory=dict)
    absent: str = "no traffic"
    width: int = 8
    height: int = 8
    defaults: Json = dataclasses.field(default_factory=dict)
    overrides: tuple[Json, ...] = ()
    transformations: tuple[Json, ...] = ()

    def description(self) -> str:
        names = dict.fromkeys(name for query in self.queries for name in promql.metrics(query.expression))
        listed = ", ".join(f"`{name}`" for name in names)
        return f"{self.says}\n\n**Good:** {self.good}\n\n**Otherwise:** {self.otherwise}\n\n**Metrics:** {listed}"

    def mappings(self) -> list[Json]:
        named = {
            str(value): {"text": text, "color": color, "index": value} for value, (text, color) in self.states.items()
        }
        nothing = {"match": "null+nan", "result": {"text": self.absent, "color": "text", "index": len(named)}}
        shown = [{"type": "value", "options": named}] if named else []
        return [*shown, {"type": "special", "options": nothing}]

    def json(self, number: int, x: int, y: int) -> Json:
        steps = [{"value": value, "color": color} for value, color in self.steps]
        by_steps = len(self.steps) > 1 and self.kind in ("stat", "state-timeline") or self.states
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description(),
            "datasource": SOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "targets": [query.json(index) for index, query in enumerate(self.queries)],
            "options": self.options,
            "fieldConfig": {
                "defaults": {
                    "unit": self.unit,
                    "noValue": self.absent,
                    "color": {"mode": "thresholds" if by_steps else "palette-classic"},
                    "mappings": self.mappings(),
                    "thresholds": {"mode": "absolute", "steps": steps},
                    "custom": self.custom,
                    **self.defaults,
                },
                "overrides": list(self.overrides),
            },
            "transformations": list(self.transformations),
        }


def lines(title: str, unit: str, *queries: Query, stack: bool = False, **rest: typing.Any) -> Panel:
    """Lines over time; bounds of colours are drawn as dashed lines."""
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 40 if stack else 8,
        "showPoints": "auto",
        "spanNulls": False,
        "stacking": {"mode": "normal" if stack else "none", "group": "A"},
        "thresholdsStyle": {"mode": "dashed" if len(rest.get("steps", PLAIN)) > 1 else "off"},
    }
    options = {
        "legend": {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return Panel("timeseries", title, unit, queries, options=options, custom=custom, **rest)


def stat(title: str, unit: str, *queries: Query, **rest: typing.Any) -> Panel:
    """The value at the end of the time range, large; its colour is that of the bound it is above."""
    queries = tuple(dataclasses.replace(query, once=True) for query in queries)
    named = any(query.legend != "__auto" for query in queries)
    options = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "graphMode": "none",
        "colorMode": "value",
        "justifyMode": "auto",
        "orientation": "auto",
        "textMode": "value_and_name" if named else "auto",
        "wideLayout": True,
        "showPercentChange": False,
        "percentChangeColorMode": "standard",
    }
    return Panel("stat", title, unit, queries, options=options, **{"width": 4, "height": 5, **rest})


def names(title: str, label: str, query: Query, **rest: typing.Any) -> Panel:
    """The values of a label of an information metric, as text."""
    panel = stat(title, "string", query, **rest)
    return dataclasses.replace(
        panel,
        options={**panel.options, "textMode": "name"},
        queries=(dataclasses.replace(query, legend=f"{{{{{label}}}}}"),),
    )


def timeline(title: str, *queries: Query, states: States, **rest: typing.Any) -> Panel:
    """Bars of states over time, one for each line, each state with its name and colour."""
    options = {
        "mergeValues": True,
        "showValue": "auto",
        "alignValue": "left",
        "rowHeight": 0.9,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "single", "sort": "none"},
    }
    custom = {"lineWidth": 0, "fillOpacity": 70}
    return Panel("state-timeline", title, "none", queries, options=options, custom=custom, states=states, **rest)


def heatmap(title: str, unit: str, query: Query, **rest: typing.Any) -> Panel:
    """The buckets of a histogram over time, darker for more observations."""
    options = {
        "calculate": False,
        "color": {
            "mode": "scheme",
            "scheme": "Blues",
            "fill": "blue",
            "scale": "exponential",
            "exponent": 0.5,
            "steps": 64,
            "reverse": False,
        },
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "cellGap": 1,
        "cellValues": {"unit": "short"},
        "yAxis": {"unit": unit, "axisPlacement": "left", "reverse": False},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "tooltip": {"mode": "single", "yHistogram": True, "showColorScale": True},
        "exemplars": {"color": "orange"},
    }
    queries = (dataclasses.replace(query, legend="{{le}}", form="heatmap"),)
    return Panel("heatmap", title, unit, queries, options=options, **rest)


def bars(title: str, unit: str, label: str, query: Query, **rest: typing.Any) -> Panel:
    """One bar for each value of a numeric label, in ascending order."""
    options = {
        "xField": label,
        "orientation": "vertical",
        "xTickLabelRotation": 0,
        "xTickLabelMaxLength": 0,
        "xTickLabelSpacing": 0,
        "stacking": "none",
        "showValue": "never",
        "barWidth": 0.9,
        "groupWidth": 0.7,
        "barRadius": 0,
        "fullHighlight": False,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False, "calcs": []},
        "tooltip": {"mode": "single", "sort": "none"},
    }
    numbered = {"fields": {}, "conversions": [{"targetField": label, "destinationType": "number"}]}
    transformations = (
        {"id": "convertFieldType", "options": numbered},
        {"id": "sortBy", "options": {"sort": [{"field": label, "desc": False}]}},
        {"id": "organize", "options": {"excludeByName": {"Time": True}, "indexByName": {}, "renameByName": {}}},
        {
            "id": "convertFieldType",
            "options": {"fields": {}, "conversions": [{"targetField": label, "destinationType": "string"}]},
        },
    )
    queries = (dataclasses.replace(query, once=True, form="table"),)
    custom = {"lineWidth": 1, "fillOpacity": 70, "thresholdsStyle": {"mode": "off"}}
    return Panel(
        "barchart", title, unit, queries, options=options, custom=custom, transformations=transformations, **rest
    )


def axis_right(pattern: str, unit: str) -> Json:
    """An override: lines whose names match have their own unit and an axis on the right."""
    properties = [{"id": "unit", "value": unit}, {"id": "custom.axisPlacement", "value": "right"}]
    return {"matcher": {"id": "byRegexp", "options": pattern}, "properties": properties}


Row = tuple[str, tuple[Panel, ...]]


@dataclasses.dataclass(frozen=True)
class Dashboard:
    """A question, and the rows of panels that answer it."""

    name: str
    question: str
    says: str
    rows: tuple[Row, ...]

    def json(self) -> Json:
        placed = list(self.placed())
        return {
            "uid": f"foretell-{self.name}",
            "title": f"Foretell: {self.question}",
            "description": self.says,
            "tags": [TAG],
            "schemaVersion": SCHEMA,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "30s",
            "timezone": "browser",
            "weekStart": "",
            "fiscalYearStartMonth": 0,
            "time": {"from": "now-3h", "to": "now"},
            "timepicker": {},
            "links": [links()],
            "annotations": {"list": annotations()},
            "templating": {"list": variables(placed)},
            "panels": placed,
        }

    def placed(self) -> typing.Iterator[Json]:
        number, y = 0, 0
        for title, panels in self.rows:
            number += 1
            yield {
                "id": number,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
            }
            x, y, tallest = 0, y + 1, 0
            for panel in panels:
                if x + panel.width > WIDTH:
                    x, y, tallest = 0, y + tallest, 0
                number += 1
                yield panel.json(number, x, y)
                x, tallest = x + panel.width, max(tallest, panel.height)
            y += tallest


def links() -> Json:
    """Links to the other dashboards, with the same time range and variables."""
    return {
        "type": "dashboards",
        "tags": [TAG],
        "title": "Foretell",
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }


def variables(panels: list[Json]) -> list[Json]:
    """The data source, and each variable that a query uses."""
    used = {
        name
        for panel in panels
        for target in panel.get("targets", [])
        for name in re.findall(r'"\$(\w+)"', target["expr"])
    }
    source = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "regex": "",
        "refresh": 1,
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "skipUrlSync": False,
    }
    narrowed = 'job=~"$job", instance=~"$instance"'
    found = {
        "job": "foretell_build_info",
        "instance": 'foretell_build_info{job=~"$job"}',
        "model": f"foretell_requests_total{{{narrowed}}}",
        "policy": f'foretell_requests_total{{{narrowed}, policy!=""}}',
        "backend": f"foretell_mode{{{narrowed}}}",
        "replica": f"foretell_replica_up{{{narrowed}}}",
    }
    return [source, *(variable(name, series) for name, series in found.items() if name in used)]


def variable(name: str, series: str) -> Json:
    """The values of a label. `All` also matches series without the label, such as requests without a policy."""
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": f"label_values({series}, {name})", "refId": f"variable-{name}", "qryType": 1},
        "refresh": 2,
        "sort": 1,
        "hide": 0,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "options": [],
        "regex": "",
        "skipUrlSync": False,
    }


def annotations() -> list[Json]:
    """Marks on every panel: changes by the operator or by a gate."""
    now = promql.of_processes("foretell_mode")
    return [
        annotation(
            "Reloads",
            "purple",
            f"sum by (instance, result) (increase({promql.of_processes('foretell_config_reloads_total')}[2m])) > 0",
            "Reload: {{result}}",
            "{{instance}}",
        ),
        annotation(
            "Gates",
            "orange",
            f"sum by (gate, to) (increase({promql.of_processes('foretell_gate_transitions_total')}[2m])) > 0",
            "Gate {{gate}} {{to}}",
            "",
        ),
        annotation(
            "Modes", "blue", f"changes({now}[2m]) > 0 and {now} == 1", "Mode {{mode}}", "{{backend}} at {{instance}}"
        ),
        annotation("Drain", "red", f"{promql.of_processes('foretell_draining')} > 0", "Drains", "{{instance}}"),
    ]


def annotation(name: str, color: str, expression: str, title: str, text: str) -> Json:
    return {
        "name": name,
        "datasource": SOURCE,
        "enable": True,
        "hide": False,
        "iconColor": color,
        "expr": expression,
        "step": "60s",
        "titleFormat": title,
        "textFormat": text,
        "useValueForTime": False,
    }
