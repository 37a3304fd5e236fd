"""Cases for products with weights that are gathered for each row."""

from __future__ import annotations

from contract_case import Case

INPUTS = "g (float[N, 5] x, float[N, 4] s) => (float[N, 3] y)"
ROUTED = "g (float[T, 5] x, float[T, 4] s) => (float[R, 3] y)"
CONSTANTS = (
    "<int64[1] last = {-1}, int64[1] middle = {1}, int64[1] flat = {-1}, int64[3] twice = {1, 2, 1}, "
    "int64[2] rows = {-1, 5}, int64[1] one = {1}, int64[1] two = {2}, "
    f"float[4, 3, 5] w = {{{', '.join(str(0.1 * i - 3) for i in range(60))}}}, "
    f"float[4, 5, 3] v = {{{', '.join(str(0.1 * i - 3) for i in range(60))}}}>"
)
INDEX = "i = ArgMax <axis = -1, keepdims = 0> (s)"
COLUMN = "j = Unsqueeze(i, last) p = GatherND (w, j)"
FIRST = "u = Unsqueeze(x, last) m = MatMul(p, u) y = Squeeze(m, last)"
SECOND = "u = Unsqueeze(x, middle) m = MatMul(u, p) y = Squeeze(m, middle)"
TOP = "t, k = TopK(s, two) i = Reshape(k, flat) c = Unsqueeze(x, middle) e = Expand(c, twice) r = Reshape(e, rows)"


def case(label: str, body: str, *, inputs: str = INPUTS, changes: int = 1) -> Case:
    return Case("gathered-weights", label, f"{inputs} {CONSTANTS} {{ {body} }}", changes=changes, tolerance=1e-5)


CASES: tuple[Case, ...] = (
    case("gathered", f"{INDEX} p = Gather(w, i) {FIRST}"),
    case("column", f"{INDEX} {COLUMN} {FIRST}"),
    case("second", f"{INDEX} p = Gather(v, i) {SECOND}"),
    case("repeated", f"{TOP} p = Gather(w, i) {FIRST.replace('(x,', '(r,')}", inputs=ROUTED),
    case("repeated-second", f"{TOP} p = Gather(v, i) {SECOND.replace('(x,', '(r,')}", inputs=ROUTED),
    case(
        "one-row-for-all",
        f"{INDEX} p = Gather(w, i) {FIRST}",
        inputs=INPUTS.replace("float[N, 5] x", "float[1, 5] x"),
        changes=0,
    ),
    case(
        "other-rows",
        f"{INDEX} p = Gather(w, i) {FIRST}",
        inputs="g (float[M, 5] x, float[N, 4] s) => (float[K, 3] y)",
        changes=0,
    ),
    case(
        "several-vectors",
        f"{INDEX} p = Gather(v, i) y = MatMul(x, p)",
        inputs="g (float[N, 2, 5] x, float[N, 4] s) => (float[N, 2, 3] y)",
        changes=0,
    ),
    case(
        "weights-of-the-data",
        f"{INDEX} p = Gather(z, i) {FIRST}",
        inputs=INPUTS.replace("float[N, 4] s", "float[N, 4] s, float[4, 3, 5] z"),
        changes=0,
    ),
    case(
        "other-axis",
        f"{INDEX} p = Gather <axis = 1> (w, i) {FIRST}",
        inputs="g (float[4, 5] x, float[N, 3] s) => (float[4, N] y)",
        changes=0,
    ),
    case(
        "used-elsewhere",
        f"{INDEX} p = Gather(w, i) {FIRST} n = Neg(p)",
        inputs=INPUTS.replace(" y)", " y, float[N, 3, 5] n)"),
        changes=0,
    ),
)
