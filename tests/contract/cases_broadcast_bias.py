"""Cases for the recipe that adds terms over a map to attention: x [2, 6, 8], two heads of 4, 2 rows of 3 positions."""

from __future__ import annotations

from cases_attention import IO, MIX, OUT, B, K, Q, V, W
from contract_case import Case

from trtopt.rewrite.protocol import Target

RTX = Target("tensorrt-rtx", "fp16")
OPEN = IO.replace("2, 5, 8", "N, 6, 8")
SIZES = (
    "int64[4] hs = {0, 0, 2, 4}, int64[3] fs = {0, 0, 8}, float sc = {0.5}, int64[5] qs = {0, 2, 2, 3, 4}, "
    "int64[6] split = {0, 2, 2, 3, 2, 3}, int64[4] flat = {0, 2, 6, 6}, int64[1] last = {5}, int64[1] across = {4}"
)
TERMS = (
    "m = Reshape(q3, qs) a0 = MatMul(m, rh) a = Unsqueeze(a0, last) c0 = MatMul(m, rw) c = Unsqueeze(c0, across) "
    "s0 = MatMul(q3, k3) s1 = Mul(s0, sc) "
)
SPLIT = "s2 = Reshape(s1, split) s3 = Add(s2, a) s4 = Add(c, s3) s5 = Reshape(s4, flat)"
JOINED = "t0 = Add(a, c) t1 = Reshape(t0, flat) s5 = Add(t1, s1)"
SOFTMAX = "p = Softmax <axis = -1> (s5)"


def attended(label: str, scores: str, **options: object) -> Case:
    given = {"io": OPEN, "sizes": SIZES, "tolerance": 2e-6, "target": RTX, **options}
    weights = {**W, **B, "rh": (4, 2), "rw": (4, 3), "m6": (6, 6), "f": (2, 3)}
    body = f"{Q} {K} {V} {given.pop('terms', TERMS)} {scores} {SOFTMAX} {MIX} {OUT}"
    graph = f"{given.pop('io')} <{given.pop('sizes')}> {{ {body} }}"
    return Case("broadcast-bias", label, graph, weights, **given)  # type: ignore[arg-type]


CASES: tuple[Case, ...] = (
    attended("split", SPLIT),
    attended("split-sum", SPLIT.replace("Add(s2, a) s4 = Add(c, s3)", "Add(a, c) s4 = Add(s2, s3)")),
    attended("one-term", "s2 = Reshape(s1, split) s4 = Add(s2, a) s5 = Reshape(s4, flat)"),
    attended("fixed", SPLIT, io=IO.replace("5", "6")),
    attended("one-bias-already", JOINED, changes=0),
    attended("masked-behind", SPLIT.replace("s5 =", "s6 =") + " s5 = Add(s6, m6)"),
    attended("for-tensorrt", SPLIT, target=Target("tensorrt", "fp16"), changes=0),
    attended("in-fp32", SPLIT, target=Target("tensorrt-rtx", "fp32"), changes=0),
    attended("scores-read-elsewhere", SPLIT.replace("s3 = Add", "e = Abs(s2) s3 = Add"), changes=0),
    attended("changed-before", SPLIT.replace("s2 = Reshape(s1", "s9 = Abs(s1) s2 = Reshape(s9"), changes=0),
    attended("whole-map-too", SPLIT.replace("Add(c, s3)", "Add(f, s3)"), changes=0),
)
