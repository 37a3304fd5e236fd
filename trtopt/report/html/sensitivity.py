"""A sensitivity report as one HTML file that loads nothing else (see :mod:`trtopt.report.html.page`)."""

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
from trtopt.report.html.plots import HOVER_NAME, Figure, base_layout
from trtopt.report.schema.sensitivity import RegionError, Sensitivity, noise_shares
from trtopt.report.text.analysis import model_name
from trtopt.report.text.format import count, decibels, percent, shorten, visible
from trtopt.report.text.sensitivity import agreement_text, headline, sqnr_text
from trtopt.support.version import VERSION

_FLOOR_DB = 120.0
"""What an SQNR without any error is drawn at."""


def html(found: Sensitivity) -> str:
    """The page: one file of about 5 MB, without any request to the network.

    Raises:
        MissingDependencyError: plotly is not installed.
    """
    draw = drawing()
    sections = (_head(found), _regions(found, draw), _growth(found, draw), _refused(found), _assumptions(found))
    return page(f"{model_name(found)}, {found.precision}: sensitivity", sections)


def _head(found: Sensitivity) -> str:
    tiles = "".join(
        f'<div class="tile"><span>all regions, {name(output, 40)}</span><b>{text(sqnr_text(item))}</b>'
        f"<span>{text(f'same class {agreement_text(item)}' if item.disagreement is not None else '')}</span></div>"
        for output, item in found.together.outputs.items()
    )
    return f'<header><h1>{text(headline(found))}</h1></header>{banners(found.warnings)}<div class="tiles">{tiles}</div>'


def _regions(found: Sensitivity, draw: Draw) -> str:
    note = (
        "What the outputs lose when one region is in 8 bits and the rest in FP32, in the order of the graph."
        " Errors of different regions add up in power, so a region's share of the noise is what taking it back wins."
    )
    order = {step.region: index for index, step in enumerate(found.growth)}
    in_order = sorted(found.regions, key=lambda region: order.get(region.region, len(order)))
    columns = (
        *(Column("first node"), Column("reads"), *numbers("nodes", "SQNR", "same class", "noise", "flop")),
        *(Column("worst output"), *numbers("samples")),
    )
    rows = [_cells(region, share) for region, share in zip(found.regions, noise_shares(found.regions), strict=True)]
    body = scroll(table(columns, rows, style="layers", sorted_by=5))
    return section("One region alone", quiet(note), draw("regions", _region_plot(in_order)), body)


def _cells(region: RegionError, share: float) -> list[Cell]:
    worst = region.outputs[region.worst]
    agree = 0.0 if worst.disagreement is None else 1 - worst.disagreement
    return [
        Cell(name(region.nodes[0]), visible(region.nodes[0])),
        Cell(name(region.region), visible(region.region)),
        Cell(str(len(region.nodes)), len(region.nodes)),
        Cell(text(sqnr_text(worst)), _drawn(worst.sqnr_db)),
        Cell(agreement_text(worst), agree),
        Cell(percent(share), share),
        Cell("" if region.flop_share is None else percent(region.flop_share), region.flop_share or 0.0),
        Cell(name(region.worst, 40), visible(region.worst)),
        Cell(str(region.samples), region.samples),
    ]


def _region_plot(regions: Sequence[RegionError]) -> Figure:
    shares = noise_shares(regions)
    texts = [
        f"<b>{text(shorten(visible(region.nodes[0]), HOVER_NAME))}</b><br>{count(len(region.nodes), 'node')}"
        f"<br>{text(sqnr_text(region.outputs[region.worst]))}<br>{percent(share)} of the noise"
        for region, share in zip(regions, shares, strict=True)
    ]
    data = {
        "type": "bar",
        "x": list(range(1, len(regions) + 1)),
        "y": [100 * share for share in shares],
        "marker": {"color": "#3b82f6", "line": {"width": 0}},
        "hovertext": texts,
        "hoverinfo": "text",
    }
    layout = base_layout(height=320)
    layout["xaxis"].update(title={"text": "region, in order"}, range=[0.5, len(regions) + 0.5])
    layout["yaxis"].update(title={"text": "% of the noise"}, rangemode="tozero")
    return {"data": [data], "layout": layout}


def _growth(found: Sensitivity, draw: Draw) -> str:
    if not found.growth:
        return ""
    note = "SQNR against FP32 inside the network with all regions in 8 bits: of what each region reads, and gives."
    x = list(range(1, len(found.growth) + 1))
    names = [text(shorten(visible(step.node), HOVER_NAME)) for step in found.growth]
    lines = (
        ("reads", "#8a8f98", [step.input_sqnr_db for step in found.growth]),
        ("gives", "#e0457b", [step.output_sqnr_db for step in found.growth]),
    )
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": word,
            "x": x,
            "y": [_drawn(value) for value in values],
            "line": {"color": color},
            "hovertext": [
                f"<b>{node}</b><br>{word} {decibels(value)}" for node, value in zip(names, values, strict=True)
            ],
            "hoverinfo": "text",
        }
        for word, color, values in lines
    ]
    layout = base_layout(height=320)
    layout["xaxis"].update(title={"text": "region, in order"})
    layout["yaxis"].update(title={"text": "SQNR, dB"})
    plot = draw("growth", {"data": data, "layout": layout})
    return section("Along the network", quiet(note), plot)


def _drawn(sqnr_db: float) -> float:
    """A number that can be drawn and sorted: no NaN, no infinity."""
    return max(min(sqnr_db, _FLOOR_DB), -_FLOOR_DB) if sqnr_db == sqnr_db else -_FLOOR_DB


def _refused(found: Sensitivity) -> str:
    if not found.refused:
        return ""
    rows = [[Cell(name(item.node)), Cell(text(item.reason))] for item in found.refused]
    body = table((Column("node"), Column("reason")), rows, style="findings", sorted_by=None)
    return section("Products in no region", scroll(body))


def _assumptions(found: Sensitivity) -> str:
    values = {**found.model, "samples": found.samples, "trtopt": VERSION, "schema": found.schema}
    if found.calibration is not None:
        values["calibration"] = f"{found.calibration.source}, {found.calibration.samples} samples"
    return section("What this rests on", description(values))
