"""The plots of a profile: measured against predicted, and the measured rates under the device's roofs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtopt.report.html.analysis_plots import MOST_POINTS, label
from trtopt.report.html.figures import Figure, Point, base_layout, decades, grey_line, markers, under_roofs
from trtopt.report.schema.profile import ProfileLayer
from trtopt.report.text.analysis import LIMITERS
from trtopt.report.text.format import bytes_text, flop_text, percent, time_text

_ROOM = 2.0
"""Between the outermost points and the edge of the plot, as a factor."""


def compared(layers: Sequence[ProfileLayer]) -> list[int]:
    """Indices of the layers with a measured and a predicted time, the slowest first."""
    both = [index for index, layer in enumerate(layers) if layer.measured_us > 0 and (layer.predicted_us or 0) > 0]
    return sorted(both, key=lambda index: -layers[index].measured_us)


def placed(layers: Sequence[ProfileLayer]) -> list[int]:
    """Those of them with arithmetic and bytes: they have a place in the roofline."""
    rows = {index: layers[index].predicted for index in compared(layers)}
    return [index for index, row in rows.items() if row is not None and row.flop > 0 and row.bytes > 0]


def scatter(layers: Sequence[ProfileLayer]) -> Figure:
    """Measured against predicted time on logarithmic axes, with the diagonal and the lines of twice and half."""
    points = []
    for index in compared(layers)[:MOST_POINTS]:
        layer = layers[index]
        if (row := layer.predicted) is not None:
            us = layer.measured_us
            points.append(Point(row.predicted_us, us, us, row.limiter, _hover(layer), index))
    times = [value for point in points for value in (point.x, point.y)] or [1.0]
    low, high = min(times) / _ROOM, max(times) * _ROOM
    data = [
        grey_line([low, high], [factor * low, factor * high], words, strong=factor == 1)
        for factor, words in ((1.0, "as predicted"), (2.0, "twice the prediction"), (0.5, "half the prediction"))
    ]
    layout = base_layout(height=480)
    layout["xaxis"].update(decades("predicted, µs", low, high), dtick="D2")
    layout["yaxis"].update(decades("measured, µs", low, high), dtick="D2")
    layout["hovermode"] = "closest"
    return {"data": [*data, *markers(points)], "layout": layout}


def roofline(layers: Sequence[ProfileLayer], device: Mapping[str, Any]) -> Figure:
    """The rates that the layers achieved, under the peaks and the bandwidth of the device.

    Args:
        layers: The layers.
        device: ``ProfileReport.gpu``: ``tflops`` by type and ``bandwidth_gbs``.
    """
    points, types = [], set()
    for index in placed(layers)[:MOST_POINTS]:
        layer = layers[index]
        if (row := layer.predicted) is not None:
            us = layer.measured_us
            points.append(Point(row.arithmetic_intensity, row.flop / us / 1e6, us, row.limiter, _hover(layer), index))
            types.add(row.dtype)
    figure = under_roofs(points, device["tflops"], device["bandwidth_gbs"], types)
    figure["layout"]["height"] = 480
    return figure


def _hover(layer: ProfileLayer) -> str:
    row = layer.predicted
    if row is None:
        return label(layer.name)
    shares = [
        f"{percent(share)} of the {word}"
        for share, word in ((layer.math_share, "peak arithmetic"), (layer.bandwidth_share, "bandwidth"))
        if share is not None
    ]
    lines = [
        f"<b>{label(layer.name)}</b>",
        f"{label(row.op)}, {label(row.dtype)}, {label(row.kind)}",
        f"<b>{time_text(layer.measured_us, micro='µ')}</b>, predicted {time_text(row.predicted_us, micro='µ')},"
        f" limited by {LIMITERS[row.limiter]}",
        f"{flop_text(row.flop)}, {bytes_text(row.bytes)}: {row.arithmetic_intensity:.3g} FLOP per byte",
        *([", ".join(shares)] if shares else []),
        *(label(item.reason) for item in layer.deviation),
    ]
    return "<br>".join(lines)
