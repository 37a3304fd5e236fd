"""Cases for convolutions of the parts of a split map that are joined again."""

from __future__ import annotations

import numpy as np
from cases_conv import ints
from contract_case import Case

X = "float[N, 6, 9, 8] x"
DEPTHWISE = {"a": (2, 1, 3, 3), "b": (4, 1, 5, 5), "s": (4,)}
HALVES = {"a": (4, 3, 1, 1), "b": (4, 3, 1, 1), "s": (4,)}
THREE = "pads = [1, 1, 1, 1]"
FIVE = "pads = [2, 2, 2, 2]"


def case(
    label: str,
    body: str,
    weights: dict[str, tuple[int, ...]],
    output: str = "float[N, 8, 9, 8] y",
    *,
    sizes: tuple[int, ...] = (3, 3),
    changes: int = 1,
    refusals: int = 0,
) -> Case:
    graph = f"g ({X}) => ({output}) {{ {body} }}"
    values: dict[str, np.ndarray] = {"k": ints(*sizes)}
    return Case("joined-convs", label, graph, weights, values, changes, refusals, tolerance=1e-6)


def mixed(
    label: str, first: str, second: str, output: str = "float[N, 6, 9, 8] y", *, changes: int = 1, refusals: int = 0
) -> Case:
    """Depthwise convolutions, the second with a bias."""
    body = (
        f"p, q = Split <axis = 1> (x, k) c = Conv <group = 2, {first}> (p, a) d = Conv <group = 4, {second}> (q, b, s) "
        "y = Concat <axis = 1> (c, d)"
    )
    return case(label, body, DEPTHWISE, output, sizes=(2, 4), changes=changes, refusals=refusals)


def halves(label: str, join: str, *, changes: int = 1) -> Case:
    body = f"p, q = Split <axis = -3> (x, k) c = Conv(p, a) d = Conv(q, b, s) {join}"
    return case(label, body, HALVES, changes=changes)


CASES: tuple[Case, ...] = (
    mixed("kernels-of-two-sizes", THREE, FIVE),
    mixed("strides", f"strides = [2, 2], {THREE}", f"strides = [2, 2], {FIVE}", "float[N, 6, 5, 4] y"),
    mixed("no-padding", "pads = [0, 0, 0, 0]", "pads = [1, 1, 1, 1]", "float[N, 6, 7, 6] y"),
    mixed("padding-at-one-end", "pads = [2, 1, 0, 1]", "pads = [1, 2, 3, 2]"),
    mixed("other-sizes", THREE, "pads = [2, 3, 2, 1], strides = [1, 1]"),
    mixed("dilated", f"dilations = [2, 2], {FIVE}", "dilations = [2, 2], pads = [4, 4, 4, 4]", changes=0, refusals=1),
    mixed("automatic-padding", 'auto_pad = "SAME_UPPER"', FIVE, changes=0, refusals=1),
    halves("halves", "y = Concat <axis = 1> (c, d)"),
    halves("halves-normalized", "j = Concat <axis = -3> (c, d) y = Relu(j)"),
    halves("other-order", "y = Concat <axis = 1> (d, c)", changes=0),
    halves("joined-with-another", "n = Neg(c) y = Concat <axis = 1> (n, d)", changes=0),
    case(
        "a-result-used-elsewhere",
        "p, q = Split <axis = 1> (x, k) c = Conv(p, a) d = Conv(q, b, s) y = Concat <axis = 1> (c, d) z = Neg(c)",
        HALVES,
        "float[N, 8, 9, 8] y, float[N, 4, 9, 8] z",
        changes=0,
        refusals=1,
    ),
    case(
        "a-part-used-elsewhere",
        "p, q = Split <axis = 1> (x, k) c = Conv(p, a) d = Conv(q, b, s) y = Concat <axis = 1> (c, d) z = Neg(q)",
        HALVES,
        "float[N, 8, 9, 8] y, float[N, 3, 9, 8] z",
        changes=0,
        refusals=1,
    ),
    case(
        "parts-of-several-sizes",
        "p, q = Split <axis = 1> (x, k) c = Conv(p, a) d = Conv(q, b, s) y = Concat <axis = 1> (c, d)",
        {"a": (4, 2, 1, 1), "b": (4, 4, 1, 1), "s": (4,)},
        sizes=(2, 4),
    ),
    case(
        "groups-of-several-sizes",
        "p, q = Split <axis = 1> (x, k) c = Conv <group = 2> (p, a) d = Conv(q, b, s) y = Concat <axis = 1> (c, d)",
        {"a": (4, 1, 1, 1), "b": (4, 4, 1, 1), "s": (4,)},
        sizes=(2, 4),
        changes=0,
        refusals=1,
    ),
    case(
        "a-row-and-a-column",
        "p, q = Split <axis = 1> (x, k) c = Conv <group = 3, pads = [1, 0, 1, 0]> (p, a) "
        "d = Conv <group = 3, pads = [0, 1, 0, 1]> (q, b) y = Concat <axis = 1> (c, d)",
        {"a": (3, 1, 3, 1), "b": (3, 1, 1, 3)},
        "float[N, 6, 9, 8] y",
        changes=0,
        refusals=1,
    ),
    case(
        "computed-weights",
        "m = ReduceMean <keepdims = 0> (x) e = Mul(a, m) p, q = Split <axis = 1> (x, k) c = Conv(p, b) d = Conv(q, e) "
        "y = Concat <axis = 1> (c, d)",
        HALVES,
        changes=0,
        refusals=1,
    ),
)
