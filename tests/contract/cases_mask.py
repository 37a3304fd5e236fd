"""Cases for the recipe that clamps mask constants: x [2, 5, 8], m [2, 5] true where a key is masked.

Scores are bounded by Tanh: results are equal while they differ by less than what masks are clamped to. The first key is
never masked.
"""

from __future__ import annotations

import numpy as np
from contract_case import Case

from trtopt.rewrite.protocol import Target

IO = "g (float[2, 5, 8] x, bool[2, 5] m0) => (float[2, 5, 8] y)"
DYNAMIC = "g (float[N, 5, 8] x, bool[N, 5] m0) => (float[N, 5, 8] y)"
ALONE = "g (float[2, 5, 8] x) => (float[2, 5, 8] y)"
FLOAT = "g (float[2, 5, 8] x, float[2, 1, 5] k2) => (float[2, 5, 8] y)"
SCALARS = "int64[1] a1 = {1}, int64 i1 = {1}, float one = {1}, float zero = {0}, float sc = {0.5}, float two = {2}"
BOX = "int64[2] first = {0, 0}, int64[2] five = {5, 5}, int64[2] axes = {1, 2}"
LATER = np.array([[False, True, True, True, True]])

SCORES = "t = Tanh(x) u = Transpose <perm = [0, 2, 1]> (t) s0 = MatMul(t, u) s1 = Mul(s0, sc)"
BOOL = "m = And(m0, later) n = Unsqueeze(m, a1)"
KEPT = f"{BOOL} k1 = Not(n) k2 = Cast <to = 1> (k1)"
INVERTED = "k3 = Sub(one, k2) b = Mul(k3, low)"
SOFTMAX = "p = Softmax <axis = -1> (s2) y = MatMul(p, t)"
ADD = f"s2 = Add(s1, b) {SOFTMAX}"
BERT = f"{KEPT} {INVERTED} {SCORES} {ADD}"
CAUSAL = np.triu(np.full((1, 9, 9), -1e12, np.float32), 1)
THREE = f"s2 = Add(s1, b) s3 = Add(c1, s2) s4 = Add(s3, c2) {SOFTMAX}".replace("(s2) y", "(s4) y")


def case(label: str, body: str, **options: object) -> Case:
    arguments: dict[str, object] = {
        "io": IO,
        "tolerance": 2e-6,
        "target": Target("tensorrt-rtx", "fp16"),
        **options,
    }
    low = np.asarray(arguments.pop("low", np.finfo(np.float32).min), np.float32)
    values = {"low": low, "later": LATER, **dict(arguments.pop("values", {}))}  # type: ignore[call-overload]
    arguments["values"] = {name: array for name, array in values.items() if name in body}
    graph = f"{arguments.pop('io')} <{SCALARS}, {BOX}> {{ {body} }}"
    return Case("mask-constant", label, graph, **arguments)  # type: ignore[arg-type]


def refused(label: str, body: str, **options: object) -> Case:
    return case(label, body, **{"changes": 0, "refusals": 1, **options})


def untouched(label: str, body: str, **options: object) -> Case:
    return case(label, body, **{"changes": 0, **options})


CASES: tuple[Case, ...] = (
    case("one-minus-mask", BERT),
    case("int8", BERT, target=Target("tensorrt", "int8"), low=-1e9),
    case("dynamic", BERT, io=DYNAMIC),
    case("mask-minus-one", BERT.replace("Sub(one, k2)", "Sub(k2, one)"), low=1e30),
    case("subtracted", BERT.replace("Add(s1, b)", "Sub(s1, b)"), low=65504.0),
    case(
        "half-typed",
        BERT.replace("s2 =", "h = Cast <to = 10> (b) g = Cast <to = 1> (h) s2 =").replace("(s1, b)", "(s1, g)"),
        low=-65504.0,
    ),
    case("where-mask", f"{BOOL} b = Where(n, low, zero) {SCORES} {ADD}"),
    case("where-kept", f"{KEPT} b = Where(k1, zero, low) {SCORES} {ADD}", low=[-1e12]),
    case("where-scores", f"{BOOL} {SCORES} s2 = Where(n, low, s1) {SOFTMAX}".replace("axis = -1", "axis = 2")),
    case(
        "where-other-axis",
        f"{BOOL} r = Transpose <perm = [0, 2, 1]> (n) {SCORES} s2 = Where(r, low, s1) {SOFTMAX}".replace("-1>", "1>"),
    ),
    refused(
        "where-all-of-other-axis", f"{BOOL} {SCORES} s2 = Where(n, low, s1) {SOFTMAX}".replace("axis = -1", "axis = 1")
    ),
    case("constant", f"{SCORES} {ADD}", io=ALONE, values={"b": CAUSAL[:, :5, :5]}),
    case(
        "double", f"{SCORES} b = Cast <to = 1> (d) {ADD}", io=ALONE, values={"d": CAUSAL[0, :5, :5].astype(np.float64)}
    ),
    case(
        "sliced-constant", f"b = Slice(causal, first, five, axes) {SCORES} {ADD}", io=ALONE, values={"causal": CAUSAL}
    ),
    case(
        "filled",
        f"f = ConstantOfShape <value = float[1] {{-1e9}}> (five) b = Trilu <upper = 1> (f, i1) {SCORES} {ADD}",
        io=ALONE,
    ),
    case(
        "filled-times-bool",
        f"{KEPT} f = ConstantOfShape <value = float[1] {{-1e9}}> (five) c = Cast <to = 1> (n) b = Mul(f, c) "
        f"{SCORES} {ADD}",
    ),
    case("constant-node", BERT.replace("b =", "c = Constant <value_float = -1e9> () b =").replace("low", "c")),
    case(
        "two-masks",
        BERT.replace("(s1, b)", "(s3, b)").replace("s2 =", "s3 = Add(c1, s1) s2 ="),
        values={"c1": CAUSAL[:, :5, :5]},
        low=-1e9,
        changes=2,
    ),
    case(
        "scale-and-floor-after",
        BERT.replace("p =", "s3 = Mul(s2, sc) s4 = Div(s3, two) s5 = Max(s4, low) p =").replace("(s2) y", "(s5) y"),
    ),
    case(
        "two-layers",
        BERT.replace(
            "y = MatMul(p, t)",
            "o = MatMul(p, t) v0 = Tanh(o) v1 = MatMul(v0, u) v2 = Add(b, v1) "
            "q = Softmax <axis = -1> (v2) y = MatMul(q, t)",
        ),
    ),
    case("constant-used-elsewhere", BERT.replace("y = MatMul(p, t)", "o = MatMul(p, t) y = Max(o, low)")),
    case(
        "compared-with-zero",
        BERT.replace(
            "y = MatMul(p, t)",
            "o = MatMul(p, t) e = Equal(b, zero) f = Cast <to = 1> (e) "
            "g = Transpose <perm = [0, 2, 1]> (f) y = Mul(o, g)",
        ),
    ),
    refused("float-mask", f"{INVERTED} {SCORES} {ADD}", io=FLOAT, tolerance=0),
    refused("mask-is-output", BERT, io="g (float[2, 5, 8] x, bool[2, 5] m0) => (float[2, 5, 8] y, float[2, 1, 5] b)"),
    refused(
        "mask-used-elsewhere",
        BERT.replace("y = MatMul(p, t)", "o = MatMul(p, t) e = Abs(b) f = ReduceMax <keepdims = 0> (e) y = Div(o, f)"),
    ),
    refused(
        "scores-used-elsewhere",
        BERT.replace("y = MatMul(p, t)", "o = MatMul(p, t) e = Relu(s2) f = MatMul(e, t) y = Add(o, f)"),
    ),
    refused(
        "scaled-twice",
        BERT.replace("p =", "s3 = Mul(s2, small) s4 = Div(s3, ten) p =").replace("(s2) y", "(s4) y"),
        values={"small": np.float32(0.02), "ten": np.float32(10)},
    ),
    refused("other-axis", BERT.replace("axis = -1", "axis = 1")),
    refused("multiplied", BERT.replace("p =", "s3 = Mul(s2, s0) p =").replace("(s2) y", "(s3) y")),
    refused(
        "different-numbers",
        f"{SCORES} {ADD}",
        io=ALONE,
        values={"b": CAUSAL[:, :5, :5] * np.arange(5, dtype=np.float32)},
    ),
    refused(
        "three-masks",
        f"{KEPT} {INVERTED} {SCORES} {THREE}",
        refusals=3,
        low=-1e9,
        values={"c1": CAUSAL[:, :5, :5], "c2": CAUSAL[:, 1:6, 1:6]},
    ),
    refused("minus-infinity", f"{BOOL} {SCORES} s2 = Where(n, low, s1) {SOFTMAX}", low=-np.inf),
    untouched("fits", BERT, low=-1e4),
    untouched("stays-fp32", BERT, target=Target("tensorrt-rtx", "tf32")),
    untouched("no-precision", BERT, target=Target("tensorrt-rtx")),
    untouched("no-softmax", f"{BOOL} {SCORES} s2 = Where(n, low, s1) p = Sigmoid(s2) y = MatMul(p, t)"),
)
