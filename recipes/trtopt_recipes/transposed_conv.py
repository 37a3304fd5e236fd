"""Transposed convolutions that do not enlarge."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.conv import SlidingWindow, set_weights, set_window, weight_and_bias, why_not_constant, window_of
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target


@dataclass(frozen=True)
class TransposedConv:
    """Writes a ConvTranspose of stride 1 as a Conv.

    Rewrite:
        The transpose of a convolution with stride 1, kernel k, dilation d and padding p is the convolution with the
        kernel turned round, input and output channels exchanged per group, and padding d (k - 1) - p.
    Requires:
        Constant weights; stride 1 on every axis; no output padding or output shape.
    Why faster:
        Both are one kernel with the same bytes, but a transposed convolution is computed as the gradient of one, which
        the performance model rates slower (62.2 against 55.4 us for 64 channels at 28x28), and TensorRT for RTX has no
        INT8 kernel for it: it dequantizes its inputs in kernels of their own.
    Numerics:
        The same sum.
    Refuses when:
        Padding larger than d (k - 1); a given output shape or automatic padding; computed weights.
    """

    name: str = "transposed-conv"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Transposed convolutions of stride 1."""
        matches, refusals = [], []
        for node in edit.all_nodes(model.graph):
            if not edit.is_op(node, "ConvTranspose") or set(edit.ints_attribute(node, "strides") or (1,)) != {1}:
                continue
            reason = _why_not(node)
            if reason:
                refusals.append(Refusal(str(node.name), reason))
            else:
                matches.append(Match((node,)))
        return Findings(tuple(matches), tuple(refusals))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Replace one node."""
        node = match.nodes[0]
        window, graph, names = _conv_window(node), node.graph, edit.Names(model)
        if window is None or graph is None:
            return Refusal(match.label, "it was changed by a rewrite before")
        weight, bias = weight_and_bias(node)
        output = str(node.outputs[0].name)
        conv = ir.Node(
            "",
            "Conv",
            [*node.inputs],
            [ir.AttrInt64("group", edit.int_attribute(node, "group", 1))],
            name=names.node(f"{node.name}_conv"),
        )
        conv.outputs[0].type, conv.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
        conv.outputs[0].name = names.value(f"{output}_conv")
        set_window(conv, window)
        edit.tag(conv, self.name)
        graph.insert_before(node, conv)
        edit.replace_value(node.outputs[0], conv.outputs[0])
        edit.remove_node(node)
        conv.outputs[0].name = output
        turned = _turned(weight, edit.int_attribute(conv, "group", 1))
        set_weights(names, conv, turned, None if edit.input_of(conv, 2) is None else bias)
        return None


def _why_not(node: ir.Node) -> str:
    reason = why_not_constant(node)
    if reason:
        return reason
    if edit.ints_attribute(node, "output_shape") is not None or any(edit.ints_attribute(node, "output_padding") or ()):
        return "its output shape or output padding is given"
    if window_of(node) is None:
        return "it pads automatically"
    return "" if _conv_window(node) is not None else "it pads by more than its kernel reaches"


def _conv_window(node: ir.Node) -> SlidingWindow | None:
    """The window of the convolution that does the same."""
    window = window_of(node)
    if window is None:
        return None
    reach = [dilation * (size - 1) for dilation, size in zip(window.dilations, window.kernel, strict=True)]
    pads = tuple(most - pad for most, pad in zip(reach * 2, window.pads, strict=True))
    return None if min(pads) < 0 else SlidingWindow(window.kernel, window.strides, pads, window.dilations)


def _turned(weight: np.ndarray, groups: int) -> np.ndarray:
    """[C, M / group, ...] as [M, C / group, ...] with every spatial axis reversed."""
    rows, columns, *spatial = weight.shape
    grouped = weight.reshape(groups, rows // groups, columns, *spatial).swapaxes(1, 2)
    turned = grouped.reshape(groups * columns, rows // groups, *spatial)
    result: np.ndarray = np.flip(turned, axis=tuple(range(2, turned.ndim)))
    return result
