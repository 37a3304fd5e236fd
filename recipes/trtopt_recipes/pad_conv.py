"""Padding before a convolution or pooling."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.conv import SlidingWindow, set_window, window_of
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_WINDOWED = ("Conv", "AveragePool", "MaxPool")
_NOT_NEGATIVE = ("Relu", "Sigmoid", "HardSigmoid", "Softmax", "Softplus", "Abs", "Exp", "Sqrt")


@dataclass(frozen=True)
class PadConv:
    """Merges a Pad into the padding of the Conv, AveragePool or MaxPool that follows.

    Rewrite:
        Conv(Pad(x)) = Conv(x) with the pads added up; AveragePool likewise, counting the padding; MaxPool, which pads
        with the least number, where what Pad writes never is the largest.
    Requires:
        Pad with a constant, zero for Conv and AveragePool, along spatial axes only; for MaxPool, the least number of
        the type, or one below everything its input can be (zero after ReLU). Pooling: pads smaller than the window.
    Why faster:
        TensorRT for RTX merges a Pad into a convolution, but runs it before pooling in 2 kernels of its own (7 kernels
        become 5); elsewhere it is a copy.
    Numerics:
        Exact.
    Refuses when:
        A user of the padded tensor cannot take the padding, or the tensor is a graph output; the pads are negative or
        not constant; another value is padded; automatic padding; pooling rounds its size up.
    """

    name: str = "pad-conv"
    stage: Stage = Stage.FOLD
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Constant padding that only convolutions and poolings read."""
        places = []
        for pad in edit.all_nodes(model.graph):
            if not edit.is_op(pad, "Pad") or edit.string_attribute(pad, "mode", "constant") != "constant":
                continue
            users = [(node, index) for node, index in pad.outputs[0].uses()]
            if not any(index == 0 and edit.is_op(node, *_WINDOWED) for node, index in users):
                continue
            reasons = [_why_not(pad, node, index) for node, index in users]
            reason = next((reason for reason in reasons if reason), "")
            if pad.outputs[0].is_graph_output():
                reason = "its output is a graph output"
            places.append((Match((pad, *(node for node, _ in users))), reason))
        return Findings.of(places)

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Merge one Pad into its users."""
        pad, *users = match.nodes
        windows = [_merged(pad, node) for node in users]
        for node, window in zip(users, windows, strict=True):
            if window is None:
                return Refusal(match.label, "it was changed by a rewrite before")
            node.replace_input_with(0, pad.inputs[0])
            set_window(node, window)
            if node.op_type == "AveragePool":
                node.attributes["count_include_pad"] = ir.AttrInt64("count_include_pad", 1)
            edit.tag(node, self.name)
        edit.remove_node(pad)
        return None


def _why_not(pad: ir.Node, node: ir.Node, index: int) -> str:
    if index != 0 or not edit.is_op(node, *_WINDOWED):
        return f"its output is used by {node.name} ({node.op_type}), too"
    if node.graph is not pad.graph:
        return f"{node.name} is in a nested graph"
    window = _merged(pad, node)
    if window is None:
        return f"its pads are unknown, negative or not spatial, or {node.name} pads automatically"
    value = _pad_value(pad)
    if value is None:
        return "the value it pads with is not a constant"
    if node.op_type == "Conv":
        return "" if value == 0 else f"it pads with {value}, not zero"
    before = window_of(node)
    if edit.int_attribute(node, "ceil_mode", 0) or set(window.dilations) != {1}:
        return f"{node.name} rounds its size up, or skips elements"
    if any(size <= amount for size, amount in zip(window.kernel * 2, window.pads, strict=True)):
        return f"{node.name} has a window no larger than the padding"
    if node.op_type == "AveragePool":
        counts = edit.int_attribute(node, "count_include_pad", 0) == 1 or before is None or not any(before.pads)
        return "" if value == 0 and counts else f"{node.name} would count other elements, or other values than zero"
    if len(node.outputs) > 1 and node.outputs[1].name:
        return f"{node.name} gives indices"
    return "" if _never_largest(value, pad.inputs[0]) else f"the {value} it pads with may be the largest in a window"


def _pad_value(pad: ir.Node) -> float | None:
    if edit.input_of(pad, 2) is None:
        return 0.0
    value = edit.constant_of(edit.input_of(pad, 2))
    return None if value is None or value.size != 1 else float(value.reshape(-1)[0])


def _merged(pad: ir.Node, node: ir.Node) -> SlidingWindow | None:
    """The window of ``node`` with the padding of ``pad`` added; None where that cannot be."""
    window, spatial = window_of(node), _spatial_pads(pad)
    if window is None or spatial is None or len(spatial) != len(window.pads):
        return None
    return replace(window, pads=tuple(a + b for a, b in zip(window.pads, spatial, strict=True)))


def _spatial_pads(pad: ir.Node) -> tuple[int, ...] | None:
    """Begins, then ends, of all axes but the first two; None unless those are zero and all are known and positive."""
    pads, source = edit.constant_of(edit.input_of(pad, 1)), pad.inputs[0]
    if pads is None or source is None or np.any(pads < 0):
        return None
    if edit.input_of(pad, 3) is not None:
        axes = edit.constant_of(edit.input_of(pad, 3))
        if axes is None or source.shape is None:
            return None
        rank = len(source.shape)
        full = np.zeros((2, rank), np.int64)
        full[:, axes.reshape(-1) % rank] = pads.reshape(2, -1)
    else:
        full = pads.reshape(2, -1)
    return None if full[:, :2].any() else tuple(int(amount) for amount in full[:, 2:].reshape(-1))


def _never_largest(value: float, source: ir.Value | None) -> bool:
    """Whether no element of ``source`` is less than ``value``."""
    if source is None or source.dtype is None or not source.dtype.is_floating_point():
        return False
    if value <= float(np.asarray(source.dtype.min)):
        return True
    producer = source.producer()
    if value > 0 or producer is None:
        return False
    if edit.is_op(producer, "Clip"):
        low = edit.constant_of(edit.input_of(producer, 1))
        return low is not None and float(low.reshape(-1)[0]) >= value
    return edit.is_op(producer, *_NOT_NEGATIVE)
