"""Cases for channel alignment: what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
from cases_align import C1, C3, TRT, P, align, ints, through
from contract_case import Case

from trtopt.rewrite.protocol import Target

NONE: dict[str, Any] = {"changes": 0, "refusals": 1}

CASES: tuple[Case, ...] = (
    through("unknown-operator", "z = LRN <size = 3> (a)", **NONE),
    through(
        "unknown-operator-only-there",
        f"c = Conv {P} (a, w2) k = ReduceMean <axes = [1]> (c) z = Mul(c, k)",
        changes=1,
        refusals=1,
    ),
    through("softmax", "z = Softmax <axis = 1> (a)", **NONE),
    through("reduction", "m = ReduceMax <axes = [1]> (a) z = Sub(a, m)", **NONE),
    through(
        "layer-norm",
        "t = Transpose <perm = [0, 2, 3, 1]> (a) n = LayerNormalization (t, g) z = Transpose <perm = [0, 3, 1, 2]> (n)",
        {"g": (7,)},
        **NONE,
    ),
    through("layer-norm-of-space", "z = LayerNormalization <axis = 2> (a, g)", {"g": (6, 6)}, **NONE),
    through("logarithm", "s = Softplus(a) z = Log(s)", **NONE),
    through("division", "t = Tanh(a) r = Exp(t) z = Div(a, r)", **NONE),
    through("division-by-data", "r = ReduceMax <axes = [2, 3]> (a) e = Exp(r) z = Div(a, e)", **NONE),
    through("power", "z = Pow(a, e)", values={"e": np.float32(-1)}, **NONE),
    through("exponentials", "b = Exp(a) c = Exp(b) d = Exp(c) z = Exp(d)", **NONE),
    through("large-shift", "s = Add(a, h) z = Relu(s)", values={"h": np.float32(5000)}, **NONE),
    through(
        "channel-shuffle",
        "r = Reshape(a, s) t = Transpose <perm = [0, 2, 1, 3, 4]> (r) z = Reshape(t, q)",
        values={"s": ints(-1, 7, 1, 6, 6), "q": ints(-1, 7, 6, 6)},
        changes=1,
        refusals=0,
    ),
    through(
        "split-by-reshape",
        "r = Reshape(a, s) t = Transpose <perm = [0, 2, 1, 3, 4]> (r) z = Reshape(t, q)",
        {"w1": (14, 8, 3, 3), "b1": (14,), "w3": (4, 14, 1, 1)},
        values={"s": ints(0, 2, 7, 6, 6), "q": ints(0, 14, 6, 6)},
        target=TRT,
        changes=0,
        refusals=3,
    ),
    through(
        "computed-reshape",
        "h = Shape(x) n = Slice(h, i0, i1) m = Concat <axis = 0> (n, k) z = Reshape(a, m)",
        values={"i0": ints(0), "i1": ints(1), "k": ints(7, 6, 6)},
        **NONE,
    ),
    through(
        "size-is-read", "h = Shape(a) c = Cast <to = 1> (h) m = ReduceMax <keepdims = 0> (c) z = Mul(a, m)", **NONE
    ),
    through("gather", "z = Gather <axis = 1> (a, i)", values={"i": ints(0, 1, 2, 3, 4, 5, 6)}, **NONE),
    through(
        "every-second",
        "r = Concat <axis = 1> (a, a) z = Slice(r, s, e, c, t)",
        values={"s": ints(0), "e": ints(14), "c": ints(1), "t": ints(2)},
        **NONE,
    ),
    through(
        "padded-channels",
        "r = Pad(a, p) z = Slice(r, s, e, c)",
        values={"p": ints(0, 1, 0, 0, 0, 0, 0, 0), "s": ints(0), "e": ints(7), "c": ints(1)},
        **NONE,
    ),
    through("repeated", "r = ReduceMean <axes = [1]> (x) z = Add(a, r)", changes=1, refusals=0),
    through(
        "instance-norm-computed",
        "g = ReduceMean <axes = [0, 2, 3], keepdims = 0> (a) z = InstanceNormalization (a, g, g)",
        **NONE,
    ),
    align(
        "graph-output",
        f"g (float[N, 8, 6, 6] x) => (float[N, 7, 6, 6] r, float[N, 4, 6, 6] y) {{ {C1} r = Relu(a) y = Conv(r, w3) }}",
        **NONE,
    ),
    align(
        "network-input",
        "y = Conv(x, w)".join(("g (float[N, 3, 6, 6] x) => (float[N, 4, 6, 6] y) { ", " }")),
        {"w": (4, 3, 1, 1)},
        **NONE,
    ),
    align(
        "skip-from-input",
        f"g (float[N, 7, 6, 6] x) => (float[N, 4, 6, 6] y) {{ a = Conv {P} (x, w2) s = Add(a, x) y = Conv(s, w3) }}",
        **NONE,
    ),
    align("computed-weights", f"{C1} w = Relu(w3) y = Conv (a, w)", changes=0),
    align(
        "computed-bias",
        f"r = ReduceSum <keepdims = 0> (x) b = Mul(r, b1) a = Conv {P} (x, w1, b) {C3.replace('z', 'a')}",
        **NONE,
    ),
    align("even", "a = Conv(x, t1) r = Relu(a) y = Conv(r, t2)", {"t1": (60, 8, 1, 1), "t2": (4, 60, 1, 1)}, **NONE),
    align(
        "multiple-of-eight",
        "a = Conv(x, t1) r = Relu(a) y = Conv(r, t2)",
        {"t1": (16, 8, 1, 1), "t2": (4, 16, 1, 1)},
        changes=0,
    ),
    align(
        "gemm-only",
        "g (float[N, 8] x) => (float[N, 4] y) { a = Gemm(x, t1) r = Relu(a) y = Gemm(r, t2) }",
        {"t1": (8, 61), "t2": (61, 4)},
        **NONE,
    ),
    align(
        "gemm-bias-for-all",
        "g (float[N, 8] x) => (float[N, 8] y) { a = Gemm(x, t1, c) r = Relu(a) y = Gemm(r, t2) }",
        {"t1": (8, 61), "t2": (61, 8), "c": (1,)},
        target=TRT,
        **NONE,
    ),
    align(
        "attention",
        "g (float[N, 5, 8] x) => (float[N, 5, 5] y) { q = MatMul(x, t1) k = MatMul(x, t1) "
        "t = Transpose <perm = [0, 2, 1]> (k) y = MatMul(q, t) }",
        {"t1": (8, 13)},
        target=TRT,
        changes=0,
        refusals=2,
    ),
    align(
        "odd-head",
        "g (float[N, 16] x) => (float[N, 1001] y) { y = Gemm(x, w, b) }",
        {"w": (16, 1001), "b": (1001,)},
        **NONE,
    ),
    align(
        "head-used-inside",
        "g (float[N, 16] x) => (float[N, 1001] y, float[N, 1001] z) { y = Gemm(x, w, b) z = Softmax(y) }",
        {"w": (16, 1001), "b": (1001,)},
        target=TRT,
        **NONE,
    ),
    align(
        "head-in-a-branch",
        "g (bool c, float[N, 16] x) => (float[N, 1001] y) { y = If (c) <"
        "then_branch = t () => (float[N, 1001] p) { p = Gemm(x, w, b) },"
        "else_branch = e () => (float[N, 1001] q) { q = Gemm(x, w) }> }",
        {"w": (16, 1001), "b": (1001,)},
        target=TRT,
        changes=0,
        refusals=2,
    ),
    align(
        "loop-state",
        f"g (float[1, 8, 6, 6] x, bool c) => (float[1, 4, 6, 6] y) {{ {C1} n = Constant "
        "<value_int = 2> () z = Loop (n, c, a) <"
        "body = t (int64 i, bool k, float[1, 7, 6, 6] s) => (bool l, float[1, 7, 6, 6] u) { l "
        "= Identity(k) u = Conv "
        f"{P} (s, w2, b2) }}> {C3} }}",
        changes=0,
        refusals=2,
    ),
    through("fp32", "z = Relu(a)", target=Target("tensorrt-rtx", "fp32"), **NONE),
    through("int8-on-rtx", "z = Relu(a)", target=Target("tensorrt-rtx", "int8"), **NONE),
    through("turing", "z = Relu(a)", target=Target("tensorrt-rtx", "fp16", "7.5"), **NONE),
    through("too-many-zeros", "z = Relu(a)", target=Target("tensorrt", "int8"), changes=0, refusals=2),
    align(
        "one-channel",
        "a = Conv(x, t1) r = Relu(a) y = Conv(r, t2)",
        {"t1": (1, 8, 1, 1), "t2": (4, 1, 1, 1)},
        changes=0,
    ),
)
