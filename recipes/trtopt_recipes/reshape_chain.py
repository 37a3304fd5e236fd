"""Reshapes of reshapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph import edit
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_WITHOUT_ONES = "without axes of size one"
_RESHAPES = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")


@dataclass(frozen=True)
class ReshapeChain:
    """Merges chains of Reshape, Flatten, Squeeze and Unsqueeze into one Reshape.

    Rewrite:
        y = f(g(x)) becomes y = Reshape(x, shape of y). A Transpose that moves only axes of size one is a reshape too,
        within a chain: Reshape, Transpose, Reshape become one. Where it moves others too, between two of them, the axes
        of size one are left out: tf2onnx writes an Einsum with an axis for each letter of both operands.
    Requires:
        Every tensor between is used once and is no graph output. The shape of y is known but for one dimension (-1),
        or dimensions equal to those of x at the same place (0).
    Why faster:
        Fewer nodes between a pattern and the recipes that look for it, and a Transpose that copies nothing is not
        mistaken for one that does. The compiler of TensorRT for RTX sees through such chains itself.
        It does not for attention of one head, whose Transpose stays.
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
        found = Findings.of(places)
        taken = {node for match in found.matches for node in match.nodes}
        padded = [pair for node in edit.all_nodes(model.graph) if (pair := _padded(node)) and not taken & set(pair)]
        return Findings((*found.matches, *(Match(pair, choice=_WITHOUT_ONES) for pair in padded)), found.refusals)

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Replace one chain by a Reshape, or take axes of size one out of a Transpose."""
        if match.choice == _WITHOUT_ONES:
            return self._drop_ones(model, match)
        last, source = match.nodes[0], match.nodes[-1].inputs[0]
        shape = _target_shape(list(match.nodes))
        if source is None or shape is None:
            return Refusal(match.label, "its shape is not known any more")
        splice = edit.Splice(model, last, self.name)
        constant = splice.ints(shape, last.outputs[0], "shape")
        splice.finish(splice.op("Reshape", source, constant))
        for item in match.nodes[1:]:
            edit.remove_node(item)
        return None

    def _drop_ones(self, model: ir.Model, match: Match) -> Refusal | None:
        """Let a Transpose move the other axes only."""
        transpose, first = match.nodes
        value, source = first.outputs[0], first.inputs[0]
        shape = _without_ones(value, source)
        if shape is None or source is None or value.shape is None:
            return Refusal(match.label, "its shape is not known any more")
        long = [axis for axis, dim in enumerate(value.shape) if dim != 1]
        perm = [long.index(axis) for axis in edit.ints_attribute(transpose, "perm") or () if axis in long]
        splice = edit.Splice(model, transpose, self.name)
        constant = splice.ints(shape, value, "shape")
        packed = splice.fresh("Reshape", source, constant, like=value)
        splice.finish(splice.fresh("Transpose", packed, attributes={"perm": perm}))
        edit.remove_node(first)
        return None


def _padded(transpose: ir.Node) -> tuple[ir.Node, ir.Node] | None:
    """A Transpose of axes of which some have size one, between two reshapes, and the first of these."""
    value, perm = edit.input_of(transpose, 0), edit.ints_attribute(transpose, "perm")
    first = edit.maker_of(value)
    if not edit.is_op(transpose, "Transpose") or perm is None or value is None or value.shape is None or first is None:
        return None
    if not edit.is_op(first, "Reshape", "Unsqueeze") or not _continues(first, transpose) or _is_reshape(transpose):
        return None
    readers = [user for user, _ in transpose.outputs[0].uses()]
    told = edit.constant_of(edit.input_of(readers[0], 1)) if len(readers) == 1 else None
    if not edit.is_op(readers[0] if readers else None, "Reshape") or transpose.outputs[0].is_graph_output():
        return None
    plain = told is not None and bool((told != 0).all())  # a 0 copies a dimension, by its place
    return (transpose, first) if plain and _without_ones(value, first.inputs[0]) is not None else None


def _without_ones(value: ir.Value, source: ir.Value | None) -> list[int] | None:
    """The shape of a value without axes of size one, as a Reshape is told; None where it has none, or is not known."""
    if value.shape is None or source is None or 1 not in value.shape:
        return None
    dims = [dim for dim in value.shape if dim != 1]
    origin = list(source.shape) if source.shape is not None else []
    return _told(dims, origin)


def _chain(last: ir.Node) -> list[ir.Node]:
    """The chain that ends with ``last``, last node first; shorter than two where there is none."""
    if not _is_reshape(last) or _continues(last):
        return []
    chain = [last]
    while True:
        value = chain[-1].inputs[0]
        node = edit.maker_of(value)
        if node is None or value is None or node.graph is not last.graph or not _is_reshape(node):
            break
        if len(value.uses()) != 1 or value.is_graph_output():
            break
        chain.append(node)
    return chain if any(edit.is_op(node, *_RESHAPES) for node in chain) else []


def _continues(node: ir.Node, with_: ir.Node | None = None) -> bool:
    """Whether the only use of ``node`` is one by ``with_``, or by a reshape, with which a longer chain ends."""
    value = node.outputs[0]
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        return False
    user, index = uses[0]
    return index == 0 and user.graph is node.graph and (_is_reshape(user) if with_ is None else user is with_)


def _is_reshape(node: ir.Node) -> bool:
    if edit.is_op(node, *_RESHAPES):
        return True
    if not edit.is_op(node, "Transpose") or node.inputs[0] is None or node.inputs[0].shape is None:
        return False
    dims = list(node.inputs[0].shape)
    perm = edit.ints_attribute(node, "perm") or tuple(reversed(range(len(dims))))
    long = [axis for axis in perm if dims[axis] != 1]
    return long == sorted(long) and not _splits_one_head(node)


def _splits_one_head(transpose: ir.Node) -> bool:
    """Whether a Transpose makes [batch, 1, tokens, size] of [batch, tokens, 1, size], at the end of a chain: attention
    reads one head in place behind it, and copies what a Reshape gives."""
    value, readers = transpose.inputs[0], [user for user, _ in transpose.outputs[0].uses()]
    if edit.ints_attribute(transpose, "perm") != (0, 2, 1, 3) or value is None or value.shape is None:
        return False
    return value.shape[2] == 1 and not all(edit.is_op(each, *_RESHAPES, "Transpose") for each in readers)


def _target_shape(chain: list[ir.Node]) -> list[int] | None:
    """What one Reshape of the chain's input is told; None when that cannot be said."""
    last, source = chain[0], chain[-1].inputs[0]
    told = edit.constant_of(edit.input_of(last, 1)) if edit.is_op(last, "Reshape") else None
    if told is not None and (told != 0).all():
        return [int(dim) for dim in told]
    value = last.outputs[0]
    if value.shape is None or source is None:
        return None
    return _told(list(value.shape), list(source.shape) if source.shape is not None else [])


def _told(dims: Sequence[int | ir.SymbolicDim], origin: Sequence[int | ir.SymbolicDim]) -> list[int] | None:
    """Dimensions as the numbers that a Reshape of a tensor of ``origin`` is told; None where that cannot be said."""
    shape: list[int] = []
    for index, dim in enumerate(dims):
        if isinstance(dim, int):
            if dim == 0:  # which a Reshape reads as the dimension of its input
                return None
            shape.append(dim)
        else:
            same = index < len(origin) and dim.value is not None and origin[index] == dim
            shape.append(0 if same else -1)
    return None if shape.count(-1) > 1 else shape
