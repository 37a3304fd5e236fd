"""Small random networks [N, S, D] that compute shapes as exporters do: valid for every batch and length."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from net_builder import NetBuilder, Value
from onnx import TensorProto, helper

WIDTH = 8


def shape_network(seed: int) -> onnx.ModelProto:
    """The network of a seed; its inputs are ``x`` and, now and then, ``z`` of other axes' names and the same sizes."""
    b = NetBuilder(np.random.default_rng(seed), 17)
    y = Value("x", ("N", "S", WIDTH))
    other = b.chance(0.3)
    if other:
        y = b.op("Add", ["x", "z"], y.shape)
    for _ in range(b.size(2, 5)):
        y = b.pick(*_PARTS)(b, y)
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", "S", WIDTH])]
    if other:
        inputs.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["M", "T", WIDTH]))
    output = helper.make_tensor_value_info(y.name, TensorProto.FLOAT, [None, None, WIDTH])
    graph = helper.make_graph(b.nodes, "shapes", inputs, [output], b.constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", b.opset)], ir_version=9)


def _dims(b: NetBuilder, x: Value) -> tuple[str, str]:
    """Batch and length of ``x``, each as a tensor of one element."""
    source = b.pick(x.name, x.name, "x") if x.name != "x" else "x"
    form = b.size(0, 2)
    whole = b.op("Shape", [source]).name
    if form == 0:
        return tuple(b.op("Slice", [whole, b.ints(i), b.ints(i + 1)]).name for i in (0, 1))  # type: ignore[return-value]
    if form == 1:
        return tuple(b.op("Gather", [whole, b.ints(i)]).name for i in (0, 1))  # type: ignore[return-value]
    picked = [b.op("Gather", [whole, b.const(i, np.int64)]).name for i in (0, 1)]
    return tuple(b.op("Unsqueeze", [item, b.ints(0)]).name for item in picked)  # type: ignore[return-value]


def _joined(b: NetBuilder, *parts: str) -> str:
    return b.op("Concat", list(parts), axis=0).name


def _heads(b: NetBuilder, x: Value) -> Value:
    n, s = _dims(b, x)
    count = b.pick(2, 4)
    middle = b.pick(-1, count)
    shape = _joined(b, n, s, b.ints(middle), b.ints(WIDTH // count))
    y = b.op("Reshape", [x.name, shape], allowzero=b.size(0, 1)) if b.chance() else b.op("Reshape", [x.name, shape])
    y = b.op("Transpose", [y.name], perm=[0, 2, 1, 3])
    y = _masked(b, b.op("MatMul", [y.name, b.op("Transpose", [y.name], perm=[0, 1, 3, 2]).name]), n, s, y)
    y = b.op("Transpose", [y.name], perm=[0, 2, 1, 3])
    back = _joined(b, n, s, b.ints(b.pick(-1, WIDTH)))
    return Value(b.op("Reshape", [y.name, back]).name, x.shape)


def _masked(b: NetBuilder, scores: Value, n: str, s: str, values: Value) -> Value:
    """Scores [N, H, S, S] with a constant mask that is repeated over the batch, times the values."""
    keep = b.const(np.array([[[[b.chance(0.8)]]]]), np.bool_)
    mask = b.op("Expand", [keep, _joined(b, n, b.ints(1), s, s)])
    added = b.op("Where", [mask.name, b.const(0.0), b.const(-3.0)])
    y = b.op("Softmax", [b.op("Add", [scores.name, added.name]).name], axis=-1)
    y = b.op("Where", [b.op("IsNaN", [y.name]).name, b.const(0.0), y.name])
    return b.op("MatMul", [y.name, values.name])


def _windows(b: NetBuilder, x: Value) -> Value:
    """Two windows of the width beside the batch, and back."""
    n, s = _dims(b, x)
    twice = b.op("Mul", [n, b.ints(2)]).name
    y = b.op("Reshape", [x.name, _joined(b, twice, s, b.ints(WIDTH // 2))])
    y = b.op("Relu", [y.name])
    once = b.op("Div", [twice, b.ints(2)]).name
    return Value(b.op("Reshape", [y.name, _joined(b, once, s, b.ints(b.pick(-1, WIDTH)))]).name, x.shape)


def _rows(b: NetBuilder, x: Value) -> Value:
    """A product of rows: [N S, D]."""
    n, s = _dims(b, x)
    y = b.op("Reshape", [x.name, b.ints(-1, WIDTH)])
    y = b.op("MatMul", [y.name, b.weight((WIDTH, WIDTH), WIDTH)])
    return Value(b.op("Reshape", [y.name, _joined(b, n, s, b.ints(b.pick(-1, WIDTH)))]).name, x.shape)


def _token(b: NetBuilder, x: Value) -> Value:
    """A learned token in front, as torch expands it, and the last one gone."""
    n, _ = _dims(b, x)
    wanted = _joined(b, n, b.ints(-1), b.ints(-1))
    is_kept = b.op("Equal", [wanted, b.ints(-1, -1, -1)]).name
    shape = b.op("Where", [is_kept, b.ints(1, 1, 1), wanted]).name
    token = b.op("Expand", [b.const(b.rng.standard_normal((1, 1, WIDTH))), shape])
    y = b.op("Concat", [token.name, x.name], axis=1)
    return Value(b.op("Slice", [y.name, b.ints(0), b.ints(-1), b.ints(1)]).name, x.shape)


def _bias(b: NetBuilder, x: Value) -> Value:
    """A constant row, repeated before it is added."""
    n, s = _dims(b, x)
    row = b.const(b.rng.standard_normal((1, 1, b.pick(1, WIDTH))))
    size = b.pick(s, b.ints(1))
    grown = b.op("Expand", [row, _joined(b, n, size, b.ints(b.pick(1, WIDTH)))])
    grown = b.op("Neg", [grown.name]) if b.chance() else grown
    return Value(b.op(b.pick("Add", "Mul"), [x.name, grown.name]).name, x.shape)


_PARTS: tuple[Callable[[NetBuilder, Value], Value], ...] = (_heads, _windows, _rows, _token, _bias)
