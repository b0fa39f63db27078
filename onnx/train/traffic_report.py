"""What `foretell train` says of a drafter: its README and an HTML page with its curve (traffic.py)."""

import html

import numpy as np

from traffic_data import CONTEXT


def shown(value):
    return "–" if value is None else f"{value:.2f}"


def table_rows(training):
    """[(group, before, after)] of the exported model, all of them together last."""
    found = training.compared(training.best["groups"], training.best["mean"])
    rows = [(name, *values.values()) for name, values in found["groups"].items()]
    return [*rows, ("all", *found["mean"].values())]


def card(training, settings, facts):
    """The README of the drafter."""
    cell = str.maketrans({"|": "\\|", "\n": " ", "\r": " "})
    rows = "\n".join(f"| {name.translate(cell)} | {shown(before)} | {shown(after)} |"
                     for name, before, after in table_rows(training))
    return f"""# A drafter trained on recorded traffic

Written by `foretell train` on {facts["date"]}.

**Its weights may reproduce texts that it was trained on, and the graph shows which tokens occur in them: treat this
folder like the recordings.**

* Trained on {facts["trained"]:,} requests of {facts["requests"]:,} recorded ones ({facts["tokens"]:,} tokens, prompts and
  outputs); {facts["held"]:,} were held out. Groups: {", ".join(name.translate(cell) for name in facts["groups"])}.
* {facts["seconds"]:,.0f} seconds of training, {training.step:,} steps, from {training.began_with}; the weights are those at
  {training.best["share"]:.0%} of the time, the best on the held-out requests.
* Size: {facts["parameters"]:,} parameters ({settings["num_hidden_layers"]} layers, hidden {settings["hidden_size"]}),
  {facts["megabytes"]} MB, float16 values; rows for {len(training.kept):,} of {settings["vocab_size"]:,} tokens, and one
  for all others, which it never drafts.
* Context: {CONTEXT:,} tokens. Behind them it drafts nothing.

## Acceptance

E[N]: output tokens per round with {training.args.drafted} greedily drafted tokens, on the held-out requests, against the
recorded outputs. Before: the model that the training began with. Requests of one conversation may be in both parts.

| group | before | after |
|---|---|---|
{rows}
"""


COLOURS = ("#2f7ed8", "#d9662b", "#2f9e61", "#b252c4", "#b8901c", "#17a2b0", "#d6457a", "#7a8494")
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Training of a drafter</title>
<style>
:root {{ color-scheme: light dark; --text: #1c2127; --faint: #68727d; --line: #d5dae0; --page: #fff; }}
@media (prefers-color-scheme: dark) {{ :root {{ --text: #e4e8ec; --faint: #9aa4ae; --line: #3a424b; --page: #15191e; }} }}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 48rem;
  margin: 2rem auto; padding: 0 1rem; }}
svg {{ width: 100%; height: auto; }} svg text {{ fill: var(--faint); font-size: 12px; }}
.axis {{ stroke: var(--line); }} .kept {{ stroke: var(--faint); stroke-dasharray: 4 4; }}
polyline {{ fill: none; stroke-width: 2; }}
table {{ border-collapse: collapse; }} td, th {{ padding: .2rem 1.2rem .2rem 0; text-align: left;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }}
.mark {{ display: inline-block; width: .8em; height: .8em; margin-right: .5em; border-radius: 2px; }}
</style></head><body>
<h1>Training of a drafter</h1>
<p>{date}: {trained:,} requests, {tokens:,} tokens, {seconds:,.0f} seconds; {held:,} requests held out.
{parameters:,} parameters.</p>
<h2>Tokens per round on held-out requests</h2>
<p>E[N] with {drafted} greedily drafted tokens, over the share of the training. The dashed line is the model that was kept.</p>
{chart}
<table><thead><tr><th>group</th><th>before</th><th>after</th></tr></thead><tbody>
{rows}
</tbody></table>
<p>The weights may reproduce texts that they were trained on: treat them like the recordings.</p>
</body></html>
"""


def chart(curve, names, best):
    """Lines of E[N] over the share of the training, as inline SVG."""
    width, height, left, right, bottom = 720, 320, 44, 28, 34
    values = [value for _, groups, mean in curve for value in [*groups.values(), mean]]
    low, high = 1.0, max([*values, 1.5])
    step = 0.5 if high < 5 else 1.0 if high < 10 else 2.0

    def x(share):
        return round(left + share * (width - left - right), 1)

    def y(value):
        return round(height - bottom - (value - low) / (high - low) * (height - bottom - 12), 1)

    parts = []
    for value in np.arange(low, high + 1e-9, step):
        parts.append(f'<line class="axis" x1="{left}" x2="{width - right}" y1="{y(value)}" y2="{y(value)}"/>'
                     f'<text x="{left - 8}" y="{y(value) + 4}" text-anchor="end">{value:.1f}</text>')
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<text x="{x(share)}" y="{height - 12}" text-anchor="middle">{share:.0%}</text>')
    parts.append(f'<line class="kept" x1="{x(best)}" x2="{x(best)}" y1="12" y2="{height - bottom}"/>')
    for index, name in enumerate(names):
        points = [(x(share), y(mean if name is None else groups[name])) for share, groups, mean in curve
                  if name is None or name in groups]
        colour = "currentColor" if name is None else COLOURS[index % len(COLOURS)]
        line = " ".join(f"{a},{b}" for a, b in points)
        dots = "".join(f'<circle cx="{a}" cy="{b}" r="2.5" fill="{colour}"/>' for a, b in points)
        parts.append(f'<polyline stroke="{colour}" points="{line}"/>{dots}')
    return (f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="Held-out tokens per round over the training">'
            f'{"".join(parts)}</svg>')


def report(training, facts):
    """The report as one HTML file without anything external."""
    rows = table_rows(training)
    names = [name for name, *_ in rows[:-1]] + [None]
    lines = []
    for index, (name, before, after) in enumerate(rows):
        colour = "currentColor" if index == len(rows) - 1 else COLOURS[index % len(COLOURS)]
        lines.append(f'<tr><td><span class="mark" style="background:{colour}"></span>{html.escape(name)}</td>'
                     f"<td>{shown(before)}</td><td>{shown(after)}</td></tr>")
    return PAGE.format(**{k: v for k, v in facts.items() if k != "groups"}, drafted=training.args.drafted,
                       chart=chart(training.curve, names, training.best["share"]), rows="\n".join(lines))
