"""Cases for conv-1d and residual-activation: x [N, 4, 12]."""

from __future__ import annotations

from contract_case import Case

X = "float[N, 4, 12] x"
Y = "float[N, 4, 12] y"
WEIGHTS = {
    "w": (4, 4, 3),
    "v": (4, 4, 1),
    "u": (4, 4, 4),
    "a": (4,),
    "c": (4, 1),
    "t": (12,),
    "e": (1, 4, 12),
    "far": (2, 1, 4, 1),
    "k": (4, 4, 3, 3),
}
SAME = "<pads = [1, 1]>"


def case(recipe: str, label: str, body: str, io: str = f"{X}) => ({Y}", **options: object) -> Case:
    weights = {name: shape for name, shape in WEIGHTS.items() if f" {name})" in body or f" {name}," in body}
    options = {"weights": weights, "tolerance": 1e-6, **options}
    return Case(recipe, label, f"g ({io}) {{ {body} }}", **options)  # type: ignore[arg-type]


def wide(label: str, body: str, io: str = f"{X}) => ({Y}", **options: object) -> Case:
    return case("conv-1d", label, body, io, **options)


def kept(label: str, body: str, io: str = f"{X}) => ({Y}", **options: object) -> Case:
    return case("residual-activation", label, body, io, **options)


BLOCK = f"l = LeakyRelu(x) p = Conv {SAME} (l, w, a)"

CASES: tuple[Case, ...] = (
    wide("residual", f"{BLOCK} s = Add(p, x) y = Conv(s, v)"),
    wide("output-of-the-addition", f"{BLOCK} y = Add(x, p)"),
    wide(
        "inner-output",
        f"{BLOCK} s = Add(p, x) y = Conv(s, v)",
        f"{X}) => ({Y}, float[N, 4, 12] p, float[N, 4, 12] s",
    ),
    wide(
        "dilated-strided",
        "p = Conv <dilations = [3], pads = [2, 4], strides = [2]> (x, w, a) "
        "q = Conv <kernel_shape = [1], strides = [2]> (x, v) "
        "s = Add(p, q) y = Softmax(s)",
        f"{X}) => (float[N, 4, 6] y",
    ),
    wide(
        "transposed",
        "p = Conv(x, v) q = ConvTranspose <pads = [1, 1], strides = [2], output_padding = [1]> (p, w, a) "
        "r = ConvTranspose <strides = [2], output_shape = [25]> (x, u) z = Conv <pads = [1, 1]> (q, w) "
        "n = Neg(r) m = Mul(n, n) s = Add(z, q) y = Concat <axis = 2> (s, m)",
        f"{X}) => (float[N, 4, M] y",
    ),
    wide("operands", f"p = Conv {SAME} (x, w) d = Mul(p, c) f = Add(d, t) g = Add(f, e) s = Add(p, g) y = Tanh(s)"),
    wide("any-length", f"{BLOCK} s = Add(p, x) y = Relu(s)", "float[N, 4, L] x) => (float[N, 4, L] y"),
    wide("other-readers", f"{BLOCK} s = Add(p, x) m = ReduceMean <axes = [2]> (s) y = Sub(s, m)"),
    wide("no-residual", f"{BLOCK} y = Conv(p, v)", changes=0),
    wide(
        "computed-weight",
        f"{BLOCK} r = Conv(p, z) y = Add(r, x)",
        f"{X}, float[4, 4, 1] z) => ({Y}",
        changes=0,
        refusals=1,
    ),
    wide(
        "automatic-padding",
        """l = LeakyRelu(x) p = Conv <auto_pad = "SAME_UPPER"> (l, w) y = Add(p, x)""",
        changes=0,
        refusals=1,
    ),
    wide(
        "rank-4-operand",
        f"p = Conv {SAME} (x, w) s = Add(p, x) y = Add(s, far)",
        f"{X}) => (float[2, N, 4, 12] y",
        changes=1,
    ),
    wide(
        "two-axes",
        "p = Conv <pads = [1, 1, 1, 1]> (x, k) y = Add(p, x)",
        "float[N, 4, 5, 6] x) => (float[N, 4, 5, 6] y",
        changes=0,
    ),
    kept("leaky", f"p = Conv {SAME} (x, w) s = Add(p, x) l = LeakyRelu <alpha = 0.1> (s) r = Conv(l, v) y = Add(r, s)"),
    kept("relu", f"p = Conv {SAME} (x, w) s = Add(x, p) l = Relu(s) r = Conv(l, v) y = Add(r, s)"),
    kept("of-a-convolution", f"s = Conv {SAME} (x, w) l = LeakyRelu(s) r = Conv(l, v) y = Add(r, s)"),
    kept("reader-in-front", f"s = Conv {SAME} (x, w) n = Neg(s) l = LeakyRelu(s) y = Add(l, n)"),
    kept(
        "two-axes",
        "s = Conv <pads = [1, 1, 1, 1]> (x, k) l = Relu(s) y = Add(l, s)",
        "float[N, 4, 5, 6] x) => (float[N, 4, 5, 6] y",
    ),
    kept("steep", f"s = Conv {SAME} (x, w) l = LeakyRelu <alpha = 1.5> (s) y = Add(l, s)", changes=0, refusals=1),
    kept("falling", f"s = Conv {SAME} (x, w) l = LeakyRelu <alpha = -0.5> (s) y = Add(l, s)", changes=0, refusals=1),
    kept("activation-alone", f"s = Conv {SAME} (x, w) y = LeakyRelu(s)", changes=0),
    kept("graph-output", f"s = Conv {SAME} (x, w) y = LeakyRelu(s)", f"{X}) => ({Y}, float[N, 4, 12] s", changes=0),
    kept("not-of-a-convolution", "s = Neg(x) l = Relu(s) y = Add(l, s)", changes=0),
)
