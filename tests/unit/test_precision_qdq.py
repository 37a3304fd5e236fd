"""Q/DQ as it is written into the graph, and which nodes the backends' tables send to INT8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx.checker
import onnx_ir as ir
import pytest
from drawn_cases import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from trtopt.graph import cost, edit, invariants
from trtopt.graph.shapes import infer_shapes, static_shapes
from trtopt.precision.decide import decide, int8_flop_share, wanted_tensors
from trtopt.precision.fp16.cast_to_half import cast_to_half
from trtopt.precision.observe.statistics import StatsBuilder, TensorStats
from trtopt.precision.plan import BF16, FP16, NarrowType, PrecisionPlan, QuantizedOp
from trtopt.precision.write import activation_scale, quantize, quantize_weight, scale_channels
from trtopt.support.precision import Precision

RTX, TRT = "tensorrt-rtx", "tensorrt"
RNG = np.random.default_rng(0)


def model(text: str, **weights: np.ndarray) -> ir.Model:
    found = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    for name, array in weights.items():
        edit.add_initializer(found.graph, name, np.asarray(array, np.float32))
        for node in edit.all_nodes(found.graph):
            for index, value in enumerate(node.inputs):
                if value is not None and value.name == name:
                    node.replace_input_with(index, found.graph.initializers[name])
    found = infer_shapes(ir.from_proto(ir.to_proto(found)))
    for node in edit.all_nodes(found.graph):
        node.name = str(node.outputs[0].name)
    return found


def observed(array: np.ndarray) -> TensorStats:
    builder = StatsBuilder(histogram=True)
    builder.update(np.asarray(array, np.float32))
    return builder.finish()


def stats_of(source: ir.Model, backend: str = RTX, **known: np.ndarray) -> dict[str, TensorStats]:
    wanted = wanted_tensors(source, Precision.INT8, backend)
    return {name: observed(known.get(name, RNG.standard_normal(4096))) for name in wanted.histogram | wanted.ranges}


def plan_of(source: ir.Model, backend: str = RTX, **known: np.ndarray) -> PrecisionPlan:
    shapes = static_shapes(source, {})
    return decide(source, Precision.INT8, backend, stats_of(source, backend, **known), shapes)


def refusals(plan: PrecisionPlan) -> Mapping[str, str]:
    return {refusal.node: refusal.reason for refusal in plan.refused}


def placed(plan: PrecisionPlan) -> dict[str, int | None]:
    return {op.node: op.weight_axis for op in plan.quantized}


def typed(source: ir.Model, plan: PrecisionPlan) -> ir.Model:
    done = quantize(source, plan)
    invariants.check(done.model, invariants.signature(source))
    found = cast_to_half(done.model, plan.narrow or FP16, frozenset(plan.wide) | done.wide)
    invariants.check(found, invariants.signature(source))
    onnx.checker.check_model(ir.to_proto(found), full_check=True)
    return found


def count(found: ir.Model, op: str) -> int:
    return sum(node.op_type == op for node in found.graph)


weights = arrays.arrays(
    np.float32,
    arrays.array_shapes(min_dims=2, max_dims=4, max_side=5),
    elements=st.floats(-100, 100, width=32, allow_subnormal=False),
)
types = st.sampled_from([FP16, BF16, None])


@given(weights, st.sampled_from([None, 0, 1]), types, many=150)
def test_weights_are_within_half_a_scale_and_never_use_minus_128(
    weight: np.ndarray, axis: int | None, narrow: NarrowType | None
) -> None:
    values, scales = quantize_weight(weight, axis, narrow)
    assert values.dtype == np.int8 and values.shape == weight.shape and values.min() >= -127
    assert scales.shape == (() if axis is None else (weight.shape[axis],))
    assert (scales > 0).all() and (narrow is None or np.array_equal(narrow.round(scales), scales))
    column = (
        scales.reshape([-1 if index == axis else 1 for index in range(weight.ndim)]) if axis is not None else scales
    )
    assert (np.abs(values * column.astype(np.float64) - weight) <= column / 2 * (1 + 1e-5)).all()


@given(st.floats(0.01, 6e4), types, many=150)
def test_a_scale_is_the_next_representable_one_that_covers_the_range(amax: float, narrow: NarrowType | None) -> None:
    scale = float(activation_scale(amax, narrow))
    assert scale * 127 >= amax * (1 - 1e-6)
    assert scale <= amax / 127 * (1 + (narrow.precision if narrow else 1e-6) * 1.01)
    assert narrow is None or narrow.round(np.array(scale)) == np.float32(scale)


@given(weights, st.floats(0.1, 1e4), types)
def test_scaled_channels_give_the_weight_back_and_stay_in_range(
    weight: np.ndarray, amax: float, narrow: NarrowType | None
) -> None:
    scaled = scale_channels(weight, amax, narrow)
    if scaled is None:
        return
    assert scaled.values.min() >= -127 and (scaled.ratios > 0).all()
    unscaled = scaled.values.reshape(len(weight), -1) * scaled.scale.astype(np.float64)
    steps = scaled.scale * scaled.ratios.astype(np.float64)
    restored = unscaled * scaled.ratios[:, None]
    assert (np.abs(restored - weight.reshape(len(weight), -1)) <= steps[:, None] / 2 * (1 + 1e-5)).all()
    assert narrow is None or amax * np.abs(unscaled).sum(axis=1).max() <= narrow.largest * (1 + 1e-6)


def test_channels_of_zeros_quantize_to_zeros() -> None:
    weight = np.stack([np.zeros((3, 1, 1)), np.ones((3, 1, 1))])
    values, scales = quantize_weight(weight, 0, FP16)
    assert not values[0].any() and (values[1] == 127).all() and scales[0] > 0
    scaled = scale_channels(weight, 1.0, FP16)
    assert scaled is not None and not scaled.values[0].any()


def test_ratios_grow_and_are_given_up_as_the_output_would_overflow() -> None:
    weight = np.stack([np.eye(1, 576).reshape(64, 3, 3), np.full((64, 3, 3), 1e-3)])
    low = scale_channels(weight, 10.0, FP16)
    high = scale_channels(weight, 200.0, FP16)
    assert low is not None and low.ratios[1] == pytest.approx(1e-3, rel=1e-2)
    assert high is not None and high.ratios[1] > low.ratios[1]
    assert scale_channels(np.ones((2, 64, 3, 3)), 200.0, FP16) is None


CONV = """g (float[1,8,6,6] x) => (float[1,8,6,6] y) { c = Conv <pads = [1,1,1,1]> (x, w, b) r = Relu(c)
    d = Conv <pads = [1,1,1,1]> (r, v) a = Add(d, x) y = Relu(a) }"""
SMOOTH = {
    "w": RNG.uniform(-1, 1, (8, 8, 3, 3)) / 9,
    "v": RNG.uniform(-1, 1, (8, 8, 3, 3)) / 9,
    "b": RNG.standard_normal(8),
}


def test_a_residual_block_gets_a_pair_per_convolution_and_the_residual_reads_the_unquantized_tensor() -> None:
    source = model(CONV, **SMOOTH)
    plan = plan_of(source)
    assert placed(plan) == {"c": None, "d": None} and not any(op.multiply for op in plan.quantized)
    found = typed(source, plan)
    assert count(found, "QuantizeLinear") == 2 and count(found, "DequantizeLinear") == 4
    add = next(node for node in found.graph if node.name == "a")
    assert {value.producer().op_type for value in add.inputs} == {"Conv", "Cast"}
    assert not any(value.dtype is ir.DataType.FLOAT for value in found.graph.initializers.values())


def test_a_tensor_read_by_several_nodes_is_quantized_once() -> None:
    source = model(
        "g (float[4,16] x) => (float[4,16] y) { r = Relu(x) a = MatMul(r, w) b = MatMul(r, v) y = Add(a, b) }",
        w=np.eye(16),
        v=np.eye(16) * 2,
    )
    found = typed(source, plan_of(source))
    assert count(found, "QuantizeLinear") == 1 and count(found, "DequantizeLinear") == 3


def test_a_tensor_that_a_wide_and_a_narrow_node_read_is_dequantized_in_both_types() -> None:
    source = model(
        "g (float[4,16] x) => (float[4,16] y) { r = Relu(x) a = MatMul(r, w) b = MatMul(r, w) y = Add(a, b) }",
        w=np.eye(16),
    )
    ops = tuple(QuantizedOp(node, "r", 3.0, 1, "max") for node in "ab")
    found = typed(source, PrecisionPlan(Precision.INT8, FP16, {"a": "because"}, ops))
    matmuls = {node.name: node for node in found.graph if node.op_type == "MatMul"}
    for name, dtype in (("a", ir.DataType.FLOAT), ("b", ir.DataType.FLOAT16)):
        assert [value.dtype for value in matmuls[name].inputs] == [dtype] * 2
        assert {value.producer().op_type for value in matmuls[name].inputs} == {"DequantizeLinear"}


def test_tiny_weights_and_activations_of_a_wide_node_keep_their_scale() -> None:
    """In FP16 the scales would round to its smallest number, and everything to zero."""
    source = model("g (float[4,16] x) => (float[4,16] y) { y = MatMul(x, w) }", w=np.eye(16) * 1e-9)
    plan = plan_of(source, x=RNG.standard_normal(4096) * 1e-8)
    assert "y" in plan.wide and placed(plan) == {"y": 1}
    found = typed(source, plan)
    for node in found.graph:
        if node.op_type == "DequantizeLinear" and edit.constant_of(node.inputs[0]) is not None:
            restored = edit.constant_of(node.inputs[0]) * edit.constant_of(node.inputs[1])
            np.testing.assert_allclose(restored, np.eye(16) * 1e-9, rtol=1e-6, atol=0)
    scales = [edit.constant_of(n.inputs[1]) for n in found.graph if n.op_type == "QuantizeLinear"]
    assert len(scales) == 1 and scales[0] < 1e-9 and scales[0].dtype == np.float32


def test_a_weight_shared_by_nodes_of_different_granularity_is_stored_for_each() -> None:
    source = model(
        """g (float[4,16] x) => (float[4,16] y) { a = MatMul(x, w) b = Gemm <transB = 1> (x, w) c = Gemm(x, w)
        d = Add(a, b) y = Add(d, c) }""",
        w=RNG.standard_normal((16, 16)),
    )
    plan = plan_of(source)
    assert placed(plan) == {"a": 1, "b": 0, "c": 1}
    found = typed(source, plan)
    int8 = [v for v in found.graph.initializers.values() if v.dtype is ir.DataType.INT8 and v.const_value.size > 1]
    assert len(int8) == 2 and "w" not in found.graph.initializers


def test_a_shared_weight_is_dequantized_before_its_first_reader_whatever_the_order_of_the_plan() -> None:
    source = model(
        "g (float[4,16] x) => (float[4,16] y) { a = MatMul(x, w) y = MatMul(a, w) }", w=RNG.standard_normal((16, 16))
    )
    plan = plan_of(source)
    assert len(plan.quantized) == 2
    made: set[str] = {value.name for value in source.graph.inputs}
    found = typed(source, replace(plan, quantized=plan.quantized[::-1]))
    for node in found.graph:
        computed = [value.name for value in node.inputs if value is not None and not value.is_initializer()]
        assert made.issuperset(computed), f"{node.name} reads what is not computed yet"
        made.update(value.name for value in node.outputs)


def test_a_weight_with_another_reader_stays() -> None:
    source = model("g (float[16,16] x) => (float[16,16] y) { a = MatMul(x, w) y = Add(a, w) }", w=np.eye(16))
    assert any(v.dtype is ir.DataType.FLOAT16 and v.const_value.size == 256
               for v in typed(source, plan_of(source)).graph.initializers.values())  # fmt: skip


MERGED = {
    "split": "q, k, v = Split <axis = 2, num_outputs = 3> (h)",
    "slices": "q = Slice(h, i0, i16, i2) k = Slice(h, i16, i32, i2) v = Slice(h, i32, i48, i2)",
    "gathers": """h5 = Reshape(h, five) t = Transpose <perm = [2,0,3,1,4]> (h5) q5 = Gather(t, n0) k5 = Gather(t, n1)
        v5 = Gather(t, n2) q = Reshape(q5, three) k = Reshape(k5, three) v = Reshape(v5, three)""",
}


@pytest.mark.parametrize("form", MERGED)
def test_a_merged_qkv_gets_one_scale_on_tensorrt_for_rtx(form: str) -> None:
    text = f"""g (float[2,4,16] x) => (float[2,4,16] y) <int64[1] i0 = {{0}}, int64[1] i16 = {{16}},
        int64[1] i32 = {{32}}, int64[1] i48 = {{48}}, int64[1] i2 = {{2}}, int64[5] five = {{2,4,3,2,8}},
        int64[3] three = {{2,4,16}}, int64 n0 = {{0}}, int64 n1 = {{1}}, int64 n2 = {{2}}>
        {{ m = MatMul(x, w) h = Add(m, b) {MERGED[form]} s = Add(q, k) u = Add(s, v) y = MatMul(u, o) }}"""
    source = model(text, w=RNG.standard_normal((16, 48)), b=RNG.standard_normal(48), o=np.eye(16))
    assert placed(plan_of(source)) == {"m": None, "y": 1}
    assert placed(plan_of(source, TRT)) == {"m": 1, "y": 1}


def test_products_without_a_two_dimensional_weight() -> None:
    source = model(
        "g (float[3,4,16] x) => (float[3,4,4] y) {a = MatMul(x, w) b = Transpose <perm=[0,2,1]> (a) y = MatMul(a, b)}",
        w=RNG.standard_normal((3, 16, 16)),
    )
    plan = plan_of(source)
    assert placed(plan) == {"a": None}
    assert refusals(plan) == {"y": "no constant weight: attention and other products stay 16-bit"}
    typed(source, plan)


REFUSED_CONVS = {
    "depthwise": ("Conv <group = 8>", (8, 1, 3, 3), "depthwise", 0),
    "thin groups": ("Conv <group = 4>", (8, 2, 3, 3), "groups", 0),
    "transposed": ("ConvTranspose", (8, 8, 3, 3), "FP16", 1),
    "groups of four": ("Conv <group = 2>", (8, 4, 3, 3), None, 0),
}


@pytest.mark.parametrize("name", REFUSED_CONVS)
def test_convolutions_without_a_good_int8_kernel_are_refused_with_the_reason(name: str) -> None:
    op, shape, reason, trt_axis = REFUSED_CONVS[name]
    source = model(f"g (float[1,8,6,6] x) => (float[1,8,A,B] y) {{ y = {op} (x, w) }}", w=RNG.uniform(-1, 1, shape))
    plan = plan_of(source)
    if reason is None:
        assert placed(plan) == {"y": None}
    else:
        assert placed(plan) == {} and reason in refusals(plan)["y"]
    assert placed(plan_of(source, TRT)) == ({} if trt_axis is None else {"y": trt_axis})


def test_a_model_with_qdq_is_not_quantized_twice() -> None:
    source = model(
        """g (float[4,16] x) => (float[4,16] y) <float s = {0.1}, int8 z = {0}, int8[16,16] w = {1}> {
            q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) k = ConstantOfShape <value = int8[1] {3}> (n)
            u = DequantizeLinear(k, s, z) a = MatMul(d, u) y = MatMul(d, v) }""".replace(
            "int8[16,16] w = {1}", "int64[2] n = {16, 16}"
        ),
        v=np.eye(16),
    )
    plan = plan_of(source)
    assert plan.quantized == () and plan.refused == ()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.zeros(64), "zero in every sample"),
        (np.array([1.0, np.inf]), "NaN or infinity"),
    ],
)
def test_activations_that_int8_cannot_hold_are_refused(values: np.ndarray, reason: str) -> None:
    source = model("g (float[4,16] x) => (float[4,16] y) { y = MatMul(x, w) }", w=np.eye(16))
    plan = plan_of(source, x=values)
    assert placed(plan) == {} and reason in refusals(plan)["y"]
    assert "not observed" in refusals(decide(source, Precision.INT8, RTX, {}, {}))["y"]


def test_heavy_tails_are_left_out_as_far_as_their_share_of_the_flop_allows() -> None:
    tails = np.concatenate([RNG.uniform(0.5, 1.5, 100_000), [100.0]])
    source = model(
        "g (float[4,16] x) => (float[4,16] y) { a = MatMul(x, w) b = Relu(a) c = MatMul(b, v) y = MatMul(c, u) }",
        w=np.eye(16),
        v=RNG.standard_normal((16, 128)),
        u=RNG.standard_normal((128, 16)),
    )
    plan = plan_of(source, x=tails)  # 1 of 17 parts of the flop
    assert placed(plan) == {"c": 1, "y": 1} and "too heavy-tailed" in refusals(plan)["a"]
    assert placed(plan_of(source, b=tails)) == {"a": 1, "c": 1, "y": 1}  # 8 of 17


@pytest.mark.parametrize(("channels", "stays"), [(3, True), (8, True), (16, False)])
def test_a_first_layer_of_few_channels_stays_16_bit_on_tensorrt_for_rtx(channels: int, stays: bool) -> None:
    source = model(
        f"""g (float[1,{channels},8,8] x) => (float[1,64,4,4] y) {{
            a = Conv<strides=[2,2], pads=[1,1,1,1]>(x, w) b = Relu(a) c = Conv<pads=[1,1,1,1]>(b, v) d = Relu(c)
            y = Conv<pads=[1,1,1,1]>(d, u) }}""",
        w=RNG.standard_normal((64, channels, 3, 3)),
        v=RNG.standard_normal((64, 64, 3, 3)),
        u=RNG.standard_normal((64, 64, 3, 3)),
    )
    plan = plan_of(source)  # up to 6 % of the flop
    assert ("a" not in placed(plan)) == stays and {"c", "y"} <= set(placed(plan))
    assert ("first layer" in refusals(plan).get("a", "")) == stays
    assert "a" in placed(plan_of(source, backend=TRT))


def test_a_first_layer_of_few_channels_is_quantized_where_it_is_much_of_the_network() -> None:
    source = model(
        """g (float[1,3,8,8] x) => (float[1,16,8,8] y) {
            a = Conv<pads=[1,1,1,1]>(x, w) b = Relu(a) y = Conv(b, v) }""",
        w=RNG.standard_normal((16, 3, 3, 3)),
        v=RNG.standard_normal((16, 16, 1, 1)),
    )
    assert set(placed(plan_of(source))) == {"a", "y"}  # 27 of 43 parts of the flop


def test_the_share_of_int8_counts_eligible_flop_only() -> None:
    source = model(
        """g (float[1,8,6,6] x) => (float[1,8,6,6] y) { a = Conv <pads = [1,1,1,1]> (x, w)
        b = Conv <pads = [1,1,1,1], group = 8> (a, t) c = Conv(z, p) y = Add(b, c) }""".replace("z", "a"),
        w=RNG.uniform(-1, 1, (8, 8, 3, 3)),
        t=RNG.uniform(-1, 1, (8, 1, 3, 3)),
        p=RNG.uniform(-1, 1, (8, 8, 1, 1)),
    )
    flop = cost.flop_by_node(source, static_shapes(source, {}))
    plan = plan_of(source)
    assert int8_flop_share(source, plan, flop) == 1.0
    only = PrecisionPlan(Precision.INT8, FP16, {}, tuple(op for op in plan.quantized if op.node == "a"))
    assert int8_flop_share(source, only, flop) == pytest.approx(9 / 10)
