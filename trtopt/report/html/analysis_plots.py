"""The plots of an analysis, as the JSON of plotly: data and layout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from trtopt.report.html.figures import COLORS, QUIET, Figure, Point, base_layout, under_roofs
from trtopt.report.schema.analysis import BatchSweep, LayerRow
from trtopt.report.text.analysis import LIMITERS, product_text, rate_of, slowest, tile_text
from trtopt.report.text.format import bytes_text, count, flop_text, percent, shorten, some, time_text, visible

if TYPE_CHECKING:
    from trtopt.hardware.spec import GpuSpec

MOST_POINTS = 2000
"""Layers drawn in the roofline: beyond it a browser takes more than a second to open the page."""
MOST_BARS = 300
"""Bars over the layers in order: thinner ones cannot be told apart."""
_TALLEST_BUDGET = 2.0
"""Times the longest latency: a line of the budget above would flatten the curve."""
_TOUCHING = 100
"""Bars from which on there is no gap between them."""
_HOVER_NAME = 46
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
    points = [
        Point(
            layer.arithmetic_intensity,
            layer.flop / layer.predicted_us / 1e6,
            layer.predicted_us,
            layer.limiter,
            hover_text(layer),
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
    product, tile = product_text(layer, times="×"), tile_text(layer, times="×")
    limiter = LIMITERS[layer.limiter]
    lines = [
        f"<b>{label(layer.name)}</b>",
        f"{label(layer.op)}, {layer.dtype}, {layer.kind}",
        f"<b>{time_text(layer.predicted_us, micro='µ')}</b>, limited by {limiter}",
        f"arithmetic {time_text(layer.math_us, micro='µ')}, memory {time_text(layer.memory_us, micro='µ')},"
        f" launch {time_text(layer.latency_us, micro='µ')}",
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

    return escape(shorten(visible(name), _HOVER_NAME, mark="…", measure=cell_len), quote=False) or "(no name)"


def in_order(layers: Sequence[LayerRow]) -> Figure:
    """The time of each layer in the order they run; many layers share a bar, split by limiter."""
    size = group_size(len(layers))
    groups = [layers[start : start + size] for start in range(0, len(layers), size)]
    data = []
    for limiter, word in LIMITERS.items():
        values = [sum(layer.predicted_us for layer in group if layer.limiter == limiter) for group in groups]
        data.append(
            {
                "type": "bar",
                "name": f"limited by {word}",
                "x": [index * size + (size - 1) / 2 + 1 for index in range(len(groups))],
                "y": values,
                "width": size if len(groups) > _TOUCHING else 0.9 * size,
                "marker": {"color": COLORS[limiter], "line": {"width": 0}},
                "hovertext": [_bar_text(group, index * size + 1) for index, group in enumerate(groups)],
                "hoverinfo": "text",
                "showlegend": any(values),
            }
        )
    layout = base_layout(height=320)
    layout.update(barmode="stack", bargap=0)
    layout["xaxis"].update(title={"text": "layer, in order"}, range=[0.5, max(len(layers), 1) + 0.5])
    layout["yaxis"].update(title={"text": "µs" if size == 1 else f"µs per {size} layers"}, rangemode="tozero")
    return {"data": data, "layout": layout}


def group_size(layers: int) -> int:
    """How many layers share a bar of :func:`in_order`."""
    return max(math.ceil(layers / MOST_BARS), 1)


def _bar_text(group: Sequence[LayerRow], first: int) -> str:
    if len(group) == 1:
        return f"{first}: {hover_text(group[0])}"
    total = time_text(sum(layer.predicted_us for layer in group), micro="µ")
    worst = slowest(group)[:3]
    lines = [f"{label(layer.name)}: {time_text(layer.predicted_us, micro='µ')}" for layer in worst]
    return "<br>".join([f"<b>layers {first} to {first + len(group) - 1}: {total}</b>", "the slowest:", *lines])


def batch_curve(sweep: BatchSweep) -> Figure:
    """Throughput and latency over the batch, with the knee, the budget, and the best batch within it."""
    batches = [point.batch for point in sweep.points]
    texts = [
        f"<b>batch {point.batch}</b><br>{time_text(point.predicted_us, micro='µ')}"
        f"<br>{point.throughput:,.0f} samples/s<br>{bytes_text(point.activation_bytes)} of activations"
        + ("" if point.fits else ": <b>does not fit</b>")
        for point in sweep.points
    ]
    mode = "lines+markers" if len(batches) <= 40 else "lines"
    shared = {"type": "scatter", "mode": mode, "x": batches, "hovertext": texts, "hoverinfo": "text"}
    data = [
        {**shared, "name": "throughput", "y": [point.throughput for point in sweep.points]}
        | {"line": {"color": "#10a37f"}, "showlegend": False},
        {**shared, "name": "latency", "y": [point.predicted_us / 1e3 for point in sweep.points], "yaxis": "y2"}
        | {"line": {"color": "#e0457b"}, "showlegend": False},
    ]
    layout = base_layout(height=460)
    layout["xaxis"].update(
        title={"text": "batch"}, type="log", anchor="y2", tickvals=_ticks(batches), exponentformat="none"
    )
    layout["yaxis"].update(title={"text": "samples/s"}, domain=[0.54, 1], rangemode="tozero")
    layout["yaxis2"] = {**layout["yaxis"], "title": {"text": "latency, ms"}, "domain": [0, 0.46]}
    layout["shapes"], layout["annotations"] = _marks(sweep)
    return {"data": data, "layout": layout}


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
        budget = f"budget {time_text(sweep.budget_us, micro='µ')}"
        texts.append({**place_of_text, "text": budget, "xshift": 4, "showarrow": False})
    return shapes, texts
