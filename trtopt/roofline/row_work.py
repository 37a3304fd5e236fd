"""The rows that the nodes of a graph reduce."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from trtopt.graph.edit import axes_of, input_of, int_attribute, ints_attribute, is_op
from trtopt.graph.products import Shapes, shape_of_input, shape_of_output
from trtopt.roofline.rows import HELD_PER_THREAD, WARP, RowSizes

REDUCTIONS: dict[str, int] = {
    **dict.fromkeys(("Softmax", "LogSoftmax"), 2),
    **dict.fromkeys(("ArgMax", "ArgMin", "Hardmax", "LpNormalization", "MeanVarianceNormalization"), 1),
    **dict.fromkeys(("GroupNormalization", "InstanceNormalization", "LayerNormalization", "RMSNormalization"), 1),
    **dict.fromkeys(("GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool"), 1),
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean"), 1),
    **dict.fromkeys(("ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"), 1),
}
"""Operators that reduce rows, and how often: softmax for the largest value and for the sum, norms once for mean and
variance together (Welford's update)."""

_OVER_PIXELS = ("GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "InstanceNormalization")


def rows_of(nodes: Sequence[ir.Node], shapes: Shapes) -> RowSizes | None:
    """The rows of a kernel that computes ``nodes``: those of its last reduction, read once per reduction, and once more
    if whole rows are written.

    Returns:
        None without a reduction whose shape is known, and where each thread holds a row of its own: neighbours with a
        few entries each share nothing, so that the kernel is an element-wise one.
    """
    found = [(node, rows) for node in nodes if (rows := _rows(node, shapes)) is not None]
    if not found:
        return None
    last = found[-1][1]
    ends = [shape for node in nodes[-1:] if (shape := shape_of_output(node, shapes)) is not None]
    writes_rows = any(math.prod(shape) > last.count for shape in ends)
    passes = sum(REDUCTIONS[node.op_type] for node, _ in found) + writes_rows
    return RowSizes(last.count, last.length, last.inner, passes)


def _rows(node: ir.Node, shapes: Shapes) -> RowSizes | None:
    shape = shape_of_input(node, 0, shapes) if is_op(node, *REDUCTIONS) else None
    axes = None if shape is None else _axes(node, len(shape))
    if shape is None or axes is None or 0 in shape or not axes:
        return None
    size, length = math.prod(shape), math.prod(shape[axis] for axis in axes)
    if is_op(node, "GroupNormalization"):
        count = shape[0] * int_attribute(node, "num_groups", 1)
        return RowSizes(count, size // count)
    if is_op(node, *_OVER_PIXELS):  # engines keep channels last: pixels of one lie a pixel's channels apart
        return RowSizes(size // length, length, shape[1])
    inner = math.prod(shape[max(axes) + 1 :])
    return None if inner >= WARP and length <= HELD_PER_THREAD else RowSizes(size // length, length, inner)


def _axes(node: ir.Node, rank: int) -> tuple[int, ...] | None:
    """The axes that are reduced; None where they are not known or do not exist."""
    if is_op(node, *_OVER_PIXELS, "GroupNormalization"):
        return tuple(range(2, rank)) or None
    axis = int_attribute(node, "axis", 0 if is_op(node, "ArgMax", "ArgMin") else -1)
    if is_op(node, "LayerNormalization", "RMSNormalization"):
        axes: Sequence[int] = range(axis % max(rank, 1), rank)
    elif is_op(node, "MeanVarianceNormalization"):
        axes = ints_attribute(node, "axes") or (0, 2, 3)
    elif node.op_type.startswith("Reduce"):
        axes = _reduced(node, rank)
    else:
        axes = (axis,)
    if any(not -rank <= axis < rank for axis in axes):
        return None
    return tuple(sorted({axis % rank for axis in axes}))


def _reduced(node: ir.Node, rank: int) -> Sequence[int]:
    """The axes of a Reduce operator: an attribute, or since opset 13 or 18 a constant; all where none is named."""
    axes = axes_of(node)
    if axes is not None:
        return axes
    computed = input_of(node, 1) is not None
    return () if computed or int_attribute(node, "noop_with_empty_axes", 0) else range(rank)
