"""A quantized layer as a product of matrices: its weight ``[groups, K, N]`` and sampled rows of its input ``[.., K]``.

A convolution is the product of its unfolded input (im2col) with its weight, one per group: a row of the unfolded input
is what one output position reads, ``K = channels per group x taps`` numbers in the order of the weight, and ``N``
output channels per group come of it. Only the rows of the sampled positions are ever unfolded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit


@dataclass(frozen=True)
class Layer:
    """A Conv, Gemm or MatMul with a constant weight.

    Attributes:
        node: The node, in the FP32 model.
        weight: Its weight, float32, of the shape ONNX gives it.
        groups: Groups of a convolution; 1 for the others.
    """

    node: ir.Node
    weight: np.ndarray
    groups: int

    @property
    def depth(self) -> int:
        """K: how many products are summed for one output element."""
        return math.prod(self.weight.shape[1:]) if self.node.op_type == "Conv" else self.weight.size // self.channels

    @property
    def channels(self) -> int:
        """Output channels of all groups."""
        return int(self.weight.shape[self.channel_axis])

    @property
    def channel_axis(self) -> int:
        """The weight's axis of output channels."""
        return 0 if self.node.op_type == "Conv" or _transposed(self.node, "transB") else 1

    def matrices(self, weight: np.ndarray) -> np.ndarray:
        """A weight (or its INT8 values) as ``[groups, K, N]``."""
        if self.node.op_type == "Conv":
            return weight.reshape(self.groups, -1, self.depth).transpose(0, 2, 1)
        return (weight.T if self.channel_axis == 0 else weight)[None]

    def weight_of(self, matrices: np.ndarray) -> np.ndarray:
        """The inverse of :meth:`matrices`, contiguous."""
        if self.node.op_type == "Conv":
            return np.ascontiguousarray(matrices.transpose(0, 2, 1)).reshape(self.weight.shape)
        return np.ascontiguousarray(matrices[0].T if self.channel_axis == 0 else matrices[0])


def layer_of(node: ir.Node) -> Layer | str:
    """The node as a product of matrices, or why it is none."""
    if node.op_type not in ("Conv", "Gemm", "MatMul"):
        return f"{node.op_type} is no product of rows with a matrix"
    weight = edit.constant_of(edit.input_of(node, 1))
    if weight is None:
        return "its weight is not constant"
    if node.op_type != "Conv" and weight.ndim != 2:
        return f"its weight has {weight.ndim} axes, not 2"
    return Layer(node, np.asarray(weight, np.float32), edit.int_attribute(node, "group", 1))


def positions(layer: Layer, shape: tuple[int, ...], count: int, rng: np.random.Generator) -> np.ndarray:
    """Output positions of one sample, drawn without repetition.

    Args:
        layer: The layer.
        shape: The shape of its data input.
        count: How many; all positions where there are no more.
        rng: Where the choice comes from.

    Returns:
        int64 ``[<= count]``: indices into the output's batch and spatial axes, flattened; sorted.
    """
    if layer.node.op_type == "Conv":
        total = shape[0] * math.prod(size for size, _ in _window(layer, shape))
    elif layer.node.op_type == "Gemm":
        total = shape[1 if _transposed(layer.node, "transA") else 0]
    else:
        total = math.prod(shape[:-1])
    return np.sort(rng.choice(total, count, replace=False)) if total > count else np.arange(total)


def rows_at(layer: Layer, data: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """What the layer reads for the chosen output positions.

    Args:
        layer: The layer.
        data: Its data input: ``[batch, channels, ...]``, or a matrix or a batch of rows.
        chosen: Indices as :func:`positions` gives them.

    Returns:
        ``[groups, len(chosen), K]``, in the type of ``data``; zeros where a convolution reads its padding.
    """
    if layer.node.op_type == "Gemm":
        rows: np.ndarray = (data.T if _transposed(layer.node, "transA") else data)[chosen][None]
        return rows
    if layer.node.op_type == "MatMul":
        rows = data.reshape(-1, data.shape[-1])[chosen][None]
        return rows
    window = _window(layer, data.shape)
    batch, *places = np.unravel_index(chosen, (data.shape[0], *(size for size, _ in window)))
    index = np.zeros((len(chosen), 1), np.int64)
    inside = np.ones((len(chosen), 1), bool)
    for place, (_, first), size in zip(places, window, data.shape[2:], strict=True):
        along = first[place]
        index = (index[:, :, None] * size + np.clip(along, 0, size - 1)[:, None]).reshape(len(chosen), -1)
        inside = (inside[:, :, None] & ((along >= 0) & (along < size))[:, None]).reshape(len(chosen), -1)
    flat = data.reshape(*data.shape[:2], -1)
    read: np.ndarray = flat[batch[:, None], :, index] * inside[:, :, None]
    return read.transpose(0, 2, 1).reshape(len(chosen), layer.groups, -1).transpose(1, 0, 2)


def _transposed(node: ir.Node, name: str) -> bool:
    return node.op_type == "Gemm" and edit.int_attribute(node, name, 0) != 0


def _window(layer: Layer, shape: tuple[int, ...]) -> list[tuple[int, np.ndarray]]:
    """Per spatial axis the output's size, and the input index of every tap at every output: int64 ``[out, taps]``.

    As the ONNX specification of Conv defines ``auto_pad``; indices outside of the input lie in the padding.
    """
    node, axes = layer.node, range(layer.weight.ndim - 2)
    strides = edit.ints_attribute(node, "strides") or tuple(1 for _ in axes)
    dilations = edit.ints_attribute(node, "dilations") or tuple(1 for _ in axes)
    pads = edit.ints_attribute(node, "pads") or tuple(0 for axis in (*axes, *axes))
    automatic = edit.string_attribute(node, "auto_pad", "NOTSET")
    found = []
    for axis in axes:
        size, taps = shape[2 + axis], layer.weight.shape[2 + axis]
        extent = (taps - 1) * dilations[axis] + 1
        if automatic in ("SAME_UPPER", "SAME_LOWER"):
            out = -(-size // strides[axis])
            padding = max((out - 1) * strides[axis] + extent - size, 0)
            begin = padding // 2 if automatic == "SAME_UPPER" else -(-padding // 2)
        else:
            begin, end = (0, 0) if automatic == "VALID" else (pads[axis], pads[axis + len(axes)])
            out = (size + begin + end - extent) // strides[axis] + 1
        start = np.arange(out)[:, None] * strides[axis] - begin
        found.append((out, start + np.arange(taps) * dilations[axis]))
    return found
