"""Cases for the recipes about linear layers."""

from __future__ import annotations

import numpy as np
from contract_case import Case

X = "float[N, 4, 6, 5] x"
ROWS = "float[N, 6, 5, 4]"
MLP = "m = MatMul(l, w) a = Add(b, m) r = Relu(a) n = MatMul(r, v2) o = Add(n, b2)"
WEIGHTS = {"w": (4, 8), "b": (8,), "v2": (8, 4), "b2": (4,)}
CLOSE = 1e-5
FIRST, LAST = "Transpose <perm = [0, 3, 1, 2]>", "Transpose <perm = [0, 2, 3, 1]>"

CASES: tuple[Case, ...] = (
    Case(
        "rank-4-linear",
        "convnext",
        f"g ({X}) => (float[N, 4, 6, 5] y) {{ t = {LAST} (x) l = LayerNormalization(t, g) {MLP} "
        f"s = Mul(k, o) u = {FIRST} (s) y = Add(x, u) }}",
        {**WEIGHTS, "k": (4,), "g": (4,)},
        tolerance=CLOSE,
    ),
    Case(
        "rank-4-linear",
        "transposes-around-used-elsewhere",
        f"g ({X}) => (float[N, 4, 6, 5] y, float[N, 6, 5, 4] z) {{ l = {LAST} (x) {MLP} u = {FIRST} (o) y = Neg(u) "
        "z = Add(o, l) }",
        WEIGHTS,
        tolerance=CLOSE,
    ),
    Case(
        "rank-4-linear",
        "outputs-inside",
        f"g ({X}) => (float[N, 6, 5, 8] a, float[N, 4, 6, 5] u, float[N, 4, 6, 5] z) {{ l = {LAST} (x) {MLP} "
        f"u = {FIRST} (o) z = {FIRST} (o) }}",
        WEIGHTS,
        tolerance=CLOSE,
    ),
    Case(
        "rank-4-linear",
        "gate-and-up",
        f"g ({ROWS} x) => (float[N, 6, 5, 8] y) "
        "{ a = MatMul(x, w) s = Sigmoid(a) b = MatMul(x, w2) c = Mul(s, b) y = Add(c, k) }",
        {"w": (4, 8), "w2": (4, 8), "k": (1, 1, 1, 1)},
        tolerance=CLOSE,
    ),
    Case(
        "rank-4-linear",
        "residuals",
        f"g ({X}) => ({ROWS} y) {{ t = {LAST} (x) l = LayerNormalization(t, g) {MLP} p = Add(t, o) "
        "q = LayerNormalization(p, g) e = MatMul(q, w) f = Add(e, b) h = Sin(p) i = MatMul(f, v2) j = Add(p, i) "
        "y = Add(j, h) }",
        {**WEIGHTS, "g": (4,)},
        changes=2,
        tolerance=CLOSE,
    ),
    Case(
        "rank-4-linear",
        "shared-weight",
        f"g ({ROWS} x) => ({ROWS} y) {{ a = MatMul(x, w) r = Atan(a) c = MatMul(r, w) y = Add(c, x) }}",
        {"w": (1, 1, 4, 4)},
        changes=2,
        tolerance=CLOSE,
    ),
    Case(
        "rank-4-linear",
        "unknown-sizes",
        "g (float[N, H, W, 4] x) => (float[N, H, W, 8] y) { a = MatMul(x, w) y = Add(a, b) }",
        {"w": (4, 8), "b": (1, 8)},
        tolerance=CLOSE,
    ),
    Case(
        "rank-4-linear",
        "half",
        "g (float16[2, 3, 3, 2] x) => (float16[2, 3, 3, 2] y) { a = MatMul(x, w) y = Relu(a) }",
        values={"w": np.array([[0.5, 1], [-1, 0.25]], np.float16)},
        tolerance=1e-3,
    ),
    Case(
        "rank-4-linear",
        "rank-5",
        "g (float[N, 2, 3, 3, 4] x) => (float[N, 2, 3, 3, 4] y) "
        "{ m = MatMul(x, w) a = Add(b, m) r = Relu(a) n = MatMul(r, v2) y = Add(n, b2) }",
        {**WEIGHTS, "b": (1, 1, 1, 1, 8), "w": (1, 4, 8)},
        tolerance=CLOSE,
    ),
    Case(
        "rank-4-linear",
        "rank-5-unknown-sizes",
        "g (float[N, D, 3, 3, 4] x) => (float[N, D, 3, 3, 8] y) { y = MatMul(x, w) }",
        {"w": (4, 8)},
        changes=0,
        refusals=1,
    ),
    Case(
        "rank-4-linear",
        "rank-3",
        "g (float[N, 3, 4] x) => (float[N, 3, 8] y) { y = MatMul(x, w) }",
        {"w": (4, 8)},
        changes=0,
    ),
    Case(
        "rank-4-linear",
        "computed-weight",
        f"g ({ROWS} x, float[4, 8] w) => (float[N, 6, 5, 8] y) {{ y = MatMul(x, w) }}",
        changes=0,
    ),
    Case(
        "rank-4-linear",
        "quantized-weight",
        f"g ({ROWS} x) => (float[N, 6, 5, 2] y) <int8[4, 2] w = {{1, 2, 3, 4, 5, 6, 7, 8}}, float s = {{0.5}}> "
        "{ d = DequantizeLinear(w, s) y = MatMul(x, d) }",
        changes=0,
        refusals=1,
    ),
    Case(
        "rank-4-linear",
        "constant-per-position",
        f"g ({ROWS} x) => (float[N, 6, 5, 8] y) {{ a = MatMul(x, w) y = Add(a, p) }}",
        {"w": (4, 8), "p": (6, 5, 8)},
        tolerance=CLOSE,
    ),
    Case(
        "rank-4-linear",
        "nested",
        f"g (bool k, {ROWS} x) => (float[N, 6, 5, 8] y) {{ t = Neg(x) y = If (k) <"
        "then_branch = h () => (float[N, 6, 5, 8] p) { m = MatMul(t, w) p = Relu(m) },"
        "else_branch = e () => (float[N, 6, 5, 8] q) { q = MatMul(t, w) }> }",
        {"w": (4, 8)},
        changes=2,
        tolerance=CLOSE,
    ),
    Case(
        "layer-scale",
        "convnext",
        f"g ({ROWS} l, {X}) => (float[N, 4, 6, 5] y) {{ {MLP} u = {FIRST} (o) s = Mul(k, u) y = Add(x, s) }}",
        {**WEIGHTS, "k": (4, 1, 1)},
        tolerance=CLOSE,
    ),
    Case(
        "layer-scale",
        "right-behind-and-shared-weight",
        "g (float[N, 3, 4] x) => (float[N, 3, 4] y) { m = MatMul(x, w) a = Mul(m, k) n = MatMul(a, w) b = Add(n, c) "
        "y = Div(b, d) }",
        {"w": (4, 4), "k": (4,), "c": (3, 1)},
        {"d": np.array([1, 2, -4, 0.5], np.float32)},
        changes=2,
        tolerance=CLOSE,
    ),
    Case(
        "layer-scale",
        "reshape",
        "g (float[N, 6, 4] x) => (float[N, 8, 2, 3] y) <int64[4] s = {0, 8, 2, 3}> "
        "{ m = MatMul(x, w) a = Add(m, b) t = Transpose <perm = [0, 2, 1]> (a) r = Reshape(t, s) y = Mul(r, k) }",
        {"w": (4, 8), "b": (8,), "k": (8, 1, 1)},
        tolerance=CLOSE,
    ),
    Case(
        "layer-scale",
        "conv-behind-transpose",
        f"g ({X}) => (float[N, 6, 5, 3] y) {{ c = Conv(x, w, b) t = {LAST} (c) y = Mul(t, k) }}",
        {"w": (3, 4, 1, 1), "b": (3,), "k": (3,)},
        tolerance=CLOSE,
    ),
    Case(
        "layer-scale",
        "gemm-behind-reshape",
        "g (float[6, 4] x) => (float[2, 3, 8] y) <int64[3] s = {2, 3, 8}> "
        "{ m = Gemm <transB = 1, alpha = 0.5> (x, w, b) r = Reshape(m, s) y = Mul(r, k) }",
        {"w": (8, 4), "b": (8,), "k": (8,)},
        tolerance=CLOSE,
    ),
    Case(
        "layer-scale",
        "one-number",
        "g (float[N, 4] x) => (float[N, 8] y) { m = MatMul(x, w) y = Mul(m, k) }",
        {"w": (4, 8), "k": (1,)},
        tolerance=CLOSE,
    ),
    Case(
        "layer-scale",
        "one-number-behind-heads",
        "g (float[N, 6, 4] x) => (float[N, 2, 6, 4] y) <int64[4] s = {0, 6, 2, 4}, float k = {0.5}> "
        "{ m = MatMul(x, w) r = Reshape(m, s) t = Transpose <perm = [0, 2, 1, 3]> (r) y = Mul(t, k) }",
        {"w": (4, 8)},
        changes=0,
    ),
    Case(
        "layer-scale",
        "per-row",
        "g (float[N, 6, 4] x) => (float[N, 6, 8] y) { m = MatMul(x, w) y = Mul(m, k) }",
        {"w": (4, 8), "k": (6, 1)},
        changes=0,
    ),
    Case(
        "layer-scale",
        "used-elsewhere",
        "g (float[N, 4] x) => (float[N, 8] y, float[N, 8] m) { m = MatMul(x, w) a = Add(m, b) y = Mul(a, k) }",
        {"w": (4, 8), "b": (8,), "k": (8,)},
        changes=0,
        refusals=1,
    ),
    Case(
        "layer-scale",
        "too-small-for-half",
        "g (float[N, 4] x) => (float[N, 8] y) { m = MatMul(x, w) y = Mul(m, k) }",
        {"w": (4, 8)},
        {"k": np.full(8, 1e-6, np.float32)},
        changes=0,
        refusals=1,
    ),
    Case(
        "layer-scale",
        "not-finite",
        "g (float[N, 4] x) => (float[N, 2] y) <float[2] k = {1, 0}> { m = MatMul(x, w) y = Div(m, k) }",
        {"w": (4, 2)},
        changes=0,
        refusals=1,
        tolerance=CLOSE,
    ),
    Case(
        "layer-scale",
        "nested",
        "g (bool c, float[N, 4] x) => (float[N, 8] y) { y = If (c) <"
        "then_branch = h () => (float[N, 8] p) { m = MatMul(x, w) p = Mul(m, k) },"
        "else_branch = e () => (float[N, 8] q) { q = MatMul(x, w) }> }",
        {"w": (4, 8), "k": (8,)},
        tolerance=CLOSE,
    ),
)
