"""Cases for the recipe that widens attention's heads: x [2, 5, 8], two heads of 4, which become 16; or of 20, 24."""

from __future__ import annotations

from cases_attention import CORE, GEMM, HEADS, IO, MASKED, MIX, OUT, B, K, Q, V, W
from contract_case import Case

from trtopt.rewrite.protocol import Target

RTX = Target("tensorrt-rtx", "fp16")
BLOCK = f"{Q} {K} {V} {CORE} {MIX} {OUT}"
WIDE = "int64[4] hs = {0, 0, 2, 20}, int64[3] fs = {0, 0, 40}, float sc = {0.2}"
WIDE_WEIGHTS = {f"w{each}": (8, 40) for each in "qkv"} | {f"b{each}": (40,) for each in "qkv"}
TURNED = (  # nn.MultiheadAttention: tokens before the batch, which is merged with the heads
    "q2 = Reshape(q1, bh) q3 = Transpose <perm = [1, 0, 2]> (q2) "
    "k2 = Reshape(k1, bh) k3 = Transpose <perm = [1, 2, 0]> (k2) "
    f"v2 = Reshape(v1, bh) v3 = Transpose <perm = [1, 0, 2]> (v2) {CORE} o0 = MatMul(p, v3) "
    f"o1 = Transpose <perm = [1, 0, 2]> (o0) o2 = Reshape(o1, fs) {OUT}"
)


def heads(label: str, body: str = BLOCK, **options: object) -> Case:
    options = {"io": IO, "constants": HEADS, "weights": {**W, **B}, "tolerance": 2e-6, "target": RTX, **options}
    graph = f"{options.pop('io')} <{options.pop('constants')}> {{ {body} }}"
    return Case("aligned-heads", label, graph, **options)  # type: ignore[arg-type]


def refused(label: str, body: str, **options: object) -> Case:
    return heads(label, body, changes=0, refusals=1, **options)


ADDED = " ".join(f"{n}0 = MatMul(x, w{n}) {n}1 = Add({n}0, b{n})" for n in "qkv")
UNBIASED = BLOCK
for _name in "qkv":
    UNBIASED = UNBIASED.replace(f"Reshape({_name}1, hs)", f"Reshape({_name}0, hs)")
    UNBIASED = UNBIASED.replace(f"{_name}1 = Add({_name}0, b{_name})", "").replace(
        f"{_name}1 = Add(b{_name}, {_name}0)", ""
    )

CASES: tuple[Case, ...] = (
    heads("separate"),
    heads("open", io="g (float[N, S, 8] x) => (float[N, S, 8] y)"),
    heads("no-biases", UNBIASED),
    heads("shared-weights", BLOCK.replace("wk", "wq").replace("bk", "bo").replace("bv", "bo")),
    heads("inferred-size", constants=HEADS.replace("{0, 0, 2, 4}", "{0, 0, 2, -1}").replace("{0, 0, 8}", "{0, 0, -1}")),
    heads("inferred-heads", constants=HEADS.replace("{0, 0, 2, 4}", "{0, 0, -1, 4}")),
    heads(
        "scaled-before",
        f"{Q} {K} {V} q4 = Mul(q3, sc) k4 = Div(k3, sc) s1 = MatMul(q4, k4) p = Softmax <axis = -1> (s1) {MIX} {OUT}",
    ),
    refused(
        "scale-of-more-axes",  # queries of five, of which the batch is the second
        f"{Q} {K} {V} q4 = Mul(q3, five) s1 = MatMul(q4, k3) p = Softmax <axis = -1> (s1) "
        f"{MIX.replace('(o0)', '(r0)').replace('o1 =', 'r0 = Reshape(o0, four) o1 =')} {OUT}",
        constants=f"{HEADS}, float[1, 1, 1, 1, 1] five = {{0.5}}, int64[4] four = {{2, 2, 5, 4}}",
    ),
    refused(
        "bias-of-more-axes",
        f"{Q} {K} {V} q4 = Add(q3, five) s1 = MatMul(q4, k3) p = Softmax <axis = -1> (s1) "
        f"{MIX.replace('(o0)', '(r0)').replace('o1 =', 'r0 = Reshape(o0, four) o1 =')} {OUT}",
        constants=f"{HEADS}, float[1, 1, 1, 1, 4] five = {{1, 2, 3, 4}}, int64[4] four = {{2, 2, 5, 4}}",
    ),
    heads("masked", MASKED, io="g (float[2, 5, 8] x, float[5, 5] m) => (float[2, 5, 8] y)"),
    heads(
        "gemm",
        GEMM,
        constants="int64[4] hs = {2, 5, 2, 4}, int64[2] gs = {10, 8}, int64[3] ys = {2, 5, 8}, float sc = {0.5}",
        weights={**W, **B},
    ),
    heads(
        "heads-in-batch",
        f"{ADDED} {TURNED}",
        constants="int64[3] bh = {2, 10, 4}, int64[3] fs = {2, 5, 8}, float sc = {0.5}",
    ),
    heads("twenty", constants=WIDE, weights={**W, **B, **WIDE_WEIGHTS, "wo": (40, 8)}),
    heads(
        "values-only",  # queries and keys have heads of 16
        BLOCK.replace("Reshape(v1, hs)", "Reshape(v1, vs)"),
        constants=f"{HEADS.replace('2, 4}', '2, 16}')}, int64[4] vs = {{0, 0, 2, 4}}",
        weights={**W, **B, "wq": (8, 32), "bq": (32,), "wk": (8, 32), "bk": (32,)},
    ),
    heads(
        "narrower-values",
        BLOCK.replace("Reshape(v1, hs)", "Reshape(v1, vs)").replace("fs)", "os)"),
        constants="int64[4] hs = {0, 0, 2, 32}, int64[4] vs = {0, 0, 2, 16}, int64[3] os = {0, 0, 32}, float sc = {1}",
        weights={
            **B,
            **{f"w{each}": (8, 64) for each in "qk"},
            **{f"b{each}": (64,) for each in "qk"},
            "wv": (8, 32),
            "bv": (32,),
            "wo": (32, 8),
        },
    ),
    heads(
        "much-narrower-values",
        BLOCK.replace("Reshape(v1, hs)", "Reshape(v1, vs)"),
        constants="int64[4] hs = {0, 0, 2, 32}, int64[4] vs = {0, 0, 2, 4}, int64[3] fs = {0, 0, 8}, float sc = {0.5}",
        weights={**W, **B, **{f"w{each}": (8, 64) for each in "qk"}, **{f"b{each}": (64,) for each in "qk"}},
        changes=0,
    ),
    heads(
        "aligned",
        constants=WIDE.replace("20", "16").replace("40", "32"),
        changes=0,
        weights={
            **W,
            **B,
            **{f"w{each}": (8, 32) for each in "qkv"},
            **{f"b{each}": (32,) for each in "qkv"},
            "wo": (32, 8),
        },
    ),
    heads("fp32", target=Target("tensorrt-rtx", "fp32"), changes=0),
    heads("other-backend", target=Target("tensorrt", "fp16"), changes=0),
    refused("activated", BLOCK.replace("Add(q0, bq)", "Relu(q0)")),
    refused("keys-are-output", BLOCK, io="g (float[2, 5, 8] x) => (float[2, 5, 8] y, float[2, 5, 8] k1)"),
    refused("result-is-output", BLOCK, io="g (float[2, 5, 8] x) => (float[2, 5, 8] y, float[2, 5, 8] o2)"),
    refused("bias-per-token", BLOCK, weights={**W, **B, "bv": (5, 8)}),
)
