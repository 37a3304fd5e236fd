"""Cases for group-norm: x [N, 4, 6, 5], normalized over groups of its four channels."""

from __future__ import annotations

import numpy as np
from contract_case import Case

IO = "g (float[N, 4, 6, 5] x) => (float[N, 4, 6, 5] y)"
ROWS = (
    "int64[3] rows = {0, 1, -1}, int64[3] pairs = {0, 2, -1}, "
    "int64[4] back = {0, 4, 6, 5}, int64[4] other = {0, 6, 4, 5}"
)
ONE = {"one": np.asarray([1.5], np.float32), "zero": np.asarray([0.25], np.float32)}
CHANNEL = {"g": (4, 1, 1), "b": (4, 1, 1)}
VECTORS = {"g": (4,), "b": (4,)}
SPLIT = "r = Reshape(x, rows) i = InstanceNormalization <epsilon = 0.001> (r, one, zero)"


def norm(label: str, body: str, io: str = IO, **options: object) -> Case:
    options = {"weights": {}, "values": {}, "tolerance": 1e-5, **options}
    used = ", ".join(part for part in _constants() if f"{part.split()[1]})" in body)
    return Case("group-norm", label, f"{io} <{used}> {{ {body} }}", **options)  # type: ignore[arg-type]


def _constants() -> list[str]:
    return [f"{part}}}".strip(" ,") for part in ROWS.split("}") if part.strip()]


CASES: tuple[Case, ...] = (
    norm(
        "one-group",
        f"{SPLIT} q = Reshape(i, back) m = Mul(q, g) a = Add(m, b) y = Relu(a)",
        weights=CHANNEL,
        values=ONE,
    ),
    norm(
        "shape-of-the-input",
        f"{SPLIT} s = Shape(x) q = Reshape(i, s) m = Mul(g, q) y = Add(b, m)",
        weights=CHANNEL,
        values=ONE,
    ),
    norm(
        "without-bias",
        f"{SPLIT} q = Reshape(i, back) m = Mul(q, g) y = Neg(m)",
        weights={"g": (1, 4, 1, 1)},
        values=ONE,
    ),
    norm(
        "without-factor",
        f"{SPLIT} q = Reshape(i, back) y = Add(q, b)",
        weights={"b": (1, 4, 1, 1)},
        values=ONE,
    ),
    norm(
        "row-used-elsewhere", f"{SPLIT} q = Reshape(i, back) n = Neg(r) o = Reshape(n, back) y = Add(q, o)", values=ONE
    ),
    norm(
        "factor-per-position",
        f"{SPLIT} q = Reshape(i, back) m = Mul(q, p) y = Neg(m)",
        weights={"p": (4, 6, 5)},
        values=ONE,
    ),
    norm(
        "other-shape",
        f"{SPLIT} q = Reshape(i, other) y = Neg(q)",
        "g (float[N, 4, 6, 5] x) => (float[N, 6, 4, 5] y)",
        values=ONE,
        changes=0,
    ),
    norm(
        "groups-as-rows",
        "r = Reshape(x, pairs) i = InstanceNormalization(r, o, z) q = Reshape(i, back) m = Mul(q, g) y = Add(m, b)",
        weights={**CHANNEL, "o": (2,), "z": (2,)},
        changes=0,
    ),
    norm(
        "one-group-of-rank-3",
        "r = Reshape(x, rows) i = InstanceNormalization (r, one, zero) s = Shape(x) q = Reshape(i, s) y = Mul(q, g)",
        "g (float[N, 4, L] x) => (float[N, 4, L] y)",
        weights={"g": (4, 1)},
        values=ONE,
        changes=0,
    ),
    norm(
        "operator-of-rank-3",
        "y = GroupNormalization <num_groups = 1> (x, g, b)",
        "g (float[N, 4, L] x) => (float[N, 4, L] y)",
        weights=VECTORS,
        opset=21,
    ),
    norm("operator", "y = GroupNormalization <num_groups = 2> (x, g, b)", weights=VECTORS, opset=21),
    norm("operator-of-one-group", "y = GroupNormalization <num_groups = 1> (x, g, b)", weights=VECTORS, opset=21),
    norm("instances", "i = InstanceNormalization(x, g, b) y = LeakyRelu(i)", weights=VECTORS),
    norm(
        "instances-of-any-size",
        "y = InstanceNormalization(x, g, b)",
        "g (float[N, 4, H, W] x) => (float[N, 4, H, W] y)",
        weights=VECTORS,
    ),
    norm(
        "instances-of-rank-3",
        "y = InstanceNormalization(x, g, b)",
        "g (float[N, 4, L] x) => (float[N, 4, L] y)",
        weights=VECTORS,
        changes=0,
    ),
    norm(
        "computed-factors",
        "y = InstanceNormalization(x, g, b)",
        "g (float[N, 4, 6, 5] x, float[4] g, float[4] b) => (float[N, 4, 6, 5] y)",
        changes=0,
        refusals=1,
    ),
)
