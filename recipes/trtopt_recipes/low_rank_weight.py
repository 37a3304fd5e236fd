"""Thin products beside the product with a weight: what they add goes into the weight."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph import edit
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target


@dataclass(frozen=True)
class _Sum:
    """x W + (x A) B: what adds, the product with W, the two with A and B, and the factor of these, if any."""

    add: ir.Node
    product: ir.Node
    down: ir.Node
    up: ir.Node
    scaled: ir.Node | None
    base: ir.Value

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        return (self.add, self.product, self.down, self.up, *([] if self.scaled is None else [self.scaled]))


@dataclass(frozen=True)
class LowRankWeight:
    """Adds the product of two thin matrices to the weight that they change, instead of to its product's result.

    Rewrite:
        x W + s (x A) B = x (W + s A B), for all weights that read the same x; a bias between stays where it is.
    Requires:
        A and B that are inputs or constants of the model (an adapter, LoRA: Hu et al. 2021), at most half as wide as W
        is in either direction; s a constant number of one axis at most; products that nothing else reads.
    Why faster:
        A sum behind a projection is a kernel that reads and writes every row, and keeps the compiler from merging
        queries, keys and values and from reading heads in place. The weight is as large for many rows as for one: of
        an attention block of width 1280 (8 x 1024 tokens, rank 16) TensorRT for RTX 1.7.1 makes 12 kernels instead of
        19, 487 instead of 778 MB. Constants are merged before the engine is built.
    Numerics:
        The same real numbers; the sum is rounded as a weight is, which is what merging an adapter does.
    Refuses when:
        Never: what is read elsewhere, or is an output, is no match. For few rows it costs more: the judge says so.
    """

    name: str = "low-rank-weight"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """The weights with thin products beside them, those that read the same value together."""
        groups: dict[ir.Value, list[_Sum]] = {}
        for node in edit.all_nodes(model.graph):
            found = _sum_of(node)
            if found is not None and found.product.inputs[0] is not None:
                groups.setdefault(found.product.inputs[0], []).append(found)
        return Findings(tuple(Match(tuple(node for item in group for node in item.nodes)) for group in groups.values()))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Change the weights that read one value."""
        graph = edit.graph_of(match.nodes[0])
        for found in [found for found in map(_sum_of, match.nodes) if found is not None]:
            splice, product = edit.Splice(model, found.add, self.name), found.product
            weight = product.inputs[1]
            change = splice.op("MatMul", found.down.inputs[1], found.up.inputs[1], like=weight, before=product)
            if found.scaled is not None:
                factors = [change if value is found.up.outputs[0] else value for value in found.scaled.inputs]
                change = splice.op("Mul", *factors, like=weight, before=product)
            product.replace_input_with(1, splice.op("Add", weight, change, like=weight, before=product))
            splice.finish(found.base)
            for node in (found.scaled, found.up, found.down):
                if node is not None:
                    edit.remove_node(node)
        graph.sort()
        return None


def _sum_of(node: ir.Node) -> _Sum | None:
    """What ``node`` adds up, where that is a product and its change by thin matrices."""
    if not edit.is_op(node, "Add") or node.outputs[0].dtype is None:
        return None
    for base, change in (node.inputs, tuple(reversed(node.inputs))):
        product, scaled, up = _behind_bias(base), None, edit.only_maker(change)
        if edit.is_op(up, "Mul"):
            scaled, thin = up, [edit.only_maker(value) for value in up.inputs if not _is_number(value)]
            up = thin[0] if len(thin) == 1 else None
        down = edit.only_maker(up.inputs[0]) if edit.is_op(up, "MatMul") else None
        if base is None or product is None or up is None or not edit.is_op(down, "MatMul"):
            continue
        found = _Sum(node, product, down, up, scaled, base)
        if all(item.graph is node.graph for item in found.nodes) and _fits(found):
            return found
    return None


def _fits(found: _Sum) -> bool:
    """Whether W [K, N], A [K, r] and B [r, N] are given with the model or its inputs, and A and B are thin."""
    weight, down, up = (node.inputs[1] for node in (found.product, found.down, found.up))
    if found.down.inputs[0] is not found.product.inputs[0] or not all(map(_is_given, (weight, down, up))):
        return False
    shapes = [edit.static_shape(value) for value in (weight, down, up)]
    if any(shape is None or len(shape) != 2 for shape in shapes):
        return False
    (depth, columns), (rows, rank), last = [shape for shape in shapes if shape is not None]
    return rows == depth and last == (rank, columns) and 2 * rank <= min(depth, columns)


def _behind_bias(value: ir.Value | None) -> ir.Node | None:
    """The product that makes a value, as it is or with a constant vector added to it."""
    node = edit.only_maker(value)
    if edit.is_op(node, "Add"):
        vectors = [item for item in node.inputs if edit.constant_of(item) is not None]
        others = [item for item in node.inputs if item not in vectors]
        if len(others) != 1 or len(edit.static_shape(vectors[0]) or (0, 0)) > 1:
            return None
        node = edit.only_maker(others[0])
    return node if edit.is_op(node, "MatMul") else None


def _is_given(value: ir.Value | None) -> bool:
    """Whether a value is an input or a constant, cast or transposed at most."""
    while value is not None and edit.is_op(value.producer(), "Cast", "Transpose", "Identity"):
        node = value.producer()
        value = None if node is None else node.inputs[0]
    return value is not None and (value.is_graph_input() or edit.constant_of(value) is not None)


def _is_number(value: ir.Value | None) -> bool:
    """Whether a value is a constant number of one axis or none: more of them, the sum could have from it."""
    array = edit.constant_of(value)
    return array is not None and array.size == 1 and array.ndim < 2
