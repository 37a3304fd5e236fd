"""Q/DQ that a model brings along: the forms it is brought to, the places it leaves, and what is refused."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from trtopt.errors import InvalidModelError
from trtopt.graph import edit, invariants
from trtopt.graph.shapes import infer_in_place
from trtopt.precision.qdq.canonicalize import quantizer_of
from trtopt.precision.qdq.existing import CanonicalQdq, canonicalize_qdq, existing_ranges, existing_types, without_qdq

RTX, TRT = "tensorrt-rtx", "tensorrt"
RNG = np.random.default_rng(0)
WEIGHT = RNG.integers(-127, 128, (16, 16, 3, 3)).astype(np.int8)
SCALES = RNG.uniform(0.5, 1, 16).astype(np.float32)
X = "float[2, 16, 8, 8] x"
Y = "float[2, 16, 8, 8] y"
PARAMETERS = """float s = {0.05}, float t = {0.02}, float u = {0.01}, int8 z = {0}, uint8 zu = {0}, uint8 zm = {128},
uint8 zo = {100}"""
Q = "q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) "
V = "v = DequantizeLinear (w, u, z) "
CONV = "Conv <pads = [1, 1, 1, 1]>"


def net(body: str, inputs: str = X, outputs: str = Y, **constants: np.ndarray) -> ir.Model:
    """A graph with ``w`` an INT8 convolution weight, and the constants of ``PARAMETERS``."""
    header = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>'
    found = ir.from_onnx_text(f"{header}\ng ({inputs}) => ({outputs}) <{PARAMETERS}> {{ {body} }}")
    for name, array in {"w": WEIGHT, **constants}.items():
        value = edit.add_initializer(found.graph, name, np.asarray(array))
        for node in edit.all_nodes(found.graph):
            for index, old in enumerate(node.inputs):
                if old is not None and old.name == name and old is not value:
                    node.replace_input_with(index, value)
    infer_in_place(found)
    for node in edit.all_nodes(found.graph):
        node.name = str(node.outputs[0].name)
    return found


def mended(model: ir.Model, backend: str = RTX) -> CanonicalQdq:
    before = ir.to_proto(model).SerializeToString()
    found = canonicalize_qdq(model, backend)
    assert found is not None
    assert ir.to_proto(model).SerializeToString() == before, "the model itself was changed"
    invariants.check(found.model)
    again = canonicalize_qdq(found.model, backend)
    assert again is None or again.step.changes == 0, again.step.details
    return found


def maker(model: ir.Model, name: str, *path: int) -> ir.Node:
    """The node that makes the inputs at ``path``, from the node that makes ``name`` backwards."""
    node = next(node for node in model.graph if name in {value.name for value in node.outputs})
    for index in path:
        value = node.inputs[index]
        assert value is not None and value.producer() is not None, (name, path)
        node = value.producer()  # type: ignore[assignment]
    return node


def count(model: ir.Model, op_type: str) -> int:
    return sum(node.op_type == op_type for node in model.graph)


def said(found: CanonicalQdq) -> str:
    return "\n".join(found.step.details)


def test_a_model_without_qdq_is_left_alone() -> None:
    assert canonicalize_qdq(net("y = Relu (x)"), RTX) is None


def test_good_qdq_is_kept_as_it_is() -> None:
    found = mended(net(Q + V + f"y = {CONV} (d, v)"))
    assert found.step.changes == 0 and found.step.details == () and found.step.refusals == ()
    assert existing_ranges(found.model) == {"x": pytest.approx(0.05 * 127)}


@pytest.mark.parametrize("reader", ["Relu (d)", "Softmax (d)", "MaxPool <kernel_shape = [1, 1]> (d)", "Add (d, x)"])
def test_qdq_in_front_of_what_does_not_compute_in_int8_is_taken_out(reader: str) -> None:
    found = mended(net(Q + f"y = {reader}"))
    assert {node.op_type for node in found.model.graph} == {reader.split()[0]}
    assert f"{reader.split()[0]} does not compute in 8 bits): x -> y" in said(found)


@pytest.mark.parametrize("backend", [RTX, TRT])
def test_a_residual_that_a_convolution_reads_quantized_stays_so(backend: str) -> None:
    found = mended(net(Q + V + f"c = {CONV} (d, v) y = Add (c, d)"), backend)
    assert found.step.changes == 0
    assert maker(found.model, "y", 1).op_type == "DequantizeLinear"


def test_the_other_side_of_an_addition_is_not_quantized_on_rtx() -> None:
    body = Q + V + f"c = {CONV} (d, v) r = QuantizeLinear (c, t, z) e = DequantizeLinear (r, t, z) y = Add (e, d)"
    found = mended(net(body))
    assert [maker(found.model, "y", index).op_type for index in (0, 1)] == ["Conv", "DequantizeLinear"]
    assert "Add does not compute in 8 bits): c -> y" in said(found)
    assert mended(net(body), TRT).step.changes == 0


def test_an_output_is_not_rounded() -> None:
    model = net(Q + V + f"c = {CONV} (d, v) r = QuantizeLinear (c, t, z) y = DequantizeLinear (r, t, z)")
    found = mended(model)
    assert maker(found.model, "y").op_type == "Conv" and count(found.model, "QuantizeLinear") == 1
    assert found.model.graph.outputs[0].name == "y"


def test_back_to_back_pairs_become_one() -> None:
    model = net(Q + V + f"q2 = QuantizeLinear (d, s, z) e = DequantizeLinear (q2, s, z) y = {CONV} (e, v)")
    found = mended(model)
    assert count(found.model, "QuantizeLinear") == 1
    assert maker(found.model, "y", 0, 0).inputs[0].name == "x"
    assert "quantized a second time" in said(found)


@pytest.mark.parametrize("backend", [RTX, TRT])
def test_a_depthwise_convolution_leaves_int8_with_its_weight(backend: str) -> None:
    weight = RNG.integers(-127, 128, (16, 1, 1, 1)).astype(np.int8)
    model = net(Q + "v = DequantizeLinear (dw, u, z) y = Conv <group = 16> (d, v)", dw=weight)
    found = mended(model, backend)
    assert [node.op_type for node in found.model.graph] == ["Conv"]
    stored = edit.constant_of(maker(found.model, "y").inputs[1])
    assert stored is not None and np.array_equal(stored, weight.astype(np.float32) * np.float32(0.01))


def test_a_transposed_convolution_leaves_int8_on_rtx() -> None:
    body = Q + "v = DequantizeLinear (w, u, z) y = ConvTranspose <pads = [1, 1, 1, 1]> (d, v)"
    assert count(mended(net(body)).model, "QuantizeLinear") == 0
    assert count(mended(net(body), TRT).model, "QuantizeLinear") == 1


def test_a_convolution_whose_weight_is_not_quantized_reads_the_tensor() -> None:
    found = mended(net(Q + f"y = {CONV} (d, f)", f=WEIGHT.astype(np.float32)))
    assert count(found.model, "QuantizeLinear") == 0
    assert "the other operand is not quantized" in said(found)


def test_scales_per_channel_of_a_convolution_become_a_multiplication() -> None:
    body = Q + f"v = DequantizeLinear <axis = 0> (w, k, zk) y = {CONV} (d, v, b)"
    constants = {"k": SCALES * 0.001, "zk": np.zeros(16, np.int8), "b": RNG.standard_normal(16).astype(np.float32)}
    found = mended(net(body, **constants))
    assert [maker(found.model, "y", *path).op_type for path in ((), (0,), (0, 0))] == ["Add", "Mul", "Conv"]
    conv = maker(found.model, "y", 0, 0)
    how = quantizer_of(maker(found.model, "y", 0, 0, 1))
    ratios = edit.constant_of(maker(found.model, "y", 0).inputs[1])
    assert how is not None and how.axis is None and len(conv.inputs) == 2 and ratios is not None
    stored = edit.constant_of(maker(found.model, "y", 0, 0, 1).inputs[0])
    assert np.array_equal(stored, WEIGHT), "the INT8 numbers are those of the model"
    assert np.allclose(ratios.reshape(-1) * how.scale, constants["k"], rtol=1e-6)
    kept = mended(net(body, **constants), TRT)
    assert kept.step.changes == 0


def test_scales_per_channel_stay_where_the_sums_could_overflow_fp16() -> None:
    body = Q + f"v = DequantizeLinear <axis = 0> (w, k, zk) y = {CONV} (d, v)"
    found = mended(net(body, k=SCALES * 10, zk=np.zeros(16, np.int8)))
    assert count(found.model, "Mul") == 0
    assert "beyond FP16" in found.step.refusals[0].reason and found.step.refusals[0].node == "y"


@pytest.mark.parametrize("backend", [RTX, TRT])
def test_scales_of_empty_channels_do_not_underflow(backend: str) -> None:
    scales = SCALES * np.float32(0.001)
    scales[3], scales[5] = 1e-12, 0
    body = Q + f"v = DequantizeLinear <axis = 0> (w, k, zk) y = {CONV} (d, v)"
    found = mended(net(body, k=scales, zk=np.zeros(16, np.int8)), backend)
    for value in found.model.graph.initializers.values():
        array = value.const_value.numpy()
        if array.dtype == np.float32 and array.size in (1, 16):
            assert (array.astype(np.float16) > 0).all()


def test_unsigned_with_the_zero_point_in_the_middle_is_exact() -> None:
    body = "q = QuantizeLinear (x, s, zm) d = DequantizeLinear (q, s, zm) " + V + f"y = {CONV} (d, v)"
    found = mended(net(body))
    how = quantizer_of(maker(found.model, "y", 0, 0))
    assert how is not None and (how.scale, how.zero, how.dtype) == (np.float32(0.05), 0, ir.DataType.INT8)
    assert count(found.model, "Clip") == 0 and "zero point in the middle" in said(found) and found.warnings == ()


@pytest.mark.parametrize(("zero", "low", "high"), [("zu", 0, 255), ("zo", -100, 155)])
def test_another_zero_point_keeps_the_range_and_what_it_clips(zero: str, low: int, high: int) -> None:
    body = f"q = QuantizeLinear (x, s, {zero}) d = DequantizeLinear (q, s, {zero}) " + V + f"y = {CONV} (d, v)"
    found = mended(net(body))
    how = quantizer_of(maker(found.model, "y", 0, 0))
    assert how is not None and how.is_symmetric and how.scale == pytest.approx(high * 0.05 / 127)
    clip = maker(found.model, "y", 0, 0, 0)
    assert clip.op_type == "Clip"
    assert [float(edit.constant_of(value)) for value in clip.inputs[1:]] == pytest.approx([low * 0.05, high * 0.05])  # type: ignore[arg-type]
    assert "coarser step" in said(found) and found.warnings[0] in found.step.details


def test_a_missing_zero_point_is_unsigned_and_needs_no_clip_behind_a_relu() -> None:
    body = "r = Relu (x) q = QuantizeLinear (r, s) d = DequantizeLinear (q, s) " + V + f"y = {CONV} (d, v)"
    found = mended(net(body))
    how = quantizer_of(maker(found.model, "y", 0, 0))
    assert how is not None and how.dtype is ir.DataType.INT8 and how.scale == pytest.approx(255 * 0.05 / 127)
    assert maker(found.model, "y", 0, 0, 0).op_type == "Relu"


@pytest.mark.parametrize("zero", [128, 120, 3])
def test_unsigned_weights_are_recentred(zero: int) -> None:
    numbers = (WEIGHT.astype(np.int32) + 128).astype(np.uint8)
    body = Q + f"v = DequantizeLinear (n, u, zn) y = {CONV} (d, v)"
    found = mended(net(body, n=numbers, zn=np.asarray(zero, np.uint8)))
    dequantize = maker(found.model, "y", 1)
    values, how = edit.constant_of(dequantize.inputs[0]), quantizer_of(dequantize)
    assert values is not None and how is not None and how.is_symmetric and values.dtype == np.int8
    exact = (numbers.astype(np.float64) - zero) * 0.01
    error = np.abs(values * np.float64(how.scale) - exact).max()
    assert error <= (1e-6 if zero == 128 else float(how.scale) / 2 * 1.001)


def test_a_fake_quantized_weight_is_stored_in_int8() -> None:
    weight = RNG.standard_normal((16, 16, 3, 3)).astype(np.float32)
    body = Q + f"p = QuantizeLinear (f, t, z) v = DequantizeLinear (p, t, z) y = {CONV} (d, v)"
    found = mended(net(body, f=weight))
    stored = edit.constant_of(maker(found.model, "y", 1).inputs[0])
    assert stored is not None and np.array_equal(stored, np.clip(np.rint(weight / np.float32(0.02)), -128, 127))
    assert "f" not in found.model.graph.initializers


def test_an_int32_bias_is_stored_in_fp32() -> None:
    bias = RNG.integers(-1000, 1000, 16).astype(np.int32)
    body = Q + V + f"c = DequantizeLinear (b, sb) y = {CONV} (d, v, c)"
    found = mended(net(body, b=bias, sb=np.asarray(0.0005, np.float32)))
    stored = edit.constant_of(maker(found.model, "y").inputs[2])
    assert stored is not None and np.allclose(stored, bias * 0.0005, rtol=1e-6)


def test_a_transposed_weight_is_stored_transposed() -> None:
    weight, scales = RNG.integers(-127, 128, (32, 16)).astype(np.int8), RNG.uniform(0.5, 1, 32).astype(np.float32)
    body = Q + "v = DequantizeLinear <axis = 0> (m, k, zk) p = Transpose <perm = [1, 0]> (v) y = MatMul (d, p)"
    model = net(body, "float[4, 16] x", "float[4, 32] y", m=weight, k=scales, zk=np.zeros(32, np.int8))
    found = mended(model)
    dequantize = maker(found.model, "y", 1)
    how = quantizer_of(dequantize)
    assert dequantize.op_type == "DequantizeLinear" and how is not None and how.axis == 1
    assert np.array_equal(edit.constant_of(dequantize.inputs[0]), weight.T)  # type: ignore[arg-type]


def test_the_microsoft_domain_becomes_onnx() -> None:
    body = "q = com.microsoft.QuantizeLinear (x, s, z) d = com.microsoft.DequantizeLinear (q, s, z) "
    model = net(body + V + f"y = {CONV} (d, v)")
    found = mended(model)
    assert {node.domain for node in found.model.graph} == {""}
    assert "com.microsoft" not in found.model.graph.opset_imports


def test_a_copy_between_the_two_acts_before_them() -> None:
    body = (
        "q = QuantizeLinear (x, s, z) p = MaxPool <kernel_shape = [1, 1]> (q) t2 = Transpose <perm = [0, 1, 3, 2]> (p) "
    )
    found = mended(net(body + "d = DequantizeLinear (t2, s, z) " + V + f"y = {CONV} (d, v)"))
    path = [maker(found.model, "y", *[0] * depth).op_type for depth in range(5)]
    assert path == ["Conv", "DequantizeLinear", "QuantizeLinear", "Transpose", "MaxPool"]


def test_arithmetic_on_integers_is_refused_by_name() -> None:
    body = "q = QuantizeLinear (x, s, z) n = Neg (q) y = DequantizeLinear (n, s, z)"
    with pytest.raises(InvalidModelError, match="Neg computes with 8-bit integers") as caught:
        canonicalize_qdq(net(body), RTX)
    assert caught.value.exit_code == 3 and caught.value.where == "node n" and caught.value.remedy


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        ("q, s2, z2 = DynamicQuantizeLinear (x) y = DequantizeLinear (q, s2, z2)", Y),
        ("y = ConvInteger <pads = [1, 1, 1, 1]> (x, w)", "int32[2, 16, 8, 8] y"),
    ],
)
def test_dynamic_quantization_is_refused_with_what_to_export_instead(body: str, outputs: str) -> None:
    inputs = "int8[2, 16, 8, 8] x" if "ConvInteger" in body else X
    with pytest.raises(InvalidModelError, match="dynamic quantization") as caught:
        canonicalize_qdq(net(body, inputs, outputs), RTX)
    assert caught.value.exit_code == 3 and "--int8 --calib" in caught.value.remedy


@pytest.mark.parametrize("scale", ["0.0", "-1.0", "nan"])
def test_a_scale_that_is_no_number_above_zero_is_refused(scale: str) -> None:
    model = net(Q + V + f"y = {CONV} (d, v)")
    model.graph.initializers["s"].const_value = ir.tensor(np.asarray(float(scale), np.float32), name="s")
    with pytest.raises(InvalidModelError, match="A scale is"):
        canonicalize_qdq(model, RTX)


def test_a_quantized_operator_becomes_one_between_qdq() -> None:
    body = (
        "q = QuantizeLinear (x, s, z) "
        "c = QLinearConv <pads = [1, 1, 1, 1]> (q, s, z, w, k, zk, t, z, b) y = DequantizeLinear (c, t, z)"
    )
    bias = RNG.integers(-1000, 1000, 16).astype(np.int32)
    found = mended(net(body, b=bias, k=SCALES * 0.001, zk=np.zeros(16, np.int8)), TRT)
    conv = maker(found.model, "y")
    assert conv.op_type == "Conv" and maker(found.model, "y", 0, 0).op_type == "QuantizeLinear"
    stored = edit.constant_of(conv.inputs[2])
    assert stored is not None and np.allclose(stored, bias * SCALES * 0.001 * 0.05, rtol=1e-5)


def test_scales_computed_at_run_time_are_left_and_named() -> None:
    body = "m = ReduceMax <keepdims = 0> (x) q = QuantizeLinear (x, m, z) d = DequantizeLinear (q, m, z) y = Relu (d)"
    found = mended(net(body))
    assert [refusal.node for refusal in found.step.refusals] == ["q"] and found.step.changes == 0


def test_sixteen_bit_integers_are_left_out_and_still_clip() -> None:
    body = "q = QuantizeLinear (x, s, h) d = DequantizeLinear (q, s, h) y = Abs (d)"
    found = mended(net(body, h=np.asarray(0, np.uint16)))
    assert [node.op_type for node in found.model.graph] == ["Clip", "Abs"]


ATTENTION = """
qq = QuantizeLinear (a, s, z) qd = DequantizeLinear (qq, s, z) kq = QuantizeLinear (k, s, z)
kd = DequantizeLinear (kq, s, z) o = MatMul (qd, kd) SCORES p = Softmax (i)
pq = QuantizeLinear (p, t, z) pd = DequantizeLinear (pq, t, z) vq = QuantizeLinear (v, s, z)
vd = DequantizeLinear (vq, s, z) c = MatMul (pd, vd)
"""
HEADS = "float[2, 4, 64, {D}] a, float[2, 4, {D}, 64] k, float[2, 4, 64, {D}] v"
BETWEEN = "oq = QuantizeLinear (o, s, z) od = DequantizeLinear (oq, s, z) i = Mul (od, t)"
OUT = (
    "cq = QuantizeLinear (c, s, z) cd = DequantizeLinear (cq, s, z) m = DequantizeLinear (pw, u, z) y = MatMul (cd, m)"
)


@pytest.mark.parametrize(("size", "pairs"), [(32, 5), (80, 1)])
def test_attention_keeps_qdq_where_it_stays_one_kernel(size: int, pairs: int) -> None:
    weight = RNG.integers(-127, 128, (size, 16)).astype(np.int8)
    body = ATTENTION.replace("SCORES", BETWEEN) + OUT
    model = net(body, HEADS.replace("{D}", str(size)), "float[2, 4, 64, 16] y", pw=weight)
    found = mended(model)
    assert count(found.model, "QuantizeLinear") == pairs
    assert maker(found.model, "i", 0).op_type == "MatMul", "nothing lies between the scores and softmax"


def test_attention_without_a_quantized_result_leaves_int8() -> None:
    body = ATTENTION.replace("SCORES", BETWEEN) + "y = Relu (c)"
    found = mended(net(body, HEADS.replace("{D}", "64"), "float[2, 4, 64, 64] y"))
    assert count(found.model, "QuantizeLinear") == 0
    assert "one kernel only with its result quantized" in said(found)


def test_a_mask_that_was_quantized_stays_finite() -> None:
    lowest = np.float32(np.finfo(np.float32).max / 127)
    body = "m = DequantizeLinear (n, big, z) y = Add (x, m)"
    found = mended(net(body, n=np.asarray(-128, np.int8), big=np.asarray(lowest)))
    stored = edit.constant_of(maker(found.model, "y").inputs[1])
    assert stored == np.finfo(np.float32).min


NESTED = """c = Cast <to = 9> (k) y = If (c) <then_branch = t () => (float[2, 16, 8, 8] a) {
q = QuantizeLinear (x, s, ZERO) a = DequantizeLinear (q, s, ZERO) }, else_branch = e () => (float[2, 16, 8, 8] b) {
b = Relu (x) }>"""


def test_nested_graphs_are_left_alone() -> None:
    found = mended(net(NESTED.replace("ZERO", "z"), f"{X}, float k"))
    assert found.step.changes == 0
    assert sum(node.op_type == "QuantizeLinear" for node in edit.all_nodes(found.model.graph)) == 1


def test_a_zero_point_in_a_nested_graph_is_refused() -> None:
    with pytest.raises(InvalidModelError, match="inside an If") as caught:
        canonicalize_qdq(net(NESTED.replace("ZERO", "zu"), f"{X}, float k"), RTX)
    assert caught.value.where == "node q"


@pytest.mark.parametrize("backend", [RTX, TRT])
def test_without_its_qdq_a_model_computes_on_the_tensors_themselves(backend: str) -> None:
    found = mended(net(Q + V + f"c = {CONV} (d, v) y = Relu (c)"), backend).model
    assert existing_types(found) == {"int8"}
    plain = without_qdq(found)
    invariants.check(plain)
    assert [node.op_type for node in plain.graph] == ["Conv", "Relu"]
    data, weight = maker(plain, "c").inputs
    assert data is plain.graph.inputs[0]
    np.testing.assert_array_equal(edit.constant_of(weight), WEIGHT.astype(np.float32) * np.float32(0.01))
    assert count(found, "QuantizeLinear") == 1, "the model itself is not changed"


def test_weights_of_products_that_are_not_quantized_stay_in_8_bit() -> None:
    inputs, outputs = "float[2, 16] x", "float[2, 16] y"
    square = RNG.integers(-127, 128, (16, 16)).astype(np.int8)
    plain = without_qdq(mended(net(V + "y = MatMul (x, v)", inputs, outputs, w=square)).model)
    assert [node.op_type for node in plain.graph] == ["DequantizeLinear", "MatMul"]
