"""Projections of attention that are merged into one product."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.views import Sizes, moved, one_per
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_CUTS = ("Gather", "Slice", "Split")
_RANKS = (4, 5)
"""Axes of a part: batch, heads, tokens, size; tokens have two where they are a map, or groups that are pooled."""

_MOVES = ("Reshape", "Transpose", "Squeeze", "Unsqueeze")


@dataclass(frozen=True)
class _Part:
    """One of several projections.

    Attributes:
        value: Its result, [batch, heads, tokens, size] in some order.
        columns: The columns of the weight that make it, [heads, size], [size, heads] or all.
        perm: The order of its axes, of those of [batch, *tokens, *columns].
        tokens: The tokens, or the rows and columns that they are; of a number that may be dynamic where it is 0.
    """

    value: ir.Value
    columns: np.ndarray
    perm: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class _Plan:
    """A merged product and its parts; ``add`` adds its bias; ``nodes`` are all nodes from the product on."""

    product: ir.Node
    add: ir.Node | None
    parts: tuple[_Part, ...]
    nodes: tuple[ir.Node, ...]

    @property
    def is_rotated(self) -> bool:
        """Whether a part is cut again, or tokens have more than one axis: whether it pays depends on what follows."""
        cut = any(edit.is_op(user, *_CUTS) for part in self.parts for user, _ in part.value.uses())
        return cut or any(part.tokens != (0,) for part in self.parts)


@dataclass(frozen=True)
class MergedProjection:
    """Gives queries, keys and values a product each, where one product makes them all.

    Rewrite:
        The parts that Gather, Slice or Split take from Transpose(Reshape(x W + b)), also those that are reshaped and
        transposed behind that, become Transpose(Reshape(x W_i + b_i)), with the columns of W and b that make them.
    Requires:
        Activations [batch, tokens, features], constant weights and biases; parts of heads and their size, which
        share no column, in any order of axes.
    Why faster:
        The compiler of TensorRT for RTX runs products of one input as one and lets attention read its parts in place;
        of a product that is merged in the graph it copies the parts first, unless it changes the order of batch and
        tokens itself: each block of Swin-T copies three tensors, DeiT-S at its ends only, torch's MultiheadAttention
        of 137 tokens three of each block (iTransformer, 39 kernels and 2156 us -> 33 and 1695 by a plain roofline of
        an L4).
    Numerics:
        Exact: the same sums.
    Refuses when:
        Never: what is used elsewhere, or split otherwise, does not match; parts that are rotated are
        rotated-projection's.
    """

    name: str = "merged-projection"
    stage: Stage = Stage.FOLD
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Products whose result is reshaped, transposed and cut into parts that are used whole."""
        return _found(model, rotated=False)

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Write one product per part."""
        plan = _plan(match.nodes[0])
        if plan is None:
            return Refusal(match.label, "it has changed since it was found")
        product, splice = plan.product, edit.Splice(model, plan.product, self.name)
        source, total = product.inputs[0], product.outputs[0]
        weight, bias = edit.constant_of(product.inputs[1]), None if plan.add is None else _bias_of(plan.add)
        if weight is None or total.shape is None:
            raise ValueError("the weight is no constant, or the product has no rank")
        for part in plan.parts:
            columns, like = part.columns.ravel(), part.value
            value = splice.op("MatMul", source, splice.constant(weight[:, columns], like, "weight"), like=like)
            value.shape = ir.Shape([*total.shape[:-1], columns.size])
            if bias is not None:
                value = splice.op("Add", value, splice.constant(bias[columns], like, "bias"), like=value)
            shape = splice.ints([0, *part.tokens, *part.columns.shape], like, "shape")
            value = splice.op("Reshape", value, shape, like=like)
            tokens = part.tokens if all(part.tokens) else (total.shape[1],)
            value.shape = ir.Shape([total.shape[0], *tokens, *part.columns.shape])
            edit.replace_value(like, splice.op("Transpose", value, attributes={"perm": part.perm}, like=like))
        for node in reversed(plan.nodes):
            edit.remove_node(node)
        return None


@dataclass(frozen=True)
class RotatedProjection(MergedProjection):
    """Gives queries, keys and values a product each, where positions are rotated into them and that pays.

    Rewrite:
        As merged-projection, where a part is cut again: into halves that are rotated, or tokens that are not; and where
        tokens have two axes, before the product (windows) or in a part (queries that are pooled).
    Requires:
        As merged-projection; a known number of tokens where they have two axes.
    Why faster:
        A kernel rotates queries and keys whatever makes them, and copies the parts of a merged product on its way. With
        a product each attention reads V in place, but queries and keys may be rotated by a kernel each: by itself
        neither is faster, so that each place is judged. Hiera of SAM 2 pools the queries of windows as a map: its first
        three blocks, FP16, 1492 -> 1368 us by a plain roofline of an L4.
    Numerics:
        Exact: the same sums.
    Refuses when:
        As merged-projection; it does not pay: a block of GPT-NeoX, 512 wide, 8.2 -> 14.0 us beside its products.
    """

    name: str = "rotated-projection"
    stage: Stage = Stage.FUSE

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Products whose result is reshaped, transposed and cut into parts, one of which is cut again."""
        return _found(model, rotated=True)


def _found(model: ir.Model, *, rotated: bool) -> Findings:
    """The merged products of a model with, or without, a part that is cut again."""
    plans = (_plan(node) for node in edit.all_nodes(model.graph) if edit.is_op(node, "MatMul"))
    return Findings(tuple(Match(plan.nodes) for plan in plans if plan is not None and plan.is_rotated == rotated))


def _plan(product: ir.Node) -> _Plan | None:
    """How a product is cut into parts; None where it is not."""
    weight, total = edit.constant_tensor_of(product.inputs[1]), product.outputs[0]
    if weight is None or len(weight.shape) != 2 or total.shape is None or len(total.shape) < 3:
        return None
    nodes, value, add = [product], total, edit.only_user(total)
    if edit.is_op(add, "Add") and _bias_of(add) is not None:
        nodes.append(add)
        value = add.outputs[0]
    else:
        add = None
    start = value
    while edit.is_op(user := edit.only_user(value), *_MOVES):
        nodes.append(user)
        value = user.outputs[0]
    if value is start or value.is_graph_output():
        return None
    cuts = list(dict.fromkeys(user for user, _ in value.uses()))
    outputs = [(cut, output) for cut in cuts for output in cut.outputs if output.uses() or output.is_graph_output()]
    if len(outputs) < 2 or any(not edit.is_op(cut, *_CUTS) or cut.inputs[0] is not value for cut in cuts):
        return None
    moves = [(node, node.outputs[0]) for node in nodes if edit.is_op(node, *_MOVES)]
    parts, behind = list[_Part](), list[ir.Node]()
    for cut, output in outputs:
        chains = ((_part(start, [*moves, *chain]), chain) for chain in _chains(cut, output))
        part, chain = next((found for found in chains if found[0] is not None), (None, []))
        if part is None:
            return None
        parts.append(part)
        behind += [node for node, _ in chain[1:]]
    columns = [part.columns.ravel() for part in parts]
    if np.unique(np.concatenate(columns)).size != sum(item.size for item in columns):
        return None
    nodes += [*cuts, *behind]
    if any(node.graph is not product.graph for node in nodes):
        return None
    return _Plan(product, add, tuple(parts), tuple(nodes))


def _chains(cut: ir.Node, output: ir.Value) -> Iterator[list[tuple[ir.Node, ir.Value]]]:
    """What cuts a part out, and with it one, two and more of the moves behind it, each with its output."""
    chain, user = [(cut, output)], edit.only_user(output)
    yield chain
    while edit.is_op(user, *_MOVES):
        chain = [*chain, (user, user.outputs[0])]
        yield chain
        user = edit.only_user(chain[-1][1])


def _part(start: ir.Value, steps: list[tuple[ir.Node, ir.Value]]) -> _Part | None:
    """Where the batch, the tokens and the columns of a product are behind moves."""
    sizes, value = Sizes(), steps[-1][1]
    shape, rank = sizes.of(start), 0 if value.shape is None else len(value.shape)
    if shape is None or rank not in _RANKS or value.is_graph_output():
        return None
    varies, found = list[list[int]](), list[np.ndarray]()
    for first, last in ((0, 1), (1, len(shape) - 1), (len(shape) - 1, len(shape))):
        kept = [size if first <= axis < last else 1 for axis, size in enumerate(shape)]
        array = _behind(np.broadcast_to(np.arange(math.prod(kept)).reshape(kept), shape), steps, sizes)
        if array is None or array.ndim != rank:
            return None
        found.append(one_per(array))
        varies.append([place for place, dim in enumerate(found[-1].shape) if dim > 1])
        if last < len(shape) and not np.array_equal(found[-1].ravel(), np.arange(math.prod(kept))):
            return None
    if len(varies[0]) > 1 or len({*varies[0], *varies[1], *varies[2]}) != sum(map(len, varies)):
        return None
    idle = [place for place in range(rank) if not any(place in places for places in varies)]
    lead, middle = ([*places] or [idle.pop(0)] if idle or places else [] for places in varies[:2])
    order = [*lead, *middle, *varies[2]]
    tokens = _tokens(start, tuple(found[1].shape[place] for place in middle))
    if len(lead) != 1 or len(order) != rank or tokens is None or not varies[2]:
        return None
    perm = tuple(order.index(place) for place in range(rank))
    return _Part(value, found[2].reshape([found[2].shape[place] for place in varies[2]]), perm, tokens)


def _behind(array: np.ndarray, steps: list[tuple[ir.Node, ir.Value]], sizes: Sizes) -> np.ndarray | None:
    """What nodes that move elements make of an array, one after the other."""
    found: np.ndarray | None = array
    for node, output in steps:
        found = None if found is None else moved(node, output, found, sizes)
    return found


def _tokens(start: ir.Value, dims: tuple[int, ...]) -> tuple[int, ...] | None:
    """The axes of tokens for a Reshape: 0 where they are one in a product, too; None where they are not known."""
    if start.shape is None or not 1 <= len(dims) <= 2:
        return None
    if len(start.shape) == 3 and len(dims) == 1:
        return (0,)
    return dims if all(isinstance(dim, int) for dim in tuple(start.shape)[1:-1]) else None


def _bias_of(add: ir.Node) -> np.ndarray | None:
    """The constant per feature that a node adds to a product."""
    width = add.outputs[0].shape[-1] if add.outputs[0].shape is not None else None
    found = [array for array in map(edit.constant_of, add.inputs) if array is not None]
    return found[0] if len(found) == 1 and found[0].shape == (width,) else None
