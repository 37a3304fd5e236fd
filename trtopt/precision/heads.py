"""Scores that leave the network: the last squashing function, and a small product before it, stay FP32."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from trtopt.graph import edit

_SQUASHING = frozenset(["Sigmoid", "Softmax", "LogSoftmax", "Tanh"])
"""Operators that press scores together, so that rounding what they read or write makes equal what was not."""

SMALL_HEAD_WEIGHTS = 2**19
"""Largest number of weights of a head kept in FP32: at most 1 MB more to read, some microseconds on a small GPU."""


def score_nodes(model: ir.Model, integer: Collection[str]) -> dict[str, str]:
    """Nodes to keep in FP32, by name, with the reason.

    Args:
        model: A widened model.
        integer: Names of nodes that will run in INT8; they stay so.
    """
    reasons: dict[str, str] = {}
    for node in model.graph:
        if node.op_type not in _SQUASHING or not any(value.is_graph_output() for value in node.outputs):
            continue
        reasons[str(node.name)] = "its result leaves the network in FP32: rounding it on the way would only make ties"
        for head in _head(node.inputs[0]):
            if head.name not in integer:
                reasons[str(head.name)] = f"small, and its scores only pass {node.op_type} before they leave in FP32"
    return reasons


def _head(value: ir.Value | None) -> list[ir.Node]:
    """The product (and the addition of its bias) that makes ``value``, if it is small."""
    node = value.producer() if value is not None else None
    added = []
    if node is not None and node.op_type == "Add":
        added = [node]
        node = next((item.producer() for item in node.inputs if item is not None and item.producer() is not None), None)
    if node is None or node.op_type not in ("Gemm", "MatMul"):
        return []
    weight = edit.constant_tensor_of(node.inputs[1])
    return [node, *added] if weight is not None and weight.size <= SMALL_HEAD_WEIGHTS else []
