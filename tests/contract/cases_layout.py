"""Cases for the recipes about layout."""

from __future__ import annotations

import numpy as np
from contract_case import Case

X = "float[N, 4, 6, 6] x"
Y = "float[N, 4, 6, 6] y"
NHWC, NCHW = "Transpose <perm = [0, 2, 3, 1]>", "Transpose <perm = [0, 3, 1, 2]>"

RESHAPES: tuple[Case, ...] = (
    Case(
        "reshape-chain",
        "one-head-of-attention",
        "g (float[N, 5, 6] x) => (float[N, 1, 5, 5] y) <int64[4] s = {0, 0, 1, 6}> "
        "{ r = Reshape(x, s) q = Transpose <perm = [0, 2, 1, 3]> (r) k = Transpose <perm = [0, 1, 3, 2]> (q) "
        "y = MatMul(q, k) }",
        changes=0,
    ),
    Case(
        "reshape-chain",
        "one-head-that-is-reshaped",
        "g (float[N, 5, 6] x) => (float[N, 3, 10] y) <int64[4] s = {0, 0, 1, 6}, int64[3] t = {-1, 3, 10}> "
        "{ r = Reshape(x, s) q = Transpose <perm = [0, 2, 1, 3]> (r) y = Reshape(q, t) }",
    ),
    Case(
        "reshape-chain",
        "two",
        "g (float[2, 6] x) => (float[3, 4] y) <int64[3] s = {2, 3, 2}, int64[2] t = {3, -1}> "
        "{ a = Reshape(x, s) y = Reshape(a, t) }",
    ),
    Case(
        "reshape-chain",
        "all-kinds",
        "g (float[N, 4, 1, 1] x) => (float[N, 2, 2] y) <int64[1] s = {0}, int64[3] t = {0, 2, 2}> "
        "{ r = Relu(x) a = Flatten(r) b = Unsqueeze(a, s) c = Squeeze(b, s) y = Reshape(c, t) }",
    ),
    Case(
        "reshape-chain",
        "zero-copies",
        "g (float[N, M, 4] x) => (float[N, 2, M, 2] y) <int64[4] s = {0, 0, 2, 2}, int64[4] t = {0, 2, -1, 2}> "
        "{ a = Reshape(x, s) y = Reshape(a, t) }",
    ),
    Case(
        "reshape-chain",
        "unit-transpose",
        "g (float[N, 4, 1, 6] x) => (float[N, 24] y) <int64[2] t = {0, 24}> "
        "{ a = Transpose <perm = [0, 2, 1, 3]> (x) y = Reshape(a, t) }",
    ),
    Case(
        "reshape-chain",
        "real-transpose",
        "g (float[N, 4, 3, 6] x) => (float[N, 72] y) <int64[2] t = {0, 72}> "
        "{ a = Transpose <perm = [0, 2, 1, 3]> (x) y = Reshape(a, t) }",
        changes=0,
    ),
    Case(
        "reshape-chain",
        "transpose-with-ones",
        "g (float[N, 6, 8] x) => (float[A, 6, 4] y) <int64[5] s = {0, 6, 2, 1, 4}, int64[3] t = {-1, 6, 4}> "
        "{ r = Reshape(x, s) a = Transpose <perm = [0, 2, 1, 3, 4]> (r) y = Reshape(a, t) }",
    ),
    Case(
        "reshape-chain",
        "transpose-of-an-unsqueezed",
        "g (float[N, 6, 2, 4] x) => (float[A, 4, 6] y) <int64[1] s = {1}, int64[3] t = {-1, 4, 6}> "
        "{ r = Unsqueeze(x, s) a = Transpose <perm = [0, 3, 1, 4, 2]> (r) y = Reshape(a, t) }",
    ),
    Case(
        "reshape-chain",
        "transpose-with-ones-and-a-copy",
        "g (float[N, 6, 8] x) => (float[N, 2, 24] y) <int64[5] s = {0, 6, 2, 1, 4}, int64[3] t = {0, 0, 24}> "
        "{ r = Reshape(x, s) a = Transpose <perm = [0, 2, 1, 3, 4]> (r) y = Reshape(a, t) }",
        changes=0,
    ),
    Case(
        "reshape-chain",
        "transpose-with-ones-and-two-readers",
        "g (float[N, 6, 8] x) => (float[A, 6, 4] y, float[B, C, D, E, F] z) <int64[5] s = {0, 6, 2, 1, 4}, "
        "int64[3] t = {-1, 6, 4}> { r = Reshape(x, s) a = Transpose <perm = [0, 2, 1, 3, 4]> (r) y = Reshape(a, t) "
        "z = Neg(a) }",
        changes=0,
    ),
    Case(
        "reshape-chain",
        "used-between",
        "g (float[2, 6] x) => (float[3, 4] y, float[2, 3, 2] z) <int64[3] s = {2, 3, 2}, int64[2] t = {3, 4}> "
        "{ a = Reshape(x, s) y = Reshape(a, t) z = Neg(a) }",
        changes=0,
    ),
    Case(
        "reshape-chain",
        "output-between",
        "g (float[2, 6] x) => (float[3, 4] y, float[2, 3, 2] a) <int64[3] s = {2, 3, 2}, int64[2] t = {3, 4}> "
        "{ a = Reshape(x, s) y = Reshape(a, t) }",
        changes=0,
    ),
    Case(
        "reshape-chain",
        "two-unknown",
        "g (float[N, M, 4] x) => (float[A, B, 2] y) <int64[2] s = {-1, 2}> "
        "{ a = Reshape(x, s) h = Shape(x) k = Slice(h, i, j) n = Neg(k) m = Neg(n) l = Concat <axis = 0> (m, o) "
        "y = Reshape(a, l) }",
        values={
            "i": np.array([0]),
            "j": np.array([1]),
            "o": np.array([-1, 2]),
        },
        changes=0,
        refusals=1,
    ),
    Case(
        "reshape-chain",
        "empty",
        "g (float[2, 0] x) => (float[0, 3] y) <int64[3] s = {0, 0, 1}, int64[2] t = {0, 3}> "
        "{ a = Reshape <allowzero = 1> (x, u) y = Reshape <allowzero = 1> (a, t) }",
        values={"u": np.array([0, 1, 5])},
        changes=0,
        refusals=1,
    ),
    Case(
        "reshape-chain",
        "nested",
        "g (bool k, float[2, 6] x) => (float[3, 4] y) <int64[3] s = {2, 3, 2}, int64[2] t = {3, 4}> "
        "{ u = Reshape(x, s) y = If (k) <"
        "then_branch = a () => (float[3, 4] p) { p = Reshape(u, t) },"
        "else_branch = b () => (float[3, 4] q) { c = Reshape(x, s) d = Neg(c) e = Flatten(d) q = Reshape(e, t) }> }",
    ),
)

PAIRS: tuple[Case, ...] = (
    Case("transpose-pair", "inverse", f"g ({X}) => ({Y}) {{ a = Relu(x) b = {NHWC} (a) c = {NCHW} (b) y = Neg(c) }}"),
    Case("transpose-pair", "merged", f"g ({X}) => (float[N, 6, 4, 6] y) {{ b = {NHWC} (x) y = {NHWC} (b) }}"),
    Case("transpose-pair", "three", f"g ({X}) => ({Y}) {{ a = Relu(x) b = {NHWC} (a) c = {NHWC} (b) y = {NHWC} (c) }}"),
    Case(
        "transpose-pair",
        "used-between",
        f"g ({X}) => ({Y}, float[N, 6, 6, 4] z) {{ a = Relu(x) b = {NHWC} (a) c = {NCHW} (b) y = Neg(c) z = Neg(b) }}",
    ),
    Case(
        "transpose-pair",
        "many-back",
        f"g ({X}) => ({Y}, {X[:-1]}z) {{ a = Relu(x) b = {NHWC} (a) c = {NCHW} (b) d = {NCHW} (b) "
        "y = Neg(c) z = Abs(d) }",
        changes=2,
    ),
    Case(
        "transpose-pair",
        "merging-saves-nothing",
        f"g ({X}) => (float[N, 6, 4, 6] y, float[N, 6, 6, 4] z) {{ b = {NHWC} (x) y = {NHWC} (b) z = Neg(b) }}",
        changes=0,
    ),
    Case("transpose-pair", "input-to-output", f"g ({X}) => ({Y}) {{ b = {NHWC} (x) y = {NCHW} (b) }}", changes=0),
    Case(
        "transpose-pair",
        "between-is-output",
        f"g ({X}) => (float[N, 6, 6, 4] b, float[N, 6, 4, 6] y) {{ b = {NHWC} (x) y = {NHWC} (b) }}",
        changes=0,
    ),
    Case(
        "transpose-pair",
        "nested",
        f"g (bool k, {X}) => ({Y}) {{ t = {NHWC} (x) y = If (k) <"
        f"then_branch = a () => ({X[:-1]}p) {{ p = {NCHW} (t) }},"
        f"else_branch = b () => ({X[:-1]}s) {{ q = Neg(x) c = {NHWC} (q) s = {NCHW} (c) }}> }}",
    ),
)

X4 = "float[N, 4, 6, 6]"
CONV = "Conv <pads = [1, 1, 1, 1]>"
W = {"w": (4, 4, 3, 3), "k": (4, 4, 3, 3)}

PUSHES: tuple[Case, ...] = (
    Case(
        "transpose-push",
        "island",
        f"g ({X}) => ({Y}) {{ c = {CONV} (x, w) t = {NHWC} (c) a = Add(t, b) r = Relu(a) u = {NCHW} (r) "
        f"y = {CONV} (u, k) }}",
        {**W, "b": (4,)},
        tolerance=1e-5,
    ),
    Case(
        "transpose-push",
        "residual",
        f"g ({X}) => ({Y}) {{ c = {CONV} (x, w) t = {NHWC} (c) v = {NHWC} (x) a = Add(t, v) r = Relu(a) "
        f"u = {NCHW} (r) y = {CONV} (u, k) }}",
        W,
        tolerance=1e-5,
    ),
    Case(
        "transpose-push",
        "concat-split-pad-slice",
        f"g ({X}) => (float[N, 2, 8, 8] y) {{ t = {NHWC} (x) a, b = Split <axis = 3> (t) n = Neg(a) "
        f"c = Concat <axis = -1> (n, b, a) p = Pad (c, q) s = Slice (p, i, j, l) u = {NCHW} (s) y = Relu(u) }}",
        values={
            "q": np.array([0, 1, 2, 0, 0, 1, 2, 0]),
            "i": np.array([0, 1]),
            "j": np.array([2, 9]),
            "l": np.array([-1, 2]),
        },
    ),
    Case(
        "transpose-push",
        "softmax-and-mean",
        f"g ({X}) => (float[N, 4, 1, 1] y) {{ t = {NHWC} (x) a = Softmax (t) m = ReduceMean <axes = [1, -2]> (a) "
        f"u = {NCHW} (m) y = Neg(u) }}",
        tolerance=1e-5,
    ),
    Case(
        "transpose-push",
        "mean-drops-axes",
        f"g ({X}) => (float[N, 4] y) {{ t = {NHWC} (x) r = Relu(t) y = ReduceMean <axes = [1, 2], keepdims = 0> (r) }}",
        tolerance=1e-5,
    ),
    Case(
        "transpose-push",
        "sum-with-input",
        f"g ({X}) => (float[N, 4] y) {{ t = {NHWC} (x) s = ReduceSum (t, l) k = Squeeze(s, l) y = Neg(k) }}",
        values={"l": np.array([1, 2])},
        tolerance=1e-5,
    ),
    Case(
        "transpose-push",
        "broadcast-scores",
        "g (float[N, 16, 1, 8] q, float[N, 1, 16, 8] k, float[N, 16, 16, 1] m, float[N, 8, 16, 5] v) => "
        "(float[N, 8, 16, 5] y) { a = Add(q, k) r = Tanh(a) b = Mul(r, m) p = Softmax <axis = 2> (b) "
        "t = Transpose <perm = [0, 3, 1, 2]> (p) y = MatMul(t, v) }",
        tolerance=1e-5,
    ),
    Case(
        "transpose-push",
        "broadcast-little",
        "g (float[N, 16, 1, 4] q, float[N, 1, 6, 4] k, float[N, 4, 6, 5] v) => (float[N, 4, 16, 5] y) "
        "{ a = Add(q, k) r = Tanh(a) t = Transpose <perm = [0, 3, 1, 2]> (r) y = MatMul(t, v) }",
        changes=0,
    ),
    Case(
        "transpose-push",
        "large-mean",
        "g (float[N, 64, 4, 4] x) => (float[N, 1, 1, 64] y) { t = Transpose <perm = [0, 2, 3, 1]> (x) r = Relu(t) "
        "y = ReduceMean <axes = [1, 2]> (r) }",
        tolerance=1e-5,
        changes=0,
    ),
    Case(
        "transpose-push",
        "mean-over-channels",
        f"g ({X}) => (float[N, 6, 6] y) {{ t = {NHWC} (x) y = ReduceMean <axes = [3], keepdims = 0> (t) }}",
        tolerance=1e-5,
    ),
    Case(
        "transpose-push",
        "order-changes",
        "g (float[N, 4, 5, 6] x) => (float[6, 5, 4] y) { t = Transpose <perm = [3, 0, 2, 1]> (x) "
        "r = Relu(t) y = ReduceMax <axes = [1], keepdims = 0> (r) }",
        changes=0,
    ),
    Case(
        "transpose-push",
        "inside-is-output",
        f"g ({X}) => ({Y}, float[N, 6, 6, 4] r) {{ t = {NHWC} (x) a = Neg(t) r = Relu(a) u = {NCHW} (r) y = Abs(u) }}",
    ),
    Case(
        "transpose-push",
        "one-transpose",
        f"g ({X}) => (float[N, 6, 6, 4] y) {{ t = {NHWC} (x) y = Relu(t) }}",
        changes=0,
    ),
    Case(
        "transpose-push",
        "back-is-output",
        f"g ({X}) => ({Y}, {X4} z, {X4} q) {{ t = {NHWC} (x) r = Relu(t) y = {NCHW} (r) z = {NCHW} (r) "
        f"v = {NCHW} (r) q = Neg(v) }}",
    ),
    Case(
        "transpose-push",
        "long-ends-stay",
        f"g ({X}) => ({Y}, float[N, 6, 6, 4] p, float[N, 6, 6, 4] q) {{ t = {NHWC} (x) r = Relu(t) u = {NCHW} (r) "
        "y = Neg(u) a = Abs(r) b = Neg(a) p = Relu(b) c = Neg(r) d = Abs(c) q = Elu(d) }",
    ),
    Case(
        "transpose-push",
        "blocked",
        f"g ({X}) => ({Y}) {{ t = {NHWC} (x) r = Relu(t) m = MatMul(r, w) u = {NCHW} (m) y = Neg(u) }}",
        {"w": (4, 4)},
        changes=0,
    ),
    Case(
        "transpose-push",
        "lower-rank-operand",
        f"g ({X}, float[4] b) => ({Y}) {{ t = {NHWC} (x) a = Add(t, b) u = {NCHW} (a) y = Neg(u) }}",
        changes=0,
    ),
    Case(
        "transpose-push",
        "own-inverse",
        "g (float[N, 4, 5, 6] x) => (float[N, 4, 5, 6] y) { t = Transpose <perm = [0, 2, 1, 3]> (x) a = Relu(t) "
        "u = Transpose <perm = [0, 2, 1, 3]> (a) b = Neg(u) v = Transpose <perm = [0, 2, 1, 3]> (b) c = Abs(v) "
        "w = Transpose <perm = [0, 2, 1, 3]> (c) y = Relu(w) }",
        changes=2,
    ),
    Case(
        "transpose-push",
        "own-inverse-mixed",
        "g (float[N, 4, 4, 6] x) => (float[N, 4, 4, 6] y) { a = Relu(x) t = Transpose <perm = [0, 2, 1, 3]> (a) "
        "b = Add(a, t) c = Neg(b) u = Transpose <perm = [0, 2, 1, 3]> (c) y = Add(c, u) }",
        changes=0,
    ),
    Case(
        "transpose-push",
        "nested",
        f"g (bool k, {X}) => ({Y}) {{ t = {NHWC} (x) y = If (k) <"
        f"then_branch = a () => ({X4} p) {{ q = {NHWC} (x) r = Relu(q) p = {NCHW} (r) }},"
        f"else_branch = b () => ({X4} s) {{ e = Neg(t) s = {NCHW} (e) }}> }}",
    ),
    Case(
        "transpose-push",
        "axes-as-inputs",
        f"g ({X}) => (float[N, 4] y) {{ t = {NHWC} (x) a, b = Split <axis = 2, num_outputs = 2> (t) c = Max(a, b) "
        "p = Pad (c, q, z, l) r = ReduceMax <keepdims = 0> (p, l) y = Neg(r) }",
        values={"l": np.array([1, -2]), "q": np.array([0, 1, 2, 0]), "z": np.zeros((), np.float32)},
        opset=18,
    ),
    Case(
        "transpose-push",
        "old-softmax",
        f"g ({X}) => ({Y}) {{ t = {NHWC} (x) r = Softmax <axis = 1> (t) u = {NCHW} (r) y = Neg(u) }}",
        changes=0,
        opset=12,
        tolerance=1e-5,
    ),
    Case(
        "transpose-push",
        "hub-of-a-kind",
        f"g ({X}) => ({Y}) {{ t = {NHWC} (x) a = Relu(t) b = Neg(t) c = Abs(t) d = Add(a, b) e = Mul(d, c) "
        f"s = ReduceMean <axes = [1, 2, 3]> (e) f = Mul(e, s) u = {NCHW} (f) y = Relu(u) }}",
        tolerance=1e-5,
    ),
    Case(
        "transpose-push",
        "where-and-prelu",
        f"g ({X}) => ({Y}) <float z = {{0}}> {{ t = {NHWC} (x) g = Greater(t, b) w = Where(g, t, z) r = PRelu(w, a) "
        f"m = Max(r, t) u = {NCHW} (m) y = Neg(u) }}",
        {"a": (4,), "b": (6, 4)},
    ),
)

TOKENS = "g (float[N, 6, 4] x) => (float[N, 6, 4] y)"
SWAP, NORM = "Transpose <perm = [0, 2, 1]>", "BatchNormalization (t, g, b, m, v)"
STATISTICS = {"g": (4,), "b": (4,), "m": (4,), "v": (4,)}

NORMS: tuple[Case, ...] = (
    Case(
        "token-batch-norm",
        "tokens",
        f"{TOKENS} {{ t = {SWAP} (x) n = {NORM} u = {SWAP} (n) y = Neg(u) }}",
        STATISTICS,
        tolerance=1e-5,
    ),
    Case(
        "token-batch-norm",
        "image-to-output",
        f"g (float[N, 6, 6, 4] x) => ({Y}) {{ t = {NCHW} (x) y = {NORM} }}",
        STATISTICS,
        tolerance=1e-5,
    ),
    Case(
        "token-batch-norm",
        "rows",
        f"g (float[N, 6, 4] x) => (float[N, 6, 4] y) <int64[2] r = {{-1, 4}}, int64[3] s = {{-1, 6, 4}}> "
        f"{{ t = Reshape(x, r) n = {NORM} y = Reshape(n, s) }}",
        STATISTICS,
        tolerance=1e-5,
    ),
    Case(
        "token-batch-norm",
        "channels-made-by-reshape",
        f"g (float[N, 2, 2] x) => (float[N, 4] y) <int64[2] r = {{-1, 4}}> {{ t = Reshape(x, r) y = {NORM} }}",
        STATISTICS,
        changes=0,
    ),
    Case(
        "token-batch-norm",
        "channels-stay",
        f"g (float[6, 4, N] x) => (float[N, 4, 6] y) {{ t = Transpose <perm = [2, 1, 0]> (x) y = {NORM} }}",
        STATISTICS,
        changes=0,
    ),
    Case(
        "token-batch-norm",
        "computed-statistics",
        f"g (float[N, 6, 4] x, float[4] m) => (float[N, 4, 6] y) {{ t = {SWAP} (x) y = {NORM} }}",
        {name: shape for name, shape in STATISTICS.items() if name != "m"},
        changes=0,
        refusals=1,
    ),
    Case(
        "token-batch-norm",
        "training",
        f"g (float[N, 6, 4] x) => (float[N, 4, 6] y) {{ t = {SWAP} (x) "
        "y, p, q = BatchNormalization <training_mode = 1> (t, g, b, m, v) }",
        STATISTICS,
        changes=0,
        refusals=1,
    ),
    Case(
        "token-batch-norm",
        "variance-of-minus-epsilon",
        f"g (float[N, 6, 4] x) => (float[N, 4, 6] y) {{ t = {SWAP} (x) y = {NORM} }}",
        {name: shape for name, shape in STATISTICS.items() if name != "v"},
        {"v": np.float32([1, 1, -1e-5, 1])},
        changes=0,
        refusals=1,
    ),
)

CASES: tuple[Case, ...] = (*RESHAPES, *PAIRS, *PUSHES, *NORMS)
