"""Cases for the recipes about duplicates and casts."""

from __future__ import annotations

import numpy as np
from contract_case import Case

X = "float[N, 4, 6, 6] x"
Y = "float[N, 4, 6, 6] y"

DUPLICATES: tuple[Case, ...] = (
    Case(
        "duplicate-expression",
        "chain",
        f"g ({X}) => ({Y}) {{ a = Relu(x) b = Exp(a) c = Relu(x) d = Exp(c) y = Sub(b, d) }}",
        changes=2,
    ),
    Case(
        "duplicate-expression",
        "swapped",
        f"g ({X}) => ({Y}) {{ a = Relu(x) b = Add(a, x) c = Add(x, a) y = Mul(b, c) }}",
    ),
    Case(
        "duplicate-expression",
        "not-commutative",
        f"g ({X}) => ({Y}) {{ a = Relu(x) b = Sub(a, x) c = Sub(x, a) y = Mul(b, c) }}",
        changes=0,
    ),
    Case(
        "duplicate-expression",
        "attributes",
        f"g ({X}) => ({Y}) {{ a = Elu <alpha = 1.0> (x) b = Elu <alpha = 2.0> (x) y = Mul(a, b) }}",
        changes=0,
    ),
    Case(
        "duplicate-expression",
        "one-is-an-output",
        f"g ({X}) => ({Y}, {X[:-1]}z) {{ a = Relu(x) y = Neg(a) z = Relu(x) }}",
    ),
    Case(
        "duplicate-expression",
        "first-is-an-output",
        f"g ({X}) => ({X[:-1]}z, {Y}) {{ z = Relu(x) a = Relu(x) y = Neg(a) }}",
    ),
    Case(
        "duplicate-expression",
        "both-are-outputs",
        f"g ({X}) => ({X[:-1]}z, {Y}) {{ z = Relu(x) y = Relu(x) }}",
        changes=0,
    ),
    Case(
        "duplicate-expression",
        "three-two-outputs",
        f"g ({X}) => ({X[:-1]}z, {Y}) {{ a = Relu(x) z = Relu(x) y = Relu(x) b = Neg(a) }}",
    ),
    Case(
        "duplicate-expression",
        "constants-of-other-ranks",
        "g (float[4, 6] x) => (float[6] y, float[1, 6] z) { i = Constant <value = int64 {1}> () "
        "j = Constant <value = int64[1] {1}> () a = Relu(x) y = Gather(a, i) z = Gather(a, j) }",
        changes=0,
    ),
    Case(
        "duplicate-expression",
        "equal-constants",
        f"g ({X}) => ({Y}) <float s = {{2}}, float t = {{2}}, float u = {{-2}}> "
        "{ a = Mul(x, s) b = Mul(x, t) c = Mul(x, u) d = Add(a, b) y = Add(d, c) }",
    ),
    Case(
        "duplicate-expression",
        "equal-weights",
        "g (float[N, 64] x) => (float[N, 64] y) { a = MatMul(x, p) y = MatMul(a, q) }",
        values={"p": np.eye(64, dtype=np.float32), "q": np.eye(64, dtype=np.float32)},
    ),
    Case(
        "duplicate-expression",
        "nearly-equal-weights",
        "g (float[N, 64] x) => (float[N, 64] y) { a = MatMul(x, p) y = MatMul(a, q) }",
        values={
            "p": np.eye(64, dtype=np.float32),
            "q": np.eye(64, k=0, dtype=np.float32) + np.eye(64, k=1, dtype=np.float32),
        },
        changes=0,
    ),
    Case(
        "duplicate-expression",
        "several-outputs",
        "g (float[N, 4] x) => (float[N, 2] y) { a, b = Split <axis = 1> (x) c, d = Split <axis = 1> (x) "
        "e = Sub(a, d) f = Sub(b, c) y = Mul(e, f) }",
    ),
    Case(
        "duplicate-expression",
        "random",
        "g (float[2] x) => (float[2] y) { r = RandomNormal <shape = [2]> () s = RandomNormal <shape = [2]> () "
        "q = Sub(r, s) y = Add(x, q) }",
        changes=0,
    ),
    Case(
        "duplicate-expression",
        "dropout-training",
        "g (float[2] x, bool t) => (float[2] y) <float r = {0.5}> { a = Dropout(x, r, t) b = Dropout(x, r, t) "
        "y = Sub(a, b) }",
        changes=0,
    ),
    Case(
        "duplicate-expression",
        "graphs-apart",
        "g (bool k, float[4] x) => (float[4] y) { t = Relu(x) i = If (k) <"
        "then_branch = a () => (float[4] p) { q = Relu(x) r = Relu(x) p = Add(q, r) },"
        "else_branch = b () => (float[4] s) { s = Relu(x) }> y = Add(i, t) }",
    ),
    Case(
        "duplicate-expression",
        "quantizers",
        "g (float[N, 4] x) => (float[N, 4] y) <float s = {0.5}, int8 z = {0}> { a = QuantizeLinear(x, s, z) "
        "b = DequantizeLinear(a, s, z) c = QuantizeLinear(x, s, z) d = DequantizeLinear(c, s, z) y = Add(b, d) }",
        changes=0,
    ),
)

CASTS: tuple[Case, ...] = (
    Case(
        "cast-chain",
        "there-and-back",
        "g (float16[4] x) => (float16[4] y) { a = Relu(x) b = Cast <to = 1> (a) c = Cast <to = 10> (b) y = Neg(c) }",
    ),
    Case("cast-chain", "onward", "g (int32[4] x) => (float[4] y) { a = Cast <to = 7> (x) y = Cast <to = 1> (a) }"),
    Case(
        "cast-chain",
        "middle-used",
        "g (float16[4] x) => (float16[4] y, float[4] b) { b = Cast <to = 1> (x) c = Cast <to = 10> (b) y = Neg(c) }",
    ),
    Case(
        "cast-chain",
        "rounding",
        "g (float[4] x) => (float[4] y) { a = Cast <to = 10> (x) b = Cast <to = 1> (a) y = Neg(b) }",
        changes=0,
    ),
    Case(
        "cast-chain",
        "integers",
        "g (int32[4] x) => (int32[4] y) { a = Cast <to = 1> (x) b = Cast <to = 6> (a) y = Neg(b) }",
        changes=0,
    ),
    Case(
        "cast-chain",
        "input-to-output",
        "g (float16[4] x) => (float16[4] y) { a = Cast <to = 1> (x) y = Cast <to = 10> (a) }",
    ),
    Case(
        "cast-chain",
        "nested",
        "g (bool k, float16[4] x) => (float16[4] y) { t = Cast <to = 1> (x) y = If (k) <"
        "then_branch = a () => (float16[4] p) { p = Cast <to = 10> (t) },"
        "else_branch = b () => (float16[4] s) { s = Neg(x) }> }",
    ),
)

CASES: tuple[Case, ...] = (*DUPLICATES, *CASTS)
