"""Cases for products of features in another order: x [N, 2, 5, 4] is two heads of four numbers for five tokens."""

from __future__ import annotations

from contract_case import Case

IO = "g (float[N, 2, 5, 4] x) => (float[N, 5, 6] y)"
SHAPE = "int64[3] o = {-1, 5, 8}"
WEIGHTS = {"w": (8, 6)}


def case(label: str, perm: str, io: str = IO, behind: str = "", shape: str = SHAPE, **options: object) -> Case:
    options = {"weights": WEIGHTS, "tolerance": 1e-6, **options}
    text = f"t = Transpose <perm = {perm}> (x) r = Reshape(t, o) y = MatMul(r, w) {behind}"
    return Case("feature-order", label, f"{io} <{shape}> {{ {text} }}", **options)  # type: ignore[arg-type]


def no_case(label: str, perm: str, **options: object) -> Case:
    return case(label, perm, **{"changes": 0, **options})  # type: ignore[arg-type]


CASES: tuple[Case, ...] = (
    case("numbers-before-heads", "[0, 2, 3, 1]"),
    case("fixed-batch", "[0, 2, 3, 1]", io=IO.replace("N,", "2,")),
    case("three-axes", "[0, 3, 4, 2, 1]", io=IO.replace("[N, 2, 5, 4]", "[N, 2, 2, 5, 2]")),
    case("one-axis-of-one", "[0, 2, 4, 3, 1]", io=IO.replace("[N, 2, 5, 4]", "[N, 2, 5, 1, 4]")),
    no_case("in-their-order", "[0, 2, 1, 3]"),
    no_case("read-elsewhere", "[0, 2, 3, 1]", io=IO.replace("y)", "y, float[N, 5, 8] z)"), behind="z = Relu(r)"),
    no_case("transposed-is-read", "[0, 2, 3, 1]", io=IO.replace("y)", "y, float[N, 5, 4, 2] z)"), behind="z = Relu(t)"),
    no_case("tokens-among-features", "[0, 3, 2, 1]", io=IO.replace("[N, 5, 6] y", "[N, 5, 6] y")),
    no_case(
        "an-axis-is-cut",
        "[0, 3, 1, 2]",
        io="g (float[N, 4, 2, 5] x) => (float[M, 5, 6] y)",
    ),
    no_case(
        "shape-copies-an-axis",
        "[0, 1, 3, 2]",
        io="g (float[N, 5, 1, 8] x) => (float[N, 5, 6] y)",
        shape="int64[3] o = {0, 0, 0}",
    ),
    case("weight-is-no-constant", "[0, 2, 3, 1]", io=IO.replace("x)", "x, float[8, 6] w)"), weights={}, changes=0),
)
