"""Equalization: the ranges of two weights become alike channel by channel, and what cannot be scaled says why."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from trtopt.graph.edit import constant_of
from trtopt.graph.shapes import infer_shapes
from trtopt.precision.ptq.scaling import LARGEST_SCALE, equalize

RNG = np.random.default_rng(0)
FIRST = RNG.standard_normal((8, 4, 3, 3)) * 2.0 ** RNG.uniform(-3, 3, (8, 1, 1, 1))
SECOND = RNG.standard_normal((6, 8, 1, 1)) * 2.0 ** RNG.uniform(-3, 3, (1, 8, 1, 1))


def model_of(nodes: str, **weights: np.ndarray) -> ir.Model:
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g (float[N, 4, 8, 8] x) => (float[N, A, B, C] y) {{ {nodes} }}'
    )
    for name, array in weights.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    model = infer_shapes(ir.from_proto(proto))
    for node in model.graph:
        node.name = f"node_{node.outputs[0].name}"
    return model


def weight_of(model: ir.Model, name: str) -> np.ndarray:
    node = next(node for node in model.graph if node.name == name)
    array = constant_of(node.inputs[1])
    assert array is not None
    return array


def ranges(model: ir.Model) -> tuple[np.ndarray, np.ndarray]:
    """Of each channel between the two convolutions: its range in the first weight and in the second, relative."""
    first, second = np.abs(weight_of(model, "node_a")), np.abs(weight_of(model, "node_y"))
    return first.max(axis=(1, 2, 3)) / first.max(), second.max(axis=(0, 2, 3)) / second.max()


CHAIN = "a = Conv(x, u) r = Relu(a) y = Conv(r, v)"
BOTH = {"node_a", "node_y"}


def test_the_ranges_of_neighbours_become_alike() -> None:
    model = model_of(CHAIN, u=FIRST, v=SECOND)
    found = equalize(model, BOTH)
    made, read = ranges(found.model)
    before = ranges(model)
    np.testing.assert_allclose(made, read, rtol=0.02)
    assert np.abs(np.log(before[0] / before[1])).max() > 1
    assert found.changes == 2 and [refusal.node for refusal in found.refusals] == ["node_y"]
    assert "leaves the network" in found.refusals[0].reason


def test_the_product_of_the_two_weights_stays() -> None:
    model = model_of(CHAIN, u=FIRST, v=SECOND)
    scaled = equalize(model, BOTH).model
    for each in (0, 7):
        before = np.multiply.outer(weight_of(model, "node_a")[each], weight_of(model, "node_y")[:, each])
        after = np.multiply.outer(weight_of(scaled, "node_a")[each], weight_of(scaled, "node_y")[:, each])
        np.testing.assert_allclose(after, before, rtol=1e-5)


def test_a_chain_without_int8_is_left_alone_and_the_model_is_not_touched() -> None:
    model = model_of(CHAIN, u=FIRST, v=SECOND)
    assert equalize(model, set()).model is model
    assert equalize(model, {"node_y"}).changes == 0
    equalize(model, BOTH)
    np.testing.assert_array_equal(weight_of(model, "node_a"), FIRST.astype(np.float32))


def test_a_layer_that_only_16_bit_weights_read_gets_rows_of_one_range() -> None:
    found = equalize(model_of(CHAIN, u=FIRST, v=SECOND), {"node_a"})
    np.testing.assert_allclose(ranges(found.model)[0], 1.0, rtol=0.02)


def test_dead_channels_keep_their_weights() -> None:
    first, second = FIRST.copy(), SECOND.copy()
    first[2], second[:, 5] = 0, 0
    scaled = equalize(model_of(CHAIN, u=first, v=second), BOTH).model
    made, read = weight_of(scaled, "node_a"), weight_of(scaled, "node_y")
    assert np.isfinite(made).all() and np.isfinite(read).all()
    np.testing.assert_array_equal(made[5], first[5].astype(np.float32))
    np.testing.assert_array_equal(read[:, 2], second[:, 2].astype(np.float32))


def test_scales_are_bounded() -> None:
    first, second = FIRST.copy(), SECOND.copy()
    first[0] *= 1e-9
    second[:, 0] *= 1e9
    model = model_of(CHAIN, u=first, v=second)
    ratio = weight_of(equalize(model, BOTH).model, "node_a") / weight_of(model, "node_a")
    assert ratio.max() <= LARGEST_SCALE * 1.001 and ratio.min() >= 0.999 / LARGEST_SCALE


def test_weights_do_not_leave_the_range_of_fp16() -> None:
    first = FIRST.copy()
    first[0] *= 2e-4
    second = np.abs(SECOND)
    second[:, 0] = 3e4
    found = equalize(model_of(CHAIN, u=first, v=second * 2), BOTH)
    for name in BOTH:
        assert np.abs(weight_of(found.model, name)).max() < 65504


REFUSED = {
    "Sigmoid": ("a = Conv(x, u) r = Sigmoid(a) y = Conv(r, v)", "does not commute"),
    "Clip": ("a = Conv(x, u) r = Clip(a, low, high) y = Conv(r, v)", "bound"),
    "computed weight": ("t = Neg(u) a = Conv(x, t) r = Relu(a) y = Conv(r, v)", "no constant"),
    "softmax": ("a = Conv(x, u) r = Softmax <axis = 1> (a) y = Conv(r, v)", "does not commute"),
    "norm": ("a = Conv(x, u) r = InstanceNormalization(a, g, g) y = Conv(r, v)", "normalizes"),
    "product": ("a = Conv(x, u) b = Conv(x, u2) r = Mul(a, b) e = Relu(b) f = Conv(e, v) i = Conv(r, v2) "
                "y = Add(f, i)", "multiplies"),
    "nested graph": (
        "flag = Constant <value_int = 1> () f = Cast <to = 9> (flag) a = Conv(x, u) "
        "r = If (f) <then_branch = one () => (float[N, 8, 6, 6] p) { p = Relu(a) }, "
        "else_branch = two () => (float[N, 8, 6, 6] q) { q = Neg(a) }> y = Conv(r, v)", "nested graph"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_scaled_is_refused_with_the_reason(name: str) -> None:
    nodes, reason = REFUSED[name]
    model = model_of(nodes, u=FIRST, v=SECOND, u2=FIRST, v2=SECOND, g=np.ones(8), low=np.float32(0), high=np.float32(6))
    found = equalize(model, {str(node.name) for node in model.graph})
    node = "node_b" if name == "product" else "node_a"
    if name == "computed weight":
        assert found.changes == 0
    else:
        assert reason in {refusal.node: refusal.reason for refusal in found.refusals}[node]
        np.testing.assert_array_equal(weight_of(found.model, node), FIRST.astype(np.float32))


def test_a_shared_weight_is_left_alone() -> None:
    square = RNG.standard_normal((8, 8, 1, 1)) * 2.0 ** RNG.uniform(-3, 3, (8, 1, 1, 1))
    model = model_of(
        "a = Conv(x, u) b = Conv(a, w) r = Relu(b) e = Conv(r, w) y = Conv(e, v)", u=FIRST, v=SECOND, w=square
    )
    found = equalize(model, {"node_a", "node_b", "node_e", "node_y"})
    np.testing.assert_array_equal(weight_of(found.model, "node_b"), square.astype(np.float32))
    assert any("shared" in refusal.reason for refusal in found.refusals)


def test_a_clip_without_upper_bound_is_a_relu() -> None:
    model = model_of("a = Conv(x, u) r = Clip(a, low) y = Conv(r, v)", u=FIRST, v=SECOND, low=np.float32(0))
    assert equalize(model, BOTH).changes == 2
