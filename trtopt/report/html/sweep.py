"""A sweep's report as one HTML file that loads nothing else (see :mod:`trtopt.report.html.page`)."""

from __future__ import annotations

from collections.abc import Sequence

from trtopt.report.html.page import (
    Cell,
    Column,
    Draw,
    banners,
    description,
    drawing,
    name,
    numbers,
    page,
    quiet,
    scroll,
    section,
    table,
    text,
)
from trtopt.report.html.plots import HOVER_NAME, QUIET, Figure, base_layout
from trtopt.report.schema.sweep import SweepReport, SweepRow
from trtopt.report.text import sweep as forms
from trtopt.report.text.format import bytes_text, count, shorten, visible
from trtopt.support.version import VERSION

_COLORS = ("#3b82f6", "#e8890c", "#10a37f", "#e0457b", "#a855f7", "#0ea5b7", "#b45309", "#64748b")
_MOST_PLOTS = 30


def html_page(report: SweepReport, *, drop: float) -> str:
    """The page: the engine to take and a plot for each model, every job in a table, what failed.

    ``drop`` is the largest drop of accuracy of an engine to take, 0.01 = one point.

    Raises:
        MissingDependencyError: plotly is not installed.
    """
    draw = drawing()
    sections = (_head(report, drop), _plots(report, draw), _table(report), _failed(report), _about(report))
    return page(
        f"{visible(report.name)}: sweep",
        sections,
        styles=("analysis.css", "sweep.css"),
        scripts=("analysis.js", "sweep.js"),
    )


def _head(report: SweepReport, drop: float) -> str:
    models = list(dict.fromkeys(row.model for row in report.rows))
    choices = forms.choose(report, forms.EngineLimits(drop=drop))
    boxes = "".join(_tile(report, choice, drop) for choice in choices[:_MOST_PLOTS])
    lines = (line.replace("*:", "front:", 1) for line in forms.notes(report) if not line.startswith("warning:"))
    notes = "".join(quiet(text(line)) for line in lines)
    what = f"{forms.headline(report)}; {count(len(models), 'model')}"
    return f'<header><h1>{text(what)}</h1></header>{banners(report.warnings)}<div class="tiles">{boxes}</div>{notes}'


def _tile(report: SweepReport, choice: forms.Choice, drop: float) -> str:
    """The engine to take where accuracy may drop that far; else the nearest."""
    best = choice.best or choice.nearest
    if best is None or best.result is None:
        what = f"<b>no engine</b><span>none drops by at most {drop:g}, as far as is known</span>"
        return f'<div class="tile">{name(choice.model, 40)}{what}</div>'
    cost = f", {forms.cost_text(best.cost)} {report.currency} per million" if best.cost is not None else ""
    word = "the cheapest" if choice.by == "cost" else "the fastest an inference"
    word = f"{word} that drops by at most" if choice.best is not None else "none drops by at most"
    figures = f"{word} {drop:g}: {forms.latency_text(best)} {best.result.latency}, drop {forms.drop_text(best)}{cost}"
    engine = f"{text(best.gpu)} {text(best.precision)}"
    others = (axis for axis in forms.axes_of(report.rows) if axis not in ("model", "gpu", "precision"))
    varied = "".join(f"<span>{text(axis)} {name(best.varied[axis], 40)}</span>" for axis in others)
    what = f"<b>{engine}</b>{varied}<span>{text(figures)}</span>"
    return f'<div class="tile">{name(choice.model, 40)}{what}</div>'


def _plots(report: SweepReport, draw: Draw) -> str:
    groups: dict[tuple[str, str, str], list[SweepRow]] = {}
    for row in report.rows:
        found = row.result
        if found is not None and row.engine and found.drop is not None and found.latency_us:
            groups.setdefault((row.model, found.latency, found.measure), []).append(row)
    if not groups:
        return ""
    colors = {gpu: _COLORS[index % len(_COLORS)] for index, gpu in enumerate(dict.fromkeys(r.gpu for r in report.rows))}
    pieces = []
    for index, ((model, latency, measure), rows) in enumerate(list(groups.items())[:_MOST_PLOTS]):
        plot = draw(f"front-{index}", _figure(report, rows, measure, colors))
        pieces.append(section(f"{name(model)}, {text(latency)} times", plot))
    if len(groups) > _MOST_PLOTS:
        pieces.append(quiet(f"{count(len(groups) - _MOST_PLOTS, 'more plot')}: the table has them"))
    return "".join(pieces)


def _figure(report: SweepReport, rows: Sequence[SweepRow], measure: str, colors: dict[str, str]) -> Figure:
    """Latency against the drop of accuracy; what is on the front is filled, and larger."""
    data = []
    for gpu in dict.fromkeys(row.gpu for row in rows):
        chosen = [row for row in rows if row.gpu == gpu]
        figures = [(row.result.latency_us, row.result.drop) for row in chosen if row.result is not None]
        marker = {
            "color": colors[gpu],
            "symbol": ["diamond" if row.on_front else "circle-open" for row in chosen],
            "size": [14 if row.on_front else 9 for row in chosen],
        }
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": text(gpu),
                "x": [latency for latency, _ in figures],
                "y": [max(drop or 0.0, 0.0) for _, drop in figures],
                "hovertext": [_hover(report, row) for row in chosen],
                "hoverinfo": "text",
                "marker": marker,
            }
        )
    layout = base_layout(height=380)
    layout["xaxis"].update(title={"text": "microseconds of one run"}, type="log", exponentformat="none")
    top = max((row.result.drop or 0.0 for row in rows if row.result is not None), default=0.0)
    drop_of = text(shorten(visible(measure), 30))
    layout["yaxis"].update(
        title={"text": f"drop of {drop_of}"}, range=[-0.06 * top, 1.12 * top] if top > 0 else [-1e-3, 1e-2]
    )
    layout["hovermode"] = "closest"
    layout["showlegend"] = True
    layout["annotations"] = [
        {"text": "filled: Pareto front", "showarrow": False, "xref": "paper", "yref": "paper", "x": 1, "y": 1}
        | {"xanchor": "right", "yanchor": "bottom", "font": {"size": 11, "color": QUIET}}
    ]
    return {"data": data, "layout": layout}


def _hover(report: SweepReport, row: SweepRow) -> str:
    lines = [f"<b>{text(row.gpu)} {text(row.precision)}</b>"]
    lines += [
        f"{text(axis)} {text(shorten(visible(value), HOVER_NAME))}"
        for axis, value in row.varied.items()
        if axis not in ("gpu", "precision", "model")
    ]
    lines.append(f"{forms.latency_text(row)}, drop {forms.drop_text(row)}")
    if row.result is not None:
        lines.append(f"{bytes_text(row.result.engine_bytes)}, batch {row.result.batch}")
    if row.cost is not None:
        lines.append(f"{forms.cost_text(row.cost)} {text(report.currency)} per million")
    return "<br>".join(lines)


def _table(report: SweepReport) -> str:
    axes = forms.axes_of(report.rows)
    columns = [Column(axis) for axis in axes]
    columns += numbers("drop", "latency", "size", "kernels", "batch")
    columns += numbers(f"{report.currency} per million") if forms.has_costs(report.rows) else []
    columns += [Column("front"), Column("", "text")]
    body = table(columns, [_cells(report, row, axes) for row in report.rows], style="jobs", sorted_by=len(columns))
    body = body.replace('<table class="jobs">', '<table class="jobs" id="jobs">', 1)
    field = '<input type="search" data-table="jobs" placeholder="filter: words in any column" aria-label="filter">'
    return section("All jobs", field, scroll(body))


def _cells(report: SweepReport, row: SweepRow, axes: Sequence[str]) -> list[Cell]:
    found = row.result
    cells = [Cell(name(row.varied[axis], 40), visible(row.varied[axis])) for axis in axes]
    last = float("1e30")  # what is not known goes to the end of a column
    if found is None:
        cells += [Cell("", last) for _ in range(5)]
    else:
        cells += [
            Cell(forms.drop_text(row), last if found.drop is None else found.drop),
            Cell(text(forms.latency_text(row)), found.latency_us or last),
            Cell(bytes_text(found.engine_bytes) if row.engine else "", found.engine_bytes if row.engine else last),
            Cell(str(found.kernels), found.kernels),
            Cell(str(found.batch), found.batch),
        ]
    if forms.has_costs(report.rows):
        cells.append(Cell(forms.cost_text(row.cost), last if row.cost is None else row.cost))
    cells.append(Cell('<span class="front">front</span>' if row.on_front else ""))
    cells.append(Cell(text(forms.state_text(row))))
    return cells


def _failed(report: SweepReport) -> str:
    found = forms.failures(report)
    if not found:
        return ""
    rows = [[Cell(text(job)), Cell(text(why))] for job, why in found]
    body = table((Column("job"), Column("why", "text")), rows, style="findings", sorted_by=None)
    return section("Failed", scroll(body))


def _about(report: SweepReport) -> str:
    prices = {f"an hour of {gpu}": f"{price:g} {report.currency}" for gpu, price in report.prices.items()}
    values = {"store": report.store, "executor": report.executor, **prices, **report.environment}
    return section("What this rests on", description({**values, "trtopt": VERSION, "schema": report.schema}))
