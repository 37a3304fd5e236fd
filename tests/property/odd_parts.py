"""What exports leave behind and users write by hand: each part keeps the shape of what it takes."""

from __future__ import annotations

import numpy as np
import onnx
from net_builder import NetBuilder, Value
from onnx import TensorProto, helper


def nothing(b: NetBuilder, x: Value) -> Value:
    """Operators that change nothing."""
    for _ in range(b.size(1, 3)):
        form = b.size(0, 5)
        if form == 0:
            x = b.unary(b.pick("Identity", "Dropout"), x)
        elif form == 1:
            x = b.binary("Mul", x, b.scalar(1.0))
        elif form == 2:
            x = b.binary(b.pick("Add", "Sub"), x, b.const(np.zeros(x.shape[-1:])))
        elif form == 3:
            x = b.unary("Cast", x, to=TensorProto.FLOAT)
        elif form == 4:
            x = b.unary("Cast", b.unary("Cast", x, to=TensorProto.DOUBLE), to=TensorProto.FLOAT)
        else:
            x = b.op("Concat", [x.name], x.shape, axis=-1)
    return x


def twice(b: NetBuilder, x: Value) -> Value:
    """The same expression computed two times."""
    kind = b.pick("Sigmoid", "Tanh", "Abs", "Erf")
    first, second = b.unary(kind, x), b.unary(kind, x)
    if b.chance():
        first, second = b.unary("Neg", first), b.unary("Neg", second)
    return b.op(b.pick("Add", "Mul", "Max"), [first.name, second.name], x.shape)


def constants(b: NetBuilder, x: Value) -> Value:
    """An operand computed from constants only."""
    made = b.op("Sqrt", [b.const(np.abs(b.rng.standard_normal(x.width)) + 0.5)])
    if b.chance():
        made = b.op("Mul", [made.name, b.scalar(0.5)])
    return b.op(b.pick("Add", "Mul", "Div"), [x.name, made.name], x.shape)


def shape_arithmetic(b: NetBuilder, x: Value) -> Value:
    """Reshaped to a shape computed from its own, as PyTorch's ``view`` is exported, and back."""
    whole = b.op("Shape", [x.name])
    batch = b.op("Gather", [whole.name, b.const(0, np.int64)], axis=0)
    first = b.op("Unsqueeze", [batch.name, b.ints(0)])
    target = b.op("Concat", [first.name, b.ints(-1)], axis=0)
    flat = int(np.prod(x.shape[1:], dtype=np.int64))  # type: ignore[arg-type]
    y = b.op("Reshape", [x.name, target.name], [x.shape[0], flat])
    if b.chance():
        y = b.binary(b.pick("Add", "Mul"), y, b.scalar(0.7))
    if b.chance():
        return b.op("Reshape", [y.name, whole.name], x.shape)
    return b.reshape(y, *x.shape)


def moves(b: NetBuilder, x: Value) -> Value:
    """Transposes and reshapes that cancel, with an element-wise operator among them."""
    if len(x.shape) == 4:
        perm, inverse = b.pick(((0, 2, 3, 1), (0, 3, 1, 2)), ((0, 1, 3, 2), (0, 1, 3, 2)))
    else:
        perm = inverse = (0, 2, 1)
    y = b.transpose(x, *perm)
    if b.chance(0.7):
        y = b.unary(b.pick("Relu", "Sigmoid", "Neg"), y)
    if b.chance(0.3):
        y = b.binary("Mul", y, b.vector((y.width,)))
    if b.chance(0.3):
        side = b.op("Unsqueeze", [y.name, b.ints(1)], [y.shape[0], 1, *y.shape[1:]])
        y = b.op("Squeeze", [side.name, b.ints(1)], y.shape)
    return b.transpose(y, *inverse)


def chained_reshapes(b: NetBuilder, x: Value) -> Value:
    n, rest = x.shape[0], x.shape[1:]
    flat = int(np.prod(rest, dtype=np.int64))  # type: ignore[arg-type]
    y = b.reshape(b.reshape(x, n, flat), n, 1, flat)
    if b.chance():
        y = b.unary(b.pick("Abs", "Relu"), y)
    if b.chance(0.3):
        y = b.op("Flatten", [y.name], [n, flat], axis=1)
    return b.reshape(y, *x.shape)


def condition(b: NetBuilder, x: Value) -> Value:
    """An If, of a constant or of the data, whose branches use values and weights from outside."""
    if b.chance():
        chosen = b.const(b.chance(), np.bool_)
    else:
        total = b.op("ReduceMean", [x.name], keepdims=0)
        chosen = b.op("Greater", [total.name, b.const(-1e3)]).name
    then, other = (_branch(b, x, side) for side in ("then", "else"))
    return b.op("If", [chosen], x.shape, then_branch=then, else_branch=other)


def _branch(b: NetBuilder, x: Value, side: str) -> onnx.GraphProto:
    """A convolution or a product, and more, inside a branch."""
    outer, b.nodes = b.nodes, []
    c = x.channels if len(x.shape) == 4 else x.width
    if len(x.shape) == 4:
        inputs = [x.name, b.weight((c, c, 1, 1), c), b.vector((c,))]
        y = b.op("Conv", inputs, x.shape)
    else:
        y = b.op("MatMul", [x.name, b.weight((c, c), c)], x.shape)
    y = nothing(b, y) if b.chance() else b.unary(b.pick("Softplus", "Relu", "Selu"), y)
    made, b.nodes = b.nodes, outer
    # Constants that are nodes may be wanted by other layers: they live outside.
    b.nodes += [node for node in made if node.op_type == "Constant"]
    made = [node for node in made if node.op_type != "Constant"]
    result = helper.make_tensor_value_info(y.name, TensorProto.FLOAT, None)
    return helper.make_graph(made, f"{side}_{y.name}", [], [result])


def dead_end(b: NetBuilder, x: Value) -> Value:
    """Something nobody reads, beside the path."""
    b.unary("Exp", b.unary(b.pick("Neg", "Tanh", "Softplus"), x))
    return x


def clamped(b: NetBuilder, x: Value) -> Value:
    """Clips and bounds in a row."""
    x = b.op("Clip", [x.name, b.const(-4.0), b.const(4.0)], x.shape)
    if b.chance():
        x = b.op("Max", [x.name, b.const(-2.0)], x.shape)
    return b.op("Min", [x.name, b.const(b.pick(3.0, 3.4e38))], x.shape)


def strong(b: NetBuilder, x: Value) -> Value:
    """Large numbers through what must not overflow."""
    y = b.binary("Mul", x, b.scalar(b.pick(60.0, 200.0, -100.0)))
    y = b.unary(b.pick("Softplus", "Selu", "Elu", "Relu"), y)
    return b.binary("Mul", y, b.scalar(0.02))


ODD_PARTS = (nothing, twice, constants, shape_arithmetic, moves, chained_reshapes, condition, dead_end, clamped, strong)
