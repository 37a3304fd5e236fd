"""Cases for the recipes around convolutions: splits, branches, chains, transposed convolutions."""

from __future__ import annotations

import numpy as np
from cases_conv import BN, Y6, Shapes, W, X, ints
from contract_case import Case

SILU = "i = Sigmoid(c) d = Mul(c, i)"
SPLIT = {"w": (6, 4, 1, 1), "a": (6,)}
Y8 = f"{X[:-1]}y"
SAME = "pads = [1, 1, 1, 1]"


def case(recipe: str, label: str, graph: str, weights: Shapes, **options: object) -> Case:
    return Case(recipe, label, graph, weights, tolerance=1e-5, **options)  # type: ignore[arg-type]


def split(label: str, graph: str, weights: Shapes | None = None, **options: object) -> Case:
    return case("split-after-conv", label, graph, {**SPLIT, **(weights or {})}, **options)


C2F = (
    "o, p = Split <axis = 1> (d, k) q = Conv <pads = [1, 1, 1, 1]> (p, u) r = Add(p, q) y = Concat <axis = 1> (o, p, r)"
)
HALVES = {"k": ints(3, 3)}

SPLITS: tuple[Case, ...] = (
    split(
        "c2f",
        f"g ({X}) => (float[N, 9, 8, 8] y) {{ c = Conv(x, w, a) {SILU} {C2F} }}",
        {"u": (3, 3, 3, 3)},
        values=HALVES,
    ),
    split(
        "unequal-three-one-unused-outputs",
        f"g ({X}) => (float[N, 1, 8, 8] y, float[N, 3, 8, 8] z) "
        "{ c = Conv <group = 1> (x, w) e = Mul(c, s) f = PRelu(e, s) h = Clip(f, n) "
        "y, q, z = Split <axis = -3> (h, k) }",
        {"s": (6, 1, 1)},
        values={"k": ints(1, 2, 3), "n": np.array(-1, np.float32)},
    ),
    split(
        "slices",
        f"g ({X}) => (float[N, 2, 8, 8] y, float[N, 3, 8, 8] z) "
        "{ c = Conv(x, w, a) d = Relu(c) y = Slice(d, l, m, o) q = Slice(d, m, e, o) z = Neg(q) }",
        values={"l": ints(0), "m": ints(2), "e": ints(5), "o": ints(1)},
    ),
    split(
        "slice-backwards",
        f"g ({X}) => (float[N, 6, 8, 8] y) {{ c = Conv(x, w, a) y = Slice(c, l, m, o, t) }}",
        values={"l": ints(5), "m": ints(-9), "o": ints(1), "t": ints(-1)},
        changes=0,
    ),
    split(
        "overlap",
        f"g ({X}) => (float[N, 4, 8, 8] y) "
        "{ c = Conv(x, w, a) p = Slice(c, l, m, o) q = Slice(c, t, e, o) y = Add(p, q) }",
        values={"l": ints(0), "m": ints(4), "t": ints(2), "e": ints(6), "o": ints(1)},
        changes=0,
        refusals=1,
    ),
    split(
        "split-used-elsewhere",
        f"g ({X}) => (float[N, 3, 8, 8] y, float[N, 6, 8, 8] z) "
        "{ c = Conv(x, w, a) p, q = Split <axis = 1> (c, k) y = Add(p, q) z = Neg(c) }",
        values=HALVES,
        changes=0,
        refusals=1,
    ),
    split(
        "conv-used-elsewhere",
        f"g ({X}) => (float[N, 3, 8, 8] y, float[N, 6, 8, 8] z) "
        f"{{ c = Conv(x, w, a) {SILU} p, q = Split <axis = 1> (d, k) y = Add(p, q) z = Neg(c) }}",
        values=HALVES,
        changes=0,
        refusals=1,
    ),
    split(
        "between-is-output",
        f"g ({X}) => (float[N, 3, 8, 8] y, float[N, 6, 8, 8] c) "
        f"{{ c = Conv(x, w, a) {SILU} p, q = Split <axis = 1> (d, k) y = Add(p, q) }}",
        values=HALVES,
        changes=0,
        refusals=1,
    ),
    split(
        "groups",
        f"g ({X}) => (float[N, 3, 8, 8] y) "
        "{ c = Conv <group = 2> (x, u) p, q = Split <axis = 1> (c, k) y = Add(p, q) }",
        {"u": (6, 2, 1, 1)},
        values=HALVES,
        changes=0,
        refusals=1,
    ),
    split(
        "split-computed-weight",
        f"g ({X}, float[6, 4, 1, 1] u) => (float[N, 3, 8, 8] y) "
        "{ c = Conv(x, u) p, q = Split <axis = 1> (c, k) y = Add(p, q) }",
        values=HALVES,
        changes=0,
        refusals=1,
    ),
    split(
        "two-convs",
        f"g ({X}) => (float[N, 3, 8, 8] y) "
        "{ c = Conv(x, w) d = Conv(x, w) e = Add(c, d) p, q = Split <axis = 1> (e, k) y = Add(p, q) }",
        values=HALVES,
        changes=0,
        refusals=1,
    ),
    split(
        "other-axis",
        f"g ({X}) => (float[N, 6, 4, 8] y) {{ c = Conv(x, w) p, q = Split <axis = 2> (c) y = Add(p, q) }}",
        changes=0,
    ),
    split(
        "not-behind-conv",
        "g (float[N, 6, 8, 8] x) => (float[N, 3, 8, 8] y) { p, q = Split <axis = 1> (x, k) y = Add(p, q) }",
        values=HALVES,
        changes=0,
    ),
    split(
        "nested",
        f"g (bool b, {X}) => (float[N, 3, 8, 8] y) {{ c = Conv(x, w) y = If (b) <"
        "then_branch = t () => (float[N, 3, 8, 8] p) { d = Conv(x, w) p, q = Split <axis = 1> (d, k) },"
        "else_branch = e () => (float[N, 3, 8, 8] r) { r, s = Split <axis = 1> (c, k) }> }",
        values=HALVES,
        refusals=1,
    ),
)


def rep(label: str, graph: str, weights: Shapes | None = None, **options: object) -> Case:
    return case("repvgg-branches", label, graph, {**W, "u": (4, 4, 1, 1), "e": (4,), **(weights or {})}, **options)


NORM = "n = BatchNormalization(x, g, b, m, v)"
THREE = f"c = Conv <{SAME}> (x, w, a) d = Conv(x, u, e) {NORM}"

BRANCHES: tuple[Case, ...] = (
    rep("block", f"g ({X}) => ({Y8}) {{ {THREE} f = Add(c, d) h = Add(f, n) y = Relu(h) }}", BN),
    rep("other-order-output", f"g ({X}) => ({Y8}) {{ {THREE} f = Add(n, d) y = Add(f, c) }}", BN),
    rep("sum", f"g ({X}) => ({Y8}) {{ {THREE} y = Sum(n, d, c, x) }}", BN),
    rep(
        "identity-and-another-summand",
        f"g ({X}, {X[:-1]}z) => ({Y8}) "
        f"{{ c = Conv <{SAME}> (x, w, a) d = Conv(x, u) f = Add(c, x) h = Add(f, z) i = Add(d, h) y = Relu(i) }}",
    ),
    rep(
        "depthwise-stride",
        f"g ({X}) => (float[N, 4, 4, 4] y) {{ c = Conv <group = 4, strides = [2, 2], {SAME}> (x, w, a) "
        "d = Conv <group = 4, strides = [2, 2]> (x, u) y = Add(c, d) }",
        {"w": (4, 1, 3, 3), "u": (4, 1, 1, 1)},
    ),
    rep(
        "grouped-identity",
        f"g ({X}) => ({Y8}) {{ c = Conv <group = 2, {SAME}> (x, w, a) {NORM} y = Add(c, n) }}",
        {"w": (4, 2, 3, 3), **BN},
    ),
    rep(
        "asymmetric",
        f"g ({X}) => ({Y8}) {{ c = Conv <{SAME}> (x, w, a) d = Conv <pads = [0, 1, 0, 1]> (x, u) "
        "e2 = Conv <pads = [1, 0, 1, 0]> (x, s) f = Add(c, d) y = Add(f, e2) }",
        {"u": (4, 4, 1, 3), "s": (4, 4, 3, 1)},
    ),
    rep(
        "more-padding-than-kernel",
        f"g ({X}) => (float[N, 4, 12, 12] y) "
        "{ c = Conv <pads = [2, 2, 2, 2]> (x, u) d = Conv <pads = [2, 2, 2, 2]> (x, u, e) y = Add(c, d) }",
    ),
    rep("shared", f"g ({X}) => ({Y8}) {{ c = Conv(x, u, a) d = Conv(x, u, e) y = Add(c, d) }}"),
    rep("residual-only", f"g ({X}) => ({Y8}) {{ c = Conv <{SAME}> (x, w, a) y = Add(c, x) }}", changes=0),
    rep(
        "two-inputs",
        f"g ({X}, {X[:-1]}z) => ({Y8}) {{ c = Conv <{SAME}> (x, w, a) d = Conv(z, u) y = Add(c, d) }}",
        changes=0,
    ),
    rep(
        "rows-and-columns",
        f"g ({X}) => ({Y8}) {{ c = Conv <pads = [0, 1, 0, 1]> (x, u) "
        "d = Conv <pads = [1, 0, 1, 0]> (x, s) y = Add(c, d) }",
        {"u": (4, 4, 1, 3), "s": (4, 4, 3, 1)},
        changes=0,
        refusals=1,
    ),
    rep(
        "dilated",
        f"g ({X}) => ({Y8}) "
        "{ c = Conv <dilations = [2, 2], pads = [2, 2, 2, 2]> (x, w) d = Conv(x, u) y = Add(c, d) }",
        changes=0,
        refusals=1,
    ),
    rep(
        "branch-used-elsewhere",
        f"g ({X}) => ({Y8}, {X[:-1]}z) {{ c = Conv <{SAME}> (x, w) d = Conv(x, u) y = Add(c, d) z = Neg(d) }}",
        changes=0,
        refusals=1,
    ),
    rep(
        "branch-is-output",
        f"g ({X}) => ({Y8}, {X[:-1]}d) {{ c = Conv <{SAME}> (x, w) d = Conv(x, u) y = Add(c, d) }}",
        changes=0,
        refusals=1,
    ),
    rep(
        "broadcast",
        "g (float[N, 4, 1, 1] x) => (float[N, 4, 3, 3] y) "
        "{ c = Conv <pads = [2, 2, 2, 2]> (x, w) d = Conv(x, u) y = Add(c, d) }",
        changes=0,
        refusals=1,
    ),
    rep(
        "computed-branch",
        f"g ({X}, float[4, 4, 1, 1] z) => ({Y8}) {{ c = Conv <{SAME}> (x, w) d = Conv(x, z) y = Add(c, d) }}",
        changes=0,
        refusals=1,
    ),
)

CHAIN = {"w": (5, 4, 1, 1), "a": (5,), "u": (4, 5, 3, 3), "e": (4,)}


def chain(label: str, graph: str, weights: Shapes | None = None, **options: object) -> Case:
    return case("conv-1x1-chain", label, graph, {**CHAIN, **(weights or {})}, **options)


CHAINS: tuple[Case, ...] = (
    chain("pointwise-first", f"g ({X}) => ({Y6}) {{ c = Conv(x, w, a) d = Conv(c, u, e) y = Relu(d) }}"),
    chain("no-bias-padded", f"g ({X}) => ({Y8}) {{ c = Conv(x, w) y = Conv <{SAME}> (c, u) }}"),
    chain(
        "pointwise-second-strided",
        f"g ({X}) => (float[N, 4, 2, 2] y) "
        f"{{ c = Conv <strides = [2, 2], {SAME}> (x, w, a) y = Conv <strides = [2, 2]> (c, u, e) }}",
        {"w": (5, 4, 3, 3), "u": (4, 5, 1, 1)},
    ),
    chain(
        "three",
        f"g ({X}) => ({Y8}) {{ c = Conv(x, w, a) d = Conv(c, u) y = Conv(d, s, e) }}",
        {"u": (6, 5, 1, 1), "s": (4, 6, 1, 1)},
        changes=2,
    ),
    chain(
        "padded-after-bias",
        f"g ({X}) => ({Y8}) {{ c = Conv(x, w, a) y = Conv <{SAME}> (c, u, e) }}",
        changes=0,
        refusals=1,
    ),
    chain(
        "bottleneck",
        f"g ({X}) => (float[N, 9, 8, 8] y) {{ c = Conv(x, w, a) y = Conv(c, u) }}",
        {"w": (1, 4, 1, 1), "a": (1,), "u": (9, 1, 1, 1)},
        changes=0,
        refusals=1,
    ),
    chain(
        "separable",
        f"g ({X}) => (float[N, 5, 6, 6] y) {{ c = Conv <group = 4> (x, u) y = Conv(c, w, a) }}",
        {"u": (4, 1, 3, 3)},
        changes=0,
    ),
    chain(
        "two-wide-kernels",
        f"g ({X}) => (float[N, 4, 4, 4] y) {{ c = Conv(x, s) y = Conv(c, u) }}",
        {"s": (5, 4, 3, 3)},
        changes=0,
    ),
    chain(
        "between-used",
        f"g ({X}) => ({Y6}, float[N, 5, 8, 8] z) {{ c = Conv(x, w, a) y = Conv(c, u, e) z = Relu(c) }}",
        changes=0,
        refusals=1,
    ),
)

CASES: tuple[Case, ...] = (*SPLITS, *BRANCHES, *CHAINS)
