"""Widening to FP32 and narrowing to 16 bits: every tensor typed, the border of the model unchanged."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
import onnx
import onnx.checker
import onnx.shape_inference
import onnx_ir as ir
import pytest
from onnx_cases import single_operators, some_operators

from trtopt.errors import InvalidModelError, TrtoptError
from trtopt.graph import edit, invariants
from trtopt.graph.shapes import infer_shapes
from trtopt.precision.fp16.cast_to_half import cast_to_half, why_fp32
from trtopt.precision.fp16.hazards import wide_nodes
from trtopt.precision.fp16.to_fp32 import to_fp32
from trtopt.precision.observe.ranges import ValueRanges
from trtopt.precision.plan import BF16, FP16, NarrowType
from trtopt.source.onnx_file import load

HALF, FLOAT, DOUBLE = ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE
BOTH = pytest.mark.parametrize("narrow", [FP16, BF16], ids=["fp16", "bf16"])


def model(text: str, opset: int = 21, named: bool = True) -> ir.Model:
    found = infer_shapes(ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : {opset}, "custom" : 1]>\n{text}'))
    for node in edit.all_nodes(found.graph) if named else ():
        node.name = str(node.outputs[0].name)
    return found


def check_typed(found: ir.Model) -> None:
    """The declared types are those that ONNX infers, strictly."""
    invariants.check(found)
    proto = ir.to_proto(found)
    onnx.checker.check_model(proto, full_check=True)
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)


def narrowed(source: ir.Model, narrow: NarrowType = FP16, wide: Collection[str] = ()) -> ir.Model:
    before = ir.to_proto(source).SerializeToString()
    found = cast_to_half(source, narrow, wide)
    assert ir.to_proto(source).SerializeToString() == before
    assert invariants.signature(found) == invariants.signature(source)
    check_typed(found)
    return found


def dtype_of(found: ir.Model, name: str) -> ir.DataType | None:
    return next(v.dtype for node in edit.all_nodes(found.graph) for v in node.outputs if v.name == name)


def narrow_values(found: ir.Model, narrow: NarrowType = FP16) -> set[str]:
    nodes = [node for node in found.graph if not str(node.name).startswith("trtopt/cast/")]
    return {str(value.name) for node in nodes for value in node.outputs if value.dtype is narrow.dtype}


def test_a_model_in_fp32_is_returned_as_it_is() -> None:
    source = model("g (float[2] x) => (float[2] y) { y = Relu(x) }")
    assert to_fp32(source) is source


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "double"])
def test_a_widened_model_is_fp32_inside_and_keeps_its_border(kind: str) -> None:
    source = model(
        f"""g ({kind}[N,4] x, int64[1] n) => ({kind}[N,4] y, {kind}[M] z) <{kind}[4] w = {{1, 2, 3, 4}}> {{
            a = Mul(x, w) k = Cast <to = 6> (a) b = CastLike(k, a) c = Range_like(n) y = Add(a, b) z = Mul(c, c)
        }}""".replace("Range_like", f"ConstantOfShape <value = {kind}[1] {{2}}>")
    )
    before = ir.to_proto(source).SerializeToString()
    found = to_fp32(source)
    assert ir.to_proto(source).SerializeToString() == before
    assert invariants.signature(found) == invariants.signature(source)
    check_typed(found)
    inside = {str(v.name): v.dtype for node in found.graph for v in node.outputs} | {"w": None}
    declared = next(iter(source.graph.inputs)).dtype
    assert {name for name, dtype in inside.items() if dtype is declared} == {"y", "z"}
    assert found.graph.initializers["w"].dtype is FLOAT


def test_types_given_by_attributes_become_fp32() -> None:
    found = to_fp32(
        model(
            """g (float16[3] x, int64[3,3] e) => (float16[3] y) {
                m = EyeLike <dtype = 10> (e) r = RandomUniform <dtype = 10, shape = [3]> () c = Cast <to = 10> (e)
                k = Constant <value = float16[3] {1, 2, 3}> ()
                a = MatMul(x, m) b = Add(a, r) d = MatMul(b, c) y = Mul(d, k)
            }"""
        )
    )
    check_typed(found)
    assert all(dtype_of(found, name) is FLOAT for name in "mrckabd")


def test_subgraphs_are_widened_with_what_they_capture() -> None:
    found = to_fp32(
        model(
            """g (float16[4] x, bool c) => (float16[4] y, float16[4] z) <int64 n = {3}, float16[4] w = {1, 2, 3, 4}> {
                h = Mul(x, w)
                y = If (c) < then_branch = t () => (float16[4] a) { a = Mul(h, w) },
                             else_branch = e () => (float16[4] b) <float16[4] v = {1, 1, 1, 1}> { b = Mul(x, v) } >
                z = Loop (n, c, h) < body = l (int64 i, bool p, float16[4] s) => (bool q, float16[4] u) {
                    q = Identity(p) u = Mul(s, w) } >
            }"""
        )
    )
    check_typed(found)
    inner = [graph for graph in edit.all_graphs(found.graph) if graph is not found.graph]
    values = [v for graph in inner for v in (*graph.inputs, *graph.initializers.values(), *graph.outputs)]
    assert {value.dtype for value in values} <= {FLOAT, ir.DataType.BOOL, ir.DataType.INT64}
    assert [value.dtype for value in found.graph.outputs] == [HALF, HALF]


def test_borders_that_touch_keep_their_names() -> None:
    source = model("g (float16[2] x) => (float16[2] y, float16[2] z) { y = Identity(x) z = Mul(y, x) }")
    weight = edit.add_initializer(source.graph, "w", np.array([1.5, 2], np.float16))
    source.graph.outputs.extend([source.graph.inputs[0], weight])
    found = to_fp32(source)
    described = [(value.name, value.dtype) for value in found.graph.outputs]
    assert described == [("y", HALF), ("z", HALF), ("x", HALF), ("w", HALF)]
    check_typed(found)


def test_the_lowest_fp64_number_becomes_the_lowest_fp32_number() -> None:
    source = model("g (double[2] x) => (double[2] y) <double[2] low = {0, 0}> { y = Add(x, low) }")
    mask = np.array([np.finfo(np.float64).min, -np.inf])
    source.graph.initializers["low"].const_value = ir.Tensor(mask, name="low")
    (low,) = (v for v in to_fp32(source).graph.initializers.values())
    np.testing.assert_array_equal(edit.constant_of(low), np.array([np.finfo(np.float32).min, -np.inf], np.float32))


def test_reinterpreted_bits_cannot_be_widened() -> None:
    source = model("g (float16[2] x) => (int16[2] y) { a = Mul(x, x) y = BitCast <to = 5> (a) }", opset=26)
    with pytest.raises(InvalidModelError, match="BitCast"):
        to_fp32(source)


@BOTH
def test_a_model_typed_like_the_target_gets_no_idle_cast(narrow: NarrowType) -> None:
    kind = {"fp16": "float16", "bf16": "bfloat16"}[narrow.name]
    source = model(f"g ({kind}[2] x) => ({kind}[2] y) {{ a = Relu(x) y = Mul(a, x) }}")
    found = cast_to_half(to_fp32(source), narrow, ())
    assert [node.op_type for node in found.graph] == ["Relu", "Mul"]
    assert invariants.signature(found) == invariants.signature(source)
    check_typed(found)


def test_fp16_borders_stay_in_a_bf16_model() -> None:
    source = model("g (float16[2] x) => (float16[2] y) { a = Relu(x) y = Mul(a, x) }")
    found = cast_to_half(to_fp32(source), BF16, ())
    assert invariants.signature(found) == invariants.signature(source)
    check_typed(found)
    assert dtype_of(found, "a") is ir.DataType.BFLOAT16


GRAPHS = {
    "resize": (
        """g (float[1,2,4,4] x) => (float[1,2,8,8] y) <float[4] s = {1, 1, 2, 2}, float[8] roi = {0,0,0,0,1,1,1,1}> {
            y = Resize <coordinate_transformation_mode = "tf_crop_and_resize"> (x, roi, s) }""",
        {"y"},
    ),
    "top-k": (
        "g (float[4] x) => (float[2] y, int64[2] i) <int64[1] k = {2}> { t, i = TopK(x, k) y = Relu(t) }",
        {"t", "y"},
    ),
    "where": (
        "g (float[4] x, bool[4] c) => (float[4] y) <float k = {2}> { a = Where(c, x, k) y = Neg(a) }",
        {"a", "y"},
    ),
    "range": (
        """g (float[4] x) => (float[4] y) <float a = {0}, float b = {4}, float d = {1}> {
            r = Range(a, b, d) y = Mul(x, r) }""",
        {"y"},
    ),
    "from integers": ("g (int64[4] x) => (float[4] y) { a = Cast <to = 1> (x) y = Mul(a, a) }", {"a", "y"}),
    "constant of shape": (
        "g (int64[1] n) => (float[M] y) { a = ConstantOfShape <value = float[1] {3}> (n) y = Mul(a, a) }",
        {"a", "y"},
    ),
    "zeros of shape": ("g (int64[1] n) => (float[M] y) { a = ConstantOfShape(n) y = Mul(a, a) }", {"a", "y"}),
    "split": ("g (float[4] x) => (float[2] y) { a, b = Split <num_outputs = 2> (x) y = Add(a, b) }", {"a", "b", "y"}),
    "batch normalization": (
        """g (float[1,2,4] x) => (float[1,2,4] y) <float[2] s = {1, 2}> { y = BatchNormalization(x, s, s, s, s) }""",
        {"y"},
    ),
    "cast like": ("g (float[2] x, int64[2] i) => (float[2] y) { a = CastLike(i, x) y = Mul(a, x) }", {"a", "y"}),
    "einsum": ('g (float[2,3] x) => (float[2,2] y) { y = Einsum <equation = "ij,kj->ik"> (x, x) }', {"y"}),
    "dropout": ("g (float[2] x) => (float[2] y) <float r = {0.5}> { a, m = Dropout(x, r) y = Neg(a) }", {"a", "y"}),
    "quantized already": (
        """g (float[2] x) => (float[2] y) <float s = {0.5}, int8 z = {0}> {
            q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) y = Neg(d) }""",
        {"d", "y"},
    ),
    "generator": (
        "g (float[2] x) => (float[2] y) { r = RandomNormalLike(x) u = RandomUniformLike <dtype = 1> (x) "
        "b = Bernoulli(r) a = Add(u, b) y = Mul(a, x) }",
        {"r", "u", "b", "a", "y"},
    ),
    "LSTM": (
        """g (float[3,1,2] x, float[1,8,2] w, float[1,8,2] r) => (float[3,1,1,2] y, float[1,1,2] h) {
            a, h = LSTM <hidden_size = 2> (x, w, r) y = Tanh(a) }""",
        {"a", "h", "y"},
    ),
    "boxes": (
        """g (float[1,6,4] x, float[1,1,6] s) => (int64[K,3] y) <int64 k = {3}, float t = {0.5}> {
            b = Relu(x) y = NonMaxSuppression(b, s, k, t) }""",
        {"b"},
    ),
    "one value, two readers outside and inside": (
        "g (float[2] x) => (float[2] y, float[2] z) { y = Relu(x) z = Mul(y, y) }",
        {"y", "z"},
    ),
}


@BOTH
@pytest.mark.parametrize("name", GRAPHS)
def test_each_operator_gets_the_types_its_schema_wants(name: str, narrow: NarrowType) -> None:
    text, expected = GRAPHS[name]
    found = narrowed(model(text), narrow)
    outputs = {str(value.name) for value in found.graph.outputs}
    expected = {f"{each}_{narrow.name}" if each in outputs else each for each in expected}
    have = narrow_values(found, narrow)
    assert have == expected if narrow is FP16 else have <= expected  # BF16 is missing in some schemas


def test_dequantize_with_a_type_of_its_own_is_retyped() -> None:
    source = model(
        """g (int8[2] x) => (float[2] y) <float s = {0.5}> { d = DequantizeLinear <output_dtype = 1> (x, s)
        y = Neg(d) }""",
        opset=23,
    )
    assert dtype_of(narrowed(source), "d") is HALF


def test_what_control_flow_captures_comes_back_as_fp32() -> None:
    source = model(
        """g (float[4] x, bool c) => (float[4] y, float[4] z) <int64 n = {2}> {
            h = Relu(x)
            y = If (c) < then_branch = t () => (float[4] a) { a = Neg(h) },
                         else_branch = e () => (float[4] b) { b0 = If (c) <
                            then_branch = t2 () => (float[4] a2) { a2 = Exp(h) },
                            else_branch = e2 () => (float[4] b2) { b2 = Abs(h) } > b = Relu(b0) } >
            w = Loop (n, c, h) < body = l (int64 i, bool p, float[4] s) => (bool q, float[4] u) {
                q = Identity(p) u = Mul(s, h) } >
            z = Mul(w, h)
        }"""
    )
    found = narrowed(source)
    assert narrow_values(found) == {"h", "z_fp16"}
    casts = [node for node in found.graph if node.op_type == "Cast" and node.inputs[0].name == "h"]
    assert len(casts) == 1, "one cast back serves every reader"


def test_a_weight_shared_by_wide_and_narrow_nodes_is_stored_twice() -> None:
    source = model("g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { a = Mul(x, w) y = Add(a, w) }")
    found = narrowed(source, wide={"y"})
    assert {value.dtype for value in found.graph.initializers.values()} == {FLOAT, HALF}
    found = narrowed(source)
    assert [value.dtype for value in found.graph.initializers.values()] == [HALF]


def test_an_initializer_that_is_a_graph_output_stays() -> None:
    source = model("g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Mul(x, w) }")
    source.graph.outputs.append(source.graph.initializers["w"])
    found = narrowed(source)
    assert {value.dtype for value in found.graph.initializers.values()} == {FLOAT, HALF}


def test_operators_of_other_domains_stay_fp32() -> None:
    source = model("g (float[2] x) => (float[2] y) { a = Relu(x) b = custom.Thing(a) y = Relu(b) }")
    value = next(node for node in source.graph if node.op_type == "Thing").outputs[0]
    value.type, value.shape = ir.TensorType(FLOAT), ir.Shape([2])
    found = cast_to_half(source, FP16, ())
    invariants.check(found)
    assert dtype_of(found, "b") is FLOAT and narrow_values(found) == {"a", "y_fp16"}


def test_hard_swish_stays_fp32_in_bf16_since_tensorrt_for_rtx_refuses_it() -> None:
    source = model("g (float[2] x) => (float[2] y) { a = HardSwish(x) y = Relu(a) }")
    assert narrow_values(narrowed(source, BF16), BF16) == {"y_bf16"}
    assert "a_fp16" not in narrow_values(narrowed(source)) and "a" in narrow_values(narrowed(source))
    assert "HardSwish" in str(why_fp32(source.graph[0], BF16)) and why_fp32(source.graph[0], FP16) is None


def test_bounds_beyond_fp16_saturate() -> None:
    source = model(
        "g (float[2] x) => (float[2] y) <float a = {-3.4e38}, float b = {3.4e38}> { c = Relu(x) y = Clip(c, a, b) }"
    )
    assert wide_nodes(source, ValueRanges({}, {}), FP16) == {}
    constants = [float(edit.constant_of(v)) for v in narrowed(source).graph.initializers.values()]
    assert constants == [-65504.0, 65504.0]


UNINFERABLE = ("test_mvn",)
"""ONNX's own inference fails on the function it defines MeanVarianceNormalization by, in FP32 too."""


@pytest.mark.parametrize(
    "operators", [some_operators, pytest.param(single_operators, marks=pytest.mark.long)], ids=["some", "all"]
)
@BOTH
def test_every_operator_of_the_onnx_backend_tests_is_typed_right(
    narrow: NarrowType, operators: Callable[[], list[tuple[str, onnx.ModelProto]]], tmp_path: Path
) -> None:
    failures, typed, narrow_count = {}, 0, 0
    cases = operators()
    for name, proto in cases:
        onnx.save(proto, tmp_path / "m.onnx")
        try:
            base = to_fp32(source := load(tmp_path / "m.onnx").model)
        except TrtoptError:
            continue  # sequences as inputs, bits reinterpreted: refused with a reason
        try:
            found = cast_to_half(base, narrow, wide_nodes(base, ValueRanges({}, {}), narrow))
            if name not in UNINFERABLE:
                check_typed(found)
            assert invariants.signature(found) == invariants.signature(source)
        except Exception as error:  # noqa: BLE001 -- all failures are reported together
            failures[name] = f"{type(error).__name__}: {error}"
            continue
        typed += 1
        narrow_count += bool(narrow_values(found, narrow))
    assert failures == {}
    assert typed > 0.685 * len(cases) and narrow_count > 0.343 * len(cases)
