"""The plots of all pages, as the JSON of plotly: axes, layers as points, the roofs of a device.

Colours of text, grid and paper come from the page's style sheet, which knows light and dark; what is set here is what
both can show.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from trtopt.report.schema.analysis import BatchSweep, LayerRow
from trtopt.report.schema.profile import ProfileLayer, slowest
from trtopt.report.schema.sensitivity import GrowthStep, RegionError, noise_shares
from trtopt.report.schema.sweep import SweepRow
from trtopt.report.text.format import bytes_text, count, decibels, flop_text, page_time, percent, shorten, some, visible
from trtopt.report.text.names import named
from trtopt.report.text.words import LIMITERS, product_text, rate_of, tile_text

Figure = dict[str, Any]

COLORS = {"math": "#3b82f6", "memory": "#e8890c", "latency": "#a855f7"}
"""By limiter; legible on white and on black, and told apart by those who see no red or green."""
SYMBOLS = {"math": "circle", "memory": "diamond", "latency": "square"}
QUIET = "#8a8f98"
_SMALLEST, _LARGEST, _LARGEST_OF_MANY = 5.0, 28.0, 14.0
"""Diameter in pixels of the least and the largest point; between them, the area is proportional to the time."""
_MANY = 200
"""Points from which on they are drawn smaller and without an outline, which would hide those below."""


Point = tuple[int, ProfileLayer, LayerRow, float, float]
"""A layer in a plot: its index, for the page's script; itself, whose time is its area; its prediction, whose limiter is
its colour; x and y."""

_LEAST = 1e-9
"""Of a figure that has a logarithm."""


def _under_roofs(
    points: Sequence[Point],
    tflops: Mapping[str, float],
    bandwidth_gbs: float,
    strong: Iterable[str],
    l2_bandwidth_gbs: float | None = None,
) -> Figure:
    """A roofline plot; ``strong`` are the types whose ceilings are drawn stronger."""
    ceilings = _ceilings(tflops)
    top = max(value for value, _ in ceilings)
    bandwidth = bandwidth_gbs / 1e3
    steepest = max(bandwidth, (l2_bandwidth_gbs or 0.0) / 1e3)
    intensities = [max(x, _LEAST) for *_, x, _ in points]
    achieved = [max(y, _LEAST) for *_, y in points]
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
    return figure(data, 520, *axes, annotations=texts, hovermode="closest")


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
    longest = max((layer.measured_us for _, layer, *_ in points), default=1.0)
    many = len(points) > _MANY
    largest = _LARGEST_OF_MANY if many else _LARGEST
    traces = []
    for limiter, word in LIMITERS.items():
        chosen = [point for point in points if point[2].limiter == limiter]
        look = {
            "color": COLORS[limiter],
            "symbol": SYMBOLS[limiter],
            "opacity": 0.5 if many else 0.75,
            "line": {"width": 0 if many else 1, "color": "rgba(128,128,128,0.8)"},
            "size": [max(largest * math.sqrt(layer.measured_us / longest), _SMALLEST) for _, layer, *_ in chosen],
        }
        dots = [(x, y, hover_text(layer, row)) for _, layer, row, x, y in chosen]
        traces.append(
            trace("markers", dots, name=f"limited by {word}", customdata=[index for index, *_ in chosen])
            | {"marker": look, "visible": True if chosen else "legendonly", "showlegend": bool(chosen)}
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


def roofline(
    layers: Sequence[ProfileLayer],
    tflops: Mapping[str, float],
    bandwidth_gbs: float,
    precision: str = "",
    l2_bandwidth_gbs: float | None = None,
) -> Figure:
    """Arithmetic per byte against arithmetic per second, under what the device can do.

    The roofline of S. Williams, A. Waterman and D. Patterson, "Roofline: an insightful visual performance model for
    multicore architectures", Communications of the ACM 52(4), 2009.

    Args:
        layers: The layers; those without arithmetic have no place in a logarithmic plot.
        tflops: Peaks of the device by type, 1e12 operations per second.
        bandwidth_gbs: Its memory bandwidth in GB/s.
        precision: The one whose ceiling is drawn stronger; those of the types in use where it is not a type.
        l2_bandwidth_gbs: Bandwidth of the L2 in GB/s, for a second roof; None leaves it out.
    """
    drawn = list(_drawn(layers, placed(layers)))
    points = [
        (index, layer, row, row.arithmetic_intensity, row.flop / layer.measured_us / 1e6) for index, layer, row in drawn
    ]
    strong = {precision} if rate_of(precision) in tflops else {row.dtype for _, _, row in drawn}
    return _under_roofs(points, tflops, bandwidth_gbs, strong, l2_bandwidth_gbs)


def compared(layers: Sequence[ProfileLayer]) -> list[int]:
    """Indices of the layers with a measured and a predicted time, the slowest first."""
    both = [index for index, layer in enumerate(layers) if layer.measured_us > 0 and (layer.predicted_us or 0) > 0]
    return sorted(both, key=lambda index: -layers[index].measured_us)


def placed(layers: Sequence[ProfileLayer]) -> list[int]:
    """Those of them with arithmetic and bytes: they have a place in the roofline."""
    rows = {index: layers[index].predicted for index in compared(layers)}
    return [index for index, row in rows.items() if row is not None and row.flop > 0 and row.bytes > 0]


def _drawn(layers: Sequence[ProfileLayer], indices: Sequence[int]) -> Iterator[tuple[int, ProfileLayer, LayerRow]]:
    """The layers of which points are drawn, with their predictions."""
    for index in indices[:MOST_POINTS]:
        if (row := layers[index].predicted) is not None:
            yield index, layers[index], row


def hover_text(layer: ProfileLayer, row: LayerRow) -> str:
    """What is shown of a layer beside the pointer, in the tags that plotly takes; names are escaped."""
    product, tile = product_text(row), tile_text(row)
    predicted = "" if layer.ratio is None else f", predicted {page_time(row.predicted_us)}"
    shares = (layer.math_share, "peak arithmetic"), (layer.bandwidth_share, "bandwidth")
    lines = [
        f"<b>{label(named(layer.modules, layer.name).text)}</b>",
        f"{label(row.op)}, {label(row.dtype)}, {label(row.kind)}",
        f"<b>{page_time(layer.measured_us)}</b>{predicted}, limited by {LIMITERS[row.limiter]}",
        f"arithmetic {page_time(row.math_us)}, memory {page_time(row.memory_us)}, launch {page_time(row.latency_us)}",
        f"{flop_text(row.flop)}, {bytes_text(row.bytes)}: {row.arithmetic_intensity:.3g} FLOP per byte",
        ", ".join(f"{percent(share)} of the {word}" for share, word in shares if share is not None),
        f"m×n×k {product}" if product else "",
    ]
    if tile:
        lines.append(f"tile {tile}: {count(row.tiles, 'tile')} in {count(row.waves, 'wave')}")
        used = f"{percent(row.tile_efficiency)} of the tiles, {percent(row.wave_efficiency)} of the waves"
        lines.append(f"used: {used}")
    lines.append(f"rows aligned to {row.alignment_bytes} bytes")
    if layer.onnx_nodes and layer.onnx_nodes != (layer.name,):
        lines.append(f"computes {some([label(node) for node in layer.onnx_nodes], 1)}")
    return "<br>".join([*filter(None, lines), *(label(item.reason) for item in layer.deviation)])


def label(name: str) -> str:
    """A name of the model as plotly's text: short, visible, and no markup."""
    from rich.cells import cell_len

    return escape(shorten(visible(name), HOVER_NAME, mark="…", measure=cell_len), quote=False) or "(no name)"


def in_order(layers: Sequence[ProfileLayer]) -> Figure:
    """The time of each layer in the order they run; many layers share a bar, split by limiter."""
    size = group_size(len(layers))
    groups = [layers[start : start + size] for start in range(0, len(layers), size)]
    texts = [_bar_text(group, index * size + 1) for index, group in enumerate(groups)]
    data = []
    for limiter, word in LIMITERS.items():
        chosen = [[item for item in group if item.predicted and item.predicted.limiter == limiter] for group in groups]
        values = [sum(layer.measured_us for layer in items) for items in chosen]
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


def _bar_text(group: Sequence[ProfileLayer], first: int) -> str:
    if len(group) == 1 and (row := group[0].predicted) is not None:
        return f"{first}: {hover_text(group[0], row)}"
    total = page_time(sum(layer.measured_us for layer in group))
    worst = [(label(named(layer.modules, layer.name).text), layer.measured_us) for layer in slowest(group)[:3]]
    lines = [f"{name}: {page_time(us)}" for name, us in worst]
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
    knee, best = sweep.knee, sweep.best_within_budget
    curves: tuple[tuple[str, int | None, str, list[float]], ...] = (
        ("throughput", knee, f"knee: {knee}", [point.throughput for point in sweep.points]),
        ("latency", best, f"best within the budget: {best}", [point.predicted_us / 1e3 for point in sweep.points]),
    )
    data = []
    for color, (name, marked, word, values) in zip(("#10a37f", "#e0457b"), curves, strict=True):
        look: dict[str, Any] = {
            "text": [word if batch == marked else "" for batch in batches],
            "textposition": "top left",
        }
        look |= {"marker": {"size": [10 if batch == marked else 5 for batch in batches]}, "line": {"color": color}}
        points = zip(batches, values, texts, strict=True)
        data.append(trace("lines+markers+text", points, name=name, showlegend=False, cliponaxis=False, **look))
    if sweep.budget_us is not None and sweep.budget_us <= _TALLEST_BUDGET * max(p.predicted_us for p in sweep.points):
        words, level, ends = f"budget {page_time(sweep.budget_us)}", sweep.budget_us / 1e3, list(map(float, batches))
        place = {"mode": "lines+text", "text": [words], "textposition": "top right"}
        data.append(grey_line(ends, [level] * len(ends), words, strong=False) | place)
    for below in data[1:]:
        below["yaxis"] = "y2"
    x = {"title": {"text": "batch"}, "type": "log", "anchor": "y2", "tickvals": _ticks(batches)}
    y = {"title": {"text": "samples/s"}, "domain": [0.54, 1], "rangemode": "tozero"}
    found = figure(data, 460, {**x, "exponentformat": "none"}, y)
    axes = found["layout"]
    axes["yaxis2"] = {**axes["yaxis"], "title": {"text": "latency, ms"}, "domain": [0, 0.46]}
    return found


def _ticks(batches: Sequence[int]) -> list[int]:
    """What to name on the axis: the batches, or where they are many or crowded, the powers of two in their range."""
    if len(batches) <= 12 and all(high >= low * math.sqrt(2) for low, high in itertools.pairwise(batches)):
        return list(batches)
    doublings = [1 << power for power in range(batches[-1].bit_length()) if 1 << power >= batches[0]]
    return doublings if len(doublings) > 1 else [batches[0], batches[-1]]


_ROOM = 2.0
"""Between the outermost points and the edge of the plot, as a factor."""


def scatter(layers: Sequence[ProfileLayer]) -> Figure:
    """Measured against predicted time on logarithmic axes, with the diagonal and the lines of twice and half."""
    points = [
        (index, layer, row, row.predicted_us, layer.measured_us)
        for index, layer, row in _drawn(layers, compared(layers))
    ]
    times = [value for *_, x, y in points for value in (x, y)]
    low, high = min(times) / _ROOM, max(times) * _ROOM
    data = [
        grey_line([low, high], [factor * low, factor * high], words, strong=factor == 1)
        for factor, words in ((1.0, "as predicted"), (2.0, "twice the prediction"), (0.5, "half the prediction"))
    ]
    axes = ({**decades(f"{word}, µs", low, high), "dtick": "D2"} for word in ("predicted", "measured"))
    return figure([*data, *markers(points)], 480, *axes, hovermode="closest")


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


_OF_GPUS = ("#3b82f6", "#e8890c", "#10a37f", "#e0457b", "#a855f7", "#0ea5b7", "#b45309", "#64748b")


def front(rows: Sequence[tuple[SweepRow, str]], gpus: Sequence[str], measure: str) -> Figure:
    """Latency against the drop of accuracy, of jobs that have both, each with its text beside the pointer; what is on
    the front is filled, and larger. ``gpus`` are all that have a colour."""
    data = []
    for gpu in dict.fromkeys(row.gpu for row, _ in rows):
        chosen = [(row, row.result, text) for row, text in rows if row.gpu == gpu and row.result is not None]
        points = [(found.latency_us or 0.0, max(found.drop or 0.0, 0.0), text) for _, found, text in chosen]
        marker = {
            "color": _OF_GPUS[gpus.index(gpu) % len(_OF_GPUS)],
            "symbol": ["diamond" if row.on_front else "circle-open" for row, *_ in chosen],
            "size": [14 if row.on_front else 9 for row, *_ in chosen],
        }
        texts = [label(row.precision) for row, *_ in chosen]
        look = {"text": texts, "textposition": "top center", "name": label(gpu), "marker": marker}
        data.append(trace("markers+text", points, **look))
    top = max(y for each in data for y in each["y"])
    x = {"title": {"text": "microseconds of one run"}, "type": "log", "exponentformat": "none"}
    y = {
        "title": {"text": f"drop of {label(shorten(measure, 30))}"},
        "range": [-0.06 * top, 1.12 * top] if top > 0 else [-1e-3, 1e-2],
    }
    note = {"text": "filled: Pareto front", "showarrow": False, "xref": "paper", "yref": "paper", "x": 1, "y": 1}
    note |= {"xanchor": "right", "yanchor": "bottom", "font": {"size": 11, "color": QUIET}}
    return figure(data, 380, x, y, hovermode="closest", showlegend=True, annotations=[note])
