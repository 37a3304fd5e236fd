"""The 2:4 pattern of Sparse Tensor Cores: of each 4 consecutive weights of a sum, at most 2 are not zero.

The weights of a sum are those of one output channel along the reduction axis: K of a matrix product; the input channels
of a group, for each kernel position by itself, of a convolution (TensorRT documentation, "Structured Sparsity": "for
each output channel and for each spatial pixel in the kernel weights, every four input channels must have at least two
zeros").
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit

GROUP = 4
"""Consecutive weights that share a choice."""

KEPT = 2
"""Of which this many may differ from zero."""


def reduction_axis(node: ir.Node) -> int:
    """The axis of a weight (input 1) along which a Conv, Gemm or MatMul sums: 0 or 1."""
    return 1 if node.op_type == "Conv" or edit.int_attribute(node, "transB", 0) else 0


def best_mask(saliency: np.ndarray, axis: int) -> np.ndarray:
    """The two of each four that matter most.

    Args:
        saliency: What each weight is worth, of the weight's shape; not NaN. Magnitudes give the mask closest to the
            weight.
        axis: The weight's reduction axis; its size is a multiple of 4.

    Returns:
        bool, of the same shape: True where the weight stays. Of equals the first ones stay.

    Raises:
        ValueError: The size of the axis is not a multiple of 4.
    """
    fours = _fours(saliency, axis)
    mask = np.empty(fours.shape, bool)
    for index in range(GROUP):
        better = np.zeros(fours.shape[:-1], np.int8)
        for other in range(GROUP):
            if other != index:
                wins = np.greater_equal if other < index else np.greater
                better += wins(fours[..., other], fours[..., index])
        mask[..., index] = better < KEPT
    return np.ascontiguousarray(np.moveaxis(mask.reshape(np.moveaxis(saliency, axis, -1).shape), -1, axis))


def is_sparse(weight: np.ndarray, axis: int) -> bool:
    """Whether a weight is 2:4 along an axis; one whose axis is not a multiple of 4 is not.

    Args:
        weight: Of any numeric type; all zeros are 2:4.
        axis: Its reduction axis.
    """
    return not weight.shape[axis] % GROUP and bool((np.count_nonzero(_fours(weight, axis), axis=-1) <= KEPT).all())


def kept_share(weight: np.ndarray, mask: np.ndarray) -> float:
    """The share of a weight's magnitude, sum of |w|, that a mask keeps: 0..1, and 1 for a weight of zeros."""
    magnitude = np.abs(np.asarray(weight, np.float64))
    total = float(magnitude.sum())
    return float(magnitude.sum(where=mask)) / total if total else 1.0


def why_not(shape: tuple[int, ...], axis: int, groups: int = 1) -> str:
    """Why a weight of this shape cannot be 2:4; empty where it can."""
    size = shape[axis]
    if not math.prod(shape):
        return "its weight is empty"
    if size % GROUP == 0:
        return ""
    if groups > 1:
        return f"each of its {groups} groups reads {size} channels: no multiple of {GROUP}"
    return f"it sums over {size} channels: no multiple of {GROUP}"


def _fours(array: np.ndarray, axis: int) -> np.ndarray:
    """``[..., 4]``: the array with its axis last, and cut into fours."""
    if array.shape[axis] % GROUP:
        raise ValueError(f"an axis of {array.shape[axis]} is no multiple of {GROUP}")
    last = np.moveaxis(array, axis, -1)
    return last.reshape(*last.shape[:-1], -1, GROUP)
