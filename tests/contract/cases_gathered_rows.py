"""Cases for gathered-rows: h [N, 3, 4], three nodes of four features; five edges between them."""

from __future__ import annotations

import numpy as np
from contract_case import Case

IO = "g (float[N, 3, 4] h) => (float[N, 5, 6] y)"
FLAT = "g (float[3, 4] h) => (float[5, 6] y)"
WEIGHTS = {"turned": (6, 8), "five": (5, 6), "w": (4, 6), "w2": (8, 6), "w7": (7, 6), "b": (6,), "k": (2, 4, 6)}
ENDS = {"i": np.array([0, 2, 1, 1, -1]), "j": np.array([1, 1, 0, 2, 0])}
PAIRS = {"i2": ENDS["i"][:, None], "j2": ENDS["j"][:, None]}
BOTH = "p = Gather <axis = 1> (h, i) q = Gather <axis = 1> (h, j) c = Concat <axis = 2> (p, q)"
TURN = "Transpose <perm = [1, 0, 2]>"


def rows(label: str, body: str, io: str = IO, **options: object) -> Case:
    used = [body.find(f"({name}") + body.find(f", {name}") for name in WEIGHTS]
    weights = {name: shape for (name, shape), at in zip(WEIGHTS.items(), used, strict=True) if at > -2}
    values = {name: array for name, array in (ENDS | PAIRS).items() if f", {name})" in body}
    options = {"weights": weights, "values": values, "tolerance": 2e-6, **options}
    return Case("gathered-rows", label, f"{io} {{ {body} }}", **options)  # type: ignore[arg-type]


def other(label: str, body: str, io: str = IO, **options: object) -> Case:
    return rows(label, body, io, changes=0, **options)


CASES: tuple[Case, ...] = (
    rows("one-end", "p = Gather <axis = 1> (h, i) m = MatMul(p, w) y = Add(m, b)"),
    rows("both-ends", f"{BOTH} m = MatMul(c, w2) y = Relu(m)"),
    rows(
        "gathered-in-turn",
        f"t = {TURN} (h) p = GatherND(t, i2) q = GatherND(t, j2) c = Concat <axis = -1> (p, q) u = {TURN} (c) "
        "y = MatMul(u, w2)",
    ),
    rows(
        "turned-back-each",
        f"t = {TURN} (h) p0 = GatherND(t, i2) p = {TURN} (p0) q0 = GatherND(t, j2) q = {TURN} (q0) "
        "c = Concat <axis = 2> (p, q) y = MatMul(c, w2)",
    ),
    rows(
        "beside-features-of-edges",
        "p = Gather <axis = 1> (h, i) c = Concat <axis = 2> (p, e) y = MatMul(c, w7)",
        "g (float[N, 3, 4] h, float[N, 5, 3] e) => (float[N, 5, 6] y)",
    ),
    rows(
        "both-ends-into-a-linear",
        "p = Gather(h, i) q = Gather(h, j) c = Concat <axis = -1> (p, q) y = Gemm <transB = 1> (c, turned, b)",
        FLAT,
    ),
    rows("a-product-without-bias", "p = Gather(h, i) y = Gemm <alpha = 0.5> (p, w)", FLAT),
    other("fewer-rows", "p = Gather <axis = 1> (h, i) y = MatMul(p, w)", "g (float[N, 9, 4] h) => (float[N, 5, 6] y)"),
    other(
        "features",
        "p = Gather <axis = 2> (h, i) y = MatMul(p, f)",
        "g (float[N, 5, 3] h, float[5, 6] f) => (float[N, 5, 6] y)",
    ),
    other("read-twice", "p = Gather <axis = 1> (h, i) y = MatMul(p, w) z = Relu(p)", IO[:-1] + ", float[N, 5, 4] z)"),
    other(
        "joined-along-rows",
        "p = Gather <axis = 1> (h, i) c = Concat <axis = 1> (p, p) m = MatMul(c, w) y = Relu(m)",
        "g (float[N, 3, 4] h) => (float[N, 10, 6] y)",
    ),
    other(
        "a-matrix-for-each",
        "p = Gather <axis = 1> (h, i) y = MatMul(p, k)",
        "g (float[2, 3, 4] h) => (float[2, 5, 6] y)",
    ),
    other("turned-rows", "p = Gather(h, i) y = Gemm <transA = 1> (p, five)", "g (float[3, 4] h) => (float[4, 6] y)"),
    other(
        "a-summand-for-each-row",
        "p = Gather(h, i) y = Gemm(p, w, z)",
        "g (float[3, 4] h, float[5, 6] z) => (float[5, 6] y)",
    ),
    other("activated-between", "p = Gather <axis = 1> (h, i) r = Relu(p) y = MatMul(r, w)"),
)
