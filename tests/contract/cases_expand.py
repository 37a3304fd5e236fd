"""Cases for the recipe that leaves out expands that their readers make anyway."""

from __future__ import annotations

import numpy as np
from contract_case import Case

IO = "g (float[N, S, 8] x) => (float[N, S, 8] y)"
CONSTANTS = "int64 i0 = {0}, int64[1] a = {0}, int64[1] one = {1}, int64[1] d8 = {8}, int64[1] less = {-1}"
BATCH = "s = Shape(x) d0 = Gather(s, i0) n = Unsqueeze(d0, a)"
WIDE = "p = Shape <end = 1> (x) h = Concat <axis = 0> (p, six, d8) e = Expand(w, h)"
FEW = "n = Shape <end = 1> (x) h = Concat <axis = 0> (n, one, d8) e = Expand(w, h)"
ROWS = f"{BATCH} h = Concat <axis = 0> (n, one, d8) e = Expand(w, h)"


def case(label: str, body: str, *, io: str = IO, constants: str = "", **options: object) -> Case:
    extra = f", {constants}" if constants else ""
    arguments = {"weights": {"w": (1, 1, 8)}, **options}
    return Case("expanded-operand", label, f"{io} <{CONSTANTS}{extra}> {{ {body} }}", **arguments)  # type: ignore[arg-type]


CASES: tuple[Case, ...] = (
    case("added", f"{ROWS} y = Add(e, x)"),
    case(
        "through-operators",
        f"{ROWS} b = Greater(e, z) c = Where(b, z, m) y = Add(x, c)",
        values={"z": np.zeros((1,), np.float32), "m": np.full((1, 1, 8), -3.0, np.float32)},
    ),
    case("two-readers", f"{ROWS} p = Add(e, x) q = Mul(x, e) y = Add(p, q)"),
    case("twice-the-same", f"{ROWS} q = Mul(e, e) y = Add(q, x)"),
    case(
        "positions",
        f"{BATCH} h = Concat <axis = 0> (n, four) e = Expand(ids, h) q = Gather(table, e) y = Add(q, x)",
        io="g (float[N, 4, 8] x) => (float[N, 4, 8] y)",
        constants="int64[1] four = {4}",
        weights={"table": (9, 8)},
        values={"ids": np.array([[3, 1, 8, 0]], np.int64)},
    ),
    case("no-repetition", f"{BATCH} h = Concat <axis = 0> (n, one, one) e = Expand(x, h) y = Relu(e)"),
    case(
        "shape-in-short",
        f"{BATCH} h = Concat <axis = 0> (n, less, less) q = Equal(h, k) f = Where(q, ones, h) e = Expand(w, f) "
        "y = Concat <axis = 1> (e, x)",
        constants="int64[3] k = {-1, -1, -1}, int64[3] ones = {1, 1, 1}",
    ),
    case("asked-of-what-is-computed", "m = Mul(x, x) s = Shape(m) e = Expand(w, s) y = Concat <axis = 1> (e, x)"),
    case(
        "computed-for-its-shape",
        "r = ReduceMax <axes = [1]> (x) m = Max(r, x) p = Shape <start = 0, end = 2> (m) h = Concat <axis = 0> (p, d8) "
        "e = Expand(w, h) y = Concat <axis = 1> (e, x)",
        changes=2,  # the Shape, and the Expand whose shape is short then
    ),
    case(
        "asked-of-the-first-input",
        "p = Shape <start = 1, end = 2> (z) i = Cast <to = 1> (p) y = Mul(x, i)",
        io="g (float[N, S, 8] x, float[N, S, 8] z) => (float[N, S, 8] y)",
    ),
    case("asked-of-it", "p = Shape <start = 1, end = 2> (x) i = Cast <to = 1> (p) y = Mul(x, i)", changes=0),
    case("whole-shape-of-an-input", "s = Shape(x) e = Expand(w, s) y = Concat <axis = 1> (e, x)", changes=0),
    case(
        "shape-depends-on-data",
        "f = NonZero(x) p = Shape(f) i = Cast <to = 1> (p) q = ReduceSum(i) y = Mul(x, q)",
        changes=0,
    ),
    case(
        "shape-is-output",
        "m = Mul(x, x) s = Shape(m) y = Relu(m)",
        io=IO.replace("y)", "y, int64[3] s)"),
        changes=0,
    ),
    case("is-output", f"{ROWS} y = Add(e, x)", io=IO.replace("y)", "y, float[N, 1, 8] e)"), changes=1),
    case("reader-is-output", f"{ROWS} q = Neg(e) y = Add(q, x)", io=IO.replace("y)", "y, float[N, 1, 8] q)")),
    case(
        "joined",
        f"{BATCH} p = Shape <end = 1> (x) h = Concat <axis = 0> (p, one, d8) e = Expand(w, h) "
        "y = Concat <axis = 1> (e, x)",
        changes=0,
    ),
    case(
        "another-batch",
        f"{BATCH} p = Shape <end = 1> (z) h = Concat <axis = 0> (p, one, d8) e = Expand(w, h) y = Add(e, x)",
        io="g (float[N, S, 8] x, float[M, S, 8] z) => (float[A, B, 8] y)",
        changes=0,
    ),
    case(
        "multiplied-by-the-batch",
        f"{BATCH} p = Shape <end = 1> (x) h = Concat <axis = 0> (p, one, d8) e = Expand(w, h) t = Transpose "
        "<perm = [0, 2, 1]> (x) y = MatMul(e, t)",
        io="g (float[N, S, 8] x) => (float[N, 1, S] y)",
        tolerance=1e-5,
    ),
    case(
        "positions-to-heads",
        f"{WIDE} m = MatMul(e, k) r = Reshape(m, v) q = Softmax <axis = 3> (r) t = Transpose <perm = [0, 2, 3, 1]> (q) "
        "g = Reshape(x, v) u = Transpose <perm = [0, 2, 1, 3]> (g) y = MatMul(u, t)",
        io="g (float[N, 6, 8] x) => (float[N, 2, 6, 6] y)",
        constants="int64[1] six = {6}, int64[4] v = {0, 6, 2, 4}",
        weights={"w": (1, 6, 8), "k": (8, 8)},
        tolerance=1e-5,
    ),
    case(
        "keys-shared-by-heads",
        "e = Expand(w, h) m = MatMul(x, e) r = Mul(m, half) q = Softmax <axis = -1> (r) y = MatMul(q, x)",
        io="g (float[N, 3, 6, 6] x) => (float[N, 3, 6, 6] y)",
        constants="int64[4] h = {1, 3, 6, 6}, float half = {0.5}",
        weights={"w": (1, 1, 6, 6)},
        changes=0,
    ),
    case(
        "values-shared-by-heads",
        "e = Expand(w, h) m = MatMul(x, x) q = Softmax <axis = -1> (m) y = MatMul(q, e)",
        io="g (float[N, 3, 6, 6] x) => (float[N, 3, 6, 6] y)",
        constants="int64[4] h = {1, 3, 6, 6}",
        weights={"w": (1, 1, 6, 6)},
        changes=0,
    ),
    case(
        "summed-over",
        f"{WIDE} t = Transpose <perm = [1, 2, 0]> (e) y = MatMul(t, x)",
        io="g (float[N, 8] x) => (float[6, 8, 8] y)",
        constants="int64[1] six = {6}",
        weights={"w": (1, 6, 8)},
        changes=0,
    ),
    case(
        "reshaped-away",
        f"{WIDE} r = Reshape(e, v) f = Reshape(x, v) y = Add(r, f)",
        io="g (float[N, 6, 8] x) => (float[A, 8] y)",
        constants="int64[1] six = {6}, int64[2] v = {-1, 8}",
        weights={"w": (1, 6, 8)},
        changes=0,
    ),
    case(
        "normalized-over",
        f"{WIDE} q = Softmax <axis = 0> (e) y = Add(q, x)",
        io="g (float[N, 6, 8] x) => (float[N, 6, 8] y)",
        constants="int64[1] six = {6}",
        weights={"w": (1, 6, 8)},
        changes=0,
    ),
    case(
        "rotary-table",
        f"{WIDE} c = Cos(e) s1 = Sin(e) j = Concat <axis = 2> (c, s1) k = Concat <axis = 2> (j, j) "
        "u = Unsqueeze(k, one) y = Mul(u, x)",
        io="g (float[N, 2, 6, 32] x) => (float[N, 2, 6, 32] y)",
        constants="int64[1] six = {6}",
        weights={"w": (1, 6, 8)},
    ),
    case(
        "joined-with-another",
        f"{WIDE} c = Cos(e) j = Concat <axis = 2> (c, x) y = Add(j, z)",
        io="g (float[N, 6, 8] x, float[N, 6, 16] z) => (float[N, 6, 16] y)",
        constants="int64[1] six = {6}",
        weights={"w": (1, 6, 8)},
        changes=0,
    ),
    case(
        "joined-along",
        f"{WIDE} j = Concat <axis = 0> (e, e) f = Concat <axis = 0> (x, x) y = Add(j, f)",
        io="g (float[N, 6, 8] x) => (float[A, 6, 8] y)",
        constants="int64[1] six = {6}",
        weights={"w": (1, 6, 8)},
        changes=0,
    ),
    case(
        "of-lower-rank",
        f"{WIDE} c = Cos(e) y = Mul(c, x)",
        io="g (float[N, 6, 8] x) => (float[N, 6, 8] y)",
        constants="int64[1] six = {6}",
        weights={"w": (6, 8)},
    ),
    case("both-operands", f"{FEW} p = Exp(e) q = Sin(e) r = Add(p, q) y = Concat <axis = 1> (r, x)", changes=0),
    case(
        "both-operands-of-a-product",
        f"{FEW} p = Exp(e) q = Transpose <perm = [0, 2, 1]> (e) r = MatMul(q, p) y = Concat <axis = 1> (r, x)",
        changes=0,
    ),
    case(
        "condition-and-choice",
        f"{FEW} b = Greater(e, z) c = Where(b, e, z) y = Concat <axis = 1> (c, x)",
        changes=0,
        values={"z": np.zeros((1,), np.float32)},
    ),
    case(
        "condition-and-choice-added",
        f"{FEW} b = Greater(e, z) c = Where(b, e, z) y = Add(c, x)",
        values={"z": np.zeros((1,), np.float32)},
    ),
    case(
        "factor-for-each-of-the-batch",
        f"{FEW} f = LayerNormalization(e, z) y = Add(f, x)",
        io="g (float[N, S, 8] x, float[N, 1, 8] z) => (float[N, S, 8] y)",
        changes=0,
    ),
)
