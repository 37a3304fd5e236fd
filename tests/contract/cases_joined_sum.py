"""Cases for sums over an axis along which tensors were joined."""

from __future__ import annotations

from contract_case import Case

PARTS = "g (float[N, 5, 4] a, float[N, 5, 4] b, float[N, 5, 12] w) => (float[N, 5] y)"
CONSTANTS = "<int64[1] last = {-1}, int64[1] before = {-2}, int64[3] v = {-1, 5, 12}>"
JOIN = "c = Cos(a) s = Sin(b) j = Concat <axis = -1> (c, s, b)"
STACK = "c = Cos(a) p = Unsqueeze(c, before) q = Unsqueeze(b, before) r = Unsqueeze(a, before)"
SUM = "y = ReduceSum <keepdims = 0> (m, last)"


def case(label: str, body: str, *, inputs: str = PARTS, changes: int = 1) -> Case:
    return Case("joined-sum", label, f"{inputs} {CONSTANTS} {{ {body} }}", changes=changes, tolerance=1e-5)


CASES: tuple[Case, ...] = (
    case("joined", f"{JOIN} m = Mul(j, w) {SUM}"),
    case("weights-first", f"{JOIN} m = Mul(w, j) {SUM}"),
    case("kept-axis", f"{JOIN} m = Mul(j, w) t = ReduceSum (m, last) y = Squeeze(t, last)"),
    case("stacked", f"{STACK} j = Concat <axis = -2> (p, q, r) f = Reshape(j, v) m = Mul(f, w) {SUM}"),
    case(
        "weights-of-all-rows",
        f"{JOIN} m = Mul(j, w) {SUM}",
        inputs="g (float[N, 5, 4] a, float[N, 5, 4] b, float[12] w) => (float[N, 5] y)",
    ),
    case(
        "stacked-behind",
        f"{STACK.replace('before', 'last')} j = Concat <axis = -1> (p, q, r) f = Reshape(j, v) m = Mul(f, w) {SUM}",
        changes=0,
    ),
    case(
        "lengths-with-a-factor",
        f"{JOIN} m = Mul(j, w) {SUM}",
        inputs="g (float[N, 5, 4] a, float[N, 5, 2] b, float[N, 5, 8] w) => (float[N, 5] y)",
    ),
    case(
        "lengths-without-a-factor",
        f"{JOIN} m = Mul(j, w) {SUM}",
        inputs="g (float[N, 5, 4] a, float[N, 5, 3] b, float[N, 5, 10] w) => (float[N, 5] y)",
        changes=0,
    ),
    case(
        "many-pieces",
        f"{JOIN} m = Mul(j, w) {SUM}",
        inputs="g (float[N, 5, 2] a, float[N, 5, 2000] b, float[N, 5, 4002] w) => (float[N, 5] y)",
        changes=0,
    ),
    case(
        "one-weight",
        f"{JOIN} m = Mul(j, w) {SUM}",
        inputs="g (float[N, 5, 4] a, float[N, 5, 4] b, float[N, 5, 1] w) => (float[N, 5] y)",
        changes=0,
    ),
    case(
        "other-axis",
        f"{JOIN} m = Mul(j, w) y = ReduceSum <keepdims = 0> (m, before)",
        inputs=PARTS.replace("float[N, 5] y", "float[N, 12] y"),
        changes=0,
    ),
    case(
        "used-elsewhere",
        f"{JOIN} m = Mul(j, w) {SUM} z = Neg(j)",
        inputs=PARTS.replace(" y)", " y, float[N, 5, 12] z)"),
        changes=0,
    ),
    case("not-joined", f"m = Mul(w, w) {SUM}", changes=0),
)
