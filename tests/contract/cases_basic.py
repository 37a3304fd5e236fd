"""Cases for the recipes that clean and fold."""

from __future__ import annotations

from contract_case import Case

BN_WEIGHTS = {"g": (4,), "b": (4,), "m": (4,), "v": (4,)}
X = "float[N, 3, 8, 8] x"
BN = "BatchNormalization (c, g, b, m, v)"

CASES: tuple[Case, ...] = (
    Case(
        "identity",
        "chain",
        f"g ({X}) => ({X[:-1]}y) {{ a = Relu(x) c = Identity(a) d = Identity(c) y = Neg(d) }}",
        changes=2,
    ),
    Case("identity", "before-output", f"g ({X}) => ({X[:-1]}y) {{ a = Relu(x) y = Identity(a) }}"),
    Case("identity", "input-to-output", f"g ({X}) => ({X[:-1]}y) {{ y = Identity(x) }}", changes=0),
    Case("identity", "two-outputs", f"g ({X}) => ({X[:-1]}y, {X[:-1]}z) {{ y = Relu(x) z = Identity(y) }}", changes=0),
    Case("identity", "dropout", f"g ({X}) => ({X[:-1]}y) {{ a = Relu(x) d = Dropout(a) y = Neg(d) }}"),
    Case(
        "identity",
        "dropout-training",
        f"g ({X}, bool t) => ({X[:-1]}y) <float r = {{0}}> {{ a = Relu(x) d = Dropout(a, r, t) y = Neg(d) }}",
        changes=0,
        refusals=1,
    ),
    Case(
        "identity",
        "dropout-mask",
        f"g ({X}) => ({X[:-1]}y, bool[N, 3, 8, 8] k) {{ a = Relu(x) y, k = Dropout(a) }}",
        changes=0,
        refusals=1,
    ),
    Case(
        "identity",
        "nested",
        "g (bool c, float[4] x) => (float[4] y) { t = Relu(x) y = If (c) <"
        "then_branch = a () => (float[4] p) { q = Identity(t) p = Neg(q) },"
        "else_branch = b () => (float[4] s) { s = Identity(t) }> }",
    ),
    Case("no-op", "cast", f"g ({X}) => ({X[:-1]}y) {{ a = Relu(x) d = Cast <to = 1> (a) y = Neg(d) }}"),
    Case("no-op", "cast-that-converts", f"g ({X}) => (float16[N, 3, 8, 8] y) {{ y = Cast <to = 10> (x) }}", changes=0),
    Case("no-op", "transpose", f"g ({X}) => ({X[:-1]}y) {{ d = Transpose <perm = [0, 1, 2, 3]> (x) y = Neg(d) }}"),
    Case(
        "no-op",
        "transpose-that-moves",
        f"g ({X}) => (float[N, 8, 8, 3] y) {{ y = Transpose <perm = [0, 2, 3, 1]> (x) }}",
        changes=0,
    ),
    Case(
        "no-op",
        "pad",
        f"g ({X}) => ({X[:-1]}y) <int64[8] p = {{0, 0, 0, 0, 0, 0, 0, 0}}> {{ d = Pad(x, p) y = Neg(d) }}",
    ),
    Case(
        "no-op",
        "pad-one",
        f"g ({X}) => (float[N, 3, 8, 9] y) <int64[8] p = {{0, 0, 0, 0, 0, 0, 0, 1}}> {{ y = Pad(x, p) }}",
        changes=0,
    ),
    Case(
        "no-op",
        "slice",
        f"g ({X}) => ({X[:-1]}y) "
        "<int64[2] s = {0, 0}, int64[2] e = {3, 9223372036854775807}, int64[2] a = {1, 3}> "
        "{ d = Slice(x, s, e, a) y = Neg(d) }",
    ),
    Case(
        "no-op",
        "slice-of-a-part",
        f"g ({X}) => (float[N, 2, 8, 8] y) <int64[1] s = {{0}}, int64[1] e = {{2}}, int64[1] a = {{1}}> "
        "{ y = Slice(x, s, e, a) }",
        changes=0,
    ),
    Case(
        "no-op",
        "slice-backwards",
        f"g ({X}) => (float[N, M, 8, 8] y) "
        "<int64[1] s = {0}, int64[1] e = {9}, int64[1] a = {1}, int64[1] t = {2}> "
        "{ y = Slice(x, s, e, a, t) }",
        changes=0,
    ),
    Case(
        "no-op",
        "reshape",
        "g (float[N, 6] x) => (float[N, 6] y) <int64[2] s = {-1, 6}> { r = Relu(x) d = Reshape(r, s) y = Neg(d) }",
    ),
    Case(
        "no-op",
        "reshape-that-changes",
        "g (float[N, 6] x) => (float[M, 3] y) <int64[2] s = {-1, 3}> { y = Reshape(x, s) }",
        changes=0,
    ),
    *(
        Case(
            "no-op",
            f"reshape-of-open-sizes-{first}-{second}",
            f"g (float[{first}, {second}, 6] x) => (float[{first}, {second}, 6] y) <int64[1] six = {{6}}> "
            "{ r = Relu(x) n = Shape <start = 0, end = 1> (x) s = Shape <start = 1, end = 2> (x) "
            "t = Concat <axis = 0> (n, s, six) d = Reshape(r, t) y = Neg(d) }",
            changes=int(first != second),  # a name that two axes have says nothing
        )
        for first, second in (("N", "S"), ("None", "None"))
    ),
    Case("no-op", "concat-of-one", f"g ({X}) => ({X[:-1]}y) {{ d = Concat <axis = 1> (x) y = Neg(d) }}"),
    Case("dead-node", "chain", f"g ({X}) => ({X[:-1]}y) {{ y = Relu(x) a = Neg(x) d = Abs(a) }}", changes=2),
    Case("dead-node", "weight", "g (float[4] x) => (float[4] y) <float[4] w = {1, 2, 3, 4}> { y = Relu(x) }"),
    Case(
        "dead-node",
        "used-inside-only",
        "g (bool c, float[4] x) => (float[4] y) { t = Relu(x) u = Abs(x) y = If (c) <"
        "then_branch = a () => (float[4] p) { d = Exp(t) p = Neg(t) },"
        "else_branch = b () => (float[4] s) { s = Sin(t) }> }",
        changes=2,
    ),
    Case(
        "constant-expression",
        "weight-behind-nodes",
        "g (float[N, 6] x) => (float[N, 4] y) <int64[2] s = {4, 6}> "
        "{ r = Reshape(w, s) t = Transpose(r) y = MatMul(x, t) }",
        {"w": (24,)},
        changes=2,
    ),
    Case(
        "constant-expression", "shape", "g (float[2, 3] x) => (int64[2] y, float[2, 3] z) { z = Relu(x) y = Shape(x) }"
    ),
    Case(
        "constant-expression",
        "part-of-a-joined-shape",
        "g (float[N, 3] x) => (int64[1] y, float[N, 3] z) <int64[2] k = {56, 96}, int64[1] at = {1}> "
        "{ z = Relu(x) s = Shape <end = 1> (x) c = Concat <axis = 0> (s, k) y = Gather(c, at) }",
    ),
    Case(
        "constant-expression",
        "open-part-of-a-joined-shape",
        "g (float[N, 3] x) => (int64[1] y, float[N, 3] z) <int64[2] k = {56, 96}, int64[1] at = {0}> "
        "{ z = Relu(x) s = Shape <end = 1> (x) c = Concat <axis = 0> (s, k) y = Gather(c, at) }",
        changes=0,
    ),
    Case("constant-expression", "dynamic-shape", "g (float[N, 3] x) => (int64[2] y) { y = Shape(x) }", changes=0),
    Case(
        "constant-expression",
        "bomb",
        "g (float[1] x) => (float[20000, 20000] y) <float[1] o = {1}, int64[2] s = {20000, 20000}> "
        "{ e = Expand(o, s) y = Mul(x, e) }",
        changes=0,
        refusals=1,
    ),
    Case(
        "constant-expression",
        "quantized-weight",
        "g (float[N, 4] x) => (float[N, 2] y) <int8[4, 2] w = {1, 2, 3, 4, 5, 6, 7, 8}, float s = {0.5}> "
        "{ d = DequantizeLinear(w, s) y = MatMul(x, d) }",
        changes=0,
    ),
    Case(
        "constant-expression",
        "random",
        "g (float[2] x) => (float[2] y) "
        "{ r = RandomNormal <shape = [2]> () z = Mul(r, r) q = Sub(z, z) y = Add(x, q) }",
        changes=0,
    ),
    Case(
        "constant-expression",
        "constant-output",
        "g (float[2] x) => (float[2] y, float[2] z) <float[2] w = {1, 2}> { y = Relu(x) z = Neg(w) }",
    ),
    Case(
        "constant-expression",
        "nested",
        "g (bool c, float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = If (c) <"
        "then_branch = a () => (float[2] p) { n = Neg(w) p = Add(x, n) },"
        "else_branch = b () => (float[2] s) { s = Constant <value = float[2] {3, 4}> () }> }",
    ),
    Case(
        "constant-branch",
        "nested-twice",
        "g (float[2] x) => (float[2] y) <bool t = {1}, bool f = {0}> { i = If (t) <"
        "then_branch = a () => (float[2] p) { p = If (f) <"
        "then_branch = c () => (float[2] q) { q = Exp(x) }, else_branch = d () => (float[2] r) { r = Sin(x) }> },"
        "else_branch = b () => (float[2] s) { s = Cos(x) }> y = Neg(i) }",
        changes=2,
    ),
    Case(
        "constant-branch",
        "output-is-a-weight",
        "g (float[2] x) => (float[2] y, float[2] z) <bool t = {0}, float[2] w = {1, 2}> { z = Relu(x) y = If (t) <"
        "then_branch = a () => (float[2] p) { p = Neg(x) }, else_branch = b () => (float[2] w) { k = Neg(x) }> }",
    ),
    Case(
        "constant-branch",
        "computed",
        "g (bool c, float[2] x) => (float[2] y) { y = If (c) <"
        "then_branch = a () => (float[2] p) { p = Exp(x) }, else_branch = b () => (float[2] s) { s = Cos(x) }> }",
        changes=0,
    ),
    Case(
        "batch-norm",
        "conv",
        f"g ({X}) => (float[N, 4, 6, 6] y) {{ c = Conv(x, w) n = {BN} y = Relu(n) }}",
        {"w": (4, 3, 3, 3), **BN_WEIGHTS},
        tolerance=1e-5,
    ),
    Case(
        "batch-norm",
        "conv-bias-output",
        f"g ({X}) => (float[N, 4, 6, 6] y) {{ c = Conv(x, w, a) y = {BN} }}",
        {"w": (4, 3, 3, 3), "a": (4,), **BN_WEIGHTS},
        tolerance=1e-5,
    ),
    Case(
        "batch-norm",
        "grouped",
        f"g (float[N, 4, 8, 8] x) => (float[N, 4, 6, 6] y) {{ c = Conv <group = 2> (x, w) y = {BN} }}",
        {"w": (4, 2, 3, 3), **BN_WEIGHTS},
        tolerance=1e-5,
    ),
    Case(
        "batch-norm",
        "shared-weight",
        f"g ({X}) => (float[N, 4, 6, 6] y) {{ c = Conv(x, w) d = Conv(x, w) n = {BN} y = Add(n, d) }}",
        {"w": (4, 3, 3, 3), **BN_WEIGHTS},
        tolerance=1e-5,
    ),
    Case(
        "batch-norm",
        "transposed-grouped",
        f"g (float[N, 6, 5, 5] x) => (float[N, 4, 7, 7] y) {{ c = ConvTranspose <group = 2> (x, w) y = {BN} }}",
        {"w": (6, 2, 3, 3), **BN_WEIGHTS},
        tolerance=1e-5,
    ),
    Case(
        "batch-norm",
        "gemm",
        f"g (float[N, 6] x) => (float[N, 4] y) {{ c = Gemm <alpha = 0.5, beta = 2.0, transB = 1> (x, w, a) y = {BN} }}",
        {"w": (4, 6), "a": (4,), **BN_WEIGHTS},
        tolerance=1e-5,
    ),
    Case(
        "batch-norm",
        "gemm-without-bias",
        f"g (float[N, 6] x) => (float[N, 4] y) {{ c = Gemm (x, w) y = {BN} }}",
        {"w": (6, 4), **BN_WEIGHTS},
        tolerance=1e-5,
    ),
    Case(
        "batch-norm",
        "used-elsewhere",
        f"g ({X}) => (float[N, 4, 6, 6] y) {{ c = Conv(x, w) n = {BN} y = Add(n, c) }}",
        {"w": (4, 3, 3, 3), **BN_WEIGHTS},
        changes=0,
        refusals=1,
    ),
    Case(
        "batch-norm",
        "conv-is-output",
        f"g ({X}) => (float[N, 4, 6, 6] y, float[N, 4, 6, 6] c) {{ c = Conv(x, w) y = {BN} }}",
        {"w": (4, 3, 3, 3), **BN_WEIGHTS},
        changes=0,
        refusals=1,
    ),
    Case(
        "batch-norm",
        "computed-weight",
        f"g ({X}, float[4, 3, 3, 3] w) => (float[N, 4, 6, 6] y) {{ c = Conv(x, w) y = {BN} }}",
        BN_WEIGHTS,
        changes=0,
        refusals=1,
    ),
    Case(
        "batch-norm",
        "training",
        "g (float[N, 3, 8, 8] x) => (float[N, 4, 6, 6] y) { c = Conv(x, w) "
        "y, p, q = BatchNormalization <training_mode = 1> (c, g, b, m, v) }",
        {"w": (4, 3, 3, 3), **BN_WEIGHTS},
        changes=0,
        refusals=1,
    ),
    Case(
        "batch-norm",
        "nested",
        "g (bool k, float[N, 3, 8, 8] x) => (float[N, 4, 6, 6] y) { y = If (k) <"
        "then_branch = t () => (float[N, 4, 6, 6] p) { c = Conv(x, w) p = BatchNormalization(c, g, b, m, v) },"
        "else_branch = e () => (float[N, 4, 6, 6] q) { q = Conv(x, w) }> }",
        {"w": (4, 3, 3, 3), **BN_WEIGHTS},
        tolerance=1e-5,
    ),
)
