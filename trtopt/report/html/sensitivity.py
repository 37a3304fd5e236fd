"""The plots of a sensitivity report, as the JSON of plotly."""

from __future__ import annotations

from collections.abc import Sequence

from trtopt.report.html.plots import Figure, base_layout, label
from trtopt.report.schema.sensitivity import GrowthStep, RegionError, noise_shares
from trtopt.report.text.format import count, decibels, percent

_FLOOR_DB = 120.0
"""What an SQNR without any error is drawn at."""


def regions(regions: Sequence[RegionError]) -> Figure:
    """Each region's share of the noise, in the order given."""
    shares = noise_shares(regions)
    texts = [
        f"<b>{label(region.nodes[0])}</b><br>{count(len(region.nodes), 'node')}"
        f"<br>{decibels(region.outputs[region.worst].sqnr_db)}<br>{percent(share)} of the noise"
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


def growth(steps: Sequence[GrowthStep]) -> Figure:
    """SQNR of what each region reads, and gives."""
    x = list(range(1, len(steps) + 1))
    names = [label(step.node) for step in steps]
    lines = (
        ("reads", "#8a8f98", [step.input_sqnr_db for step in steps]),
        ("gives", "#e0457b", [step.output_sqnr_db for step in steps]),
    )
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": word,
            "x": x,
            "y": [drawn(value) for value in values],
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
    return {"data": data, "layout": layout}


def drawn(sqnr_db: float) -> float:
    """A number that can be drawn and sorted: no NaN, no infinity."""
    return max(min(sqnr_db, _FLOOR_DB), -_FLOOR_DB) if sqnr_db == sqnr_db else -_FLOOR_DB
