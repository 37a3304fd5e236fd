"""What the page of a profile knows of each layer: the data its script makes the graph, the table and the details of.

Every text is made here, in the words of the other reports; the script only puts them into the page, as text.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from trtopt.report.html.profile_colors import colorings, precision_of
from trtopt.report.html.profile_graph import graph
from trtopt.report.schema.analysis import LayerRow
from trtopt.report.schema.layers import TensorInfo
from trtopt.report.schema.profile import ProfileLayer
from trtopt.report.text.analysis import (
    LIMITERS,
    flop_text,
    product_text,
    shorten,
    tile_text,
    time_text,
    visible,
)
from trtopt.report.text.numbers import bytes_text, percent

_NAME, _NODE = 120, 60
"""Characters of names in the table; the details have them whole."""
_LABEL = 21
"""Width of a line in a box of the graph."""
_KNOWN = {True: "yes", False: "no", None: ""}

Cell = str | tuple[str, float]
"""A text, or a number's text and what it is sorted by."""

COLUMNS = (
    *(("layer", ""), ("type", "short"), ("operator", "short"), ("measured", "number"), ("share", "number")),
    *(("predicted", "number"), ("measured / predicted", "number"), ("reasons", "wide"), ("limited by", "short")),
    *(("of peak arithmetic", "number"), ("of bandwidth", "number"), ("precision", "short")),
    *(("Tensor Cores", "short"), ("2:4", "short"), ("reads", "wide"), ("writes", "wide"), ("kernel", "wide")),
    *(("median", "number"), ("spread", "number"), ("FLOP", "number"), ("bytes", "number"), ("FLOP/byte", "number")),
    *(("m×n×k", "short"), ("tile", "short"), ("tiles", "number"), ("waves", "number"), ("tiles used", "number")),
    *(("waves used", "number"), ("aligned", "number"), ("nodes", "wide"), ("modules", "wide")),
)
"""Title and style of each value of a layer; a ``number`` is sorted as one."""
SORTED_BY = 3
"""The column the table is sorted by at first."""


def layer_data(layers: Sequence[ProfileLayer]) -> str:
    """The layers as the JSON of an HTML script element, which no text in them can end.

    Object of ``columns``, ``colorings``, ``sortedBy``, ``edges`` as [writer, reader, bends], and ``layers`` in their
    order, each with its place in the graph, its cells by column and what the details show.
    """
    total = sum(layer.measured_us for layer in layers)
    drawn = graph(layers)
    data = {
        "columns": COLUMNS,
        "sortedBy": SORTED_BY,
        "colorings": [dataclasses.asdict(coloring) for coloring in colorings(layers)],
        "edges": [[edge.source, edge.target, edge.bends] for edge in drawn.edges],
        "layers": [
            {**_details(layer), "cells": cells(layer, total), "at": place}
            for layer, place in zip(layers, drawn.places, strict=True)
        ],
    }
    plain = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return plain.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def cells(layer: ProfileLayer, total_us: float) -> tuple[Cell, ...]:
    """The values of a layer, as :data:`COLUMNS` names them; empty what is not known.

    Args:
        layer: The layer.
        total_us: Sum of the measured times of all.
    """
    row = layer.predicted
    return (
        shorten(visible(layer.name), _NAME, mark="…") or "(no name)",
        visible(layer.type),
        visible(row.op) if row else "",
        _time(layer.measured_us),
        _percent(layer.measured_us / total_us if total_us else 0.0),
        _time(layer.predicted_us),
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


def _work(row: LayerRow) -> tuple[Cell, ...]:
    """From ``FLOP`` to ``aligned``."""
    tiled = row.tile is not None
    return (
        (flop_text(row.flop), row.flop),
        (bytes_text(row.bytes), row.bytes),
        (f"{row.arithmetic_intensity:.3g}", row.arithmetic_intensity),
        product_text(row, times="×"),
        tile_text(row, times="×"),
        (str(row.tiles), row.tiles) if tiled else "",
        (str(row.waves), row.waves) if tiled else "",
        _percent(row.tile_efficiency) if tiled else "",
        _percent(row.wave_efficiency) if tiled else "",
        (f"{row.alignment_bytes} B", row.alignment_bytes),
    )


def _details(layer: ProfileLayer) -> dict[str, Any]:
    """What the graph and the details show besides the cells."""
    return {
        "name": visible(layer.name),
        "label": label(layer),
        "nodes": [visible(node) for node in layer.onnx_nodes],
        "modules": [visible(module) for module in layer.modules],
        "reads": [_tensor(tensor) for tensor in layer.inputs],
        "writes": [_tensor(tensor) for tensor in layer.outputs],
        "constants": [_tensor(tensor) for tensor in layer.constants],
        "reasons": [
            (item.reason, time_text(item.us, micro="µ") if item.us else "", visible(item.message))
            for item in layer.deviation
        ],
    }


def label(layer: ProfileLayer) -> str:
    """Two short lines: where the layer stands in the model, and what it does in what time."""
    from rich.cells import cell_len

    def short(text: str, width: int) -> str:
        return shorten(visible(text), width, mark="…", measure=cell_len)

    place = short(_last_part(layer.name), _LABEL)
    if layer.modules:  # the end of a path says most
        place = visible(layer.modules[0])
        while cell_len(place) > _LABEL:
            place = f"…{place[2:]}"
    time = time_text(layer.measured_us, micro="µ")
    what = short(layer.predicted.op if layer.predicted else layer.type, _LABEL - len(time) - 1)
    return f"{place or '(no name)'}\n{what} {time}"


def _last_part(name: str) -> str:
    """``Conv_0 + Relu_1`` of ``/layer1/Conv_0 + /layer1/Relu_1``."""
    return " + ".join(PurePosixPath(part).name or part for part in name.split(" + "))


def _time(microseconds: float | None) -> Cell:
    return "" if microseconds is None else (time_text(microseconds, micro="µ"), microseconds)


def _percent(share: float | None) -> Cell:
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
