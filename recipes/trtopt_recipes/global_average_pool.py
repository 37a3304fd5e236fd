"""Means and maxima of maps as pooling with a window."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.edit import nodes_until
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
"""AveragePool has no integers, no BF16 before opset 22, and no doubles in runtimes."""

_MEANS = ("GlobalAveragePool", "ReduceMean")
_MAXIMA = ("GlobalMaxPool", "ReduceMax")

_DEPTH = 4
"""Nodes of one input between a convolution and a maximum."""


@dataclass(frozen=True)
class GlobalAveragePool:
    """Writes means and maxima over height, width or both as pooling with a window.

    Rewrite:
        mean over H and W of x [N, C, H, W] = AveragePool(x) with an H x W window; without kept dimensions, Flatten
        follows. A map of more than ``largest_window`` positions is pooled twice: H x W = (a b) x (c d) by a x c, then
        by b x d. Likewise, of a convolution's map, maxima over one of both axes or over both, by MaxPool, and means
        over one; without the kept dimension, Squeeze follows.
    Requires:
        FP32 or FP16; the sizes that are reduced known, not zero, and windows of at most ``largest_window`` positions: a
        kernel for pooling sums each window by itself, and what that costs for larger ones was not measured.
    Why faster:
        TensorRT for RTX turns the map to [N, C, H, W] in a kernel of its own before it reduces, and pools
        channels-last maps as they are: pooling and classifier take 3 kernels instead of 4, a squeeze-and-excitation
        block one less. Pooled twice: such a block on 32 channels at 112x112 (batch 8, FP16) moves 64.4 MB instead of
        77.1. DGCNN of three layers takes the maximum over the 16 neighbours of 256 points (batch 8): 593 -> 447 us by a
        plain roofline of an L4.
    Numerics:
        The same mean, summed in another order; the same maximum, of finite numbers.
    Refuses when:
        The size of the map is not known or zero, or no two windows of at most ``largest_window`` positions cover it.
    """

    largest_window: int = 1024
    name: str = "global-average-pool"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Means over all positions of a map [N, C, H, W], and other reductions of a convolution's."""
        places, opset = [], model.graph.opset_imports.get("", 1)
        for node in edit.all_nodes(model.graph):
            axes = _axes(node, opset)
            if not axes:
                continue
            size = _size(node, axes)
            reason = ""
            if size is None or 0 in size:
                reason = "the size of its map is not known, or zero"
            elif not _windows(size, self.largest_window):
                reason = f"its map has {math.prod(size)} positions"
            places.append((Match((node, *_context(node))), reason))
        return Findings.of(places)

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Replace one node."""
        node, opset = match.nodes[0], model.graph.opset_imports.get("", 1)
        axes, value = _axes(node, opset), node.inputs[0]
        size = _size(node, axes) if axes else None
        if size is None:
            return Refusal(match.label, "it was changed by a rewrite before")
        splice, (*others, last) = edit.Splice(model, node, self.name), _windows(size, self.largest_window)
        kind = "MaxPool" if edit.is_op(node, *_MAXIMA) else "AveragePool"
        for window in others:
            value = splice.fresh(kind, value, attributes={"kernel_shape": window, "strides": window})
        value = splice.op(kind, value, attributes={"kernel_shape": last})
        if edit.is_op(node, "ReduceMean", "ReduceMax") and edit.int_attribute(node, "keepdims", 1) == 0:
            value.shape = None
            if len(axes) == 1:
                value = splice.op("Squeeze", value, splice.ints(axes, node.outputs[0], "axis"))
            else:
                value = splice.op("Flatten", value, attributes={"axis": 1})
        splice.finish(value)
        return None


def _context(node: ir.Node) -> tuple[ir.Node, ...]:
    """The nodes up to where the map is read again, as in squeeze-and-excitation: its layout matters there, too."""
    source = node.inputs[0]
    return nodes_until(node.outputs, lambda user: source in user.inputs)


def _axes(node: ir.Node, opset: int) -> tuple[int, ...]:
    """The axes that a mean or a maximum of a map is over; none where it is another reduction."""
    value = edit.input_of(node, 0) if edit.is_op(node, *_MEANS, *_MAXIMA) else None
    if value is None or value.shape is None or len(value.shape) != 4 or value.dtype not in _TYPES:
        return ()
    is_global = node.op_type.startswith("Global")
    axes = (2, 3) if is_global else tuple(sorted(axis % 4 for axis in edit.axes_of(node) or ()))
    if axes == (2, 3) and edit.is_op(node, *_MEANS):
        return axes
    # Scores of attention have four axes, too, and a Squeeze of a constant axis is of opset 13.
    return axes if axes in ((2,), (3,), (2, 3)) and opset >= 13 and _is_of_conv(value) else ()


def _is_of_conv(value: ir.Value | None) -> bool:
    """Whether a convolution makes a map, or nodes of one computed input behind it do."""
    for _ in range(_DEPTH):
        node = edit.maker_of(value)
        if node is None or edit.is_op(node, "Conv"):
            return node is not None
        data = [each for each in node.inputs if each is not None and edit.constant_tensor_of(each) is None]
        if not edit.is_op(node, *edit.ELEMENTWISE) or len(data) != 1:
            return False
        value = data[0]
    return False


def _size(node: ir.Node, axes: tuple[int, ...]) -> tuple[int, int] | None:
    """Height and width of the window that a node reduces, one along an axis that it leaves."""
    value = node.inputs[0]
    if value is None or value.shape is None:
        return None
    height, width = (value.shape[axis] if axis in axes else 1 for axis in (2, 3))
    return (height, width) if isinstance(height, int) and isinstance(width, int) else None


def _windows(size: tuple[int, int], largest: int) -> list[tuple[int, int]]:
    """One window, or two of about the same size, that pool a whole map one after the other; none where none do."""
    if math.prod(size) <= largest:
        return [size]
    parts = [[part for part in range(1, min(each, largest) + 1) if each % part == 0] for each in size]
    first = [min(part, key=lambda one: abs(one - math.isqrt(each))) for part, each in zip(parts, size, strict=True)]
    windows = [(first[0], first[1]), (size[0] // first[0], size[1] // first[1])]
    return windows if all(math.prod(window) <= largest for window in windows) else []
