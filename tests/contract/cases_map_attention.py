"""Cases for map-attention: x [N, 8, 3, 4], twelve positions of eight channels; queries and keys of 4, values of 8."""

from __future__ import annotations

from contract_case import Case

from trtopt.rewrite.protocol import Target

RTX = Target("tensorrt-rtx", "fp16")
IO = "g (float[N, 8, 3, 4] x) => (float[N, 8, 3, 4] y)"
SHAPES = (
    "int64[3] narrow = {0, 4, 12}, int64[3] wide = {0, 8, 12}, int64[3] pooled = {0, 4, 6}, int64[3] few = {0, 8, 6}, "
    "int64[4] map = {-1, 8, 3, 4}, int64[4] heads = {0, 2, 4, 12}, int64[4] cut = {0, 2, 12, 12}, "
    "int64[3] batch = {-1, 4, 12}, int64[3] sizes = {4, 4, 4}, int64[1] one = {1}, float c = {0.5}, float d = {2.0}, "
    "float less = {-0.5}, int64[4] single = {0, 1, 8, 12}, int64[3] two = {0, 4, 2}"
)
WEIGHTS = {
    **{f"w{each}": (4, 8, 1, 1) for each in "qk"},
    **{f"w{each}": (8, 8, 1, 1) for each in "vohm"},
    **{"wt": (24, 8, 1, 1), "w3": (4, 8, 3, 3), "wg": (4, 2, 1, 1), "w8": (8, 8, 3, 3), "w1": (4, 8, 1)},
    **{"w2": (4, 8, 2, 2), "bq": (4,), "bk": (4,), "bv": (8,), "bo": (8,), "bt": (24,), "b8": (8,)},
}
FLAT = "qf = Reshape(q, narrow) kf = Reshape(k, narrow) vf = Reshape(v, wide)"
PLAIN = f"q = Conv(x, wq) k = Conv(x, wk) v = Conv(x, wv) {FLAT}"
BIASED = f"q = Conv(x, wq, bq) k = Conv(x, wk, bk) v = Conv(x, wv, bv) {FLAT}"
TURN = "Transpose <perm = [0, 2, 1]>"
SCORES = f"qt = {TURN} (qf) s = MatMul(qt, kf) p = Softmax <axis = -1> (s)"
SAGAN = f"pt = {TURN} (p) o = MatMul(vf, pt) m = Reshape(o, map)"
LOCAL = f"vt = {TURN} (vf) o = MatMul(p, vt) ot = {TURN} (o) m = Reshape(ot, map)"
RESIDUAL = "y = Add(m, x)"
HEADS = "q, k, v = Split <axis = 2> (h, sizes)"
SPREAD = "Transpose <perm = [0, 1, 3, 2]>"
APART = f"qt = {SPREAD} (q) s = MatMul(qt, k) p = Softmax <axis = -1> (s) pt = {SPREAD} (p) o = MatMul(v, pt)"
POOL = "MaxPool <kernel_shape = [1, 2], strides = [1, 2]>"
POOLED = f"qf = Reshape(q, narrow) kp = {POOL} (k) vp = {POOL} (v) kf = Reshape(kp, pooled) vf = Reshape(vp, few)"


def attention(label: str, body: str, io: str = IO, **options: object) -> Case:
    weights = {name: shape for name, shape in WEIGHTS.items() if any(f"{name}{end}" in body for end in "),")}
    options = {"weights": weights, "tolerance": 2e-5, "target": RTX, **options}
    return Case("map-attention", label, f"{io} <{SHAPES}> {{ {body} }}", **options)  # type: ignore[arg-type]


def other(label: str, body: str, io: str = IO, **options: object) -> Case:
    return attention(label, body, io, **{"changes": 0, **options})


CASES: tuple[Case, ...] = (
    attention("channels-first", f"{PLAIN} {SCORES} {SAGAN} {RESIDUAL}"),
    attention("tokens-first", f"{PLAIN} {SCORES} {LOCAL} {RESIDUAL}"),
    attention("fixed-batch", f"{BIASED} {SCORES} {SAGAN} {RESIDUAL}", IO.replace("N", "2")),
    attention("biases", f"{BIASED} {SCORES} {SAGAN} {RESIDUAL}"),
    attention("biases-into-a-convolution", f"{BIASED} {SCORES} {LOCAL} z = Conv(m, wo, bo) y = Add(z, x)"),
    attention(
        "biases-into-one-of-three-by-three",
        f"{BIASED} {SCORES} {LOCAL} y = Conv(m, w8)",
        IO.replace("3, 4] y", "1, 2] y"),
    ),
    attention("biases-behind-padding", f"{BIASED} {SCORES} {LOCAL} y = Conv <pads = [1, 1, 1, 1]> (m, w8, b8)"),
    attention("biases-into-what-is-added", f"{BIASED} {SCORES} {SAGAN} z = Conv(x, wo) g = Mul(m, c) y = Add(g, z)"),
    attention("what-is-added-is-read-twice", f"{BIASED} {SCORES} {SAGAN} z = Conv(x, wo) g = Add(m, z) y = Mul(g, z)"),
    attention(
        "scores-transposed",
        f"{PLAIN} qt = {TURN} (qf) s = MatMul(qt, kf) p = Softmax <axis = 1> (s) o = MatMul(vf, p) m = Reshape(o, map) "
        f"{RESIDUAL}",
    ),
    attention(
        "turned-before-softmax",
        f"{BIASED} qt = {TURN} (qf) s = MatMul(qt, kf) st = {TURN} (s) p = Softmax <axis = 1> (st) o = MatMul(vf, p) "
        f"m = Reshape(o, map) {RESIDUAL}",
    ),
    attention(
        "scales",
        f"{BIASED} qc = Mul(qf, c) kc = Div(kf, d) vc = Mul(c, vf) qt = {TURN} (qc) s = MatMul(qt, kc) t = Div(s, d) "
        f"p = Softmax <axis = -1> (t) pt = {TURN} (p) o = MatMul(vc, pt) m = Reshape(o, map) z = Conv(m, wo) "
        "y = Add(z, x)",
    ),
    attention("pooled", f"{PLAIN} ".replace(FLAT, POOLED) + f"{SCORES} {SAGAN} {RESIDUAL}"),
    attention("pooled-biases", f"{BIASED} ".replace(FLAT, POOLED) + f"{SCORES} {LOCAL} z = Conv(m, wo) y = Add(z, x)"),
    attention(
        "activated",
        f"{BIASED} ".replace(FLAT, "r = Relu(q) qf = Reshape(r, narrow) kf = Reshape(k, narrow) vf = Reshape(v, wide)")
        + f"{SCORES} {SAGAN} {RESIDUAL}",
    ),
    attention(
        "keys-of-neighbours",
        f"q = Conv(x, wq, bq) k = Conv <pads = [1, 1, 1, 1]> (x, w3, bk) v = Conv(x, wv, bv) {FLAT} {SCORES} {SAGAN} "
        f"{RESIDUAL}",
    ),
    attention("heads", f"a = Conv(x, wt, bt) h = Reshape(a, cut) {HEADS} {APART} m = Reshape(o, map) {RESIDUAL}"),
    attention(
        "heads-into-a-convolution",
        f"a = Conv(x, wt, bt) h = Reshape(a, cut) {HEADS} {APART} m = Reshape(o, map) z = Conv(m, wo) y = Add(z, x)",
    ),
    attention(
        "heads-in-the-batch",
        "q = Conv(x, wo, bo) k = Conv(x, wh, bo) v = Conv(x, wm, bv) qf = Reshape(q, batch) kf = Reshape(k, batch) "
        f"vf = Reshape(v, batch) {SCORES} {SAGAN} {RESIDUAL}",
    ),
    attention(
        "heads-in-the-batch-into-a-convolution",
        "q = Conv(x, wo, bo) k = Conv(x, wh, bo) v = Conv(x, wm, bv) qf = Reshape(q, batch) kf = Reshape(k, batch) "
        f"vf = Reshape(v, batch) {SCORES} {SAGAN} z = Conv(m, wo) y = Add(z, x)",
    ),
    attention(
        "conv-1d",
        f"xf = Reshape(x, wide) qf = Conv(xf, w1) kf = Conv(xf, w1) vf = Reshape(x, wide) v = Conv(x, wv) "
        f"vg = Reshape(v, wide) {SCORES} pt = {TURN} (p) o = MatMul(vg, pt) m = Reshape(o, map) {RESIDUAL}",
    ),
    attention(
        "the-map-is-read-too", f"{BIASED} {SCORES} {SAGAN} {RESIDUAL} z = Relu(v)", IO[:-1] + ", float[N, 8, 3, 4] z)"
    ),
    attention(
        "windows-that-weights-tell",
        f"q = Conv(x, w3, bq) k = Conv(x, w2, bk) v0 = Conv(x, wv, bv) v = MaxPool <kernel_shape = [2, 2]> (v0) "
        f"qf = Reshape(q, two) kf = Reshape(k, pooled) vf = Reshape(v, few) {SCORES} pt = {TURN} (p) "
        "y = MatMul(vf, pt)",
        IO.replace("3, 4] y", "2] y"),
    ),
    attention(
        "scales-below-zero-behind-both",
        f"{BIASED} {SCORES} {SAGAN} g = Mul(m, less) z = Conv(x, wo) y = Add(g, z)",
    ),
    attention(
        "added-along-another-axis",
        f"{BIASED} {SCORES} pt = {TURN} (p) o = MatMul(vf, pt) z = Conv(u, wo, bo) y = Add(o, z)",
        "g (float[8, 8, 3, 4] x, float[1, 8, 8, 12] u) => (float[1, 8, 8, 12] y)",
    ),
    other("for-tensorrt", f"{PLAIN} {SCORES} {SAGAN} {RESIDUAL}", target=Target("tensorrt", "fp16")),
    other("in-fp32", f"{PLAIN} {SCORES} {SAGAN} {RESIDUAL}", target=Target("tensorrt-rtx", "fp32")),
    other("scores-are-an-output", f"{PLAIN} {SCORES} {SAGAN} {RESIDUAL}", IO[:-1] + ", float[N, 12, 12] s)"),
    other(
        "channels",
        f"f = Reshape(x, wide) t = {TURN} (f) s = MatMul(f, t) p = Softmax <axis = -1> (s) o = MatMul(p, f) "
        f"m = Reshape(o, map) {RESIDUAL}",
    ),
    other(
        "over-the-queries",
        f"{PLAIN} qt = {TURN} (qf) s = MatMul(qt, kf) p = Softmax <axis = 1> (s) {SAGAN} {RESIDUAL}",
    ),
    other(
        "rows-alone",
        f"{PLAIN} kt = {TURN} (kf) s = MatMul(qf, kt) p = Softmax <axis = -1> (s) y = MatMul(p, kf)",
        IO.replace("8, 3, 4] y", "4, 12] y"),
    ),
    other(
        "masked",
        f"{PLAIN} qt = {TURN} (qf) s = MatMul(qt, kf) t = Add(s, z) p = Softmax <axis = -1> (t) {SAGAN} {RESIDUAL}",
        IO.replace(" x)", " x, float[12, 12] z)"),
    ),
    other(
        "scales-below-zero-behind-the-largest",
        f"{BIASED} ".replace(FLAT, POOLED.replace("vf = Reshape(vp, few)", "vr = Reshape(vp, few) vf = Mul(vr, less)"))
        + f"{SCORES} {SAGAN} {RESIDUAL}",
    ),
    other(
        "scales-below-zero-behind-an-activation",
        f"{BIASED} ".replace(FLAT, "r = Relu(q) qf = Reshape(r, narrow) kr = Reshape(k, narrow) kf = Div(kr, less) ")
        + f"vf = Reshape(v, wide) {SCORES} {SAGAN} {RESIDUAL}",
    ),
    other(
        "values-of-more-axes",
        f"{PLAIN} {SCORES} vs = Reshape(vf, single) pt = {TURN} (p) y = MatMul(vs, pt)",
        "g (float[2, 8, 3, 4] x) => (float[2, 2, 8, 12] y)",
    ),
    other(
        "groups",
        f"q = Conv <group = 4> (x, wg) k = Conv(x, wk) v = Conv(x, wv) {FLAT} {SCORES} {SAGAN} {RESIDUAL}",
    ),
    other(
        "other-heads",
        "q = Conv(x, wo) k = Conv(x, wh) v = Conv(x, wq) qf = Reshape(q, heads) kf = Reshape(k, heads) "
        f"vu = Reshape(v, narrow) vf = Unsqueeze(vu, one) qt = {SPREAD} (qf) s = MatMul(qt, kf) "
        f"p = Softmax <axis = -1> (s) pt = {SPREAD} (p) o = MatMul(vf, pt) m = Reshape(o, map) y = Add(m, x)",
        refusals=1,
    ),
)
