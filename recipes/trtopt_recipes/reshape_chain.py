"""Reshapes of reshapes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_RESHAPES = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")


@dataclass(frozen=True)
class ReshapeChain:
    """Merges chains of Reshape, Flatten, Squeeze and Unsqueeze into one Reshape.

    Rewrite:
        y = f(g(x)) becomes y = Reshape(x, shape of y). A Transpose that moves only axes of size one is a reshape too,
        within a chain: Reshape, Transpose, Reshape become one.
    Requires:
        Every tensor between is used once and is no graph output. The shape of y is known but for one dimension (-1),
        or dimensions equal to those of x at the same place (0).
    Why faster:
        Fewer nodes between a pattern and the recipes that look for it, and a Transpose that copies nothing is not
        mistaken for one that does. The compiler of TensorRT for RTX sees through such chains itself.
    Numerics:
        Exact.
    Refuses when:
        Two dimensions or more of y are dynamic and not those of x, or one is zero.
    """

    name: str = "reshape-chain"
    stage: Stage = Stage.CLEAN
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Chains, each named after its last node."""
        places = []
        for node in edit.all_nodes(model.graph):
            chain = _chain(node)
            if len(chain) >= 2:
                reason = "the shape it ends with has several dynamic dimensions, or a zero"
                places.append((Match(tuple(chain)), reason if _target_shape(chain) is None else ""))
        return Findings.of(places)

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Replace one chain by a Reshape."""
        last, source = match.nodes[0], match.nodes[-1].inputs[0]
        shape = _target_shape(list(match.nodes))
        if source is None or shape is None:
            return Refusal(match.label, "its shape is not known any more")
        splice = edit.Splice(model, last, self.name)
        constant = splice.constant(np.asarray(shape, np.int64), last.outputs[0], "shape")
        splice.finish(splice.op("Reshape", source, constant))
        for item in match.nodes[1:]:
            edit.remove_node(item)
        return None


def _chain(last: ir.Node) -> list[ir.Node]:
    """The chain that ends with ``last``, last node first; shorter than two where there is none."""
    if not _is_reshape(last) or _continues(last):
        return []
    chain = [last]
    while True:
        value = chain[-1].inputs[0]
        node = value.producer() if value is not None else None
        if node is None or value is None or node.graph is not last.graph or not _is_reshape(node):
            break
        if len(value.uses()) != 1 or value.is_graph_output():
            break
        chain.append(node)
    return chain if any(edit.is_op(node, *_RESHAPES) for node in chain) else []


def _continues(node: ir.Node) -> bool:
    """Whether the only use of ``node`` is a reshape of its output, with which a longer chain ends."""
    value = node.outputs[0]
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        return False
    user, index = uses[0]
    return index == 0 and user.graph is node.graph and _is_reshape(user)


def _is_reshape(node: ir.Node) -> bool:
    if edit.is_op(node, *_RESHAPES):
        return True
    if not edit.is_op(node, "Transpose") or node.inputs[0] is None or node.inputs[0].shape is None:
        return False
    dims = list(node.inputs[0].shape)
    perm = edit.ints_attribute(node, "perm") or tuple(reversed(range(len(dims))))
    long = [axis for axis in perm if dims[axis] != 1]
    return long == sorted(long)


def _target_shape(chain: list[ir.Node]) -> list[int] | None:
    """What one Reshape of the chain's input is told; None when that cannot be said."""
    last, source = chain[0], chain[-1].inputs[0]
    told = edit.constant_of(edit.input_of(last, 1)) if edit.is_op(last, "Reshape") else None
    if told is not None and (told != 0).all():
        return [int(dim) for dim in told]
    value = last.outputs[0]
    if value.shape is None or source is None:
        return None
    origin = list(source.shape) if source.shape is not None else []
    shape: list[int] = []
    for index, dim in enumerate(value.shape):
        if isinstance(dim, int):
            if dim == 0:  # which a Reshape reads as the dimension of its input
                return None
            shape.append(dim)
        else:
            same = index < len(origin) and dim.value is not None and origin[index] == dim
            shape.append(0 if same else -1)
    return None if shape.count(-1) > 1 else shape
