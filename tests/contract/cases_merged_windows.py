"""Cases for attention whose windows have an axis of their own: x [N, 3, 5, 8] is three windows of five tokens."""

from __future__ import annotations

import re

import numpy as np
from contract_case import Case

IO = "g (float[N, 3, 5, 8] x) => (float[N, 3, 5, 8] y)"
HEADS_FIRST = "[3, 0, 4, 1, 2, 5]"
WINDOWS_FIRST = "[3, 0, 1, 4, 2, 5]"
NUMBERS = (
    "int64[6] six = {-1, 3, 5, 3, 2, 4}, int64[4] o = {-1, 3, 5, 8}, int64 i0 = {0}, int64 i1 = {1}, int64 i2 = {2}, "
    "int64[1] a0 = {0}, int64[1] a1 = {1}, int64[1] a2 = {2}, int64[1] a3 = {3}, float scale = {0.5}"
)
WEIGHTS = {"w": (8, 24), "b": (24,), "p": (8, 8)}
GATHERED = "q = Gather <axis = 0> (t, i0) k = Gather <axis = 0> (t, i1) v = Gather <axis = 0> (t, i2)"
SLICED = (
    "q1 = Slice (t, a0, a1, a0) q = Squeeze (q1, a0) k1 = Slice (t, a1, a2, a0) k = Squeeze (k1, a0) "
    "v1 = Slice (t, a2, a3, a0) v = Squeeze (v1, a0)"
)
SPLIT = "q1, k1, v1 = Split <axis = 0> (t) q = Squeeze (q1, a0) k = Squeeze (k1, a0) v = Squeeze (v1, a0)"


def body(order: str = HEADS_FIRST, back: str = "[0, 2, 3, 1, 4]", parts: str = GATHERED, scores: str = "s = s0") -> str:
    """One product, its parts, attention of five axes, and a product of its result."""
    kt = "kt = Transpose <perm = [0, 1, 2, 4, 3]> (k)"
    mix = f"s0 = MatMul(qs, kt) {scores} a = Softmax(s) m = MatMul(a, v) mt = Transpose <perm = {back}> (m)"
    start = f"f0 = MatMul(x, w) f = Add(f0, b) r = Reshape(f, six) t = Transpose <perm = {order}> (r)"
    return f"{start} {parts} qs = Mul(q, scale) {kt} {mix} mr = Reshape(mt, o) y0 = MatMul(mr, p) ".replace(
        "s = s0", "s = Identity(s0)"
    )


def case(label: str, text: str, io: str = IO, numbers: str = NUMBERS, **options: object) -> Case:
    options = {"weights": WEIGHTS, "tolerance": 1e-6, **options}
    return Case("merged-windows", label, f"{io} <{numbers}> {{ {text} }}", **options)  # type: ignore[arg-type]


def twice(first: str) -> str:
    """Two blocks in a row."""
    second = re.sub(r"\b(f0|f|r|t|q1|k1|v1|q|k|v|qs|kt|s0|s|a|m|mt|mr|y0)\b", r"\1_2", first)
    return f"{first} {second.replace('MatMul(x, w)', 'MatMul(y0, w)')}"


def no_case(label: str, text: str, **options: object) -> Case:
    return case(label, text, **{"changes": 0, **options})  # type: ignore[arg-type]


BEHIND = "[0, 1, 3, 2, 4]"
RESIDUAL = "y1 = Add(x, y0) y = Relu(y1)"
ONE_TOKEN = NUMBERS.replace("{-1, 3, 5, 3,", "{-1, 3, 1, 3,").replace(
    "int64[4] o = {-1, 3, 5, 8}", "int64[3] o = {-1, 3, 8}"
)
MASK = np.triu(np.full((5, 5), -9.0, np.float32), 1)

CASES: tuple[Case, ...] = (
    case("heads-before-windows", f"{body()} y = Identity(y0)"),
    case("windows-before-heads", f"{body(WINDOWS_FIRST, BEHIND)} y = Identity(y0)"),
    case("parts-sliced", f"{body(parts=SLICED)} {RESIDUAL}"),
    case("parts-split", f"{body(parts=SPLIT)} {RESIDUAL}"),
    case("heads-interleaved-behind", f"{body(back='[0, 2, 3, 4, 1]')} {RESIDUAL}"),
    case("fixed-batch", f"{body()} {RESIDUAL}", io=IO.replace("N,", "2,")),
    case(
        "one-window",
        f"{body()} {RESIDUAL}",
        io=IO.replace("N, 3", "N, 1"),
        numbers=NUMBERS.replace("{-1, 3, 5,", "{-1, 1, 5,"),
    ),
    case(
        "residual-and-normalization",
        f"n = LayerNormalization <axis = -1> (x, g, h) {body().replace('MatMul(x, w)', 'MatMul(n, w)')} {RESIDUAL}",
        weights={**WEIGHTS, "g": (8,), "h": (8,)},
    ),
    case(
        "normalization-whose-scale-has-all-axes",
        f"n = LayerNormalization <axis = -1> (x, g, h) {body().replace('MatMul(x, w)', 'MatMul(n, w)')} {RESIDUAL}",
        weights={**WEIGHTS, "g": (1, 1, 1, 8), "h": (1, 1, 5, 8)},
    ),
    case(
        "positions-of-windows",
        f"x1 = Add(x, e) {body().replace('MatMul(x, w)', 'MatMul(x1, w)')} y = Add(x1, y0)",
        weights={**WEIGHTS, "e": (1, 3, 5, 8)},
    ),
    case("mask-of-tokens", f"{body(scores='s = Add(s0, c)')} {RESIDUAL}", values={"c": MASK}),
    case(
        "mask-of-heads",
        f"{body(scores='s = Add(c, s0)')} {RESIDUAL}",
        values={"c": np.stack([MASK, MASK / 2]).reshape(1, 2, 1, 5, 5)},
    ),
    case(
        "mask-at-run-time",
        f"{body(scores='s = Add(s0, c)')} {RESIDUAL}",
        io=IO.replace("x)", "x, float[1, 1, 1, 5, 5] c)"),
    ),
    case(
        "reduced",
        f"{body()} z = ReduceMax <axes = [2], keepdims = 1> (y0) y = Sub(y0, z)",
    ),
    case(
        "scores-are-an-output",
        f"{body()} {RESIDUAL} s1 = Neg(s0)",
        io=IO.replace("y)", "y, float[N, 2, 3, 5, 5] s1)"),
        changes=0,
    ),
    case(
        "a-mixture-is-an-output",
        f"{twice(body())} y = Add(x, y0_2)",
        io=IO.replace("y)", "y, float[N, 2, 3, 5, 4] m)"),
    ),
    case("windows-are-rows-of-a-product", f"{body()} {RESIDUAL}", io=IO.replace("3, 5,", "3,"), numbers=ONE_TOKEN),
    case(
        "windows-are-rows-of-one-of-many-products",
        f"{body()} {RESIDUAL}",
        io=IO.replace("3, 5,", "3,"),
        numbers=ONE_TOKEN,
        weights={**WEIGHTS, "w": (1, 8, 24)},
    ),
    case("parts-sliced-of-a-batch-of-one", f"{body(parts=SLICED)} {RESIDUAL}", io=IO.replace("N,", "1,")),
    case(
        "one-window-of-a-batch-of-one",
        f"{body()} {RESIDUAL}",
        io=IO.replace("N, 3", "1"),
        numbers=NUMBERS.replace("{-1, 3, 5, 3,", "{1, 1, 5, 3,").replace(
            "int64[4] o = {-1, 3, 5, 8}", "int64[3] o = {1, 5, 8}"
        ),
    ),
    no_case(
        "what-has-the-axes-is-read-along-others",
        f"{body()} z = ReduceMax <axes = [2, 3], keepdims = 0> (y0) y = Add(y0, z)",
        io=IO.replace("N, 3,", "5, 8,"),
        numbers=NUMBERS.replace("-1, 3,", "5, 8,"),
    ),
    no_case(
        "mask-of-windows",
        f"{body(scores='s = Add(s0, c)')} {RESIDUAL}",
        values={"c": np.stack([MASK, MASK / 2, MASK / 3]).reshape(1, 1, 3, 5, 5)},
    ),
    no_case("softmax-over-windows", f"{body().replace('Softmax(s)', 'Softmax <axis = 2> (s)')} {RESIDUAL}"),
    no_case(
        "tokens-of-any-number",
        f"{body()} {RESIDUAL}",
        io=IO.replace("3, 5,", "3, S,"),
        numbers=NUMBERS.replace("{-1, 3, 5, 3, 2, 4}", "{0, 0, -1, 3, 2, 4}").replace("{-1, 3, 5, 8}", "{0, 0, -1, 8}"),
    ),
    no_case(
        "windows-of-every-seventh-token",
        f"{body().replace('Reshape(f, six)', 'Reshape(f, seven)').replace(HEADS_FIRST, '[3, 0, 4, 2, 1, 5]')} "
        "y = Identity(y0)",
        io=IO.replace("[N, 3, 5, 8] x", "[N, 15, 8] x"),
        numbers=f"{NUMBERS}, int64[6] seven = {{-1, 5, 3, 3, 2, 4}}",
    ),
    no_case("batch-of-none", f"{body()} {RESIDUAL}", io=IO.replace("N,", "0,")),
    no_case("before-opset-13", f"{body(parts=GATHERED)} y = Identity(y0)", opset=12),
)
