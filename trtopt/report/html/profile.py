"""The graph and the table of layers in the page of a profile: their data (see :mod:`trtopt.report.html.page`).

The graph is drawn by Cytoscape.js 3.34.4, whose script (0.44 MB) is written into the page. Of the other maintained
libraries, vis-network 10.1 (0.65 MB) draws 1,500 layers in 0.15 s instead of 0.6 s, but a line is straight or one curve
there, and crosses the boxes that a residual passes; plotly, which draws the plots, has no graphs. The layout is
computed in Python (:mod:`trtopt.report.html.profile_graph`) in 0.04 s, where dagre 3.1 takes 1.3 s and elkjs 0.12
(1.6 MB) 2 s, during which the page would not answer. ``benchmarks/profile`` has the times of the page.

Every text of a layer is made here, in the words of the other reports; the page's script only puts them in, as text.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from trtopt.report.html.page import as_script
from trtopt.report.html.plots import COLORS, QUIET
from trtopt.report.html.profile_graph import graph
from trtopt.report.schema.analysis import Finding, LayerRow
from trtopt.report.schema.layers import NodeName, TensorInfo
from trtopt.report.schema.profile import ProfileLayer
from trtopt.report.text.format import bytes_text, count, flop_text, page_time, percent, shorten, visible
from trtopt.report.text.names import named
from trtopt.report.text.words import LIMITERS, product_text, tile_text
from trtopt.support.precision import Precision

_NAME, _NODE = 120, 60
"""Characters of names in the table; the details have them whole."""
_LABEL = 21
"""Width of a line in a box of the graph."""
_KNOWN = {True: "yes", False: "no", None: ""}

_Value = str | tuple[str, float]
"""A text, or a number's text and what it is sorted by."""

COLUMNS = (
    *(("layer", "name"), ("type", "short"), ("operator", "short"), ("measured", "number"), ("share", "number")),
    *(("predicted", "number"), ("measured / predicted", "number"), ("reasons", "wide"), ("limited by", "short")),
    *(("of peak arithmetic", "number"), ("of bandwidth", "number"), ("precision", "short")),
    *(("Tensor Cores", "short"), ("2:4", "short"), ("reads", "wide"), ("writes", "wide"), ("kernel", "wide")),
    *(("median", "number"), ("spread", "number"), ("FLOP", "number"), ("bytes", "number"), ("FLOP/byte", "number")),
    *(("m x n x k", "short"), ("tile", "short"), ("tiles", "number"), ("waves", "number"), ("tiles used", "number")),
    *(("waves used", "number"), ("aligned", "number"), ("nodes", "wide"), ("modules", "wide")),
)
"""Title and style of each value of a layer; a ``number`` is sorted as one."""
SORTED_BY = 3
"""The column the table is sorted by at first."""


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

    Object of ``columns``, ``colorings``, ``sortedBy``, ``edges`` as [writer, reader, bends], and ``layers`` in their
    order, each with its place in the graph, its cells by column and what the details show.
    """
    total = sum(layer.measured_us for layer in layers)
    drawn = graph(layers, pairs)
    columns = list(COLUMNS)
    if not measured:
        columns[SORTED_BY] = ("time", "number")
    found: dict[str, list[Finding]] = {}
    for item in findings:
        for node in item.nodes:
            found.setdefault(node, []).append(item)
    data = {
        "columns": columns,
        "sortedBy": SORTED_BY,
        "colorings": [dataclasses.asdict(coloring) for coloring in colorings(layers)],
        "edges": [[edge.source, edge.target, edge.bends] for edge in drawn.edges],
        "layers": [
            {**_details(layer, found, names or {}), "cells": cells(layer, total, measured=measured), "at": place}
            for layer, place in zip(layers, drawn.places, strict=True)
        ],
    }
    return as_script(data)


def cells(layer: ProfileLayer, total_us: float, *, measured: bool = True) -> tuple[_Value, ...]:
    """The values of a layer, as :data:`COLUMNS` names them; empty what is not known. ``total_us`` is of all layers."""
    row = layer.predicted
    return (
        shorten(visible(_title(layer)), _NAME, mark="…") or "(no name)",
        visible(layer.type),
        visible(row.op) if row else "",
        _time(layer.measured_us),
        _percent(layer.measured_us / total_us if total_us else 0.0),
        _time(layer.predicted_us) if measured else "",
        "" if layer.ratio is None else (f"{layer.ratio:.2f}", layer.ratio),
        ", ".join(item.reason for item in layer.deviation),
        LIMITERS[row.limiter] if row else "",
        _percent(layer.math_share),
        _percent(layer.bandwidth_share),
        visible(precision_of(layer)),
        _KNOWN[layer.tensor_core],
        _KNOWN[layer.sparse],
        _formats(layer.inputs),
        _formats(layer.outputs),
        visible(layer.tactic),
        _time(layer.median_us),
        _time(layer.spread_us),
        *(_work(row) if row else ("",) * 10),
        _first(layer.onnx_nodes),
        _first(layer.modules),
    )


def _work(row: LayerRow) -> tuple[_Value, ...]:
    """From ``FLOP`` to ``aligned``."""
    tiled = row.tile is not None
    return (
        (flop_text(row.flop), row.flop),
        (bytes_text(row.bytes), row.bytes),
        (f"{row.arithmetic_intensity:.3g}", row.arithmetic_intensity),
        product_text(row),
        tile_text(row),
        (str(row.tiles), row.tiles) if tiled else "",
        (str(row.waves), row.waves) if tiled else "",
        _percent(row.tile_efficiency) if tiled else "",
        _percent(row.wave_efficiency) if tiled else "",
        (f"{row.alignment_bytes} B", row.alignment_bytes),
    )


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
            *((item.reason, page_time(item.us) if item.us else "", visible(item.message)) for item in layer.deviation),
            *((item.rule, "", visible(item.message), f"finding-{item.rule}") for item in own.values()),
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


def _time(microseconds: float | None) -> _Value:
    return "" if microseconds is None else (page_time(microseconds), microseconds)


def _percent(share: float | None) -> _Value:
    return "" if share is None else (percent(share), share)


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
_NAMES = {"float": Precision.FP32, "half": Precision.FP16, "bfloat16": Precision.BF16}
"""What compilers call types that have a shorter name."""
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


@dataclass(frozen=True)
class Group:
    """Layers of one colour: ``#rrggbb``, and that of text on it; what they have in common; how many there are, and
    their share of the time.
    """

    color: str
    ink: str
    text: str
    note: str


@dataclass(frozen=True)
class Coloring:
    """One way to colour the layers: by what; the groups that hold a layer; by layer, the index of its group."""

    title: str
    groups: tuple[Group, ...]
    of_layer: tuple[int, ...]


def colorings(layers: Sequence[ProfileLayer]) -> tuple[Coloring, ...]:
    """All ways to colour the layers, the first one first; precision and deviation where something is known of them."""
    found = [_by("time", layers, _time_groups(layers)), _by("precision", layers, _precision_group)]
    if any(layer.ratio is not None for layer in layers):
        found.append(_by("measured / predicted", layers, _ratio_group))
    if any(layer.predicted is not None for layer in layers):
        found.append(_by("limited by", layers, _limit_group))
    if any(layer.deviation for layer in layers):
        found.append(_by("reason of the deviation", layers, _reason_groups(layers)))
    return tuple(found)


def precision_of(layer: ProfileLayer) -> str:
    """The type in which a layer computes; what it writes where that is not known, and empty without either."""
    if layer.predicted is not None:
        return layer.predicted.dtype
    written = layer.outputs[0].dtype.lower() if layer.outputs else ""
    return _NAMES.get(written, written)


def ink_on(color: str) -> str:
    """Black or white, whichever is read better on a colour (contrast of WCAG 2.2)."""
    channels = (int(color[start : start + 2], 16) / 255 for start in (1, 3, 5))
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#ffffff"


_Key = tuple[int, str, str]
"""Place in the legend, words and colour of a group."""


def _by(title: str, layers: Sequence[ProfileLayer], group_of: Callable[[ProfileLayer], _Key]) -> Coloring:
    keys = [group_of(layer) for layer in layers]
    total = sum(layer.measured_us for layer in layers)
    groups = []
    for key in sorted(set(keys)):
        times = [layer.measured_us for layer, own in zip(layers, keys, strict=True) if own == key]
        share = f", {percent(sum(times) / total)} of the time" if total else ""
        groups.append(Group(key[2], ink_on(key[2]), key[1], count(len(times), "layer") + share))
    index = {key: place for place, key in enumerate(sorted(set(keys)))}
    return Coloring(title, tuple(groups), tuple(index[key] for key in keys))


def _time_groups(layers: Sequence[ProfileLayer]) -> Callable[[ProfileLayer], _Key]:
    """Halves of the time of the slowest layer."""
    longest = max((layer.measured_us for layer in layers), default=0.0)

    def group(layer: ProfileLayer) -> _Key:
        if layer.measured_us <= 0:
            return len(_HEAT), "runs nothing", QUIET
        step = min(math.floor(math.log2(longest / layer.measured_us)), len(_HEAT) - 1)
        low, high = (page_time(longest / 2**power) for power in (step + 1, step))
        words = f"less than {high}" if step == len(_HEAT) - 1 else f"{low} to {high}"
        return step, words, _HEAT[step]

    return group


def _precision_group(layer: ProfileLayer) -> _Key:
    name = visible(precision_of(layer))
    known = list(_TYPES)
    place = known.index(name) if name in known else len(known)
    return place, name or "not known", _TYPES.get(name, QUIET)


def _limit_group(layer: ProfileLayer) -> _Key:
    if layer.predicted is None:
        return len(COLORS), "no prediction", QUIET
    place = list(COLORS).index(layer.predicted.limiter)
    return place, LIMITERS[layer.predicted.limiter], COLORS[layer.predicted.limiter]


def _ratio_group(layer: ProfileLayer) -> _Key:
    ratio = layer.ratio
    if ratio is None:
        return len(_RATIOS), "no prediction", QUIET
    return next((place, words, color) for place, (top, color, words) in enumerate(_RATIOS) if ratio <= top)


def _reason_groups(layers: Sequence[ProfileLayer]) -> Callable[[ProfileLayer], _Key]:
    """The first reason of each layer; the reasons by the time of the layers that have them."""
    times: dict[str, float] = {}
    for layer in layers:
        for reason in layer.deviation[:1]:
            times[reason.reason] = times.get(reason.reason, 0.0) + layer.measured_us
    order = sorted(times, key=lambda reason: -times[reason])

    def group(layer: ProfileLayer) -> _Key:
        if not layer.deviation:
            return len(order), "none", "#c3c9d1"
        place = order.index(layer.deviation[0].reason)
        return place, order[place], _REASONS[place % len(_REASONS)]

    return group
