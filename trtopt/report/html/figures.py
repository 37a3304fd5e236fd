"""What the plots of all pages share, as the JSON of plotly: axes, layers as points, the roofs of a device.

Colours of text, grid and paper come from the page's style sheet, which knows light and dark; what is set here is what
both can show.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from trtopt.report.schema.analysis import Limiter
from trtopt.report.text.analysis import LIMITERS, rate_of

Figure = dict[str, Any]

COLORS = {"math": "#3b82f6", "memory": "#e8890c", "latency": "#a855f7"}
"""By limiter; legible on white and on black, and told apart by those who see no red or green."""
SYMBOLS = {"math": "circle", "memory": "diamond", "latency": "square"}
QUIET = "#8a8f98"
_SMALLEST, _LARGEST, _LARGEST_OF_MANY = 5.0, 28.0, 14.0
"""Diameter in pixels of the least and the largest point; between them, the area is proportional to the time."""
_MANY = 200
"""Points from which on they are drawn smaller and without an outline, which would hide those below."""


@dataclass(frozen=True)
class Point:
    """A layer in a plot.

    Attributes:
        x: Where.
        y: Where.
        us: The time that its area stands for.
        limiter: What bounds its predicted time: the colour.
        hover: What is shown beside the pointer, in the tags that plotly takes, all else escaped.
        layer: Its index, for the page's script; None where a click shows nothing.
    """

    x: float
    y: float
    us: float
    limiter: Limiter
    hover: str
    layer: int | None = None


_LEAST = 1e-9
"""Of a figure that has a logarithm."""


def under_roofs(
    points: Sequence[Point],
    tflops: Mapping[str, float],
    bandwidth_gbs: float,
    strong: Iterable[str],
    l2_bandwidth_gbs: float | None = None,
) -> Figure:
    """A roofline plot.

    Args:
        points: Flop per byte against TFLOP/s.
        tflops: Peaks of the device by type, 1e12 operations per second.
        bandwidth_gbs: Its memory bandwidth in GB/s.
        strong: Types whose ceilings are drawn stronger.
        l2_bandwidth_gbs: As of :func:`roofline`.
    """
    ceilings = _ceilings(tflops)
    top = max(value for value, _ in ceilings)
    bandwidth = bandwidth_gbs / 1e3
    steepest = max(bandwidth, (l2_bandwidth_gbs or 0.0) / 1e3)
    intensities = [max(point.x, _LEAST) for point in points] or [1.0]
    achieved = [max(point.y, _LEAST) for point in points] or [bandwidth]
    left = min(min(intensities) / 2, 1.0)
    right = max(max(intensities) * 8, top / bandwidth * 10)
    rates = {rate_of(dtype) for dtype in strong}
    data: list[dict[str, Any]] = []
    for value, name in ceilings:
        own = not rates.isdisjoint(name.split(", "))
        words = f"{escape(name)}: {_rate(value)} TFLOP/s"
        data.append(grey_line([value / steepest, right], [value, value], words, strong=own))
    roofs = [("memory", bandwidth_gbs)]
    if l2_bandwidth_gbs is not None:
        roofs.append(("L2", l2_bandwidth_gbs))
    for name, rate in roofs:
        slope = rate / 1e3
        data.append(grey_line([left, top / slope], [left * slope, top], f"{name}: {rate:,.0f} GB/s", strong=True))
    data += markers(points)
    low = min(*achieved, left * bandwidth) / 2
    high = max(*achieved, top)
    layout = base_layout(height=560)
    layout["xaxis"].update(decades("arithmetic intensity, FLOP per byte", left, right))
    layout["yaxis"].update(decades("achieved TFLOP/s", low, high * 2.5))
    layout["annotations"] = [_roof_label(index, *roof, left, low, top) for index, roof in enumerate(roofs)]
    layout["annotations"] += [_ceiling_label(name, value) for value, name in ceilings]
    layout["hovermode"] = "closest"
    return {"data": data, "layout": layout}


def _ceilings(tflops: Mapping[str, float]) -> list[tuple[float, str]]:
    """Peaks in TFLOP/s, the highest first; types with the same one share a line."""
    groups: dict[float, list[str]] = {}
    for dtype, value in tflops.items():
        groups.setdefault(value, []).append(dtype)
    return sorted(((value, ", ".join(names)) for value, names in groups.items()), reverse=True)


def _rate(tflops: float) -> str:
    """Datasheets give whole figures; the measured rate of a CPU has digits without end."""
    return f"{tflops:g}" if tflops >= 1 else f"{tflops:.3g}"


def _ceiling_label(name: str, value: float) -> dict[str, Any]:
    """A label over the right end of a ceiling."""
    place = {"xref": "paper", "x": 1, "xanchor": "right", "y": math.log10(value), "yanchor": "bottom"}
    return {**place, "text": f"{escape(name)} {_rate(value)}", "showarrow": False, "font": {"size": 11}, "borderpad": 0}


def _roof_label(roof: int, name: str, rate: float, left: float, low: float, top: float) -> dict[str, Any]:
    """A label on the part of a slope that is seen: the first roof's below it, the second's, which is higher, above."""
    slope = rate / 1e3
    start, end = math.log10(max(left * slope, low)), math.log10(top)
    height = start + (end - start) * (0.2, 0.5)[roof]
    below = {"xanchor": "left", "yanchor": "top", "xshift": 6}
    above = {"xanchor": "right", "yanchor": "bottom", "xshift": -6}
    text = {"text": f"{name} {rate:,.0f} GB/s", "showarrow": False, "font": {"size": 11}}
    return {**text, **(below, above)[roof], "x": height - math.log10(slope), "y": height}


def markers(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Layers as points, a trace for each limiter."""
    longest = max((point.us for point in points), default=1.0)
    many = len(points) > _MANY
    largest = _LARGEST_OF_MANY if many else _LARGEST
    traces = []
    for limiter, word in LIMITERS.items():
        chosen = [point for point in points if point.limiter == limiter]
        trace: dict[str, Any] = {
            "type": "scatter",
            "mode": "markers",
            "name": f"limited by {word}",
            "x": [point.x for point in chosen],
            "y": [point.y for point in chosen],
            "hovertext": [point.hover for point in chosen],
            "hoverinfo": "text",
            "marker": {
                "color": COLORS[limiter],
                "symbol": SYMBOLS[limiter],
                "opacity": 0.5 if many else 0.75,
                "line": {"width": 0 if many else 1, "color": "rgba(128,128,128,0.8)"},
                "size": [max(largest * math.sqrt(point.us / longest), _SMALLEST) for point in chosen],
            },
            "visible": True if chosen else "legendonly",
            "showlegend": bool(chosen),
        }
        if any(point.layer is not None for point in chosen):
            trace["customdata"] = [point.layer for point in chosen]
        traces.append(trace)
    return traces


def grey_line(x: list[float], y: list[float], name: str, *, strong: bool) -> dict[str, Any]:
    """A grey line, named beside the pointer."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": x,
        "y": y,
        "name": name,
        "hoverinfo": "name",
        "showlegend": False,
        "line": {"color": QUIET, "width": 2.5 if strong else 1.2, "dash": "solid" if strong else "dash"},
    }


def decades(title: str, low: float, high: float) -> dict[str, Any]:
    """A logarithmic axis with one tick a decade."""
    return {
        "title": {"text": title},
        "type": "log",
        "range": [math.log10(low), math.log10(high)],
        "dtick": 1,
        "exponentformat": "power" if low < 1e-4 or high > 1e6 else "none",
    }


def base_layout(*, height: int) -> dict[str, Any]:
    """What all plots share: axes, colours, legend.

    Args:
        height: In pixels.
    """
    axis = {"gridcolor": "rgba(128,128,128,0.22)", "zeroline": False, "automargin": True, "fixedrange": False}
    return {
        "template": "none",
        "height": height,
        "margin": {"l": 56, "r": 16, "t": 44, "b": 60},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": QUIET},
        "hoverlabel": {"bgcolor": "#1f2430", "bordercolor": "#1f2430", "font": {"color": "#f4f4f5", "size": 12}}
        | {"align": "left"},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "itemsizing": "constant"}
        | {"traceorder": "normal"},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": QUIET, "activecolor": "#3b82f6"},
        "xaxis": dict(axis),
        "yaxis": dict(axis),
        "dragmode": False,
    }
