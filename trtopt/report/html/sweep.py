"""The plots of a sweep, as the JSON of plotly."""

from __future__ import annotations

from collections.abc import Sequence

from trtopt.report.html.plots import QUIET, Figure, figure, label, trace
from trtopt.report.schema.sweep import SweepReport, SweepRow
from trtopt.report.text.format import bytes_text, shorten
from trtopt.report.text.sweep_rows import cost_text, drop_text, latency_text

_COLORS = ("#3b82f6", "#e8890c", "#10a37f", "#e0457b", "#a855f7", "#0ea5b7", "#b45309", "#64748b")


def front(report: SweepReport, rows: Sequence[SweepRow], measure: str) -> Figure:
    """Latency against the drop of accuracy; what is on the front is filled, and larger."""
    colors = {gpu: _COLORS[index % len(_COLORS)] for index, gpu in enumerate(dict.fromkeys(r.gpu for r in report.rows))}
    data = []
    for gpu in dict.fromkeys(row.gpu for row in rows):
        chosen = [row for row in rows if row.gpu == gpu]
        points = [
            (row.result.latency_us or 0.0, max(row.result.drop or 0.0, 0.0), _hover(report, row))
            for row in chosen
            if row.result is not None
        ]
        marker = {
            "color": colors[gpu],
            "symbol": ["diamond" if row.on_front else "circle-open" for row in chosen],
            "size": [14 if row.on_front else 9 for row in chosen],
        }
        texts = [label(row.precision) for row in chosen]
        look = {"text": texts, "textposition": "top center", "name": label(gpu), "marker": marker}
        data.append(trace("markers+text", points, **look))
    top = max((row.result.drop or 0.0 for row in rows if row.result is not None), default=0.0)
    x = {"title": {"text": "microseconds of one run"}, "type": "log", "exponentformat": "none"}
    y = {
        "title": {"text": f"drop of {label(shorten(measure, 30))}"},
        "range": [-0.06 * top, 1.12 * top] if top > 0 else [-1e-3, 1e-2],
    }
    note = {"text": "filled: Pareto front", "showarrow": False, "xref": "paper", "yref": "paper", "x": 1, "y": 1}
    note |= {"xanchor": "right", "yanchor": "bottom", "font": {"size": 11, "color": QUIET}}
    return figure(data, 380, x, y, hovermode="closest", showlegend=True, annotations=[note])


def _hover(report: SweepReport, row: SweepRow) -> str:
    lines = [f"<b>{label(row.gpu)} {label(row.precision)}</b>"]
    lines += [
        f"{label(axis)} {label(value)}"
        for axis, value in row.varied.items()
        if axis not in ("gpu", "precision", "model")
    ]
    lines.append(f"{latency_text(row)}, drop {drop_text(row)}")
    if row.result is not None:
        lines.append(f"{bytes_text(row.result.engine_bytes)}, batch {row.result.batch}")
    if row.cost is not None:
        lines.append(f"{cost_text(row.cost)} {label(report.currency)} per million")
    return "<br>".join(lines)
