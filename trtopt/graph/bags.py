"""Loops over bags of rows, all as long, that PyTorch's exporters write for EmbeddingBag."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.dimension import Dim, factors_of, product_of
from trtopt.graph.dims import Dimensions

_SAME = ("Cast", "CastLike", "Identity", "Reshape", "Squeeze", "Unsqueeze")
_COUNTING = (*edit.NARROW_FLOATS, ir.DataType.DOUBLE, ir.DataType.INT32, ir.DataType.INT64)
"""What leaves a number of one element as it is, in a type that can count."""

_REDUCTIONS = ("ReduceMax", "ReduceMean", "ReduceSum")
_OPSET = 18
"""From here on, all reductions take their axes as an input."""

_Found = TypeVar("_Found")


def write_out_bags(model: ir.Model) -> int:
    """Reduce bags of one length at once, in place of a loop over them.

    For bag i, the loop slices rows i*k to i*k + k and sums them, averages them or takes the largest; the results are
    put together as a sequence of tensors (torch.onnx.export with ``dynamo=True``) or as the loop's output
    (TorchScript). That becomes Reshape(rows, [-1, k, width]) and one reduction; where the rows of a bag are looked up
    and weighted in the loop, all are before it. No compiler runs sequences, and that of TensorRT for RTX fails on the
    other loop.

    The offsets are provably 0, k, 2*k and so on up to the number of rows: constants, or a Range whose limit is that
    number. The loop runs over all bags and does nothing else. Bags of any length, whose offsets are an input, stay, as
    do those with a padding index, which leaves rows out.

    Args:
        model: Changed in place; opset 18 or later, else nothing is done.

    Returns:
        The number of loops.
    """
    loops = [node for node in model.graph if edit.is_op(node, "Loop") and _reduces(node)]
    if not loops or model.graph.opset_imports.get("", 1) < _OPSET:
        return 0
    known = Dimensions(model)
    plans = [(loop, plan) for loop in loops if (plan := _plan(loop, known)) is not None]
    for loop, plan in reversed(plans):  # the last first: it may read what one before it makes
        splice = edit.Splice(model, plan.joined, "embedding-bag")
        rows = _all_rows(splice, plan.rows)
        shape = splice.ints([-1, plan.length, plan.rows.width], rows, "shape")
        bags = splice.fresh("Reshape", rows, shape, like=rows)
        axes = splice.ints([1], rows, "axes")
        made = splice.op(plan.reduction, bags, axes, attributes={"keepdims": 0}, like=plan.output)
        edit.replace_value(plan.output, made)
        for node in dict.fromkeys((plan.joined, loop)):
            edit.remove_node(node)
    return len(plans)


@dataclass(frozen=True)
class _Rows:
    """The rows of a bag: those of ``source``, or what a node of the loop makes of them. ``tail`` are the other axes."""

    source: ir.Value | ir.Node
    inputs: tuple[_Rows | ir.Value, ...]
    tail: tuple[Dim, ...]

    @property
    def width(self) -> int:
        """The size of the only other axis, 0 where there is none or another."""
        return self.tail[0] if len(self.tail) == 1 and isinstance(self.tail[0], int) else 0


@dataclass(frozen=True)
class _Bag:
    """A bag's rows reduced, with or without the axis that is reduced."""

    reduction: str
    rows: _Rows
    keeps_axis: bool


@dataclass(frozen=True)
class _Plan:
    """What takes the place of ``output``, which ``joined`` makes."""

    joined: ir.Node
    output: ir.Value
    reduction: str
    rows: _Rows
    length: int


@dataclass(frozen=True)
class _Count:
    """A number of the loop: ``steps`` times its step, and ``bags`` times how many there are, and ``number``."""

    steps: int
    bags: int
    number: int

    def plus(self, other: _Count, sign: int = 1) -> _Count:
        """The sum, or the difference."""
        return _Count(self.steps + sign * other.steps, self.bags + sign * other.bags, self.number + sign * other.number)


@dataclass(frozen=True)
class _Offsets:
    """Offset i is (i + first) * length; the last is ``total``, the end of all bags."""

    length: int
    total: Dim
    first: int = 0


def _reduces(loop: ir.Node) -> bool:
    return any(edit.is_op(node, *_REDUCTIONS) for graph in edit.subgraphs_of(loop) for node in edit.all_nodes(graph))


def _plan(loop: ir.Node, known: Dimensions) -> _Plan | None:
    """How a loop reduces bags of one length; None where it does not provably."""
    (body,) = edit.subgraphs_of(loop)
    nodes = [node for node in edit.all_nodes(body) if edit.is_op(node, "Slice", "Gather")]
    offsets = next((found for node in nodes if (found := _offsets(node.inputs[0], known)) is not None), None)
    if offsets is None:
        return None
    number, names = factors_of((offsets.total,))
    if number % offsets.length:
        return None
    read = _Reader(loop, body, known, replace(offsets, first=0), product_of(number // offsets.length, names))
    used = [index for index, value in enumerate(loop.outputs) if value.uses() or value.is_graph_output()]
    if len(used) != 1 or not read.runs_once_per_bag():
        return None
    is_sequence = used[0] < len(loop.inputs) - 2
    joined, row = read.joined(used[0]) if is_sequence else (loop, body.outputs[1 + used[0]])
    bag = read.bag(row, last=False)
    if joined is None or bag is None or bag.keeps_axis != is_sequence or not bag.rows.width:
        return None
    output = joined.outputs[0 if is_sequence else used[0]]
    return _Plan(joined, output, bag.reduction, bag.rows, offsets.length)


def _offsets(value: ir.Value | None, known: Dimensions) -> _Offsets | None:
    """Where bags of one length begin, and the last ends."""
    array, node = edit.constant_of(value), edit.maker_of(value)
    if array is not None:
        apart = array if array.size == 1 else np.diff(array)  # of one number, that is the end of the only bag
        lengths = set(apart.tolist()) if array.ndim == 1 and array.dtype.kind == "i" else set()
        length = int(lengths.pop()) if len(lengths) == 1 else 0
        is_even = length > 0 and array[0] >= 0 and array[0] % length == 0
        return _Offsets(length, int(array[-1]), int(array[0]) // length) if is_even else None
    if edit.is_op(node, "Slice"):
        found = _offsets(node.inputs[0], known)
        start, end, axes, steps = (known.held(edit.input_of(node, index)) for index in (1, 2, 3, 4))
        is_rest = start == (1,) and end is not None and isinstance(end[0], int) and end[0] >= 2**31 - 1
        plain = axes in (None, (0,)) and steps in (None, (1,)) and (found is not None and found.first == 0)
        return replace(found, first=1) if found is not None and is_rest and plain else None
    if not edit.is_op(node, "Concat") or len(node.inputs) != 2:
        return None
    begins, total = node.inputs[0], known.held(node.inputs[1])
    found, span = _offsets(begins, known), edit.maker_of(begins)
    if total is None or len(total) != 1 or total[0] is None:
        return None
    if found is not None and isinstance(found.total, int) and found.first == 0:
        return _Offsets(found.length, total[0]) if found.total + found.length == total[0] else None
    if edit.is_op(span, "Cast") and span.inputs[0] is not None:  # of int32 numbers
        span = span.inputs[0].producer()
    if not edit.is_op(span, "Range"):
        return None
    start, limit, step = (known.held(each) for each in span.inputs)
    if start != (0,) or limit != total or step is None or not isinstance(step[0], int) or step[0] <= 0:
        return None
    return _Offsets(step[0], total[0])


class _Reader:
    """Reads the body of a loop over ``count`` bags."""

    def __init__(self, loop: ir.Node, body: ir.Graph, known: Dimensions, offsets: _Offsets, count: Dim) -> None:
        self._loop, self._body, self._known, self._offsets, self._bags = loop, body, known, offsets, count
        inits = list(zip(body.inputs[2:], loop.inputs[2:], strict=False))
        self._inside = list(edit.all_graphs(body))
        self._steps = {body.inputs[0], *(value for value, init in inits if known.held(init) == (0,))}

    def runs_once_per_bag(self) -> bool:
        """Whether step i is bag i, for all bags."""
        following = dict(zip(self._body.inputs[2:], self._body.outputs[1:], strict=False))
        if any(self._count(following[step]) != _Count(1, 0, 1) for step in self._steps if step in following):
            return False
        most, first = edit.input_of(self._loop, 0), edit.input_of(self._loop, 1)
        goes_on = self._body.outputs[0]
        if most is not None:
            return self._is_bags(most) and (first is None or _is_true(first)) and _is_true(goes_on)
        return (first is None or _is_true(first) or self._is_less(first, 0)) and self._is_less(goes_on, 1)

    def _is_bags(self, value: ir.Value) -> bool:
        """Whether a value is the number of bags, or that of the offsets but the first."""
        taken = value.producer()
        shape = edit.maker_of(taken.inputs[0]) if edit.is_op(taken, "Gather") else None
        if self._known.held(value) == (self._bags,):
            return True
        if not edit.is_op(shape, "Shape") or taken is None:
            return False
        return self._known.held(taken.inputs[1]) == (0,) and _offsets(shape.inputs[0], self._known) == replace(
            self._offsets, first=1
        )

    def joined(self, index: int) -> tuple[ir.Node | None, ir.Value | None]:
        """Who puts a sequence together, and what each step appends to it."""
        output, init = self._loop.outputs[index], edit.input_of(self._loop, 2 + index)
        insert = self._body.outputs[1 + index].producer()
        (user, *others) = (user for user, _ in output.uses()) if output.uses() else (None,)
        fits = edit.is_op(user, "ConcatFromSequence") and not others and not output.is_graph_output()
        is_new = init is not None and edit.is_op(init.producer(), "SequenceEmpty")
        appends = edit.is_op(insert, "SequenceInsert") and len(insert.inputs) == 2
        if not fits or user is None or not is_new or not appends or insert is None:
            return None, None
        flat = edit.int_attribute(user, "axis", 0) == 0 and edit.int_attribute(user, "new_axis", 0) == 0
        own = insert.inputs[0] is self._body.inputs[2 + index]
        return (user, insert.inputs[1]) if flat and own else (None, None)

    def bag(self, value: ir.Value | None, last: bool) -> _Bag | None:
        """A bag reduced. ``last``: what is known of the last bag may be used."""
        node = edit.maker_of(value)
        if node is None or value is None:
            return None
        if edit.is_op(node, "If"):
            return _one({self.bag(*branch) for branch in self._branches(node, value, last)})
        if edit.is_op(node, "Identity"):
            return self.bag(node.inputs[0], last)
        if edit.is_op(node, "Div"):
            total, count = self.bag(node.inputs[0], last), self._count(node.inputs[1])
            dims, length = self._known.of(node.inputs[1]), _Count(0, 0, self._offsets.length)
            adds_no_axis = dims is not None and len(dims) < 2
            is_mean = adds_no_axis and count is not None and self._difference(count, length, last) == 0
            return (
                replace(total, reduction="ReduceMean") if total and is_mean and total.reduction == "ReduceSum" else None
            )
        rows = self.rows(node.inputs[0], last) if edit.is_op(node, *_REDUCTIONS) else None
        if rows is None or edit.axes_of(node) != (0,):
            return None
        return _Bag(node.op_type, rows, bool(edit.int_attribute(node, "keepdims", 1)))

    def rows(self, value: ir.Value | None, last: bool) -> _Rows | None:
        """The rows of the bag of this step, before they are reduced."""
        node = edit.maker_of(value)
        if node is None or value is None:
            return None
        if edit.is_op(node, "If"):
            return _one({self.rows(*branch) for branch in self._branches(node, value, last)})
        if edit.is_op(node, "Slice"):
            return self._sliced(node, last)
        if edit.is_op(node, "Gather") and edit.int_attribute(node, "axis", 0) == 0:
            table, bag = node.inputs[0], self.rows(node.inputs[1], last)
            dims = self._known.of(table)
            if table is None or not dims or bag is None or bag.tail or not self._is_outside(table):
                return None
            return _Rows(node, (table, bag), dims[1:])
        if edit.is_op(node, "Unsqueeze") and edit.axes_of(node) == (1,):
            bag = self.rows(node.inputs[0], last)
            return _Rows(node, (bag,), (1, *bag.tail)) if bag else None
        if edit.is_op(node, "Mul"):
            one, other = (self.rows(each, last) for each in node.inputs)
            if one and other and len(one.tail) == len(other.tail) == 1:
                return _Rows(node, (one, other), one.tail if other.tail == (1,) else other.tail)
        return None

    def _sliced(self, node: ir.Node, last: bool) -> _Rows | None:
        """A Slice of the rows of this step's bag."""
        source, dims = node.inputs[0], self._known.of(node.inputs[0])
        start, end = (self._count(edit.input_of(node, index)) for index in (1, 2))
        axes, steps = (self._known.held(edit.input_of(node, index)) for index in (3, 4))
        length = self._offsets.length
        if (
            source is None
            or not self._is_outside(source)
            or not dims
            or dims[0] != self._offsets.total
            or axes not in (None, (0,))
        ):
            return None
        if steps not in (None, (1,)) or start != _Count(length, 0, 0) or end is None:
            return None
        return _Rows(source, (), dims[1:]) if self._difference(end, start, last) == length else None

    def _is_outside(self, value: ir.Value) -> bool:
        return value.graph not in self._inside

    def _branches(self, node: ir.Node, value: ir.Value, last: bool) -> list[tuple[ir.Value, bool]]:
        """What an If gives for ``value``, and whether only for the last bag: of one branch where it is known which."""
        test, index = edit.input_of(node, 0), node.outputs.index(value)
        made = edit.maker_of(test)
        then, other = (node.attributes[name].as_graph().outputs[index] for name in ("then_branch", "else_branch"))
        if not edit.is_op(made, "Equal", "Greater"):
            return []
        one, two = (self._count(each) for each in made.inputs)
        if one is None or two is None:
            return []
        apart = self._difference(one, two, last)
        if apart is not None:
            return [(then if (apart == 0 if made.op_type == "Equal" else apart > 0) else other, last)]
        at_last = made.op_type == "Equal" and self._difference(one, two, last=True) == 0
        return [(then, True), (other, last)] if at_last else []

    def _count(self, value: ir.Value | None) -> _Count | None:
        """What a tensor of one element holds."""
        if value in self._steps:
            return _Count(1, 0, 0)
        node, held = edit.maker_of(value), self._known.held(value)
        dim = held[0] if held is not None and len(held) == 1 else None
        if isinstance(dim, int):
            return _Count(0, 0, dim)
        if dim is not None:
            (number, names), (one, others) = factors_of((dim,)), factors_of((self._bags,))
            if names == others and number % one == 0:
                return _Count(0, number // one, 0)
        if edit.is_op(node, *_SAME) and value is not None and value.dtype in _COUNTING:
            return self._count(node.inputs[0])
        if edit.is_op(node, "Add", "Sub"):
            first, second = (self._count(each) for each in node.inputs)
            return first.plus(second, 1 if node.op_type == "Add" else -1) if first and second else None
        if edit.is_op(node, "Gather", "Slice"):
            return self._begin(node)
        return None

    def _begin(self, node: ir.Node) -> _Count | None:
        """One of the offsets: where the bag of this step, or one near it, begins."""
        found, at = _offsets(node.inputs[0], self._known), self._count(edit.input_of(node, 1))
        if found is None or at is None or replace(found, first=0) != self._offsets or (at.steps, at.bags) != (1, 0):
            return None
        if at.number < 0:  # of the first bag, that is the last offset
            return None
        if edit.is_op(node, "Slice"):
            end, others = self._count(edit.input_of(node, 2)), [edit.input_of(node, index) for index in (3, 4)]
            if end != at.plus(_Count(0, 0, 1)) or any(each is not None for each in others):
                return None
        return _Count(found.length, 0, found.length * (at.number + found.first))

    def _difference(self, one: _Count, other: _Count, last: bool) -> int | None:
        """How much larger ``one`` is, at the ``last`` step or at any; None where that depends on the step."""
        found = one.plus(other, -1)
        if last and isinstance(self._bags, int):
            found = _Count(0, 0, found.number + (self._bags - 1) * found.steps)
        elif last:
            found = _Count(found.steps + found.bags, 0, found.number + found.bags)
        return found.number if (found.steps, found.bags) == (0, 0) else None

    def _is_less(self, value: ir.Value, step: int) -> bool:
        """Whether ``value`` says that there is a bag ``step`` steps behind this one; of 0, that there is one at all."""
        node = value.producer()
        one, two = (self._count(each) for each in node.inputs) if edit.is_op(node, "Less") and node else (None, None)
        count = _Count(0, 0, self._bags) if isinstance(self._bags, int) else _Count(0, 1, 0)
        return two == count and one == (_Count(1, 0, step) if step else _Count(0, 0, 0))


def _one(found: set[_Found | None]) -> _Found | None:
    """What all are."""
    return found.pop() if len(found) == 1 else None


def _is_true(value: ir.Value) -> bool:
    """Whether a condition is a constant that is true."""
    node, array = value.producer(), edit.constant_of(value)
    if array is None and edit.is_op(node, "Cast", "Identity"):
        array = edit.constant_of(node.inputs[0])
    return array is not None and bool(array.all())


def _all_rows(splice: edit.Splice, rows: _Rows | ir.Value) -> ir.Value:
    """The rows of all bags."""
    if isinstance(rows, ir.Value):
        return rows
    if isinstance(rows.source, ir.Value):
        return rows.source
    inputs = [_all_rows(splice, each) for each in rows.inputs]
    if rows.source.op_type == "Unsqueeze":
        inputs.append(splice.ints([1], inputs[0], "axes"))
    return splice.fresh(rows.source.op_type, *inputs, like=rows.source.outputs[0])
