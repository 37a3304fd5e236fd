"""What new channels hold: zeros where they are made; after a sigmoid, a half."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from trtopt.graph.channels.groups import ChannelGroup
from trtopt.graph.channels.links import Dim
from trtopt.graph.edit import constant_of, float_attribute, input_of

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
    array = constant_of(value)
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
        return first * max(1.0, abs(float_attribute(node, _LINEAR[kind], 1.0))) * 2
    if kind in _KEEPS:
        return _largest(node, operands)
    rule = {
        "Add": _add,
        "Sub": _add,
        "Sum": _add,
        "Mul": _mul,
        "PRelu": _slope,
        "Div": _div,
        "Pow": _pow,
        "Clip": _clip,
        "Pad": _clip,
    }
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
    array = constant_of(input_of(node, 1))
    if array is None or not np.all(array):
        return None
    return operands[0] / min(1.0, float(np.abs(array.astype(np.float64)).min(initial=1)))


def _pow(node: ir.Node, operands: list[float]) -> float | None:
    array = constant_of(input_of(node, 1))
    if array is None or array.size != 1 or float(array.reshape(-1)[0]) < 0 or operands[0] > _LARGEST:
        return None
    exponent = float(array.reshape(-1)[0])
    return None if operands[0] and exponent != round(exponent) else operands[0] ** exponent


def _clip(node: ir.Node, operands: list[float]) -> float | None:
    """A limit beyond zero, or the number a Pad writes around, may be larger than what goes in."""
    extra = operands[2:3] if node.op_type == "Pad" else operands[1:]
    limits = [0.0 if each is None else each for each in extra]
    return None if math.inf in limits else max([operands[0], *limits])
