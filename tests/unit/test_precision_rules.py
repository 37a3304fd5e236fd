"""The table of 8-bit placement: which nodes each backend sends to INT8 and FP8, and why the others stay."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from trtopt.graph import edit
from trtopt.graph.shapes import infer_shapes, static_shapes
from trtopt.precision import rules
from trtopt.precision.decide import decide, wanted_tensors
from trtopt.precision.fp16.heads import is_prediction_head
from trtopt.precision.observe.statistics import StatsBuilder
from trtopt.precision.plan import PrecisionPlan
from trtopt.precision.regions import attention_products
from trtopt.support.precision import Precision

RTX, TRT = "tensorrt-rtx", "tensorrt"
RNG = np.random.default_rng(0)


def model(text: str, **weights: tuple[int, ...]) -> ir.Model:
    """A model of the text of a graph, its weights random; a node is called as its first output."""
    found = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    for name, shape in weights.items():
        array = (RNG.uniform(-1, 1, shape) / max(1, np.prod(shape[1:])) ** 0.5).astype(np.float32)
        edit.add_initializer(found.graph, name, array)
        for node in edit.all_nodes(found.graph):
            for index, value in enumerate(node.inputs):
                if value is not None and value.name == name:
                    node.replace_input_with(index, found.graph.initializers[name])
    found = infer_shapes(ir.from_proto(ir.to_proto(found)))
    for node in edit.all_nodes(found.graph):
        node.name = str(node.outputs[0].name)
    return found


def node_of(text: str, name: str = "y", **weights: tuple[int, ...]) -> ir.Node:
    return next(node for node in model(text, **weights).graph if node.name == name)


def conv(shape: tuple[int, ...], attributes: str = "", channels: int = 0, size: int = 16, op: str = "Conv") -> ir.Node:
    """One layer between two ReLUs."""
    channels = channels or shape[1 if op == "Conv" else 0]
    text = f"""g (float[2,{channels},{size},{size}] x) => (float[N,K,A,B] z)
        {{ r = Relu(x) y = {op} <{attributes}> (r, w) z = Relu(y) }}""".replace(" <>", "")
    return node_of(text, w=shape)


def matmul(rows: int, k: int, n: int) -> ir.Node:
    return node_of(f"g (float[{rows},{k}] x) => (float[{rows},{n}] z) {{ y = MatMul(x, w) z = Relu(y) }}", w=(k, n))


def plan_of(source: ir.Model, backend: str, dtype: Precision = Precision.INT8, **ranges: float) -> PrecisionPlan:
    """The plan with everything observed as even noise within 1, or within a range."""
    stats = {}
    wanted = wanted_tensors(source, Precision(dtype), backend)
    for name in wanted.histogram | wanted.ranges:
        builder = StatsBuilder(histogram=True)
        builder.update((RNG.uniform(-1, 1, 4096) * ranges.get(name, 1.0)).astype(np.float32))
        stats[name] = builder.finish()
    return decide(source, Precision(dtype), backend, stats, static_shapes(source, {}))


CONVS = {
    "a plain one": (conv((64, 32, 3, 3)), ("per-tensor", "per-channel"), ("per-tensor", "per-tensor")),
    "depthwise": (conv((32, 1, 3, 3), "group = 32", channels=32), (None, "per-channel"), (None, None)),
    "depthwise 1x1": (conv((32, 1, 1, 1), "group = 32", channels=32), (None, None), (None, None)),
    "groups of 3": (conv((32, 3, 3, 3), "group = 8", channels=24), (None, "per-channel"), (None, None)),
    "groups of 4": (conv((32, 4, 3, 3), "group = 8", channels=32), ("per-tensor", "per-channel"), ("per-tensor", None)),
    "few channels": (conv((64, 6, 3, 3)), ("per-tensor", "per-channel"), ("per-tensor", None)),
    "very few channels": (conv((12, 6, 3, 3)), ("per-tensor", None), ("per-tensor", None)),
    "few, not square": (conv((64, 8, 5, 1)), ("per-tensor", None), ("per-tensor", None)),
    "16 channels": (conv((64, 16, 3, 3)), ("per-tensor", "per-channel"), ("per-tensor", None)),
    "a large window": (conv((64, 32, 7, 7)), ("per-tensor", "per-channel"), ("per-tensor", None)),
    "transposed": (conv((32, 64, 3, 3), op="ConvTranspose"), (None, "per-channel"), (None, None)),
    "a product": (matmul(64, 64, 64), ("per-channel", "per-channel"), ("per-tensor", "per-tensor")),
    "a product of one row": (matmul(1, 64, 64), ("per-channel", None), ("per-tensor", None)),
    "a product to one column": (matmul(64, 64, 1), ("per-channel", None), ("per-tensor", None)),
    "a product to ten columns": (matmul(64, 64, 10), ("per-channel", None), ("per-tensor", None)),
}


@pytest.mark.parametrize("name", CONVS)
def test_each_backend_and_type_has_its_own_verdict(name: str) -> None:
    node, *expected = CONVS[name]
    types: tuple[Precision, ...] = ("int8", "fp8")
    found = [[rules.placement(node, backend, dtype) for backend in (RTX, TRT)] for dtype in types]
    assert [tuple(item.granularity for item in row) for row in found] == expected
    assert all(len(item.reason) > 20 for row in found for item in row)


def test_a_first_layer_may_have_few_channels_on_tensorrt() -> None:
    first = node_of("g (float[1,3,32,32] x) => (float[N,K,A,B] z) { y = Conv(x, w) z = Relu(y) }", w=(8, 3, 7, 7))
    later = conv((8, 3, 7, 7))
    assert rules.placement(first, TRT).granularity == "per-channel"
    assert rules.placement(later, TRT).granularity is None


def test_an_image_is_not_read_in_fp8() -> None:
    first = node_of("g (float[1,3,32,32] x) => (float[N,K,A,B] z) { y = Conv(x, w) z = Relu(y) }", w=(32, 3, 7, 7))
    assert rules.placement(first, RTX).granularity == "per-tensor"
    assert "image" in rules.placement(first, RTX, "fp8").reason


def test_an_operator_without_a_row_is_refused_by_name() -> None:
    node = node_of("g (float[4,4] x) => (float[4,4] y) { y = Softmax(x) }")
    assert rules.placement(node, RTX, "fp8") == rules.Placement(None, "no FP8 rule for Softmax")


TRUNK = "r = Relu(x)"
HEADS = {
    "scores and boxes": """c = Conv(r, w) y = Conv(r, v) s = Sigmoid(c) t = Reshape(s, flat) u = Reshape(y, flat)
        e = Exp(u) z = Concat <axis = 1> (t, e)""",
    "boxes side by side": "c = Conv(r, w) y = Conv(r, v) z = Concat <axis = 1> (c, y)",
    "a mask": "y = Conv(r, v) z = Sigmoid(y)",
    "classes by softmax": "y = Conv(r, v) t = Transpose <perm = [0,2,3,1]> (y) z = Softmax(t)",
    "boxes as distributions": """y = Conv(r, v) t = Softmax <axis = 1> (y) c = Conv(t, one) z = Mul(c, half)""",
}


@pytest.mark.parametrize("name", HEADS)
def test_the_last_layers_of_detectors_stay_16_bit(name: str) -> None:
    text = f"""g (float[1,32,8,8] x) => (float[N,A,B,C] z) <int64[3] flat = {{1, 16, 64}}, float half = {{0.5}}>
        {{ {TRUNK} {HEADS[name]} }}"""
    if "flat" in HEADS[name]:
        text = text.replace("[N,A,B,C] z", "[N,A,B] z")
    node = node_of(text, w=(16, 32, 1, 1), v=(16, 32, 1, 1), one=(1, 16, 1, 1))
    for backend in (RTX, TRT):
        assert rules.placement(node, backend).granularity is None
        assert "detection head" in rules.placement(node, backend, "fp8").reason


def test_heads_of_several_outputs_and_box_products_are_heads() -> None:
    found = model(
        "g (float[1,32,8,8] x) => (float[N,A,B,C] y, float[N,A,B,C] z) { r = Relu(x) y = Conv(r, w) z = Conv(r, v) }",
        w=(16, 32, 1, 1),
        v=(16, 32, 1, 1),
    )
    assert [is_prediction_head(node) for node in found.graph] == [False, True, True]
    box = "g (float[1,100,64] x) => (float[N,A,C] z) { r = Relu(x) y = MatMul(r, w) z = Sigmoid(y) }"
    assert is_prediction_head(node_of(box, w=(64, 4)))
    assert not is_prediction_head(node_of(box, w=(64, 91)))


NO_HEADS = {
    "pooled classes": "y = Conv(r, v) p = GlobalAveragePool(y) z = Softmax <axis = 1> (p)",
    "pooled before": "p = GlobalAveragePool(r) y = Conv(p, v) z = Softmax <axis = 1> (y)",
    "another layer behind": "y = Conv(r, v) s = Sigmoid(y) z = Conv(s, u)",
    "an image": "y = Conv(r, v) z = DepthToSpace <blocksize = 4> (y)",
    "a sum of two": "y = Conv(r, v) c = Conv(r, v) z = Add(y, c)",
}


@pytest.mark.parametrize("name", NO_HEADS)
def test_other_last_layers_are_no_heads(name: str) -> None:
    text = f"g (float[1,32,8,8] x) => (float[N,A,B,C] z) {{ {TRUNK} {NO_HEADS[name]} }}"
    assert not is_prediction_head(node_of(text, v=(16, 32, 1, 1), u=(16, 16, 1, 1)))


def test_a_classifiers_last_product_is_no_head() -> None:
    text = "g (float[1,64] x) => (float[1,10] z) { r = Relu(x) y = Gemm(r, w) z = Sigmoid(y) }"
    assert not is_prediction_head(node_of(text, w=(64, 10)))


def inverted_residual() -> ir.Model:
    """Two of MobileNetV2's blocks; the second adds its input."""
    return model(
        """g (float[1,32,16,16] x) => (float[1,32,16,16] z) {
        s = Conv(x, w0) t = Relu(s)
        e = Conv(t, w1) f = Clip(e, zero, six) d = Conv <group = 64, pads = [1,1,1,1]> (f, w2) c = Clip(d, zero, six)
        p = Conv(c, w3) a = Add(t, p) b = Conv(a, w4) z = Relu(b) }""".replace(
            "z) {", "z) <float zero = {0}, float six = {6}> {"
        ),
        w0=(32, 32, 1, 1),
        w1=(64, 32, 1, 1),
        w2=(64, 1, 3, 3),
        w3=(32, 64, 1, 1),
        w4=(32, 32, 1, 1),
    )


def test_the_plans_of_the_two_backends_differ_with_reasons() -> None:
    source = inverted_residual()
    rtx, trt = plan_of(source, RTX), plan_of(source, TRT)
    assert {op.node: op.weight_axis for op in rtx.quantized} == dict.fromkeys("sepb")
    assert {op.node: op.weight_axis for op in trt.quantized} == dict.fromkeys("sedpb", 0)
    (refusal,) = rtx.refused
    assert refusal.node == "d" and "depthwise" in refusal.reason and not trt.refused


def test_a_residual_is_added_quantized_where_else_the_convolution_would_write_16_bits() -> None:
    source = inverted_residual()
    assert {op.node: op.skips for op in plan_of(source, TRT).quantized if op.skips} == {"e": ("a",)}
    assert not any(op.skips for op in plan_of(source, RTX).quantized)


def test_quantized_inputs_of_a_concat_share_its_largest_range() -> None:
    source = model(
        """g (float[1,32,8,8] x) => (float[1,32,8,8] z) { r = Relu(x) a = Conv(r, w) b = Relu(a) c = Conv(b, w)
        d = Relu(c) k = Concat <axis = 1> (b, d) e = Conv(k, v) z = Relu(e) }""",
        w=(32, 32, 1, 1),
        v=(32, 64, 1, 1),
    )

    def found(backend: str, inner: float, result: float) -> list[float]:
        plan = plan_of(source, backend, b=inner, k=result)
        amax = {op.activation: op.activation_amax for op in plan.quantized}
        return [round(amax["b"], 1), round(amax["k"], 1)]

    assert found(TRT, 3, 5) == [5, 5] and found(TRT, 5, 3) == [5, 5]
    assert found(RTX, 3, 5) == [3, 5] and found(RTX, 4.5, 5) == [5, 5]


def attention(queries: int = 128, head: int = 64, values: int = 0, between: str = "p = Softmax(s)") -> ir.Model:
    """Two heads, each projected in and out."""
    width, wide = 2 * head, 2 * (values or head)
    return model(
        f"""g (float[1,{queries},{width}] x) => (float[1,{queries},{width}] z)
        <int64[4] heads = {{1, {queries}, 2, -1}}, int64[3] flat = {{1, {queries}, -1}}> {{
        q0 = MatMul(x, wq) k0 = MatMul(x, wk) v0 = MatMul(x, wv)
        q1 = Reshape(q0, heads) k1 = Reshape(k0, heads) v1 = Reshape(v0, heads)
        q = Transpose <perm = [0,2,1,3]> (q1) k = Transpose <perm = [0,2,3,1]> (k1)
        v = Transpose <perm = [0,2,1,3]> (v1)
        s = MatMul(q, k) {between} m = MatMul(p, v)
        o1 = Transpose <perm = [0,2,1,3]> (m) o = Reshape(o1, flat) y = MatMul(o, wo) z = Add(y, x) }}""",
        wq=(width, width),
        wk=(width, width),
        wv=(width, wide),
        wo=(wide, width),
    )


SIZES = {
    "as in ViT": (attention(197), True, True),
    "beyond 512 keys": (attention(513), False, True),
    "few keys": (attention(16), True, False),
    "one query": (attention(1), False, False),
    "heads of 40": (attention(head=40), False, True),
    "heads of 20": (attention(head=20), False, False),
    "values of another size": (attention(values=32), False, False),
    "a soft cap": (attention(between="t = Tanh(s) p = Softmax(t)"), False, False),
}


@pytest.mark.parametrize("name", SIZES)
def test_attention_is_8_bit_only_in_the_sizes_of_a_fused_kernel(name: str) -> None:
    source, *expected = SIZES[name]
    types: tuple[Precision, ...] = ("int8", "fp8")
    found = [attention_products(source, RTX, dtype) for dtype in types]
    assert [len(products) == 1 for products, _ in found] == expected
    assert all(len(refused) == 2 and "fused" in refused[0].reason for products, refused in found if not products)


def test_all_four_operands_of_attention_are_quantized_together() -> None:
    plan = plan_of(attention(), RTX)
    ops = {op.node: op for op in plan.quantized}
    assert [ops["s"].activation, ops["m"].activation] == ["q", "p"]
    assert ops["s"].other is not None and ops["s"].other.name == "k"
    assert ops["m"].other is not None and ops["m"].other.name == "v"
    assert not plan.refused


def test_int8_attention_needs_a_reader_of_int8_and_even_probabilities() -> None:
    source = attention()
    output = source.graph.outputs[0]
    source.graph.outputs[0] = next(node for node in source.graph if node.name == "o").outputs[0]
    for node in [item for item in source.graph if item.name in ("z", "y")][::-1]:
        edit.remove_node(node)
    assert output.producer() is None or output.producer().graph is None
    plan = plan_of(source, RTX)
    assert {refusal.node for refusal in plan.refused} == {"s", "m"} and "writes INT8" in plan.refused[0].reason
    assert {op.node for op in plan_of(source, RTX, "fp8").quantized} >= {"s", "m"}
