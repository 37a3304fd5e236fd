"""Networks that a naive cast breaks and no local rule explains: FP16 is right after the repair, and says why."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from naive_fp16 import naive_fp16

from trtopt.accuracy.compare import compare
from trtopt.accuracy.emulation import fp32_emulation
from trtopt.events import Event
from trtopt.graph.artifact import input_spec
from trtopt.graph.shapes import infer_shapes, static_shapes
from trtopt.pipeline.improve import OutputErrorMeter
from trtopt.pipeline.plan_runner import PlanRunner, repaired
from trtopt.precision.decide import decide, wanted_tensors, with_bfloat
from trtopt.precision.fp16.repair import SMALLEST_SQNR_DB, Repaired
from trtopt.precision.observe.calibrate import collect
from trtopt.precision.observe.ranges import ValueRanges
from trtopt.precision.observe.samples import open_samples
from trtopt.precision.plan import FP16, PrecisionPlan, QuantizedOp
from trtopt.precision.write import apply_plan
from trtopt.report.schema.build import OutputAccuracy
from trtopt.support.ort_session import Feeds, OrtSession
from trtopt.support.precision import Precision


def normal(*shape: int, seed: int = 0, scale: float = 1.0, offset: float = 0.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale + offset).astype(np.float32)


X = [{"x": normal(4, 64, seed=seed)} for seed in range(3)]
ROWS = "(float[4,64] x) => (float[4,64] y)"
KEPT: dict[str, tuple[str, list[Feeds], dict[str, np.ndarray]]] = {
    "a mean removed from a large offset": (
        f"{ROWS} {{ a = Add(x, o) m = ReduceMean(a, t) d = Sub(a, m) h = MatMul(d, w) y = Relu(h) }}",
        X,
        {"o": np.float32(2000), "t": np.array([1]), "w": normal(64, 64, scale=0.1)},
    ),
    "a large bias before the mean is removed": (
        f"{ROWS} {{ p = MatMul(x, w) a = Add(p, b) m = ReduceMean(a, t) d = Sub(a, m) y = MatMul(d, w) }}",
        X,
        {"t": np.array([1]), "w": normal(64, 64, scale=0.1), "b": np.full(64, 3000, "f4")},
    ),
    "a variance as E[x2] - E[x]2": (
        f"""{ROWS} {{ a = Add(x, o) q = Mul(a, a) s = ReduceMean(q, t) m = ReduceMean(a, t) n = Mul(m, m) v = Sub(s, n)
            e = Add(v, k) r = Sqrt(e) d = Sub(a, m) y = Div(d, r) }}""",
        X,
        {"o": np.float32(30), "t": np.array([1]), "k": np.float32(1e-5)},
    ),
    "scores with a common offset before a softmax": (
        f"{ROWS} {{ a = MatMul(x, w) b = Add(a, o) p = Softmax(b) y = MatMul(p, v) }}",
        X,
        {"o": np.float32(8000), "w": normal(64, 64, scale=0.2), "v": normal(64, 64)},
    ),
    "the logarithm of one and a little": (
        f"{ROWS} {{ q = Abs(x) a = Mul(q, k) s = Add(a, one) l = Log(s) y = Div(l, k) }}",
        X,
        {"k": np.float32(1e-3), "one": np.float32(1)},
    ),
    "the exponential of little, less one": (
        f"{ROWS} {{ a = Mul(x, k) e = Exp(a) l = Sub(e, one) y = Div(l, k) }}",
        X,
        {"k": np.float32(1e-3), "one": np.float32(1)},
    ),
    "the reciprocal of what a floor leaves": (
        f"{ROWS} {{ a = Add(x, o) f = Floor(a) d = Sub(a, f) g = Add(d, k) y = Reciprocal(g) }}",
        X,
        {"o": np.float32(700), "k": np.float32(0.05)},
    ),
    "a window sum from two running sums": (
        """(float[1,2048] x) => (float[1,2016] y) { a = Abs(x) c = CumSum(a, t) l = Slice(c, zero, e, axis)
            h = Slice(c, n, f, axis) y = Sub(h, l) }""",
        [{"x": normal(1, 2048, seed=seed)} for seed in range(3)],
        {
            **{"t": np.array(1), "zero": np.array([0]), "e": np.array([2016]), "axis": np.array([1])},
            **{"n": np.array([32]), "f": np.array([2048])},
        },
    ),
    "attention with large scores": (
        """(float[1,4,128,16] q, float[1,4,128,16] k, float[1,4,128,16] v) => (float[1,4,128,16] y) {
            t = Transpose <perm = [0,1,3,2]> (k) s = MatMul(q, t) p = Softmax(s) y = MatMul(p, v) }""",
        [{n: normal(1, 4, 128, 16, seed=7 * s + i, scale=20) for i, n in enumerate("qkv")} for s in range(3)],
        {},
    ),
    "twelve small branches on a large residual": (
        ROWS
        + "{ h0 = Mul(x, k) "
        + " ".join(
            f"n{i} = LayerNormalization(h{i}, g, z) a{i} = MatMul(n{i}, w) b{i} = Tanh(a{i}) h{i + 1} = Add(h{i}, b{i})"
            for i in range(12)
        )
        + " y = Sub(h12, h0) }",
        X,
        {"k": np.float32(3000), "g": np.ones(64, "f4"), "z": np.zeros(64, "f4"), "w": normal(64, 64, scale=0.1)},
    ),
    "a difference of squares": (
        f"{ROWS} {{ a = Add(x, o) q = Mul(a, a) y = Sub(q, p) }}",
        X,
        {"o": np.float32(100), "p": np.float32(10000)},
    ),
    "a polynomial whose constant cancels": (
        f"""{ROWS} {{ a = Mul(x, c3) b = Add(a, c2) c = Mul(b, x) d = Add(c, c1) e = Mul(d, x) f = Add(e, c0)
            y = Sub(f, c0) }}""",
        X,
        {name: np.float32(value) for name, value in {"c3": 0.01, "c2": -0.02, "c1": 0.5, "c0": 5000}.items()},
    ),
    "distances by expansion": (
        """(float[8,32] x) => (float[8,16] y) { q = Mul(x, x) s = ReduceSum(q, t) p = MatMul(x, w) r = Mul(p, two)
            a = Sub(s, r) d = Add(a, c) e = Sqrt(d) y = Neg(e) }""",
        [{"x": normal(8, 32, seed=seed, offset=10)} for seed in range(3)],
        {
            **{"t": np.array([1]), "w": normal(32, 16, seed=5, offset=10), "two": np.float32(2)},
            "c": np.square(normal(32, 16, seed=5, offset=10)).sum(0),
        },
    ),
    "a sampling grid in pixels": (
        """(float[1,4,256,256] i, float[1,64,64,2] g) => (float[1,4,64,64] y) {
            h = Tanh(g) y = GridSample <align_corners = 1> (i, h) }""",
        [{"i": normal(1, 4, 256, 256, seed=s), "g": normal(1, 64, 64, 2, seed=s + 5)} for s in range(2)],
        {},
    ),
    "two large branches that cancel": (
        f"{ROWS} {{ a = MatMul(x, u) b = MatMul(x, v) y = Sub(a, b) }}",
        X,
        {"u": normal(64, 64, seed=1, scale=5), "v": normal(64, 64, seed=1, scale=5) + normal(64, 64, scale=0.003)},
    ),
    "a gate behind a mean": (
        f"{ROWS} {{ a = Add(x, o) m = ReduceMean(a, t) d = Sub(a, m) c = Greater(d, z) y = Where(c, x, z) }}",
        X,
        {"o": np.float32(1000), "t": np.array([1]), "z": np.float32(0)},
    ),
    "the best of close scores": (
        "(float[4,64] x) => (int64[4] y) { a = MatMul(x, w) b = Add(a, o) y = ArgMax <axis = 1, keepdims = 0> (b) }",
        X,
        {"o": np.float32(50), "w": normal(64, 64, scale=0.01)},
    ),
}
"""What the rules for single nodes let pass: the repair has to find it."""

FOUND_BY_RULES: dict[str, tuple[str, list[Feeds], dict[str, np.ndarray]]] = {
    "sines of positions": (
        "(float[4,1] t, float[4,64] x) => (float[4,64] y) { p = MatMul(t, f) s = Sin(p) y = Add(x, s) }",
        [{"t": np.array([[3.0], [700.3], [1500.7], [999.1]], "f4") + s, "x": normal(4, 64, seed=s)} for s in range(3)],
        {"f": np.geomspace(1, 1e-4, 64).astype("f4").reshape(1, 64)},
    ),
    "the embedding of a diffusion step": (
        """(float[4,1] t) => (float[4,64] y) {
            p = Mul(t, f) s = Cos(p) q = Sin(p) c = Concat <axis = 1> (s, q) y = MatMul(c, w) }""",
        [{"t": np.array([[0.031], [0.703], [0.5], [0.9991]], "f4") * (1 - 0.1 * s)} for s in range(3)],
        {"f": (1000 * np.geomspace(1, 1e-4, 32)).astype("f4").reshape(1, 32), "w": normal(64, 64, scale=0.1)},
    ),
    "Fourier features": (
        "(float[16,3] x) => (float[16,64] y) { p = MatMul(x, f) s = Sin(p) y = MatMul(s, w) }",
        [{"x": normal(16, 3, seed=seed, scale=0.5)} for seed in range(3)],
        {"f": normal(3, 64, scale=400), "w": normal(64, 64, scale=0.2)},
    ),
    "a counter modulo a period": (
        f"{ROWS} {{ a = Mul(x, k) b = Mod <fmod = 1> (a, p) y = Mul(b, b) }}",
        X,
        {"k": np.float32(1000), "p": np.float32(6.28)},
    ),
    "floats that become indices": (
        """(float[4,64] x) => (float[4,64] y) { a = Mul(x, k) f = Floor(a) i = Cast <to = 7> (f) c = Clip(i, lo, hi)
            y = Gather(w, c) }""",
        X,
        {"k": np.float32(700), "lo": np.int64(-2000), "hi": np.int64(1999), "w": normal(4000)},
    ),
}
"""What a rule of ``hazards`` keeps, whether a sample shows it or not."""


def network(text: str, weights: dict[str, np.ndarray]) -> ir.Model:
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\ng {text}')
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(a), name) for name, a in weights.items())
    for node in proto.graph.node:
        node.name = node.output[0]
    return infer_shapes(ir.from_proto(proto))


def planned(
    base: ir.Model, feeds: list[Feeds], precision: Precision = Precision.FP16
) -> tuple[PrecisionPlan, ValueRanges]:
    wanted = wanted_tensors(base, Precision(precision), "tensorrt-rtx")
    samples = open_samples(feeds, [input_spec(value) for value in base.graph.inputs])
    stats = collect(base, samples, histogram=wanted.histogram, ranges=wanted.ranges).table.stats
    shapes = static_shapes(base, {name: array.shape for name, array in feeds[0].items()})
    return decide(base, Precision(precision), "tensorrt-rtx", stats, shapes), ValueRanges(stats, shapes)


def measured(base: ir.Model, written: ir.Model, feeds: list[Feeds]) -> OutputAccuracy:
    with OrtSession(base) as before, OrtSession(fp32_emulation(written), keep_qdq=True) as after:
        return compare(before, after, feeds)["y"]


def counted(base: ir.Model, plan: PrecisionPlan, feeds: list[Feeds]) -> tuple[Repaired, int]:
    """The repaired plan, and how many plans were run."""
    events: list[Event] = []
    found = repaired(base, plan, feeds, on_event=events.append)
    return found, sum(event.kind == "advance" for event in events)


def is_good(found: OutputAccuracy) -> bool:
    exact = found.nonfinite == 0 and found.sqnr_db >= SMALLEST_SQNR_DB
    return exact or found.max_abs == 0


@pytest.mark.parametrize("name", KEPT)
def test_what_only_the_outputs_show_goes_back_to_fp32(name: str) -> None:
    text, feeds, weights = KEPT[name]
    base = network(text, weights)
    plan, _ = planned(base, feeds)
    assert not is_good(measured(base, naive_fp16(base), feeds))
    assert not is_good(measured(base, apply_plan(base, plan), feeds)), "a rule finds it: not for this table"
    found, runs = counted(base, plan, feeds)
    assert found.after.is_allowed and not found.before.is_allowed
    assert is_good(measured(base, apply_plan(base, found.plan), feeds))
    assert found.fallbacks and all(reason.startswith("put back to FP32") for reason in found.fallbacks.values())
    assert runs <= 32


@pytest.mark.parametrize("name", FOUND_BY_RULES)
def test_what_a_rule_keeps_needs_no_repair(name: str) -> None:
    text, feeds, weights = FOUND_BY_RULES[name]
    base = network(text, weights)
    plan, _ = planned(base, feeds)
    assert not is_good(measured(base, naive_fp16(base), feeds))
    assert is_good(measured(base, apply_plan(base, plan), feeds))
    found, runs = counted(base, plan, feeds)
    assert found.plan is plan and runs == 1


def test_the_harmless_rest_of_a_repaired_network_stays_fp16() -> None:
    text = (
        ROWS
        + """{ a = Add(x, o) m = ReduceMean(a, t) d = Sub(a, m) h = MatMul(d, w) r = Relu(h) p = MatMul(r, w)
        s = Tanh(p) q = MatMul(s, w) u = Add(q, r) y = MatMul(u, w) }"""
    )
    base = network(text, {"o": np.float32(2000), "t": np.array([1]), "w": normal(64, 64, scale=0.1)})
    plan, _ = planned(base, X)
    assert set(repaired(base, plan, X).fallbacks) == {"a", "d"}, "and the mean, which a rule keeps"


def test_probabilities_of_nothing_are_no_reason_for_fp32() -> None:
    """A detector of text that is shown noise: no place has more than 1e-6, which FP16 does not hold."""
    base = network(
        ROWS + "{ h = MatMul(x, w) a = Add(h, b) s = Sigmoid(a) y = Reshape(s, r) }",
        {"w": normal(64, 64, scale=0.1), "b": np.full(64, -22, "f4"), "r": np.array([4, 64])},
    )
    plan, _ = planned(base, X)
    found, runs = counted(base, plan, X)
    assert found.plan is plan and runs == 1
    assert OutputErrorMeter(base, X).of(base, plan) < 1e-6


def feed_forward(hot: float, behind: str = "y = Add(o, x)", **more: np.ndarray) -> ir.Model:
    """x [4, 64] -> 256 -> 64 and a residual: activations of about ``3 * hot``."""
    text = f"{ROWS} {{ n = LayerNormalization(x, g, z) h = MatMul(n, u) r = Relu(h) o = MatMul(r, d) {behind} }}"
    weights = {"g": np.ones(64, "f4"), "z": np.zeros(64, "f4"), "u": normal(64, 256, scale=hot / 8)}
    return network(text, weights | more | {"d": normal(256, 64, seed=1, scale=1 / (16 * hot))})


def test_range_without_precision_runs_in_bf16() -> None:
    base = feed_forward(5e4)
    plan, spans = planned(base, X)
    assert {"h", "o"} <= set(plan.wide)
    mixed = with_bfloat(base, plan, spans)
    assert set(mixed.bfloat) == {"h", "o"}
    found, runs = counted(base, mixed, X)
    assert found.plan is mixed and runs == 1
    assert is_good(measured(base, apply_plan(base, mixed), X))


def test_bf16_is_taken_back_where_the_outputs_need_precision() -> None:
    """The result of the second product cancels against what it usually is: eight bits leave nothing of it."""
    with OrtSession(feed_forward(5e4), ["o"]) as session:
        usual = session.run(X[0])[0]
    base = feed_forward(5e4, "y = Sub(o, e)", e=usual + normal(4, 64, scale=0.003))
    plan, spans = planned(base, X[:1])
    found = repaired(base, with_bfloat(base, plan, spans), X[:1])
    assert not found.before.is_allowed and found.after.is_allowed
    assert not found.plan.bfloat and {"h", "o"} <= set(found.plan.wide)
    assert "in bf16" in found.fallbacks["o"]
    assert is_good(measured(base, apply_plan(base, found.plan), X[:1]))


def test_the_16_bit_part_of_an_int8_plan_is_repaired_and_its_int8_stays() -> None:
    base = network(
        f"{ROWS} {{ a = Add(x, o) m = ReduceMean(a, t) d = Sub(a, m) h = MatMul(d, w) y = Relu(h) }}",
        {"o": np.float32(2000), "t": np.array([1]), "w": normal(64, 64, scale=0.1)},
    )
    plan, _ = planned(base, X)
    op = QuantizedOp("h", "d", 4.0, None, "max")
    found = repaired(base, PrecisionPlan(Precision.INT8, FP16, plan.wide, (op,)), X)
    assert found.plan.quantized == (op,) and set(found.fallbacks) == {"a", "d"}


def test_the_noise_of_8_bits_puts_nothing_back() -> None:
    feeds = [{"x": normal(1, 64, seed=seed)} for seed in range(6)]
    base = network(
        f"{ROWS.replace('4,', '1,')} {{ h = MatMul(x, w) r = Relu(h) k = MatMul(r, w) y = Relu(k) }}",
        {"w": normal(64, 64, scale=0.1)},
    )
    plan, _ = planned(base, feeds)
    ops = QuantizedOp("h", "x", 4.0, None, "max"), QuantizedOp("k", "r", 4.0, None, "max")
    assert not repaired(base, PrecisionPlan(Precision.INT8, FP16, plan.wide, ops), feeds).fallbacks


SELECTED = """(float[1,8,64] b, float[1,64] s) => (float[1,4] v, float[1,8,4] y) {
    p = Mul(s, one) q = Add(p, o) v, i = TopK <axis = 1> (q, k) j = Squeeze(i, zero) y = Gather <axis = 2> (b, j) }"""


@pytest.mark.parametrize(("offset", "back"), [(0.0, set()), (4000.0, {"q", "v"})])
def test_what_is_behind_a_selection_is_judged_by_the_scores(offset: float, back: set[str]) -> None:
    """Two of four boxes with nearly equal scores change places: no harm, unless all scores are nearly equal."""
    scores = normal(1, 64)
    scores[0, :2] = 8.0, 8.0 * (1 + 2.0**-13)
    feeds: list[Feeds] = [{"b": normal(1, 8, 64), "s": scores}]
    base = network(SELECTED, {"one": np.float32(1), "o": np.float32(offset), "k": np.array([4]), "zero": np.array([0])})
    for node in base.graph:
        node.name = "v" if node.op_type == "TopK" else node.name
    plan = PrecisionPlan(Precision.FP16, FP16)
    found = repaired(base, plan, feeds)
    assert set(found.fallbacks) == back


def test_scores_that_the_bound_does_not_tell_apart_stay_16_bit() -> None:
    """Half of 64 scores are equal but for 1e-5: more exact ones, as the bound asks, take other boxes too."""
    scores = 0.7 * np.sign(normal(1, 64)) + normal(1, 64, seed=1, scale=1e-5)
    feeds: list[Feeds] = [{"b": normal(1, 8, 64), "s": scores.astype(np.float32)}]
    base = network(SELECTED, {"one": np.float32(1), "o": np.float32(900), "k": np.array([4]), "zero": np.array([0])})
    found, evaluations = counted(base, PrecisionPlan(Precision.FP16, FP16), feeds)
    assert not found.fallbacks and not found.before.is_allowed and evaluations == 1


def test_a_comparison_that_any_rounding_flips_is_not_searched() -> None:
    """One of 4096 values lies next to the border of a mask: each operator before it flips it by itself."""
    text = """(float[64,64] x) => (float[64,64] y) {
        a = Mul(x, one) b = Add(a, zero) c = Div(b, one) d = Sub(c, zero) e = Abs(d) f = Max(e, zero) g = Min(f, two)
        h = Mul(one, g) m = Greater(h, one) y = Where(m, h, zero) }"""
    base = network(text, {"one": np.float32(1), "zero": np.float32(0), "two": np.float32(2)})
    x = np.full((64, 64), 1.5, np.float32)
    x[0, 0] = 1.0001
    x[32:] = 0.5
    found, evaluations = counted(base, PrecisionPlan(Precision.FP16, FP16), [{"x": x}])
    assert 30 < found.before.sqnr_db < 40 and not found.fallbacks
    assert evaluations < 12


def test_the_levels_of_a_quantized_model_are_no_damage() -> None:
    """A value at the border of two levels: in FP16 it falls on the other side."""
    base = network(
        f"""{ROWS} {{ a = Mul(x, k) q = QuantizeLinear(a, s, z) b = DequantizeLinear(q, s, z) h = MatMul(b, w)
            y = Relu(h) }}""",
        {"k": np.float32(1), "s": np.float32(0.1), "z": np.int8(0), "w": normal(64, 64, scale=0.1)},
    )
    borders = ((np.arange(256).reshape(4, 64) % 64 - 31.5) * 0.1).astype(np.float32)
    plan = PrecisionPlan(Precision.FP16, FP16)
    assert not is_good(measured(base, apply_plan(base, plan), [{"x": borders}]))
    assert repaired(base, plan, [{"x": borders}]).plan is plan


def test_a_plan_without_16_bit_types_is_not_run() -> None:
    base = network(f"{ROWS} {{ y = Relu(x) }}", {})
    plan = PrecisionPlan(Precision.FP32)
    assert repaired(base, plan, iter(())).plan is plan


def test_nan_in_the_reference_is_nobodys_fault() -> None:
    base = network(f"{ROWS} {{ a = Log(x) y = Mul(a, k) }}", {"k": np.float32(2)})
    trial = PlanRunner(base, X, 40.0)
    assert trial(PrecisionPlan(Precision.FP16, FP16)).is_allowed


def test_what_only_later_samples_show_goes_back_too() -> None:
    text = """(float[1,64] x, float[1,64] u) => (float[1,64] y, float[1,64] z) {
        a = Add(x, k) m = ReduceMean(a, t) d = Sub(a, m) y = Relu(d)
        b = Add(u, k) n = ReduceMean(b, t) e = Sub(b, n) z = Relu(e) }"""
    base = network(text, {"k": np.float32(2000), "t": np.array([1])})
    feeds: list[Feeds] = [
        {"x": normal(1, 64, seed=seed), "u": normal(1, 64, seed=seed, scale=float(seed > 1))} for seed in range(8)
    ]
    found, _ = counted(base, planned(base, feeds)[0], feeds)
    assert found.after.is_allowed
    assert all(found.fallbacks.keys() & chain for chain in ({"a", "m", "d"}, {"b", "n", "e"}))


def test_what_only_outputs_of_zero_show_goes_back_too() -> None:
    """A sample whose outputs are zero has no signal: beside the others its noise counts, by itself it does not."""
    base = network(
        """(float[1,64] x) => (float[1,64] y) { n = Neg(x) r = Relu(n) a = Sub(one, r) b = Sub(one, a) c = Sub(b, k)
        e = Relu(c) f = Mul(e, big) s = Sign(x) p = Relu(s) y = Add(p, f) }""",
        {"one": np.float32(1), "k": np.float32(0.00041), "big": np.float32(1e4)},
    )
    feeds = [{"x": np.full((1, 64), number, "f4")} for number in (1, 2, -0.0004)]
    found = repaired(base, PrecisionPlan(Precision.FP16, FP16), feeds)
    assert not found.before.is_allowed and found.after.is_allowed and found.fallbacks
