"""Cases for the recipes that swap a convolution or activation with resizing or pooling, or transpose it."""

from __future__ import annotations

import numpy as np
from cases_conv import X, floats, ints
from contract_case import Case

POINT = {"w": (2, 4, 1, 1), "a": (2,)}
TWICE = {"s": floats(1, 1, 2, 2)}


def resize(label: str, graph: str, values: dict[str, np.ndarray] | None = None, **options: object) -> Case:
    given = TWICE if values is None else values
    return Case("resize-conv", label, graph, POINT, values=given, tolerance=1e-6, **options)  # type: ignore[arg-type]


def joined(label: str, body: str, **options: object) -> Case:
    io = "float[N, 4, 8, 8] x, float[N, 3, 16, 16] z, float[N, 3, 16, 16] z2, float[N, 4, 16, 16] z3"
    weights = {"w": (2, 7, 1, 1), "w2": (2, 8, 1, 1), "w3": (2, 10, 1, 1), "w4": (2, 4, 1, 1), "w5": (2, 4, 1, 1)}
    weights = {name: shape for name, shape in weights.items() if f" {name})" in body or f" {name}," in body}
    weights |= {"a": (2,)} if " a)" in body else {}
    graph = f"g ({io}) => (float[N, 2, 16, 16] y) {{ {body} }}"
    return Case("resize-conv", label, graph, weights, values=TWICE, tolerance=1e-5, **options)  # type: ignore[arg-type]


FLOOR = 'coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"'
ROUND = 'coordinate_transformation_mode = "asymmetric", nearest_mode = "round_prefer_floor"'


def merged(label: str, body: str, size: tuple[int, int] = (16, 16), inputs: str = "", **options: object) -> Case:
    """A convolution that is not pointwise behind pixels that a Resize repeats."""
    shapes = {"w": (2, 4, 3, 3), "w8": (2, 8, 3, 3), "v": (2, 4, 5, 2), "g2": (2, 2, 3, 3), "a": (2,)}
    shapes = {name: shape for name, shape in shapes.items() if f" {name})" in body or f" {name}," in body}
    given = {"s": floats(1, 1, 2, 2), "t": floats(1, 1, 3, 1), "u": floats(1, 1, 1, 4), "i": ints(2)}
    values = {name: value for name, value in given.items() if f" {name})" in body}
    graph = f"g ({X}{inputs}) => (float[N, 2, {size[0]}, {size[1]}] y) {{ {body} }}"
    return Case("resize-conv", label, graph, shapes, values=values, tolerance=1e-5, **options)  # type: ignore[arg-type]


RESIZES: tuple[Case, ...] = (
    resize(
        "nearest",
        f"g ({X}) => (float[N, 2, 16, 16] y) {{ r = Resize(x, , s) c = Conv(r, w, a) y = Relu(c) }}",
    ),
    resize(
        "linear-output",
        f'g ({X}) => (float[N, 2, 16, 16] y) {{ r = Resize <mode = "linear"> (x, , s) y = Conv(r, w, a) }}',
    ),
    resize(
        "sizes",
        "g (float[3, 4, 8, 8] x) => (float[3, 2, 12, 9] y) { r = Resize(x, , , k) c = Conv(r, w) y = Relu(c) }",
        {"k": ints(3, 4, 12, 9)},
    ),
    resize(
        "sizes-of-axes",
        f"g ({X}) => (float[N, 2, 12, 9] y) {{ r = Resize <axes = [2, -1]> (x, , , k) y = Conv(r, w, a) }}",
        {"k": ints(12, 9)},
        opset=18,
    ),
    resize(
        "shrinks",
        f"g ({X}) => (float[N, 2, 4, 16] y) {{ r = Resize(x, , s) y = Conv(r, w) }}",
        {"s": floats(1, 1, 0.5, 2)},
        changes=0,
        refusals=1,
    ),
    resize(
        "cubic",
        f'g ({X}) => (float[N, 2, 16, 16] y) {{ r = Resize <mode = "cubic"> (x, , s) y = Conv(r, w) }}',
        changes=0,
        refusals=1,
    ),
    resize(
        "antialias",
        f'g ({X}) => (float[N, 2, 16, 16] y) {{ r = Resize <mode = "linear", antialias = 1> (x, , s) y = Conv(r, w) }}',
        opset=18,
        changes=0,
        refusals=1,
    ),
    resize(
        "computed-scales",
        f"g ({X}) => (float[N, 2, H, W] y) "
        "{ h = Shape(x) f = Cast <to = 1> (h) o = Div(f, f) t = Mul(o, s) r = Resize(x, , t) y = Conv(r, w) }",
        changes=0,
        refusals=1,
    ),
    resize(
        "resized-used-elsewhere",
        f"g ({X}) => (float[N, 2, 16, 16] y, float[N, 4, 16, 16] z) {{ r = Resize(x, , s) y = Conv(r, w) z = Neg(r) }}",
        changes=0,
        refusals=1,
    ),
    resize(
        "computed-sizes",
        f"g ({X}) => (float[N, 2, 24, 16] y) {{ h = Shape <end = 2> (x) z = Concat <axis = 0> (h, k) "
        'r = Resize <mode = "linear"> (x, , , z) y = Conv(r, w, a) }',
        {"k": ints(24, 16)},
    ),
    resize(
        "computed-sizes-no-whole-factor",
        f"g ({X}) => (float[N, 2, 12, 16] y) {{ h = Shape <end = 2> (x) z = Concat <axis = 0> (h, k) "
        'r = Resize <mode = "linear"> (x, , , z) y = Conv(r, w, a) }',
        {"k": ints(12, 16)},
        changes=0,
        refusals=1,
    ),
    joined("concat", "r = Resize(x, , s) c = Concat <axis = 1> (r, z) d = Conv(c, w, a) y = Relu(d)"),
    joined(
        "concat-last-without-bias",
        'r = Resize <mode = "linear"> (x, , s) c = Concat <axis = 1> (z, r, z2) y = Conv(c, w3)',
    ),
    joined(
        "concat-of-resizes",
        "r = Resize(x, , s) n = Neg(x) q = Resize(n, , s) c = Concat <axis = 1> (r, q) y = Conv(c, w2, a)",
    ),
    joined(
        "concat-used-elsewhere",
        "r = Resize(x, , s) c = Concat <axis = 1> (r, z) d = Conv(c, w, a) e = Conv(c, w, a) y = Add(d, e)",
        changes=0,
        refusals=2,
    ),
    joined(
        "concat-groups",
        "r = Resize(x, , s) c = Concat <axis = 1> (r, z3) y = Conv <group = 2> (c, w4, a)",
        changes=0,
        refusals=1,
    ),
    joined(
        "concat-part-twice",
        "r = Resize(x, , s) c = Concat <axis = 1> (r, z, z) y = Conv(c, w3, a)",
        changes=0,
        refusals=1,
    ),
    joined(
        "concat-resized-used-elsewhere",
        "r = Resize(x, , s) c = Concat <axis = 1> (r, z) d = Conv(c, w, a) n = ReduceMean(r) y = Add(d, n)",
        changes=0,
        refusals=1,
    ),
    joined(
        "concat-along-rows",
        "r = Resize(x, , s) c = Concat <axis = 2> (r, z3) d = Conv(c, w5, a) "
        "y = MaxPool <kernel_shape = [2, 1], strides = [2, 1]> (d)",
        changes=0,
        refusals=1,
    ),
    resize(
        "padded",
        f"g ({X}) => (float[N, 2, 18, 18] y) {{ r = Resize(x, , s) y = Conv <pads = [1, 1, 1, 1]> (r, w) }}",
        changes=0,
        refusals=1,
    ),
    merged("doubled", "r = Resize(x, , s) c = Conv <pads = [1, 1, 1, 1]> (r, w, a) y = Relu(c)"),
    merged("doubled-without-padding", f"r = Resize <{FLOOR}> (x, , s) y = Conv(r, w)", size=(14, 14)),
    merged("uneven-padding", "r = Resize(x, , s) y = Conv <pads = [0, 2, 1, 0]> (r, w, a)", size=(15, 16)),
    merged("uneven-factors", "r = Resize(x, , t) y = Conv <pads = [1, 1, 1, 1]> (r, w)", size=(24, 8)),
    merged("one-axis-of-a-5x2-kernel", "r = Resize(x, , u) y = Conv <pads = [2, 0, 2, 1]> (r, v, a)", size=(8, 32)),
    merged(
        "doubled-by-its-size",
        "n = Shape <start = 2> (x) d = Mul(n, i) b = Shape <end = 2> (x) z = Concat <axis = 0> (b, d) "
        f"r = Resize <{FLOOR}> (x, , , z) y = Conv <pads = [1, 1, 1, 1]> (r, w)",
    ),
    merged(
        "doubled-beside-another",
        "r = Resize(x, , s) o = Relu(r0) c = Concat <axis = 1> (o, r) y = Conv <pads = [1, 1, 1, 1]> (c, w8, a)",
        inputs=", float[N, 4, 16, 16] r0",
    ),
    merged(
        "two-doubled",
        "r = Resize(x, , s) n = Neg(x) q = Resize(n, , s) c = Concat <axis = 1> (r, q) "
        "y = Conv <pads = [1, 1, 1, 1]> (c, w8, a)",
    ),
    merged(
        "interpolated-beside-doubled",
        'r = Resize(x, , s) q = Resize <mode = "linear"> (x, , s) c = Concat <axis = 1> (q, r) '
        "y = Conv <pads = [1, 1, 1, 1]> (c, w8)",
        refusals=1,
    ),
    merged(
        "interpolated",
        'r = Resize <mode = "linear"> (x, , s) y = Conv <pads = [1, 1, 1, 1]> (r, w)',
        changes=0,
        refusals=1,
    ),
    *(
        Case(
            "resize-conv",
            f"half-weights-of-{weight}",
            "g (float16[N, 4, 8, 8] x) => (float16[N, 2, 16, 16] y) "
            "{ r = Resize(x, , s) c = Conv <pads = [1, 1, 1, 1]> (r, w) y = Tanh(c) }",
            values={"s": floats(1, 1, 2, 2), "w": np.full((2, 4, 3, 3), weight, np.float16)},
            changes=changes,
            refusals=1 - changes,
            tolerance=1e-3,
        )
        for weight, changes in ((-20000, 0), (16, 1))
    ),
    merged("rounded", f"r = Resize <{ROUND}> (x, , t) y = Conv(r, w)", size=(22, 6), changes=0, refusals=1),
    merged("strides", "r = Resize(x, , s) y = Conv <strides = [2, 2]> (r, w)", size=(7, 7), changes=0, refusals=1),
    merged("groups", "r = Resize(x, , s) y = Conv <group = 2> (r, g2)", size=(14, 14), changes=0, refusals=1),
    merged(
        "too-much-padding",
        "r = Resize(x, , s) y = Conv <pads = [3, 1, 1, 1]> (r, w)",
        size=(18, 16),
        changes=0,
        refusals=1,
    ),
)


def average(label: str, graph: str, **options: object) -> Case:
    return Case("average-pool-conv", label, graph, POINT, tolerance=1e-6, **options)  # type: ignore[arg-type]


AVERAGES: tuple[Case, ...] = (
    average(
        "transition",
        f"g ({X}) => (float[N, 2, 4, 4] y) {{ c = Conv(x, w, a) "
        "p = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (c) y = Relu(p) }",
    ),
    average(
        "padding-not-counted",
        f"g ({X}) => (float[N, 2, 4, 4] y) {{ c = Conv(x, w, a) "
        "y = AveragePool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (c) }",
    ),
    average("global", f"g ({X}) => (float[N, 2, 1, 1] y) {{ c = Conv(x, w, a) y = GlobalAveragePool(c) }}"),
    average(
        "padding-counted",
        f"g ({X}) => (float[N, 2, 4, 4] y) {{ c = Conv(x, w, a) "
        "y = AveragePool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1], count_include_pad = 1> (c) }",
        changes=0,
        refusals=1,
    ),
    average(
        "conv-used-elsewhere",
        f"g ({X}) => (float[N, 2, 1, 1] y, float[N, 2, 8, 8] c) {{ c = Conv(x, w, a) y = GlobalAveragePool(c) }}",
        changes=0,
        refusals=1,
    ),
    average(
        "activation-between",
        f"g ({X}) => (float[N, 2, 1, 1] y) {{ c = Conv(x, w, a) r = Relu(c) y = GlobalAveragePool(r) }}",
        changes=0,
    ),
)


CASES: tuple[Case, ...] = (*RESIZES, *AVERAGES)
