"""Values moved into the range of FP16 by powers of two: the network computes the same digits, and fits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import pytest

from trtopt.graph import edit
from trtopt.graph.shapes import infer_shapes, static_shapes
from trtopt.precision.fp16.hazards import wide_nodes
from trtopt.precision.fp16.rescale import Rescaled, rescaled
from trtopt.precision.observe.ranges import ValueRanges
from trtopt.precision.observe.statistics import StatsBuilder, TensorStats
from trtopt.precision.plan import FP16
from trtopt.support.ort_session import OrtSession

IMAGE = "g (float[2,4,8,8] x) => (float[2,5] y)"
CONV = "<float[8,4,3,3] u = {0}, float[8] b = {0}, float[8,1,3,3] d = {0}, float[8,8,1,1] v = {0}, float[8,5] w = {0},"
CONSTANTS = "float zero = {0.0}, float six = {6.0}, float[1,8,1,1] o = {0}>"
MOBILE = """a = Conv <pads = [1,1,1,1]> (x, u, b) c = Clip(a, zero, six) e = Conv <group = 8, pads = [1,1,1,1]> (c, d)
    f = Clip(e, zero, six) h = Conv(f, v) i = Add(h, c) j = Add(i, o) k = Relu(j) p = GlobalAveragePool(k)
    q = Flatten(p) y = MatMul(q, w)"""


def model_of(text: str, scales: Mapping[str, float]) -> ir.Model:
    """Random constants: those named, times a number."""
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    rng = np.random.default_rng(0)
    for name, scale in scales.items():
        value = model.graph.initializers[name]
        array = scale * rng.standard_normal(tuple(value.shape or ()))
        value.const_value = ir.Tensor(array.astype(np.float32), name=name)
    model = infer_shapes(model)
    for node in edit.all_nodes(model.graph):
        node.name = str(node.outputs[0].name)
    return model


def mobile(scales: Mapping[str, float], body: str = MOBILE) -> ir.Model:
    return model_of(f"{IMAGE} {CONV} {CONSTANTS} {{ {body} }}", {"o": 1e-5, **scales})


SMALL = {"u": 1e-5, "b": 1e-6, "d": 0.1, "v": 0.1, "w": 1e4}


def feeds_of(model: ir.Model) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {str(v.name): rng.standard_normal(tuple(v.shape or ())).astype(np.float32) for v in model.graph.inputs}


def values_of(model: ir.Model) -> dict[str, np.ndarray]:
    """Every value of a run."""
    names = [str(value.name) for node in model.graph for value in node.outputs]
    feeds = feeds_of(model)
    with OrtSession(model, names, fuse=False) as session:
        return {**feeds, **dict(zip(names, session.run(feeds), strict=True))}


def stats_of(values: Mapping[str, np.ndarray], histogram: bool = False) -> dict[str, TensorStats]:
    found = {}
    for name, array in values.items():
        builder = StatsBuilder(histogram)
        builder.update(array)
        found[name] = builder.finish()
    return found


def of(model: ir.Model) -> Rescaled | None:
    return rescaled(model, stats_of(values_of(model)), static_shapes(model, {}), FP16)


def wide_of(model: ir.Model) -> set[str]:
    return set(wide_nodes(model, ValueRanges(stats_of(values_of(model)), static_shapes(model, {})), FP16))


@pytest.mark.parametrize("scales", [SMALL, {**SMALL, "u": 1e5, "b": 1e4, "w": 1e-4, "o": 1e4}])
def test_a_network_out_of_the_range_computes_the_same_digits_and_fits(scales: dict[str, float]) -> None:
    body = MOBILE if scales is SMALL else MOBILE.replace("Clip", "Relu").replace(", zero, six", "")
    model = mobile(scales, body)
    assert len(wide_of(model)) > 5
    found = of(model)
    assert found is not None
    assert {"a", "c", "e", "k", "q"} <= set(found.values)
    assert not wide_of(found.model)
    assert np.array_equal(values_of(found.model)["y"], values_of(model)["y"])


def test_statistics_follow_their_tensors() -> None:
    model = mobile(SMALL)
    before = stats_of(values_of(model), histogram=True)
    found = rescaled(model, before, static_shapes(model, {}), FP16)
    assert found is not None
    assert found.stats == stats_of(values_of(found.model), histogram=True)


def test_what_fits_is_left_alone() -> None:
    assert of(mobile({"u": 0.1, "b": 0.1, "d": 0.3, "v": 0.3, "w": 1.0, "o": 1.0})) is None


@pytest.mark.parametrize("between", ["c = Sigmoid(a)", "c = HardSwish(a)", "c = Mul(a, a)"])
def test_what_does_not_commute_with_a_scale_keeps_its_operand(between: str) -> None:
    model = mobile(SMALL, MOBILE.replace("c = Clip(a, zero, six)", between))
    found = of(model)
    assert found is None or not {"a", "c"} & set(found.values)
    if found is not None:
        assert np.array_equal(values_of(found.model)["y"], values_of(model)["y"])


def test_a_bound_is_not_scaled_where_a_part_of_its_operand_is_fixed() -> None:
    model = model_of(
        """g (float[2,4,8,8] x) => (float[2,8,8,8] y)
        <float[4,4,1,1] u = {0}, float[8,8,1,1] v = {0}, float zero = {0.0}, float six = {6.0}> {
            a = Conv(x, u) b = Concat <axis = 1> (a, x) c = Clip(b, zero, six) y = Conv(c, v)
        }""",
        {"u": 1e-6, "v": 1.0},
    )
    assert of(model) is None


def test_channels_joined_by_a_concatenation_move_together() -> None:
    model = model_of(
        """g (float[2,4,8,8] x) => (float[2,8,8,8] y)
        <float[4,4,1,1] u = {0}, float[4,4,1,1] t = {0}, float[8,8,1,1] v = {0},
        float zero = {0.0}, float six = {6.0}> {
            a = Conv(x, u) s = Conv(x, t) b = Concat <axis = 1> (a, s) c = Clip(b, zero, six) y = Conv(c, v)
        }""",
        {"u": 1e-6, "t": 1e-7, "v": 1e5},
    )
    found = of(model)
    assert found is not None
    assert set(found.values) == {"a", "s", "b", "c"}
    assert np.array_equal(values_of(found.model)["y"], values_of(model)["y"])


GROUPS = """g (float[2,4,16,16] x) => (float[2,8,16,16] y)
    <float[8,4,3,3] u = {0}, float[8,8,3,3] v = {0}, float[2] one = {1.0, 1.0}, float[2] zero = {0.0, 0.0},
    float[8,1,1] m = {0}, int64[3] three = {2, 2, -1}, int64[4] four = {2, 8, 16, 16}> {
        a = Conv <pads = [1,1,1,1]> (x, u) r = Reshape(a, three)
        n = InstanceNormalization <epsilon = 1e-5> (r, one, zero)
        f = Reshape(n, four) k = Mul(f, m) s = Sigmoid(k) t = Mul(k, s) c = Conv <pads = [1,1,1,1]> (t, v)
        h = Add(a, c) i = Reshape(h, three) j = InstanceNormalization(i, one, zero) y = Reshape(j, four) }"""


def test_a_sum_of_squares_fits_with_an_epsilon_that_takes_up_the_square() -> None:
    model = model_of(GROUPS, {"u": 1.5, "v": 0.3, "m": 1.0})
    assert {"n", "j"} <= wide_of(model)
    found = of(model)
    assert found is not None and not wide_of(found.model)
    assert np.array_equal(values_of(found.model)["y"], values_of(model)["y"])
    epsilons = [node.attributes["epsilon"].as_float() for node in found.model.graph if "epsilon" in node.attributes]
    assert epsilons == pytest.approx([1e-5 / 64] * 2)


def test_an_epsilon_that_would_vanish_is_the_least_number_that_fp16_holds() -> None:
    model = model_of(GROUPS.replace("1e-5", "1e-6"), {"u": 1.5, "v": 0.3, "m": 1.0})
    found = of(model)
    assert found is not None and not wide_of(found.model)
    epsilons = [node.attributes["epsilon"].as_float() for node in found.model.graph if "epsilon" in node.attributes]
    assert epsilons == pytest.approx([2.0**-24, 1e-5 / 64])
    assert np.allclose(values_of(found.model)["y"], values_of(model)["y"], atol=1e-4)


def test_an_epsilon_that_would_vanish_beside_small_values_keeps_its_normalization_fp32() -> None:
    model = model_of(GROUPS.replace("1e-5", "1e-6"), {"u": 1.5, "v": 0.3, "m": 1.0})
    shapes = {**static_shapes(model, {}), "r": (2, 2, 1 << 22)}  # so many squares that each has to be small
    found = rescaled(model, stats_of(values_of(model)), shapes, FP16)
    assert found is not None and "n" in wide_of(found.model)
