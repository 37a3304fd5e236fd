"""Cases for attention with heads merged into the batch: q, k, v [2, 3, 5, 4] are two entries of three heads."""

from __future__ import annotations

import numpy as np
from contract_case import Case

QKV = ", ".join(f"float[2, 3, 5, 4] {name}" for name in "qkv")
IO = f"g ({QKV}) => (float[2, 3, 5, 4] y)"
DYNAMIC = IO.replace("[2, 3, 5,", "[N, 3, S,")
SHAPES = "int64[3] m = {-1, 5, 4}, int64[4] s4 = {-1, 3, 5, 5}, int64[3] s3 = {-1, 5, 5}, int64[4] o = {-1, 3, 5, 4}"
MERGED = "q3 = Reshape(q, m) k3 = Reshape(k, m) v3 = Reshape(v, m) kt = Transpose <perm = [0, 2, 1]> (k3)"
SCORES = f"{MERGED} s0 = MatMul(q3, kt)"
BEHIND = "y3 = MatMul(p, v3) y = Reshape(y3, o)"
SPLIT = f"h = Reshape(s0, s4) w = Add(h, mask) u = Reshape(w, s3) p = Softmax <axis = 2> (u) {BEHIND}"
MASK = {"mask": np.triu(np.full((1, 1, 5, 5), -1e4, np.float32), 1)}
SLOPES = {"slopes": np.linspace(-1, 1, 15, dtype=np.float32).reshape(3, 1, 5)}
COMPUTED = (
    "n = Shape <start = 0, end = 1> (q) l = Shape <start = 2, end = 3> (q) nh = Mul(n, three) "
    "m = Concat <axis = 0> (nh, l, four) s4 = Concat <axis = 0> (n, three, l, minus) "
    "s3 = Concat <axis = 0> (nh, l, minus) o = Concat <axis = 0> (n, three, l, four) "
    "r = Concat <axis = 0> (n, one, one) b = Tile(slopes, r) "
)
NUMBERS = "int64[1] three = {3}, int64[1] four = {4}, int64[1] one = {1}, int64[1] minus = {-1}"


TURNED_IO = "g (float[5, 2, 12] x, float[5, 2, 12] z, float[5, 2, 12] w) => (float[5, 2, 12] y)"
TURNED_SHAPES = (
    "int64[3] m = {5, -1, 4}, int64[3] o = {5, -1, 12}, int64[4] s4 = {-1, 3, 5, 5}, int64[3] m1 = {-1, 1, 5}"
)
TURNED_SCORES = (
    "q3 = Reshape(x, m) qt = Transpose <perm = [1, 0, 2]> (q3) k3 = Reshape(z, m) "
    "kt = Transpose <perm = [1, 2, 0]> (k3) v3 = Reshape(w, m) vt = Transpose <perm = [1, 0, 2]> (v3) "
    "s0 = MatMul(qt, kt)"
)
TURNED_BEHIND = "y3 = MatMul(p, vt) y4 = Transpose <perm = [1, 0, 2]> (y3) y = Reshape(y4, o)"
"""As torch's MultiheadAttention that returns its weights: three heads of 4, the tokens first."""


def case(label: str, body: str, io: str = IO, numbers: str = SHAPES, **options: object) -> Case:
    options = {"values": {}, "tolerance": 1e-6, **options}
    return Case("merged-heads", label, f"{io} <{numbers}> {{ {body} }}", **options)  # type: ignore[arg-type]


def no_case(label: str, body: str, **options: object) -> Case:
    return case(label, body, **{"changes": 0, **options})  # type: ignore[arg-type]


def turned(label: str, body: str, io: str = TURNED_IO, numbers: str = TURNED_SHAPES, **options: object) -> Case:
    return case(label, body, io, numbers, **options)


CASES: tuple[Case, ...] = (
    case("throughout", f"{SCORES} p = Softmax(s0) {BEHIND}"),
    case("split-for-a-mask", f"{SCORES} {SPLIT}", values=MASK, changes=2),
    case(
        "slopes-repeated-for-the-batch",
        COMPUTED + f"{MERGED} s1 = MatMul(q3, kt) s0 = Add(b, s1) {SPLIT.replace('Add(h, mask)', 'Abs(h)')}",
        DYNAMIC,
        NUMBERS,
        values={"slopes": SLOPES["slopes"][:, :, :1]},
        changes=2,
    ),
    case(
        "alike-for-all",
        f"{SCORES} s1 = Mul(s0, slopes) p = Softmax(s1) {BEHIND}",
        values={"slopes": SLOPES["slopes"][:1]},
    ),
    case("behind-a-matrix", f"{SCORES} s1 = MatMul(s0, w) p = Softmax(s1) {BEHIND}", weights={"w": (5, 5)}),
    no_case(
        "slopes-of-every-entry",
        f"{SCORES} s1 = Add(s0, b) p = Softmax(s1) {BEHIND}",
        values={"b": np.ones((6, 1, 5), np.float32)},
    ),
    case(
        "rows-repeated",
        f"b = Tile(t, r) {SCORES} s1 = Add(s0, b) s2 = MatMul(s1, b) p = Softmax(s2) {BEHIND}",
        io=IO.replace(" 5,", " 6,"),
        numbers=SHAPES.replace("5", "6") + ", int64[2] r = {2, 1}",
        values={"t": np.linspace(-1, 1, 18, dtype=np.float32).reshape(3, 6)},
    ),
    no_case(
        "split-in-a-branch",
        f"{SCORES} p = Softmax(s0) {BEHIND} z = If(c) "
        "<then_branch = t () => (float[2, 3, 5, 4] i) { i = Reshape(y3, o) }, "
        "else_branch = e () => (float[2, 3, 5, 4] j) { j = Relu(q) }>",
        io=IO.replace(") =>", ", bool c) =>").replace("y)", "y, float[2, 3, 5, 4] z)"),
        refusals=1,
    ),
    turned("tokens-first", f"{TURNED_SCORES} p = Softmax(s0) {TURNED_BEHIND}"),
    turned(
        "tokens-first-dynamic", f"{TURNED_SCORES} p = Softmax(s0) {TURNED_BEHIND}", TURNED_IO.replace("5, 2,", "5, N,")
    ),
    turned(
        "tokens-first-masked",
        f"n = Reshape(b, m1) {TURNED_SCORES} s1 = Add(n, s0) p = Softmax(s1) {TURNED_BEHIND}",
        TURNED_IO.replace(") =>", ", float[2, 3, 1, 5] b) =>"),
    ),
    turned(
        "tokens-first-weights-used",
        f"{TURNED_SCORES} p = Softmax(s0) {TURNED_BEHIND} u = Reshape(p, s4)",
        f"{TURNED_IO[:-1]}, float[2, 3, 5, 5] u)",
    ),
    turned(
        "tokens-first-one-head",
        f"{TURNED_SCORES} p = Softmax(s0) {TURNED_BEHIND}",
        TURNED_IO.replace("12]", "4]"),
        "int64[3] m = {5, -1, 4}, int64[3] o = {5, -1, 4}",
        changes=0,
    ),
    no_case("over-heads", f"{SCORES} p = Softmax <axis = 0> (s0) {BEHIND}"),
    case("heads-moved", f"{SCORES} p0 = Transpose <perm = [1, 0, 2]> (s0) p = Reshape(p0, s3) {BEHIND}"),
    no_case(
        "other-axes-merged",
        f"{SCORES} p = Softmax(s0) y3 = MatMul(p, v3) y = Reshape(y3, o)",
        io=IO.replace("(float[2, 3, 5, 4] y)", "(float[3, 2, 5, 4] y)"),
        numbers=SHAPES.replace("{-1, 3, 5, 4}", "{3, 2, 5, 4}"),
    ),
    no_case("no-product-of-both", f"{MERGED} a = Add(q3, k3) p = Softmax(a) y0 = Mul(p, v3) y = Reshape(y0, o)"),
    no_case(
        "used-merged-too",
        f"{SCORES} p = Softmax(s0) {BEHIND} z = ReduceSum <keepdims = 0> (s0)",
        io=IO.replace("y)", "y, float z)"),
        refusals=1,
    ),
    no_case("an-output", f"{SCORES} p = Softmax(s0) {BEHIND}", io=IO.replace("y)", "y, float[6, 5, 5] p)"), refusals=1),
)
