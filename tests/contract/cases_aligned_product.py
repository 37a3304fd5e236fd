"""Cases for products of activations with an odd number of columns."""

from __future__ import annotations

from contract_case import Case

from trtopt.rewrite.protocol import Target

RTX = Target("tensorrt-rtx", precision="fp16")
VECTORS = "g (float[N, 2, 4] x, float[N, 3, 4] z) => (float[N, 5, 5] y)"
JOIN = "j = Concat <axis = 1> (x, z)"
TURN = "t = Transpose <perm = [0, 2, 1]> (j)"


def case(label: str, body: str, *, io: str = VECTORS, changes: int = 1, **more: object) -> Case:
    more = {"target": RTX, "tolerance": 1e-5, **more}
    return Case("aligned-product", label, f"{io} {{ {body} }}", changes=changes, **more)  # type: ignore[arg-type]


CASES: tuple[Case, ...] = (
    case("each-with-each", f"{JOIN} {TURN} y = MatMul(j, t)"),
    case(
        "columns-with-columns",
        "j = Concat <axis = 1> (x, z) t = Transpose <perm = [0, 2, 1]> (j) y = MatMul(t, j)",
        io="g (float[N, 2, 5] x, float[N, 3, 5] z) => (float[N, 5, 5] y)",
    ),
    case("with-its-own-rows", f"{JOIN} {TURN} n = Neg(x) y = MatMul(n, t)", io=VECTORS.replace("5, 5", "2, 5")),
    case("read-elsewhere", f"{JOIN} {TURN} m = MatMul(j, t) s = ReduceSum <keepdims = 1> (j) y = Add(m, s)"),
    case(
        "turned-behind",
        f"{JOIN} {TURN} m = MatMul(j, t) u = Transpose <perm = [1, 2, 0]> (m) "
        "e = Tanh(m) v = Transpose (e) y = Add(u, v)",
        io=VECTORS.replace("N, 5, 5", "5, 5, N"),
    ),
    case(
        "rows-turned-behind",
        f"{JOIN} {TURN} n = Neg(x) m = MatMul(n, t) y = Transpose <perm = [2, 0, 1]> (m)",
        io=VECTORS.replace("N, 5, 5", "5, N, 2"),
    ),
    case(
        "not-turned", "n = Neg(z) y = MatMul(x, n)", io="g (float[N, 2, 4] x, float[N, 4, 5] z) => (float[N, 2, 5] y)"
    ),
    case(
        "one-axis-less", "n = Neg(z) y = MatMul(x, n)", io="g (float[N, 2, 4] x, float[4, 5] z) => (float[N, 2, 5] y)"
    ),
    case(
        "even", f"{JOIN} {TURN} y = MatMul(j, t)", io=VECTORS.replace("5, 5", "6, 6").replace("3, 4", "4, 4"), changes=0
    ),
    case(
        "one-column",
        "n = Neg(z) y = MatMul(x, n)",
        io="g (float[N, 2, 4] x, float[N, 4, 1] z) => (float[N, 2, 1] y)",
        changes=0,
    ),
    case(
        "unknown",
        "n = Neg(z) y = MatMul(x, n)",
        io="g (float[N, 2, 4] x, float[N, 4, M] z) => (float[N, 2, M] y)",
        changes=0,
    ),
    case(
        "scores",
        f"{JOIN} {TURN} m = MatMul(j, t) s = Mul(m, m2) y = Softmax(s)".replace("m2", "x2"),
        io=VECTORS.replace("3, 4] z", "3, 4] z, float[1] x2"),
        changes=0,
    ),
    case(
        "of-an-input",
        "t = Transpose <perm = [0, 2, 1]> (x) y = MatMul(x, t)",
        io="g (float[N, 5, 4] x) => (float[N, 5, 5] y)",
        changes=0,
    ),
    case(
        "of-a-product",
        f"{JOIN} l = MatMul(j, w) t = Transpose <perm = [0, 2, 1]> (l) y = MatMul(j, t)",
        weights={"w": (4, 4)},
        changes=0,
    ),
    case(
        "of-a-weight",
        "y = MatMul(x, w)",
        io="g (float[N, 2, 4] x) => (float[N, 2, 5] y)",
        weights={"w": (4, 5)},
        changes=0,
    ),
    case("in-fp32", f"{JOIN} {TURN} y = MatMul(j, t)", target=Target("tensorrt-rtx", precision="fp32"), changes=0),
    case("other-backend", f"{JOIN} {TURN} y = MatMul(j, t)", target=Target("tensorrt", precision="fp16"), changes=0),
)
