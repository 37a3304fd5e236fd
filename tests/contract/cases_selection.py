"""Cases for selections behind the last block: x [2, 6, 8], six tokens, two heads of 4."""

from __future__ import annotations

from cases_attention import CORE, MIX, OUT, B, K, Q, V, W
from contract_case import Case

CONSTANTS = "int64[4] hs = {0, 0, 2, 4}, int64[3] fs = {0, 0, 8}, float sc = {0.5}"
ONE = "int64 i = {1}"
WEIGHTS = {**W, **B, "ns": (8,), "nb": (8,), "wu": (8, 12), "bu": (12,), "wd": (12, 8), "bd": (8,)}
ATTENTION = f"{Q} {K} {V} {CORE} {MIX} {OUT}"
MLP = "m1 = MatMul(n, wu) m2 = Add(m1, bu) m3 = Tanh(m2) m4 = MatMul(m3, wd) m5 = Add(m4, bd)"
NORM = "t = LayerNormalization(s, ns, nb)"
BERT = f"{ATTENTION} r = Add(y, x) n = LayerNormalization(r, ns, nb) {MLP} s = Add(m5, n) {NORM}"
VIT = f"{ATTENTION} r = Add(x, y) n = LayerNormalization(r, ns) {MLP} s = Add(r, m5) {NORM}"
PLAIN = f"n = Relu(x) {MLP} t = Add(n, m5)"
TOKEN = "z = Gather <axis = 1> (t, i)"
SLICE = "z = Slice(t, first, stop, at)"


def io(output: str = "2, 8", inputs: str = "float[2, 6, 8] x", more: str = "") -> str:
    return f"g ({inputs}) => (float[{output}] z{more})"


IO = io()


def case(label: str, body: str, *, io: str = IO, constants: str = ONE, **options: object) -> Case:
    arguments: dict[str, object] = {"weights": WEIGHTS, "tolerance": 1e-5, "opset": 18, **options}
    return Case("late-selection", label, f"{io} <{CONSTANTS}, {constants}> {{ {body} }}", **arguments)  # type: ignore[arg-type]


def left_alone(label: str, body: str, refusals: int = 0, **options: object) -> Case:
    return case(label, body, changes=0, refusals=refusals, **options)  # type: ignore[arg-type]


def sliced(first: int, stop: int) -> str:
    return f"int64[1] first = {{{first}}}, int64[1] stop = {{{stop}}}, int64[1] at = {{-2}}, int64[1] two = {{2}}"


ROTATED = Q.replace("q3 =", "q9 =") + (
    " h0, h1 = Split <axis = -1, num_outputs = 2> (q9) h2 = Neg(h1) h3 = Concat <axis = -1> (h2, h0) "
    "h4 = Mul(h3, angles) q3 = Add(q9, h4)"
)
MASKED = CORE.replace("s1 = Mul(s0, sc)", "s9 = Mul(s0, sc) s1 = Where(m, s9, low)")
GATED = (
    "n = Tanh(x) g0 = MatMul(n, wg) g1, g2 = Split <axis = 2, num_outputs = 2> (g0) g3 = Sigmoid(g1) g4 = Mul(g3, g2) "
    "g5 = Mul(g4, g4) g6 = ReduceMean(g5, last) g7 = Add(g6, sc) g8 = Sqrt(g7) t = Div(g4, g8)"
)
IN_A_BRANCH = (
    f"z = If (b) <then_branch = yes () => (float[2, 8] zt) {{ {PLAIN} {TOKEN.replace('z =', 'zt =')} }}, "
    "else_branch = no () => (float[2, 8] ze) { ze = Gather <axis = 1> (x, i) }>"
)
MEAN_TOO = "u = Gather <axis = 1> (t, i) v = ReduceMean <keepdims = 0> (t, one) z = Add(u, v)"
TWO = "u = Gather <axis = 1> (t, i) v = Gather <axis = 1> (t, j) z = Add(u, v)"
TOKEN_OF_U = "z = Gather <axis = 1> (u, i)"

FLAG = io(inputs="float[2, 6, 8] x, bool b")

ROTATED_HALVES = (
    "q = MatMul(x, wo) a = Slice(q, zero, half, at) b = Slice(q, half, end, at) m = Neg(b)"
    " r = Concat <axis = 1> (m, a) c = Mul(q, bo) z = Add(c, r)"
)
"""What a rotary embedding does to the halves of its heads, along an axis that a product keeps."""

HALVES = "int64[1] zero = {0}, int64[1] half = {3}, int64[1] end = {6}, int64[1] at = {-2}"

CASES: tuple[Case, ...] = (
    case("norm-last", f"{BERT} {TOKEN}"),
    case("norm-first", f"{VIT} {TOKEN}"),
    case("dynamic", f"{VIT} {TOKEN}", io=io("N, 8", "float[N, S, 8] x")),
    case("last-token", f"{VIT} {TOKEN}", io=io("N, 8", "float[N, S, 8] x"), constants="int64 i = {-1}"),
    case("scores", f"{PLAIN} l = MatMul(t, wu) z = Gather <axis = 1> (l, i)", io=io("2, 12")),
    case("axis-kept", f"{VIT} {TOKEN}", io=io("2, 1, 8"), constants="int64[1] i = {1}"),
    case("slice", f"{BERT} {SLICE}", io=io("2, 1, 8"), constants=sliced(2, 3)),
    case("three-tokens", f"{BERT} {SLICE}", io=io("2, 3, 8"), constants=sliced(-3, 2**40)),
    case("slice-dynamic", f"{BERT} {SLICE}", io=io("N, 1, 8", "float[N, S, 8] x"), constants=sliced(-1, 2**40)),
    case(
        "sizes-written",
        f"{BERT} {TOKEN}".replace("hs)", "hw)").replace("fs)", "fw)"),
        constants=f"{ONE}, int64[4] hw = {{2, 6, 2, 4}}, int64[3] fw = {{-1, 6, 8}}",
    ),
    case("mlp-alone", f"{VIT} {TOKEN}", io=io(more=", float[2, 6, 8] n")),
    case("used-behind", f"{VIT} u = Gather <axis = 1> (t, i) z = Tanh(u)"),
    case("shared-weights", f"{PLAIN} {TOKEN}".replace("wu", "wo").replace("wd", "wo").replace("bu", "bd")),
    case("positions", f"n = Add(x, pos) {MLP} t = Add(n, m5) {TOKEN}", weights={**WEIGHTS, "pos": (1, 6, 8)}),
    case(
        "mask-for-each-query",
        f"{BERT} {TOKEN}".replace(CORE, MASKED),
        io=io(inputs="float[2, 6, 8] x, bool[2, 1, 6, 6] m"),
        constants=f"{ONE}, float low = {{-30000.0}}",
    ),
    case("rotated-queries", f"{BERT} {TOKEN}".replace(Q, ROTATED), weights={**WEIGHTS, "angles": (1, 1, 6, 4)}),
    case("gated", f"{GATED} {TOKEN}", constants=f"{ONE}, int64[1] last = {{-1}}", weights={"wg": (8, 16)}),
    case("tokens-first", f"{PLAIN} z = Gather <axis = 0> (t, i)", io=io("2, 8", "float[6, 2, 8] x")),
    case(
        "gemm",
        "l = Gemm <transA = 1> (x, wo, c) z = Gather <axis = 0> (l, i)",
        io=io("8", "float[8, 6] x"),
        weights={"wo": (8, 8), "c": (6, 8)},
    ),
    case("branch", IN_A_BRANCH, io=FLAG),
    left_alone("output-too", f"{BERT} {TOKEN}", 1, io=io(more=", float[2, 6, 8] t")),
    left_alone("mean-too", f"{BERT} {MEAN_TOO}", 1, constants=f"{ONE}, int64[1] one = {{1}}"),
    left_alone("rotated-halves", ROTATED_HALVES, io=io("2, 6, 8"), constants=HALVES),
    left_alone("two-selections", f"{BERT} {TWO}", 2, constants=f"{ONE}, int64 j = {{0}}"),
    left_alone("no-product", "t = Relu(x) z = Gather <axis = 1> (t, i)"),
    left_alone("index-of-input", f"{BERT} j = Cast <to = 7> (b) z = Gather <axis = 1> (t, j)", io=FLAG),
    left_alone("softmax-over-tokens", f"{PLAIN} u = Softmax <axis = 1> (t) {TOKEN_OF_U}"),
    left_alone(
        "norm-over-tokens",
        f"{PLAIN} u = LayerNormalization <axis = 1> (t, all) {TOKEN_OF_U}",
        weights={**WEIGHTS, "all": (6, 8)},
    ),
    left_alone("sum-over-tokens", f"{PLAIN} u = CumSum(t, one) {TOKEN_OF_U}", constants=f"{ONE}, int64 one = {{1}}"),
    left_alone(
        "convolution", f"{PLAIN} u = Conv <pads = [1, 1]> (t, k) {TOKEN_OF_U}", weights={**WEIGHTS, "k": (6, 6, 3)}
    ),
    left_alone(
        "pooling",
        f"{PLAIN} h = Transpose <perm = [0, 2, 1]> (t) c = MaxPool <kernel_shape = [2], strides = [2]> (h) "
        "z = Gather <axis = 2> (c, i)",
    ),
    left_alone("keys", "s = MatMul(x, w) z = Gather <axis = 2> (s, i)", io=io("2, 6"), weights={"w": (2, 8, 6)}),
    left_alone("features", f"{PLAIN} z = Gather <axis = 2> (t, i)", io=io("2, 6")),
    left_alone("most-tokens", f"{BERT} {SLICE}", constants=sliced(1, 6), io=io("2, 5, 8")),
    left_alone("slice-of-unknown", f"{BERT} {SLICE}", constants=sliced(1, 2), io=io("N, 1, 8", "float[N, S, 8] x")),
    left_alone("every-other", f"{BERT} {SLICE.replace('at)', 'at, two)')}", constants=sliced(0, 3), io=io("2, 2, 8")),
    left_alone(
        "tokens-merged",
        f"{PLAIN} u = Reshape(t, merged) {TOKEN_OF_U}",
        constants=f"{ONE}, int64[3] merged = {{2, 4, 12}}",
        io=io("2, 12"),
    ),
)
