"""The plots of all pages, as the JSON of plotly: axes, layers as points, the roofs of a device.

Colours of text, grid and paper come from the page's style sheet, which knows light and dark; what is set here is what
both can show.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from trtopt.report.schema.analysis import BatchSweep, LayerRow, Limiter
from trtopt.report.text.format import bytes_text, count, flop_text, page_time, percent, shorten, some, visible
from trtopt.report.text.words import LIMITERS, product_text, rate_of, slowest, tile_text

if TYPE_CHECKING:
    from trtopt.hardware.spec import GpuSpec
    from trtopt.report.schema.profile import ProfileLayer

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
    height: int = 560,
) -> Figure:
    """A roofline plot: flop per byte against TFLOP/s.

    Args:
        points: The layers.
        tflops: Peaks of the device by type, 1e12 operations per second.
        bandwidth_gbs: Its memory bandwidth in GB/s.
        strong: Types whose ceilings are drawn stronger.
        l2_bandwidth_gbs: As of :func:`roofline`.
        height: In pixels.
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
    texts = [_roof_label(index, *roof, left, low, top) for index, roof in enumerate(roofs)]
    texts += [_ceiling_label(name, value) for value, name in ceilings]
    axes = decades("arithmetic intensity, FLOP per byte", left, right), decades("achieved TFLOP/s", low, high * 2.5)
    return figure(data, height, *axes, annotations=texts, hovermode="closest")


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
        look = {
            "color": COLORS[limiter],
            "symbol": SYMBOLS[limiter],
            "opacity": 0.5 if many else 0.75,
            "line": {"width": 0 if many else 1, "color": "rgba(128,128,128,0.8)"},
            "size": [max(largest * math.sqrt(point.us / longest), _SMALLEST) for point in chosen],
        }
        indices = [point.layer for point in chosen]
        traces.append(
            trace("markers", [(point.x, point.y, point.hover) for point in chosen], name=f"limited by {word}")
            | {"marker": look, "visible": True if chosen else "legendonly", "showlegend": bool(chosen)}
            | ({"customdata": indices} if any(index is not None for index in indices) else {})
        )
    return traces


def trace(mode: str, points: Iterable[tuple[float, float, str]], **more: Any) -> dict[str, Any]:
    """Points of x, y and a text beside the pointer, drawn as plotly's ``mode`` says, or as bars (``bar``)."""
    kind = {"type": "bar"} if mode == "bar" else {"type": "scatter", "mode": mode}
    x, y, texts = map(list, zip(*points, strict=True)) if (points := list(points)) else ([], [], [])
    return {**kind, "x": x, "y": y, "hovertext": texts, "hoverinfo": "text", **more}


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


def figure(
    data: list[dict[str, Any]], height: int, x: Mapping[str, Any], y: Mapping[str, Any], **layout: Any
) -> Figure:
    """Traces in the layout that all plots share: what its axes have of their own, the rest; the height in pixels."""
    axis = {"gridcolor": "rgba(128,128,128,0.22)", "zeroline": False, "automargin": True, "fixedrange": False}
    shared = {
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
        "xaxis": {**axis, **x},
        "yaxis": {**axis, **y},
        "dragmode": False,
    }
    return {"data": data, "layout": {**shared, **layout}}


MOST_POINTS = 2000
"""Layers drawn in the roofline: beyond it a browser takes more than a second to open the page."""
MOST_BARS = 300
"""Bars over the layers in order: thinner ones cannot be told apart."""
_TALLEST_BUDGET = 2.0
"""Times the longest latency: a line of the budget above would flatten the curve."""
_TOUCHING = 100
"""Bars from which on there is no gap between them."""
HOVER_NAME = 46
"""Width of a name beside the pointer: a line fits a phone."""


def roofline(layers: Sequence[LayerRow], gpu: GpuSpec, precision: str, l2_bandwidth_gbs: float | None = None) -> Figure:
    """Arithmetic per byte against arithmetic per second, under what the GPU can do.

    The roofline of S. Williams, A. Waterman and D. Patterson, "Roofline: an insightful visual performance model for
    multicore architectures", Communications of the ACM 52(4), 2009.

    Args:
        layers: The layers; those without arithmetic have no place in a logarithmic plot.
        gpu: Its peaks and its bandwidth.
        precision: The one whose ceiling is drawn stronger; those of the types in use where it is not a type.
        l2_bandwidth_gbs: Bandwidth of the L2 in GB/s, for a second roof; None leaves it out.
    """
    drawn = slowest(placed(layers))[:MOST_POINTS]
    index = {id(layer): place for place, layer in enumerate(layers)}
    points = [
        Point(
            layer.arithmetic_intensity,
            layer.flop / layer.predicted_us / 1e6,
            layer.predicted_us,
            layer.limiter,
            hover_text(layer),
            index[id(layer)],
        )
        for layer in drawn
    ]
    strong = {precision} if rate_of(precision) in gpu.tflops else {layer.dtype for layer in drawn}
    return under_roofs(points, gpu.tflops, gpu.bandwidth_gbs, strong, l2_bandwidth_gbs)


def placed(layers: Sequence[LayerRow]) -> list[LayerRow]:
    """The layers that have a place in the roofline: arithmetic, bytes and time."""
    return [layer for layer in layers if layer.flop > 0 and layer.bytes > 0 and layer.predicted_us > 0]


def hover_text(layer: LayerRow) -> str:
    """What is shown of a layer beside the pointer, in the tags that plotly takes; names are escaped."""
    product, tile = product_text(layer), tile_text(layer)
    limiter = LIMITERS[layer.limiter]
    lines = [
        f"<b>{label(layer.name)}</b>",
        f"{label(layer.op)}, {layer.dtype}, {layer.kind}",
        f"<b>{page_time(layer.predicted_us)}</b>, limited by {limiter}",
        f"arithmetic {page_time(layer.math_us)}, memory {page_time(layer.memory_us)},"
        f" launch {page_time(layer.latency_us)}",
        f"{flop_text(layer.flop)}, {bytes_text(layer.bytes)}: {layer.arithmetic_intensity:.3g} FLOP per byte",
    ]
    if product:
        lines.append(f"m×n×k {product}")
    if tile:
        lines.append(f"tile {tile}: {count(layer.tiles, 'tile')} in {count(layer.waves, 'wave')}")
        used = f"{percent(layer.tile_efficiency)} of the tiles, {percent(layer.wave_efficiency)} of the waves"
        lines.append(f"used: {used}")
    lines.append(f"rows aligned to {layer.alignment_bytes} bytes")
    if layer.onnx_nodes and layer.onnx_nodes != (layer.name,):
        lines.append(f"computes {some([label(node) for node in layer.onnx_nodes], 1)}")
    return "<br>".join(lines)


def label(name: str) -> str:
    """A name of the model as plotly's text: short, visible, and no markup."""
    from rich.cells import cell_len

    return escape(shorten(visible(name), HOVER_NAME, mark="…", measure=cell_len), quote=False) or "(no name)"


def in_order(layers: Sequence[LayerRow]) -> Figure:
    """The time of each layer in the order they run; many layers share a bar, split by limiter."""
    size = group_size(len(layers))
    groups = [layers[start : start + size] for start in range(0, len(layers), size)]
    texts = [_bar_text(group, index * size + 1) for index, group in enumerate(groups)]
    data = []
    for limiter, word in LIMITERS.items():
        values = [sum(layer.predicted_us for layer in group if layer.limiter == limiter) for group in groups]
        places = (index * size + (size - 1) / 2 + 1 for index in range(len(groups)))
        more: dict[str, Any] = {"customdata": list(range(len(layers)))} if size == 1 else {}
        more |= {"name": f"limited by {word}", "showlegend": any(values), "marker": plain_bar(COLORS[limiter])}
        width = size if len(groups) > _TOUCHING else 0.9 * size
        data.append(trace("bar", zip(places, values, texts, strict=True), width=width, **more))
    x = {"title": {"text": "layer, in order"}, "range": [0.5, max(len(layers), 1) + 0.5]}
    y = {"title": {"text": "µs" if size == 1 else f"µs per {size} layers"}, "rangemode": "tozero"}
    return figure(data, 320, x, y, barmode="stack", bargap=0)


def plain_bar(color: str) -> dict[str, Any]:
    """A bar without an outline."""
    return {"color": color, "line": {"width": 0}}


def group_size(layers: int) -> int:
    """How many layers share a bar of :func:`in_order`."""
    return max(math.ceil(layers / MOST_BARS), 1)


def _bar_text(group: Sequence[LayerRow], first: int) -> str:
    if len(group) == 1:
        return f"{first}: {hover_text(group[0])}"
    total = page_time(sum(layer.predicted_us for layer in group))
    worst = slowest(group)[:3]
    lines = [f"{label(layer.name)}: {page_time(layer.predicted_us)}" for layer in worst]
    return "<br>".join([f"<b>layers {first} to {first + len(group) - 1}: {total}</b>", "the slowest:", *lines])


def batch_curve(sweep: BatchSweep) -> Figure:
    """Throughput and latency over the batch, with the knee, the budget, and the best batch within it."""
    batches = [point.batch for point in sweep.points]
    texts = [
        f"<b>batch {point.batch}</b><br>{page_time(point.predicted_us)}"
        f"<br>{point.throughput:,.0f} samples/s<br>{bytes_text(point.activation_bytes)} of activations"
        + ("" if point.fits else ": <b>does not fit</b>")
        for point in sweep.points
    ]
    mode = "lines+markers" if len(batches) <= 40 else "lines"
    curves: tuple[tuple[str, str, dict[str, Any], list[float]], ...] = (
        ("throughput", "#10a37f", {}, [point.throughput for point in sweep.points]),
        ("latency", "#e0457b", {"yaxis": "y2"}, [point.predicted_us / 1e3 for point in sweep.points]),
    )
    data = [
        trace(
            mode, zip(batches, values, texts, strict=True), name=name, line={"color": color}, showlegend=False, **axis
        )
        for name, color, axis, values in curves
    ]
    x = {"title": {"text": "batch"}, "type": "log", "anchor": "y2", "tickvals": _ticks(batches)}
    y = {"title": {"text": "samples/s"}, "domain": [0.54, 1], "rangemode": "tozero"}
    shapes, notes = _marks(sweep)
    found = figure(data, 460, {**x, "exponentformat": "none"}, y, shapes=shapes, annotations=notes)
    axes = found["layout"]
    axes["yaxis2"] = {**axes["yaxis"], "title": {"text": "latency, ms"}, "domain": [0, 0.46]}
    return found


def _ticks(batches: Sequence[int]) -> list[int]:
    """What to name on the axis: the batches, or where they are many or crowded, the powers of two in their range."""
    if len(batches) <= 12 and all(high >= low * math.sqrt(2) for low, high in itertools.pairwise(batches)):
        return list(batches)
    doublings = [1 << power for power in range(batches[-1].bit_length()) if 1 << power >= batches[0]]
    return doublings if len(doublings) > 1 else [batches[0], batches[-1]]


def _marks(sweep: BatchSweep) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines over the batch curve, and what they are called."""
    best = sweep.best_within_budget
    marks = [(sweep.knee, "knee" if best != sweep.knee else "knee, best within the budget")]
    if best is not None and best != sweep.knee:
        marks.append((best, "best within the budget"))
    first, last = math.log10(sweep.points[0].batch), math.log10(sweep.points[-1].batch)
    shapes: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    for place, (batch, words) in enumerate(marks):
        x = math.log10(batch)
        line = {"type": "line", "x0": batch, "x1": batch, "yref": "paper", "y0": 0, "y1": 1}
        shapes.append({**line, "line": {"dash": "dot", "color": QUIET, "width": 1.5}})
        end = "left" if x < (first + last) / 2 or first == last else "right"
        texts.append({"x": x, "yref": "paper", "y": 1.0, "text": f"{words}: {batch}", "showarrow": False})
        texts[-1].update(xanchor=end, yanchor="bottom", yshift=2 + 16 * place)
    longest = max(point.predicted_us for point in sweep.points)
    if sweep.budget_us is not None and sweep.budget_us <= _TALLEST_BUDGET * longest:
        level = sweep.budget_us / 1e3
        line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": "y2", "y0": level, "y1": level}
        shapes.append({**line, "line": {"dash": "dash", "color": "#e0457b", "width": 1.5}})
        place_of_text = {"xref": "paper", "x": 0, "yref": "y2", "y": level, "xanchor": "left", "yanchor": "bottom"}
        budget = f"budget {page_time(sweep.budget_us)}"
        texts.append({**place_of_text, "text": budget, "xshift": 4, "showarrow": False})
    return shapes, texts


_ROOM = 2.0
"""Between the outermost points and the edge of the plot, as a factor."""


def compared(layers: Sequence[ProfileLayer]) -> list[int]:
    """Indices of the layers with a measured and a predicted time, the slowest first."""
    both = [index for index, layer in enumerate(layers) if layer.measured_us > 0 and (layer.predicted_us or 0) > 0]
    return sorted(both, key=lambda index: -layers[index].measured_us)


def measured_placed(layers: Sequence[ProfileLayer]) -> list[int]:
    """Those of them with arithmetic and bytes: they have a place in the roofline."""
    rows = {index: layers[index].predicted for index in compared(layers)}
    return [index for index, row in rows.items() if row is not None and row.flop > 0 and row.bytes > 0]


def scatter(layers: Sequence[ProfileLayer]) -> Figure:
    """Measured against predicted time on logarithmic axes, with the diagonal and the lines of twice and half."""
    points = [
        Point(row.predicted_us, layer.measured_us, layer.measured_us, row.limiter, _measured_hover(layer, row), index)
        for index, layer, row in _drawn(layers, compared(layers))
    ]
    times = [value for point in points for value in (point.x, point.y)] or [1.0]
    low, high = min(times) / _ROOM, max(times) * _ROOM
    data = [
        grey_line([low, high], [factor * low, factor * high], words, strong=factor == 1)
        for factor, words in ((1.0, "as predicted"), (2.0, "twice the prediction"), (0.5, "half the prediction"))
    ]
    axes = ({**decades(f"{word}, µs", low, high), "dtick": "D2"} for word in ("predicted", "measured"))
    return figure([*data, *markers(points)], 480, *axes, hovermode="closest")


def _drawn(layers: Sequence[ProfileLayer], indices: Sequence[int]) -> Iterator[tuple[int, ProfileLayer, LayerRow]]:
    """The layers of which points are drawn, with their predictions."""
    for index in indices[:MOST_POINTS]:
        if (row := layers[index].predicted) is not None:
            yield index, layers[index], row


def measured_roofline(layers: Sequence[ProfileLayer], device: Mapping[str, Any]) -> Figure:
    """The rates that the layers achieved, under the peaks and the bandwidth of the device.

    ``device`` is ``ProfileReport.gpu``: ``tflops`` by type and ``bandwidth_gbs``.
    """
    drawn = list(_drawn(layers, measured_placed(layers)))
    points = [
        Point(
            row.arithmetic_intensity,
            row.flop / layer.measured_us / 1e6,
            layer.measured_us,
            row.limiter,
            _measured_hover(layer, row),
            index,
        )
        for index, layer, row in drawn
    ]
    types = {row.dtype for _, _, row in drawn}
    return under_roofs(points, device["tflops"], device["bandwidth_gbs"], types, height=480)


def _measured_hover(layer: ProfileLayer, row: LayerRow) -> str:
    shares = [
        f"{percent(share)} of the {word}"
        for share, word in ((layer.math_share, "peak arithmetic"), (layer.bandwidth_share, "bandwidth"))
        if share is not None
    ]
    lines = [
        f"<b>{label(layer.name)}</b>",
        f"{label(row.op)}, {label(row.dtype)}, {label(row.kind)}",
        f"<b>{page_time(layer.measured_us)}</b>, predicted {page_time(row.predicted_us)},"
        f" limited by {LIMITERS[row.limiter]}",
        f"{flop_text(row.flop)}, {bytes_text(row.bytes)}: {row.arithmetic_intensity:.3g} FLOP per byte",
        *([", ".join(shares)] if shares else []),
        *(label(item.reason) for item in layer.deviation),
    ]
    return "<br>".join(lines)
