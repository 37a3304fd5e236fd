"""Convolutions over one axis with residual additions between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.conv import why_not_constant, window_of
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_SPATIAL = ("kernel_shape", "strides", "dilations", "output_padding", "output_shape")


@dataclass(frozen=True)
class Conv1d:
    """Computes convolutions over one axis, and what stands between them, as ones over two.

    Rewrite:
        [N, C, L] becomes [N, C, 1, L] where convolutions, transposed ones and element-wise operators make and read it;
        a kernel of k becomes one of 1 x k, with padding and strides likewise.
    Requires:
        Constant weights; at least one addition of two activations, one of which a convolution makes. A region that
        convolutions and element-wise operators connect is rewritten at once.
    Why faster:
        TensorRT for RTX computes such convolutions over two axes, and fuses an addition into a convolution where both
        have that form: of a vocoder's residual block (64 channels, 2048 samples, batch 8, FP16) 14 kernels of 69.2 MB
        become 13 of 60.8 MB.
    Numerics:
        Exact: the same sums.
    Refuses when:
        The weights of a convolution of the region are computed, or it pads automatically.
    """

    name: str = "conv-1d"
    stage: Stage = Stage.LAYOUT
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Connected regions with a residual addition, named after their first convolution."""
        places = []
        for graph in edit.all_graphs(model.graph):
            for region in _regions(graph):
                if any(_is_residual(node) for node in region):
                    first = next(node for node in region if _is_conv(node))
                    reason = next((reason for node in region if (reason := _why_not(node))), "")
                    places.append((Match((first, *(node for node in region if node is not first))), reason))
        return Findings.of(places)

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Add an axis in front of one region and take it away behind it."""
        region = set(match.nodes)
        splice = edit.Splice(model, match.nodes[0], self.name)
        axis = splice.constant(np.asarray([2], np.int64), match.nodes[0].outputs[0], "axis")
        entries: dict[ir.Value, ir.Value] = {}
        for node in match.nodes:
            for index, value in enumerate(node.inputs):
                if value is None or value.producer() in region or (_is_conv(node) and index == 2):
                    continue
                array = edit.constant_of(value)
                if array is not None:
                    if array.ndim > 1:
                        wide = splice.constant(np.expand_dims(array, -2), node.outputs[0], str(index))
                        node.replace_input_with(index, wide)
                    continue
                if value not in entries:
                    entries[value] = splice.behind(value, "Unsqueeze", axis)
                    entries[value].shape = None
                node.replace_input_with(index, entries[value])
            _widen(node)
            edit.tag(node, self.name)
        for node in match.nodes:
            output = node.outputs[0]
            splice.restore(output, "Squeeze", region, axis)
            if output.shape is not None:
                output.shape = ir.Shape([*output.shape[:-1], 1, output.shape[-1]])
        return None


def _is_conv(node: ir.Node) -> bool:
    return edit.is_op(node, "Conv", "ConvTranspose")


def _regions(graph: ir.Graph) -> Iterator[tuple[ir.Node, ...]]:
    """Connected nodes that keep [N, C, L], those with a convolution, in the order of the graph."""
    member: dict[ir.Node, list[ir.Node]] = {}
    for node in graph:
        if not _belongs(node):
            continue
        joined = [node]
        makers = {value.producer() for value in node.inputs if value is not None}
        for other in {id(member[maker]): member[maker] for maker in makers if maker in member}.values():
            joined = [*other, *joined]
        for each in joined:
            member[each] = joined
    place = {node: index for index, node in enumerate(graph)}
    for region in {id(region): region for region in member.values()}.values():
        if any(_is_conv(node) for node in region):
            yield tuple(sorted(region, key=place.__getitem__))


def _belongs(node: ir.Node) -> bool:
    """Whether a node makes [N, C, L] by a convolution, or element by element of such and constants."""
    output = node.outputs[0] if node.outputs else None
    if output is None or node.domain != "" or output.shape is None or len(output.shape) != 3:
        return False
    if _is_conv(node):
        return True
    if node.op_type not in edit.ELEMENTWISE:
        return False
    operands = [value for value in node.inputs if value is not None and edit.constant_of(value) is None]
    return bool(operands) and all(value.shape is not None and len(value.shape) == 3 for value in operands)


def _is_residual(node: ir.Node) -> bool:
    """Whether a node adds two activations, one of which a convolution makes."""
    if not edit.is_op(node, "Add") or any(edit.constant_of(value) is not None for value in node.inputs):
        return False
    return any(value is not None and edit.is_op(value.producer(), "Conv") for value in node.inputs)


def _why_not(node: ir.Node) -> str:
    if not _is_conv(node):
        return ""
    return why_not_constant(node) or ("" if window_of(node) is not None else f"{node.name} pads automatically")


def _widen(node: ir.Node) -> None:
    """Give a convolution its axis of one element."""
    if not _is_conv(node):
        return
    for name in _SPATIAL:
        values = edit.ints_attribute(node, name)
        if values is not None:
            node.attributes[name] = ir.AttrInt64s(name, [0 if name == "output_padding" else 1, *values])
    pads = edit.ints_attribute(node, "pads")
    if pads is not None:
        node.attributes["pads"] = ir.AttrInt64s("pads", [0, pads[0], 0, pads[1]])
