"""Global average pooling as pooling with a window."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.edit import nodes_until
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
"""AveragePool has no integers, no BF16 before opset 22, and no doubles in runtimes."""


@dataclass(frozen=True)
class GlobalAveragePool:
    """Writes GlobalAveragePool, and ReduceMean over height and width, as AveragePool with the map as its window.

    Rewrite:
        mean over H and W of x [N, C, H, W] = AveragePool(x) with an H x W window; without kept dimensions, Flatten
        follows. A map of more than ``largest_window`` positions is pooled twice: H x W = (a b) x (c d) by a x c, then
        by b x d.
    Requires:
        FP32 or FP16; H and W known, not zero, and windows of at most ``largest_window`` positions: a kernel for pooling
        sums each window by itself, and what that costs for larger ones was not measured.
    Why faster:
        TensorRT for RTX turns the map to [N, C, H, W] in a kernel of its own before it reduces, and pools
        channels-last maps as they are: pooling and classifier take 3 kernels instead of 4, a squeeze-and-excitation
        block one less. Pooled twice: such a block on 32 channels at 112x112 (batch 8, FP16) moves 64.4 MB instead of
        77.1.
    Numerics:
        The same mean, summed in another order.
    Refuses when:
        The size of the map is not known or zero, or no two windows of at most ``largest_window`` positions cover it.
    """

    largest_window: int = 1024
    name: str = "global-average-pool"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Means over all positions of a map [N, C, H, W]."""
        matches, refusals = [], []
        for node in edit.all_nodes(model.graph):
            if not edit.is_op(node, "GlobalAveragePool", "ReduceMean") or not _is_mean_of_map(node):
                continue
            size = _map_size(node)
            if size is None or 0 in size:
                refusals.append(Refusal(str(node.name), "the size of its map is not known, or zero"))
            elif not _windows(size, self.largest_window):
                refusals.append(Refusal(str(node.name), f"its map has {math.prod(size)} positions"))
            else:
                matches.append(Match((node, *_context(node))))
        return Findings(tuple(matches), tuple(refusals))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Replace one node."""
        node = match.nodes[0]
        size, value = _map_size(node), node.inputs[0]
        if size is None:
            return Refusal(match.label, "it was changed by a rewrite before")
        splice, (*others, last) = edit.Splice(model, node, self.name), _windows(size, self.largest_window)
        for window in others:
            value = splice.fresh("AveragePool", value, attributes={"kernel_shape": window, "strides": window})
        value = splice.op("AveragePool", value, attributes={"kernel_shape": last})
        if edit.is_op(node, "ReduceMean") and edit.int_attribute(node, "keepdims", 1) == 0:
            value.shape = None
            value = splice.op("Flatten", value, attributes={"axis": 1})
        splice.finish(value)
        return None


def _context(node: ir.Node) -> tuple[ir.Node, ...]:
    """The nodes up to where the map is read again, as in squeeze-and-excitation: its layout matters there, too."""
    source = node.inputs[0]
    return nodes_until(node.outputs, lambda user: source in user.inputs)


def _is_mean_of_map(node: ir.Node) -> bool:
    value = node.inputs[0]
    if value is None or value.shape is None or len(value.shape) != 4 or value.dtype not in _TYPES:
        return False
    if node.op_type == "GlobalAveragePool":
        return True
    return sorted(axis % 4 for axis in edit.axes_of(node) or ()) == [2, 3]


def _map_size(node: ir.Node) -> tuple[int, int] | None:
    """Height and width of the map a node averages."""
    value = node.inputs[0]
    if value is None or value.shape is None:
        return None
    height, width = value.shape[2], value.shape[3]
    return (height, width) if isinstance(height, int) and isinstance(width, int) else None


def _windows(size: tuple[int, int], largest: int) -> list[tuple[int, int]]:
    """One window, or two of about the same size, that pool a whole map one after the other; none where none do."""
    if math.prod(size) <= largest:
        return [size]
    parts = [[part for part in range(1, min(each, largest) + 1) if each % part == 0] for each in size]
    first = [min(part, key=lambda one: abs(one - math.isqrt(each))) for part, each in zip(parts, size, strict=True)]
    windows = [(first[0], first[1]), (size[0] // first[0], size[1] // first[1])]
    return windows if all(math.prod(window) <= largest for window in windows) else []
