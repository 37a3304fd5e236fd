"""FP16 of networks whose front end, or whose normalization, needs FP32: that part stays, and the rest is FP16."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from audio_nets import FRONT, keyword_transformer, sounds

from trtopt.graph.artifact import input_spec
from trtopt.graph.shapes import infer_shapes, static_shapes
from trtopt.pipeline.plan_runner import PlanRunner, repaired
from trtopt.precision.decide import decide, wanted_tensors
from trtopt.precision.fp16.repair import Damage, repair
from trtopt.precision.observe.calibrate import collect
from trtopt.precision.observe.samples import open_samples
from trtopt.precision.plan import FP16, PrecisionPlan
from trtopt.support.ort_session import Feeds
from trtopt.support.precision import Precision


def planned(base: ir.Model, feeds: list[Feeds]) -> PrecisionPlan:
    wanted = wanted_tensors(base, Precision.FP16, "tensorrt-rtx")
    samples = open_samples(feeds, [input_spec(value) for value in base.graph.inputs])
    stats = collect(base, samples, histogram=wanted.histogram, ranges=wanted.ranges).table.stats
    return decide(base, Precision.FP16, "tensorrt-rtx", stats, static_shapes(base, {}))


def front_of(base: ir.Model) -> set[str]:
    names = [str(node.name) for node in base.graph]
    return set(names[: names.index("h0")])


@pytest.mark.parametrize("front", FRONT)
@pytest.mark.parametrize("level", [1.0, 0.02])
def test_only_the_front_end_of_a_keyword_transformer_stays_fp32(front: str, level: float) -> None:
    base, feeds = keyword_transformer(front), sounds(4, level)
    found = repaired(base, planned(base, feeds), feeds)
    assert found.after.is_allowed and found.after.sqnr_db >= 40
    assert set(found.plan.wide) <= front_of(base)


def test_it_is_found_without_any_rule_too_in_few_evaluations() -> None:
    base, feeds = keyword_transformer("add", blocks=6), sounds(2, 1.0)
    runner, asked = PlanRunner(base, feeds, 40.0), 0

    def damage_of(plan: PrecisionPlan) -> Damage:
        nonlocal asked
        asked += 1
        return runner(plan)

    found = repair(base, PrecisionPlan(Precision.FP16, FP16), damage_of, most=16)
    assert asked <= 24
    assert found.after.is_allowed and set(found.plan.wide) <= front_of(base)


@pytest.mark.parametrize(("spread", "kept"), [(1.0, False), (1e-4, True)])
def test_a_layer_normalization_of_nearly_equal_values_stays_fp32_if_the_samples_show_it(
    spread: float, kept: bool
) -> None:
    """Its epsilon of 1e-12 counts in FP32 inside the kernel; its operand's variance does not survive FP16."""
    text = """(float[4,64] x) => (float[4,64] y) { a = Mul(x, s) b = Add(a, o) n = LayerNormalization <epsilon = 1e-12>
        (b, g) h = MatMul(n, w) y = Relu(h) }"""
    rng = np.random.default_rng(0)
    weights = {
        **{"s": np.float32(spread), "o": np.float32(1), "g": np.ones(64, "f4")},
        "w": (rng.standard_normal((64, 64)) * 0.1).astype("f4"),
    }
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\ng {text}')
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(a), name) for name, a in weights.items())
    for node in proto.graph.node:
        node.name = node.output[0]
    base = infer_shapes(ir.from_proto(proto))
    feeds: list[Feeds] = [{"x": rng.standard_normal((4, 64)).astype("f4")} for _ in range(2)]
    plan = planned(base, feeds)
    assert "n" not in plan.wide
    found = repaired(base, plan, feeds)
    assert found.after.is_allowed
    assert ("b" in found.plan.wide) is kept and "h" not in found.plan.wide


def test_a_row_of_zeros_stays_zero_behind_an_l2_norm_in_fp16() -> None:
    """Its floor of 1e-12 is 0 in FP16, and 0 / 0 is NaN."""
    text = """(float[4,64] x) => (float[4,64] y) <float least = {1e-12}, int64[1] axes = {1}>
        { a = Relu(x) r = ReduceL2(a, axes) c = Max(r, least) y = Div(a, c) }"""
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\ng {text}')
    for node in proto.graph.node:
        node.name = node.output[0]
    base = infer_shapes(ir.from_proto(proto))
    rows = np.random.default_rng(0).standard_normal((4, 64)).astype("f4")
    plan = planned(base, [{"x": rows}])
    rows = np.concatenate([rows[:1], np.zeros((3, 64), "f4")])
    assert not plan.wide and PlanRunner(base, [{"x": rows}], 40.0)(plan).is_allowed
