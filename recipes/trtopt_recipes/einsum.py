"""Matrix products that are written as Einsum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph import edit
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_Sizes = dict[str, int | None]


@dataclass(frozen=True)
class Einsum:
    """Writes an Einsum of two operands as a matrix product.

    Rewrite:
        Einsum(a, b) = Transpose(Reshape(MatMul(Reshape(Transpose(a)), Reshape(Transpose(b))))), of which what changes
        nothing is left out: axes that both have and the result has are those of the batch, axes that both have and the
        result has not are summed. Where only one operand has other axes in front, they stay as they are, and the other
        is repeated for them (heads that share keys and values); a weight becomes the second operand. What sums
        nothing, as the angles of rotary embeddings, becomes Mul(Unsqueeze(a), Unsqueeze(b)).
    Requires:
        Floating point; an equation with an arrow and without an ellipsis or a letter twice in an operand; summed axes
        that are provably as long in both; no axis of size 0; shapes of which one size at most has to be computed.
    Why faster:
        Nothing by itself: the compiler does the same. Recipes for attention and for products, 8 bits and the compiler's
        own fusions of biases look for MatMul (XLNet of three
        layers, FP16: 40 kernels and 25 stream syncs -> 34 and none; its projections can be 8-bit).
    Numerics:
        The same sums of products.
    Refuses when:
        One of the above is missing; an axis is summed that only one operand has.
    """

    name: str = "einsum"
    stage: Stage = Stage.CLEAN
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Einsum nodes of two operands."""
        nodes = [node for node in edit.all_nodes(model.graph) if edit.is_op(node, "Einsum") and len(node.inputs) == 2]
        plans = [(node, _plan(node)) for node in nodes]
        return Findings.of([(Match((node,)), plan if isinstance(plan, str) else "") for node, plan in plans])

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Write one node as a product."""
        (node,) = match.nodes
        plan = _plan(node)
        if isinstance(plan, str):
            return Refusal(match.label, plan)
        splice = edit.Splice(model, node, self.name)
        first, second = (_entered(splice, each, plan.sizes) for each in plan.operands)
        if not plan.made:
            splice.finish(splice.fresh("Mul", first, second))
            return None
        product = splice.fresh("MatMul", first, _repeated(splice, second, plan))
        letters = "".join(plan.made)
        value = _reshaped(splice, product, plan.made, tuple(letters), plan.sizes)
        splice.finish(_transposed(splice, value, letters, plan.result))
        return None


@dataclass(frozen=True)
class _Operand:
    """An operand: its axes, one letter each, and those of the matrix product, each of any number of letters."""

    value: ir.Value
    axes: str
    groups: tuple[str, ...]


@dataclass(frozen=True)
class _Plan:
    """Operands of the product, the groups of axes that it makes, the result's axes, and all sizes that are known.

    The second operand is repeated over the axes in ``spread``, each of them one of 1 behind those of the batch. Where
    nothing is summed, the operands are multiplied element by element, and there are no groups.
    """

    operands: tuple[_Operand, _Operand]
    made: tuple[str, ...]
    result: str
    sizes: _Sizes
    spread: tuple[str, ...] = ()


def _plan(node: ir.Node) -> _Plan | str:
    """How an Einsum is a product; or why it is none."""
    terms, arrow, result = edit.string_attribute(node, "equation", "").replace(" ", "").partition("->")
    left, comma, right = terms.partition(",")
    if not arrow or not comma or any(len(set(term)) < len(term) or "." in term for term in (left, right, result)):
        return f"its equation {terms}{arrow}{result} is not one of two products with each letter once"
    if {*left} ^ {*right} != ({*left} ^ {*right}) & {*result}:
        return "it sums an axis that only one operand has"
    summed = "".join(letter for letter in left if letter in right and letter not in result)
    values = node.inputs
    if values[0] is None or values[1] is None:
        return "it has one operand"
    sizes, reason = _sizes_of(((values[0], left), (values[1], right)), summed)
    if reason:
        return reason
    if not summed:
        one, other = (tuple(letter if letter in term else "" for letter in result) for term in (left, right))
        return _Plan((_Operand(values[0], left, one), _Operand(values[1], right, other)), (), result, sizes)
    first = next((letter for letter in result if (letter in left) != (letter in right)), "")
    constant = [edit.constant_tensor_of(value) is not None for value in values]
    turned = constant[0] if any(constant) else first in right and first not in left
    pairs = ((values[1], right), (values[0], left)) if turned else ((values[0], left), (values[1], right))
    batch = tuple(letter for letter in result if letter in left and letter in right)
    rows, columns = ("".join(x for x in result if x in term and x not in batch) for _, term in pairs)
    spread = tuple(rows[:-1]) if batch else ()  # axes that the second operand is broadcast over
    kept = (*batch, *spread, rows[-1:]) if batch else tuple(rows)
    alike = (*batch, *("" for _ in spread))
    operands = (_Operand(*pairs[0], (*kept, summed)), _Operand(*pairs[1], (*alike, summed, columns)))
    plan = _Plan(operands, (*kept, columns), result, sizes, spread)
    ways = [(tuple("".join(operand.groups)), _filled(operand.groups)) for operand in operands]
    ways.append((plan.made, tuple("".join(plan.made))))
    if any(_shape(before, after, sizes).count(-1) > 1 for before, after in ways):
        return "more than one size of its axes has to be computed"
    return plan


def _sizes_of(operands: Iterable[tuple[ir.Value, str]], summed: str) -> tuple[_Sizes, str]:
    """Sizes that are known, by letter; or why the operands are no matrices."""
    dims: dict[str, list[int | str | None]] = {}
    for value, axes in operands:
        shape = edit.dims_of_value(value)
        if shape is None or len(shape) != len(axes) or value.dtype is None or not value.dtype.is_floating_point():
            return {}, "its operands are not of floating point and of a known rank"
        for letter, dim in zip(axes, shape, strict=True):
            dims.setdefault(letter, []).append(dim)
    unlike = [letter for letter, found in dims.items() if len(set(found)) > 1 or (None in found and len(found) > 1)]
    if any(0 in found for found in dims.values()):
        return {}, "an axis is empty"
    if any(letter in summed or any(isinstance(dim, int) for dim in dims[letter]) for letter in unlike):
        return {}, "an axis is not known to be as long in both operands"
    return {letter: found[0] if isinstance(found[0], int) else None for letter, found in dims.items()}, ""


def _shape(before: Sequence[str], after: Sequence[str], sizes: _Sizes) -> list[int]:
    """The shape for a Reshape of axes in groups to other groups: 0 copies a size, -1 has to be computed."""
    found = []
    for index, group in enumerate(after):
        known = [sizes[letter] for letter in group]
        stays = index < len(before) and before[index] == group
        static = math.prod(size for size in known if size is not None)
        found.append(static if None not in known else 0 if stays else -1)
    return found


def _entered(splice: edit.Splice, operand: _Operand, sizes: _Sizes) -> ir.Value:
    """An operand with its axes in the order and the groups of the product; a group of none is an axis of 1."""
    letters, groups = "".join(operand.groups), operand.groups
    value = _transposed(splice, operand.value, operand.axes, letters)
    value = _reshaped(splice, value, tuple(letters), _filled(groups), sizes)
    single = [index for index, group in enumerate(groups) if not group]
    axes = splice.ints(single, value, "axes") if single else None
    return splice.fresh("Unsqueeze", value, axes, like=value) if single else value


def _repeated(splice: edit.Splice, value: ir.Value, plan: _Plan) -> ir.Value:
    """The second operand as often as the first has it, where that is known: fused attention wants as many keys."""
    sizes = [plan.sizes[letter] for letter in plan.spread]
    if not sizes or None in sizes:
        return value
    repeats = [1 if group or not sizes else sizes.pop(0) for group in plan.operands[1].groups]
    return splice.fresh("Expand", value, splice.ints(repeats, value, "repeats"), like=value)


def _filled(groups: Iterable[str]) -> tuple[str, ...]:
    return tuple(group for group in groups if group)


def _transposed(splice: edit.Splice, value: ir.Value, axes: str, wanted: str) -> ir.Value:
    perm = [axes.index(letter) for letter in wanted]
    return value if axes == wanted else splice.fresh("Transpose", value, attributes={"perm": perm}, like=value)


def _reshaped(
    splice: edit.Splice, value: ir.Value, before: tuple[str, ...], after: tuple[str, ...], sizes: _Sizes
) -> ir.Value:
    if before == after:
        return value
    shape = splice.ints(_shape(before, after, sizes), value, "shape")
    return splice.fresh("Reshape", value, shape, like=value)
