"""Cases where a pattern is there and the algebra is not, or the types do not allow it."""

from __future__ import annotations

import numpy as np
from contract_case import Case

X = "float[2, 4, 6, 6] x"
Y = "float[?, ?, ?, ?] y"
POINT = {"w": (4, 4, 1, 1), "b": (4,)}

# Attention over 8 tokens of 8 features: a bias per token has the shape that one per feature could have.
SQUARE = """g (float[2, 8, 8] x) => (float[2, 8, 8] y) <int64[4] hs = {0, 0, 2, 4}, int64[3] fs = {0, 0, 8}> {
    q0 = MatMul(x, wq) q1 = Add(q0, bq) q2 = Reshape(q1, hs) q3 = Transpose <perm = [0, 2, 1, 3]> (q2)
    k0 = MatMul(x, wk) k1 = Add(k0, bk) k2 = Reshape(k1, hs) k3 = Transpose <perm = [0, 2, 3, 1]> (k2)
    v0 = MatMul(x, wv) v1 = Neg(v0) v2 = Reshape(v1, hs) v3 = Transpose <perm = [0, 2, 1, 3]> (v2)
    s = MatMul(q3, k3) p = Softmax <axis = -1> (s)
    o0 = MatMul(p, v3) o1 = Transpose <perm = [0, 2, 1, 3]> (o0) o2 = Reshape(o1, fs) y = MatMul(o2, wo) }"""
SQUARE_WEIGHTS = {**{f"w{each}": (8, 8) for each in "qkvo"}, "bq": (8,), "bk": (8,)}
# One product gives queries and keys, each with a bias of its own, as merging of equal weights leaves it.
SHARED_PRODUCT = """g (float[2, 5, 8] x) => (float[2, 5, 8] y) <int64[4] hs = {0, 0, 2, 4}, int64[3] fs = {0, 0, 8}> {
    n = LayerNormalization <axis = -1> (x, scale, shift)
    q0 = MatMul(n, wq) q1 = Add(q0, bq) q2 = Reshape(q1, hs) q3 = Transpose <perm = [0, 2, 1, 3]> (q2)
    k1 = Add(q0, bk) k2 = Reshape(k1, hs) k3 = Transpose <perm = [0, 2, 3, 1]> (k2)
    v0 = MatMul(n, wv) %s v2 = Reshape(v1, hs) v3 = Transpose <perm = [0, 2, 1, 3]> (v2)
    s = MatMul(q3, k3) p = Softmax <axis = -1> (s)
    o0 = MatMul(p, v3) o1 = Transpose <perm = [0, 2, 1, 3]> (o0) o2 = Reshape(o1, fs) y = MatMul(o2, wo) }"""
SHARED_WEIGHTS = {
    **{"wq": (8, 8), "wv": (8, 8), "wo": (8, 8), "scale": (8,), "shift": (8,)},
    **{"bq": (8,), "bk": (8,)},
}
SMALL = np.linspace(-0.1, 0.1, 8, dtype=np.float32)
GEMMS = """g (float[8, 8] x) => (float[8, 8] y) {
    q = Gemm(x, wq, bq) k = Gemm(x, wk, bk) v = Gemm(x, wv, bv) t = Transpose <perm = [1, 0]> (k)
    s = MatMul(q, t) p = Softmax <axis = -1> (s) o = MatMul(p, v) y = Gemm(o, wo, bo) }"""
NORM = """g (float[2, 5, 6] x) => (float[1, 2, 5, 6] y) <int64[1] last = {-1}> {
    m = ReduceMean(x, last) d = Sub(x, m) q = Mul(d, d) r = ReduceMean(q, last) e = Add(r, epsilon)
    s = Sqrt(e) n = Div(d, s) g = Mul(n, gamma) y = Add(g, beta) }"""
SLICED = f"""g (float[2, 4, 6, 3] x) => ({Y}) {{
    t = Transpose <perm = [0, 3, 1, 2]> (x) s = Slice(t, starts, ends%s) r = Relu(s)
    y = Transpose <perm = [0, 2, 3, 1]> (r) }}"""
DILATED = "kernel_shape = [2, 2], dilations = [3, 3], pads = [1, 1, 1, 1]"
ROUNDED_UP = "kernel_shape = [3, 3], strides = [3, 3], ceil_mode = 1, pads = [1, 1, 0, 0]"
STACK = """g (float[5, 2, 4] x, float[1, 2, 3] h) => (float[?, ?, ?, ?] y) <int64[1] one = {1}> {
    a, last = GRU <hidden_size = 3> (x, w, r, b, , h) s = Squeeze(a, one) n = Tanh(last)
    y = GRU <hidden_size = 3> (s, w2, r2, b2, , n) }"""
STACK_WEIGHTS = {"w": (1, 9, 4), "r": (1, 9, 3), "b": (1, 18), "w2": (1, 9, 3), "r2": (1, 9, 3), "b2": (1, 18)}


def square(label: str, changes: int, refusals: int = 0, **shapes: tuple[int, ...]) -> Case:
    weights = {**SQUARE_WEIGHTS, **shapes}
    return Case("qkv-bias", label, SQUARE, weights, changes=changes, refusals=refusals, tolerance=2e-5)


def constant(label: str, body: str, shape: tuple[int, ...]) -> Case:
    """An operator of a constant that ONNX's reference implementation gets wrong."""
    graph = f"g (float[1] x) => ({Y}) {{ {body} y = Add(x, k) }}"
    return Case("constant-expression", label, graph, {"c": shape}, changes=0)


CASES: tuple[Case, ...] = (
    square("query-bias-per-token", 1, bq=(8, 1)),
    square("key-bias-per-token", 1, bk=(8, 1)),
    square("biases-per-token", 0, bq=(8, 1), bk=(8, 1)),
    square("bias-that-widens", 1, wk=(8, 1)),
    Case(
        "qkv-bias",
        "gemm-bias-per-row",
        GEMMS,
        {**{f"w{each}": (8, 8) for each in "qkvo"}, **{f"b{each}": (8,) for each in "qkv"}, "bo": (8, 1)},
        changes=0,
        refusals=1,
    ),
    Case(
        "qkv-bias",
        "key-bias-not-finite",
        SQUARE,
        {name: shape for name, shape in SQUARE_WEIGHTS.items() if name != "bk"},
        {"bk": np.array([np.inf, *range(7)], np.float32)},
        changes=0,
        refusals=1,
    ),
    Case(
        "normalized-qkv-bias",
        "two-biases-behind-one-product",
        SHARED_PRODUCT % "v1 = Neg(v0)",
        SHARED_WEIGHTS,
        changes=0,
    ),
    Case(
        "normalized-qkv-bias",
        "two-biases-behind-one-product-and-one-behind-its-own",
        SHARED_PRODUCT % "v1 = Add(v0, bv)",
        {name: shape for name, shape in SHARED_WEIGHTS.items() if name != "shift"},
        {"bv": SMALL, "shift": SMALL},
        tolerance=2e-5,
    ),
    Case(
        "normalized-qkv-bias",
        "queries-scaled-by-a-vector",
        SQUARE.replace("q0 = MatMul(x, wq)", "q0 = Mul(x, wq)"),
        {**SQUARE_WEIGHTS, "wq": (8,)},
        changes=0,
    ),
    Case(
        "rank-4-linear",
        "constant-of-rank-5",
        "g (float[2, 3, 3, 4] x) => (float[1, 2, 3, 3, 6] y) { p = MatMul(x, w) y = Add(p, c) }",
        {"w": (4, 6), "c": (1, 1, 1, 1, 6)},
        tolerance=1e-6,
    ),
    Case(
        "rank-4-linear",
        "doubles",
        "g (double[2, 3, 3, 4] x) => (double[2, 3, 3, 6] y) { p = MatMul(x, w) y = Relu(p) }",
        values={"w": np.linspace(-1, 1, 24).reshape(4, 6)},
        tolerance=1e-12,
    ),
    Case(
        "global-average-pool",
        "integers",
        "g (int32[2, 3, 4, 4] x) => (int32[2, 3, 1, 1] y) { y = ReduceMean <axes = [2, 3]> (x) }",
        changes=0,
    ),
    Case(
        "global-average-pool",
        "doubles",
        "g (double[2, 3, 4, 4] x) => (double[2, 3, 1, 1] y) { y = ReduceMean <axes = [2, 3]> (x) }",
        changes=0,
    ),
    Case(
        "average-pool-conv",
        "window-of-padding",
        f"g (float[2, 4, 2, 2] x) => ({Y}) {{ c = Conv(x, w, b) y = AveragePool <{DILATED}> (c) }}",
        POINT,
        changes=0,
        refusals=1,
        opset=19,
    ),
    Case(
        "transpose-push",
        "slice-int32",
        SLICED % ", axes",
        values={"starts": np.array([1], np.int32), "ends": np.array([3], np.int32), "axes": np.array([2], np.int32)},
    ),
    Case(
        "transpose-push",
        "slice-int32-without-axes",
        SLICED % "",
        values={"starts": np.array([0, 1], np.int32), "ends": np.array([2, 3], np.int32)},
    ),
    Case(
        "decomposed-layer-norm",
        "epsilon-of-rank-4",
        NORM,
        {"gamma": (6,), "beta": (6,)},
        {"epsilon": np.full((1, 1, 1, 1), 1e-2, np.float32)},
        changes=0,
        opset=18,
    ),
    Case(
        "split-after-conv",
        "constant-of-rank-5-on-the-left",
        "g (float[4, 4, 6, 6] x) => (float[?, ?, ?, ?, ?] y, float[?, ?, ?, ?, ?] z) <int64[2] sizes = {1, 3}> "
        "{ c = Conv(x, w, b) m = Mul(k, c) y, z = Split <axis = 1> (m, sizes) }",
        {**POINT, "k": (1, 1, 1, 1, 1)},
        changes=0,
        refusals=1,
    ),
    Case(
        "split-after-conv",
        "part-of-no-channels",
        f"g ({X}) => ({Y}, float[?, ?, ?, ?] z) <int64[2] sizes = {{0, 4}}> "
        "{ c = Conv(x, w, b) y, z = Split <axis = 1> (c, sizes) }",
        POINT,
        changes=0,
    ),
    Case("stacked-recurrence", "state-from-the-layer-below", STACK, STACK_WEIGHTS, changes=0, refusals=1),
    Case(
        "static-recurrence",
        "clip-at-zero",
        "g (float[4, 2, 5] x) => (float[?, ?, ?, ?] y) { y = RNN <hidden_size = 3, clip = 0.0> (x, w, r, b) }",
        {"w": (1, 3, 5), "r": (1, 3, 3), "b": (1, 6)},
        changes=0,
        refusals=1,
    ),
    constant("lrn", "k = LRN <size = 3, alpha = 1.0> (c)", (1, 6, 2, 2)),
    constant("max-pool-uneven-pads", "k = MaxPool <kernel_shape = [2, 2], pads = [1, 0, 1, 1]> (c)", (1, 2, 6, 7)),
    constant("average-pool-rounded-up", f"k = AveragePool <{ROUNDED_UP}> (c)", (1, 2, 6, 7)),
    constant("lp-norm", "k = LpNormalization <p = 1> (c)", (1, 2, 3, 4)),
    Case(
        "constant-expression",
        "unsorted-unique",
        "g (int64[1] x) => (int64[?] y) <int64[4] c = {3, 1, 3, 2}> { k = Unique <sorted = 0> (c) y = Add(x, k) }",
        changes=0,
    ),
    Case(
        "cast-chain",
        "to-text",
        'g (bool[3] x) => (bool[3] y) <string[3] t = {"1", "1", "1"}> '
        "{ a = Cast <to = 1> (x) b = Cast <to = 8> (a) y = Equal(b, t) }",
        changes=0,
        opset=19,
    ),
    Case(
        "prelu",
        "slope-not-finite",
        "g (float[2, 4] x) => (float[2, 4] y) { y = PRelu(x, s) }",
        values={"s": np.array([1, 0.5, np.inf, 2], np.float32)},
        changes=0,
        refusals=1,
    ),
)
