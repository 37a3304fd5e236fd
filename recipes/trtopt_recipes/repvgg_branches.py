"""Parallel convolutions on one input whose results are added."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.conv import (
    SlidingWindow,
    copy_node,
    norm_affine,
    set_weights,
    set_window,
    trains,
    weight_and_bias,
    why_not_constant,
    why_not_fit,
    window_of,
)
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target


@dataclass(frozen=True)
class RepvggBranches:
    """Merges convolutions, batch normalization and the identity on one input, added up, into one convolution.

    Rewrite:
        W x + V x + s x + t + x = (W + V + diag(s) + I) x + t, kernels aligned at their centres: a 1x1 kernel becomes
        the tap of a 3x3 kernel that reads the same position.
    Requires:
        Constant weights; equal strides and groups, no dilation; results of one shape that only the additions read. At
        least two branches that are no identity: adding the input itself costs no kernel.
    Why faster:
        A RepVGG block (3x3, 1x1, normalization) takes 3 kernels on TensorRT for RTX, which adds one result after the
        other to the next convolution; merged, it is one (7 kernels become 5, 14.5 MB become 9.6 MB).
    Numerics:
        Weights are added in FP64 and rounded once; the partial results are not rounded any more.
    Refuses when:
        Branches differ in stride or group, or are dilated; the merged kernel has more taps than its branches (1x7
        and 7x1); a branch is used elsewhere or is a graph output; a merged weight does not fit its type, or FP16 where
        the weights did.
    """

    name: str = "repvgg-branches"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Sums of branches that start at one value."""
        places = []
        for node in edit.all_nodes(model.graph):
            if not edit.is_op(node, "Add", "Sum") or _is_inner(node):
                continue
            adds, leaves = _leaves(node)
            branches = _branches(leaves)
            if len(branches) < 2:
                continue
            places.append((Match((node, *adds[1:], *branches)), _why_not(node, branches)))
        return Findings.of(places)

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Merge the branches of one sum."""
        total = match.nodes[0]
        adds, leaves = _leaves(total)
        branches = _branches(leaves)
        source, graph, output = branches[0].inputs[0], total.graph, total.outputs[0]
        main = _main(branches)
        window = _merged_window(branches)
        if source is None or graph is None or main is None or window is None or len(branches) < 2:
            return Refusal(match.label, "it was changed by a rewrite before")
        merged = {id(node.outputs[0]) for node in branches}
        rest = [leaf for leaf in leaves if id(leaf) not in merged]
        keeps_size = _can_be_identity(main, window) and _map_of(source) == _map_of(output)
        identities = [leaf for leaf in rest if leaf is source and keeps_size]
        rest = [leaf for leaf in rest if leaf is not source or not keeps_size]
        weight, bias = _sum(main, branches, window, len(identities))
        old = [weight_and_bias(node) for node in branches if node.op_type == "Conv"]
        dtype = edit.array_of(main.inputs[1]).dtype
        reason = why_not_fit(weight, dtype, *(each[0] for each in old))
        reason = reason or why_not_fit(bias, dtype, *(each[1] for each in old))
        if reason:
            return Refusal(match.label, reason)
        splice = edit.Splice(model, total, self.name)
        name, made = splice.names.node(f"{total.name}_conv"), splice.names.value(f"{output.name}_conv")
        conv = copy_node(main, main.inputs, name=name, output=made)
        value = conv.outputs[0]
        value.shape = output.shape
        set_window(conv, window)
        edit.tag(conv, self.name)
        graph.insert_before(total, conv)
        set_weights(splice.names, conv, weight, bias)
        for leaf in rest:
            value = splice.op("Add", value, leaf)
        splice.finish(value)
        for node in (*adds[1:], *branches):
            edit.remove_node(node)
        return None


def _is_inner(node: ir.Node) -> bool:
    """Whether an addition is a summand of another one."""
    value = node.outputs[0]
    user = next((user for user, _ in value.uses()), None) if edit.only_user(value) is not None else None
    return edit.is_op(user, "Add", "Sum") and user.graph is node.graph


def _leaves(total: ir.Node) -> tuple[list[ir.Node], list[ir.Value]]:
    """The additions of one sum, the last first, and what they add."""
    adds, leaves, index = [total], [], 0
    while index < len(adds):
        for value in adds[index].inputs:
            producer = edit.maker_of(value)
            if edit.is_op(producer, "Add", "Sum") and _is_inner(producer):
                adds.append(producer)
            elif value is not None:
                leaves.append(value)
        index += 1
    return adds, leaves


def _branches(leaves: list[ir.Value]) -> list[ir.Node]:
    """Convolutions and normalizations among the summands that read one value: the most that do, one conv at least."""
    by_source: dict[int, list[ir.Node]] = {}
    for leaf in leaves:
        node = leaf.producer()
        if edit.is_op(node, "Conv", "BatchNormalization") and node.inputs[0] is not None:
            by_source.setdefault(id(node.inputs[0]), []).append(node)
    found = [nodes for nodes in by_source.values() if any(node.op_type == "Conv" for node in nodes)]
    return max(found, key=len, default=[])


def _main(branches: list[ir.Node]) -> ir.Node | None:
    """The convolution with the most taps, the first of several."""
    convs = [node for node in branches if node.op_type == "Conv" and window_of(node) is not None]
    return max(convs, key=lambda node: math.prod(_window(node).kernel), default=None)


def _window(node: ir.Node) -> SlidingWindow:
    """The window of a branch; normalization reads one position."""
    window = window_of(node) if node.op_type == "Conv" else None
    return window or SlidingWindow((1, 1), (1, 1), (0, 0, 0, 0), (1, 1))


def _merged_window(branches: list[ir.Node]) -> SlidingWindow | None:
    """The smallest window that holds every branch's; None where the end would need negative padding."""
    main = _main(branches)
    if main is None:
        return None
    largest, windows = _window(main), [_window(node) for node in branches]
    axes = range(len(largest.kernel))
    if any(len(window.kernel) != len(largest.kernel) for window in windows):
        return None
    begins = [max(window.begins[axis] for window in windows) for axis in axes]
    kernel = [max(w.kernel[axis] - w.begins[axis] for w in windows) + begins[axis] for axis in axes]
    # As much padding in all as gives the size that the largest branch gives.
    ends = [
        kernel[axis] - begins[axis] - (largest.kernel[axis] - largest.begins[axis] - largest.ends[axis])
        for axis in axes
    ]
    if min(ends) < 0:
        return None
    return SlidingWindow(tuple(kernel), largest.strides, (*begins, *ends), largest.dilations)


def _can_be_identity(main: ir.Node, window: SlidingWindow) -> bool:
    weight = edit.array_of(main.inputs[1])
    return set(window.strides) == {1} and weight.shape[0] == weight.shape[1] * edit.int_attribute(main, "group", 1)


def _why_not(total: ir.Node, branches: list[ir.Node]) -> str:
    main = _main(branches)
    if main is None:
        return "its branches pad automatically, or their kernels are not known"
    reason = why_not_constant(main)
    if reason:
        return reason
    shape, rank = _map_of(total.outputs[0]), len(_window(main).kernel) + 2
    for node in branches:
        value = node.outputs[0]
        if edit.only_user(value) is None or node.graph is not total.graph:
            return f"the output of {node.name} is used elsewhere"
        if shape is None or len(shape) != rank - 1 or _map_of(value) != shape:
            return f"the shape of {node.name} is not known, or not that of the sum"
        reason = _why_not_branch(node, main)
        if reason:
            return reason
    window = _merged_window(branches)
    if window is None:
        return "its branches read different positions"
    taps = sum(math.prod(_window(node).kernel) for node in branches)
    if math.prod(window.kernel) > taps:
        return f"one kernel would have {math.prod(window.kernel)} taps, its branches have {taps}"
    return ""


def _map_of(value: ir.Value) -> tuple[int, ...] | None:
    """All dimensions but the first, where they are known."""
    return None if value.shape is None else edit.numbers_of(tuple(value.shape)[1:])


def _why_not_branch(node: ir.Node, main: ir.Node) -> str:
    if node.op_type == "BatchNormalization":
        if trains(node):
            return f"{node.name} is in training mode"
        if any(edit.constant_of(value) is None for value in node.inputs[1:5]):
            return f"the statistics of {node.name} are not constants"
        same = _can_be_identity(main, _window(main)) and len(_window(main).kernel) == 2
        return "" if same else f"{main.name} changes the size or the number of channels, {node.name} does not"
    reason = why_not_constant(node)
    if reason:
        return reason
    window, first = window_of(node), _window(main)
    if window is None:
        return f"{node.name} pads automatically"
    if window.strides != first.strides or edit.int_attribute(node, "group", 1) != edit.int_attribute(main, "group", 1):
        return f"{node.name} and {main.name} differ in stride or group"
    return "" if set(window.dilations) == {1} else f"{node.name} is dilated"


def _sum(
    main: ir.Node, branches: list[ir.Node], window: SlidingWindow, identities: int
) -> tuple[np.ndarray, np.ndarray]:
    """Weight and bias of all branches in one window, in float64."""
    shape = edit.array_of(main.inputs[1]).shape
    weight, bias = np.zeros((*shape[:2], *window.kernel)), np.zeros(shape[0])
    rows = np.arange(shape[0])
    centre = (rows, rows % shape[1], *(np.full(shape[0], begin) for begin in window.begins))
    for node in branches:
        if node.op_type == "Conv":
            part, part_bias = weight_and_bias(node)
            own = _window(node)
            at = [begin - first for begin, first in zip(window.begins, own.begins, strict=True)]
            after = [w - i - k for w, i, k in zip(window.kernel, at, own.kernel, strict=True)]
            weight += np.pad(part, [(0, 0), (0, 0), *zip(at, after, strict=True)])
            bias += part_bias
            continue
        scale, shift = norm_affine(node) or (np.nan, np.nan)
        with np.errstate(invalid="ignore"):
            weight[centre] += scale
            bias += shift
    if identities:
        weight[centre] += identities
    return weight, bias
