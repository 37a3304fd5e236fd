"""Biases of attention that are sums of terms over the rows and the columns of a map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.attention import Attention, attention_of, only_user
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_STEP, _MOST = 8, 256
"""The fused kernel reads heads in place whose size is a multiple of the first, up to the second."""

_BIAS, _HEADS = "one bias", "longer heads"


@dataclass(frozen=True)
class _Term:
    """What is added to scores [..., *axes] of the keys.

    Attributes:
        value: [..., *tail].
        tail: The axes of the keys, of which those along which nothing changes are 1.
        axes: All of them.
    """

    value: ir.Value
    tail: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many numbers it has for a query."""
        return math.prod(self.tail)

    @property
    def columns(self) -> np.ndarray:
        """Which of its numbers each key gets, row by row."""
        return np.broadcast_to(np.arange(self.size).reshape(self.tail), self.axes).ravel()


@dataclass(frozen=True)
class _Plan:
    """Attention whose scores get terms.

    Attributes:
        factor: What the product of queries and keys is multiplied by before.
        scaled: Scores times that.
        end: What gives the sum of the scores and the terms, [..., queries, keys].
        is_split: Whether scores become [..., *axes] to be added to.
        between: From the product to ``end``.
    """

    attention: Attention
    factor: float
    scaled: ir.Value
    end: ir.Node
    is_split: bool
    terms: tuple[_Term, ...]
    between: tuple[ir.Node, ...]

    @property
    def axes(self) -> tuple[int, ...]:
        """Sizes of the axes of the keys."""
        return self.terms[0].axes

    @property
    def is_narrow(self) -> bool:
        """Whether all terms are alike along one axis."""
        return any(all(term.tail[axis] < size for term in self.terms) for axis, size in enumerate(self.axes))

    @property
    def wide(self) -> int:
        """The size of heads with the terms in them."""
        sizes = [_ints(_dims(value)[-1:]) for value in (self.attention.scores.inputs[0], self.attention.mix.inputs[1])]
        queries, values = (each[0] if each else 0 for each in sizes)
        return -(-max(queries + sum(term.size for term in self.terms), values) // _STEP) * _STEP

    def match(self, choice: str) -> Match:
        """The match of one of the ways."""
        nodes = (self.attention.softmax, *self.between, self.attention.mix)
        return Match(tuple(dict.fromkeys(nodes)), choice=choice)


@dataclass(frozen=True)
class BroadcastBias:
    """Adds terms over the axes of a map to the scores of attention as one bias, or as a part of their product.

    Rewrite:
        Reshape(Reshape(scale Q K^T) + A + B) = scale Q K^T + Reshape(A + B), where scores are split into [..., rows,
        columns] of the keys to add A [..., rows, 1] and B [..., 1, columns]. Or either = [scale Q, A, B] [K, I, J]^T,
        where I and J are constants of zeros and ones that say in which row and column a key is; zeros are appended to
        heads up to a multiple of 8 and to values up to the size of these, and cut off behind.
    Requires:
        Positions relative to rows and columns (image encoder of SAM, ViTDet, MViTv2): terms that differ for each query
        and along some axes of the keys, of fixed sizes; nothing but one factor between Q K^T and them. Longer heads:
        at most 256, and one size of the batch at most that is not fixed. For TensorRT for RTX in 16 or 8 bits.
    Why faster:
        Attention is not fused where its scores are split into axes: 12 heads of 64 on a map of 32 x 32, FP16, L4, with
        projections: 10 -> 7 kernels and 385 -> 257 us (second judge: 632 -> 391). Longer heads write no bias of
        [heads, queries, keys], and compute more; the judge decides: that map is slower for one image (257 -> 351 us;
        second judge: 391 -> 286) and faster for eight (2873 -> 2786; on L40S 850 -> 663).
    Numerics:
        The same sums; zeros and ones are exact.
    Refuses when:
        A size of the map is not fixed, or several of the batch are not; heads become longer than 256 where scores are
        not split.
    """

    name: str = "broadcast-bias"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Attention to whose scores terms of fewer numbers are added."""
        if target.backend != "tensorrt-rtx" or target.precision in ("fp32", "tf32"):
            return Findings()
        matches, refusals = [], []
        for softmax in edit.all_nodes(model.graph):
            plan = _plan(softmax, model.opset_imports.get("", 1)) if edit.is_op(softmax, "Softmax") else None
            if isinstance(plan, str):
                refusals.append(Refusal(str(softmax.name), plan))
            if plan is None or isinstance(plan, str) or plan.end.metadata_props.get(edit.RECIPE_KEY) == self.name:
                continue
            reason = _why_not_longer(plan)
            if plan.is_split:
                matches.append(plan.match(_BIAS))
            if not reason:
                matches.append(plan.match(_HEADS))
            elif not plan.is_split:
                refusals.append(Refusal(str(softmax.name), reason))
        return Findings(tuple(matches), tuple(refusals))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Rewrite one attention."""
        plan = _plan(match.nodes[0], model.opset_imports.get("", 1))
        if plan is None or isinstance(plan, str):
            return Refusal(match.label, plan or "it has changed since it was found")
        if match.choice == _BIAS:
            _add_bias(model, plan, self.name)
        else:
            _lengthen(model, plan, self.name)
        return None


def _plan(softmax: ir.Node, opset: int) -> _Plan | str | None:
    """How terms are added to the scores of a softmax; why not, or None where none are."""
    attention = attention_of(softmax, opset)
    if attention is None:
        return None
    factor, scores = _scaled(attention.scores)
    user = only_user(scores)
    if user is None:
        return None
    if not edit.is_op(user, "Reshape"):
        return _joined(attention, factor, scores, user)
    others, nodes, value = list[ir.Value | None](), [attention.scores, user], user.outputs[0]
    while (user := only_user(value)) is not None and edit.is_op(user, "Add"):
        others.append(user.inputs[1 if user.inputs[0] is value else 0])
        nodes.append(user)
        value = user.outputs[0]
    if user is None or not others or not edit.is_op(user, "Reshape") or user.inputs[0] is not value:
        return None
    terms = _terms(value, others, user.outputs[0])
    if terms is None or isinstance(terms, str):
        return terms
    if not _are_alike(scores, user.outputs[0], unlike=1):
        return "scores may have another shape once terms are added to them"
    return _Plan(attention, factor, scores, user, True, terms, (*nodes, user))


def _joined(attention: Attention, factor: float, scores: ir.Value, adder: ir.Node) -> _Plan | str | None:
    """The plan where terms are one bias already."""
    bias = next((value for value in adder.inputs if value is not scores), None)
    made = bias.producer() if bias is not None and edit.is_op(adder, "Add") else None
    whole = made.inputs[0] if made is not None and edit.is_op(made, "Reshape") else None
    if bias is None or whole is None or not edit.is_op(whole.producer(), "Add"):
        return None
    terms = _terms(whole, [whole], bias)
    if terms is None or isinstance(terms, str):
        return terms
    queries = _dims(attention.scores.inputs[0])
    if None in queries or queries[:-1] != _dims(bias)[:-1]:
        return "the bias may be broadcast over the batch"
    return _Plan(attention, factor, scores, adder, False, terms, (attention.scores, adder))


def _scaled(product: ir.Node) -> tuple[float, ir.Value]:
    """What scores are multiplied by, and the product."""
    factor, value = 1.0, product.outputs[0]
    while (user := only_user(value)) is not None and edit.is_op(user, "Mul", "Div"):
        number = edit.constant_of(user.inputs[1 if user.inputs[0] is value else 0])
        if number is None or number.size != 1 or (edit.is_op(user, "Div") and user.inputs[0] is not value):
            break
        if not np.isfinite(number).all() or not number.all():
            break
        factor *= float(number.item()) if edit.is_op(user, "Mul") else 1 / float(number.item())
        value = user.outputs[0]
    return factor, value


def _terms(whole: ir.Value, added: Sequence[ir.Value | None], flat: ir.Value) -> tuple[_Term, ...] | str | None:
    """The terms whose sum, in the shape of ``whole``, becomes ``flat``, [..., queries, keys]; None where there are
    others."""
    leaves = [leaf for value in added for leaf in _leaves(value)]
    shape, rows = _dims(whole), _dims(flat)
    dims = [_dims(leaf) for leaf in leaves]
    if len(rows) < 2 or len(shape) < len(rows) or any(len(each) != len(shape) or each == shape for each in dims):
        return None
    if not _fixed(rows[-2:]):
        return "the size of the map is not fixed"
    counts = range(2, len(shape))
    count = next((n for n in counts if _fixed(shape[-n:]) and math.prod(_ints(shape[-n:])) == rows[-1]), 0)
    lead = shape[: len(shape) - count]
    if not count or None in lead or any(each[: len(lead)] != lead for each in dims):
        return None
    axes, terms = _ints(shape[-count:]), []
    for leaf, each in zip(leaves, dims, strict=True):
        tail = _ints(each[-count:])
        if len(tail) != count:
            return None
        terms.append(_Term(leaf, tail, axes))
    return tuple(terms)


def _leaves(value: ir.Value | None) -> list[ir.Value]:
    """What is added up."""
    node = value.producer() if value is not None else None
    if node is None or not edit.is_op(node, "Add"):
        return [value] if value is not None else []
    return [leaf for each in node.inputs for leaf in _leaves(each)]


def _dims(value: ir.Value | None) -> tuple[int | str | None, ...]:
    return edit.dims_of_value(value) or ()


def _fixed(dims: Sequence[int | str | None]) -> bool:
    return all(isinstance(dim, int) for dim in dims)


def _ints(dims: Sequence[int | str | None]) -> tuple[int, ...]:
    return tuple(dim for dim in dims if isinstance(dim, int))


def _are_alike(one: ir.Value, other: ir.Value, unlike: int) -> bool:
    """Whether two shapes of as many elements are equal, of which so many sizes may not be known."""
    pair = _dims(one), _dims(other)
    return len(pair[0]) == len(pair[1]) and sum(a is None or a != b for a, b in zip(*pair, strict=True)) <= unlike


def _why_not_longer(plan: _Plan) -> str:
    """Why terms cannot become a part of heads."""
    product, mix = plan.attention.scores, plan.attention.mix
    (queries, keys), values = (_dims(value) for value in product.inputs), _dims(mix.inputs[1])
    rank = len(_dims(plan.end.outputs[0]))
    if any(len(each) != rank for each in (queries, keys, values)) or not _fixed((*queries[-2:], keys[-2], values[-1])):
        return "queries, keys or values have no fixed size"
    if len(_ints(queries)) < rank - 1:
        return "several sizes of the batch are not fixed"
    return "" if plan.wide <= _MOST else f"heads would become {plan.wide} long"


def _add_bias(model: ir.Model, plan: _Plan, recipe: str) -> None:
    """Add the terms to each other before they are added to the scores."""
    splice = edit.Splice(model, plan.end, recipe)
    value, output = plan.terms[0].value, plan.end.outputs[0]
    for term in plan.terms[1:]:
        value = splice.fresh("Add", value, term.value)
    if plan.is_narrow and output.dtype is not None:
        value = splice.fresh("Add", value, splice.constant(np.zeros(plan.axes, output.dtype.numpy()), output, "zeros"))
    bias = splice.fresh("Reshape", value, plan.end.inputs[1], attributes=_attributes(plan.end))
    total = splice.fresh("Add", plan.scaled, bias)
    total.shape = output.shape
    splice.finish(total)


def _lengthen(model: ir.Model, plan: _Plan, recipe: str) -> None:
    """Make the terms a part of queries, and where they belong one of keys."""
    product, mix = plan.attention.scores, plan.attention.mix
    queries, keys, values = product.inputs[0], product.inputs[1], mix.inputs[1]
    splice = edit.Splice(model, plan.end, recipe)
    output, rank = plan.end.outputs[0], len(_dims(queries))
    if keys is None or values is None or output.dtype is None:
        raise ValueError(f"attention of {plan.attention.softmax.name} has no operands")

    def integers(*numbers: int) -> ir.Value:
        return splice.constant(np.asarray(numbers, np.int64), output, "constant")

    def padded(splice: edit.Splice, value: ir.Value, axis: int, size: int) -> ir.Value:
        room = [0] * 2 * rank
        room[2 * rank + axis if axis < 0 else axis] = plan.wide - size
        return value if plan.wide == size else splice.fresh("Pad", value, integers(*room))

    lead = [dim if isinstance(dim, int) else -1 for dim in _dims(queries)[:-1]]
    size, value_size = _ints(_dims(queries)[-1:])[0], _ints(_dims(values)[-1:])[0]
    scaled = queries if plan.factor == 1 else splice.fresh("Mul", queries, splice.number(plan.factor))
    parts = [splice.fresh("Reshape", term.value, integers(*lead, term.size)) for term in plan.terms]
    joined = splice.fresh("Concat", scaled, *parts, attributes={"axis": -1})
    wanted = np.zeros((plan.wide, len(plan.terms[0].columns)), output.dtype.numpy())
    place = size
    for term in plan.terms:
        wanted[place + term.columns, np.arange(wanted.shape[1])] = 1
        place += term.size
    table = splice.constant(wanted, output, "columns")
    longer = splice.fresh("Add", padded(splice, keys, -2, size), table)
    scores = splice.fresh("MatMul", padded(splice, joined, -1, place), longer)
    scores.shape = output.shape
    splice.finish(scores)
    behind = edit.Splice(model, mix, recipe)
    mixed = behind.fresh("MatMul", mix.inputs[0], padded(behind, values, -1, value_size))
    if value_size < plan.wide:
        mixed = behind.fresh("Slice", mixed, integers(0), integers(value_size), integers(rank - 1))
    mixed.shape = mix.outputs[0].shape
    behind.finish(mixed)


def _attributes(node: ir.Node) -> dict[str, int]:
    return {"allowzero": edit.int_attribute(node, "allowzero", 0)}
