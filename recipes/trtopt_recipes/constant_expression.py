"""Parts of the graph that do not depend on its inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph.edit import all_graphs, constant_of, is_op, tag
from trtopt.graph.fold import MAX_GROWTH_BYTES, FoldError, can_fold, constants_from, evaluate, excess
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_BROADCASTING = ("Add", "Sub", "Mul", "Div", "Max", "Min", "Where")


@dataclass(frozen=True)
class ConstantExpression:
    """Computes nodes whose inputs are all constants, and turns Constant nodes into initializers.

    Rewrite:
        y = f(constants) becomes an initializer y; so do Shape and Size of a static shape. Along an axis where y repeats
        itself and every reader broadcasts, it is stored once.
    Requires:
        A deterministic operator of the default domain without nested graphs.
    Why faster:
        Nothing is computed at run time that is known now, and weights behind a Reshape or Transpose become weights the
        compiler and the quantizer recognise. What was expanded over the batch is read once, not once per element.
    Numerics:
        ONNX's reference implementation, which may round the last bit differently from a kernel.
    Refuses when:
        The result would be larger than max_growth_bytes and than twice the constants it is made of (an Expand of one
        number can be gigabytes), or the evaluation fails. QuantizeLinear and DequantizeLinear are left alone: folding
        them would undo the quantization.
    """

    name: str = "constant-expression"
    stage: Stage = Stage.FOLD
    lossless: bool = True
    max_growth_bytes: int = MAX_GROWTH_BYTES

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Nodes that depend on constants alone, in the order they can be computed."""
        known: set[ir.Value] = set()
        places = []
        for graph in all_graphs(model.graph):
            for node in graph:
                if not _is_lifted(node) and not can_fold(node, known):
                    continue
                reason = excess(node, self.max_growth_bytes)
                if not reason:
                    known.update(node.outputs)
                places.append((Match((node,)), reason))
        return Findings.of(places)

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Replace one node by what it computes."""
        node = match.nodes[0]
        if is_op(node, "Constant"):
            array = constant_of(node.outputs[0])
            constants_from(model, node, [] if array is None else [array])
            return None
        if not can_fold(node):
            return Refusal(match.label, "one of its inputs could not be computed")
        try:
            arrays = evaluate(node, model.graph.opset_imports[""], self.max_growth_bytes)
        except FoldError as error:
            return Refusal(match.label, str(error))
        used = [value for value in node.outputs if value.name]
        arrays = [_stored_once(array, value) for array, value in zip(arrays, used, strict=True)]
        for constant in constants_from(model, node, arrays):
            tag(constant, self.name)
        return None


def _is_lifted(node: ir.Node) -> bool:
    """A Constant node that can be an initializer: a graph output must keep its node."""
    return (
        is_op(node, "Constant")
        and not node.outputs[0].is_graph_output()
        and isinstance(constant_of(node.outputs[0]), np.ndarray)
    )


def _stored_once(array: np.ndarray, value: ir.Value) -> np.ndarray:
    """``array``, which becomes ``value``, one long along the axes where it repeats itself and its readers broadcast."""
    if value.is_graph_output():
        return array
    for axis, size in enumerate(array.shape):
        first = array[(slice(None),) * axis + (slice(1),)]
        if size < 2 or np.broadcast_to(first, array.shape).tobytes() != array.tobytes():
            continue
        if all(_broadcasts(user, value, axis - array.ndim, size) for user, _ in value.uses()):
            array = first
    return array


def _broadcasts(node: ir.Node, value: ir.Value, axis: int, size: int) -> bool:
    """Whether another operand of the node has this size along an axis counted from the last."""
    others = (other.shape for other in node.inputs if other is not None and other is not value)
    return is_op(node, *_BROADCASTING) and any(
        shape is not None and len(shape) >= -axis and shape[axis] == size for shape in others
    )
