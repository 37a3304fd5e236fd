"""Cases for conv-1d and residual-activation: x [N, 4, 12]."""

from __future__ import annotations

from dataclasses import replace

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
    "o1": (1,),
    "z1": (1,),
    "o2": (2,),
    "z2": (2,),
    "gl": (4, 1),
    "bl": (4, 12),
}
ROWS = (
    "int64[3] whole = {0, 1, -1}",
    "int64[3] pairs = {0, 2, -1}",
    "int64[3] each = {0, 4, -1}",
    "int64[3] back = {0, 4, 12}",
)
SAME = "<pads = [1, 1]>"


def case(recipe: str, label: str, body: str, io: str = f"{X}) => ({Y}", **options: object) -> Case:
    weights = {name: shape for name, shape in WEIGHTS.items() if f" {name})" in body or f" {name}," in body}
    options = {"weights": weights, "tolerance": 1e-6, **options}
    return Case(recipe, label, f"g ({io}) {{ {body} }}", **options)  # type: ignore[arg-type]


def wide(label: str, body: str, io: str = f"{X}) => ({Y}", **options: object) -> Case:
    return case("conv-1d", label, body, io, **options)


def normal(label: str, body: str, io: str = f"{X}) => ({Y}", **options: object) -> Case:
    """A case with the shapes of rows as constants."""
    made = wide(label, body, io, tolerance=1e-5, **options)
    used = ", ".join(each for each in ROWS if f", {each.split()[1]})" in body)
    return replace(made, graph=made.graph.replace(" {", f" <{used}> {{", 1))


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
    normal(
        "one-group",
        f"p = Conv {SAME} (x, w) r = Reshape(p, whole) i = InstanceNormalization <epsilon = 0.001> (r, o1, z1) "
        "q = Reshape(i, back) m = Mul(q, c) n = Add(m, gl) t1 = Tanh(n) y = Conv(t1, v)",
    ),
    normal(
        "one-group-of-any-length",
        f"p = Conv {SAME} (x, w) h = Tanh(p) r = Reshape(h, whole) i = InstanceNormalization (r, o1, z1) "
        "s = Shape(h) q = Reshape(i, s) n = Add(q, gl) y = Conv(n, v)",
        "float[N, 4, L] x) => (float[N, 4, L] y",
    ),
    normal(
        "groups",
        f"p = Conv {SAME} (x, w) r = Reshape(p, pairs) i = InstanceNormalization (r, o2, z2) "
        "q = Reshape(i, back) m = Mul(q, c) n = Sigmoid(m) l = Mul(m, n) y = Conv(l, v)",
    ),
    normal(
        "groups-of-any-length",
        f"p = Conv {SAME} (x, w) r = Reshape(p, pairs) i = InstanceNormalization (r, o2, z2) "
        "s = Shape(p) q = Reshape(i, s) m = Mul(q, c) y = Relu(m)",
        "float[N, 4, L] x) => (float[N, 4, L] y",
    ),
    normal(
        "channels-as-rows",
        f"p = Conv {SAME} (x, w) r = Reshape(p, each) i = InstanceNormalization (r, a, a) q = Reshape(i, back) "
        "m = Mul(q, c) y = Tanh(m)",
    ),
    wide("channels", f"p = Conv {SAME} (x, w) i = InstanceNormalization (p, a, a) y = Relu(i)", tolerance=1e-5),
    wide(
        "channels-twice",
        f"i = InstanceNormalization (x, a, a) p = Conv {SAME} (i, w) y = InstanceNormalization (p, a, a)",
        tolerance=1e-5,
    ),
    wide(
        "layer-normalization",
        f"p = Conv {SAME} (x, w) n = LayerNormalization <axis = 1> (p, gl, bl) y = Relu(n)",
        tolerance=1e-5,
    ),
    wide("tokens", f"p = Conv {SAME} (x, w) y = LayerNormalization (p, t)", changes=0),
    wide("normalization-alone", "i = InstanceNormalization (x, a, a) y = Relu(i)", changes=0),
    wide(
        "computed-factors",
        f"p = Conv {SAME} (x, w) y = InstanceNormalization (p, f, f)",
        f"{X}, float[4] f) => ({Y}",
        changes=0,
    ),
    normal(
        "rows-used-elsewhere",
        f"p = Conv {SAME} (x, w) r = Reshape(p, pairs) i = InstanceNormalization (r, o2, z2) k1 = Neg(r) "
        "q = Reshape(i, back) k2 = Reshape(k1, back) y = Add(q, k2)",
        changes=0,
    ),
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
