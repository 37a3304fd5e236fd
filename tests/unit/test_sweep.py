"""Which axis is the batch, and what another batch does to a network."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from trtopt.errors import UsageError
from trtopt.graph.artifact import InputSpec, input_spec
from trtopt.graph.shapes import infer_shapes, static_shapes
from trtopt.hardware.spec import find_gpu
from trtopt.report.schema.analysis import totals_of
from trtopt.roofline.layer import layer_time, predict
from trtopt.roofline.node_work import GraphTypes
from trtopt.roofline.onnx_layers import layers_of_graph
from trtopt.roofline.sweep import KNEE, BatchSweeper, batch_axis

CONV = """\
g (float[{batch}, 3, 16, 16] x) => (float[{batch}, 10] y)
<float[32, 3, 3, 3] w, float[32, 10] h>
{{ a = Conv<pads=[1, 1, 1, 1]>(x, w) r = Relu(a) p = GlobalAveragePool(r) f = Flatten(p) y = MatMul(f, h) }}
"""
RESHAPED = """\
g (float[{batch}, 6, 8] x) => (y)
<int64[3] split = {{{first}, 12, 4}}, float[4, 4] w>
{{ s = Reshape(x, split) y = MatMul(s, w) }}
"""


def model_of(text: str) -> ir.Model:
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    for info in list(proto.graph.value_info):  # weights declared without values
        if info.name in ("w", "h"):
            dims = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
            proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(dims, np.float32), info.name))
            proto.graph.value_info.remove(info)
    for index, node in enumerate(proto.graph.node):
        node.name = f"{node.op_type}{index}"
    return infer_shapes(ir.from_proto(proto))


def sweeper(text: str, size: int, gpu: str = "L4") -> BatchSweeper:
    model = model_of(text)
    inputs = [input_spec(value) for value in model.graph.inputs]
    shapes = {item.name: tuple(dim if isinstance(dim, int) else size for dim in item.shape) for item in inputs}
    axis = batch_axis(inputs, shapes)
    assert axis is not None
    return BatchSweeper(model, axis, shapes, static_shapes(model, shapes), GraphTypes(base="fp16"), find_gpu(gpu))


def spec(name: str, *shape: int | str) -> InputSpec:
    return InputSpec(name, np.dtype("float32"), shape)


@pytest.mark.parametrize(
    ("inputs", "axes", "symbol"),
    [
        ([spec("x", "N", 3)], (("x", 0),), "N"),
        ([spec("x", "N", 3), spec("y", 5, "N")], (("x", 0), ("y", 1)), "N"),
        ([spec("t", 1), spec("x", "N", 3)], (("x", 0),), "N"),
        ([spec("x", "?", 3), spec("y", "?", "?")], (("x", 0), ("y", 0)), "?"),
        ([spec("x", 2, 3), spec("y", 2), spec("z", 3, 2)], (("x", 0), ("y", 0)), None),
        ([spec("s"), spec("x", 4)], (("x", 0),), None),
    ],
)
def test_the_batch_is_the_first_dynamic_first_axis_or_the_first_axis(
    inputs: list[InputSpec], axes: tuple[tuple[str, int], ...], symbol: str | None
) -> None:
    shapes = {item.name: tuple(dim if isinstance(dim, int) else 8 for dim in item.shape) for item in inputs}
    axis = batch_axis(inputs, shapes)
    assert axis is not None
    assert (axis.axes, axis.symbol) == (axes, symbol)
    assert all(axis.at(shapes, 99)[name][position] == 99 for name, position in axes)


def test_a_network_of_scalars_has_no_batch() -> None:
    assert batch_axis([spec("s")], {"s": ()}) is None


@pytest.mark.parametrize("batch", ["N", "1"])
def test_a_point_is_the_prediction_of_a_network_exported_at_that_batch(batch: str) -> None:
    one = sweeper(CONV.format(batch=batch), 1)
    point = one.sweep((16,)).points[0]
    exported = sweeper(CONV.format(batch="16"), 16)
    layers = layers_of_graph(exported.model, exported.values, exported.precision)
    assert point.predicted_us == pytest.approx(
        sum(layer_time(layer.work, exported.gpu).predicted_us for layer in layers if layer.work)
    )
    assert point.throughput == pytest.approx(16 / point.predicted_us * 1e6)
    totals = totals_of(predict(layers, exported.gpu)[0])
    assert (point.low_us, point.high_us) == pytest.approx((totals.low_us, totals.high_us))
    assert point == exported.sweep((16,)).points[0]


def test_every_size_is_a_point_and_the_knee_is_the_smallest_near_the_best() -> None:
    found = sweeper(CONV.format(batch="N"), 8).sweep((1, 3, 8, 64, 512))
    assert [point.batch for point in found.points] == [1, 3, 8, 64, 512]
    best = max(point.throughput for point in found.points)
    assert found.knee == min(point.batch for point in found.points if point.throughput >= KNEE * best)
    assert [point.activation_bytes for point in found.points] == sorted(p.activation_bytes for p in found.points)


def test_the_best_batch_within_a_budget_keeps_it() -> None:
    one = sweeper(CONV.format(batch="N"), 8)
    points = one.sweep((1, 8, 64, 512)).points
    found = one.sweep((1, 8, 64, 512), budget_us=points[2].predicted_us)
    allowed = [point for point in points if point.predicted_us <= points[2].predicted_us]
    assert found.best_within_budget == max(allowed, key=lambda point: point.throughput).batch
    assert found.budget_us == points[2].predicted_us
    assert one.sweep((1, 8), budget_us=1e-6).best_within_budget is None


def test_knee_and_best_fit_the_memory_of_the_gpu() -> None:
    one = sweeper(CONV.format(batch="N"), 8)
    small = dataclasses.replace(one, gpu=dataclasses.replace(one.gpu, memory_gb=1.2))
    found = small.sweep((1, 64, 4096, 65536), budget_us=1e9)
    assert [point.fits for point in found.points] == [True, True, True, False]
    assert found.knee <= 4096
    assert found.best_within_budget is not None and found.best_within_budget <= 4096


@pytest.mark.parametrize(("batch", "first"), [("N", "0"), ("N", "-1"), ("2", "2"), ("1", "1"), ("2", "-1")])
def test_reshapes_that_keep_the_batch_in_front_follow_it(batch: str, first: str) -> None:
    one = sweeper(RESHAPED.format(batch=batch, first=first), 2)
    _, values = one.at_batch(6)
    assert values["s"] == (6, 12, 4)
    assert values["y"] == (6, 12, 4)


@pytest.mark.parametrize(("batch", "first"), [("N", "8"), ("2", "1")])
def test_a_batch_held_by_a_reshape_is_refused_with_the_node_and_the_remedy(batch: str, first: str) -> None:
    text = RESHAPED.format(batch=batch, first=first).replace("12, 4", "12, 4" if first == "8" else "24, 4")
    one = sweeper(text, 8 if batch == "N" else 2)
    with pytest.raises(UsageError) as caught:
        one.sweep((4,))
    assert "Reshape" in str(caught.value)
    assert "dynamic batch" in caught.value.remedy


def test_a_batch_held_by_a_constant_beside_the_data_is_refused() -> None:
    text = "g (float[2, 4] x) => (y)\n<float[2, 4] w>\n{ y = Concat<axis=1>(x, w) }\n"
    with pytest.raises(UsageError, match="cannot run at batch 4"):
        sweeper(text, 2).sweep((4,))


def test_a_sweep_leaves_the_model_as_it_was() -> None:
    one = sweeper(RESHAPED.format(batch="2", first="2"), 2)
    before = ir.to_proto(one.model).SerializeToString(deterministic=True)
    one.sweep((1, 2, 4))
    assert ir.to_proto(one.model).SerializeToString(deterministic=True) == before
