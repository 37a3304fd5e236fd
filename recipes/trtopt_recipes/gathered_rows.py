"""Products of rows that are gathered, more of them than there are."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.conv import weight_and_bias, why_not_constant
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_DEPTH = 8
"""Nodes between a source and its product."""


@dataclass(frozen=True)
class _Part:
    """Columns of a product's operand: what they are gathered from, by which nodes, and how many they are."""

    source: ir.Value
    moves: tuple[ir.Node, ...]
    width: int

    @property
    def repeats(self) -> bool:
        """Whether more rows are gathered than there are."""
        return any(_repeats(node) for node in self.moves)


@dataclass(frozen=True)
class GatheredRows:
    """Multiplies rows before they are gathered, where more are gathered than there are.

    Rewrite:
        Gather(h, i) W = Gather(h W, i) for rows h, and Concat(Gather(h, i), Gather(h, j)) W =
        Gather(h W1, i) + Gather(h W2, j) with the rows of W that each part needs.
    Requires:
        A product with a constant matrix, a Linear's too; only Gather or GatherND of whole rows, and Transposes that
        leave the features last, before it, each read once. More indices than rows, or a number of either that is not
        known.
    Why faster:
        Messages of graph networks are products of the features at both ends of each edge, of which there are several
        times as many as nodes: fewer rows are multiplied, and nothing is joined in a
        kernel before: a network of three layers, 256 nodes and 1,024 edges of 128 features, batch 8, FP16, 377 -> 317
        us by a plain roofline of an L4.
    Numerics:
        The same products; the sum of two parts is rounded once more.
    Refuses when:
        Never: what is read elsewhere does not match, and what does not pay is left alone.
    """

    name: str = "gathered-rows"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Products of gathered rows."""
        matches = []
        for node in edit.all_nodes(model.graph):
            parts, nodes = _parts(node)
            if any(part.repeats for part in parts):
                matches.append(Match((node, *nodes)))
        return Findings(tuple(matches))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Multiply first."""
        product = match.nodes[0]
        parts, nodes = _parts(product)
        if not any(part.repeats for part in parts):
            return Refusal(match.label, "it was changed by a rewrite before")
        weight, bias = _matrix(product)
        splice, total, start = edit.Splice(model, product, self.name), None, 0
        for part in parts:
            rows = np.ascontiguousarray(weight[start : start + part.width])
            start += part.width
            value = splice.fresh("MatMul", part.source, splice.constant(rows, product.outputs[0], "rows"))
            for node in part.moves:
                attributes = {name: attribute.value for name, attribute in node.attributes.items()}
                value = splice.fresh(node.op_type, value, *node.inputs[1:], attributes=attributes)
            total = value if total is None else splice.fresh("Add", total, value)
        if total is None:
            raise ValueError("a product has no parts")
        if bias is not None:
            total = splice.fresh("Add", total, splice.constant(bias, product.outputs[0], "bias"))
        total.shape = product.outputs[0].shape
        splice.finish(total)
        for node in nodes:  # each reads what those behind it make
            edit.remove_node(node)
        return None


def _matrix(product: ir.Node) -> tuple[np.ndarray, np.ndarray | None]:
    """The matrix that rows are multiplied by, and what is added to each of them."""
    array = edit.array_of(product.inputs[1])
    if edit.is_op(product, "MatMul"):
        return array, None
    weight, bias = weight_and_bias(product)
    turned = weight.T if edit.int_attribute(product, "transB", 0) else weight
    return turned.astype(array.dtype), bias.astype(array.dtype) if edit.input_of(product, 2) is not None else None


def _parts(product: ir.Node) -> tuple[list[_Part], list[ir.Node]]:
    """The parts of a product's operand, and the nodes between; none where it is another pattern."""
    weight = edit.constant_tensor_of(product.inputs[1]) if edit.is_op(product, "MatMul", "Gemm") else None
    if weight is None or len(weight.shape) != 2:
        return [], []
    if edit.is_op(product, "Gemm") and (edit.int_attribute(product, "transA", 0) or why_not_constant(product)):
        return [], []
    width = edit.dims_of(weight)[edit.int_attribute(product, "transB", 0)]
    outer, value = _moves(product.inputs[0], product)
    join = edit.only_maker(value)
    if value is None:
        return [], []
    if join is None or not _joins_features(join, product):
        return [_Part(value, outer, width)], [*reversed(outer)]
    parts, nodes = list[_Part](), [*reversed(outer), join]
    for operand in join.inputs:
        size = operand.shape[-1] if operand is not None and operand.shape is not None else None
        inner, source = _moves(operand, product)
        if not isinstance(size, int) or source is None:
            return [], []
        parts.append(_Part(source, (*inner, *outer), size))
        nodes += reversed(inner)
    return (parts, nodes) if sum(part.width for part in parts) == width else ([], [])


def _joins_features(node: ir.Node, product: ir.Node) -> bool:
    rank = len(node.outputs[0].shape or ())
    return (
        edit.is_op(node, "Concat")
        and node.graph is product.graph
        and edit.int_attribute(node, "axis", 0) in (-1, rank - 1)
    )


def _moves(value: ir.Value | None, product: ir.Node) -> tuple[tuple[ir.Node, ...], ir.Value | None]:
    """What moves whole rows before ``value``, which is read once, in order; and what they are the rows of."""
    found: list[ir.Node] = []
    while value is not None and len(found) < _DEPTH and edit.only_user(value) is not None:
        node = value.producer()
        if node is None or node.graph is not product.graph or not _moves_rows(node):
            break
        found.insert(0, node)
        value = node.inputs[0]
    return tuple(found), value


def _moves_rows(node: ir.Node) -> bool:
    """Whether a node gathers or moves rows as they are."""
    source = node.inputs[0] if node.inputs else None
    if source is None or source.shape is None or edit.constant_tensor_of(source) is not None:
        return False
    rank = len(source.shape)
    if edit.is_op(node, "Transpose"):
        return (edit.ints_attribute(node, "perm") or (0,))[-1] == rank - 1
    index = edit.input_of(node, 1)
    if index is None or index.shape is None:
        return False
    if edit.is_op(node, "Gather"):
        return edit.int_attribute(node, "axis", 0) % rank < rank - 1 and len(index.shape) > 0
    depth = index.shape[-1] if edit.is_op(node, "GatherND") and len(index.shape) else None
    return isinstance(depth, int) and edit.int_attribute(node, "batch_dims", 0) + depth < rank


def _repeats(node: ir.Node) -> bool:
    """Whether a node gathers more rows than there are, or a number that is not known."""
    before, after = (Counter(edit.dims_of_value(value) or ()) for value in (node.inputs[0], node.outputs[0]))
    fewer, more = list((before - after).elements()), list((after - before).elements())
    numbers = [[dim for dim in dims if isinstance(dim, int)] for dims in (fewer, more)]
    if numbers != [fewer, more]:
        return True
    return math.prod(numbers[1]) > math.prod(numbers[0])
