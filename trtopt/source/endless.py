"""Loops that never end, told before anything runs them."""

from __future__ import annotations

import onnx_ir as ir

from trtopt.errors import InvalidModelError
from trtopt.graph.edit import all_nodes, constant_tensor_of

_MOST_TRIPS = 1 << 30
"""A quarter of an hour, were a trip a microsecond. A larger trip count stands for none: exporters write the largest
INT64 for ``while`` loops, which have a condition."""


def check_loops(model: ir.Model) -> None:
    """Raise where a Loop has no trip count, or one that no run reaches, and a condition that is true at all times.

    A condition that is computed is believed: whether it becomes false is for a run to tell, whose time is limited.

    Args:
        model: A model whose constants are initializers or Constant nodes.

    Raises:
        InvalidModelError: With the node.
    """
    for node in all_nodes(model.graph):
        if node.op_type != "Loop" or node.domain not in ("", "ai.onnx"):
            continue
        trips = node.inputs[0] if node.inputs else None
        count = _scalar(trips, ir.DataType.INT64)
        bounded = trips is not None and (count is None or count < _MOST_TRIPS)
        if not bounded and _always(node):
            raise InvalidModelError(
                "The loop never ends: its condition is always true, and "
                + ("it has no trip count" if count is None else f"its trip count is {count}"),
                where=f"node {node.name}",
                remedy="give it a trip count, or a condition that becomes false",
            )


def _always(node: ir.Node) -> bool:
    """Whether the condition of a loop is true before the first trip and after each."""
    body = node.attributes["body"].as_graph()
    first = node.inputs[1] if len(node.inputs) > 1 else None
    begins = first is None or _is_true(first)
    if not body.outputs:
        return False
    kept = len(body.inputs) > 1 and _source(body.outputs[0]) is body.inputs[1]
    return begins and (kept or _is_true(body.outputs[0]))


def _is_true(value: ir.Value) -> bool:
    return bool(_scalar(_source(value), ir.DataType.BOOL))


def _scalar(value: ir.Value | None, dtype: ir.DataType) -> int | None:
    """The only entry of a constant; None for what is no constant, has more of them, or another type."""
    tensor = constant_tensor_of(value)
    return int(tensor.numpy().item()) if tensor is not None and tensor.dtype == dtype and tensor.size == 1 else None


def _source(value: ir.Value) -> ir.Value:
    """The value that Identity nodes pass on."""
    while (node := value.producer()) is not None and node.op_type == "Identity" and node.inputs[0] is not None:
        value = node.inputs[0]
    return value
