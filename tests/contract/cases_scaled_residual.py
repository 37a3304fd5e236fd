"""Cases for residuals that are scaled before a convolution's result is added."""

from __future__ import annotations

from typing import Any

import numpy as np
from contract_case import Case

IO = "g (float[N, 4, 6, 6] x) => (float[N, 4, 6, 6] y)"
CONV = "r = Relu(x) c = Conv <pads = [1, 1, 1, 1]> (r, w, a)"
POINTWISE = {"w": (4, 4, 1, 1), "a": (4,)}
GROUPED = {"w": (4, 2, 1, 1), "a": (4,)}
FACTORS = np.array([0.5, -2.0, 1.5, 0.75], np.float32).reshape(4, 1, 1)


def case(label: str, body: str, factors: Any = FACTORS, io: str = IO, **options: Any) -> Case:
    options = {"weights": {"w": (4, 4, 3, 3), "a": (4,)}, "tolerance": 1e-5, **options}
    return Case(
        "scaled-residual", label, f"{io} {{ {body} }}", values={"s": np.asarray(factors, np.float32)}, **options
    )


def refused(label: str, factors: Any) -> Case:
    return case(label, f"{CONV} m = Mul(x, s) y = Add(m, c)", factors, changes=0, refusals=1)


CASES: tuple[Case, ...] = (
    case("per-channel", f"{CONV} m = Mul(x, s) y = Add(m, c)"),
    case("convolution-first", f"{CONV} m = Mul(s, x) n = Add(c, m) y = Relu(n)"),
    case("without-bias", "r = Relu(x) c = Conv(r, w) m = Mul(x, s) y = Add(m, c)", weights=POINTWISE),
    case("divided", f"{CONV} m = Div(x, s) y = Add(m, c)"),
    case("a-number", f"{CONV} m = Mul(x, s) y = Add(m, c)", [0.25]),
    case("a-scalar", f"{CONV} m = Mul(x, s) y = Add(m, c)", 0.5),
    case("grouped", "c = Conv <group = 2> (x, w, a) m = Mul(x, s) y = Add(m, c)", weights=GROUPED),
    case("transposed", "c = ConvTranspose <group = 2> (x, w, a) m = Mul(x, s) y = Add(m, c)", weights=GROUPED),
    case(
        "two-blocks",
        f"{CONV} m = Mul(x, s) n = Add(m, c) t = Relu(n) "
        "d = Conv <pads = [1, 1, 1, 1]> (t, w) k = Div(n, s) y = Add(d, k)",
        changes=2,
    ),
    case("broadcast", f"{CONV} p = GlobalAveragePool(x) m = Mul(p, s) y = Add(m, c)"),
    case("divisor", f"{CONV} m = Div(s, x) y = Add(m, c)", changes=0),
    case("scaled-used-elsewhere", f"{CONV} m = Mul(x, s) n = Add(m, c) y = Sub(n, m)", changes=0),
    case("result-used-elsewhere", f"{CONV} m = Mul(x, s) n = Add(m, c) y = Sub(n, c)", changes=0),
    case("activated", f"{CONV} e = Relu(c) m = Mul(x, s) y = Add(m, e)", changes=0),
    case("subtracted", f"{CONV} m = Mul(x, s) y = Sub(m, c)", changes=0),
    refused("zero", FACTORS * np.array([1, 0, 1, 1]).reshape(4, 1, 1)),
    refused("small", FACTORS / 32),
    refused("large", FACTORS * 32),
    refused("not-finite", [np.inf]),
    refused("per-column", [1, 2, 1, 2, 1, 2]),
)
