"""Cases for what exporters write around softmax and keys: x [2, 5, 8], two heads of 4, m [2, 5] a mask of keys."""

from __future__ import annotations

import numpy as np
from contract_case import Case

IO = "g (float[2, 5, 8] x) => (float[2, 2, 5, 4] y)"
DYNAMIC = "g (float[N, S, 8] x) => (float[N, H, S, 4] y)"
MASKED = "g (float[2, 5, 8] x, bool[2, 5] m) => (float[2, 2, 5, 4] y)"
FLOATS = "g (float[2, 5, 8] x, float[2, 1, 1, 5] m) => (float[2, 2, 5, 4] y)"
NUMBERS = (
    "int64[4] hs = {0, 0, 2, 4}, float zero = {0}, float one = {1}, float sc = {0.5}, float low = {-3.4028235e38}, "
    "float big = {-1e38}, int64[1] last = {-1}, int64[2] keys = {1, 2}, int64[1] batch = {0}, int64[1] two = {2}, "
    "int64 i0 = {0}, int64 i1 = {1}, int64 i5 = {5}, "
    "int64[2] lead = {0, 1}, int64[1] a3 = {3}, int64[1] z = {0}, int64[1] o = {1}"
)
INF = {"inf": np.asarray(-np.inf, np.float32)}
TRUE = {"true": np.ones((1, 1, 5, 1), np.bool_), **INF}
LOWER = np.tril(np.ones((1, 1, 5, 5), np.bool_))
CAUSAL = {"causal": np.where(LOWER, 0, -np.inf).astype(np.float32)}

HEADS = "h = Reshape(x, hs) t = Transpose <perm = [0, 2, 1, 3]> (h) u = Transpose <perm = [0, 2, 3, 1]> (h)"
SCORES = f"{HEADS} s0 = MatMul(t, u) s1 = Mul(s0, sc)"
SOFTMAX = "p = Softmax <axis = -1> (s2)"
GUARD = "n = IsNaN(p) q = Where(n, zero, p) y = MatMul(q, t)"
ALL = (
    "e = Equal(s2, inf) e1 = Cast <to = 7> (e) e2 = ReduceMin <axes = [-1]> (e1) n = Cast <to = 9> (e2) "
    "q = Where(n, zero, p) y = MatMul(q, t)"
)
ADDED = f"s2 = Add(s1, b) {SOFTMAX} {GUARD}"
KEYS = "k0 = Unsqueeze(m, keys)"
RANGES = (
    "sh = Shape(x) s = Gather(sh, i1) r = Range(i0, s, i1) c0 = Unsqueeze(r, lead) "
    "kr = Unsqueeze(c0, z) qr = Unsqueeze(c0, a3)"
)


def guard(label: str, body: str, **options: object) -> Case:
    return _case("nan-guard", label, body, {"tolerance": 1e-6, **options})


def refused(label: str, body: str, **options: object) -> Case:
    return guard(label, body, **{"changes": 0, "refusals": 1, **options})


def rows(label: str, body: str, **options: object) -> Case:
    return _case("masked-rows", label, body, {"io": MASKED, "tolerance": 1e-6, **options})


def _case(recipe: str, label: str, body: str, options: dict[str, object]) -> Case:
    options = {"io": IO, "values": {}, **options}
    values = {**INF, **dict(options.pop("values"))}  # type: ignore[call-overload]
    options["values"] = {name: array for name, array in values.items() if name in body}
    used = ", ".join(part for part in _split(NUMBERS) if f" {part.split()[1]}" in body or f"({part.split()[1]}" in body)
    return Case(recipe, label, f"{options.pop('io')} <{used}> {{ {body} }}", **options)  # type: ignore[arg-type]


def _split(text: str) -> list[str]:
    return [f"{part}}}".strip(" ,") for part in text.split("}") if part.strip()]


def shifted(label: str, body: str, **options: object) -> Case:
    return _case("shifted-scores", label, f"{SCORES} {body} y = MatMul(p, t)", {"tolerance": 1e-6, **options})


SHAPES = (
    "sh = Shape(k) d = Slice(sh, last, most) s = Slice(sh, but, last) l = Slice(sh, least, but) "
    "m1 = Concat <axis = 0> (last, s, d) r = Reshape(k, m1) f = Transpose <perm = [0, 2, 1]> (r) "
    "m2 = Concat <axis = 0> (l, d, s) y = Reshape(f, m2)"
)
ENDS = (
    "int64[1] last = {-1}, int64[1] but = {-2}, int64[1] most = {9223372036854775807}, "
    "int64[1] least = {-9223372036854775807}"
)


def merged(label: str, body: str, io: str, constants: str, **options: object) -> Case:
    return Case("merged-transpose", label, f"{io} <{constants}> {{ {body} }}", **options)  # type: ignore[arg-type]


def constant_shapes(first: str, second: str, perm: str = "0, 2, 1") -> tuple[str, str]:
    body = f"k = Relu(x) r = Reshape(k, m1) f = Transpose <perm = [{perm}]> (r) y = Reshape(f, m2)"
    return body, ", ".join(
        f"int64[{text.count(',') + 1}] {name} = {{{text}}}" for name, text in (("m1", first), ("m2", second))
    )


def turned(label: str, first: str, second: str, io: str, perm: str = "0, 2, 1", **options: object) -> Case:
    body, constants = constant_shapes(first, second, perm)
    return merged(label, body, io, constants, **options)


def settled(label: str, body: str, **options: object) -> Case:
    return _case("settled-selection", label, f"{SCORES} {body} p = Softmax <axis = -1> (s2) y = MatMul(p, t)", options)


POSITIONS = "r = Range(i0, i5, i1) c0 = Unsqueeze(r, lead) kr = Unsqueeze(c0, a3)"
EXPANDED = "sh = Shape(s0) w = Expand(true, sh) b = Where(w, zero, inf)"

K = "g (float[2, 3, 5, 4] x) => (float[2, 3, 4, 5] y)"
KD = "g (float[N, 3, S, 4] x) => (float[N, 3, 4, S] y)"

LARGEST = "l = ReduceMax <axes = [-1]> (s1) d = Sub(s1, l)"

CASES: tuple[Case, ...] = (
    shifted("largest", f"{LARGEST} p = Softmax <axis = -1> (d)"),
    shifted("scaled", f"{LARGEST} s2 = Mul(sc, d) p = Softmax <axis = 3> (s2)"),
    shifted(
        "without-its-axis",
        "l0 = ReduceMax <axes = [3], keepdims = 0> (s1) l = Unsqueeze(l0, last) d = Sub(s1, l) s2 = Div(d, sc) "
        "p = Softmax <axis = -1> (s2)",
    ),
    shifted("scaled-by-another", f"{LARGEST} s2 = Mul(d, s0) p = Softmax <axis = -1> (s2)", changes=0),
    shifted("under-a-number", f"{LARGEST} s2 = Div(sc, d) p = Softmax <axis = -1> (s2)", changes=0),
    shifted("used-twice", f"{LARGEST} p0 = Softmax <axis = -1> (d) p = Add(p0, d)", changes=0),
    shifted("other-axis", f"{LARGEST} p = Softmax <axis = 2> (d)", changes=0),
    shifted(
        "largest-of-another", "l = ReduceMax <axes = [-1]> (s0) d = Sub(s1, l) p = Softmax <axis = -1> (d)", changes=0
    ),
    shifted("over-rows", "l = ReduceMax <axes = [2]> (s1) d = Sub(s1, l) p = Softmax <axis = -1> (d)", changes=0),
    guard("no-mask", f"{SCORES} s2 = Mul(s1, sc) {SOFTMAX} {GUARD}"),
    guard("finite-mask", f"{SCORES} {KEYS} b = Where(k0, zero, low) {ADDED}", io=MASKED),
    guard(
        "one-minus-mask",
        f"{SCORES} {KEYS} k1 = Cast <to = 1> (k0) k2 = Sub(one, k1) b = Mul(k2, low) {ADDED}",
        io=MASKED,
    ),
    guard(
        "expanded-true", f"{SCORES} sh = Shape(s0) w = Expand(true, sh) b = Where(w, zero, inf) {ADDED}", values=TRUE
    ),
    guard("causal", f"{SCORES} s2 = Add(causal, s1) {SOFTMAX} {GUARD}", values=CAUSAL),
    guard(
        "causal-and-finite",
        f"{SCORES} {KEYS} b = Where(k0, zero, big) s3 = Add(s1, b) s2 = Add(causal, s3) {SOFTMAX} {GUARD}",
        io=MASKED,
        values=CAUSAL,
    ),
    guard("range", f"{SCORES} {RANGES} a = LessOrEqual(kr, qr) b = Where(a, zero, inf) {ADDED}"),
    guard("range-dynamic", f"{SCORES} {RANGES} a = Less(qr, kr) b = Where(a, inf, zero) {ADDED}", io=DYNAMIC),
    guard(
        "range-not",
        f"{SCORES} {RANGES} a0 = GreaterOrEqual(qr, kr) a = Not(a0) s2 = Where(a, inf, s1) {SOFTMAX} {GUARD}",
    ),
    guard(
        "not-nan",
        f"{SCORES} s2 = Mul(s1, sc) {SOFTMAX} n0 = IsNaN(p) n = Not(n0) q = Where(n, p, zero) y = MatMul(q, t)",
    ),
    guard("all-masked", f"{SCORES} s2 = Add(causal, s1) {SOFTMAX} {ALL}", values=CAUSAL),
    guard("table", f"{SCORES} b = Gather(bias, i0) {ADDED}", values={"bias": np.ones((3, 1, 5, 5), np.float32)}),
    refused("mask-of-infinity", f"{SCORES} {KEYS} b = Where(k0, zero, inf) {ADDED}", io=MASKED),
    refused("mask-is-input", f"{SCORES} {ADDED.replace('b)', 'm)')}", io=FLOATS),
    refused(
        "causal-and-keys",
        f"{SCORES} {KEYS} {RANGES} a0 = LessOrEqual(kr, qr) a = And(a0, k0) b = Where(a, zero, inf) {ADDED}",
        io=MASKED,
    ),
    refused("two-masks-overflow", f"{SCORES} {KEYS} b0 = Where(k0, zero, low) b = Add(b0, low) {ADDED}", io=MASKED),
    refused("strictly-below", f"{SCORES} {RANGES} a = Less(kr, qr) b = Where(a, zero, inf) {ADDED}"),
    refused("row-masked", f"{SCORES} b = Where(rows, zero, inf) {ADDED}", values={"rows": LOWER & (np.arange(5) > 0)}),
    refused("times-zero", f"{SCORES} s3 = Add(causal, s1) s2 = Mul(s3, zero) {SOFTMAX} {GUARD}", values=CAUSAL),
    refused(
        "keys-turned",
        f"{SCORES} c = Transpose <perm = [0, 1, 3, 2]> (causal) b = Add(c, causal) {ADDED}",
        values={"causal": CAUSAL["causal"][:, :, ::-1, :].copy()},
    ),
    refused("logarithm", f"{SCORES} {KEYS} k1 = Cast <to = 1> (k0) b = Log(k1) {ADDED}", io=MASKED),
    guard(
        "other-number",
        f"{SCORES} s2 = Mul(s1, sc) {SOFTMAX} n = IsNaN(p) q = Where(n, one, p) y = MatMul(q, t)",
        changes=0,
    ),
    guard("other-axis", f"{SCORES} s2 = Mul(s1, sc) {SOFTMAX} {GUARD}".replace("axis = -1", "axis = 2"), changes=0),
    guard("other-nan", f"{SCORES} s2 = Mul(s1, sc) {SOFTMAX} {GUARD}".replace("IsNaN(p)", "IsNaN(s1)"), changes=0),
    rows("keys", f"{SCORES} {KEYS} b = Where(k0, zero, inf) {ADDED}"),
    rows("keys-opset-20", f"{SCORES} {KEYS} b = Where(k0, zero, inf) {ADDED}", opset=20),
    rows("keys-dynamic", f"{SCORES} {KEYS} b = Where(k0, zero, inf) {ADDED}", io=MASKED.replace("2, 5", "N, S")),
    rows("float-mask", f"{SCORES} {ADDED.replace('b)', 'm)')}", io=FLOATS),
    rows(
        "all-masked", f"{SCORES} {KEYS} b = Where(k0, zero, inf) s2 = Add(s1, b) {SOFTMAX} {ALL}", changes=0, refusals=1
    ),
    rows(
        "causal-and-keys",
        f"{SCORES} {KEYS} {RANGES} a0 = LessOrEqual(kr, qr) a = And(a0, k0) b = Where(a, zero, inf) {ADDED}",
    ),
    rows(
        "finite-beside",
        f"{SCORES} {KEYS} b = Where(k0, zero, inf) s3 = Add(b, s1) s2 = Add(s3, near) {SOFTMAX} {GUARD}",
        values={"near": np.ones((5, 5), np.float32)},
    ),
    rows(
        "negative-mask",  # +inf where it masks: rows with one such key are 0 in the original, and would be NaN
        f"{SCORES} {KEYS} b = Where(k0, zero, inf) m0 = Mul(minus, b) s2 = Add(m0, s1) {SOFTMAX} {GUARD}",
        values={"minus": np.asarray(-1.5, np.float32)},
        changes=0,
        refusals=1,
    ),
    rows(
        "halved-mask",
        f"{SCORES} {KEYS} b = Where(k0, zero, inf) m0 = Mul(b, half) s2 = Add(m0, s1) {SOFTMAX} {GUARD}",
        values={"half": np.asarray(0.5, np.float32)},
    ),
    rows(
        "causal-beside",
        f"{SCORES} {KEYS} b = Where(k0, zero, inf) s3 = Add(b, s1) s2 = Add(s3, causal) {SOFTMAX} {GUARD}",
        values=CAUSAL,
        changes=0,
        refusals=1,
    ),
    rows(
        "weights-used",
        f"{SCORES} {KEYS} b = Where(k0, zero, inf) s2 = Add(s1, b) {SOFTMAX} {GUARD}".replace(
            "y = MatMul(q, t)", "w2 = MatMul(q, q) y = MatMul(w2, t)"
        ),
        changes=0,
        refusals=1,
    ),
    rows("selected", f"{SCORES} {KEYS} s2 = Where(k0, s1, inf) {SOFTMAX} {GUARD}", changes=0, refusals=1),
    rows("proven", f"{SCORES} {KEYS} b = Where(k0, zero, low) {ADDED}", changes=0),
    settled("expanded", f"{EXPANDED} s2 = Add(s1, b)", values=TRUE),
    settled("mask-first", f"{EXPANDED} s2 = Add(b, s1)", values=TRUE),
    settled(
        "scores", "w = Expand(true, four) s2 = Where(w, s1, inf)", values={**TRUE, "four": np.asarray([2, 2, 5, 5])}
    ),
    settled("positions", f"{POSITIONS} w = GreaterOrEqual(kr, i0) b = Where(w, zero, inf) s2 = Add(s1, b)"),
    settled("never", f"{POSITIONS} w = Less(kr, i0) b = Where(w, inf, zero) s2 = Sub(s1, b)"),
    settled(
        "and",
        f"{POSITIONS} v = GreaterOrEqual(kr, i0) w = And(true, v) b = Where(w, zero, inf) s2 = Add(s1, b)",
        values=TRUE,
    ),
    settled("twice", f"{EXPANDED} b2 = Where(w, one, inf) b3 = Add(b, b2) s2 = Add(s1, b3)", values=TRUE, changes=0),
    settled("with-itself", f"{EXPANDED} b3 = Add(b, b) s2 = Add(s1, b3)", values=TRUE, changes=0),
    settled(
        "makes-it-larger",
        "sh = Shape(s0) w = Expand(true, sh) b = Where(w, sc, inf) s3 = Mul(b, zero) s2 = Add(s1, s3)",
        values=TRUE,
        changes=0,
    ),
    settled(
        "not-everywhere", f"{POSITIONS} w = GreaterOrEqual(kr, i1) b = Where(w, zero, low) s2 = Add(s1, b)", changes=0
    ),
    settled("an-input", f"{KEYS} b = Where(k0, zero, low) s2 = Add(s1, b)", io=MASKED, changes=0),
    settled("some-false", "b = Where(rows, zero, inf) s2 = Add(s1, b)", values={"rows": LOWER}, changes=0),
    *(
        Case(
            "no-op",
            label,
            f"g (float[N, 3] x) => ({out} y) <float[{size}] c = {{{number}}}> {{ a = Relu(x) b = {op} y = Neg(b) }}",
            changes=changes,
        )
        for label, op, number, size, out, changes in (
            ("add-zeros", "Add(a, c)", "0, 0, 0", "3", "float[N, 3]", 1),
            ("zeros-add", "Add(c, a)", "0", "1", "float[N, 3]", 1),
            ("sub-zero", "Sub(a, c)", "0", "1", "float[N, 3]", 1),
            ("mul-one", "Mul(c, a)", "1, 1, 1", "1, 3", "float[N, 3]", 1),
            ("div-one", "Div(a, c)", "1", "1", "float[N, 3]", 1),
            ("zero-minus", "Sub(c, a)", "0", "1", "float[N, 3]", 0),
            ("one-over", "Div(c, a)", "1", "1", "float[N, 3]", 0),
            ("mul-zero", "Mul(a, c)", "0", "1", "float[N, 3]", 0),
            ("add-one-zero", "Add(a, c)", "0, 0, 1", "3", "float[N, 3]", 0),
            ("add-larger", "Add(a, c)", "0, 0, 0", "1, 1, 3", "float[1, N, 3]", 0),
        )
    ),
    Case(
        "constant-expression",
        "gather-elements",
        "g (float[N, 2] x) => (float[N, 2] y) <int64[2, 3] d = {1, 2, 3, 4, 5, 6}, int64[1, 2] i = {-1, 0}> "
        "{ a = GatherElements <axis = 1> (d, i) b = Cast <to = 1> (a) y = Mul(x, b) }",
        changes=2,
    ),
    Case(
        "constant-expression",
        "gather-rows",
        "g (float[N, 3] x) => (float[N, 3] y) <float[2, 3] d = {1, 2, 3, 4, 5, 6}, int64[1, 1] i = {-1}> "
        "{ a = GatherND(d, i) y = Mul(x, a) }",
    ),
    Case(
        "constant-expression",
        "gather-elements-by-pairs",
        "g (float[N, 2] x) => (float[N, 2] y) <float[2, 3] d = {1, 2, 3, 4, 5, 6}, int64[2, 2] i = {-1, 0, 1, 2}> "
        "{ a = GatherND(d, i) y = Mul(x, a) }",
    ),
    Case(
        "constant-expression",
        "gather-a-table-of-positions",
        "g (float[N, 4096, 72] x) => (float[N, 4096, 72] y) { a = GatherND(d, i) y = Add(x, a) }",
        {"d": (60, 72)},
        {"i": np.arange(4096, dtype=np.int64)[:, None] * 7 % 60},
    ),
    merged("computed", f"k = Relu(x) {SHAPES}", K, ENDS),
    merged("computed-dynamic", f"k = Relu(x) {SHAPES}", KD, ENDS),
    turned("constant", "-1, 5, 4", "2, 3, 4, 5", K),
    turned("one-axis", "-1, 5, 4", "2, 4, 5", "g (float[2, 5, 4] x) => (float[2, 4, 5] y)"),
    turned(
        "three-trailing",
        "6, 5, 4, 2",
        "2, 3, 2, 5, 4",
        "g (float[2, 3, 5, 4, 2] x) => (float[2, 3, 2, 5, 4] y)",
        "0, 3, 1, 2",
    ),
    turned("other-split", "-1, 5, 4", "3, 2, 4, 5", "g (float[2, 3, 5, 4] x) => (float[3, 2, 4, 5] y)", changes=0),
    turned("other-merge", "-1, 4, 5", "2, 3, 5, 4", "g (float[2, 3, 5, 4] x) => (float[2, 3, 5, 4] y)", changes=0),
    turned(
        "merged-moves",
        "6, 5, 4",
        "5, 2, 3, 4",
        "g (float[2, 3, 5, 4] x) => (float[5, 2, 3, 4] y)",
        "1, 0, 2",
        changes=0,
    ),
    merged(
        "used-elsewhere",
        "k = Relu(x) r = Reshape(k, m1) f = Transpose <perm = [0, 2, 1]> (r) y = Reshape(f, m2) z = Neg(f)",
        "g (float[2, 3, 5, 4] x) => (float[2, 3, 4, 5] y, float[6, 4, 5] z)",
        "int64[3] m1 = {-1, 5, 4}, int64[4] m2 = {2, 3, 4, 5}",
        changes=0,
    ),
)
