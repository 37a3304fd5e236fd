"""An activation after max pooling."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.conv import copy_node, may_see_padding_alone, sole_user, used_once
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_INCREASING = ("Relu", "Sigmoid", "Tanh", "Softplus", "Softsign")
_ALPHA = {"LeakyRelu": 0.01, "Elu": 1.0}
"""Activations that never decrease where the factor is not negative, and their default factor."""


@dataclass(frozen=True)
class PoolActivation:
    """Moves an activation that never decreases from behind MaxPool to before it.

    Rewrite:
        f(max(x, y)) = max(f(x), f(y)) for f that never decreases: MaxPool then f = f then MaxPool.
    Requires:
        Relu, Clip with constant or no bounds, Sigmoid, Tanh, Softplus, Softsign, HardSigmoid, or LeakyRelu and Elu
        with a positive factor; the pooled tensor is used by the activation only.
    Why faster:
        The activation joins the kernel of the convolution before the pooling, where it costs nothing; behind the
        pooling it is a kernel of its own: conv, MaxPool, ReLU take 3 kernels, conv, ReLU, MaxPool 2.
    Numerics:
        Exact: the same element is chosen.
    Refuses when:
        The pooled tensor is used elsewhere or is a graph output; MaxPool gives indices, or is dilated and pads; the
        input of MaxPool is used elsewhere, so that it would be kept besides.
    """

    name: str = "pool-activation"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Increasing activations right after a MaxPool."""
        places = []
        for node in edit.all_nodes(model.graph):
            pool = node.inputs[0].producer() if _is_increasing(node) and node.inputs[0] else None
            if pool is None or not edit.is_op(pool, "MaxPool"):
                continue
            places.append((Match((node, pool)), _why_not(node, pool)))
        return Findings.of(places)

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Swap one pair."""
        node, pool = match.nodes
        source, graph, pooled = pool.inputs[0], pool.graph, pool.outputs[0]
        if source is None or graph is None:
            return Refusal(match.label, "it was changed by a rewrite before")
        names, output = edit.Names(model), str(node.outputs[0].name)
        rest = [value and _before(value, graph, names, f"{output}_bound") for value in node.inputs[1:]]
        active = copy_node(node, [source, *rest], name=str(node.name), output=names.value(f"{source.name}_active"))
        active.outputs[0].shape = None if source.shape is None else source.shape.copy()
        edit.tag(active, self.name)
        edit.replace_value(node.outputs[0], pooled)
        edit.remove_node(node)
        pooled.name = output
        graph.insert_before(pool, active)
        pool.replace_input_with(0, active.outputs[0])
        return None


def _before(value: ir.Value, graph: ir.Graph, names: edit.Names, name: str) -> ir.Value:
    """A constant that may stand before every node of the graph."""
    array = edit.constant_of(value)
    return value if array is None or value.is_initializer() else edit.add_initializer(graph, names.value(name), array)


def _is_increasing(node: ir.Node) -> bool:
    if edit.is_op(node, "Clip"):
        return all(value is None or edit.constant_of(value) is not None for value in node.inputs[1:])
    if edit.is_op(node, "HardSigmoid"):
        return edit.float_attribute(node, "alpha", 0.2) >= 0
    if edit.is_op(node, *_ALPHA):
        return edit.float_attribute(node, "alpha", _ALPHA[node.op_type]) >= 0
    return edit.is_op(node, *_INCREASING)


def _why_not(node: ir.Node, pool: ir.Node) -> str:
    if len(pool.outputs) > 1 and (pool.outputs[1].uses() or pool.outputs[1].is_graph_output()):
        return f"{pool.name} gives indices"
    if sole_user(pool.outputs[0]) is not node:
        return f"the output of {pool.name} is used elsewhere"
    if may_see_padding_alone(pool):
        return f"{pool.name} is dilated and pads: a window may hold padding alone, which the activation would not see"
    source = pool.inputs[0]
    if source is None or not used_once(source):
        return f"the input of {pool.name} is used elsewhere"
    return ""
