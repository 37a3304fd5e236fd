"""Cases for strided-stem: x [N, 3, 8, 12]."""

from __future__ import annotations

from contract_case import Case

X = "float[N, 3, 8, 12] x"
WEIGHTS = {
    "w": (5, 3, 7, 7),
    "t": (5, 3, 3, 3),
    "p": (5, 3, 4, 4),
    "o": (5, 3, 1, 1),
    "u": (5, 3, 2, 5),
    "s": (6, 1, 10),
    "c": (4, 2, 2, 3, 4),
    "g": (6, 1, 3, 3),
    "m": (5, 5, 3, 3),
    "a": (5,),
}


def stem(label: str, body: str, io: str = f"{X}) => (float[N, 5, H, W] y", **options: object) -> Case:
    weights = {name: shape for name, shape in WEIGHTS.items() if f" {name})" in body or f" {name}," in body}
    options = {"weights": weights, "tolerance": 1e-5, **options}
    return Case("strided-stem", label, f"g ({io}) {{ {body} }}", **options)  # type: ignore[arg-type]


def refused(label: str, body: str, io: str = f"{X}) => (float[N, 5, H, W] y") -> Case:
    return stem(label, body, io, changes=0, refusals=1)


CASES: tuple[Case, ...] = (
    stem("resnet", "c = Conv <strides = [2, 2], pads = [3, 3, 3, 3]> (x, w, a) y = Relu(c)"),
    stem("mobile", "c = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (x, t) y = Relu(c)"),
    stem("patches", "y = Conv <strides = [4, 4]> (x, p, a)", "float[N, 3, 8, 12] x) => (float[N, 5, 2, 3] y"),
    stem("overlapping-patches", "y = Conv <strides = [4, 4], pads = [3, 3, 3, 3]> (x, w, a)"),
    stem("padded-at-one-end", "y = Conv <strides = [2, 2], pads = [0, 0, 1, 1]> (x, t, a)"),
    stem("padding-beyond-the-kernel", "y = Conv <strides = [2, 4], pads = [5, 2, 6, 4]> (x, t, a)"),
    stem("kernel-below-its-stride", "y = Conv <strides = [2, 4]> (x, o, a)"),
    stem("strides-that-differ", "y = Conv <strides = [1, 3], pads = [0, 2, 1, 1]> (x, u, a)"),
    stem("valid", 'y = Conv <auto_pad = "VALID", strides = [2, 2]> (x, t)'),
    stem("sound", "y = Conv <strides = [5]> (x, s)", "float[N, 1, 40] x) => (float[N, 6, 7] y"),
    stem("clip", "y = Conv <strides = [2, 3, 4]> (x, c)", "float[2, 2, 4, 6, 8] x) => (float[2, 4, 2, 2, 2] y"),
    stem(
        "graph-output-of-fixed-batch",
        "y = Conv <strides = [2, 2]> (x, t)",
        "float[2, 3, 8, 12] x) => (float[2, 5, 3, 5] y",
    ),
    stem("computed-weights", "v = Neg (t) y = Conv <strides = [2, 2]> (x, v)", weights={"t": WEIGHTS["t"]}, changes=0),
    stem("stride-1", "y = Conv(x, t, a)", changes=0),
    stem("many-channels", "b = Conv(x, t) y = Conv <strides = [2, 2]> (b, m)", changes=0),
    stem("groups", "y = Conv <group = 3, strides = [2, 2]> (x, g)", f"{X}) => (float[N, 6, H, W] y", changes=0),
    refused("no-multiple", "y = Conv <strides = [2, 2]> (x, t)", "float[N, 3, 8, 13] x) => (float[N, 5, H, W] y"),
    refused(
        "unknown-size",
        "y = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (x, t)",
        "float[N, 3, H, 12] x) => (float[N, 5, K, W] y",
    ),
    refused("dilated", "y = Conv <strides = [2, 2], dilations = [2, 2]> (x, t)"),
    refused("automatic", 'y = Conv <auto_pad = "SAME_UPPER", strides = [2, 2]> (x, t)'),
)
