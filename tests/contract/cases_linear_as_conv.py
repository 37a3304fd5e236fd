"""Cases for linear-as-conv, and maps in merged-transpose: tokens [N, 30, 4] are an image of 6 x 5."""

from __future__ import annotations

import re
from dataclasses import replace

from contract_case import Case

SIZES = {
    "image": "int64[4] image = {-1, 8, 6, 5}",
    "wide": "int64[4] wide = {0, 6, 5, 8}",
    "turned": "int64[4] turned = {0, 5, 6, 8}",
    "mixed": "int64[4] mixed = {0, 6, 8, 5}",
    "column": "int64[4] column = {0, 8, -1, 2}",
    "c8": "int64[1] c8 = {8}",
    "o": "int64[1] o = {1}",
    "copied": "int64[4] copied = {0, 8, 0, 1}",
    "tokens": "int64[3] tokens = {0, 4, -1}",
    "flat": "int64[3] flat = {0, -1, 4}",
    "swapped": "int64[4] swapped = {0, 8, 5, 6}",
    "four": "int64[4] four = {-1, 4, 6, 5}",
    "crossed": "int64[4] crossed = {0, 5, 6, 4}",
}
TOKENS = "float[N, 30, 4] x"
PICTURE = "float[N, 4, 6, 5] x"
WEIGHTS = {"w": (4, 8), "b": (8,), "k": (8, 1, 3, 3), "v": (4, 4, 3, 3), "five": (5, 5, 3, 3)}
WEIGHTS |= {"scale": (4,), "shift": (4,), "single": (1,)}
DEPTHWISE = "y = Conv <group = 8, pads = [1, 1, 1, 1]> (i, k)"
LINEAR = "p = MatMul(x, w) a = Add(p, b)"
OPEN_IO = "float[N, L, 4] x) => (float[N, 8, L, 1] y"
OPEN = f"n = Shape <start = 0, end = 1> (x) h = Shape <start = 1, end = 2> (x) {LINEAR}"
CONV = "c = Conv <pads = [1, 1, 1, 1]> (x, v)"


def case(label: str, body: str, io: str, **options: object) -> Case:
    used = ", ".join(text for name, text in SIZES.items() if f" {name})" in body or f" {name}," in body)
    weights = {name: shape for name, shape in WEIGHTS.items() if re.search(rf"[ (]{name}[,)]", body)}
    options = {"weights": weights, "tolerance": 1e-5, **options}
    return Case("linear-as-conv", label, f"g ({io}) <{used}> {{ {body} }}", **options)  # type: ignore[arg-type]


def enters(label: str, body: str, **options: object) -> Case:
    return case(label, body, f"{TOKENS}) => (float[N, 8, 6, 5] y", **options)


def leaves(label: str, body: str, **options: object) -> Case:
    return case(label, body, f"{PICTURE}) => (float[N, 30, 8] y", **options)


def flattened(label: str, body: str, **options: object) -> Case:
    """A map that becomes tokens, for merged-transpose."""
    text = f"{CONV} r = Reshape(c, tokens) t = Transpose <perm = [0, 2, 1]> (r) {body}"
    return replace(leaves(label, text, **{"tolerance": 0.0, **options}), recipe="merged-transpose")


def shaped(label: str, body: str, **options: object) -> Case:
    """Tokens that become a map, for merged-transpose."""
    text = f"t = Transpose <perm = [0, 2, 1]> (x) {body}"
    made = case(label, text, f"{TOKENS}) => (float[N, 4, 6, 5] y", **{"tolerance": 0.0, **options})
    return replace(made, recipe="merged-transpose")


_MAP = "i = Reshape(t, four) d = Conv <pads = [1, 1, 1, 1]> (i, v)"

CASES: tuple[Case, ...] = (
    shaped("tokens-become-a-map", f"{_MAP} y = Relu(d)"),
    shaped("map-of-two-convs", f"{_MAP} c = Conv <pads = [1, 1, 1, 1]> (i, v) y = Sub(d, c)"),
    shaped("map-of-an-activation-too", f"{_MAP} r = Relu(i) y = Add(d, r)", changes=0),
    shaped("tokens-turned-used", f"{_MAP} m = ReduceMax(t) y = Add(d, m)", changes=0),
    shaped("map-is-an-output", "y = Reshape(t, four)", changes=0),
    shaped(
        "channels-mixed-up",
        "i = Reshape(t, crossed) q = Conv <pads = [1, 1, 1, 1]> (i, five) y = Reshape(q, four)",
        changes=0,
    ),
    flattened("map-of-a-norm", "n = LayerNormalization(t, scale, shift) p = MatMul(n, w) y = Add(p, b)"),
    flattened(
        "map-of-a-norm-and-a-product",
        "n = LayerNormalization(t, scale) q = Sub(n, n) p = MatMul(t, w) m = MatMul(q, w) y = Add(p, m)",
    ),
    flattened("map-of-a-norm-of-one-scale", "n = LayerNormalization(t, single) y = MatMul(n, w)", changes=0),
    flattened("map", "p = MatMul(t, w) y = Add(p, b)"),
    flattened("map-of-two-products", "p = MatMul(t, w) q = MatMul(t, w) y = Sub(p, q)"),
    flattened("map-of-an-activation", "g = Relu(t) y = MatMul(g, w)", changes=0),
    flattened("map-used-elsewhere", "g = Relu(t) p = MatMul(g, w) q = MatMul(t, w) y = Add(p, q)", changes=0),
    flattened(
        "map-before-it-is-turned-used", "m = MatMul(t, w) z = ReduceMax <keepdims = 1> (r) y = Add(m, z)", changes=0
    ),
    flattened(
        "map-and-its-transpose",
        "u = Transpose <perm = [0, 2, 1]> (t) p = MatMul(t, w) s = ReduceMax(u) y = Add(p, s)",
        changes=0,
    ),
    enters("enters", f"{LINEAR} t = Transpose <perm = [0, 2, 1]> (a) i = Reshape(t, image) {DEPTHWISE}"),
    enters("without-bias", f"p = MatMul(x, w) t = Transpose <perm = [0, 2, 1]> (p) i = Reshape(t, image) {DEPTHWISE}"),
    enters("reshape-first", f"{LINEAR} r = Reshape(a, wide) i = Transpose <perm = [0, 3, 1, 2]> (r) {DEPTHWISE}"),
    enters("graph-output", f"{LINEAR} t = Transpose <perm = [0, 2, 1]> (a) y = Reshape(t, image)"),
    enters(
        "two-readers", f"{LINEAR} t = Transpose <perm = [0, 2, 1]> (a) i = Reshape(t, image) r = Relu(i) y = Add(i, r)"
    ),
    enters("turned", f"{LINEAR} r = Reshape(a, turned) y = Transpose <perm = [0, 3, 2, 1]> (r)", changes=0),
    case(
        "mixed-channels",
        f"{LINEAR} r = Reshape(a, mixed) y = Transpose <perm = [0, 3, 1, 2]> (r)",
        f"{TOKENS}) => (float[N, 5, 6, 8] y",
        changes=0,
    ),
    case(
        "tokens-are-an-output",
        f"{LINEAR} t = Transpose <perm = [0, 2, 1]> (a) y = Reshape(t, image)",
        f"{TOKENS}) => (float[N, 8, 6, 5] y, float[N, 30, 8] a",
        changes=0,
    ),
    case(
        "height-left-over",
        f"{LINEAR} t = Transpose <perm = [0, 2, 1]> (a) y = Reshape(t, column)",
        "float[N, L, 4] x) => (float[N, 8, H, 2] y",
    ),
    case(
        "height-copied",
        f"{LINEAR} t = Transpose <perm = [0, 2, 1]> (a) y = Reshape(t, copied)",
        "float[N, L, 4] x) => (float[N, 8, L, 1] y",
        changes=0,
        refusals=1,
    ),
    enters(
        "of-one-head",
        "h = Transpose <perm = [0, 2, 1]> (x) q = MatMul(x, h) s = Softmax(q) z = MatMul(s, x) p = MatMul(z, w) "
        "a = Add(p, b) t = Transpose <perm = [0, 2, 1]> (a) y = Reshape(t, image)",
        changes=0,
        refusals=1,
    ),
    case(
        "open",
        f"{OPEN} t = Transpose <perm = [0, 2, 1]> (a) g = Concat <axis = 0> (n, c8, h, o) y = Reshape(t, g)",
        OPEN_IO,
    ),
    case(
        "open-reshape-first",
        f"{OPEN} g = Concat <axis = 0> (n, h, o, c8) r = Reshape(a, g) y = Transpose <perm = [0, 3, 1, 2]> (r)",
        OPEN_IO,
    ),
    leaves(
        "leaves", f"{CONV} r = Reshape(c, tokens) t = Transpose <perm = [0, 2, 1]> (r) p = MatMul(t, w) y = Add(b, p)"
    ),
    leaves(
        "activation",
        f"{CONV} r = Reshape(c, tokens) t = Transpose <perm = [0, 2, 1]> (r) g = HardSwish(t) y = MatMul(g, w)",
    ),
    leaves(
        "transpose-first",
        f"{CONV} t = Transpose <perm = [0, 2, 3, 1]> (c) r = Reshape(t, flat) p = MatMul(r, w) y = Add(p, b)",
    ),
    leaves(
        "conv-used-elsewhere",
        f"{CONV} r = Reshape(c, tokens) t = Transpose <perm = [0, 2, 1]> (r) e = Elu(t) p = MatMul(e, w) "
        "q = MatMul(t, w) y = Add(p, q)",
        changes=2,
    ),
    case(
        "of-an-input",
        "r = Reshape(x, tokens) t = Transpose <perm = [0, 2, 1]> (r) y = MatMul(t, w)",
        f"{PICTURE}) => (float[N, 30, 8] y",
        changes=0,
    ),
    case(
        "computed-weight",
        f"{CONV} r = Reshape(c, tokens) t = Transpose <perm = [0, 2, 1]> (r) y = MatMul(t, w)",
        f"{PICTURE}, float[4, 8] w) => (float[N, 30, 8] y",
        weights={"v": (4, 4, 3, 3)},
        changes=0,
    ),
    case(
        "between-images",
        f"{CONV} r = Reshape(c, tokens) t = Transpose <perm = [0, 2, 1]> (r) p = MatMul(t, w) a = Add(p, b) "
        "u = Transpose <perm = [0, 2, 1]> (a) y = Reshape(u, image)",
        f"{PICTURE}) => (float[N, 8, 6, 5] y",
    ),
)
