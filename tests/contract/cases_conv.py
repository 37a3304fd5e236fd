"""Cases for the recipes around convolutions: constants, padding, pooling, splits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from contract_case import Case

Shapes = Mapping[str, tuple[int, ...]]

X = "float[N, 4, 8, 8] x"
Y6 = "float[N, 4, 6, 6] y"
W = {"w": (4, 4, 3, 3), "a": (4,)}
PER_CHANNEL = {"s": (1, 4, 1, 1), "t": (4, 1, 1)}
BN = {"g": (4,), "b": (4,), "m": (4,), "v": (4,)}


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def affine(label: str, graph: str, weights: Shapes, **options: object) -> Case:
    return Case("constant-affine", label, graph, weights, tolerance=1e-5, **options)  # type: ignore[arg-type]


AFFINE: tuple[Case, ...] = (
    affine(
        "chain-after-conv",
        f"g ({X}) => ({Y6}) {{ c = Conv(x, w, a) d = Mul(c, s) e = Sub(t, d) f = Div(e, s) y = Relu(f) }}",
        W | PER_CHANNEL,
        changes=3,
    ),
    affine("scalar-output", f"g ({X}) => ({Y6}) <float k = {{3}}> {{ c = Conv(x, w) y = Mul(k, c) }}", W),
    affine(
        "grouped-transposed",
        "g (float[N, 6, 5, 5] x) => (float[N, 4, 7, 7] y) "
        "{ c = ConvTranspose <group = 2> (x, w) d = Mul(c, s) y = Add(d, t) }",
        {"w": (6, 2, 3, 3), **PER_CHANNEL},
        changes=2,
    ),
    affine(
        "gemm-both-sides",
        "g (float[N, 6] x) => (float[N, 4] y) { p = Mul(x, r) o = Add(p, q) "
        "c = Gemm <alpha = 0.5, beta = 2.0, transB = 1> (o, w, a) d = Mul(c, s) y = Add(d, t) }",
        {"w": (4, 6), "a": (4,), "r": (6,), "q": (1, 6), "s": (4,), "t": (1, 4)},
        changes=4,
    ),
    affine(
        "gemm-not-transposed",
        "g (float[N, 6] x) => (float[N, 4] y) { o = Sub(q, x) c = Gemm (o, w) y = Div(c, s) }",
        {"w": (6, 4), "q": (1, 6), "s": (4,)},
        changes=2,
    ),
    affine(
        "before-conv-grouped",
        f"g ({X}) => ({Y6}) {{ d = Mul(x, s) e = Add(d, t) y = Conv <group = 2> (e, w, a) }}",
        {"w": (4, 2, 3, 3), "a": (4,), **PER_CHANNEL},
        changes=2,
    ),
    affine(
        "norm-before-conv",
        f"g ({X}) => ({Y6}) {{ n = BatchNormalization(x, g, b, m, v) y = Conv(n, w) }}",
        {**W, **BN},
    ),
    affine(
        "norm-before-padding-conv",
        f"g ({X}) => ({X[:-1]}y) {{ n = BatchNormalization(x, g, b, m, v) y = Conv <pads = [1, 1, 1, 1]> (n, w) }}",
        {**W, **BN},
        changes=0,
        refusals=1,
    ),
    affine(
        "image-normalization",
        f'g ({X}) => ({X[:-1]}y) {{ d = Sub(x, t) e = Div(d, s) y = Conv <auto_pad = "SAME_UPPER"> (e, w) }}',
        {**W, **PER_CHANNEL},
        refusals=1,
    ),
    affine(
        "scale-before-transposed",
        f"g ({X}) => (float[N, 4, 10, 10] y) {{ d = Add(x, t) e = Mul(d, s) y = ConvTranspose(e, w) }}",
        {**W, **PER_CHANNEL},
        refusals=1,
    ),
    *(
        affine(
            f"{label}-of-tokens",
            "g (float[N, 36, 4] x) => (float[N, 4, 3, 3] y) <int64[4] i = {0, 4, 6, 6}, int64[4] j = {0, 6, 6, 4}> "
            f"{{ d = Mul(x, s) e = Add(d, t) {views} y = Conv <strides = [2, 2]> (m, w, a) }}",
            {"w": (4, 4, 2, 2), "a": (4,), "s": (4,), "t": (1, 1, 4)},
            changes=changes,
        )
        for label, views, changes in (
            ("map", "r = Transpose <perm = [0, 2, 1]> (e) m = Reshape(r, i)", 2),
            ("turned-map", "r = Reshape(e, j) m = Transpose <perm = [0, 3, 1, 2]> (r)", 2),
            ("transposed-map", "r = Reshape(e, j) m = Transpose <perm = [0, 3, 2, 1]> (r)", 0),
        )
    ),
    affine(
        "map-that-pads-of-tokens",
        "g (float[N, 36, 4] x) => (float[N, 4, 6, 6] y) <int64[4] j = {0, 6, 6, 4}> "
        "{ d = Add(x, t) e = Mul(d, s) r = Reshape(e, j) m = Transpose <perm = [0, 3, 1, 2]> (r) "
        "y = Conv <pads = [1, 1, 1, 1]> (m, w) }",
        {"w": (4, 4, 3, 3), "s": (4,), "t": (4,)},
        changes=1,
        refusals=1,
    ),
    affine(
        "batches-of-tokens",
        "g (float[4, 36, 4] x) => (float[4, 4, 5, 5] y) <int64[4] j = {0, 6, 6, 4}> "
        "{ e = Add(x, t) r = Reshape(e, j) m = Transpose <perm = [0, 3, 1, 2]> (r) y = Conv(m, w) }",
        {"w": (4, 4, 2, 2), "t": (4, 1, 1)},
        changes=0,
        refusals=1,
    ),
    affine(
        "channels-that-are-no-map-of-tokens",
        "g (float[N, 36, 4] x) => (float[M, 8, 2, 5] y) <int64[4] i = {-1, 8, 3, 6}> "
        "{ e = Mul(x, t) r = Transpose <perm = [0, 2, 1]> (e) m = Reshape(r, i) y = Conv(m, w) }",
        {"w": (8, 8, 2, 2), "t": (4,)},
        changes=0,
        refusals=1,
    ),
    affine(
        "norm-of-tokens-alone",
        "g (float[N, 4, 4] x) => (float[N, 4, 1, 1] y) <int64[4] j = {0, 2, 2, 4}> "
        "{ e = BatchNormalization(x, g, b, m, v) r = Reshape(e, j) p = Transpose <perm = [0, 3, 1, 2]> (r) "
        "y = Conv(p, w) }",
        {"w": (4, 4, 2, 2), **BN},
        changes=0,
    ),
    affine(
        "norm-alone",
        f"g ({X}) => ({X[:-1]}y) {{ r = Relu(x) n = BatchNormalization(r, g, b, m, v) y = Relu(n) }}",
        BN,
        changes=0,
    ),
    affine(
        "residual",
        f"g ({X}) => ({X[:-1]}y) {{ c = Conv <pads = [1, 1, 1, 1]> (x, w) y = Add(c, x) }}",
        W,
        changes=0,
    ),
    affine(
        "shared-weight-both-uses",
        f"g ({X}) => ({Y6}) {{ c = Conv(x, w) d = Mul(c, s) e = Conv(x, w) f = Add(e, t) y = Add(d, f) }}",
        W | PER_CHANNEL,
        changes=2,
    ),
    affine(
        "used-elsewhere",
        f"g ({X}) => ({Y6}, {Y6[:-1]}z) {{ c = Conv(x, w) y = Mul(c, s) z = Add(c, t) }}",
        W | PER_CHANNEL,
        changes=0,
        refusals=2,
    ),
    affine(
        "conv-is-output",
        f"g ({X}) => ({Y6}, {Y6[:-1]}c) {{ c = Conv(x, w) y = Mul(c, s) }}",
        W | PER_CHANNEL,
        changes=0,
        refusals=1,
    ),
    affine(
        "per-position",
        f"g ({X}) => ({Y6}) {{ c = Conv(x, w) y = Mul(c, s) }}",
        W | {"s": (1, 1, 6, 6)},
        changes=0,
        refusals=1,
    ),
    affine(
        "grows-dimensions",
        "g (float[4, 8, 8] x) => (float[1, 4, 6, 6] y) { d = Mul(x, s) y = Conv(d, w) }",
        W | PER_CHANNEL,
        changes=0,
        refusals=1,
    ),
    affine(
        "grows-channels",
        "g (float[N, 1, 8, 8] x) => (float[N, 4, 6, 6] y) { d = Mul(x, s) y = Conv(d, w) }",
        W | PER_CHANNEL,
        changes=0,
        refusals=1,
    ),
    affine(
        "division-by-zero",
        f"g ({X}) => ({Y6}) <float k = {{0}}> {{ c = Conv(x, w) d = Div(c, k) y = Relu(d) }}",
        W,
        changes=0,
        refusals=1,
    ),
    affine("constant-over", f"g ({X}) => ({Y6}) <float k = {{2}}> {{ c = Conv(x, w) y = Div(k, c) }}", W, changes=0),
    affine(
        "too-large",
        f"g ({X}) => ({Y6}) <float k = {{3.0e38}}, float r = {{1.0e-38}}> "
        "{ p = Mul(x, r) c = Conv(p, w) d = Mul(c, k) y = Relu(d) }",
        W,
        changes=0,
        refusals=2,
    ),
    affine(
        "computed-weight",
        f"g ({X}, float[4, 4, 3, 3] w) => ({Y6}) {{ c = Conv(x, w) y = Mul(c, s) }}",
        PER_CHANNEL,
        changes=0,
        refusals=1,
    ),
    affine(
        "half",
        "g (float16[N, 4, 8, 8] x) => (float16[N, 4, 6, 6] y) { c = Conv(x, w) d = Mul(c, s) y = Sqrt(d) }",
        {},
        values={"w": np.zeros((4, 4, 3, 3), np.float16), "s": np.ones((1, 4, 1, 1), np.float16)},
    ),
    affine(
        "nested",
        "g (bool k, float[N, 4, 8, 8] x) => (float[N, 4, 6, 6] y) { o = Conv(x, w) y = If (k) <"
        "then_branch = t () => (float[N, 4, 6, 6] p) { c = Conv(x, w) p = Mul(c, s) },"
        "else_branch = e () => (float[N, 4, 6, 6] q) { q = Mul(o, s) }> }",
        W | PER_CHANNEL,
        refusals=1,
    ),
)

MEAN_OF_MAP = f"g ({X}) => (float[N, 4, 1, 1] y)"


def pool(label: str, graph: str, **options: object) -> Case:
    return Case("global-average-pool", label, graph, tolerance=1e-6, **options)  # type: ignore[arg-type]


POOLS: tuple[Case, ...] = (
    pool("global", f"{MEAN_OF_MAP} {{ r = Relu(x) y = GlobalAveragePool(r) }}"),
    pool(
        "maximum-of-neighbours",
        "g (float[N, 4, 6, 5] x) => (float[N, 4, 6] y) <int64[1] a = {-1}> "
        "{ c = Conv(x, k) r = LeakyRelu(c) y = ReduceMax <keepdims = 0> (r, a) }",
        weights={"k": (4, 4, 1, 1)},
        opset=18,
    ),
    pool(
        "maximum-of-columns",
        "g (float[N, 4, 6, W] x) => (float[N, 4, 1, W] y) <int64[1] a = {2}> { c = Conv(x, k) y = ReduceMax(c, a) }",
        weights={"k": (4, 4, 1, 1)},
        opset=18,
    ),
    pool(
        "largest-of-a-map",
        "g (float[N, 4, 6, 5] x) => (float[N, 4] y) { c = Conv(x, k) y = ReduceMax <axes = [2, 3], keepdims = 0> (c) }",
        weights={"k": (4, 4, 1, 1)},
    ),
    pool(
        "mean-of-rows",
        "g (float[N, 4, 6, 5] x) => (float[N, 4, 6] y) "
        "{ c = Conv(x, k) r = Relu(c) y = ReduceMean <axes = [3], keepdims = 0> (r) }",
        weights={"k": (4, 4, 1, 1)},
    ),
    pool(
        "scores",
        "g (float[N, 4, 6, 5] q, float[N, 4, 5, 6] k) => (float[N, 4, 6, 1] y) "
        "{ s = MatMul(q, k) y = ReduceMax <axes = [3]> (s) }",
        changes=0,
    ),
    pool(
        "maximum-over-channels",
        "g (float[N, 4, 6, 5] x) => (float[N, 1, 6, 5] y) { c = Conv(x, k) y = ReduceMax <axes = [1]> (c) }",
        weights={"k": (4, 4, 1, 1)},
        changes=0,
    ),
    pool("mean", f"{MEAN_OF_MAP} {{ y = ReduceMean <axes = [3, -2]> (x) }}"),
    pool(
        "mean-without-dimensions",
        f"g ({X}) => (float[N, 4] y) {{ m = ReduceMean <keepdims = 0> (x, k) y = Neg(m) }}",
        values={"k": ints(-1, -2)},
        opset=18,
    ),
    pool(
        "mean-of-more",
        f"g ({X}) => (float[N, 1, 1, 1] y) {{ y = ReduceMean <axes = [1, 2, 3]> (x) }}",
        changes=0,
    ),
    pool("mean-of-tokens", "g (float[N, 9, 8] x) => (float[N, 1, 8] y) { y = ReduceMean <axes = [1]> (x) }", changes=0),
    pool(
        "any-size",
        "g (float[N, 4, H, W] x) => (float[N, 4, 1, 1] y) { y = GlobalAveragePool(x) }",
        changes=0,
        refusals=1,
    ),
    pool("large", "g (float[N, 2, 40, 36] x) => (float[N, 2, 1, 1] y) { y = GlobalAveragePool(x) }"),
    pool(
        "large-without-dimensions",
        "g (float[N, 2, 112, 16] x) => (float[N, 2] y) { y = ReduceMean <axes = [2, 3], keepdims = 0> (x) }",
    ),
    pool(
        "large-and-indivisible",
        "g (float[N, 1, 2, 1031] x) => (float[N, 1, 1, 1] y) { y = GlobalAveragePool(x) }",
        changes=0,
        refusals=1,
    ),
)

P5 = {"p": ints(0, 0, 1, 0, 0, 0, 2, 1)}
LOW = {"l": np.array(np.finfo(np.float32).min)}


def pad(label: str, graph: str, values: dict[str, np.ndarray] | None = None, **options: object) -> Case:
    return Case("pad-conv", label, graph, W, values=P5 | (values or {}), **options)  # type: ignore[arg-type]


PADS: tuple[Case, ...] = (
    pad(
        "conv",
        f"g ({X}) => (float[N, 4, 11, 9] y) {{ q = Pad(x, p) c = Conv <pads = [1, 1, 1, 1]> (q, w, a) y = Relu(c) }}",
        tolerance=1e-6,
    ),
    pad(
        "conv-two-users",
        f"g ({X}) => (float[N, 4, 9, 7] y) "
        '{ q = Pad(x, p) c = Conv <auto_pad = "VALID"> (q, w) d = Conv(q, w) y = Add(c, d) }',
        tolerance=1e-6,
    ),
    pad(
        "axes",
        f"g ({X}) => (float[N, 4, 6, 8] y) {{ q = Pad(x, k, , s) y = Conv(q, w) }}",
        {"k": ints(0, 2), "s": ints(-1)},
        opset=18,
        tolerance=1e-6,
    ),
    pad("average", f"g ({X}) => (float[N, 4, 9, 7] y) {{ q = Pad(x, p) y = AveragePool <kernel_shape = [3, 3]> (q) }}"),
    pad(
        "average-of-padded",
        f"g ({X}) => (float[N, 4, 11, 9] y) {{ q = Pad(x, p) "
        "y = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (q) }",
        changes=0,
        refusals=1,
    ),
    pad(
        "max-after-relu",
        f"g ({X}) => (float[N, 4, 5, 4] y) "
        "{ r = Relu(x) q = Pad(r, p) y = MaxPool <kernel_shape = [3, 3], strides = [2, 2]> (q) }",
    ),
    pad(
        "max-lowest",
        f"g ({X}) => (float[N, 4, 9, 7] y) {{ q = Pad(x, p, l) y = MaxPool <kernel_shape = [3, 3]> (q) }}",
        LOW,
    ),
    pad(
        "max-zero",
        f"g ({X}) => (float[N, 4, 9, 7] y) {{ q = Pad(x, p) y = MaxPool <kernel_shape = [3, 3]> (q) }}",
        changes=0,
        refusals=1,
    ),
    pad(
        "max-ceil",
        f"g ({X}) => (float[N, 4, 5, 4] y) {{ r = Relu(x) q = Pad(r, p) "
        "y = MaxPool <kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1> (q) }",
        changes=0,
        refusals=1,
    ),
    pad(
        "crop",
        f"g ({X}) => (float[N, 4, 5, 6] y) {{ q = Pad(x, k) y = Conv(q, w) }}",
        {"k": ints(0, 0, -1, 0, 0, 0, 0, 0)},
        changes=0,
        refusals=1,
    ),
    pad(
        "channels",
        "g (float[N, 3, 8, 8] x) => (float[N, 4, 6, 6] y) { q = Pad(x, k) y = Conv(q, w) }",
        {"k": ints(0, 0, 0, 0, 0, 1, 0, 0)},
        changes=0,
        refusals=1,
    ),
    pad(
        "conv-ones",
        f"g ({X}) => (float[N, 4, 9, 7] y) <float o = {{1}}> {{ q = Pad(x, p, o) y = Conv(q, w) }}",
        changes=0,
        refusals=1,
    ),
    pad(
        "automatic",
        f'g ({X}) => (float[N, 4, 11, 9] y) {{ q = Pad(x, p) y = Conv <auto_pad = "SAME_UPPER"> (q, w) }}',
        changes=0,
        refusals=1,
    ),
    pad(
        "pad-used-elsewhere",
        f"g ({X}) => (float[N, 4, 9, 7] y, float[N, 4, 11, 9] z) {{ q = Pad(x, p) y = Conv(q, w) z = Neg(q) }}",
        changes=0,
        refusals=1,
    ),
    pad("alone", f"g ({X}) => (float[N, 4, 11, 9] y) {{ y = Pad(x, p) }}", changes=0),
    pad(
        "reflect",
        f'g ({X}) => (float[N, 4, 9, 7] y) {{ q = Pad <mode = "reflect"> (x, p) y = Conv(q, w) }}',
        changes=0,
    ),
)

CASES: tuple[Case, ...] = (*AFFINE, *POOLS, *PADS)
