"""What values around a softmax may hold: bounds of numbers, and rows of which some entry is not masked.

What products, normalizations and the like give is taken to be finite and moderate (:data:`MODERATE`): what is proven
here holds for such scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph.edit import axes_of, constant_of, constant_tensor_of, ints_attribute, is_op

MODERATE = 1e30
"""Largest magnitude of what a network computes, masks apart."""

MODERATE_HALF = 3e4
"""The same in FP16, which ends at 65504."""

_DEPTH = 48
_MOST_ELEMENTS = 1 << 24
_MOST_ROWS = float(1 << 40)
"""Longer than any tensor."""

_MODERATE_OPS = frozenset(
    "BatchNormalization Conv Einsum Erf Gelu Gemm InstanceNormalization LayerNormalization MatMul RMSNormalization "
    "Sigmoid Softmax Tanh".split()
)
_MOVES = frozenset("Expand Flatten Gather GatherND Identity Reshape Slice Split Squeeze Transpose Unsqueeze".split())


@dataclass(frozen=True)
class Bounds:
    """What every entry of a tensor is: a number from ``low`` to ``high`` or, where ``gaps`` is set, -inf.

    Each row along the last axis has an entry that is a number. A boolean is 0 or 1.
    """

    low: float
    high: float
    gaps: bool = False


class Scores:
    """Bounds of the values of a graph; every value is looked at once.

    Args:
        given: Bounds that are known already.
    """

    def __init__(self, given: Mapping[ir.Value, Bounds] | None = None) -> None:
        self._bounds: dict[ir.Value, Bounds | None] = dict(given or {})

    def of(self, value: ir.Value | None, depth: int = _DEPTH) -> Bounds | None:
        """The bounds of ``value``; None where a row may hold nothing but -inf, or there may be NaN or +inf."""
        if value is None or depth == 0:
            return None
        if value not in self._bounds:
            found = self._of(value, depth - 1)
            self._bounds[value] = _fitted(found, value.dtype)
        return self._bounds[value]

    def always(self, condition: ir.Value | None) -> bool | None:
        """What a boolean is everywhere; None where that cannot be said."""
        bounds = self.of(condition)
        return None if bounds is None or bounds.low != bounds.high else bool(bounds.low)

    def has(self, wanted: bool, value: ir.Value | None, depth: int = _DEPTH) -> bool:
        """Whether each row of a boolean has an entry that is ``wanted``."""
        if value is None or depth == 0:
            return False
        if self.always(value) is wanted:
            return True
        array = constant_of(value) if _is_small(value) else None
        if array is not None:
            return bool((np.atleast_1d(array) == wanted).any(axis=-1).all())
        node = value.producer()
        if node is None or node.domain != "":
            return False
        if node.op_type in _MOVES:
            return _keeps_rows(node) and self.has(wanted, node.inputs[0], depth - 1)
        if is_op(node, "Not"):
            return self.has(not wanted, node.inputs[0], depth - 1)
        if is_op(node, "And", "Or"):
            if wanted is is_op(node, "Or"):
                return any(self.has(wanted, operand, depth - 1) for operand in node.inputs)
            rest = [operand for operand in node.inputs if self.always(operand) is not wanted]
            return len(rest) == 1 and self.has(wanted, rest[0], depth - 1)
        pair = _ordered(node, wanted)
        return pair is not None and self._begins_below(pair[0], self.of(pair[1]), depth - 1)

    def doubt(self, value: ir.Value) -> str:
        """The name of the value, behind one that has no bounds, that is to blame."""
        for _ in range(_DEPTH):
            node = value.producer()
            if not is_op(node, "Add", "Sub", "Mul", "Div", "Where"):
                break
            unknown = [v for v in node.inputs if v is not None and self.of(v) is None and not _is_small(v)]
            if not unknown:
                break
            value = unknown[0]
        return str(value.name)

    def _of(self, value: ir.Value, depth: int) -> Bounds | None:
        if constant_tensor_of(value) is not None:
            return _of_constant(value)
        node = value.producer()
        if node is None or node.domain != "":
            return _of_type(value.dtype)
        kind = node.op_type
        if kind in _MODERATE_OPS:
            return moderate(value.dtype)
        if kind in _MOVES:
            found = self.of(node.inputs[0], depth)
            return found if found is None or not found.gaps or _keeps_rows(node) else None
        if kind == "Where":
            found = self._selected(node, depth)
        else:
            operands = [self.of(operand, depth) for operand in node.inputs] if kind in _RULES else []
            known = [operand for operand in operands if operand is not None]
            found = _RULES[kind](*known) if known and len(known) == len(operands) else None
        return _of_type(value.dtype) if found is None else found

    def _selected(self, node: ir.Node, depth: int) -> Bounds | None:
        """Of a Where: what it may take from each side; -inf on one side leaves gaps."""
        condition, sides = node.inputs[0], (node.inputs[1], node.inputs[2])
        settled = self.always(condition)
        if settled is not None:
            return self.of(sides[0 if settled else 1], depth)
        for side, other, wanted in ((sides[0], sides[1], False), (sides[1], sides[0], True)):
            found = self.of(other, depth) if is_nothing(side) else None
            if found is not None:
                return Bounds(found.low, found.high, True) if not found.gaps and self.has(wanted, condition) else None
        first, second = (self.of(side, depth) for side in sides)
        if first is None or second is None or first.gaps or second.gaps:
            return None
        return Bounds(min(first.low, second.low), max(first.high, second.high))

    def _begins_below(self, value: ir.Value | None, limit: Bounds | None, depth: int) -> bool:
        """Whether each row of integers has an entry that is not above ``limit``."""
        if value is None or limit is None or depth == 0:
            return False
        array = constant_of(value) if _is_small(value) else None
        if array is not None:
            return bool((np.atleast_1d(array).min(axis=-1) <= limit.low).all()) if array.size else False
        node = value.producer()
        if is_op(node, "Range"):
            start = self.of(node.inputs[0])
            return start is not None and start.high <= limit.low
        return (
            is_op(node, *_MOVES, "Cast") and _keeps_rows(node) and self._begins_below(node.inputs[0], limit, depth - 1)
        )


def is_nothing(value: ir.Value | None) -> bool:
    """Whether ``value`` is a constant of -inf throughout."""
    array = constant_of(value) if value is not None and _is_small(value) else None
    return array is not None and array.size > 0 and array.dtype.kind not in "iub" and bool((array == -np.inf).all())


def _is_small(value: ir.Value) -> bool:
    tensor = constant_tensor_of(value)
    return tensor is not None and tensor.size <= _MOST_ELEMENTS


def _of_constant(value: ir.Value) -> Bounds | None:
    array = constant_of(value) if _is_small(value) else None
    if array is None or not array.size:
        return _of_type(value.dtype)
    wide = np.atleast_1d(array).astype(np.float64)
    there = wide > -np.inf
    if np.isnan(wide).any() or (wide == np.inf).any() or not there.any(axis=-1).all():
        return None
    return Bounds(float(wide[there].min()), float(wide.max()), not there.all())


def _of_type(dtype: ir.DataType | None) -> Bounds | None:
    """What every tensor of a type holds; nothing is known of floats."""
    if dtype == ir.DataType.BOOL:
        return Bounds(0, 1)
    if dtype is None or dtype.numpy().kind not in "iu":
        return None
    info = np.iinfo(dtype.numpy())
    return Bounds(float(info.min), float(info.max))


def moderate(dtype: ir.DataType | None) -> Bounds | None:
    """What products, normalizations and the like hold of this type; any number for integers."""
    if dtype is None or not dtype.is_floating_point():
        return _of_type(dtype)
    most = MODERATE_HALF if dtype == ir.DataType.FLOAT16 else MODERATE
    return Bounds(-most, most)


def _fitted(bounds: Bounds | None, dtype: ir.DataType | None) -> Bounds | None:
    """``bounds`` where the type holds them: integers that overflow may become any, floats infinite."""
    if bounds is None or dtype is None:
        return None
    if dtype == ir.DataType.BOOL:
        if bounds.gaps:
            return Bounds(0, 1)
        return Bounds(float(bounds.low > 0 or bounds.high < 0), float(bounds.low != 0 or bounds.high != 0))
    if dtype.is_floating_point():
        with np.errstate(over="ignore"):
            ends = np.asarray([bounds.low, bounds.high]).astype(dtype.numpy()).astype(np.float64)
        return bounds if np.isfinite(ends).all() else None
    whole = _of_type(dtype)
    if whole is None or bounds.gaps:
        return None
    low, high = np.floor(bounds.low), np.ceil(bounds.high)
    return Bounds(float(low), float(high)) if whole.low <= low and high < whole.high else whole


def _keeps_rows(node: ir.Node) -> bool:
    """Whether each row of the output holds all that some row of the first input holds, and nothing else."""
    if is_op(node, "Identity", "Expand", "Cast"):
        return True
    source, result = node.inputs[0], node.outputs[0]
    rank = len(source.shape) if source is not None and source.shape is not None else None
    if rank is None or result.shape is None:
        return False
    if is_op(node, "Transpose"):
        perm = ints_attribute(node, "perm")
        return perm is not None and perm[-1] == rank - 1
    if is_op(node, "Unsqueeze", "Squeeze"):
        axes, longest = axes_of(node), max(rank, len(result.shape))
        return axes is not None and all(axis % longest != longest - 1 for axis in axes)
    return False


def _add(a: Bounds, b: Bounds) -> Bounds | None:
    return None if a.gaps and b.gaps else Bounds(a.low + b.low, a.high + b.high, a.gaps or b.gaps)


def _sub(a: Bounds, b: Bounds) -> Bounds | None:
    return None if b.gaps else Bounds(a.low - b.high, a.high - b.low, a.gaps)


def _mul(a: Bounds, b: Bounds) -> Bounds | None:
    if (a.gaps and (b.gaps or b.low <= 0)) or (b.gaps and a.low <= 0):
        return None
    ends = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
    return Bounds(min(ends), max(ends), a.gaps or b.gaps)


def _div(a: Bounds, b: Bounds) -> Bounds | None:
    return None if b.gaps or b.low <= 0 else _mul(a, Bounds(1 / b.high, 1 / b.low))


def _range(start: Bounds, limit: Bounds, step: Bounds) -> Bounds | None:
    return Bounds(start.low, start.high + step.high * _MOST_ROWS) if step.low > 0 else None


def _compared(holds: Callable[[Bounds, Bounds], bool | None]) -> Callable[[Bounds, Bounds], Bounds]:
    def rule(a: Bounds, b: Bounds) -> Bounds:
        found = None if a.gaps or b.gaps else holds(a, b)
        return Bounds(0, 1) if found is None else Bounds(found, found)

    return rule


def _less(a: Bounds, b: Bounds) -> bool | None:
    return True if a.high < b.low else False if a.low >= b.high else None


def _less_equal(a: Bounds, b: Bounds) -> bool | None:
    return True if a.high <= b.low else False if a.low > b.high else None


def _equal(a: Bounds, b: Bounds) -> bool | None:
    if a.high < b.low or b.high < a.low:
        return False
    return True if a.low == a.high == b.low == b.high else None


_RULES: dict[str, Callable[..., Bounds | None]] = {
    "Add": _add,
    "And": lambda a, b: Bounds(min(a.low, b.low), min(a.high, b.high)),
    "Cast": lambda a: a,
    "Div": _div,
    "Equal": _compared(_equal),
    "Greater": _compared(lambda a, b: _less(b, a)),
    "GreaterOrEqual": _compared(lambda a, b: _less_equal(b, a)),
    "Less": _compared(_less),
    "LessOrEqual": _compared(_less_equal),
    "Mul": _mul,
    "Neg": lambda a: None if a.gaps else Bounds(-a.high, -a.low),
    "Not": lambda a: Bounds(1 - a.high, 1 - a.low),
    "Or": lambda a, b: Bounds(max(a.low, b.low), max(a.high, b.high)),
    "Range": _range,
    "Sub": _sub,
}


def _ordered(node: ir.Node, wanted: bool) -> tuple[ir.Value | None, ir.Value | None] | None:
    """Two values of which the first is not above the second wherever a comparison is ``wanted``, and only there."""
    if is_op(node, "LessOrEqual" if wanted else "Greater"):
        return node.inputs[0], node.inputs[1]
    if is_op(node, "GreaterOrEqual" if wanted else "Less"):
        return node.inputs[1], node.inputs[0]
    return None
