"""FP16 and BF16 in one graph, and what stays FP32 because of its neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx
import onnx.checker
import onnx_ir as ir
import pytest

from trtopt.graph import edit, invariants
from trtopt.graph.shapes import infer_shapes, static_shapes
from trtopt.precision.decide import with_bfloat
from trtopt.precision.fp16.cast_to_half import cast_to_half, why_fp32
from trtopt.precision.fp16.hazards import wide_nodes
from trtopt.precision.observe.ranges import ValueRanges
from trtopt.precision.observe.statistics import TensorStats
from trtopt.precision.plan import BF16, FP16, NarrowType, PrecisionPlan, QuantizedOp
from trtopt.precision.write import apply_plan
from trtopt.support.precision import Precision

FLOAT, HALF, BFLOAT = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16


def model(text: str, **weights: np.ndarray) -> ir.Model:
    found = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    for name, array in weights.items():
        value = found.graph.initializers[name]
        value.const_value = ir.Tensor(array.astype(np.float32), name=name)
        value.shape = ir.Shape(array.shape)
    found = infer_shapes(found)
    for node in edit.all_nodes(found.graph):
        node.name = str(node.outputs[0].name)
    return found


def seen(high: float, smallest: float = 1e-2) -> TensorStats:
    return TensorStats(count=64, minimum=-high, maximum=high, zeros=0, nonfinite=0, smallest_nonzero=smallest)


def spans(source: ir.Model, stats: Mapping[str, TensorStats]) -> ValueRanges:
    return ValueRanges(stats, static_shapes(source, {}))


def types(found: ir.Model) -> dict[str, str]:
    """Type of every value that a node of the source computes, and of every weight."""
    values = [value for node in found.graph for value in node.outputs if "trtopt/cast/" not in str(node.name)]
    names = {FLOAT: "fp32", HALF: "fp16", BFLOAT: "bf16"}
    return {str(value.name): names[value.dtype] for value in (*values, *found.graph.initializers.values())}


def checked(found: ir.Model) -> ir.Model:
    invariants.check(found)
    onnx.checker.check_model(ir.to_proto(found), full_check=True)
    return found


FEED_FORWARD = """g (float[2,8] x) => (float[2,8] y) <float[8,8] u = {0}, float[8,8] d = {0}> {
    n = Tanh(x) h = MatMul(n, u) r = Relu(h) o = MatMul(r, d) y = Add(o, x) }"""
EYE = {"u": np.eye(8), "d": np.eye(8)}


def test_two_narrow_types_meet_in_casts_and_share_weights_by_type() -> None:
    source = model(FEED_FORWARD.replace("MatMul(r, d)", "MatMul(r, u)").replace(", float[8,8] d = {0}", ""), u=EYE["u"])
    before = ir.to_proto(source).SerializeToString()
    found = checked(cast_to_half(source, FP16, {"r"}, {"h"}))
    assert ir.to_proto(source).SerializeToString() == before
    assert invariants.signature(found) == invariants.signature(source)
    assert types(found) == {
        **{"n": "fp16", "h": "bf16", "r": "fp32", "o": "fp16", "y_fp16": "fp16"},
        **{"u_bf16": "bf16", "u_fp16": "fp16"},
    }
    casts = {(node.inputs[0].dtype, node.outputs[0].dtype) for node in found.graph if node.op_type == "Cast"}
    assert casts == {(FLOAT, HALF), (HALF, BFLOAT), (BFLOAT, FLOAT), (HALF, FLOAT)}


def test_a_bf16_value_that_leaves_the_network_is_fp32_there() -> None:
    found = checked(cast_to_half(model(FEED_FORWARD, **EYE), FP16, (), {"y"}))
    assert types(found)["y_bf16"] == "bf16" and found.graph.outputs[0].dtype is FLOAT


def test_what_a_subgraph_captures_from_bf16_is_fp32() -> None:
    source = model(
        """g (float[2] x, bool c) => (float[2] y) { a = Neg(x) y = If (c) <
            then_branch = t () => (float[2] p) { p = Abs(a) },
            else_branch = e () => (float[2] q) { q = Neg(a) } > }"""
    )
    found = checked(cast_to_half(source, FP16, (), {"a"}))
    assert types(found)["a"] == "bf16" and types(found)["y"] == "fp32"


CONV = "g (float[1,4,8,8] x) => (float[1,4,6,6] y) <float[4,4,3,3] w = {0}> { c = Conv(x, w) y = Relu(c) }"


def test_a_convolution_runs_in_bf16_in_the_opset_that_has_it() -> None:
    source = model(CONV, w=np.ones((4, 4, 3, 3)))
    assert why_fp32(source.graph[0], BF16) is None
    found = checked(cast_to_half(source, BF16, ()))
    assert types(found) == {"c": "bf16", "y_bf16": "bf16", "w_bf16": "bf16"}
    assert found.graph.opset_imports[""] == 22
    assert cast_to_half(source, FP16, ()).graph.opset_imports[""] == 21


def test_an_older_opset_stays_and_so_do_its_convolutions() -> None:
    source = model(CONV, w=np.ones((4, 4, 3, 3)))
    source.graph.opset_imports[""] = 17
    assert "Conv has no bf16 form" in str(why_fp32(source.graph[0], BF16))
    assert cast_to_half(source, BF16, ()).graph.opset_imports[""] == 17


@pytest.mark.parametrize("op", ["ConvTranspose", "HardSwish", "LpNormalization", "LpPool", "Mish"])
def test_what_the_compiler_refuses_in_bf16_stays_fp32(op: str) -> None:
    inputs = "x, w" if op == "ConvTranspose" else "x"
    options = "<kernel_shape = [3,3]>" if op == "LpPool" else ""
    source = model(f"g (float[1,4,8,8] x) => (y) <float[4,4,1,1] w = {{0}}> {{ y = {op} {options} ({inputs}) }}")
    assert "refuses" in str(why_fp32(source.graph[0], BF16)) and why_fp32(source.graph[0], FP16) is None


HOT = {"x": seen(8), "n": seen(1), "h": seen(2e5), "r": seen(2e5), "o": seen(8), "y": seen(16)}


def test_hot_products_run_in_bf16_and_what_lies_between_in_fp32() -> None:
    source = model(FEED_FORWARD, **EYE)
    known = spans(source, HOT)
    plan = PrecisionPlan(Precision.FP16, FP16, wide_nodes(source, known, FP16))
    assert set(plan.wide) == {"h", "r", "o"}
    found = with_bfloat(source, plan, known)
    assert set(found.bfloat) == {"h", "o"} and set(found.wide) == {"r"}
    assert "values up to 2e+05 in h" in found.bfloat["h"]
    assert types(checked(apply_plan(source, found))) == {
        **{"n": "fp16", "h": "bf16", "r": "fp32", "o": "bf16", "y_fp16": "fp16"},
        **{"u_bf16": "bf16", "d_bf16": "bf16"},
    }


def test_weights_that_fp16_does_not_hold_run_in_bf16() -> None:
    source = model(FEED_FORWARD, u=np.eye(8) * 1e-8, d=np.eye(8) * 1e5)
    known = spans(source, dict.fromkeys("xnhroy", seen(1)))
    plan = PrecisionPlan(Precision.FP16, FP16, wide_nodes(source, known, FP16))
    assert {"h", "r", "o", "y"} <= set(plan.wide), "who reads them is kept with them"
    found = with_bfloat(source, plan, known)
    assert set(found.bfloat) == {"h", "o"} and not found.wide, "and is free again"


def test_what_needs_precision_or_is_int8_or_has_no_alternative_is_left_alone() -> None:
    source = model(FEED_FORWARD, **EYE)
    known = spans(source, HOT)
    wide = wide_nodes(source, known, FP16)
    op = QuantizedOp("h", "n", 1.0, None, "max")
    assert set(with_bfloat(source, PrecisionPlan(Precision.INT8, FP16, wide, (op,)), known).bfloat) == {"o"}
    bf16 = PrecisionPlan(Precision.BF16, BF16, wide)
    assert with_bfloat(source, bf16, known) is bf16
    fp32 = PrecisionPlan(Precision.FP32)
    assert with_bfloat(source, fp32, known) is fp32
    head = model(
        "g (float[2,8] x) => (float[2,8] y) <float[8,8] u = {0}> { h = MatMul(x, u) y = Softmax(h) }", u=EYE["u"]
    )
    scores = wide_nodes(head, spans(head, {}), FP16)
    assert set(scores) == {"h", "y"}
    assert with_bfloat(head, PrecisionPlan(Precision.FP16, FP16, scores), spans(head, {})).bfloat == {}


def test_an_fp32_product_between_two_casts_is_an_fp16_one_already() -> None:
    source = model(FEED_FORWARD, u=np.eye(8) * 1e4, d=np.eye(8))
    known = spans(source, dict.fromkeys("xhroy", seen(8)) | {"n": seen(8)})
    plan = PrecisionPlan(Precision.FP16, FP16, wide_nodes(source, known, FP16))
    assert set(plan.wide) == {"h"} and "partial sum" in plan.wide["h"]
    assert with_bfloat(source, plan, known).bfloat == {}
    assert set(with_bfloat(source, replace(plan, wide={**plan.wide, "r": "because"}), known).bfloat) == {"h"}


def test_the_products_of_attention_stay_fp32() -> None:
    source = model(
        """g (float[1,8,8] q, float[1,8,8] k) => (float[1,8,8] y) {
            a = Relu(q) b = Relu(k) s = MatMul(a, b) m = Neg(s) p = Softmax(m) y = MatMul(p, b) }"""
    )
    known = spans(
        source, {"a": seen(300), "b": seen(300), "s": seen(1e5), "m": seen(1e5), "p": seen(1), "y": seen(300)}
    )
    plan = PrecisionPlan(Precision.FP16, FP16, wide_nodes(source, known, FP16))
    assert "s" in plan.wide
    assert with_bfloat(source, plan, known) is plan


@pytest.mark.parametrize(("narrow", "limit"), [(FP16, 16.0), (BF16, 2.0)], ids=["fp16", "bf16"])
@pytest.mark.parametrize(
    ("tail", "kept"),
    [
        ("y = Sin(a)", {"p", "a", "y"}),
        ("y = Cos(a)", {"p", "a", "y"}),
        ("f = Floor(a) y = Neg(f)", {"p", "a", "f"}),
        ("f = Mod <fmod = 1> (a, k) y = Neg(f)", {"p", "a", "f"}),
        ("i = Cast <to = 7> (a) f = Cast <to = 1> (i) y = Neg(f)", {"p", "a", "i"}),
    ],
)
def test_operands_whose_absolute_error_counts_are_computed_in_fp32(
    tail: str, kept: set[str], narrow: NarrowType, limit: float
) -> None:
    source = model(
        f"""g (float[4,1] x) => (float[4,4] y) <float[1,4] w = {{1,2,3,4}}, float k = {{0.5}}> {{
            p = MatMul(x, w) a = Add(p, k) {tail} }}"""
    )
    small = dict.fromkeys(["x", "p", "a", "f", "y"], seen(1))
    found = wide_nodes(source, spans(source, small | {"a": seen(limit * 1.01), "p": seen(limit)}), narrow)
    assert set(found) == kept
    assert any("rounding error" in reason for reason in found.values())
    assert wide_nodes(source, spans(source, small | {"a": seen(limit * 0.99)}), narrow) == {}


def test_a_layer_before_a_sine_is_no_chain_of_positions() -> None:
    source = model(
        """g (float[4,512] x) => (float[4,512] y) <float[512,512] w = {0}> {
            a = Relu(x) p = MatMul(a, w) y = Sin(p) }""",
        w=np.eye(512),
    )
    assert set(wide_nodes(source, spans(source, {"a": seen(8), "p": seen(40)}), FP16)) == {"y"}


def test_who_reads_a_product_with_weights_that_do_not_fit_stays_fp32_with_it() -> None:
    """TensorRT for RTX would round the weights of a product between two Casts (tests/rtx)."""
    text = """g (float[2,8] x) => (float[2,8] y) <float[8,8] u = {0}, int64[2] s = {8, 2}, int64[2] t = {2, 8}> {
        h = MatMul(x, u) a = Reshape(h, s) b = Reshape(a, t) r = Relu(b) y = Neg(r) }"""
    stats = dict.fromkeys("xhry", seen(1))
    source = model(text, u=np.eye(8) * 1e-8)
    found = wide_nodes(source, spans(source, stats), FP16)
    assert set(found) == {"h", "a", "b", "r"} and "weights fp16 does not hold" in found["r"]
    source = model(text, u=np.eye(8))
    assert wide_nodes(source, spans(source, stats), FP16) == {}
    hot = wide_nodes(source, spans(source, stats | {"x": seen(6e4)}), FP16)
    assert set(hot) == {"h"}, "its weights fit: nothing is lost between two Casts"


def test_a_long_running_sum_stays_fp32() -> None:
    text = "g (float[1,{0}] x) => (float[1,{0}] y) <int64 k = {{1}}> {{ a = CumSum(x, k) y = Tanh(a) }}"
    for count, narrow, kept in [(128, FP16, set()), (129, FP16, {"a"}), (16, BF16, set()), (17, BF16, {"a"})]:
        source = model(text.format(count))
        assert set(wide_nodes(source, spans(source, dict.fromkeys("xay", seen(1))), narrow)) - {"y"} == kept


def test_who_ranks_what_stays_fp32_reads_it_in_fp32() -> None:
    source = model("g (float[4,8] x) => (int64[4,1] i) { a = Exp(x) i = ArgMax <axis = 1> (a) }")
    found = wide_nodes(source, spans(source, {"x": seen(8), "a": seen(3e3)}), FP16)
    assert set(found) == {"a", "i"} and "ties" in found["i"]
