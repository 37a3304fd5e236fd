"""Cases for channel alignment: what channels are followed through. What is refused is in ``cases_align_refused.py``."""

from __future__ import annotations

import numpy as np
from contract_case import Case

from trtopt.rewrite.protocol import Target

RTX = Target("tensorrt-rtx", "fp16", "8.9")
TRT = Target("tensorrt", "fp16", "8.9")
P = "<pads = [1, 1, 1, 1]>"
A = {"w1": (7, 8, 3, 3), "b1": (7,), "w2": (7, 7, 3, 3), "b2": (7,), "w3": (4, 7, 1, 1)}
C1, C3 = f"a = Conv {P} (x, w1, b1)", "y = Conv (z, w3)"
"""x with 8 channels -> a with 7; z with 7 -> the output."""


def align(label: str, body: str, weights: dict[str, tuple[int, ...]] = A, **options: object) -> Case:
    """x [N, 8, 6, 6] -> y [N, 4, 6, 6] in FP16 on TensorRT for RTX unless told otherwise."""
    options.setdefault("target", RTX)
    graph = body if body.startswith("g (") else f"g (float[N, 8, 6, 6] x) => (float[N, 4, 6, 6] y) {{ {body} }}"
    used = {name: shape for name, shape in weights.items() if name in graph}
    return Case("misaligned-channels", label, graph, used, tolerance=1e-5, **options)  # type: ignore[arg-type]


def through(label: str, body: str, weights: dict[str, tuple[int, ...]] | None = None, **options: object) -> Case:
    """a with 7 channels -> ``body`` -> z with 7 channels."""
    return align(label, f"{C1} {body} {C3}", {**A, **(weights or {})}, **options)


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def flat(label: str, body: str, rows: int, **options: object) -> Case:
    """a with 7 channels -> ``body`` -> f [N, rows] -> Gemm -> y, on TensorRT."""
    weights = {**A, "wg": (rows, 5), "bg": (5,)}
    text = f"g (float[N, 8, 6, 6] x) => (float[N, 5] y) {{ {C1} {body} y = Gemm (f, wg, bg) }}"
    options.setdefault("target", TRT)
    return align(label, text, weights, refusals=1, **options)  # five classes stay five


FOLLOWED = (
    align("chain", f"{C1} r = Relu(a) c = Conv {P} (r, w2, b2) z = Relu(c) {C3}", changes=2),
    align("no-bias", f"a = Conv {P} (x, w1) z = Relu(a) {C3}"),
    align("residual", f"{C1} c = Conv {P} (a, w2, b2) s = Add(c, a) z = Relu(s) {C3}"),
    align("shared-weight", f"{C1} b = Conv {P} (a, w2, b2) c = Conv {P} (b, w2, b2) s = Add(c, a) z = Add(s, b) {C3}"),
    align("shared-weight-two-groups", f"{C1} b = Conv {P} (a, w2, b2) z = Conv {P} (b, w2, b2) {C3}", changes=3),
    through("sigmoid", "z = Sigmoid(a)"),
    through("hard-sigmoid", "z = HardSigmoid(a)"),
    through("silu", "s = Sigmoid(a) z = Mul(a, s)"),
    through("hard-swish", "z = HardSwish(a)"),
    through("exponential", "t = Tanh(a) z = Exp(t)"),
    through("softplus", "z = Softplus(a)"),
    through("leaky-relu", "z = LeakyRelu <alpha = 0.2> (a)"),
    through("elu", "z = Elu(a)"),
    through("p-relu", "z = PRelu(a, s)", {"s": (7, 1, 1)}),
    through("p-relu-one-slope", "z = PRelu(a, s)", {"s": (1,)}),
    through("clip", "z = Clip(a, lo, hi)", values={"lo": np.float32(0.5), "hi": np.float32(6)}),
    through(
        "scale-and-shift",
        "s = Mul(a, g) t = Add(s, h) z = Div(t, d)",
        {"g": (7, 1, 1), "h": (1, 7, 1, 1)},
        values={"d": np.arange(1, 8, dtype=np.float32).reshape(7, 1, 1)},
    ),
    through("one-number", "z = Add(a, h)", {"h": (1,)}),
    through("map-for-all", "z = Mul(a, h)", {"h": (6, 6)}),
    through("batch-norm", "z = BatchNormalization (a, g, b, m, v)", {"g": (7,), "b": (7,), "m": (7,), "v": (7,)}),
    through("instance-norm", "z = InstanceNormalization (a, g, b)", {"g": (7,), "b": (7,)}),
    through("max-pool", "z = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (a)"),
    through("average-pool", "s = Sigmoid(a) z = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (s)"),
    through("depthwise", "z = Conv <group = 7, pads = [1, 1, 1, 1]> (a, d, b2)", {"d": (7, 1, 3, 3)}),
    through("where", "t = Tanh(a) z = Where(e, a, t)", values={"e": np.ones((6, 6), bool)}),
    through(
        "resize",
        'u = Resize <mode = "nearest"> (a, , s) z = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (u)',
        values={"s": np.array([1, 1, 2, 2], np.float32)},
    ),
    through("pad", "u = Pad(a, p) z = MaxPool <kernel_shape = [3, 3]> (u)", values={"p": ints(0, 0, 1, 1, 0, 0, 1, 1)}),
    through(
        "transpose",
        "t = Transpose <perm = [0, 2, 3, 1]> (a) s = Mul(t, g) z = Transpose <perm = [0, 3, 1, 2]> (s)",
        {"g": (7,)},
    ),
    through(
        "reshape",
        "t = Reshape(a, s) u = Relu(t) z = Reshape(u, q)",
        values={"s": ints(-1, 7, 36), "q": ints(0, 7, 6, 6)},
    ),
    through(
        "reshape-copies", "t = Reshape(a, s) z = Reshape(t, q)", values={"s": ints(0, 0, -1), "q": ints(0, 0, 6, 6)}
    ),
    through(
        "squeeze-excite",
        "p = GlobalAveragePool(a) h = Conv(p, q1) r = Relu(h) e = Conv(r, q2) s = Sigmoid(e) z = Mul(a, s)",
        {"q1": (4, 7, 1, 1), "q2": (7, 4, 1, 1)},
        refusals=1,
    ),
    through("mean", "m = ReduceMean <axes = [2, 3]> (a) z = Sub(a, m)"),
    through("softmax-over-space", "z = Softmax <axis = 3> (a)"),
    through(
        "linear-last",
        "t = Transpose <perm = [0, 2, 3, 1]> (a) u = MatMul(t, m) v = Add(u, n) z = Transpose "
        "<perm = [0, 3, 1, 2]> (v)",
        {"m": (7, 7), "n": (7,)},
        refusals=1,
    ),
)

B = {**A, "v1": (6, 8, 3, 3), "v2": (4, 13, 1, 1), "v3": (4, 14, 1, 1), "v4": (4, 21, 1, 1)}
MOVED = (
    align("concat", f"{C1} b = Conv {P} (x, v1) z = Concat <axis = 1> (a, b) y = Conv (z, v2)", B, refusals=1),
    align(
        "concat-first-part",
        f"{C1} b = Conv {P} (x, v1) z = Concat <axis = 1> (b, a) s = Sigmoid(z) y = Conv (s, v2)",
        B,
        refusals=1,
    ),
    align(
        "concat-same-part-twice",
        f"{C1} r = Conv {P} (a, w2) b = Add(a, r) z = Concat <axis = 1> (b, a) s = Relu(z) "
        "h = Conv (z, v3) e = Conv(s, v3) d = Conv(a, w3) i = Add(h, e) y = Add(i, d)",
        B,
    ),
    align(
        "concat-of-three",
        f"{C1} b = Conv {P} (x, w1) c = Conv {P} (x, w1, b2) z = Concat <axis = 1> (a, b, c) y = Conv (z, v4)",
        B,
    ),
    align("concat-with-input", f"{C1} z = Concat <axis = 1> (x, a) y = Conv (z, u)", {**A, "u": (4, 15, 1, 1)}),
    align(
        "concat-with-constant",
        f"g (float[1, 8, 6, 6] x) => (float[1, 4, 6, 6] y) {{ {C1} z = Concat <axis = 1> (k, "
        "a) y = Conv (z, v3) "
        "c = Conv (a, w3) }",
        {**A, **B, "k": (1, 7, 6, 6)},
        refusals=1,
    ),
    align(
        "concat-over-space",
        f"g (float[1, 8, 6, 6] x) => (float[1, 4, 7, 6] y) {{ {C1} z = Concat <axis = 2> (a, k) {C3} }}",
        {**A, "k": (1, 7, 1, 6)},
    ),
    align(
        "concat-then-norm",
        f"{C1} b = Conv {P} (x, v1) c = Concat <axis = 1> (a, b) z = BatchNormalization (c, g, "
        "h, m, v) y = Conv (z, v2)",
        {**B, "g": (13,), "h": (13,), "m": (13,), "v": (13,)},
        refusals=1,
    ),
    align(
        "split",
        f"a = Conv {P} (x, t1) p, q = Split <axis = 1> (a, s) r = Relu(p) i = Conv(r, w3) j = "
        "Conv(q, t2) y = Add(i, j)",
        {**A, "t1": (12, 8, 3, 3), "t2": (4, 5, 1, 1)},
        values={"s": ints(7, 5)},
        changes=2,
    ),
    align(
        "split-in-equal-parts",
        f"a = Conv {P} (x, t1) p, q = Split <axis = 1> (a) i = Conv(p, w3) j = Conv(q, w3) y = Add(i, j)",
        {**A, "t1": (14, 8, 3, 3)},
        changes=2,
    ),
    align(
        "split-in-equal-parts-18",
        f"a = Conv {P} (x, t1) p, q = Split <axis = 1, num_outputs = 2> (a) i = Conv(p, w3) j "
        "= Conv(q, w3) "
        "y = Add(i, j)",
        {**A, "t1": (14, 8, 3, 3)},
        changes=2,
        opset=18,
    ),
    align(
        "split-in-equal-parts-11",
        f"a = Conv {P} (x, t1) p, q = Split <axis = 1> (a) i = Conv(p, w3) j = Conv(q, w3) y = Add(i, j)",
        {**A, "t1": (14, 8, 3, 3)},
        changes=2,
        opset=11,
    ),
    align(
        "split-attribute",
        f"a = Conv {P} (x, t1) p, q = Split <axis = 1, split = [7, 5]> (a) i = Conv(p, w3) j = "
        "Conv(q, t2) y = Add(i, j)",
        {**A, "t1": (12, 8, 3, 3), "t2": (4, 5, 1, 1)},
        changes=2,
        opset=11,
    ),
    align(
        "slice",
        f"a = Conv {P} (x, t1) p = Slice(a, s0, s1, c) q = Slice(a, s1, e, c) i = Conv(p, w3) "
        "j = Conv(q, t2) y = Add(i, j)",
        {**A, "t1": (12, 8, 3, 3), "t2": (4, 5, 1, 1)},
        changes=2,
        values={"s0": ints(0), "s1": ints(7), "e": ints(2**63 - 1), "c": ints(1)},
    ),
    align(
        "slice-from-the-end",
        f"a = Conv {P} (x, t1) p = Slice(a, s0, s1, c) q = Slice(a, s1, e, c) i = Conv(p, w3) "
        "j = Conv(q, t2) "
        "y = Add(i, j)",
        {**A, "t1": (12, 8, 3, 3), "t2": (4, 5, 1, 1)},
        changes=2,
        values={"s0": ints(-12), "s1": ints(-5), "e": ints(99), "c": ints(-3)},
    ),
    through(
        "slice-of-space",
        "u = Slice(a, s, e, c) z = Resize (u, , , n)",
        values={"s": ints(0), "e": ints(5), "c": ints(2), "n": ints(1, 7, 6, 6)},
    ),
    align(
        "grouped",
        f"a = Conv {P} (x, t1) r = Relu(a) c = Conv <group = 2> (r, t2, t3) y = Conv(c, t4)",
        {"t1": (10, 8, 3, 3), "t2": (12, 5, 1, 1), "t3": (12,), "t4": (4, 12, 1, 1)},
        refusals=1,
    ),
    align(
        "grouped-outputs",
        f"a = Conv {P} (x, t1) r = Relu(a) c = Conv <group = 2> (r, t2, t3) z = Relu(c) y = Conv <group = 2> (z, t4)",
        {"t1": (8, 8, 3, 3), "t2": (14, 4, 1, 1), "t3": (14,), "t4": (4, 7, 1, 1)},
        refusals=1,
    ),
    align(
        "depthwise-multiplier",
        f"{C1} d = Conv <group = 7, pads = [1, 1, 1, 1]> (a, d1, d2) y = Conv(d, v3) o = Conv(a, w3)",
        {**B, "d1": (14, 1, 3, 3), "d2": (14,)},
        changes=1,
    ),
    align(
        "depthwise-chain",
        f"{C1} d = Conv <group = 7, pads = [1, 1, 1, 1]> (a, d1, d2) r = Clip(d) e = Conv "
        "<group = 7> (r, d3) s = Add(e, a) "
        "y = Conv(s, w3)",
        {**B, "d1": (7, 1, 3, 3), "d2": (7,), "d3": (7, 1, 1, 1)},
    ),
    align(
        "transposed",
        f"g (float[N, 8, 6, 6] x) => (float[N, 4, 12, 12] y) {{ {C1} t = ConvTranspose "
        "<strides = [2, 2]> (a, t1, b2) "
        "z = Relu(t) y = Conv(z, w3) }",
        {**A, "t1": (7, 7, 2, 2)},
        changes=2,
    ),
    align(
        "transposed-grouped",
        "g (float[N, 8, 6, 6] x) => (float[N, 4, 12, 12] y) { a = Conv (x, t0) "
        "t = ConvTranspose <strides = [2, 2], group = 2> (a, t1, t2) z = Relu(t) y = Conv "
        "<group = 2> (z, w3) }",
        {**A, "t0": (10, 8, 1, 1), "t1": (10, 7, 2, 2), "t2": (14,)},
    ),
    align(
        "transposed-grouped-both",
        "g (float[N, 8, 6, 6] x) => (float[N, 8, 12, 12] y) { a = Conv (x, t0) "
        "t = ConvTranspose <strides = [2, 2], group = 2> (a, t1, t2) z = Relu(t) y = Conv "
        "<group = 2> (z, w3) }",
        {"w3": (8, 7, 1, 1), "t0": (12, 8, 1, 1), "t1": (12, 7, 2, 2), "t2": (14,)},
        target=TRT,
        changes=2,
    ),
    align(
        "transposed-depthwise",
        f"g (float[N, 8, 6, 6] x) => (float[N, 4, 12, 12] y) {{ {C1} "
        "z = ConvTranspose <strides = [2, 2], group = 7> (a, t1, b2) y = Conv(z, w3) }",
        {**A, "t1": (7, 1, 2, 2)},
    ),
    align(
        "conv-1d",
        "g (float[N, 8, 6] x) => (float[N, 4, 6] y) { a = Conv(x, t1) r = Relu(a) y = Conv(r, t2) }",
        {"t1": (7, 8, 1), "t2": (4, 7, 1)},
    ),
    align(
        "in-a-branch",
        f"g (bool c, float[N, 8, 6, 6] x) => (float[N, 4, 6, 6] y) {{ {C1} y = If (c) <"
        "then_branch = t () => (float[N, 4, 6, 6] p) { p = Conv(a, w3) },"
        "else_branch = e () => (float[N, 4, 6, 6] q) { r = Relu(a) q = Conv(r, w3) }> }",
    ),
    align(
        "inside-a-branch",
        "g (bool c, float[N, 8, 6, 6] x) => (float[N, 4, 6, 6] y) { y = If (c) <"
        f"then_branch = t () => (float[N, 4, 6, 6] p) {{ {C1} p = Conv(a, w3) }},"
        "else_branch = e () => (float[N, 4, 6, 6] q) { q = Relu(k) }> }",
        {**A, "k": (1, 4, 6, 6)},
    ),
    flat("flatten", "r = Relu(a) f = Flatten(r)", 252),
    flat("reshape-to-rows", "f = Reshape(a, s)", 252, values={"s": ints(-1, 252)}),
    flat("reshape-rows-inferred", "f = Reshape(a, s)", 252, values={"s": ints(0, -1)}),
    flat("global-pool", "p = GlobalAveragePool(a) f = Flatten(p)", 7),
    flat("squeeze", "p = GlobalAveragePool(a) f = Squeeze(p, s)", 7, values={"s": ints(2, 3)}),
    flat("mean-without-axes", "f = ReduceMean <axes = [2, 3], keepdims = 0> (a)", 7),
    flat(
        "max-without-axes",
        "p = Unsqueeze(a, u) m = ReduceMax <axes = [-1, 3, 4], keepdims = 0> (p) f = Flatten(m)",
        7,
        values={"u": ints(2)},
    ),
    flat(
        "gemm-chain",
        "p = GlobalAveragePool(a) e = Flatten(p) h = Gemm <transB = 1, alpha = 0.5, beta = "
        "2.0> (e, g1, g2) f = Relu(h)",
        11,
        changes=2,
        values={"g1": np.ones((11, 7), np.float32), "g2": np.ones((1, 11), np.float32)},
    ),
    align(
        "head",
        "g (float[N, 16] x) => (float[N, 1001] y) { y = Gemm(x, w, b) }",
        {"w": (16, 1001), "b": (1001,)},
        target=TRT,
    ),
    align(
        "head-matmul",
        "g (float[N, 4, 16] x) => (float[N, 4, 1001] y) { y = MatMul(x, w) }",
        {"w": (16, 1001)},
        target=TRT,
    ),
    align(
        "embedding",
        "g (float[N, 5] x) => (float[N, 5, 8] y) { i = Cast <to = 7> (x) j = Clip(i, i0, i1) "
        "e = Gather(t, j) h = MatMul(e, w) r = Add(h, e) s = Relu(r) y = MatMul(s, u) }",
        {"t": (40, 13), "w": (13, 13), "u": (13, 8)},
        target=TRT,
        values={"i0": np.int64(0), "i1": np.int64(39)},
    ),
    through("both-backends", "z = Relu(a)", target=Target(None, "fp16"), refusals=1),
    through(
        "turing-depthwise",
        "z = Conv <group = 7, pads = [1, 1, 1, 1]> (a, d, b2)",
        {"d": (7, 1, 3, 3)},
        target=Target("tensorrt-rtx", "fp16", "7.5"),
    ),
    through(
        "transposed-in-fp32",
        "t = ConvTranspose <pads = [1, 1, 1, 1]> (a, w2, b2) z = Relu(t)",
        target=Target("tensorrt-rtx", "fp32"),
        changes=2,
    ),
    through("int8", "z = Relu(a)", target=Target("tensorrt", "int8"), changes=0, refusals=2),
    through("fp32-in-fours", "z = Relu(a)", target=Target("tensorrt", "fp32")),
)
CASES: tuple[Case, ...] = (*FOLLOWED, *MOVED)
