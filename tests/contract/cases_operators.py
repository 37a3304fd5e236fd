"""Cases for the recipes that write activations in operators that fuse."""

from __future__ import annotations

import numpy as np
from contract_case import Case

X = "float[N, 4, 6, 6] x"
Y = "float[N, 4, 6, 6] y"
CONV = {"w": (4, 4, 1, 1)}

ERF = "d = Div(x, r) e = Erf(d) a = Add(e, one)"
NUMBERS = {"r": np.array(np.sqrt(2), np.float32), "one": np.array(1, np.float32), "h": np.array(0.5, np.float32)}
TANH = {
    "s": np.array(np.sqrt(2 / np.pi), np.float32),
    "c": np.array(0.044715, np.float32),
    "three": np.array(3, np.float32),
    **NUMBERS,
}

CASES: tuple[Case, ...] = (
    Case(
        "decomposed-gelu",
        "conv",
        f"g ({X}) => ({Y}) {{ i = Conv(x, w) d = Div(i, r) e = Erf(d) a = Add(e, one) m = Mul(i, a) y = Mul(m, h) }}",
        CONV,
        values=NUMBERS,
        tolerance=1e-6,
    ),
    Case(
        "decomposed-gelu",
        "other-order",
        f"g ({X}) => ({Y}) {{ {ERF} b = Mul(a, h) y = Mul(b, x) }}",
        values=NUMBERS,
        tolerance=1e-6,
    ),
    Case(
        "decomposed-gelu",
        "tanh",
        f"g ({X}) => ({Y}) {{ p = Pow(x, three) q = Mul(p, c) i = Add(x, q) j = Mul(i, s) t = Tanh(j) a = Add(t, one)"
        " b = Mul(x, h) y = Mul(b, a) }",
        values=TANH,
        tolerance=1e-6,
    ),
    Case(
        "decomposed-gelu",
        "tanh-of-products",
        f"g ({X}) => ({Y}) {{ b = Mul(x, s) p = Mul(x, x) q = Mul(p, c) i = Add(one, q) j = Mul(b, i) t = Tanh(j)"
        " a = Add(one, t) k = Mul(a, x) y = Mul(h, k) }",
        values=TANH,
        tolerance=1e-6,
    ),
    Case(
        "decomposed-gelu",
        "half",
        "g (float16[N, 4] x) => (float16[N, 4] y) { d = Mul(x, r) e = Erf(d) a = Add(e, o) m = Mul(x, a)"
        " y = Mul(m, h) }",
        values={"r": np.array(np.sqrt(0.5), np.float16), "o": np.array(1, np.float16), "h": np.array(0.5, np.float16)},
        tolerance=2e-3,
    ),
    Case(
        "decomposed-gelu",
        "another-slope",
        f"g ({X}) => ({Y}) {{ {ERF} m = Mul(x, a) y = Mul(m, h) }}",
        values={**NUMBERS, "r": np.array(1.414, np.float32)},
        changes=0,
    ),
    Case(
        "decomposed-gelu",
        "another-factor",
        f"g ({X}) => ({Y}) {{ n = Neg(x) {ERF} m = Mul(n, a) y = Mul(m, h) }}",
        values=NUMBERS,
        changes=0,
    ),
    Case(
        "decomposed-gelu",
        "more-axes",
        f"g ({X}) => (float[1, N, 4, 6, 6] y) {{ {ERF} m = Mul(x, a) y = Mul(m, h) }}",
        values={**NUMBERS, "h": np.full((1, 1, 1, 1, 1), 0.5, np.float32)},
        changes=0,
    ),
    Case(
        "decomposed-gelu",
        "inner-value-is-output",
        f"g ({X}) => ({Y}, float[N, 4, 6, 6] a) {{ {ERF} m = Mul(x, a) y = Mul(m, h) }}",
        values=NUMBERS,
        changes=0,
        refusals=1,
    ),
    Case(
        "prelu",
        "per-channel",
        f"g ({X}) => ({Y}) {{ c = Conv(x, w) a = PRelu(c, s) y = Neg(a) }}",
        {**CONV, "s": (4, 1, 1)},
        tolerance=1e-6,
    ),
    Case("prelu", "output", f"g ({X}) => ({Y}) {{ y = PRelu(x, s) }}", {"s": (1,)}),
    Case("prelu", "computed-slope", f"g ({X}) => ({Y}) {{ s = Sin(x) y = PRelu(x, s) }}"),
    Case(
        "prelu",
        "shared-slope-two-places",
        f"g ({X}) => ({Y}) {{ a = PRelu(x, s) b = Neg(a) y = PRelu(b, s) }}",
        {"s": (4, 1, 1)},
        changes=2,
    ),
    Case(
        "prelu",
        "half",
        "g (float16[N, 4] x) => (float16[N, 4] y) { y = PRelu(x, s) }",
        values={"s": np.array([0.25, -1, 0, 2], np.float16)},
    ),
    Case(
        "prelu",
        "nested",
        "g (bool k, float[4] x) => (float[4] y) <float[1] s = {0.1}> { y = If (k) <"
        "then_branch = a () => (float[4] p) { p = PRelu(x, s) }, else_branch = b () => (float[4] q) { q = Neg(x) }> }",
    ),
    Case("prelu", "leaky", f"g ({X}) => ({Y}) {{ y = LeakyRelu(x) }}", changes=0),
    Case("selu", "conv", f"g ({X}) => ({Y}) {{ c = Conv(x, w) y = Selu(c) }}", CONV, tolerance=1e-6),
    Case("selu", "attributes", f"g ({X}) => ({Y}) {{ y = Selu <alpha = 0.5, gamma = 2.0> (x) }}", tolerance=1e-6),
    Case("selu", "elu", f"g ({X}) => ({Y}) {{ y = Elu(x) }}", changes=0),
    Case("softplus", "conv", f"g ({X}) => ({Y}) {{ c = Conv(x, w) y = Softplus(c) }}", CONV, tolerance=1e-6),
    Case(
        "softplus",
        "used-twice",
        f"g ({X}) => ({Y}, float[N, 4, 6, 6] a) {{ a = Softplus(x) y = Neg(a) }}",
        tolerance=1e-6,
    ),
    Case("softplus", "softsign", f"g ({X}) => ({Y}) {{ y = Softsign(x) }}", changes=0),
    Case("mish", "operator", f"g ({X}) => ({Y}) {{ c = Conv(x, w) y = Mish(c) }}", CONV, opset=18, tolerance=1e-6),
    Case(
        "mish",
        "spelled-out",
        f"g ({X}) => ({Y}) {{ s = Softplus(x) t = Tanh(s) y = Mul(x, t) }}",
        tolerance=1e-6,
    ),
    Case(
        "mish",
        "other-order",
        f"g ({X}) => ({Y}) {{ a = Neg(x) s = Softplus(a) t = Tanh(s) b = Mul(t, a) y = Neg(b) }}",
        tolerance=1e-6,
    ),
    Case(
        "mish",
        "other-factor",
        f"g ({X}) => ({Y}) {{ a = Neg(x) s = Softplus(x) t = Tanh(s) y = Mul(a, t) }}",
        changes=0,
    ),
    Case(
        "mish",
        "softplus-used-elsewhere",
        f"g ({X}) => ({Y}) {{ s = Softplus(x) t = Tanh(s) a = Mul(x, t) y = Add(a, s) }}",
        changes=0,
        refusals=1,
    ),
    Case(
        "mish",
        "tanh-is-output",
        f"g ({X}) => ({Y}, float[N, 4, 6, 6] t) {{ s = Softplus(x) t = Tanh(s) y = Mul(x, t) }}",
        changes=0,
        refusals=1,
    ),
)
