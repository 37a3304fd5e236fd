"""A sum that an activation reads, and others beside it."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph import edit
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target


@dataclass(frozen=True)
class ResidualActivation:
    """Lets one kernel make a convolution's result and its activation, where both are used.

    Rewrite:
        Others than the activation read min(s, f(s)) in the place of s. It equals s, as f(s) >= s for ReLU, and for
        LeakyReLU of a slope from 0 to 1.
    Requires:
        s is made by a convolution, or by the addition of one to another activation.
    Why faster:
        TensorRT for RTX fuses the addition into the convolution and leaves the activation to a kernel of its own, which
        reads s again. It fuses all of them into one kernel with two outputs where nobody reads s itself: of a vocoder's
        residual block (64 channels, 2048 samples, batch 8, FP16) 13 kernels of 60.8 MB become 10 of 54.5 MB.
    Numerics:
        Exact.
    Refuses when:
        The slope is below 0 or above 1.
    """

    name: str = "residual-activation"
    stage: Stage = Stage.LAYOUT
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Activations of a value that others read, too."""
        places = []
        for node in edit.all_nodes(model.graph):
            if not edit.is_op(node, "LeakyRelu", "Relu") or not _others(node) or not _is_of_conv(node.inputs[0]):
                continue
            is_least = 0 <= edit.float_attribute(node, "alpha", 0.0 if edit.is_op(node, "Relu") else 0.01) <= 1
            maker = edit.maker_of(node.inputs[0])
            nodes = dict.fromkeys((node, *([maker] if maker else []), *_convs(maker)))
            places.append((Match(tuple(nodes)), "" if is_least else "its slope is below 0 or above 1"))
        return Findings.of(places)

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Give the others of one activation the minimum."""
        node = match.nodes[0]
        value, readers = node.inputs[0], _others(node)
        if value is None or not readers:
            return Refusal(match.label, "it was changed by a rewrite before")
        names, label = edit.Names(model), f"{value.name}_kept"
        least = edit.new_node(
            "Min", [value, node.outputs[0]], name=names.node(label), output=names.value(label), like=value
        )
        edit.tag(least, self.name)
        graph = edit.graph_of(node)
        # Readers may stand in front of the activation.
        graph.remove(node)
        edit.insert_behind(graph, value, [node, least])
        for reader, index in readers:
            reader.replace_input_with(index, least.outputs[0])
        return None


def _others(node: ir.Node) -> list[tuple[ir.Node, int]]:
    """Who reads the input of an activation besides it, in its graph; none where that cannot be exchanged for all."""
    value, output = node.inputs[0], node.outputs[0]
    if value is None or value.dtype not in edit.NARROW_FLOATS or value.is_graph_output():
        return []
    uses = [(user, index) for user, index in value.uses() if user is not node]
    if any(user.graph is not node.graph or _is_least(user, value, output) for user, _ in uses):
        return []
    return uses


def _is_least(user: ir.Node, value: ir.Value, output: ir.Value) -> bool:
    return edit.is_op(user, "Min") and set(user.inputs) == {value, output}


def _convs(maker: ir.Node | None) -> list[ir.Node]:
    """The convolution that makes a value, or those that an addition of two activations adds."""
    if edit.is_op(maker, "Conv", "ConvTranspose"):
        return [maker]
    if not edit.is_op(maker, "Add") or any(edit.constant_of(v) is not None for v in maker.inputs):
        return []
    makers = [value.producer() for value in maker.inputs if value is not None]
    return [node for node in makers if edit.is_op(node, "Conv", "ConvTranspose")]


def _is_of_conv(value: ir.Value | None) -> bool:
    return value is not None and bool(_convs(value.producer()))
