"""Cases for windows of a map, and for projections that are merged into one product.

x [N, 4, 6, 8] is a map, windows are [6 * N, 4, 8] or [6 * N, 2, 2, 8].
"""

from __future__ import annotations

from contract_case import Case

IO = "g (float[N, 4, 6, 8] x) => (float[N, 4, 6, 8] y)"
INTO = "a = Reshape({0}, cut) b = Transpose <perm = [0, 1, 3, 2, 4, 5]> (a) w = Reshape(b, rows)"
BACK = "c = Reshape({0}, join) d = Transpose <perm = [0, 1, 3, 2, 4, 5]> (c) e = Reshape(d, map)"
ROLL = "{0}a = Slice({1}, z, s{0}, {2}) {0}b = Slice({1}, s{0}, end, {2}) {0} = Concat <axis = {3}> ({0}b, {0}a)"
NORM = "n = LayerNormalization(x, ns, nb)"
INSIDE = "f = MatMul(w, m) g = Softmax <axis = 1> (f)"
SIZES = (
    "int64[6] cut = {-1, 2, 2, 3, 2, 8}, int64[3] rows = {-1, 4, 8}, int64[6] join = {-1, 2, 3, 2, 2, 8}, "
    "int64[4] map = {-1, 4, 6, 8}"
)
ENDS = ", ".join(f"int64[1] {name} = {{{size}}}" for name, size in (("z", 0), ("end", 2**31), ("one", 1), ("two", 2)))
STARTS = ", ".join(f"int64[1] s{name} = {{{size}}}" for name, size in (("h", 1), ("i", 2), ("j", 3), ("k", 4)))
PLAIN = f"{NORM} {INTO.format('n')} {INSIDE} {BACK.format('g')} y = Add(x, e)"
POST = f"{INTO.format('x')} {INSIDE} {BACK.format('g')} n = LayerNormalization(e, ns, nb) t = Mul(ns, n) y = Add(t, x)"
SHIFTED = " ".join(
    (
        NORM,
        ROLL.format("h", "n", "one", 1),
        ROLL.format("i", "h", "two", 2),
        INTO.format("i"),
        INSIDE,
        BACK.format("g"),
        ROLL.format("j", "e", "one", 1),
        ROLL.format("k", "j", "two", 2),
        "y = Add(x, k)",
    )
)
FLAT = (
    "q = Reshape(x, flat) n = LayerNormalization(q, ns, nb) o = Reshape(n, map) "
    f"{INTO.format('o')} {INSIDE} {BACK.format('g')} r = Reshape(e, flat) s = Add(q, r) y = Reshape(s, map)"
)
FEATURES = {"ns": (8,), "nb": (8,), "m": (8, 8)}


def windows(label: str, body: str = PLAIN, io: str = IO, constants: str = SIZES, **options: object) -> Case:
    options = {"weights": FEATURES, "tolerance": 1e-5, **options}
    return Case("window-residual", label, f"{io} <{constants}> {{ {body} }}", **options)  # type: ignore[arg-type]


TOKENS = "g (float[N, S, 8] x) => (float[N, 2, S, 4] q, float[N, 2, S, 4] k, float[N, 2, S, 4] v)"
PARTS = (
    "int64[1] z = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] three = {3}, "
    "int64 i0 = {0}, int64 i1 = {1}, int64 i2 = {2}"
)
SPLIT = {
    "three-first": ("0, 0, 3, 2, 4", "2, 0, 3, 1, 4", 0),
    "heads-first": ("0, 0, 2, 3, 4", "0, 2, 1, 3, 4", 3),
    "size-before": ("0, 0, 4, 3, 2", "3, 0, 4, 1, 2", 0),
}


def cut(
    label: str,
    form: str,
    parts: str,
    *,
    add: str = "b = Add(a, bias)",
    io: str = TOKENS,
    recipe: str = "merged-projection",
    **options: object,
) -> Case:
    shape, perm, _ = SPLIT[form]
    body = (
        f"a = MatMul(x, m) {add} c = Reshape({'b' if add else 'a'}, split) d = Transpose <perm = [{perm}]> (c) {parts}"
    )
    graph = f"{io} <int64[5] split = {{{shape}}}, {PARTS}> {{ {body} }}"
    options = {"weights": {"m": (8, 24), "bias": (24,)}, "tolerance": 1e-5, **options}
    return Case(recipe, label, graph, **options)  # type: ignore[arg-type]


def gathers(axis: int) -> str:
    return " ".join(f"{n}0 = Gather <axis = {axis}> (d, i{i}) {n} = Identity({n}0)" for i, n in enumerate("qkv"))


def rotated(parts: str) -> str:
    """Queries and keys with their halves swapped."""
    for name in "qk":
        swapped = f"{name}1, {name}2 = Split <axis = 3> ({name}0) {name} = Concat <axis = 3> ({name}2, {name}1)"
        parts = parts.replace(f"{name} = Identity({name}0)", swapped)
    return parts


def slices(axis: int) -> str:
    edges = ("z", "one", "two", "three")
    taken = (
        f"{n}0 = Slice(d, {edges[i]}, {edges[i + 1]}, at) {n}1 = Squeeze({n}0, at) {n} = Identity({n}1)"
        for i, n in enumerate("qkv")
    )
    return " ".join(taken).replace("at", "z" if axis == 0 else "three")


SPLITS = "q0, k0, v0 = Split <axis = 0> (d) " + " ".join(f"{n}1 = Squeeze({n}0, z) {n} = Identity({n}1)" for n in "qkv")

MERGED = (
    "g (float[5, N, 8] x) => (float[N, 2, 5, 4] q, float[N, 2, 4, 5] k, float[N, 2, 5, 4] v) <int64[4] split = "
    "{5, -1, 3, 8}, int64[3] heads = {5, -1, 4}, int64[4] apart = {-1, 2, 5, 4}, int64[4] turned = {-1, 2, 4, 5}, "
    f"int64[1] back = {{-2}}, {PARTS}> {{ a = MatMul(x, m) b = Add(a, bias) c = Reshape(b, split) e = Unsqueeze(c, z) "
    f"f = Transpose <perm = [3, 1, 2, 0, 4]> (e) d = Squeeze(f, back) {gathers(0)} }}"
)
"""torch's MultiheadAttention: tokens first, and heads merged into the batch."""


def multi_head(label: str, order: str = "1, 0, 2", **options: object) -> Case:
    graph = MERGED
    for name, perm, shape in (("q", order, "apart"), ("k", "1, 2, 0", "turned"), ("v", order, "apart")):
        steps = f"{name}1 = Reshape({name}0, heads) {name}2 = Transpose <perm = [{perm}]> ({name}1)"
        last = f"{name}3 = Reshape({name}2, {shape}) {name} = Identity({name}3)"
        graph = graph.replace(f"{name} = Identity({name}0)", f"{steps} {last}")
    options = {"weights": {"m": (8, 24), "bias": (24,)}, "tolerance": 1e-5, **options}
    return Case("merged-projection", label, graph, **options)  # type: ignore[arg-type]


WINDOWS = (
    "g (float[N, 4, 6, 8] x) => (float[N, 4, 6, 8] q, float[N, 2, 24, 4] k, float[N, 24, 2, 4] v) "
    "<int64[5] split = {-1, 24, 3, 2, 4}, int64[4] map = {-1, 4, 6, 8}, int64[1] z = {0}, int64[1] one = {1}, "
    "int64[1] two = {2}, int64[1] three = {3}> { a = MatMul(x, m) b = Add(a, bias) c = Reshape(b, split) "
    "q0 = Slice(c, z, one, two) q1 = Reshape(q0, map) q = Relu(q1) k0 = Slice(c, one, two, two) k1 = Squeeze(k0, two) "
    "k = Transpose <perm = [0, 2, 1, 3]> (k1) v0 = Slice(c, two, three, two) v1 = Squeeze(v0, two) v = Relu(v1) }"
)
"""Tokens in rows and columns; the queries are a map again (to be pooled)."""

POOLED = (
    "g (float[N, 24, 8] x) => (float[N, 2, 4, 6, 4] q, float[N, 2, 24, 4] k, float[N, 2, 24, 4] v) "
    "<int64[5] split = {-1, 24, 3, 2, 4}, int64[5] groups = {-1, 2, 4, 6, 4}, int64[1] z = {0}, int64[1] one = {1}, "
    "int64 i1 = {1}, int64 i2 = {2}> { a = MatMul(x, m) b = Add(a, bias) c = Reshape(b, split) "
    "d = Transpose <perm = [2, 0, 3, 1, 4]> (c) q0 = Slice(d, z, one, z) q1 = Reshape(q0, groups) q = Relu(q1) "
    "k0 = Gather <axis = 0> (d, i1) k = Relu(k0) v0 = Gather <axis = 0> (d, i2) v = Relu(v0) }"
)
"""Queries in groups to be pooled, with an axis of their own beside heads and tokens."""


def tokens_as_map(label: str, graph: str = WINDOWS, recipe: str = "rotated-projection", **options: object) -> Case:
    options = {"weights": {"m": (8, 24), "bias": (24,)}, "tolerance": 1e-5, **options}
    return Case(recipe, label, graph, **options)  # type: ignore[arg-type]


SCORED = "g (float[N, 2, S, 4] q, float[N, 2, S, 4] k) => (float[N, 2, S, 4] y)"
LENGTHS = "{0}n = ReduceL2 <axes = [-1]> ({0}) {0}m = Max({0}n, small) {0}d = Div({0}, {0}m)"
EXPANDED = LENGTHS.replace("Div({0}, {0}m)", "Div({0}, {0}e)").replace(
    "{0}d", "{0}s = Shape({0}) {0}e = Expand({0}m, {0}s) {0}d"
)
COSINE = "t = Transpose <perm = [0, 1, 3, 2]> (kd) s0 = MatMul(qd, t) s1 = Mul(s0, by) p = Softmax <axis = -1> (s1)"


def scored(label: str, form: str = LENGTHS, rest: str = f"{COSINE} y = MatMul(p, k)", **options: object) -> Case:
    options = {"io": SCORED, "tolerance": 1e-5, **options}
    body = f"{form.format('q')} {form.format('k')} {rest}"
    constants = f"float by = {{3}}{', float small = {1e-6}' if 'small' in body else ''}"
    return Case("normalized-scores", label, f"{options.pop('io')} <{constants}> {{ {body} }}", **options)  # type: ignore[arg-type]


CASES: tuple[Case, ...] = (
    scored("bounded"),
    scored("expanded", EXPANDED),
    scored("static", io=SCORED.replace("N", "2").replace("S", "5")),
    scored("tokens-open", io=SCORED.replace("N", "2")),
    scored(
        "masked",
        rest=COSINE.replace("Softmax <axis = -1> (s1)", "Softmax <axis = -1> (s2)").replace(
            "p =", "s2 = Add(s1, w) p ="
        )
        + " y = MatMul(p, k)",
        io=f"{SCORED[:43]}, float[S, S] w{SCORED[43:]}",
    ),
    scored("queries-only", rest=f"{COSINE.replace('(kd)', '(k)')} y = MatMul(p, kd)", changes=0),
    scored("normalized-values", rest=f"{COSINE} y = MatMul(p, kd)", changes=0),
    scored(
        "no-attention", rest="t = Transpose <perm = [0, 1, 3, 2]> (kd) s0 = MatMul(qd, t) y = MatMul(s0, k)", changes=0
    ),
    scored("per-feature", LENGTHS.replace("[-1]", "[2]"), changes=0),
    scored("scores-are-output", io=f"{SCORED[:-1]}, float[N, 2, S, S] s0)", changes=0),
    windows("norm-before"),
    windows("static", io="g (float[2, 4, 6, 8] x) => (float[2, 4, 6, 8] y)"),
    windows("norm-after", POST),
    windows("shifted", SHIFTED, constants=f"{SIZES}, {ENDS}, {STARTS}", opset=17),
    windows("tokens", FLAT, constants=f"{SIZES}, int64[3] flat = {{-1, 24, 8}}"),
    windows("sum-is-read-twice", f"{PLAIN} u = Neg(y)", io=f"{IO[:-1]}, float[N, 4, 6, 8] u)"),
    windows(
        "shifted-not-back",
        SHIFTED.replace("s" + "k, ", "sj, "),
        constants=f"{SIZES}, {ENDS}, {STARTS}",
        changes=0,
        refusals=1,
    ),
    windows("other-windows-back", PLAIN.replace("Reshape(g, join)", "Reshape(g, cut)"), changes=0, refusals=1),
    windows("norm-is-read", f"{PLAIN} u = Neg(n)", io=f"{IO[:-1]}, float[N, 4, 6, 8] u)", changes=0),
    windows(
        "norm-over-more",
        PLAIN.replace("(x, ns, nb)", "<axis = 2> (x, wide, wider)"),
        changes=0,
        weights={"wide": (6, 8), "wider": (6, 8), "m": (8, 8)},
    ),
    windows(
        "scale-per-row",
        PLAIN.replace("LayerNormalization(x, ns, nb)", "Mul(x, wide)"),
        changes=0,
        weights={"wide": (6, 8), "m": (8, 8)},
    ),
    windows("no-residual", PLAIN.replace("Add(x, e)", "Identity(e)"), changes=0),
    windows("batch-moves", PLAIN.replace("[0, 1, 3, 2, 4, 5]> (a)", "[3, 1, 0, 2, 4, 5]> (a)"), changes=0, refusals=1),
    cut("gather", "three-first", gathers(0)),
    cut("slice", "three-first", slices(0)),
    cut("split", "three-first", SPLITS, opset=17),
    cut("per-head", "heads-first", gathers(3)),
    cut("slice-per-head", "heads-first", slices(3)),
    cut(
        "size-before-heads",
        "size-before",
        gathers(0),
        io="g (float[N, S, 8] x) => (float[N, 2, S, 4] q, float[N, 2, S, 4] k, float[N, 2, S, 4] v)",
    ),
    multi_head("heads-in-the-batch", opset=17),
    multi_head("tokens-in-the-batch", "0, 1, 2", opset=17, changes=0),
    cut("no-bias", "three-first", gathers(0), add="", weights={"m": (8, 24)}),
    cut(
        "other-bias",
        "three-first",
        gathers(0),
        add="b = Add(a, more)",
        weights={"m": (8, 24), "more": (1, 1, 24)},
        changes=0,
    ),
    cut("static", "three-first", gathers(0), io=TOKENS.replace("N", "1").replace("S", "5")),
    cut(
        "used-elsewhere",
        "three-first",
        f"{gathers(0)} u = Neg(d)",
        io=f"{TOKENS[:-1]}, float[3, N, 2, S, 4] u)",
        changes=0,
    ),
    cut("overlapping", "three-first", gathers(0).replace("i2", "i1"), changes=0),
    cut(
        "result-is-output",
        "three-first",
        gathers(0).replace("v0 = Gather", "v = Gather").replace("v = Identity(v0)", ""),
        changes=0,
    ),
    tokens_as_map("windows-with-queries-as-a-map"),
    tokens_as_map("groups-of-queries", POOLED),
    tokens_as_map("groups-are-judged", POOLED, recipe="merged-projection", changes=0),
    tokens_as_map("windows-are-judged", recipe="merged-projection", changes=0),
    tokens_as_map(
        "tokens-that-become-a-map",
        WINDOWS.replace("[N, 4, 6, 8] x", "[N, 24, 8] x"),
    ),
    cut("rotated", "three-first", rotated(gathers(0)), changes=0),
    *(
        cut(label, form, rotated(gathers(axis)), recipe="rotated-projection")
        for label, form, axis in (("three-first", "three-first", 0), ("per-head", "heads-first", 3))
    ),
    cut("used-whole", "three-first", gathers(0), recipe="rotated-projection", changes=0),
)
