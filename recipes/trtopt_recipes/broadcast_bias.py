"""Biases of attention that are sums of terms over the rows and the columns of a map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.attention import Attention, attention_of
from trtopt.graph.views import scaled_by
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target


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


@dataclass(frozen=True)
class _Plan:
    """Attention whose scores are split into the axes of the keys, to which terms are added.

    Attributes:
        scaled: The scores, scaled.
        end: What gives the sum of the scores and the terms, [..., queries, keys].
        between: From the product to ``end``.
    """

    attention: Attention
    scaled: ir.Value
    end: ir.Node
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


@dataclass(frozen=True)
class BroadcastBias:
    """Adds terms over the axes of a map to the scores of attention as one bias.

    Rewrite:
        Reshape(Reshape(scale Q K^T) + A + B) = scale Q K^T + Reshape(A + B), where scores are split into [..., rows,
        columns] of the keys to add A [..., rows, 1] and B [..., 1, columns].
    Requires:
        Positions relative to rows and columns (ViTDet): terms that differ for each query and along some axes of the
        keys, of fixed sizes; nothing but one factor between Q K^T and them. For TensorRT for RTX in 16 or 8 bits.
    Why faster:
        Attention is not fused where its scores are split into axes: 12 heads of 64 on a map of 32 x 32, FP16, L4, with
        projections: 10 -> 7 kernels and 385 -> 257 us (second judge: 632 -> 391).
    Numerics:
        The same sums.
    Refuses when:
        A size of the map is not fixed, or scores may have another shape once terms are added.
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
            matches.append(Match(tuple(dict.fromkeys((softmax, *plan.between, plan.attention.mix)))))
        return Findings(tuple(matches), tuple(refusals))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Rewrite one attention."""
        plan = _plan(match.nodes[0], model.opset_imports.get("", 1))
        if plan is None or isinstance(plan, str):
            return Refusal(match.label, plan or "it has changed since it was found")
        _add_bias(model, plan, self.name)
        return None


def _plan(softmax: ir.Node, opset: int) -> _Plan | str | None:
    """How terms are added to the scores of a softmax; why not, or None where none are."""
    attention = attention_of(softmax, opset)
    if attention is None:
        return None
    scores = _scaled(attention.scores)
    user = edit.only_user(scores)
    if not edit.is_op(user, "Reshape"):
        return None
    others, nodes, value = list[ir.Value | None](), [attention.scores, user], user.outputs[0]
    while edit.is_op(user := edit.only_user(value), "Add"):
        others.append(user.inputs[1 if user.inputs[0] is value else 0])
        nodes.append(user)
        value = user.outputs[0]
    if not others or not edit.is_op(user, "Reshape") or user.inputs[0] is not value:
        return None
    terms = _terms(value, others, user.outputs[0])
    if terms is None or isinstance(terms, str):
        return terms
    if not _are_alike(scores, user.outputs[0]):
        return "scores may have another shape once terms are added to them"
    return _Plan(attention, scores, user, terms, (*nodes, user))


def _scaled(product: ir.Node) -> ir.Value:
    """The product times a number, if there is one behind it."""
    value = product.outputs[0]
    while (user := edit.only_user(value)) is not None and (scaled := scaled_by(user)) and scaled[1].size == 1:
        value = user.outputs[0]
    return value


def _terms(whole: ir.Value, added: Sequence[ir.Value | None], flat: ir.Value) -> tuple[_Term, ...] | str | None:
    """The terms whose sum, in the shape of ``whole``, becomes ``flat``, [..., queries, keys]; None where there are
    others."""
    leaves = [leaf for value in added for leaf in _leaves(value)]
    shape, rows = _dims(whole), _dims(flat)
    dims = [_dims(leaf) for leaf in leaves]
    if len(rows) < 2 or len(shape) < len(rows) or any(len(each) != len(shape) or each == shape for each in dims):
        return None
    if edit.numbers_of(rows[-2:]) is None:
        return "the size of the map is not fixed"
    ends = (axes for count in range(2, len(shape)) if (axes := edit.numbers_of(shape[-count:])) is not None)
    axes = next((each for each in ends if math.prod(each) == rows[-1]), ())
    lead = shape[: len(shape) - len(axes)]
    if not axes or None in lead or any(each[: len(lead)] != lead for each in dims):
        return None
    terms = []
    for leaf, each in zip(leaves, dims, strict=True):
        tail = edit.numbers_of(each[-len(axes) :])
        if tail is None:
            return None
        terms.append(_Term(leaf, tail, axes))
    return tuple(terms)


def _leaves(value: ir.Value | None) -> list[ir.Value]:
    """What is added up."""
    node = edit.maker_of(value)
    if not edit.is_op(node, "Add"):
        return [value] if value is not None else []
    return [leaf for each in node.inputs for leaf in _leaves(each)]


def _dims(value: ir.Value | None) -> tuple[int | str | None, ...]:
    return edit.dims_of_value(value) or ()


def _are_alike(one: ir.Value, other: ir.Value) -> bool:
    """Whether two shapes of as many elements are equal, of which one size may not be known."""
    pair = _dims(one), _dims(other)
    return len(pair[0]) == len(pair[1]) and sum(a is None or a != b for a, b in zip(*pair, strict=True)) <= 1


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


def _attributes(node: ir.Node) -> dict[str, int]:
    return {"allowzero": edit.int_attribute(node, "allowzero", 0)}
