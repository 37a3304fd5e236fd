"""Cases for the recipe that moves the biases of attention: x [2, 5, 8], two heads of 4."""

from __future__ import annotations

import numpy as np
from contract_case import Case

from trtopt.rewrite.protocol import Target

IO = "g (float[2, 5, 8] x) => (float[2, 5, 8] y)"
HEADS = "int64[4] hs = {0, 0, 2, 4}, int64[3] fs = {0, 0, 8}, float sc = {0.5}"
W = {f"w{each}": (8, 8) for each in "qkvo"}
B = {f"b{each}": (8,) for each in "qkvo"}
Q = "q0 = MatMul(x, wq) q1 = Add(q0, bq) q2 = Reshape(q1, hs) q3 = Transpose <perm = [0, 2, 1, 3]> (q2)"
K = "k0 = MatMul(x, wk) k1 = Add(bk, k0) k2 = Reshape(k1, hs) k3 = Transpose <perm = [0, 2, 3, 1]> (k2)"
V = "v0 = MatMul(x, wv) v1 = Add(v0, bv) v2 = Reshape(v1, hs) v3 = Transpose <perm = [0, 2, 1, 3]> (v2)"
CORE = "s0 = MatMul(q3, k3) s1 = Mul(s0, sc) p = Softmax <axis = -1> (s1)"
MIX = "o0 = MatMul(p, v3) o1 = Transpose <perm = [0, 2, 1, 3]> (o0) o2 = Reshape(o1, fs)"
OUT = "o3 = MatMul(o2, wo) y = Add(o3, bo)"
LARGE = 3e38


def case(label: str, body: str, **options: object) -> Case:
    arguments: dict[str, object] = {"io": IO, "constants": HEADS, "weights": {**W, **B}, "tolerance": 2e-5, **options}
    graph = f"{arguments.pop('io')} <{arguments.pop('constants')}> {{ {body} }}"
    return Case("qkv-bias", label, graph, **arguments)  # type: ignore[arg-type]


def merged(split: str) -> str:
    """Q, K and V from one product, split by ``split`` of t3 [3, 2, 2, 5, 4] into q3, k3 and v3."""
    return (
        "t0 = MatMul(x, w) t1 = Add(t0, b) t2 = Reshape(t1, ms) t3 = Transpose <perm = [2, 0, 3, 1, 4]> (t2) "
        f"{split} k3 = Transpose <perm = [0, 1, 3, 2]> (k2) {CORE} {MIX} {OUT}"
    )


MERGED = {
    "constants": f"{HEADS}, int64[5] ms = {{0, 0, 3, 2, 4}}, int64 i0 = {{0}}, int64 i1 = {{1}}, int64 i2 = {{2}}, "
    "int64[1] z = {0}, int64[1] a = {1}, int64[1] c = {2}, int64[1] e = {3}",
    "weights": {"w": (8, 24), "b": (24,), "wo": (8, 8), "bo": (8,)},
}
GEMM = (
    "f = Reshape(x, gs) q0 = Gemm <transB = 1, alpha = 0.5, beta = 2.0> (f, wq, bq) k0 = Gemm(f, wk, bk) "
    "v0 = Gemm(f, wv, bv) q2 = Reshape(q0, hs) q3 = Transpose <perm = [0, 2, 1, 3]> (q2) "
    "k2 = Reshape(k0, hs) k3 = Transpose <perm = [0, 2, 3, 1]> (k2) "
    f"v2 = Reshape(v0, hs) v3 = Transpose <perm = [0, 2, 1, 3]> (v2) {CORE} "
    "o0 = MatMul(p, v3) o1 = Transpose <perm = [0, 2, 1, 3]> (o0) o2 = Reshape(o1, gs) "
    "o3 = Gemm <transB = 1, alpha = 0.5, beta = 2.0> (o2, wo, bo) y = Reshape(o3, ys)"
)
MASKED = f"{Q} {K} {V} s0 = MatMul(q3, k3) s1 = Div(s0, sc) s2 = Add(m, s1) p = Softmax <axis = -1> (s2) {MIX} {OUT}"
WHERE = "s0 = MatMul(q3, k3) s1 = Where(m, low, s0) p = Softmax <axis = -1> (s1)"


def rotated(name: str, perm: str = "0, 2, 1, 3", last: str = "") -> str:
    """What :data:`Q` and :data:`K` give, [2, 2, 5, 4], with positions rotated into it, and ``last`` behind."""
    halves = f"Slice({name}r, z, two, three) {name}b = Slice({name}r, two, four, three) {name}n = Neg({name}b)"
    sides = f"{name}d = Mul({name}r, cos) {name}e = Mul({name}c, sin)"
    return (
        f"{name}r = Transpose <perm = [{perm}]> ({name}2) {name}a = {halves} "
        f"{name}c = Concat <axis = 3> ({name}n, {name}a) {sides} "
        f"{name}{'t' if last else 3} = Add({name}d, {name}e) {last}"
    )


def turned(bias: str = "Add(q0, bq)", **options: object) -> dict[str, object]:
    """Attention with rotated queries and keys."""
    body = f"{Q.split('q3')[0]} {rotated('q')} {K.split('k3')[0]} "
    body += rotated("k", last="k3 = Transpose <perm = [0, 1, 3, 2]> (kt)")
    constants = f"{HEADS}, int64[1] z = {{0}}, int64[1] two = {{2}}, int64[1] three = {{3}}, int64[1] four = {{4}}"
    weights = {**W, **B, "cos": (5, 4), "sin": (5, 4)}
    found = {"body": f"{body} {V} {CORE} {MIX} {OUT}".replace("Add(q0, bq)", bias), "constants": constants}
    return {**found, "weights": weights, **options}


CAPPED = "s0 = MatMul(q3, k3) s1 = Div(s0, sc) s2 = Tanh(s1) s3 = Mul(s2, sc) p = Softmax <axis = -1> (s3)"
CAP: dict[str, object] = {"weights": {**W, **B}, "tolerance": 2e-5}
TURNED = turned()
SCALED, UNTURNED = (
    body.replace("s0 = MatMul(q3, k3)", "qz = Mul(q3, sq) kz = Mul(k3, sk) s0 = MatMul(qz, kz)")
    for body in (str(TURNED["body"]), f"{Q} {K} {V} {CORE} {MIX} {OUT}")
)
PACKED, PACKED_ALL = (
    f"{parts} {UNTURNED.replace('k0 = MatMul(x, wk)', '').replace('v0 = MatMul(x, wv)', '').replace(*queries)}"
    for parts, queries in (
        ("kv = MatMul(x, wkv) k0, v0 = Split <axis = -1> (kv, parts)", ("", "")),
        ("qkv = MatMul(x, wkv) q0, k0, v0 = Split <axis = -1> (qkv, parts)", ("q0 = MatMul(x, wq)", "")),
    )
)

CASES: tuple[Case, ...] = (
    case("rotated", **turned()),
    case("rotated-dynamic", **turned(io="g (float[N, 5, 8] x) => (float[N, 5, 8] y)")),
    case("rotated-keys-and-values", **turned("Relu(q0)")),
    case(
        "rotated-biased-query-is-output", **turned(io="g (float[2, 5, 8] x) => (float[2, 5, 8] y, float[2, 5, 8] q1)")
    ),
    case("separate", f"{Q} {K} {V} {CORE} {MIX} {OUT}"),
    case("dynamic", f"{Q} {K} {V} {CORE} {MIX} {OUT}", io="g (float[N, S, 8] x) => (float[N, S, 8] y)"),
    case("bias-is-output", f"{Q} {K} {V} {CORE} {MIX} y = MatMul(o2, wo)"),
    case(
        "shared-weights", f"{Q} {K} {V} {CORE} {MIX} {OUT}".replace("wk", "wq").replace("bk", "bo").replace("bv", "bo")
    ),
    case(
        "keys-only",
        f"{Q} {K} {V} {CORE} {MIX} {OUT}".replace("Add(q0, bq)", "Relu(q0)").replace("Add(v0, bv)", "Neg(v0)"),
    ),
    case(
        "zero-query-bias",
        f"{Q} {K} {V} {CORE} {MIX} {OUT}",
        weights={**W, "bk": (8,), "bv": (8,), "bo": (8,)},
        values={"bq": np.zeros(8, np.float32)},
    ),
    case("merged-gather", merged("q3 = Gather(t3, i0) k2 = Gather(t3, i1) v3 = Gather(t3, i2)"), **MERGED),
    case(
        "merged-split",
        merged("q1, k1, v1 = Split(t3) q3 = Squeeze(q1, z) k2 = Squeeze(k1, z) v3 = Squeeze(v1, z)"),
        **MERGED,
    ),
    case(
        "merged-slice",
        merged(
            "q1 = Slice(t3, z, a, z) k1 = Slice(t3, a, c, z) v1 = Slice(t3, c, e, z) "
            "q3 = Squeeze(q1, z) k2 = Squeeze(k1, z) v3 = Squeeze(v1, z)"
        ),
        **MERGED,
    ),
    case(
        "gemm",
        GEMM,
        constants="int64[4] hs = {2, 5, 2, 4}, int64[2] gs = {10, 8}, int64[3] ys = {2, 5, 8}, float sc = {0.5}",
    ),
    case(
        "scale-before-heads",
        f"{Q} {K} {V} {CORE} {MIX} {OUT}".replace("Reshape(q1, hs)", "Reshape(qs, hs)").replace(
            "q1 = Add(q0, bq)", "q1 = Add(q0, bq) qs = Mul(q1, sc)"
        ),
    ),
    case(
        "scale-on-both",
        f"{Q} {K} {V} q4 = Mul(q3, sc) k4 = Div(k3, sc) s0 = MatMul(q4, k4) p = Softmax <axis = -1> (s0) {MIX} {OUT}",
    ),
    case("mask", MASKED, io="g (float[2, 5, 8] x, float[2, 1, 5, 5] m) => (float[2, 5, 8] y)"),
    case(
        "where-mask",
        f"{Q} {K} {V} {WHERE} {MIX} {OUT}",
        io="g (float[2, 5, 8] x, bool[2, 1, 1, 5] m) => (float[2, 5, 8] y)",
        constants=f"{HEADS}, float low = {{-3e38}}",
    ),
    case(
        "where-mask-clamped-for-fp16",
        f"{Q} {K} {V} {WHERE} {MIX} {OUT}",
        io="g (float[2, 5, 8] x, bool[2, 1, 1, 5] m) => (float[2, 5, 8] y)",
        constants=f"{HEADS}, float low = {{-1.5e4}}",
    ),
    case(
        "where-mask-that-does-not-vanish",
        f"{Q} {K} {V} {WHERE} {MIX} {OUT}",
        io="g (float[2, 5, 8] x, bool[2, 1, 1, 5] m) => (float[2, 5, 8] y)",
        constants=f"{HEADS}, float low = {{-1e3}}",
        changes=0,
        refusals=1,
    ),
    case(
        "cross",
        f"{Q} {K} {V} {CORE} {MIX} {OUT}".replace("MatMul(x, wk)", "MatMul(c, wk)").replace(
            "MatMul(x, wv)", "MatMul(c, wv)"
        ),
        io="g (float[2, 5, 8] x, float[2, 3, 8] c) => (float[2, 5, 8] y)",
    ),
    case(
        "nested",
        f"y = If (c) <then_branch = t () => (float[2, 5, 8] z) {{ {Q} {K} {V} {CORE} {MIX} o3 = MatMul(o2, wo) "
        "z = Add(o3, bo) }, else_branch = e () => (float[2, 5, 8] u) { u = Neg(x) }>",
        io="g (bool c, float[2, 5, 8] x) => (float[2, 5, 8] y)",
    ),
    case(
        "weights-are-output",
        f"{Q} {K} {V} {CORE} {MIX} {OUT}",
        io="g (float[2, 5, 8] x) => (float[2, 5, 8] y, float[2, 2, 5, 5] p)",
        changes=0,
    ),
    case(
        "floor-that-vanishes",
        f"{Q} {K} {V} {CORE} {MIX} {OUT}".replace(
            "p = Softmax <axis = -1> (s1)", "s2 = Max(s1, low) p = Softmax <axis = -1> (s2)"
        ),
        constants=f"{HEADS}, float low = {{-3e38}}",
    ),
    case(
        "floor-that-does-not-vanish",
        f"{Q} {K} {V} {CORE} {MIX} {OUT}".replace(
            "p = Softmax <axis = -1> (s1)", "s2 = Max(low, s1) p = Softmax <axis = -1> (s2)"
        ),
        constants=f"{HEADS}, float low = {{-1e3}}",
        changes=0,
        refusals=1,
    ),
    case(
        "floor-beside-another",
        f"{Q} {K} {V} {CORE} {MIX} {OUT}".replace(
            "p = Softmax <axis = -1> (s1)", "s2 = Max(s1, low, zero) p = Softmax <axis = -1> (s2)"
        ),
        constants=f"{HEADS}, float low = {{-3e38}}, float zero = {{0.0}}",
        changes=0,
        refusals=1,
    ),
    case("tanh", f"{Q} {K} {V} {CORE} {MIX} {OUT}".replace("Mul(s0, sc)", "Tanh(s0)"), changes=0, refusals=1),
    case("wrong-axis", f"{Q} {K} {V} {CORE} {MIX} {OUT}".replace("axis = -1", "axis = 2"), changes=0),
    case(
        "head-mask",
        f"{Q} {K} {V} {CORE} {MIX} {OUT}".replace("o0 = MatMul(p, v3)", "p1 = Mul(p, h) o0 = MatMul(p1, v3)"),
        io="g (float[2, 5, 8] x, float[1, 2, 1, 1] h) => (float[2, 5, 8] y)",
        changes=0,
        refusals=1,
    ),
    case(
        "keys-used-elsewhere",
        f"{Q} {K} {V} {CORE} {MIX} {OUT} z = Neg(k1)",
        io="g (float[2, 5, 8] x) => (float[2, 5, 8] y, float[2, 5, 8] z)",
        changes=0,
        refusals=1,
    ),
    case(
        "queries-are-output",
        f"{Q} {K} {V} {CORE} {MIX} {OUT}",
        io="g (float[2, 5, 8] x) => (float[2, 5, 8] y, float[2, 2, 5, 4] q3)",
        changes=0,
        refusals=1,
    ),
    case(
        "computed-projection",
        f"{Q} {K} {V} {CORE} {MIX} {OUT}",
        io="g (float[2, 5, 8] x, float[8, 8] wo) => (float[2, 5, 8] y)",
        weights={**{name: shape for name, shape in W.items() if name != "wo"}, **B},
        refusals=1,
    ),
    case(
        "rows-set-to-zero",
        f"{Q} {K} {V} {CORE} {MIX} {OUT}".replace("o0 = MatMul(p, v3)", "oa = MatMul(p, v3) o0 = Mul(oa, alive)"),
        io="g (float[2, 5, 8] x, float[2, 1, 5, 1] alive) => (float[2, 5, 8] y)",
        refusals=1,
    ),
    case(
        "computed-bias",
        f"{Q} {K} {V} {CORE} {MIX} {OUT}",
        io="g (float[2, 5, 8] x, float[8] bk, float[8] bv, float[8] bq) => (float[2, 5, 8] y)",
        weights={**W, "bo": (8,)},
        changes=0,
    ),
    case(
        "positions",
        f"{Q} {K} {V} {CORE} {MIX} {OUT}",
        weights={**W, "bq": (5, 8), "bk": (5, 8), "bv": (5, 8), "bo": (8,)},
        changes=0,
    ),
    case(
        "overflow",
        f"{Q} {K} {V} {CORE} {MIX} {OUT}",
        weights={**{name: shape for name, shape in W.items() if name != "wo"}, "bq": (8,), "bk": (8,), "bo": (8,)},
        values={"bv": np.full(8, LARGE, np.float32), "wo": np.full((8, 8), 1.0, np.float32)},
        changes=0,
        refusals=1,
    ),
    case(
        "one-head-query-is-key",
        "a = Add(x, bq) k = Transpose <perm = [0, 2, 1]> (a) s = MatMul(a, k) p = Softmax(s) y = MatMul(p, x)",
        weights={"bq": (8,)},
        changes=0,
    ),
    *(
        Case(
            "scaled-keys",
            label,
            f"{IO} <{TURNED['constants']}, float sq = {{0.5}}, float sk = {{{number}}}> {{ {graph} }}",
            weights={**W, **B, "cos": (5, 4), "sin": (5, 4)},
            tolerance=2e-5,
            changes=changes,
        )
        for label, number, changes, graph in (
            ("both", 0.5, 1, SCALED),
            ("keys-only", 0.25, 1, SCALED.replace("Mul(q3, sq)", "Neg(q3)")),
            (
                "before-their-transpose",
                0.5,
                1,
                SCALED.replace("kz = Mul(k3, sk)", "").replace(
                    "k3 = Transpose <perm = [0, 1, 3, 2]> (kt)",
                    "km = Mul(sk, kt) kz = Transpose <perm = [0, 1, 3, 2]> (km)",
                ),
            ),
            ("enlarged", 2.0, 0, SCALED),
            ("vanishing", 1e-6, 0, SCALED),
            ("plain-projection", 0.5, 0, UNTURNED),
            (
                "read-elsewhere",
                0.5,
                0,
                SCALED.replace(
                    "y = Add(o3, bo)", "sum = ReduceSum <keepdims = 0> (kz) ye = Add(o3, bo) y = Add(ye, sum)"
                ),
            ),
        )
    ),
    *(
        Case(
            "scaled-keys",
            label,
            f"{IO} <{HEADS}, int64[{count}] parts = {{{', '.join('8' * count)}}}, float sq = {{0.5}}, "
            f"float sk = {{0.5}}> {{ {graph} }}",
            weights={"wq": (8, 8), "wo": (8, 8), "wkv": (8, 8 * count), **B},
            tolerance=2e-5,
            changes=changes,
        )
        for label, count, changes, graph in (
            ("packed-with-values", 2, 1, PACKED),
            ("packed-with-queries", 3, 0, PACKED_ALL),
        )
    ),
    *(
        Case("capped-scores", label, f"{IO} <{HEADS}> {{ {Q} {K} {V} {cap} {MIX} {OUT} }}", **options)  # type: ignore[arg-type]
        for label, cap, options in (
            ("capped", CAPPED, CAP),
            (
                "capped-too-far-out",
                CAPPED.replace("s3 = Mul(s2, sc)", "far = Constant <value_float = 1000.0> () s3 = Mul(s2, far)"),
                {**CAP, "changes": 0},
            ),
            ("capped-by-little", CAPPED.replace("Div(s0, sc)", "Mul(s0, sc)"), CAP),
            (
                "far-out",
                CAPPED,
                {
                    **CAP,
                    "weights": {**W, "bk": (8,), "bv": (8,), "bo": (8,)},
                    "values": {"bq": np.full(8, 1e4, np.float32)},
                },
            ),
            ("after-softmax", f"{CORE.replace('p =', 'pt =')} p = Tanh(pt)", {**CAP, "changes": 0}),
            ("tensorrt", CAPPED, {**CAP, "target": Target(backend="tensorrt"), "changes": 0, "refusals": 1}),
        )
    ),
)
