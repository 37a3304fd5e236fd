"""Migration: the INT8 error of a layer falls where channels differ, and stays where it cannot."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from trtopt.graph.edit import constant_of
from trtopt.graph.shapes import infer_shapes
from trtopt.precision.observe.calibrate import ChannelStats, product_inputs
from trtopt.precision.ptq.scaling import ExpectedError, smooth
from trtopt.precision.write import quantize_weight

RNG = np.random.default_rng(0)
WIDTH = 32
PLAIN = RNG.standard_normal((WIDTH, 24))
GAMMA = np.where(np.arange(WIDTH) % 16 == 3, 40.0, 1.0)
NORMED = "n = LayerNormalization(x, g, k) y = MatMul(n, w)"


def model_of(nodes: str, source: str = f"float[N, S, {WIDTH}] x", **weights: np.ndarray) -> ir.Model:
    outputs = "float[A, B, C] y" if "S" in source else "float[A, B, C, D] y"
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 20]> g ({source}) => ({outputs}) {{ {nodes} }}'
    )
    for name, array in weights.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array, np.float32), name))
    model = infer_shapes(ir.from_proto(proto))
    for node in model.graph:
        node.name = f"node_{node.outputs[0].name}"
    return model


def constant(model: ir.Model, name: str, index: int) -> np.ndarray:
    array = constant_of(next(node for node in model.graph if node.name == name).inputs[index])
    assert array is not None
    return array


def stats_of(largest: np.ndarray) -> ChannelStats:
    """Of bell-shaped channels, four deviations wide."""
    return ChannelStats(largest.astype(np.float32), np.square(largest / 4).astype(np.float32))


def normed(gamma: np.ndarray = GAMMA, weight: np.ndarray = PLAIN) -> tuple[ir.Model, dict[str, ChannelStats]]:
    return model_of(NORMED, g=gamma, k=np.zeros(WIDTH), w=weight), {"n": stats_of(4 * gamma)}


def int8_error(model: ir.Model) -> float:
    """Noise over signal of the product in INT8, on bell-shaped data behind the normalization."""
    data = np.clip(np.random.default_rng(1).standard_normal((500, WIDTH)), -4, 4) * constant(model, "node_n", 1)
    weight = constant(model, "node_y", 1)
    values, scales = quantize_weight(weight, 1, None)
    step = np.abs(data).max() / 127
    error = np.rint(data / step) * step @ (values * scales) - data @ weight
    return float(np.square(error).sum() / np.square(data @ weight).sum())


def test_an_outlier_channel_is_divided_and_its_weights_are_multiplied() -> None:
    model, stats = normed()
    found = smooth(model, {"node_y"}, stats)
    assert found.changes == 1 and not found.refusals
    before, after = constant(model, "node_n", 1), constant(found.model, "node_n", 1)
    assert after.max() / after.min() < before.max() / before.min() / 2
    np.testing.assert_allclose(
        after[:, None] * constant(found.model, "node_y", 1), before[:, None] * constant(model, "node_y", 1), rtol=1e-5
    )


@pytest.mark.parametrize("share", [0.03, 1.0])
def test_the_int8_error_falls(share: float) -> None:
    """Where the weights of the outliers are small, as trained ones are, and where they are not."""
    weight = np.where((GAMMA > 1)[:, None], share, 1.0) * PLAIN
    model, stats = normed(weight=weight)
    assert int8_error(smooth(model, {"node_y"}, stats).model) < 0.7 * int8_error(model)


def test_the_largest_activation_does_not_grow() -> None:
    model, stats = normed()
    after = constant(smooth(model, {"node_y"}, stats).model, "node_n", 1)
    assert np.abs(after).max() <= GAMMA.max() * 1.0001


def test_nothing_changes_where_nothing_is_gained_or_known() -> None:
    model, stats = normed(gamma=np.ones(WIDTH), weight=np.sign(PLAIN))
    assert smooth(model, {"node_y"}, stats).model is model
    model, stats = normed()
    assert smooth(model, {"node_y"}, {}).model is model
    assert smooth(model, set(), stats).model is model
    zero = {"n": ChannelStats(np.zeros(WIDTH, np.float32), np.zeros(WIDTH, np.float32))}
    assert smooth(model, {"node_y"}, zero).model is model


def test_channels_that_are_always_zero_or_have_no_weights_do_no_harm() -> None:
    gamma, weight = GAMMA.copy(), PLAIN.copy()
    weight[5] = 0
    model = model_of(NORMED, g=gamma, k=np.zeros(WIDTH), w=weight)
    largest = 4 * gamma
    largest[7] = 0
    found = smooth(model, {"node_y"}, {"n": stats_of(largest)}).model
    for name, index in (("node_n", 1), ("node_y", 1)):
        assert np.isfinite(constant(found, name, index)).all()
    assert int8_error(found) < int8_error(model)


REFUSED = {
    "GELU": ("a = MatMul(x, w) b = Gelu(a) e = MatMul(b, v) y = Add(x, e)", "node_e", "Gelu"),
    "a residual behind the norm": (
        "n = LayerNormalization(x, g, k) a = MatMul(n, q) s = Add(n, a) y = LayerNormalization(s, g, k)",
        "node_a", "normalizes it",
    ),
    "another reader of the norm": (
        "n = LayerNormalization(x, g, k) a = MatMul(n, q) b = Sigmoid(n) y = Mul(a, b)", "node_a", "Sigmoid"
    ),
    "the input": ("y = MatMul(x, q)", "node_y", "an input of the network"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_inputs_that_cannot_be_scaled_are_refused_with_the_reason(name: str) -> None:
    nodes, node, reason = REFUSED[name]
    weights = {"w": PLAIN, "v": PLAIN.T, "g": GAMMA, "k": GAMMA, "q": np.eye(WIDTH)}
    model = model_of(
        nodes, **{key: array for key, array in weights.items() if f" {key})" in nodes or f", {key}" in nodes}
    )
    width = constant(model, node, 1).shape[0]
    found = smooth(model, {node}, {tensor: stats_of(np.ones(width)) for tensor in product_inputs(model, {node})})
    assert found.model is model
    ((refused, why),) = [(refusal.node, refusal.reason) for refusal in found.refusals]
    assert refused == node and reason in why


def test_all_readers_share_the_scales_of_a_norm() -> None:
    nodes = "n = LayerNormalization(x, g, k) a = MatMul(n, q) b = MatMul(n, w) y = Concat <axis = -1> (a, b)"
    model = model_of(nodes, g=GAMMA, k=GAMMA, q=PLAIN, w=PLAIN[:, :8])
    found = smooth(model, {"node_a"}, {"n": stats_of(4 * GAMMA)}).model  # the other reader stays 16-bit
    scales = constant(found, "node_n", 1) / GAMMA
    assert scales.max() / scales.min() > 2
    np.testing.assert_allclose(constant(found, "node_n", 2), GAMMA * scales, rtol=1e-5)
    np.testing.assert_allclose(constant(found, "node_b", 1), PLAIN[:, :8] / scales[:, None], rtol=1e-5)


CONVS = {
    "dense": ("y = Conv(x, w)", (6, 8, 3, 3)),
    "grouped": ("y = Conv <group = 2> (x, w)", (6, 4, 3, 3)),
    "transposed": ("y = ConvTranspose <group = 2> (x, w)", (8, 3, 2, 2)),
}


@pytest.mark.parametrize("name", CONVS)
def test_the_slope_of_the_expected_error_is_its_derivative(name: str) -> None:
    nodes, shape = CONVS[name]
    model = model_of(nodes, "float[N, 8, 6, 6] x", w=RNG.standard_normal(shape))
    largest = 2.0 ** RNG.uniform(-2, 2, 8)
    error = ExpectedError(model.graph[0], np.arange(1, 9), stats_of(largest))
    logs = np.append(0, RNG.uniform(-1, 1, 8))
    slope = np.zeros(9)
    error.error(np.exp(logs), slope)
    for index in range(1, 9):
        step = np.zeros(9)
        step[index] = 1e-3
        rise = error.error(np.exp(logs + step), np.zeros(9)) - error.error(np.exp(logs - step), np.zeros(9))
        assert slope[index] == pytest.approx(rise / 2e-3, rel=1e-2, abs=1e-3 * np.abs(slope).max())


def test_the_expected_error_is_what_rounding_costs() -> None:
    model, stats = normed()
    error = ExpectedError(model.graph[1], np.arange(1, WIDTH + 1), stats["n"])
    expected = error.error(np.ones(WIDTH + 1), np.zeros(WIDTH + 1))
    assert int8_error(model) == pytest.approx(expected, rel=0.7)


GELU = "a = MatMul(x, w) b = Gelu(a) e = MatMul(b, v) f = MatMul(b, u) s = Add(e, f) y = Add(x, s)"


def test_a_multiplication_goes_where_nothing_can_be_folded() -> None:
    """One in front of all readers in INT8; the others read the tensor as it was."""
    model = model_of(GELU, w=PLAIN, v=PLAIN.T, u=PLAIN.T)
    stats = {"b": stats_of(GAMMA[:24])}
    found = smooth(model, {"node_e"}, stats, multiply=True)
    (added,) = [node for node in found.model.graph if node.op_type == "Mul"]
    scales = constant(found.model, str(added.name), 1)
    assert scales.max() / scales.min() > 2 and not found.refusals
    assert [user.name for user, _ in added.outputs[0].uses()] == ["node_e"]
    np.testing.assert_allclose(scales[:, None] * constant(found.model, "node_e", 1), PLAIN.T, rtol=1e-4)
    np.testing.assert_allclose(constant(found.model, "node_f", 1), PLAIN.T, rtol=1e-6)
    both = smooth(model, {"node_e", "node_f"}, stats, multiply=True).model
    assert sum(node.op_type == "Mul" for node in both.graph) == 1


def test_no_multiplication_stays_that_gains_nothing() -> None:
    model = model_of(GELU, w=PLAIN, v=np.sign(PLAIN.T), u=PLAIN.T)
    found = smooth(model, {"node_e"}, {"b": stats_of(np.ones(24))}, multiply=True)
    assert not [node for node in found.model.graph if node.op_type == "Mul"]
    assert found.changes == 0


def test_a_norm_that_takes_scales_gets_no_multiplication() -> None:
    model, stats = normed()
    found = smooth(model, {"node_y"}, stats, multiply=True)
    assert found.changes == 1 and not [node for node in found.model.graph if node.op_type == "Mul"]
