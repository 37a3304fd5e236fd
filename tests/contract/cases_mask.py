"""Cases for the recipe that clamps mask constants: x [2, 5, 8], m [2, 5] true where a key is masked.

Scores are bounded by Tanh: the rewrite is exact as long as they differ by less than what masks are clamped to.
"""

from __future__ import annotations

import numpy as np
from contract_case import Case

from trtopt.rewrite.protocol import Target

IO = "g (float[2, 5, 8] x, bool[2, 5] m) => (float[2, 5, 8] y)"
CONSTANTS = "int64[1] a1 = {1}, float one = {1}, float zero = {0}, float sc = {0.5}"
SCORES = "t = Tanh(x) u = Transpose <perm = [0, 2, 1]> (t) s0 = MatMul(t, u) s1 = Mul(s0, sc)"
KEPT = "k0 = Not(m) k1 = Cast <to = 1> (k0) k2 = Unsqueeze(k1, a1) k3 = Sub(one, k2) b = Mul(k3, low)"
BOOL = "n = Unsqueeze(m, a1)"
ADD = "s2 = Add(s1, b) p = Softmax <axis = -1> (s2) y = MatMul(p, t)"
MIN = float(np.finfo(np.float32).min)
CAUSAL = np.triu(np.full((1, 9, 9), -1e12, np.float32), 1)


def case(label: str, body: str, **options: object) -> Case:
    arguments: dict[str, object] = {
        "io": IO,
        "constants": CONSTANTS,
        "tolerance": 2e-6,
        "target": Target("tensorrt-rtx", "fp16"),
        **options,
    }
    low = {"low": np.asarray(arguments.pop("low", MIN), np.float32)}
    arguments["values"] = {**(low if "low" in body else {}), **arguments.pop("values", {})}  # type: ignore[dict-item]
    graph = f"{arguments.pop('io')} <{arguments.pop('constants')}> {{ {body} }}"
    return Case("mask-constant", label, graph, **arguments)  # type: ignore[arg-type]


def refused(label: str, body: str, **options: object) -> Case:
    return case(label, body, **{"changes": 0, "refusals": 1, **options})


def ignored(label: str, body: str, **options: object) -> Case:
    return case(label, body, **{"changes": 0, **options})


SLICED = (
    "c0 = Shape(x) c1 = Gather(c0, a1) c2 = Unsqueeze(z, z) c3 = Slice(causal, z, c1, a1) b = Slice(c3, z, c1, a2)"
)
FILLED = "f0 = ConstantOfShape <value = float[1] {-1e9}> (five) b = Trilu(f0, a1)"
FILLED_TRIANGLE = "f0 = ConstantOfShape <value = float[1] {-1e9}> (five) f1 = Transpose(f0) b = Trilu <upper = 1> (f1, i1)"
OTHER = np.where(np.tri(5) > 0, 0, MIN).astype(np.float32)

CASES: tuple[Case, ...] = (
    case("one-minus-mask", f"{KEPT} {SCORES} {ADD}"),
    case("int8", f"{KEPT} {SCORES} {ADD}", target=Target("tensorrt", "int8"), low=-1e9),
    case("dynamic", f"{KEPT} {SCORES} {ADD}", io="g (float[N, S, 8] x, bool[N, S] m) => (float[N, S, 8] y)"),
    case("mask-minus-one", f"{KEPT} {SCORES} {ADD}".replace("Sub(one, k2)", "Sub(k2, one)"), low=1e30),
    case("subtracted", f"{KEPT} {SCORES} {ADD}".replace("Add(s1, b)", "Sub(s1, b)"), low=65504.0),
    case("where-mask", f"{BOOL} b = Where(n, low, zero) {SCORES} {ADD}"),
    case("where-scores", f"{BOOL} {SCORES} s2 = Where(n, low, s1) p = Softmax <axis = 2> (s2) y = MatMul(p, t)"),
    case("where-kept-scores", f"{BOOL} k = Not(n) {SCORES} b = Where(k, zero, low) {ADD}", low=[-1e12]),
    case("both-branches", f"{BOOL} b = Where(n, low, high) {SCORES} {ADD}", values={"high": np.float32(-1e5)}, changes=0)
    if False
    else case("constant", f"{SCORES} {ADD}", io="g (float[2, 5, 8] x) => (float[2, 5, 8] y)", values={"b": OTHER}),
    case(
        "sliced-constant",
        f"{SCORES} c = Slice(causal, z, five, ax) b = Cast <to = 1> (c) {ADD}",
        constants=f"{CONSTANTS}, int64[2] z = {{0, 0}}, int64[2] five = {{5, 5}}, int64[2] ax = {{1, 2}}",
        values={"causal": CAUSAL},
    ),
    case(
        "filled",
        f"f = ConstantOfShape <value = float[1] {{-1e9}}> (five) b = Trilu <upper = 1> (f, i1) {SCORES} {ADD}",
        constants=f"{CONSTANTS}, int64[2] five = {{5, 5}}, int64 i1 = {{1}}",
    ),
    case(
        "two-masks",
        f"{KEPT} {SCORES} q = Add(causal, b) s2 = Add(q, s1) p = Softmax <axis = -1> (s2) y = MatMul(p, t)",
        low=-1e9,
        values={"causal": CAUSAL[:, :5, :5]},
        changes=2,
        io="g (float[2, 5, 8] x, bool[2, 5] m0) => (float[2, 5, 8] y)",
    )
    if False
    else case("scale-after", f"{KEPT} {SCORES} {ADD}".replace("Softmax <axis = -1> (s2)", "Softmax(s4)").replace(
        "p =", "s3 = Mul(s2, sc) s4 = Div(s3, two) p ="), constants=f"{CONSTANTS}, float two = {{2}}"),
)
