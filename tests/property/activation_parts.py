"""Activations, as operators and as exporters spell them out."""

from __future__ import annotations

import numpy as np
from net_builder import NetBuilder, Value


def activation(b: NetBuilder, x: Value) -> Value:
    """One of them at random."""
    found: Value = b.pick(*CHEAP, *OTHERS, *OTHERS)(b, x)
    return found


def cheap_activation(b: NetBuilder, x: Value) -> Value:
    """One that fuses everywhere, or none."""
    found: Value = x if b.chance(0.2) else b.pick(*CHEAP)(b, x)
    return found


def relu(b: NetBuilder, x: Value) -> Value:
    return b.unary("Relu", x)


def relu6(b: NetBuilder, x: Value) -> Value:
    return b.op("Clip", [x.name, b.const(0.0), b.const(6.0)], x.shape)


def leaky_relu(b: NetBuilder, x: Value) -> Value:
    return b.unary("LeakyRelu", x, alpha=0.1)


def sigmoid(b: NetBuilder, x: Value) -> Value:
    return b.unary("Sigmoid", x)


def tanh(b: NetBuilder, x: Value) -> Value:
    return b.unary("Tanh", x)


def elu(b: NetBuilder, x: Value) -> Value:
    return b.unary(b.pick("Elu", "Selu", "Selu"), x)


def silu(b: NetBuilder, x: Value) -> Value:
    if b.chance(0.3):  # x / (1 + exp(-x))
        below = b.binary("Add", b.unary("Exp", b.unary("Neg", x)), b.scalar(1.0))
        return b.op("Div", [x.name, below.name], x.shape)
    return b.binary("Mul", x, b.unary("Sigmoid", x))


def quick_gelu(b: NetBuilder, x: Value) -> Value:
    return b.binary("Mul", x, b.unary("Sigmoid", b.binary("Mul", x, b.scalar(1.702))))


def hard_swish(b: NetBuilder, x: Value) -> Value:
    form = b.size(0, 2)
    if form == 0 and b.opset >= 14:
        return b.unary("HardSwish", x)
    if form == 1:
        return b.binary("Mul", x, b.unary("HardSigmoid", x, alpha=1 / 6, beta=0.5))
    gate = b.op("Clip", [b.binary("Add", x, b.scalar(3.0)).name, b.const(0.0), b.const(6.0)], x.shape)
    if b.chance():
        return b.binary("Div", b.binary("Mul", x, gate), b.scalar(6.0))
    return b.binary("Mul", x, b.binary("Div", gate, b.scalar(6.0)))


def softplus(b: NetBuilder, x: Value) -> Value:
    if b.chance(0.3):
        return b.unary("Log", b.binary("Add", b.unary("Exp", x), b.scalar(1.0)))
    return b.unary("Softplus", x)


def mish(b: NetBuilder, x: Value) -> Value:
    if b.opset >= 18 and b.chance():
        return b.unary("Mish", x)
    return b.binary("Mul", x, b.unary("Tanh", b.unary("Softplus", x)))


def gelu(b: NetBuilder, x: Value) -> Value:
    if b.opset >= 20 and b.chance():
        return b.unary("Gelu", x, approximate=b.pick("none", "tanh"))
    return b.pick(_gelu_erf, _gelu_tanh)(b, x)  # type: ignore[no-any-return]


def _gelu_erf(b: NetBuilder, x: Value) -> Value:
    divided = b.chance()
    scaled = b.binary("Div" if divided else "Mul", x, b.scalar(np.sqrt(2.0 if divided else 0.5)))
    gate = b.binary("Add", b.unary("Erf", scaled), b.scalar(1.0))
    if b.chance():
        return b.binary("Mul", b.binary("Mul", x, gate), b.scalar(0.5))
    return b.binary("Mul", b.binary("Mul", x, b.scalar(0.5)), gate)


def _gelu_tanh(b: NetBuilder, x: Value) -> Value:
    cube = b.binary("Pow", x, b.const(3.0))
    inner = b.binary("Add", x, b.binary("Mul", cube, b.scalar(0.044715)))
    gate = b.unary("Tanh", b.binary("Mul", inner, b.scalar(np.sqrt(2 / np.pi))))
    return b.binary("Mul", b.binary("Mul", x, b.scalar(0.5)), b.binary("Add", gate, b.scalar(1.0)))


def prelu(b: NetBuilder, x: Value) -> Value:
    image = len(x.shape) == 4
    shape = b.pick((x.channels, 1, 1), (1,)) if image else b.pick((x.width,), (1,))
    slope = b.vector(shape)
    if b.chance(0.7):
        return b.op("PRelu", [x.name, slope], x.shape)
    negative = b.unary("Neg", b.unary("Relu", b.unary("Neg", x)))
    return b.binary("Add", b.unary("Relu", x), b.binary("Mul", negative, slope))


CHEAP = (relu, relu6, leaky_relu, sigmoid, tanh)
OTHERS = (elu, silu, quick_gelu, hard_swish, softplus, mish, gelu, prelu)
