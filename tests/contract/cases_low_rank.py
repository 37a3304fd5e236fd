"""Cases for thin products beside the product with a weight: x [2, 5, 8], W [8, 12], A [8, 2], B [2, 12]."""

from __future__ import annotations

from contract_case import Case

IO = "g (float[2, 5, 8] x, float[8, 2] a, float[2, 12] b) => (float[2, 5, 12] y)"
BODY = "m = MatMul(x, w) d = MatMul(x, a) u = MatMul(d, b) y = Add(m, u)"
WEIGHTS: dict[str, tuple[int, ...]] = {"w": (8, 12)}


def case(label: str, body: str = BODY, io: str = IO, **options: object) -> Case:
    arguments: dict[str, object] = {"weights": WEIGHTS, "tolerance": 2e-5, **options}
    return Case("low-rank-weight", label, f"{io} {{ {body} }}", **arguments)  # type: ignore[arg-type]


def no_case(label: str, body: str = BODY, io: str = IO, **options: object) -> Case:
    return case(label, body, io, changes=0, **options)


TWO = f"{BODY} m2 = MatMul(x, v) d2 = MatMul(x, a2) u2 = MatMul(d2, b2) z = Add(u2, m2)"
TWO_IO = (
    "g (float[2, 5, 8] x, float[8, 2] a, float[2, 12] b, float[8, 2] a2, float[2, 6] b2)"
    " => (float[2, 5, 12] y, float[2, 5, 6] z)"
)

CASES: tuple[Case, ...] = (
    case("inputs"),
    case("dynamic", io=IO.replace("[2, 5,", "[N, S,")),
    case("inputs-in-fp16", BODY.replace("m =", "f = Cast <to = 1> (a) m =").replace("x, a)", "x, f)"),
         IO.replace("float[8, 2]", "float16[8, 2]"), tolerance=2e-2),
    case("constants", io="g (float[2, 5, 8] x) => (float[2, 5, 12] y)", weights={**WEIGHTS, "a": (8, 2), "b": (2, 12)}),
    case("bias", BODY.replace("y = Add(m, u)", "n = Add(m, c) y = Add(n, u)"), weights={**WEIGHTS, "c": (12,)}),
    case("scaled", BODY.replace("y = Add(m, u)", "t = Mul(u, s) y = Add(m, t)"), weights={**WEIGHTS, "s": (1,)}),
    case("weights-that-read-one-value", TWO, TWO_IO, weights={**WEIGHTS, "v": (8, 6)}),
    no_case("another-value", BODY.replace("MatMul(x, a)", "MatMul(r, a)").replace("m =", "r = Neg(x) m =")),
    no_case("read-elsewhere", f"{BODY} z = Neg(m)", IO[:-1] + ", float[2, 5, 12] z)"),
    no_case("thick", io=IO.replace("float[8, 2] a, float[2, 12]", "float[8, 5] a, float[5, 12]")),
    no_case("computed", BODY.replace("d =", "f = Neg(a) d =").replace("x, a)", "x, f)")),
    no_case("scaled-by-row", BODY.replace("y = Add(m, u)", "t = Mul(u, s) y = Add(m, t)"),
            weights={**WEIGHTS, "s": (5, 1)}),
    no_case("scaled-by-a-number-of-three-axes", BODY.replace("y = Add(m, u)", "t = Mul(u, s) y = Add(m, t)"),
            "g (float[5, 8] x, float[8, 2] a, float[2, 12] b) => (float[1, 5, 12] y)",
            weights={**WEIGHTS, "s": (1, 1, 1)}),
    no_case("a-row-scaled-by-a-number-of-two-axes", BODY.replace("y = Add(m, u)", "t = Mul(u, s) y = Add(m, t)"),
            "g (float[8] x, float[8, 2] a, float[2, 12] b) => (float[1, 12] y)", weights={**WEIGHTS, "s": (1, 1)}),
    no_case("two-sums", BODY.replace("y = Add(m, u)", "n = Add(m, c) y = Add(n, u)"),
            weights={**WEIGHTS, "c": (5, 12)}),
)  # fmt: skip
