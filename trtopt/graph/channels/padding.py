"""Adds channels of zeros to a group, where they stay finite: its producers, its consumers and everything between."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.channels.groups import ChannelGroup
from trtopt.graph.channels.rules import Count, Dim, Param, size_of


def padded_size(group: ChannelGroup, extra: int, dim: Dim, number: int) -> int:
    """Where element ``number`` of a dim begins once each appearance of the group in it has ``extra`` more channels."""
    return number + sum(extra * span.each for span in group.spans_of(dim) if span.stop <= number)


def pad_group(model: ir.Model, group: ChannelGroup, extra: int, recipe: str) -> None:
    """Add ``extra`` channels at the end of a group that has no reason against it, in place.

    Every constant that changes is a new one, named after the output of the node that reads it. Nodes that change are
    marked with ``recipe``.
    """
    names = edit.Names(model)
    by_input: dict[tuple[ir.Node, int], list[Param]] = {}
    for param in group.params:
        by_input.setdefault((param.node, param.index), []).append(param)
    done: dict[tuple[object, ...], ir.Value] = {}
    for (node, index), params in by_input.items():
        _pad_constant(node, index, params, (group, extra), names, done)
    by_place: dict[tuple[ir.Node, int | str], list[Count]] = {}
    for count in group.counts:
        by_place.setdefault((count.node, count.place), []).append(count)
    for (node, place), counts in by_place.items():
        numbers = {each.position: padded_size(group, extra, each.dim, each.number) for each in counts}
        _write_numbers(node, place, numbers, (names, model.opset_imports[""]))
    changed = dict.fromkeys([*(param.node for param in group.params), *(count.node for count in group.counts)])
    for node in changed:
        edit.tag(node, recipe)
    for dim in dict.fromkeys(span.dim for span in group.spans):
        shape, size = dim.value.shape, size_of(dim)
        if shape is not None and size is not None:
            new = list(shape)
            new[dim.axis] = padded_size(group, extra, dim, size)
            dim.value.shape = ir.Shape(new)


def _pad_constant(
    node: ir.Node,
    index: int,
    params: list[Param],
    padding: tuple[ChannelGroup, int],
    names: edit.Names,
    done: dict[tuple[object, ...], ir.Value],
) -> None:
    """Replace one constant input; nodes that share it and need the same share the new one too."""
    old = node.inputs[index]
    array = edit.constant_of(old)
    if array is None or old is None or node.graph is None:
        raise ValueError(f"input {index} of {node.name} is not a constant")
    sources = [(param.axis, _sources(*padding, param), param.fill) for param in params]
    key = (old, node.graph, *((axis, source.tobytes(), fill) for axis, source, fill in sources))
    if key not in done:
        for axis, source, fill in sources:
            array = _taken(array, axis, source, fill)
        base = f"{node.outputs[0].name}_{old.name}_padded"
        done[key] = edit.add_initializer(node.graph, names.value(base), array)
    node.replace_input_with(index, done[key])


def _sources(group: ChannelGroup, extra: int, param: Param) -> np.ndarray:
    """For each entry of the new constant the entry it was, -1 for new ones."""
    total = (size_of(param.dim) or 0) // param.blocks
    parts, start = [], 0
    for span in group.spans_of(param.dim):
        if span.stop <= total:
            parts += [np.arange(start, span.stop), np.full(extra * span.each, -1)]
            start = span.stop
    return np.concatenate([*parts, np.arange(start, total)])


def _taken(array: np.ndarray, axis: int, source: np.ndarray, fill: float) -> np.ndarray:
    taken: np.ndarray = np.take(array, np.maximum(source, 0), axis=axis)
    where = [slice(None)] * array.ndim
    where[axis] = source < 0  # type: ignore[call-overload]
    taken[tuple(where)] = fill
    return taken


def _write_numbers(node: ir.Node, place: int | str, numbers: dict[int, int], model: tuple[edit.Names, int]) -> None:
    """Put new sizes into an attribute or a constant input of a node; a Split without sizes gets them."""
    names, opset = model
    if isinstance(place, str):
        attribute = node.attributes[place]
        if attribute.type == ir.AttributeType.INT:
            node.attributes[place] = ir.AttrInt64(place, numbers[-1])
        else:
            listed = [numbers.get(position, int(number)) for position, number in enumerate(attribute.as_ints())]
            node.attributes[place] = ir.AttrInt64s(place, listed)
        return
    array = edit.constant_of(edit.input_of(node, place))
    if array is None:
        axis = edit.int_attribute(node, "axis", 0)
        array = np.array([size_of(Dim(out, axis % len(out.shape or ()))) for out in node.outputs], np.int64)
        node.attributes.pop("num_outputs", None)
    array = array.copy()
    for position, number in numbers.items():
        array[position] = number
    if node.op_type == "Split" and opset < 13:
        node.attributes["split"] = ir.AttrInt64s("split", [int(number) for number in array])
        return
    if len(node.inputs) <= place:
        node.resize_inputs(place + 1)
    node.replace_input_with(
        place, edit.add_initializer(edit.graph_of(node), names.value(f"{node.outputs[0].name}_sizes"), array)
    )


_LARGEST = 1e3
"""A bound that every float type holds with room to spare."""

_KEEPS = frozenset(
    "Abs AveragePool Cast Ceil Concat DequantizeLinear Dropout Erf Flatten Floor Gelu GlobalAveragePool GlobalMaxPool "
    "HardSwish Identity Max MaxPool Mean Min Mish Neg QuantizeLinear "
    "ReduceMax ReduceMean ReduceMin Relu Reshape Resize Round Sign Sin Slice Softsign Split Squeeze Swish Tanh "
    "ThresholdedRelu Transpose Unsqueeze Where".split()
)
"""|f(x)| <= |x|, or the largest |x| of several operands."""

_MAKES_ZEROS = frozenset("BatchNormalization Conv ConvTranspose InstanceNormalization".split())
_ONE_MORE = frozenset("Cos HardSigmoid Sigmoid Softmax Softplus".split())
_OF_ZERO = frozenset("GlobalLpPool LpPool MatMul ReduceL1 ReduceL2 ReduceSum ReduceSumSquare Sqrt".split())
_LINEAR = {"Elu": "alpha", "Celu": "alpha", "LeakyRelu": "alpha", "Selu": "gamma"}


def why_not_finite(group: ChannelGroup) -> str:
    """Why channels of zeros could become infinite or NaN, which no weight of zero stops; empty if they cannot."""
    dims = {span.dim.value: span.dim for span in group.spans}
    if len(dims) != len({span.dim for span in group.spans}):
        return f"{group.nodes[0].name} has it on two axes"
    made = {param.node for param in group.params if param.kind == "makes"}
    bounds: dict[ir.Value, float] = {}
    pending = list(dims)
    while pending:
        value = pending[-1]
        node = value.producer()
        operands = [] if node is None or node in made else [v for v in node.inputs if v in dims and v not in bounds]
        if value in bounds or node is None:
            pending.pop()
        elif operands:
            pending.extend(v for v in operands if v is not None)
        else:
            pending.pop()
            beside = node.op_type == "Concat"  # its other inputs are other channels
            known = [v for v in node.inputs if v in dims or not beside]
            bound = 0.0 if node in made else _bound(node, [_operand(v, dims, bounds) for v in known])
            if bound is None or _LARGEST < bound < math.inf:
                return f"zeros would not stay small numbers through {node.name} ({node.op_type})"
            bounds[value] = bound
    return ""


def _operand(value: ir.Value | None, dims: dict[ir.Value, Dim], bounds: dict[ir.Value, float]) -> float:
    """The largest magnitude an input has on the new channels; infinite for data."""
    if value is None:
        return 0.0
    if value in dims:
        return bounds[value]
    array = edit.constant_of(value)
    return math.inf if array is None else float(np.abs(array.astype(np.float64)).max(initial=0))


def _bound(node: ir.Node, operands: list[float]) -> float | None:
    """The largest magnitude on new channels, given those of the inputs; None where nothing can be said."""
    kind, first = node.op_type, operands[0]
    if kind in _MAKES_ZEROS:
        return 0.0
    if kind in _OF_ZERO:
        return 0.0 if first == 0 else None
    if kind in _ONE_MORE:
        return first + 1
    if kind in _LINEAR:
        return first * max(1.0, abs(edit.float_attribute(node, _LINEAR[kind], 1.0))) * 2
    if kind in _KEEPS:
        return _largest(node, operands)
    rule = {**dict.fromkeys(("Add", "Sub", "Sum"), _add), **dict.fromkeys(("Clip", "Pad"), _clip)}
    rule |= {"Mul": _mul, "PRelu": _slope, "Div": _div, "Pow": _pow}
    if kind == "Exp":
        return math.exp(first) if first <= 5 else None
    return rule[kind](node, operands) if kind in rule else None


def _largest(node: ir.Node, operands: list[float]) -> float:
    if node.op_type in ("Max", "Min", "Mean", "Concat"):
        return max(operands)
    return max(operands[1:]) if node.op_type == "Where" else operands[0]


def _add(node: ir.Node, operands: list[float]) -> float | None:
    """Data plus zero stays data; data plus a number may go beyond the type."""
    return None if math.inf in operands and operands.count(0.0) < len(operands) - 1 else sum(operands)


def _mul(node: ir.Node, operands: list[float]) -> float | None:
    if 0.0 in operands:
        return 0.0
    return None if math.inf in operands else operands[0] * operands[1]


def _slope(node: ir.Node, operands: list[float]) -> float | None:
    return 0.0 if not operands[0] else None if math.inf in operands else operands[0] * max(1.0, operands[1])


def _div(node: ir.Node, operands: list[float]) -> float | None:
    """By a constant; along the channels it gets ones."""
    array = edit.constant_of(edit.input_of(node, 1))
    if array is None or not np.all(array):
        return None
    return operands[0] / min(1.0, float(np.abs(array.astype(np.float64)).min(initial=1)))


def _pow(node: ir.Node, operands: list[float]) -> float | None:
    array = edit.constant_of(edit.input_of(node, 1))
    if array is None or array.size != 1 or float(array.reshape(-1)[0]) < 0 or operands[0] > _LARGEST:
        return None
    exponent = float(array.reshape(-1)[0])
    return None if operands[0] and exponent != round(exponent) else operands[0] ** exponent


def _clip(node: ir.Node, operands: list[float]) -> float | None:
    """A limit beyond zero, or the number a Pad writes around, may be larger than what goes in."""
    extra = operands[2:3] if node.op_type == "Pad" else operands[1:]
    limits = [0.0 if each is None else each for each in extra]
    return None if math.inf in limits else max([operands[0], *limits])
