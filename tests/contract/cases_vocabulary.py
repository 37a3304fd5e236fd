"""Cases for padded-vocabulary: x [2, 3, 4], W [4, 2051]."""

from __future__ import annotations

import re

from contract_case import Case

from trtopt.rewrite.protocol import Target

IO = "g (float[2, 3, 4] x) => (float[2, 3, 2051] y)"
FLAT = "g (float[3, 4] x) => (float[3, 2051] y)"
SHAPES: dict[str, tuple[int, ...]] = {
    "w": (4, 2051), "t": (2051, 4), "b": (2051,), "one": (1,), "scalar": (), "even": (4, 2050), "few": (4, 1001),
    "deep": (2, 4, 2051)
}  # fmt: skip


def case(label: str, body: str, io: str = IO, **options: object) -> Case:
    weights = {name: shape for name, shape in SHAPES.items() if name in re.findall(r"\w+", body)}
    arguments: dict[str, object] = {"weights": weights, "tolerance": 1e-6, **options}
    return Case("padded-vocabulary", label, f"{io} {{ {body} }}", **arguments)  # type: ignore[arg-type]


def other(label: str, body: str, io: str = IO, **options: object) -> Case:
    return case(label, body, io, changes=0, **options)


CASES: tuple[Case, ...] = (
    case("head", "y = MatMul(x, w)"),
    case("dynamic", "y = MatMul(x, w)", "g (float[N, S, 4] x) => (float[N, S, 2051] y)"),
    case("bias-behind", "m = MatMul(x, w) y = Add(m, b)"),
    case("gemm", "y = Gemm <transB = 1> (x, t, b)", FLAT),
    case("gemm-with-factors", "y = Gemm <alpha = 0.5, beta = 2.0> (x, w, b)", FLAT),
    case("gemm-with-one-bias", "y = Gemm(x, w, one)", FLAT),
    case("gemm-with-a-scalar", "y = Gemm(x, w, scalar)", FLAT),
    case("two-heads", "m = MatMul(x, w) n = Neg(x) o = MatMul(n, w) y = Add(m, o)", changes=2),
    case(
        "tied",
        "i = ArgMax <axis = 2, keepdims = 0> (x) e = Gather(t, i) u = Transpose <perm = [1, 0]> (t) y = MatMul(e, u)",
    ),
    case("int8", "y = MatMul(x, w)", target=Target("tensorrt-rtx", "int8", "8.9")),
    other("even", "y = MatMul(x, even)", "g (float[2, 3, 4] x) => (float[2, 3, 2050] y)"),
    other("small", "y = MatMul(x, few)", "g (float[2, 3, 4] x) => (float[2, 3, 1001] y)"),
    other("stack-of-matrices", "y = MatMul(x, deep)"),
    other("computed", "y = MatMul(x, c)", "g (float[2, 3, 4] x, float[4, 2051] c) => (float[2, 3, 2051] y)"),
    other("computed-bias", "y = Gemm(x, w, c)", "g (float[3, 4] x, float[2051] c) => (float[3, 2051] y)"),
    other("fp32", "y = MatMul(x, w)", target=Target("tensorrt-rtx", "fp32", "8.9")),
    other("tensorrt", "y = MatMul(x, w)", target=Target("tensorrt", "fp16", "8.9")),
)
