"""Cases for gated-conv: x [N, 6, 4, 5], a gate g [N, 6, 1, 1]."""

from __future__ import annotations

from contract_case import Case

from trtopt.rewrite.protocol import Target

X, G, Y = "float[N, 6, 4, 5] x", "float[N, 6, 1, 1] g", "float[N, 3, 4, 5] y"
WEIGHTS = {"w": (3, 6, 1, 1), "a": (3,), "k": (3, 6, 3, 3), "h": (4, 3, 1, 1), "c": (1, 6, 1, 1)}
RTX = Target("tensorrt-rtx", "fp16", "8.9")


def gated(label: str, body: str, io: str = f"{X}, {G}) => ({Y}", **options: object) -> Case:
    weights = {name: shape for name, shape in WEIGHTS.items() if f" {name})" in body or f" {name}," in body}
    options = {"weights": weights, "tolerance": 1e-6, "target": RTX, **options}
    return Case("gated-conv", label, f"g ({io}) {{ {body} }}", **options)  # type: ignore[arg-type]


def other(label: str, body: str, io: str = f"{X}, {G}) => ({Y}", **options: object) -> Case:
    return gated(label, body, io, changes=0, **options)


CONV = "m = Mul(x, g) y = Conv(m, w, a)"

CASES: tuple[Case, ...] = (
    gated("output", CONV),
    gated(
        "excitation",
        "s = GlobalAveragePool(x) t = HardSigmoid(s) m = Mul(t, x) c = Conv(m, w) y = Relu(c)",
        f"{X}) => ({Y}",
    ),
    gated("one-gate-for-all-images", CONV, f"{X}, float[1, 6, 1, 1] g) => ({Y}"),
    gated("fixed-batch", CONV, "float[2, 6, 4, 5] x, float[2, 6, 1, 1] g) => (float[2, 3, 4, 5] y"),
    gated("residual", "m = Mul(g, x) c = Conv(m, w, a) y = Add(c, r)", f"{X}, {G}, float[N, 3, 4, 5] r) => ({Y}"),
    other("gate-by-pixel", CONV, f"{X}, float[N, 6, 4, 5] g) => ({Y}"),
    other("gate-by-image", CONV, f"{X}, float[N, 1, 1, 1] g) => ({Y}"),
    other("batches-that-may-differ", CONV, f"{X}, float[M, 6, 1, 1] g) => (float[K, 3, 4, 5] y"),
    other("constant-gate", "m = Mul(x, c) y = Conv(m, w, a)", f"{X}) => ({Y}"),
    other("kernel", "m = Mul(x, g) y = Conv(m, k, a)", f"{X}, {G}) => (float[N, 3, 2, 3] y"),
    other("strided", "m = Mul(x, g) y = Conv <strides = [2, 2]> (m, w, a)", f"{X}, {G}) => (float[N, 3, 2, 3] y"),
    other("groups", "m = Mul(x, g) y = Conv <group = 2> (m, h)", f"{X}, {G}) => (float[N, 4, 4, 5] y"),
    other("int8", CONV, target=Target("tensorrt-rtx", "int8", "8.9")),
    other("tensorrt", CONV, target=Target("tensorrt", "fp16", "8.9")),
    other("used-elsewhere", f"{CONV} z = Neg(m)", f"{X}, {G}) => ({Y}, float[N, 6, 4, 5] z", refusals=1),
    other("map-is-an-output", CONV, f"{X}, {G}) => ({Y}, float[N, 6, 4, 5] m", refusals=1),
    other("any-size", CONV, f"float[N, 6, H, W] x, {G}) => (float[N, 3, H, W] y", refusals=1),
)
