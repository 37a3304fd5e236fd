"""The plots of a sensitivity report, as the JSON of plotly."""

from __future__ import annotations

from collections.abc import Sequence

from trtopt.report.html.plots import Figure, figure, label, plain_bar, trace
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
    points = zip(range(1, len(regions) + 1), (100 * share for share in shares), texts, strict=True)
    x = {"title": {"text": "region, in order"}, "range": [0.5, len(regions) + 0.5]}
    y = {"title": {"text": "% of the noise"}, "rangemode": "tozero"}
    return figure([trace("bar", points, marker=plain_bar("#3b82f6"))], 320, x, y)


def growth(steps: Sequence[GrowthStep]) -> Figure:
    """SQNR of what each region reads, and gives."""
    names = [label(step.node) for step in steps]
    lines = (
        ("reads", "#8a8f98", [step.input_sqnr_db for step in steps]),
        ("gives", "#e0457b", [step.output_sqnr_db for step in steps]),
    )
    data = []
    for word, color, values in lines:
        points = [
            (place, drawn(value), f"<b>{node}</b><br>{word} {decibels(value)}")
            for place, (node, value) in enumerate(zip(names, values, strict=True), 1)
        ]
        data.append(trace("lines+markers", points, name=word, line={"color": color}))
    return figure(data, 320, {"title": {"text": "region, in order"}}, {"title": {"text": "SQNR, dB"}})


def drawn(sqnr_db: float) -> float:
    """A number that can be drawn and sorted: no NaN, no infinity."""
    return max(min(sqnr_db, _FLOOR_DB), -_FLOOR_DB) if sqnr_db == sqnr_db else -_FLOOR_DB
