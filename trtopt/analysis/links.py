"""Which layers of an analysis read from which, for its graph."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from trtopt.report.schema.analysis import LayerRow


def links_of_graph(rows: Sequence[LayerRow], model: ir.Model) -> tuple[tuple[int, int], ...]:
    """By the values of a graph; what nodes without a layer (reshapes) read passes through them."""
    owner = {node: index for index, row in enumerate(rows) for node in row.onnx_nodes}
    writers: dict[int, tuple[int, ...]] = {}
    found: dict[tuple[int, int], None] = {}
    for node in model.graph:
        read = dict.fromkeys(index for value in node.inputs for index in writers.get(id(value), ()))
        own = owner.get(str(node.name))
        if own is not None:
            found |= dict.fromkeys((index, own) for index in read if index < own)
        for value in node.outputs:
            writers[id(value)] = tuple(read) if own is None else (own,)
    return tuple(found)
