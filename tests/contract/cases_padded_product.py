"""Cases for columns of zeros beside a matrix product."""

from __future__ import annotations

from contract_case import Case

SCORES = "g (float[N, 2, 5, 4] x, float[N, 2, 4, 9] k) => (float[N, 2, 5, 10] y)"
ZEROS = "float z = {0}, int64[1] d1 = {1}, int64[1] d2 = {2}, int64[1] d5 = {5}"
PADS = "int64[8] p = {0, 0, 0, 1, 0, 0, 0, 0}"
JOIN = "s = Shape <end = 1> (x) h = Concat <axis = 0> (s, d2, d5, d1) o = Expand(z, h) m = MatMul(x, k)"


def case(label: str, body: str, *, io: str = SCORES, constants: str = "", changes: int = 1, **more: object) -> Case:
    extra = f", {constants}" if constants else ""
    text = f"{io} <{ZEROS}, {PADS}{extra}> {{ {body} }}"
    return Case("padded-product", label, text, changes=changes, tolerance=1e-5, **more)  # type: ignore[arg-type]


CASES: tuple[Case, ...] = (
    case("joined-before", f"{JOIN} y = Concat <axis = -1> (o, m)"),
    case("joined-behind", f"{JOIN} y = Concat <axis = 3> (m, o)"),
    case("padded", "m = MatMul(x, k) y = Pad(m, p)"),
    case(
        "padded-weights",
        "m = MatMul(x, k) y = Pad <mode = 'constant'> (m, p, z)".replace("'", '"'),
        io="g (float[N, 2, 5, 4] x) => (float[N, 2, 5, 10] y)",
        weights={"k": (4, 9)},
    ),
    case("ones", f"{JOIN} e = Exp(o) y = Concat <axis = -1> (e, m)", changes=0),
    case("padded-with-ones", "m = MatMul(x, k) y = Pad(m, p, e)", constants="float e = {1}", changes=0),
    case(
        "padded-rows",
        "m = MatMul(x, k) y = Pad(m, q)",
        io=SCORES.replace("5, 10", "6, 9"),
        constants="int64[8] q = {0, 0, 1, 0, 0, 0, 0, 0}",
        changes=0,
    ),
    case(
        "cut",
        "m = MatMul(x, k) y = Pad(m, q)",
        io=SCORES.replace("5, 10", "5, 8"),
        constants="int64[8] q = {0, 0, 0, -1, 0, 0, 0, 0}",
        changes=0,
    ),
    case(
        "used-elsewhere", f"{JOIN} t = Concat <axis = -1> (o, m) f = Concat <axis = -1> (m, o) y = Add(t, f)", changes=0
    ),
)
