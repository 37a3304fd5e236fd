"""The layers of a predicted network as a table: equal ones in a row."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from trtopt.report.html import plots
from trtopt.report.schema.analysis import LayerRow, range_of_rows
from trtopt.report.schema.layers import LayerInfo
from trtopt.report.schema.profile import ProfileLayer
from trtopt.report.text.blocks import Block, Cell, Column, Graph, Inline, Name, Note, Plot, Table, numbers, sum_of
from trtopt.report.text.format import count, percent, range_text, time_text, visible
from trtopt.report.text.names import Equal, Labels, equal_layers
from trtopt.report.text.words import LIMITERS, product_text

_MOST_ROWS = 12
_TIME = 3
"""The column that the rows are sorted by."""


def layers_blocks(
    rows: Sequence[LayerRow], total_us: float, labels: Labels, most: int = _MOST_ROWS
) -> tuple[Block, ...]:
    """The layers as a plot in their order, and as :func:`layer_table`; nothing without layers."""
    if not rows:
        return ()
    size = plots.group_size(len(rows))
    note = [] if size == 1 else [Note(f"Each bar is {size} layers.")]
    plot = Plot("order", lambda: plots.in_order(as_layers(rows, labels)))
    return *note, plot, layer_table(rows, total_us, labels, most)


def layer_table(rows: Sequence[LayerRow], total_us: float, labels: Labels, most: int = _MOST_ROWS) -> Table:
    """The layers by time, equal ones in one row with their number; a page unfolds them, and has all figures of each in
    the table below its graph.

    Args:
        rows: The layers.
        total_us: Microseconds of all of them, of which the shares are.
        labels: What the user calls their nodes.
        most: Rows that a terminal shows.
    """
    columns = (
        *(Column("operator, m x n x k", "short"), *numbers("x"), Column("type", "short"), *numbers("time", "share")),
        *(Column("limiter", "short", "wide"), Column("layer", "name"), *numbers("80 %", on="wide")),
    )
    return Table(
        *(columns, tuple(_cells(group, total_us, labels) for group in equal_layers(rows, labels)), most, "row"),
        rest=lambda left: f" with {time_text(sum_of(left, _TIME))}",
        sorted_by=_TIME,
        style="layers",
        gap=2,
    )


def _cells(group: Equal, total_us: float, labels: Labels) -> tuple[Inline, ...]:
    layer, number, total = group.rows[0], len(group.rows), group.predicted_us
    low, high = range_of_rows(group.rows) or (None, None)
    share = total / total_us if total_us else 0.0
    return (
        f"{visible(layer.op)} {product_text(layer)}".strip(),
        Cell(f"x{number}" if number > 1 else "", number),
        visible(layer.dtype),
        Cell(time_text(total), total),
        Cell(percent(share) if total_us else "", share),
        Cell(LIMITERS[layer.limiter], mark=f"c-{layer.limiter}"),
        _named(group, labels),
        Cell(range_text(total, low, high), high or 0.0),
    )


def _named(group: Equal, labels: Labels) -> Name:
    """The name of a row, and those of the layers that it stands for."""
    if len(group.rows) == 1:
        return group.name
    found = [(labels.of(row.onnx_nodes, row.name), row) for row in group.rows]
    parts = tuple(
        (f"{name.text} ({name.own})" if name.own else name.text, time_text(row.predicted_us)) for name, row in found
    )
    return Name(group.name.text, parts=parts)


def graph_blocks(
    layers: Sequence[ProfileLayer], links: Sequence[tuple[int, int]] | None = None, **more: Any
) -> tuple[Block, ...]:
    """Layers as a graph and a table, which a page shows, arguments as of :func:`trtopt.report.html.profile.layer_data`;
    nothing without layers."""
    if not layers:
        return ()
    from trtopt.report.html.profile import layer_data
    from trtopt.report.html.profile_graph import without_tensors

    bare = 0 if links else sum(map(without_tensors, layers))
    data = functools.partial(layer_data, layers, links or None, **more)
    return Note(_graph_note(len(layers), bare)), Graph(data)


def roofline_blocks(
    layers: Sequence[ProfileLayer],
    tflops: Mapping[str, float],
    bandwidth_gbs: float,
    precision: str = "",
    l2_bandwidth_gbs: float | None = None,
) -> tuple[Block, ...]:
    """The roofline of layers, arguments as of :func:`trtopt.report.html.plots.roofline`; nothing without arithmetic."""
    placed = plots.placed(layers)
    if not placed:
        return ()
    notes = [
        "A point is a layer; its area is its time. The ceilings are the peaks of the device by type, in TFLOP/s. Bytes"
        " count each tensor once: data kept in the L2 or skipped by a stride lifts a layer over the memory roof."
    ]
    if len(placed) > plots.MOST_POINTS:
        hidden = placed[plots.MOST_POINTS :]
        share = sum(layers[index].measured_us for index in hidden) / sum(layer.measured_us for layer in layers)
        shown = f"The {plots.MOST_POINTS} slowest are drawn"
        notes.append(f"{shown}; the other {len(hidden)} take {percent(share)} of the time.")
    unplaced = len(plots.compared(layers)) - len(placed)
    if unplaced:
        notes.append(f"{count(unplaced, 'layer')} without arithmetic cannot be drawn.")
    figure = functools.partial(plots.roofline, layers, tflops, bandwidth_gbs, precision, l2_bandwidth_gbs)
    return Note(" ".join(notes)), Plot("roofline", figure)


def as_layers(rows: Sequence[LayerRow], labels: Labels, listed: Sequence[LayerInfo] = ()) -> tuple[ProfileLayer, ...]:
    """Predicted layers as those of a profile, their predicted time in the place of a measured one.

    Args:
        rows: The layers.
        labels: The modules of their nodes.
        listed: The layers of the engine, where there is one: tensors and kernels by the layers' names.
    """
    known: Mapping[str, LayerInfo] = {layer.name: layer for layer in listed}
    return tuple(_layer(row, known.get(row.name), labels) for row in rows)


def _layer(row: LayerRow, info: LayerInfo | None, labels: Labels) -> ProfileLayer:
    return ProfileLayer(
        name=row.name,
        type=row.op if info is None else info.type,
        onnx_nodes=row.onnx_nodes,
        modules=labels.modules(row.onnx_nodes),
        inputs=() if info is None else info.inputs,
        outputs=() if info is None else info.outputs,
        constants=() if info is None else info.constants,
        tactic="" if info is None else info.tactic,
        tensor_core=None,
        sparse=None,
        measured_us=row.predicted_us,
        predicted=row,
    )


def _graph_note(layers: int, bare: int) -> str:
    """How to read the graph of so many layers, of which ``bare`` are linked neither by tensors nor by a graph."""
    lines = "A line leads from the layer that writes a tensor to one that reads it."
    if layers and bare == layers:
        lines = "The file names no tensors: the layers are linked in the order they run."
    elif bare:
        lines += f" {count(bare, 'layer')} without tensors: linked to the one that runs before."
    return f"{lines} Long graphs go on at the top of the next column. Drag to move; after a click, the wheel zooms."
