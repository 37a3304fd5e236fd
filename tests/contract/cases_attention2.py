"""Cases for biases behind a normalization, and for transformers with the batch first: x [2, 5, 8], two heads of 4."""

from __future__ import annotations

import numpy as np
from cases_attention import CORE, HEADS, IO, MIX, OUT, K, Q, V, W
from contract_case import Case

from trtopt.rewrite.protocol import Target

NORM = "n = LayerNormalization(x, ns, nb)"
NORMED = " ".join(part.replace("MatMul(x, ", "MatMul(n, ") for part in (Q, K, V))
BLOCK = f"{NORM} {NORMED} {CORE} {MIX} {OUT}"
N = {"ns": (8,)}
SMALL = {
    name: np.random.default_rng(seed).uniform(-0.3, 0.3, 8).astype(np.float32)
    for seed, name in enumerate(("nb", "bq", "bk", "bv"))
}
"""A bias the weights can carry is small beside them: with eight features, at most a few of them."""
BIAS_FREE = f"{NORM} {NORMED} {CORE} {MIX} o3 = MatMul(o2, wo) r = Add(x, o3) y = LayerNormalization(r, ns)"

RESIDUAL = BLOCK.replace("Add(o3, bo)", "Add(o3, n)")
QUERIES_ONLY = RESIDUAL.replace("MatMul(n, wk)", "MatMul(x, wk)").replace("MatMul(n, wv)", "MatMul(x, wv)")
VALUES_ONLY = RESIDUAL.replace("MatMul(n, wk)", "MatMul(x, wk)").replace("MatMul(n, wq)", "MatMul(x, wq)")
STATISTICS = f"{BLOCK} z = Neg(mean)".replace("n = Layer", "n, mean = Layer")


TURNED = (
    BLOCK.replace("(n, w", "(nt, w")
    .replace("q0 =", "nt = Transpose <perm = [1, 0, 2]> (n) q0 =", 1)
    .replace("[0, 2, 1, 3]", "[1, 2, 0, 3]")
    .replace("[0, 2, 3, 1]", "[1, 2, 3, 0]")
    .replace("Transpose <perm = [1, 2, 0, 3]> (o0)", "Transpose <perm = [2, 0, 1, 3]> (o0)")
    .replace("Add(o3, bo)", "Add(x, ot)")
    .replace("y = Add", "o4 = Add(o3, bo) ot = Transpose <perm = [1, 0, 2]> (o4) y = Add")
)
"""As torch's MultiheadAttention with the batch first: [tokens, batch] around attention alone."""
SECOND = "m0 = MatMul(y, wo) m1 = Transpose <perm = [1, 0, 2]> (m0) m2 = Relu(m1) z = Transpose <perm = [1, 0, 2]> (m2)"


def case(recipe: str, label: str, body: str, **options: object) -> Case:
    arguments: dict[str, object] = {"io": IO, "constants": HEADS, "weights": {**W, "bo": (8,), **N}, **options}
    arguments["values"] = {**SMALL, **options.get("values", {})}  # type: ignore[dict-item]
    arguments.setdefault("tolerance", 2e-5)
    graph = f"{arguments.pop('io')} <{arguments.pop('constants')}> {{ {body} }}"
    return Case(recipe, label, graph, **arguments)  # type: ignore[arg-type]


def normalized(label: str, body: str = BLOCK, **options: object) -> Case:
    return case("normalized-qkv-bias", label, body, **options)


def batch_first(label: str, body: str = BLOCK, **options: object) -> Case:
    return case("batch-first-attention", label, body, **options)


CASES: tuple[Case, ...] = (
    normalized("separate"),
    normalized("dynamic", io="g (float[N, S, 8] x) => (float[N, S, 8] y)"),
    normalized("no-offset", BLOCK.replace(", nb)", ")")),
    normalized("queries-only", BLOCK.replace("Add(bk, k0)", "Identity(k0)").replace("Add(v0, bv)", "Identity(v0)")),
    normalized("shared-weights", BLOCK.replace("wk", "wq").replace("bk", "bq").replace("wv", "wo")),
    normalized("bias-moved-already", BLOCK.replace("Add(q0, bq)", "Identity(q0)")),
    normalized("used-by-another-product", f"{BLOCK} z = MatMul(n, wo)", io=f"{IO[:-1]}, float[2, 5, 8] z)"),
    normalized(
        "two-layers",
        BLOCK.replace("y = Add", "x2 = Add")
        + " n2 = LayerNormalization(x2, ns, nb) a0 = MatMul(n2, wq) a1 = Add(a0, bq) a2 = Reshape(a1, hs) "
        "a3 = Transpose <perm = [0, 2, 1, 3]> (a2) a4 = Transpose <perm = [0, 2, 3, 1]> (a2) a5 = MatMul(a3, a4) "
        "a6 = Softmax(a5) a7 = MatMul(a6, a3) a8 = Transpose <perm = [0, 2, 1, 3]> (a7) y = Reshape(a8, fs)",
    ),
    normalized("residual", BLOCK.replace("Add(o3, bo)", "Add(o3, n)")),
    normalized("residual-without-offset", BLOCK.replace(", nb)", ")").replace("Add(o3, bo)", "Add(n, o3)")),
    normalized("normalized-is-output", io=f"{IO[:-1]}, float[2, 5, 8] n)"),
    normalized("normalized-is-output-and-residual", RESIDUAL, io=f"{IO[:-1]}, float[2, 5, 8] n)"),
    normalized("residual-beside-the-queries-product", QUERIES_ONLY),
    normalized("residual-beside-the-values-product", VALUES_ONLY, changes=0),
    normalized("statistics-used", STATISTICS, io=f"{IO[:-1]}, float[2, 5, 1] z)", changes=0, refusals=1),
    normalized(
        "wrong-axis",
        BLOCK.replace("LayerNormalization(", "LayerNormalization <axis = 1> ("),
        weights={**W, "bo": (8,), "ns": (5, 8)},
        values={"nb": np.ones((5, 8), np.float32)},
        changes=0,
        refusals=1,
    ),
    normalized(
        "computed-weight",
        io="g (float[2, 5, 8] x, float[8, 8] wk) => (float[2, 5, 8] y)",
        weights={name: shape for name, shape in {**W, **N, "bo": (8,)}.items() if name != "wk"},
    ),
    normalized(
        "large-bias",
        weights={name: shape for name, shape in {**W, **N, "bo": (8,)}.items() if name != "bq"},
        values={"bq": np.full(8, 1e3, np.float32)},
        changes=0,
        refusals=1,
    ),
    normalized(
        "weights-beyond-fp16",
        weights={name: shape for name, shape in {**W, **N, "bo": (8,)}.items() if name != "ns"},
        values={"ns": np.full(8, 1e6, np.float32)},
        changes=0,
        refusals=1,
    ),
    normalized(
        "zero-weights",
        weights={name: shape for name, shape in {**W, **N, "bo": (8,)}.items() if name != "wq"},
        values={"wq": np.zeros((8, 8), np.float32)},
        changes=0,
        refusals=1,
    ),
    normalized("no-norm", BLOCK.replace("LayerNormalization(x, ns, nb)", "Relu(x)"), changes=0),
    batch_first("pre-norm"),
    batch_first("residual", BIAS_FREE),
    batch_first("scale-per-token", RESIDUAL, weights={**W, "bo": (8,), "ns": (1, 5, 8)}),
    batch_first("dynamic", io="g (float[N, S, 8] x) => (float[N, S, 8] y)"),
    batch_first(
        "reshaped-to-the-same",
        BLOCK.replace(
            "o1 = Transpose <perm = [0, 2, 1, 3]> (o0)",
            "r0 = Reshape(o0, os) o1 = Transpose <perm = [0, 2, 1, 3]> (r0)",
        ),
        constants=f"{HEADS}, int64[4] os = {{0, 2, -1, 4}}",
        io="g (float[N, S, 8] x) => (float[N, S, 8] y)",
    ),
    batch_first(
        "windows-without-a-name",
        f"x = Reshape(m, wins) {BLOCK}",
        io="g (float[N, 2, 5, 8] m) => (float[M, 5, 8] y)",
        constants=f"{HEADS.replace('0, 0', '-1, 5')}, int64[3] wins = {{-1, 5, 8}}",
    ),
    batch_first(
        "class-token",
        f"c = Concat <axis = 1> (t, x) {BLOCK} u = Gather <axis = 1> (y, i0) z = Neg(u)".replace("(x, ns", "(c, ns"),
        io="g (float[2, 4, 8] x) => (float[2, 8] z)",
        constants=f"{HEADS}, int64 i0 = {{0}}",
        values={"t": np.ones((2, 1, 8), np.float32)},
    ),
    batch_first(
        "positions",
        BLOCK.replace("Reshape(q1, hs)", "Reshape(qp, hs)").replace("Add(q0, bq)", "Add(q0, bq) qp = Add(q1, pos)"),
        values={"pos": np.arange(40, dtype=np.float32).reshape(1, 5, 8) / 40},
    ),
    batch_first(
        "scaled-and-multiplied-heads",
        BLOCK.replace("Reshape(q1, hs)", "Reshape(q1, hs) qs = Div(q2, two) qa = Add(qs, each) qm = MatMul(qs, square)")
        .replace("(q2)", "(qm)")
        .replace("qm = MatMul(qs", "qm = MatMul(qa"),
        values={
            "two": np.float32(2),
            "each": np.arange(8, dtype=np.float32).reshape(2, 4) / 8,
            "square": np.eye(4, k=1, dtype=np.float32),
        },
        io="g (float[N, S, 8] x) => (float[N, S, 8] y)",
    ),
    batch_first("middle-is-output", io=f"{IO[:-1]}, float[2, 5, 8] n)"),
    batch_first("one-sample", io="g (float[1, 5, 8] x) => (float[1, 5, 8] y)", changes=0),
    batch_first(
        "tokens-first",
        BLOCK.replace("[0, 2, 1, 3]", "[1, 2, 0, 3]")
        .replace("[0, 2, 3, 1]", "[1, 2, 3, 0]")
        .replace("Transpose <perm = [1, 2, 0, 3]> (o0)", "Transpose <perm = [2, 0, 1, 3]> (o0)"),
        changes=0,
    ),
    batch_first("tokens-turned-around-attention", TURNED),
    batch_first("tokens-turned-in-two-layers", f"{TURNED} {SECOND}", io=f"{IO[:-1]}, float[2, 5, 8] z)"),
    batch_first("turned-dynamic", TURNED, io="g (float[N, 5, 8] x) => (float[N, 5, 8] y)"),
    batch_first("turned-one-sample", TURNED, io="g (float[1, 5, 8] x) => (float[1, 5, 8] y)", changes=0),
    batch_first(
        "turned-without-attention",
        "t = Transpose <perm = [1, 0, 2]> (x) r = Relu(t) u = Transpose <perm = [1, 0, 2]> (r) y = Neg(u)",
        weights={},
        changes=0,
    ),
    batch_first("tensorrt", target=Target(backend="tensorrt"), changes=0, refusals=1),
    batch_first("heads-used-elsewhere", f"{BLOCK} z = Neg(q2)", io=f"{IO[:-1]}, float[2, 5, 2, 4] z)"),
    batch_first("merged-heads-used", f"{BLOCK} z = Neg(o1)", io=f"{IO[:-1]}, float[2, 5, 2, 4] z)", changes=0),
)
