"""A model without the narrow weights that it brings along for products of floating tensors: what these are worth."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.precision.qdq.canonicalize import QdqEditor
from trtopt.support.dequantize import dequantized

_MOST_BYTES = 1 << 30
"""Wide weights that are held at most: a larger model is not judged."""


def with_wide_weights(model: ir.Model) -> tuple[ir.Model, tuple[str, ...]]:
    """A clone of a mended model without Q/DQ of activations, in which products read wide weights.

    Returns:
        The clone, and the names of the nodes that read narrow weights before: none where there are none, or where the
        wide ones would take more than 1 GiB.
    """
    clone = model.clone()
    work, found, size = QdqEditor(clone, "", edit.Names(clone)), list[str](), 0
    known: dict[ir.Value, np.ndarray] = {}
    for node in work.nodes("DequantizeLinear"):
        size += 4 * int(np.prod(edit.static_shape(node.outputs[0]) or (0,)))
        array = dequantized(node, known) if size <= _MOST_BYTES else None
        if array is None:
            continue
        result = node.outputs[0]
        known[result] = array
        readers = [(user, index) for user, index in result.uses() if not edit.is_op(user, "DequantizeLinear")]
        found += [str(user.name) for user, index in readers if _is_weight(user, index)]
        wide = work.constant(f"{result.name}_wide", array)
        for user, index in readers:
            user.replace_input_with(index, wide)
    work.drop_unused()
    return clone, tuple(found) if size <= _MOST_BYTES else ()


def _is_weight(node: ir.Node, index: int) -> bool:
    """Whether a node reads a weight there, or hands it on to a product."""
    return edit.is_op(node, "Cast", "Transpose") or (index == 1 and edit.is_op(node, "Gemm", "MatMul"))
