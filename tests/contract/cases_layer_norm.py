"""Cases for the recipe that recognises a spelled-out layer normalization."""

from __future__ import annotations

import numpy as np
from contract_case import Case

HEAD = "g (float[N, 5, 8] x) => (float[N, 5, 8] y)"
SCALARS = "<float p = {2}, float e = {0.00001}, float h = {-0.5}, float one = {1}>"
MEAN = "m = ReduceMean <axes = [-1]> (x) d = Sub(x, m)"
POW = f"{MEAN} q = Pow(d, p) v1 = ReduceMean <axes = [-1]> (q)"
AFFINE = {"g": (8,), "b": (8,)}
CLOSE = 1e-5

CASES: tuple[Case, ...] = (
    Case(
        "decomposed-layer-norm",
        "torch",
        f"{HEAD} {SCALARS} {{ {POW} a = Add(v1, e) s = Sqrt(a) n = Div(d, s) k = Mul(n, g) y = Add(k, b) }}",
        AFFINE,
        tolerance=CLOSE,
    ),
    Case(
        "decomposed-layer-norm",
        "other-operand-orders",
        f"{HEAD} {SCALARS} {{ {MEAN} d2 = Sub(x, m) q = Mul(d2, d2) v1 = ReduceMean <axes = [2]> (q) a = Add(e, v1) "
        "s = Sqrt(a) r = Reciprocal(s) n = Mul(r, d) k = Mul(g, n) y = Add(b, k) }",
        {"g": (1, 1, 8), "b": (1, 8)},
        tolerance=CLOSE,
    ),
    Case(
        "decomposed-layer-norm",
        "axes-as-input-without-affine",
        f"{HEAD} <float p = {{2}}, float e = {{0.00001}}, float h = {{-0.5}}, int64[1] i = {{-1}}> "
        "{ m = ReduceMean(x, i) d = Sub(x, m) q = Pow(d, p) v1 = ReduceMean(q, i) a = Add(v1, e) r = Pow(a, h) "
        "n = Mul(d, r) y = Neg(n) }",
        opset=18,
        tolerance=CLOSE,
    ),
    Case(
        "decomposed-layer-norm",
        "tensorflow",
        f"{HEAD} {SCALARS} {{ {MEAN} q = Mul(d, d) v1 = ReduceMean <axes = [-1]> (q) a = Add(v1, e) s = Sqrt(a) "
        "r = Div(one, s) w = Mul(r, g) t = Mul(x, w) u = Mul(m, w) o = Sub(b, u) y = Add(t, o) }",
        AFFINE,
        tolerance=CLOSE,
    ),
    Case(
        "decomposed-layer-norm",
        "one-number",
        f"{HEAD} <float p = {{2}}, float e = {{0.001}}, float k = {{3}}> "
        "{ m = ReduceMean <axes = [2]> (x) d = Sub(x, m) q = Pow(d, p) v1 = ReduceMean <axes = [-1]> (q) "
        "a = Add(v1, e) s = Sqrt(a) n = Div(d, s) l = Mul(n, k) y = Add(l, b) }",
        {"b": (1, 8)},
        tolerance=CLOSE,
    ),
    Case(
        "decomposed-layer-norm",
        "mean-used-elsewhere",
        "g (float[N, 5, 8] x) => (float[N, 5, 8] y, float[N, 5, 1] m) <float p = {2}, float e = {0.1}> "
        f"{{ {POW} a = Add(v1, e) s = Sqrt(a) y = Div(d, s) }}",
        changes=0,
        refusals=1,
    ),
    Case(
        "decomposed-layer-norm",
        "channels-in-the-middle",
        "g (float[N, 5, 8] x) => (float[N, 5, 8] y) <float p = {2}, float e = {0.1}> "
        "{ m = ReduceMean <axes = [1]> (x) d = Sub(x, m) q = Pow(d, p) v1 = ReduceMean <axes = [1]> (q) "
        "a = Add(v1, e) s = Sqrt(a) y = Div(d, s) }",
        changes=0,
        refusals=1,
    ),
    Case(
        "decomposed-layer-norm",
        "cube",
        f"{HEAD} <float p = {{4}}, float e = {{0.1}}> {{ {POW} a = Add(v1, e) s = Sqrt(a) y = Div(d, s) }}",
        changes=0,
    ),
    Case(
        "decomposed-layer-norm",
        "factor-per-position",
        f"{HEAD} {SCALARS} {{ {POW} a = Add(v1, e) s = Sqrt(a) n = Div(d, s) k = Mul(n, g) y = Add(k, b) }}",
        {"g": (5, 8), "b": (8,)},
        tolerance=CLOSE,
    ),
    Case(
        "decomposed-layer-norm",
        "nested",
        "g (bool c, float[N, 5, 8] x) => (float[N, 5, 8] y) "
        f"{SCALARS} {{ y = If (c) <"
        f"then_branch = f () => (float[N, 5, 8] z) {{ {POW} a = Add(v1, e) s = Sqrt(a) z = Div(d, s) }},"
        "else_branch = f2 () => (float[N, 5, 8] z2) { z2 = Neg(x) }> }",
        tolerance=CLOSE,
    ),
    Case(
        "decomposed-layer-norm",
        "half",
        "g (float16[N, 8] x) => (float16[N, 8] y) { m = ReduceMean <axes = [-1]> (x) d = Sub(x, m) q = Mul(d, d) "
        "v1 = ReduceMean <axes = [-1]> (q) a = Add(v1, e) s = Sqrt(a) y = Div(d, s) }",
        values={"e": np.array(-1e-3, np.float16)},
        changes=0,
        refusals=1,
    ),
)
