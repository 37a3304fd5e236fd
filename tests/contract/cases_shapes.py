"""Cases for the recipe that turns computed shapes of reshapes into constants."""

from __future__ import annotations

from contract_case import Case

IO = "g (float[N, S, 8] x) => (float[N, S, 2, 4] y)"
OTHER = "g (float[N, S, 8] x, float[M, T, 8] z) => (float[A, B, 2, 4] y)"
CONSTANTS = (
    "int64 i0 = {0}, int64 i1 = {1}, int64[1] a = {0}, int64[1] t = {2}, int64[1] f = {4}, int64[1] less = {-1}, "
    "int64[1] k = {0}"
)
DIMS = "s = Shape(x) d0 = Gather(s, i0) d1 = Gather(s, i1) n = Unsqueeze(d0, a) m = Unsqueeze(d1, a)"
TARGET = "h = Concat <axis = 0> (n, m, less, f)"
LINEAR = "q = MatMul(x, w) r = Add(b, q)"
WEIGHTS = {"w": (8, 8), "b": (8,), "scale": (8,)}


def case(label: str, body: str, *, io: str = IO, constants: str = "", **options: object) -> Case:
    extra = f", {constants}" if constants else ""
    arguments = {"weights": WEIGHTS, "opset": 15, **options}
    return Case("computed-reshape", label, f"{io} <{CONSTANTS}{extra}> {{ {body} }}", **arguments)  # type: ignore[arg-type]


def attention(label: str, last: str, **options: object) -> Case:
    """Attention with a mask that may be larger than the scores, its heads joined by ``last``: o1 [?, ?, 2, 4] to o2."""
    ways = {"q": "[0, 2, 1, 3]", "k": "[0, 2, 3, 1]", "v": "[0, 2, 1, 3]"}
    made = " ".join(
        f"{a}0 = MatMul(e, w{a}) {a}1 = Add({a}0, b{a}) {a}2 = Reshape({a}1, hs) {a}3 = Transpose <perm = {way}> ({a}2)"
        for a, way in ways.items()
    )
    graph = (
        "g (float[N, S, 8] x, float[M, T, 8] z, float[P, 1, Q, R] mask) => (float[A, B, 8] y) "
        f"<{CONSTANTS}, int64[4] hs = {{0, 0, 2, 4}}, int64[1] w8 = {{8}}> "
        f"{{ e = Add(x, z) {DIMS.replace('(x)', '(e)')} {made} s0 = MatMul(q3, k3) s1 = Add(s0, mask) p = Softmax(s1) "
        f"o0 = MatMul(p, v3) o1 = Transpose <perm = [0, 2, 1, 3]> (o0) {last} o3 = MatMul(o2, wo) y = Add(o3, bo) }}"
    )
    weights = {**{f"w{a}": (8, 8) for a in "qkvo"}, **{f"b{a}": (8,) for a in "qkvo"}}
    return Case("qkv-bias", label, graph, weights, tolerance=2e-5, opset=15, **options)  # type: ignore[arg-type]


MERGED = (
    "r = Transpose <perm = [{}]> (x) s = Shape(r) n = Gather(s, a) d1 = Gather(s, one) d2 = Gather(s, t) "
    "c8 = Mul(d1, d2) h = Concat <axis = 0> ({}) y = Reshape(r, h)"
)
REST = {
    "io": "g (float[N, S, M, 8] x) => (float[A, B, 8] y)",
    "constants": "int64[1] one = {1}, int64[1] w8 = {8}",
}

CASES: tuple[Case, ...] = (
    case("of-itself", f"{DIMS} {TARGET} y = Reshape(x, h)"),
    case("of-what-it-is-made-from", f"{DIMS} {TARGET} {LINEAR} y = Reshape(r, h)"),
    case("heads-known", f"{DIMS} h = Concat <axis = 0> (n, m, t, f) {LINEAR} y = Reshape(r, h)"),
    case("slice", f"s = Shape(x) p = Slice(s, a, t) h = Concat <axis = 0> (p, less, f) {LINEAR} y = Reshape(r, h)"),
    case("shape-with-end", f"p = Shape <end = 2> (x) h = Concat <axis = 0> (p, less, f) {LINEAR} y = Reshape(r, h)"),
    case(
        "whole-shape",
        f"{DIMS} {TARGET} u = Reshape(x, h) v = Reshape(u, s) w0 = Neg(v) y = Reshape(w0, h)",
        changes=3,
    ),
    case(
        "next-block",
        f"{DIMS} {TARGET} {LINEAR} u = Reshape(r, h) v = Transpose <perm = [0, 2, 1, 3]> (u) e = Softmax(v) "
        "o = Transpose <perm = [0, 2, 1, 3]> (e) j = Concat <axis = 0> (n, m, less) z = Reshape(o, j) "
        "c = MatMul(z, w) x1 = Add(c, x) x2 = ReduceMean <axes = [-1]> (x1) x3 = Sub(x1, x2) x4 = Mul(x3, scale) "
        "y = Reshape(x4, h)",
        changes=3,
    ),
    case(
        "attention-of-two",
        f"{DIMS} {TARGET} u = Reshape(x, h) v = Transpose <perm = [0, 2, 1, 3]> (u) "
        "k0 = Transpose <perm = [0, 2, 3, 1]> (u) p = MatMul(v, k0) o0 = MatMul(p, v) "
        "o1 = Transpose <perm = [0, 2, 1, 3]> (o0) j = Concat <axis = 0> (n, m, less) o2 = Reshape(o1, j) "
        "y = Reshape(o2, h)",
        changes=3,
    ),
    case("used-twice", f"{DIMS} {TARGET} u = Reshape(x, h) {LINEAR} v = Reshape(r, h) y = Add(u, v)", changes=2),
    case("shape-is-output", f"{DIMS} {TARGET} y = Reshape(x, h)", io=IO.replace("y)", "y, int64[4] h)")),
    case("same-names", f"{DIMS} {TARGET} y = Reshape(z, h)", io=OTHER.replace("M, T", "N, S").replace("A, B", "N, S")),
    case("copied-already", f"{DIMS} h = Concat <axis = 0> (k, m, less, f) y = Reshape(x, h)"),
    case(
        "batch-merged-beside-what-is-left",
        "r = Reshape(x, heads) u = Transpose <perm = [0, 2, 1, 3]> (r) s = Shape(u) lead = Slice(s, a, t) "
        "n = ReduceProd <keepdims = 1> (lead) h = Concat <axis = 0> (n, less, f) y = Reshape(u, h)",
        io="g (float[N, 16, 8] x) => (float[A, 16, 4] y)",
        constants="int64[4] heads = {0, 16, 2, 4}",
    ),
    case(
        "what-is-left",
        "s = Shape(z) d0 = Gather(s, i0) n = Unsqueeze(d0, a) h = Concat <axis = 0> (n, t, t, f) y = Reshape(x, h)",
        io=OTHER,
    ),
    case(
        "nested",
        f"{LINEAR} y = If (c) <then_branch = g1 () => (float[A, B, C, D] y1) {{ {DIMS} {TARGET} y1 = Reshape(r, h) }}, "
        "else_branch = g2 () => (float[A, B, C, D] y2) { p = Shape <end = 2> (x) h2 = Concat <axis = 0> (p, less, f) "
        "y2 = Reshape(r, h2) }>",
        io=IO.replace("x)", "x, bool c)"),
        changes=2,
    ),
    case("swapped", f"{DIMS} h = Concat <axis = 0> (m, n, less, f) y = Reshape(x, h)", changes=0, refusals=1),
    case("other-place", f"{DIMS} h = Concat <axis = 0> (less, n, t, f) y = Reshape(x, h)", changes=0, refusals=1),
    case(
        "other-tensor",
        f"{DIMS.replace('(x)', '(z)')} {TARGET} y = Reshape(x, h)",
        io=OTHER,
        changes=0,
        refusals=1,
    ),
    case(
        "broadcast-upward",
        f"{DIMS} {TARGET} r = Add(x, z) y = Reshape(r, h)",
        io=OTHER,
        changes=0,
        refusals=1,
    ),
    case(
        "gone-through-other-order",
        f"{DIMS} {TARGET} r = Transpose <perm = [1, 0, 2]> (x) y = Reshape(r, h)",
        changes=0,
        refusals=1,
    ),
    case("allowzero", f"{DIMS} {TARGET} y = Reshape <allowzero = 1> (x, h)"),
    case(
        "allowzero-and-zero",
        f"{DIMS} h = Concat <axis = 0> (k, m, t, f) y = Reshape <allowzero = 1> (z, h)",
        io="g (float[N, S, 8] x, float[0, S, 8] z) => (float[A, B, 2, 4] y)",
        changes=0,
        refusals=1,
    ),
    case("rest-beside-a-batch", MERGED.format("0, 1, 2, 3", "n, c8, w8"), **REST),
    case("rest-beside-what-may-be-empty", MERGED.format("1, 0, 2, 3", "n, c8, w8"), **REST, changes=0, refusals=1),
    case(
        "windows-and-back",
        f"{DIMS} c8 = Mul(d0, two) n8 = Unsqueeze(c8, a) h = Concat <axis = 0> (n8, less, f) u = Reshape(x, h) "
        "v = Relu(u) c0 = Div(c8, two) n0 = Unsqueeze(c0, a) j = Concat <axis = 0> (n0, less, t, f) y = Reshape(v, j)",
        constants="int64 two = {2}",
        changes=0,
        refusals=2,
    ),
    case(
        "windows-of-known-size",
        f"{DIMS} c8 = Mul(d0, two) n8 = Unsqueeze(c8, a) h = Concat <axis = 0> (n8, t, w8) u = Reshape(x, h) "
        "v = Relu(u) c0 = Div(c8, two) n0 = Unsqueeze(c0, a) j = Concat <axis = 0> (n0, f, t, f) y = Reshape(v, j)",
        io="g (float[N, 4, 8] x) => (float[N, 4, 2, 4] y)",
        constants="int64 two = {2}, int64[1] w8 = {8}",
        changes=2,
    ),
    case(
        "given",
        f"{DIMS} h = Concat <axis = 0> (n, m, e, f) y = Reshape(x, h)",
        io=IO.replace("x)", "x, int64[1] e)"),
        changes=0,
    ),
    case("constant", "y = Reshape(x, h)", constants="int64[4] h = {0, 0, -1, 4}", changes=0),
    case(
        "changed-on-the-way",
        f"{DIMS} g0 = Cast <to = 9> (n) g1 = Cast <to = 7> (g0) h = Concat <axis = 0> (g1, m, less, f) "
        "y = Reshape(x, h)",
        changes=0,
    ),
    attention("computed-rows", "j = Concat <axis = 0> (n, m, less) o2 = Reshape(o1, j)"),
    attention("computed-rows-of-known-width", "j = Concat <axis = 0> (n, m, w8) o2 = Reshape(o1, j)"),
    attention(
        "rows-mixed",
        "j = Concat <axis = 0> (n, less, f) o9 = Reshape(o1, j) o2 = Concat <axis = -1> (o9, o9)",
        refusals=1,
    ),
)
