"""The graph and the table of layers in the page of a profile: their data (see :mod:`trtopt.report.html.page`).

The graph is drawn by Cytoscape.js 3.34.4, whose script (0.44 MB) is written into the page. Of the other maintained
libraries, vis-network 10.1 (0.65 MB) draws 1,500 layers in 0.15 s instead of 0.6 s, but a line is straight or one curve
there, and crosses the boxes that a residual passes; plotly, which draws the plots, has no graphs. The layout is
computed in Python (:mod:`trtopt.report.html.profile_graph`) in 0.04 s, where dagre 3.1 takes 1.3 s and elkjs 0.12
(1.6 MB) 2 s, during which the page would not answer. ``benchmarks/profile`` has the times of the page.

Every text of a layer is made here, in the words of the other reports; the page's script only puts them in, as text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from trtopt.report.html.page import as_script
from trtopt.report.html.plots import COLORS, QUIET
from trtopt.report.html.profile_graph import graph
from trtopt.report.schema.analysis import Finding, LayerRow
from trtopt.report.schema.layers import NodeName, TensorInfo
from trtopt.report.schema.profile import ProfileLayer, precision_of
from trtopt.report.text.format import bytes_text, count, flop_text, page_time, percent, shorten, visible, with_micro
from trtopt.report.text.names import named
from trtopt.report.text.words import LIMITERS, product_text, tile_text
from trtopt.support.precision import Precision

_NAME, _NODE = 120, 60
"""Characters of names in the table; the details have them whole."""
_LABEL = 21
"""Width of a line in a box of the graph."""
_Value = str | tuple[str, float]
"""A text, or a number's text and what it is sorted by."""

Column = tuple[str, str, Callable[[ProfileLayer], _Value]]
"""Title and style of a value of each layer, and what gives it; a ``number`` is sorted as one."""
SORTED_BY = 3
"""The column the table is sorted by at first."""


def columns(total_us: float, *, measured: bool = True) -> list[Column]:
    """What is said of each layer, nothing where it is not known: in the table, and in the details.

    ``total_us`` is the time of all layers; it is predicted where it is not ``measured``.
    """
    return [
        ("layer", "name", lambda layer: shorten(visible(_title(layer)), _NAME, mark="…") or "(no name)"),
        ("type", "short", lambda layer: visible(layer.type)),
        ("operator", "short", _of_row(lambda row: visible(row.op))),
        ("measured" if measured else "time", "number", lambda layer: _number(page_time, layer.measured_us)),
        ("share", "number", lambda layer: _number(percent, layer.measured_us / total_us if total_us else 0.0)),
        ("predicted", "number", lambda layer: _number(page_time, layer.predicted_us) if measured else ""),
        ("measured / predicted", "number", lambda layer: _number("{:.2f}".format, layer.ratio)),
        ("reasons", "wide", lambda layer: ", ".join(item.reason for item in layer.deviation)),
        ("limited by", "short", _of_row(lambda row: LIMITERS[row.limiter])),
        ("of peak arithmetic", "number", lambda layer: _number(percent, layer.math_share)),
        ("of bandwidth", "number", lambda layer: _number(percent, layer.bandwidth_share)),
        ("precision", "short", lambda layer: visible(precision_of(layer))),
        ("Tensor Cores", "short", lambda layer: _yes(layer.tensor_core)),
        ("2:4", "short", lambda layer: _yes(layer.sparse)),
        ("reads", "wide", lambda layer: _formats(layer.inputs)),
        ("writes", "wide", lambda layer: _formats(layer.outputs)),
        ("kernel", "wide", lambda layer: visible(layer.tactic)),
        ("median", "number", lambda layer: _number(page_time, layer.median_us)),
        ("spread", "number", lambda layer: _number(page_time, layer.spread_us)),
        ("FLOP", "number", _of_row(lambda row: (flop_text(row.flop), row.flop))),
        ("bytes", "number", _of_row(lambda row: (bytes_text(row.bytes), row.bytes))),
        ("FLOP/byte", "number", _of_row(lambda row: _number("{:.3g}".format, row.arithmetic_intensity))),
        ("m x n x k", "short", _of_row(product_text)),
        ("tile", "short", _of_row(tile_text)),
        ("tiles", "number", _of_tile(lambda row: (str(row.tiles), row.tiles))),
        ("waves", "number", _of_tile(lambda row: (str(row.waves), row.waves))),
        ("tiles used", "number", _of_tile(lambda row: _number(percent, row.tile_efficiency))),
        ("waves used", "number", _of_tile(lambda row: _number(percent, row.wave_efficiency))),
        ("aligned", "number", _of_row(lambda row: (f"{row.alignment_bytes} B", row.alignment_bytes))),
        ("nodes", "wide", lambda layer: _first(layer.onnx_nodes)),
        ("modules", "wide", lambda layer: _first(layer.modules)),
    ]


def _of_row(value: Callable[[LayerRow], _Value]) -> Callable[[ProfileLayer], _Value]:
    return lambda layer: "" if layer.predicted is None else value(layer.predicted)


def _of_tile(value: Callable[[LayerRow], _Value]) -> Callable[[ProfileLayer], _Value]:
    return _of_row(lambda row: "" if row.tile is None else value(row))


def _number(text: Callable[[float], str], value: float | None) -> _Value:
    return "" if value is None else (text(value), value)


def _yes(known: bool | None) -> str:
    return "" if known is None else "yes" if known else "no"


def layer_data(
    layers: Sequence[ProfileLayer],
    pairs: Sequence[tuple[int, int]] | None = None,
    findings: Sequence[Finding] = (),
    *,
    measured: bool = True,
    names: Mapping[str, NodeName] | None = None,
) -> str:
    """The layers as the JSON of an HTML script element, which no text in them can end.

    Args:
        layers: The layers.
        pairs: Which reads from which, where tensors do not tell (:func:`trtopt.report.html.profile_graph.graph`).
        findings: What was found, of which each layer names those it is in.
        measured: Whether their times are; else they are predicted.
        names: The modules of nodes, of which the layers name those of their products only: the search finds all.

    Object of ``columns`` (title and style), ``colorings``, ``sortedBy``, ``edges`` as [writer, reader, bends], and
    ``layers`` in their order, each with its place in the graph, its cells by column and what the details show.
    """
    drawn = graph(layers, pairs)
    shown = columns(sum(layer.measured_us for layer in layers), measured=measured)
    found: dict[str, list[Finding]] = {}
    for item in findings:
        for node in item.nodes:
            found.setdefault(node, []).append(item)
    data = {
        "columns": [column[:2] for column in shown],
        "sortedBy": SORTED_BY,
        "colorings": colorings(layers),
        "edges": [[edge.source, edge.target, edge.bends] for edge in drawn.edges],
        "layers": [
            {**_details(layer, found, names or {}), "cells": [value(layer) for *_, value in shown], "at": place}
            for layer, place in zip(layers, drawn.places, strict=True)
        ],
    }
    return as_script(data)


def _title(layer: ProfileLayer) -> str:
    """The user's name of a layer, and its own."""
    name = named(layer.modules, layer.name)
    return f"{name.text} ({name.own})" if name.own else name.text


def _details(
    layer: ProfileLayer, findings: Mapping[str, Sequence[Finding]], names: Mapping[str, NodeName]
) -> dict[str, Any]:
    """What the graph and the details show besides the cells."""
    modules = (*layer.modules, *(names[node].module for node in layer.onnx_nodes if node in names))
    own = {id(item): item for node in (*layer.onnx_nodes, layer.name) for item in findings.get(node, ())}
    return {
        "name": visible(_title(layer)),
        "label": label(layer),
        "nodes": [visible(node) for node in layer.onnx_nodes],
        "modules": [visible(module) for module in dict.fromkeys(modules)],
        "reads": [_tensor(tensor) for tensor in layer.inputs],
        "writes": [_tensor(tensor) for tensor in layer.outputs],
        "constants": [_tensor(tensor) for tensor in layer.constants],
        "reasons": [
            *(
                (item.reason, page_time(item.us) if item.us else "", with_micro(visible(item.message)))
                for item in layer.deviation
            ),
            *((item.rule, "", with_micro(visible(item.message)), f"finding-{item.rule}") for item in own.values()),
        ],
    }


def label(layer: ProfileLayer) -> str:
    """Two short lines: where the layer stands in the model, and what it does in what time."""
    from rich.cells import cell_len

    def short(text: str, width: int) -> str:
        return shorten(visible(text), width, mark="…", measure=cell_len)

    # ``Conv_0 + Relu_1`` of ``/layer1/Conv_0 + /layer1/Relu_1``
    place = short(" + ".join(PurePosixPath(part).name or part for part in layer.name.split(" + ")), _LABEL)
    if layer.modules:  # the end of a path says most
        place = visible(layer.modules[0])
        while cell_len(place) > _LABEL:
            place = f"…{place[2:]}"
    time = page_time(layer.measured_us)
    what = short(layer.predicted.op if layer.predicted else layer.type, _LABEL - len(time) - 1)
    return f"{place or '(no name)'}\n{what} {time}"


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{shorten(visible(names[0]), _NODE, mark='…') or '(no name)'}{more}" if names else ""


def _formats(tensors: Sequence[TensorInfo]) -> str:
    """The types and formats in use, each once."""
    return ", ".join(dict.fromkeys(visible(f"{tensor.dtype} {tensor.format}".strip()) for tensor in tensors))


def _tensor(tensor: TensorInfo) -> str:
    shape = "×".join(str(size) for size in tensor.shape) or "scalar"
    kind = " ".join(part for part in (shape, tensor.dtype, tensor.format) if part)
    return f"{visible(tensor.name) or '(no name)'}: {visible(kind)}"


_HEAT = ("#a3224f", "#d6453d", "#ee8a3c", "#f2c14e", "#cfd5a8", "#a9b5c4")
"""From the slowest layers to the fastest, which recede on white and on black."""
_TYPES: dict[str, str] = {
    Precision.FP32: "#e0457b",
    Precision.TF32: "#f08a5d",
    Precision.FP16: "#3b82f6",
    Precision.BF16: "#7c6cf2",
    Precision.INT8: "#10a37f",
    Precision.FP8: "#84b83c",
    Precision.FP4: "#e3c33b",
}
"""Colours of the types in which a layer computes; another type has that of nothing."""
_RATIOS = (
    (0.5, "#2f6fd0", "less than half the prediction"),
    (0.8, "#7fb0ea", "0.5 to 0.8 times"),
    (1.25, "#c3c9d1", "0.8 to 1.25 times"),
    (2.0, "#f4c06a", "1.25 to 2 times"),
    (4.0, "#ea7f3f", "2 to 4 times"),
    (math.inf, "#b3243f", "more than 4 times"),
)
"""Measured over predicted: below what, its colour, and its words."""
_REASONS = (
    "#d6453d", "#e8890c", "#c8a415", "#10a37f", "#2aa7c9", "#3b82f6", "#a855f7", "#e0457b", "#6b7280",
)  # fmt: skip
"""By the order in which the reasons are found, the most time first."""


_Key = tuple[int, str, str]
"""Place in the legend, words and colour of a group."""


def colorings(layers: Sequence[ProfileLayer]) -> list[dict[str, Any]]:
    """The ways to colour the layers of which something is known, the first one first: ``title``; ``groups`` of one
    colour, with that of text on it (``ink``), what they have in common (``text``), their number and share of the time
    (``note``); by layer, the index of its group (``of_layer``)."""
    longest = max((layer.measured_us for layer in layers), default=0.0)
    reasons: dict[str, float] = {}
    for layer in layers:
        for item in layer.deviation[:1]:
            reasons[item.reason] = reasons.get(item.reason, 0.0) + layer.measured_us
    order = sorted(reasons, key=lambda reason: -reasons[reason])
    found = [_by("time", layers, lambda layer: _time_group(layer, longest)), _by("precision", layers, _precision_group)]
    if any(layer.ratio is not None for layer in layers):
        found.append(_by("measured / predicted", layers, _ratio_group))
    if any(layer.predicted is not None for layer in layers):
        found.append(_by("limited by", layers, _limit_group))
    if order:
        found.append(_by("reason of the deviation", layers, lambda layer: _reason_group(layer, order)))
    return found


def ink_on(color: str) -> str:
    """Black or white, whichever is read better on a colour (contrast of WCAG 2.2)."""
    channels = (int(color[start : start + 2], 16) / 255 for start in (1, 3, 5))
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#ffffff"


def _by(title: str, layers: Sequence[ProfileLayer], group_of: Callable[[ProfileLayer], _Key]) -> dict[str, Any]:
    keys = [group_of(layer) for layer in layers]
    total = sum(layer.measured_us for layer in layers)
    order = sorted(set(keys))
    groups = []
    for key in order:
        times = [layer.measured_us for layer, own in zip(layers, keys, strict=True) if own == key]
        share = f", {percent(sum(times) / total)} of the time" if total else ""
        note = count(len(times), "layer") + share
        groups.append({"color": key[2], "ink": ink_on(key[2]), "text": key[1], "note": note})
    return {"title": title, "groups": groups, "of_layer": [order.index(key) for key in keys]}


def _time_group(layer: ProfileLayer, longest: float) -> _Key:
    """By halves of the time of the slowest layer."""
    if layer.measured_us <= 0:
        return len(_HEAT), "runs nothing", QUIET
    step = min(math.floor(math.log2(longest / layer.measured_us)), len(_HEAT) - 1)
    low, high = (page_time(longest / 2**power) for power in (step + 1, step))
    return step, f"less than {high}" if step == len(_HEAT) - 1 else f"{low} to {high}", _HEAT[step]


def _precision_group(layer: ProfileLayer) -> _Key:
    name = visible(precision_of(layer))
    place = list(_TYPES).index(name) if name in _TYPES else len(_TYPES)
    return place, name or "not known", _TYPES.get(name, QUIET)


def _limit_group(layer: ProfileLayer) -> _Key:
    if layer.predicted is None:
        return len(COLORS), "no prediction", QUIET
    limiter = layer.predicted.limiter
    return list(COLORS).index(limiter), LIMITERS[limiter], COLORS[limiter]


def _ratio_group(layer: ProfileLayer) -> _Key:
    ratio = layer.ratio
    if ratio is None:
        return len(_RATIOS), "no prediction", QUIET
    return next((place, words, color) for place, (top, color, words) in enumerate(_RATIOS) if ratio <= top)


def _reason_group(layer: ProfileLayer, order: Sequence[str]) -> _Key:
    """By the first reason; those of the most time first."""
    if not layer.deviation:
        return len(order), "none", "#c3c9d1"
    place = order.index(layer.deviation[0].reason)
    return place, order[place], _REASONS[place % len(_REASONS)]
