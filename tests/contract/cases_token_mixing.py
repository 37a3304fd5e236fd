"""Cases for token-mixing: x [N, 6, 4], six tokens of four features."""

from __future__ import annotations

from contract_case import Case

X, Y = "float[N, 6, 4] x", "float[N, 6, 4] y"
WEIGHTS = {"w": (6, 10), "u": (10, 6), "q": (6, 6), "a": (10,), "c": (6,), "s": (1,), "f": (4, 6), "b": (2, 6, 6)}
TURN, BACK = "t = Transpose <perm = [0, 2, 1]> (x)", "Transpose <perm = [0, 2, 1]>"


def mixed(label: str, body: str, io: str = f"{X}) => ({Y}", **options: object) -> Case:
    weights = {name: shape for name, shape in WEIGHTS.items() if any(f"{name}{end}" in body for end in "),")}
    options = {"weights": weights, "tolerance": 1e-6, "opset": 20, **options}
    return Case("token-mixing", label, f"g ({io}) {{ {body} }}", **options)  # type: ignore[arg-type]


def other(label: str, body: str, io: str = f"{X}) => ({Y}") -> Case:
    return mixed(label, body, io, changes=0)


CASES: tuple[Case, ...] = (
    mixed(
        "mixer",
        f"{TURN} m = MatMul(t, w) n = Add(m, a) g = Gelu(n) o = MatMul(g, u) p = Add(c, o) r = {BACK} (p) "
        "y = Add(r, x)",
    ),
    mixed(
        "gate", f"{TURN} m = MatMul(t, q) n = Add(m, c) v = {BACK} (n) y = Mul(v, z)", f"{X}, float[N, 6, 4] z) => ({Y}"
    ),
    mixed(
        "gelu-spelled-out",
        f"{TURN} m = MatMul(t, q) n = Add(m, c) d = Div(n, s) e = Erf(d) k = Add(e, s) g = Mul(n, k) y = {BACK} (g)",
    ),
    mixed(
        "leaves-twice",
        f"{TURN} m = MatMul(t, q) n = Relu(m) y = {BACK} (n) z = {BACK} (m)",
        f"{X}) => ({Y}, float[N, 6, 4] z",
    ),
    mixed(
        "activation-first",
        f"{TURN} r = Relu(t) m = MatMul(r, q) y = {BACK} (m)",
        "float[2, 6, K] x) => (float[2, 6, K] y",
    ),
    other("no-product", f"{TURN} r = Exp(t) y = {BACK} (r)"),
    other("product-of-activations", f"{TURN} m = MatMul(t, x) y = {BACK} (m)", f"{X}) => (float[N, 4, 4] y"),
    other("weight-first", f"{TURN} m = MatMul(f, t) y = {BACK} (m)", "float[N, 4, 6] x) => (float[N, 4, 4] y"),
    other("a-matrix-per-image", f"{TURN} m = MatMul(t, b) y = {BACK} (m)", "float[2, 6, 4] x) => (float[2, 6, 4] y"),
    other(
        "used-elsewhere", f"{TURN} m = MatMul(t, q) y = {BACK} (m) z = Softmax(m)", f"{X}) => ({Y}, float[N, 4, 6] z"
    ),
    other("an-output-between", f"{TURN} m = MatMul(t, q) y = {BACK} (m)", f"{X}) => ({Y}, float[N, 4, 6] m"),
    other(
        "joined-from-outside",
        f"{TURN} m = MatMul(t, q) n = Add(m, z) y = {BACK} (n)",
        f"{X}, float[N, 4, 6] z) => ({Y}",
    ),
    other(
        "other-axes",
        "t = Transpose <perm = [1, 2, 0]> (x) y = MatMul(t, z)",
        "float[2, 6, 4] x, float[2, 3] z) => (float[6, 4, 3] y",
    ),
)
