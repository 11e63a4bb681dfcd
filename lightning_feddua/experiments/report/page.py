"""A report in one HTML file: charts, table, recipes and environment. It needs no network."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lightning_feddua.experiments.comparison_table import Summary
from lightning_feddua.experiments.plots import PANELS, TITLES, method_styles
from lightning_feddua.experiments.results import Method, metric_names, spans_decades
from lightning_feddua.files import writable
from lightning_feddua.metric_names import DIAGNOSTICS

# Longer runs are thinned out in the charts; the CSV logs have every round.
_MOST_POINTS = 1000
_FOLDER = Path(__file__).parent


def write_report(summary: Summary, path: Path, title: str) -> None:
    """Write the report.

    Args:
        summary: the methods to report on, and their table.
        path: the HTML file.
        title: of the page.
    """
    methods = summary.methods
    parts = {
        "title": html.escape(title),
        "style": (_FOLDER / "style.css").read_text(),
        "script": (_FOLDER / "charts.js").read_text(),
        "data": _json(chart_data(methods)),
        "table": _table(summary),
        "environment": _environment(methods),
        "recipes": "\n".join(map(_recipe, methods)),
    }
    template = (_FOLDER / "template.html").read_text()
    # In one pass, so that nothing in a part is taken for a place to fill.
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)
    with writable(path):
        # Names of folders, and what JSON can say, may be no text.
        path.write_text(page, encoding="utf-8", errors="replace")


def chart_data(methods: Sequence[Method]) -> dict[str, Any]:
    """What the charts show: a style for each method; for each metric the curves, null for what is not drawn."""
    styles = method_styles(method.name for method in methods)
    return {
        "methods": [
            {"name": method.name, "panel": PANELS[method.momentum], **styles[method.name]._asdict()}
            for method in methods
        ],
        "charts": [_chart(methods, metric) for metric in metric_names(methods)],
    }


def _chart(methods: Sequence[Method], metric: str) -> dict[str, Any]:
    log = spans_decades(methods, metric)
    series = []
    for index, method in enumerate(methods):
        if not method.has(metric):
            continue
        curve = method.curve(metric, log)
        count = len(curve.rounds)
        shown = np.unique(np.linspace(0, count - 1, min(count, _MOST_POINTS)).round().astype(int))
        smooth = curve.running_median() if metric in DIAGNOSTICS else None
        band = len(method.runs) > 1 and smooth is None
        series.append(
            {
                "method": index,
                "rounds": curve.rounds[shown].tolist(),
                "mean": _numbers(curve.mean[shown]),
                "smooth": None if smooth is None else _numbers(smooth[shown]),
                "low": _numbers(curve.low[shown]) if band else None,
                "high": _numbers(curve.high[shown]) if band else None,
            }
        )
    return {"metric": metric, "title": TITLES.get(metric, metric), "log": log, "series": series}


def _numbers(values: np.ndarray) -> list[float | None]:
    """Six digits are enough for a chart. JSON has no NaN."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _json(value: Any) -> str:
    # A `<` could end the script element that holds the text.
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _table(summary: Summary) -> str:
    head = "".join(f"<th>{html.escape(metric)}</th>" for metric in summary.metrics)
    rows = []
    for method in summary.methods:
        cells = [summary.cells[method.name, metric] for metric in summary.metrics]
        texts = [f"<strong>{cell}</strong>" if cell.best else str(cell) for cell in cells]
        row = "".join(f"<td>{text}</td>" for text in texts)
        rows.append(f"<tr><th>{html.escape(method.name)}</th>{row}<td>{len(method.runs)}</td></tr>")
    return (
        f"<table><thead><tr><th>method</th>{head}<th>runs</th></tr></thead><tbody>{''.join(rows)}</tbody></table>"
        f"<p>{html.escape(summary.caption)}</p>"
    )


def _environment(methods: Sequence[Method]) -> str:
    """Versions and kind of machine; several values where the runs differ."""
    found: dict[str, dict[str, None]] = {}
    for method in methods:
        for run in method.runs:
            environment = run.info.get("environment")
            for name, value in environment.items() if isinstance(environment, dict) else ():
                found.setdefault(str(name), {})[str(value)] = None
    rows = [
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(' or '.join(values))}</td></tr>"
        for name, values in found.items()
    ]
    return f"<table>{''.join(rows)}</table>" if rows else "<p>The runs did not note it.</p>"


def _recipe(method: Method) -> str:
    parts = []
    for run in method.runs[:1]:
        lines = run.info.get("header")
        header = "\n".join(map(str, lines)) if isinstance(lines, list) else ""
        recipe = yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True) if run.recipe else "none was saved"
        parts += [f"<pre>{html.escape(header)}</pre>" if header else "", f"<pre>{html.escape(recipe)}</pre>"]
    folders = "".join(f"<li><code>{html.escape(str(run.folder))}</code></li>" for run in method.runs)
    return (
        f"<details><summary>{html.escape(method.name)}</summary>"
        f"<p>Of the first of {len(method.runs)} runs, which differ in their seeds.</p>{''.join(parts)}"
        f"<ul>{folders}</ul></details>"
    )
