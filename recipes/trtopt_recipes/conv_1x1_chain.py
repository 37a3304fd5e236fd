"""Two convolutions with nothing between them, one of them pointwise."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.conv import (
    SlidingWindow,
    set_weights,
    set_window,
    sole_user,
    weight_and_bias,
    why_not_constant,
    why_not_fit,
    window_of,
)
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target


@dataclass(frozen=True)
class Conv1x1Chain:
    """Merges a convolution and a 1x1 convolution that follow each other without an activation into one.

    Rewrite:
        V (W x + b) + c = (V W) x + (V b + c), per tap of the one that has several.
    Requires:
        Constant weights, no groups; one of the two is 1x1. Where the first is, it has stride 1, and the second does
        not pad or the first adds nothing: the padding is zero after the first one's bias.
    Why faster:
        One kernel and one intermediate tensor less: at 64 channels and 28x28, 6 kernels become 5 and 11.2 MB 9.6 MB
        on TensorRT for RTX.
    Numerics:
        The weights' product is computed in FP64 and rounded once; the value between is not rounded any more.
    Refuses when:
        The merged convolution would compute more than both (a bottleneck between wide layers); the value between is
        used elsewhere or is a graph output; a merged weight does not fit its type, or FP16 where the weights did.
    """

    name: str = "conv-1x1-chain"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Convolutions right after a convolution."""
        places = []
        for node in edit.all_nodes(model.graph):
            first = edit.maker_of(node.inputs[0]) if edit.is_op(node, "Conv") else None
            if not edit.is_op(first, "Conv") or not _is_chain(first, node):
                continue
            places.append((Match((node, first)), _why_not(first, node)))
        return Findings.of(places)

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Merge one pair."""
        node, first = match.nodes
        window = _merged_window(first, node)
        if window is None or not _is_chain(first, node) or _why_not(first, node):
            return Refusal(match.label, "it was changed by a rewrite before")
        (inner, inner_bias), (outer, outer_bias) = weight_and_bias(first), weight_and_bias(node)
        # One of the two has a single tap, so the taps of the product are those of the other.
        flat_outer = outer.reshape(outer.shape[0], outer.shape[1], -1).transpose(2, 0, 1)
        flat_inner = inner.reshape(inner.shape[0], inner.shape[1], -1).transpose(2, 0, 1)
        with np.errstate(invalid="ignore", over="ignore"):
            product = np.matmul(flat_outer, flat_inner).transpose(1, 2, 0)
            bias = outer_bias + flat_outer.sum(axis=0) @ inner_bias
        weight = product.reshape(outer.shape[0], inner.shape[1], *window.kernel)
        dtype = edit.array_of(node.inputs[1]).dtype
        reason = why_not_fit(weight, dtype, inner, outer)
        reason = reason or why_not_fit(bias, dtype, inner_bias, outer_bias)
        if reason:
            return Refusal(match.label, reason)
        node.replace_input_with(0, first.inputs[0])
        set_weights(edit.Names(model), node, weight, bias if bias.any() or edit.input_of(node, 2) is not None else None)
        set_window(node, window)
        edit.remove_node(first)
        edit.tag(node, self.name)
        return None


def _is_chain(first: ir.Node, second: ir.Node) -> bool:
    """Whether two convolutions without groups follow each other, one of them of a single tap."""
    if edit.int_attribute(first, "group", 1) != 1 or edit.int_attribute(second, "group", 1) != 1:
        return False
    one, two = window_of(first), window_of(second)
    if one is None or two is None:
        return False
    return _has_one_tap(two) or one.is_pointwise


def _has_one_tap(window: SlidingWindow) -> bool:
    return set(window.kernel) == {1} and not any(window.pads)


def _merged_window(first: ir.Node, second: ir.Node) -> SlidingWindow | None:
    one, two = window_of(first), window_of(second)
    if one is None or two is None:
        return None
    strides = tuple(a * b for a, b in zip(one.strides, two.strides, strict=True))
    taps = one if _has_one_tap(two) else two
    return SlidingWindow(taps.kernel, strides, taps.pads, taps.dilations)


def _why_not(first: ir.Node, second: ir.Node) -> str:
    if sole_user(first.outputs[0]) is not second:
        return f"the output of {first.name} is used elsewhere"
    reason = why_not_constant(first) or why_not_constant(second)
    if reason:
        return reason
    window = window_of(second)
    bias = edit.constant_of(edit.input_of(first, 2))
    if window is None or (any(window.pads) and bias is not None and bias.any()):
        return f"it pads with zeros, to which the bias of {first.name} was not added"
    inner, outer = (edit.array_of(node.inputs[1]).shape for node in (first, second))
    # Multiplications per output position; the first computes every position the second then skips.
    skipped = math.prod(window.strides)
    merged = outer[0] * inner[1] * math.prod(inner[2:]) * math.prod(outer[2:])
    both = skipped * math.prod(inner) + math.prod(outer)
    if merged > both:
        return f"one convolution would compute {merged / both:.1f} times as much as it and {first.name}"
    return ""
