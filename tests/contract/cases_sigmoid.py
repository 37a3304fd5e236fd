"""Cases for sigmoids behind products: x [2, 5, 8], w [8, 6]."""

from __future__ import annotations

import numpy as np
from contract_case import Case

from trtopt.rewrite.protocol import Target

IO = "g (float[2, 5, 8] x) => (float[2, 5, 6] y)"
SILU = "p = MatMul(x, w) z = Add(p, b) s = Sigmoid(z) y = Mul(z, s)"
QUICK = "p = MatMul(x, w) z = Add(b, p) u = Mul(z, c) s = Sigmoid(u) y = Mul(z, s)"
GEGLU = 'p = MatMul(x, w) s = Gelu <approximate = "tanh"> (p) n = MatMul(x, v) y = Mul(n, s)'
PARTED = (
    'm = MatMul(x, d) p, n = Split <axis = 2, num_outputs = 2> (m) s = Gelu <approximate = "tanh"> (p) y = Mul(s, n)'
)
GATED = {"weights": {"w": (8, 6), "v": (8, 6), "d": (8, 12), "b": (6,)}, "opset": 20, "tolerance": 2e-6}
WEIGHTS = {"w": (8, 6), "b": (6,)}


def case(label: str, body: str, io: str = IO, **options: object) -> Case:
    arguments: dict[str, object] = {"weights": WEIGHTS, "tolerance": 1e-6, **options}
    return Case("sigmoid-after-product", label, f"{io} <float c = {{1.702}}> {{ {body} }}", **arguments)  # type: ignore[arg-type]


CASES: tuple[Case, ...] = (
    case("silu", SILU),
    case("quick-gelu", QUICK),
    case("no-bias", SILU.replace("Add(p, b)", "Identity(p)").replace("(z", "(p")),
    case("gate", "p = MatMul(x, w) s = Sigmoid(p) n = Neg(x) o = MatMul(n, w) y = Mul(o, s)"),
    case("sigmoid-is-output", SILU, io=f"{IO[:-1]}, float[2, 5, 6] s)"),
    case(
        "gemm",
        SILU.replace("p = MatMul(x, w) z = Add(p, b)", "z = Gemm(x, w, b)"),
        io="g (float[5, 8] x) => (float[5, 6] y)",
    ),
    case("dynamic", QUICK, io="g (float[N, S, 8] x) => (float[N, S, 6] y)"),
    case("far-below-and-above", QUICK, values={"w": np.full((8, 6), 300, np.float32)}, weights={"b": (6,)}),
    case("twice", f"{SILU.replace('y = ', 'a = ')} d = Sigmoid(p) y = Mul(a, d)", changes=2),
    case("of-the-input", "s = Sigmoid(x) y = MatMul(s, w)", changes=0),
    case(
        "of-two-activations",
        "t = Transpose(w) p = MatMul(x, q) s = Sigmoid(p) y = Mul(p, s)",
        io="g (float[2, 5, 8] x, float[8, 6] q) => (float[2, 5, 6] y)",
        changes=0,
    ),
    case(
        "residual",
        "p = MatMul(x, w) z = Add(p, r) s = Sigmoid(z) y = Mul(z, s)",
        io="g (float[2, 5, 8] x, float[2, 5, 6] r) => (float[2, 5, 6] y)",
        changes=0,
    ),
    case("tensorrt", SILU, target=Target(backend="tensorrt"), changes=0, refusals=1),
    case(
        "parted", "m = MatMul(x, d) p, n = Split <axis = 2, num_outputs = 2> (m) s = Sigmoid(p) y = Mul(s, n)", **GATED
    ),
    case("geglu", GEGLU, **GATED),
    case("geglu-parted", PARTED, **GATED),
    case("geglu-far", GEGLU, **{**GATED, "weights": {"v": (8, 6)}, "values": {"w": np.full((8, 6), 300, np.float32)}}),
    case("geglu-erf", GEGLU.replace("tanh", "none"), changes=0, **GATED),
    case("geglu-biased", GEGLU.replace("(p)", "(z)").replace("s =", "z = Add(p, b) s =", 1), changes=0, **GATED),
    case("gelu-of-one-product", GEGLU.replace("MatMul(x, v)", "Identity(p)"), changes=0, **GATED),
    case("geglu-tensorrt", GEGLU, target=Target(backend="tensorrt"), changes=0, refusals=1, **GATED),
)
