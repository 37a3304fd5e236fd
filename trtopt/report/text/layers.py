"""The layers of a predicted network as a table: equal ones in a row."""

from __future__ import annotations

from collections.abc import Sequence

from trtopt.report.html import plots
from trtopt.report.schema.analysis import LayerRow, range_of_rows
from trtopt.report.text.blocks import Block, Cell, Column, Inline, Name, Note, Plot, Table, numbers, sum_of
from trtopt.report.text.format import bytes_text, count, flop_text, percent, range_text, time_text, visible
from trtopt.report.text.names import Equal, Labels, equal_layers
from trtopt.report.text.words import product_text, tile_text

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
    plot = Plot("order", lambda: plots.in_order(labels.rows(rows)))
    return *note, plot, layer_table(rows, total_us, labels, most)


def layer_table(rows: Sequence[LayerRow], total_us: float, labels: Labels, most: int = _MOST_ROWS) -> Table:
    """The layers by time, equal ones in one row with their number; a page unfolds them, and has all figures.

    Args:
        rows: The layers.
        total_us: Microseconds of all of them, of which the shares are.
        labels: What the user calls their nodes.
        most: Rows that a terminal shows.
    """
    columns = (
        *(Column("operator, m x n x k", "short"), *numbers("x"), Column("type", "short"), *numbers("time", "share")),
        *(Column("limiter", "short", "wide"), Column("layer", "name"), *numbers("80 %", on="wide")),
        *(Column("tile, waves", "short", "page"), *numbers("arithmetic", "memory", "FLOP", "bytes", on="page")),
        *numbers("FLOP/byte", "tiles", "tiles used", "waves used", "aligned", on="page"),
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
    product, tile = layer.gemm is not None, tile_text(layer)
    low, high = range_of_rows(group.rows) or (None, None)
    share = total / total_us if total_us else 0.0
    return (
        f"{visible(layer.op)} {product_text(layer)}".strip(),
        Cell(f"x{number}" if number > 1 else "", number),
        visible(layer.dtype),
        Cell(time_text(total), total),
        Cell(percent(share) if total_us else "", share),
        Cell(layer.limiter, mark=f"c-{layer.limiter}"),
        _named(group, labels),
        Cell(range_text(total, low, high), high or 0.0),
        f"{tile} {layer.waves}w" if tile else "",
        *_sums(group.rows),
        Cell(f"{layer.arithmetic_intensity:.3g}", layer.arithmetic_intensity),
        Cell(str(layer.tiles) if product else "", layer.tiles),
        Cell(percent(layer.tile_efficiency) if product else "", layer.tile_efficiency),
        Cell(percent(layer.wave_efficiency) if product else "", layer.wave_efficiency),
        Cell(f"{layer.alignment_bytes} B", layer.alignment_bytes),
    )


def _sums(rows: Sequence[LayerRow]) -> tuple[Cell, ...]:
    """Arithmetic's and memory's time, FLOP and bytes of all of them."""
    math_us, memory_us = sum(row.math_us for row in rows), sum(row.memory_us for row in rows)
    flop, moved = sum(row.flop for row in rows), sum(row.bytes for row in rows)
    return (
        Cell(time_text(math_us), math_us),
        Cell(time_text(memory_us), memory_us),
        Cell(flop_text(flop), flop),
        Cell(bytes_text(moved), moved),
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


def graph_note(layers: int, bare: int) -> str:
    """How to read the graph of so many layers, of which ``bare`` are linked neither by tensors nor by a graph."""
    lines = "A line leads from the layer that writes a tensor to one that reads it."
    if layers and bare == layers:
        lines = "The file names no tensors: the layers are linked in the order they run."
    elif bare:
        lines += f" {count(bare, 'layer')} without tensors: linked to the one that runs before."
    return f"{lines} Long graphs go on at the top of the next column. Drag to move; after a click, the wheel zooms."
