"""Which nodes share a kernel, that no kernel waits for itself, and that no node and no flop is lost."""

from __future__ import annotations

import random
from collections.abc import Sequence

import onnx_ir as ir
import pytest
from drawn_cases import given
from fusion import flop_of_graph, groups, layers, only, parsed
from hypothesis import strategies as st

from trtopt.graph.shapes import static_shapes
from trtopt.hardware.spec import find_gpu
from trtopt.roofline.layer import layer_time
from trtopt.roofline.node_work import GraphTypes
from trtopt.roofline.onnx_layers import FusedModel, layers_of_graph
from trtopt.roofline.work import Gemm, Layer
from trtopt.support.precision import Precision

CONV = "<float[8, 8, 1, 1] w, float[8, 8, 1, 1] u, float[8] b>"
IMAGE = "g (float[1, 8, 4, 4] x) => (y)"
TENSOR = 1 * 8 * 4 * 4 * 2
"""Bytes of one image in FP16."""


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("c = Conv(x, w, b) y = Relu(c)", ["c+y"]),
        ("c = Conv(x, w) s = Sigmoid(c) y = Mul(c, s)", ["c+s+y"]),
        ("c = ConvTranspose(x, w) y = Relu(c)", ["c+y"]),
        # The residual joins the product that comes last.
        ("c = Conv(x, w) r = Relu(c) d = Conv(r, u) a = Add(d, x) y = Relu(a)", ["c+r", "a+d+y"]),
        ("c = Conv(x, w) d = Conv(x, u) a = Add(c, d) y = Relu(a)", ["c", "a+d+y"]),
        # A result that others read leaves its kernel: nothing more joins it.
        ("c = Conv(x, w) r = Relu(c) p = MaxPool <kernel_shape = [1, 1]> (c) y = Add(r, p)", ["c", "p", "r+y"]),
        ("r = Relu(x) c = Conv(r, w) y = Add(c, r)", ["r", "c+y"]),
        ("s = Sigmoid(x) r = Relu(s) a = Add(r, x) y = Mul(a, s)", ["a+r+s+y"]),
        # Pools and resizes are kernels of their own.
        ("c = Conv(x, w) p = MaxPool <kernel_shape = [1, 1]> (c) y = Relu(p)", ["c", "p", "y"]),
    ],
)
def test_convolutions_and_elementwise_operators(nodes: str, expected: list[str]) -> None:
    assert groups(f"{IMAGE} {CONV} {{ {nodes} }}") == expected


def test_a_diamond_through_a_pool_is_not_fused_into_a_cycle() -> None:
    """r and a could share a kernel, but a needs the pool of r."""
    nodes = "r = Relu(x) p = MaxPool <kernel_shape = [1, 1]> (r) a = Add(r, p) y = Sigmoid(a)"
    assert groups(f"{IMAGE} {{ {nodes} }}") == ["r", "p", "a+y"]


def test_a_residual_is_one_extra_read() -> None:
    plain = only(f"{IMAGE} {CONV} {{ c = Conv(x, w) y = Relu(c) }}")
    found = layers(f"g (float[1, 8, 4, 4] x, float[1, 8, 4, 4] r) => (y) {CONV} {{ c = Conv(x, w) y = Add(c, r) }}")
    residual = found["c"].work
    assert residual is not None
    assert residual.read_bytes == plain.read_bytes + TENSOR
    assert residual.write_bytes == plain.write_bytes == TENSOR


def test_gelu_by_erf_is_part_of_the_product_before_it() -> None:
    text = """g (float[6, 8] x) => (y)
    <float[8, 16] w, float[16] b, float r = {1.41}, float o = {1.0}, float h = {0.5}> {
        m = MatMul(x, w) a = Add(m, b) d = Div(a, r) e = Erf(d) p = Add(e, o) q = Mul(a, p) y = Mul(q, h)
    }"""
    found = only(text)
    assert (found.kind, found.gemm) == ("gemm", Gemm(6, 16, 8))
    assert (found.read_bytes, found.write_bytes) == (6 * 8 * 2, 6 * 16 * 2)


def test_a_layer_normalisation_in_single_operators_is_one_kernel() -> None:
    text = """g (float[6, 32] x) => (y)
    <int64[1] k = {-1}, float t = {2.0}, float e = {1e-5}, float[32] s, float[32] b> {
        m = ReduceMean(x, k) d = Sub(x, m) p = Pow(d, t) v = ReduceMean(p, k) a = Add(v, e) r = Sqrt(a)
        n = Div(d, r) c = Mul(n, s) y = Add(c, b)
    }"""
    found = only(text)
    assert found.kind == "memory"
    assert (found.read_bytes, found.write_bytes) == (6 * 32 * 2, 6 * 32 * 2)


def test_softmax_in_single_operators_is_one_kernel() -> None:
    text = """g (float[6, 32] x) => (y) <int64[1] k = {-1}> {
        m = ReduceMax(x, k) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, k) y = Div(e, s)
    }"""
    assert only(text).bytes == 2 * 6 * 32 * 2


def test_rows_of_different_lengths_are_not_reduced_in_one_kernel() -> None:
    text = "g (float[6, 4, 8] x) => (y) { s = Softmax(x) y = ReduceSum <keepdims = 0> (s, k) } "
    text = text.replace("=> (y)", "=> (y) <int64[2] k = {1, 2}>")
    assert groups(text) == ["s", "y"]


ATTENTION = """g (float[2, 16, 64] x) => (y)
<float[64, 64] a, float[64, 64] b, float[64, 64] c, int64[4] h = {2, 16, 4, 16}, int64[3] f = {2, 16, 64},
 float s = {0.25}, float[2, 1, 1, 16] mask> {
    q0 = MatMul(x, a) q1 = Reshape(q0, h) q = Transpose <perm = [0, 2, 1, 3]> (q1)
    k0 = MatMul(x, b) k1 = Reshape(k0, h) k = Transpose <perm = [0, 2, 3, 1]> (k1)
    v0 = MatMul(x, c) v1 = Reshape(v0, h) v = Transpose <perm = [0, 2, 1, 3]> (v1)
    p0 = MatMul(q, k) p1 = Mul(p0, s) p2 = Add(p1, mask) p3 = Softmax(p2) p4 = MatMul(p3, v)
    p5 = Transpose <perm = [0, 2, 1, 3]> (p4) p6 = Reshape(p5, f) y = MatMul(p6, a)
}"""


def test_attention_is_one_kernel_and_takes_the_transposes_beside_it() -> None:
    found = layers(ATTENTION)
    assert list(found) == ["q0", "k0", "v0", "p0", "y"]
    attention = found["p0"]
    assert attention.op == "Attention"
    assert attention.onnx_nodes == ("p0", "p1", "p2", "p3", "p4")
    work = attention.work
    assert work is not None
    assert (work.kind, work.gemm) == ("attention", Gemm(16, 16, 16, 8))
    assert work.flop == 2 * Gemm(16, 16, 16, 8).flop + 7 * 8 * 16 * 16
    tensor = 2 * 16 * 64 * 2
    assert (work.read_bytes, work.weight_bytes, work.write_bytes) == (3 * tensor, 2 * 16 * 2 + 2, tensor)


@pytest.mark.parametrize("base", ["fp32", "tf32"])
def test_attention_is_not_fused_in_fp32(base: str) -> None:
    found = layers(ATTENTION, GraphTypes(base))  # type: ignore[arg-type]
    assert list(found) == ["q0", "k0", "v0", "p0", "p3", "p4", "y"]


def test_attention_is_not_fused_when_its_weights_are_an_output() -> None:
    assert "p4" in layers(ATTENTION.replace("=> (y)", "=> (y, p3)"))


def test_quantizing_the_probabilities_breaks_fused_attention() -> None:
    quantized = "p9 = Softmax(p2) z1 = QuantizeLinear(p9, s, z) p3 = DequantizeLinear(z1, s, z)"
    text = ATTENTION.replace("p3 = Softmax(p2)", quantized).replace("float s =", "int8 z = {0}, float s =")
    assert "p4" in layers(text)


QUANTIZED = """g (float[1, 32, 4, 4] x) => (y) <float s = {0.1}, int8 z = {0}, int8[32, 32, 1, 1] w, float t = {0.1}> {
    q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) v = DequantizeLinear(w, t, z) c = Conv(d, v) r = Relu(c)
    e = QuantizeLinear(r, s, z) f = DequantizeLinear(e, s, z) u = Conv(f, v) y = Add(u, TAIL)
}"""


def test_quantizers_join_the_kernel_before_and_dequantizers_the_one_after() -> None:
    found = layers(QUANTIZED.replace("TAIL", "x"))
    assert [layer.onnx_nodes for layer in found.values()] == [("q",), ("c", "r", "e"), ("u", "y")]
    works = [layer.work for layer in found.values()]
    tensor = 32 * 16
    assert [(work.read_bytes, work.write_bytes, work.dtype) for work in works if work] == [
        (2 * tensor, tensor, "fp16"),
        (tensor, tensor, "int8"),
        (tensor + 2 * tensor, 2 * tensor, "int8"),
    ]
    assert works[1] is not None and works[1].weight_bytes == 32 * 32 + 2 + 1  # with scale and zero point


def test_a_result_needed_quantized_and_not_is_quantized_by_a_kernel_of_its_own() -> None:
    found = layers(QUANTIZED.replace("TAIL", "r"))
    assert [layer.onnx_nodes for layer in found.values()] == [("q",), ("c", "r"), ("e",), ("u", "y")]
    assert [layer.work.write_bytes for layer in found.values() if layer.work] == [512, 1024, 512, 1024]


@pytest.mark.parametrize(("residual", "fused"), [("f", True), ("d", True), ("r", False), ("x", False)])
def test_a_convolution_writes_int8_only_with_a_residual_of_int8(residual: str, fused: bool) -> None:
    text = QUANTIZED.replace("y = Add(u, TAIL)", f"a = Add(u, {residual}) b = QuantizeLinear(a, s, z) TAIL")
    text = text.replace("TAIL", "h = DequantizeLinear(b, s, z) y = Conv(h, v)")
    assert ("u", "a", "b") in [layer.onnx_nodes for layer in layers(text).values()] if fused else True
    assert ("b" in groups(text)) is not fused


def test_a_16_bit_convolution_does_not_write_int8() -> None:
    text = """g (float[1, 8, 4, 4] x) => (y) <float[8, 8, 1, 1] w, float s = {0.1}, int8 z = {0}> {
        c = Conv(x, w) q = QuantizeLinear(c, s, z) y = DequantizeLinear(q, s, z) }"""
    assert groups(text)[:2] == ["c", "q"]


def test_fused_attention_of_int8_operands_writes_int8() -> None:
    qdq = " ".join(
        f"{name}8 = QuantizeLinear({name}, s, z) {name}9 = DequantizeLinear({name}8, s, z)" for name in "qkvp"
    )
    text = f"""g (float[2, 4, 64, 32] q, float[2, 4, 32, 64] k, float[2, 4, 64, 32] v) => (y)
        <float s = {{0.1}}, int8 z = {{0}}, int8[128, 128] w, int64[3] flat = {{2, 64, 128}}> {{
        {qdq.split("p8")[0]} a = MatMul(q9, k9) p = Softmax(a) {"p8" + qdq.split("p8")[1] + "p8" + qdq.split("p8")[2]}
        m = MatMul(p9, v9) t = Transpose <perm = [0, 2, 1, 3]> (m) r = Reshape(t, flat)
        e = QuantizeLinear(r, s, z) f = DequantizeLinear(e, s, z) u = DequantizeLinear(w, s, z) y = MatMul(f, u) }}"""
    found = layers(text)
    fused = next(layer for layer in found.values() if layer.op == "Attention")
    assert {"a", "p", "p8", "m", "e"} == set(fused.onnx_nodes)
    tensor = 2 * 4 * 64 * 32
    assert fused.work is not None and fused.work.dtype == "int8"
    assert (fused.work.read_bytes, fused.work.write_bytes) == (3 * tensor, tensor)


def test_a_scale_computed_from_the_result_is_not_fused_into_a_cycle() -> None:
    nodes = (
        "c = Conv(x, w) a = Abs(c) m = ReduceMax <keepdims = 0> (a) q = QuantizeLinear(c, m) y = DequantizeLinear(q, m)"
    )
    assert groups(f"{IMAGE} {CONV} {{ {nodes} }}")[0] == "c"


def test_between_quantized_products_a_tensor_takes_one_byte() -> None:
    text = f"{IMAGE} {CONV} {{ c = Conv(x, w) r = Relu(c) y = Conv(r, u) }}"
    found = layers(text, GraphTypes(Precision.FP16, frozenset({"c", "y"})))
    works = [layer.work for layer in found.values()]
    assert [(work.read_bytes, work.write_bytes) for work in works if work] == [
        (TENSOR // 2, TENSOR // 2),
        (TENSOR // 2, TENSOR),
    ]


@pytest.mark.parametrize("seed", range(8))
def test_the_kernels_of_a_fused_model_in_8_bits_are_those_of_one_fused_in_8_bits(seed: int) -> None:
    model, shapes = random_model(random.Random(seed), 60)
    weighted = (node for node in model.graph if node.op_type in ("Conv", "MatMul"))
    names = [str(node.name) for node in weighted if node.inputs[1] is not None and node.inputs[1].is_initializer()]
    eight = GraphTypes(Precision.FP16, frozenset(names[::2]))
    fused = FusedModel(model, shapes, GraphTypes(Precision.FP16))
    before = fused.layers()
    assert fused.in_types(eight).layers() == layers_of_graph(model, shapes, eight) != before == fused.layers()


def test_concat_is_free_where_its_producers_can_write_in_place() -> None:
    nodes = "c = Conv(x, w) d = Conv(x, u) k = Concat <axis = 1> (c, d) y = Conv(k, v)"
    found = layers(f"{IMAGE} <float[8, 8, 1, 1] w, float[8, 8, 1, 1] u, float[4, 16, 1, 1] v> {{ {nodes} }}")
    assert list(found) == ["c", "d", "y"]
    work = found["y"].work
    assert work is not None and work.read_bytes == 2 * TENSOR


def test_concat_copies_inputs_of_the_network_and_tensors_of_another_concat() -> None:
    nodes = "c = Conv(x, w) k = Concat <axis = 1> (c, x) y = Relu(k)"
    work = layers(f"{IMAGE} {CONV} {{ {nodes} }}")["k"].work
    assert work is not None and (work.read_bytes, work.write_bytes) == (TENSOR, TENSOR)
    both = "c = Conv(x, w) d = Conv(c, u) k = Concat <axis = 1> (c, d) l = Concat <axis = 2> (c, d)"
    both += " y = Relu(k) z = Relu(l)"
    found = layers(f"g (float[1, 8, 4, 4] x) => (y, z) {CONV} {{ {both} }}")
    assert "k" not in found
    work = found["l"].work
    assert work is not None and work.bytes == 4 * TENSOR


def test_slices_are_read_in_place() -> None:
    nodes = "p, q = Split <axis = 1, num_outputs = 2> (x) y = Conv(p, v)"
    work = only(f"{IMAGE} <float[8, 4, 1, 1] v> {{ {nodes} }}")
    assert work.read_bytes == TENSOR // 2


def test_constants_computed_in_the_graph_cost_nothing() -> None:
    nodes = "s = Shape(x) k = ConstantOfShape(s) e = Exp(k) y = Add(x, e)"
    assert groups(f"{IMAGE} {{ {nodes} }}") == ["y"]


@pytest.mark.parametrize(("axis", "expected"), [("8", ["m"]), ("N", ["k", "e", "m"])])
def test_what_depends_on_an_open_axis_is_computed(axis: str, expected: list[str]) -> None:
    """The sizes themselves are known to the host."""
    nodes = "s = Shape(x) k = ConstantOfShape(s) e = Exp(k) m = MatMul(x, e)"
    model = parsed(f"g (float[4, {axis}, {axis}] x) => (m) {{ {nodes} }}")
    found = layers_of_graph(model, static_shapes(model, {"x": (4, 8, 8)}), GraphTypes(Precision.FP16))
    assert [layer.name for layer in found] == expected


def test_an_operator_without_a_cost_is_listed() -> None:
    found = layers("g (float[4, 4] x) => (y) { r = Relu(x) d = Det(r) y = Relu(d) }")
    assert [name for name, layer in found.items() if layer.work is None] == ["d"]


def test_a_path_through_a_branch_is_not_fused_into_a_cycle() -> None:
    """r and y could share a kernel, but y needs the branch, which reads r."""
    text = """g (float[4, 8] x, bool c) => (float[4, 8] y) {
        r = Relu(x)
        i = If (c) <then_branch = t () => (float[4, 8] a) { a = Exp(r) },
                    else_branch = e () => (float[4, 8] b) { b = Neg(r) }>
        y = Add(r, i)
    }"""
    assert groups(text) == ["r", "y", "a", "b"]


def test_a_path_through_shape_arithmetic_is_not_fused_into_a_cycle() -> None:
    text = """g (float[4, 8] x) => (y) {
        r = Relu(x) m = ReduceMax <keepdims = 0> (r) i = Cast <to = 7> (m) j = Mul(i, i)
        f = Cast <to = 1> (j) y = Add(r, f)
    }"""
    names = groups(text)
    assert "j" not in "+".join(names)
    assert next(name for name in names if "r" in name.split("+")) != next(n for n in names if "y" in n.split("+"))


def test_the_layers_of_a_loop_have_the_work_of_all_iterations() -> None:
    text = """g (float[4, 8] x) => (float[4, 8] y) <int64 trips = {5}, bool go = {1}, float[8, 8] w> {
        y = Loop <body = b (int64 i, bool c, float[4, 8] s) => (bool d, float[4, 8] t) {
            d = Identity(c) m = MatMul(s, w) t = Relu(m)
        }> (trips, go, x)
    }"""
    work = only(text)
    once = Gemm(4, 8, 8)
    assert (work.gemm, work.steps) == (once, 5)
    assert work.flop == 5 * (once.flop + 32)
    assert work.weight_bytes == 5 * 128


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("g (float[0, 64] x) => (y) <float[64, 32] w> { y = MatMul(x, w) }", []),
        ("g (float[0, 3, 8, 8] x) => (y) <float[4, 3, 3, 3] w> { c = Conv(x, w) y = Relu(c) }", []),
        ("g (float[0, 8] x) => (y) { a = Relu(x) y = Softmax(a) }", []),
        ("g (float[2, 8, 0] x, float[2, 0, 32] w) => (y) { y = MatMul(x, w) }", ["memory"]),
        (
            "g (float[2, 4, 16, 32] q, float[2, 4, 0, 32] k, float[2, 4, 0, 64] v) => (y) "
            "{ t = Transpose <perm = [0, 1, 3, 2]> (k) s = MatMul(q, t) p = Softmax(s) y = MatMul(p, v) }",
            ["memory"],
        ),
    ],
)
def test_tensors_without_elements_are_not_computed(text: str, left: list[str]) -> None:
    """An empty cache of keys, an empty batch; a sum of nothing is still written, as zeros."""
    found = [layer.work for layer in layers(text).values()]
    assert [work.kind for work in found if work is not None] == left
    for work in found:
        assert work is not None and 0 < layer_time(work, find_gpu("L4")).predicted_us < 10


def test_a_loop_without_iterations_has_no_layers() -> None:
    text = (
        "g (float[4, 8] x) => (y) <int64 n = {0}, bool go = {1}> { y = Loop(n, go, x) <body = body "
        "(int64 i, bool c, float[4, 8] s) => (bool d, float[4, 8] t) { d = Identity(c) t = Relu(s) }> }"
    )
    assert layers(text) == {}


def test_a_recurrent_layer_in_a_loop_reads_its_weights_once_a_step() -> None:
    text = (
        "g (float[10, 4, 8] x) => (y) <float[1, 32, 8] w, float[1, 32, 8] r, int64 n = {%d}, bool go = {1}> "
        "{ y = Loop(n, go, x) <body = body (int64 i, bool c, float[10, 4, 8] s) => (bool d, float[10, 4, 8] t) "
        "{ d = Identity(c) z, h = LSTM <hidden_size = 8> (s, w, r) t = Add(s, h) }> }"
    )
    once, often = (layers(text % count)["z"].work for count in (1, 6))
    assert once is not None and often is not None and once.kind == often.kind == "recurrent"
    assert (often.flop, often.steps, often.weight_bytes) == (6 * once.flop, 6 * once.steps, once.weight_bytes)
    times = [layer_time(work, find_gpu("L4")).predicted_us for work in (once, often)]
    assert times[1] == pytest.approx(6 * times[0])


@pytest.mark.parametrize("seed", range(3))
def test_the_result_does_not_depend_on_the_run(seed: int) -> None:
    model, shapes = random_model(random.Random(seed), 60)
    assert layers_of_graph(model, shapes, GraphTypes(Precision.FP16)) == layers_of_graph(
        model, shapes, GraphTypes(Precision.FP16)
    )


def random_model(choose: random.Random, count: int) -> tuple[ir.Model, dict[str, tuple[int, ...]]]:
    """A random graph of one image size, with residuals, diamonds and shared tensors."""
    names, lines = ["x"], []
    for index in range(count):
        first, second = (choose.choice(names[-8:]) for _ in range(2))
        line = choose.choice(
            [
                f"Conv({first}, w)", f"Conv({first}, w)", f"Relu({first})", f"Sigmoid({first})",
                f"Add({first}, {second})", f"Mul({first}, {second})", f"Softmax({first})",
                f"MaxPool <kernel_shape = [1, 1]> ({first})",
                f"Identity({first})", f"Transpose <perm = [0, 1, 3, 2]> ({first})", f"MatMul({first}, {second})",
                f"MatMul({first}, t)", f"Reshape({first}, s)",
            ]
        )  # fmt: skip
        lines.append(f"n{index} = {line}")
        names.append(f"n{index}")
    outputs = ", ".join({names[-1]: None, choose.choice(names[1:]): None})
    constants = "<float[8, 8, 1, 1] w, float[16, 16] t, int64[4] s = {1, 8, 16, 16}>"
    model = parsed(f"g (float[1, 8, 16, 16] x) => ({outputs}) {constants} {{ {' '.join(lines)} }}")
    return model, static_shapes(model, {})


def waits_for(model: ir.Model, found: Sequence[Layer]) -> dict[str, set[str]]:
    """For each layer, those it reads from, through nodes that are in none; found in the graph alone."""
    owner = {node: layer.name for layer in found for node in layer.onnx_nodes}
    before: dict[str, set[str]] = {}
    result: dict[str, set[str]] = {layer.name: set() for layer in found}
    for node in model.graph:
        name = str(node.name)
        producers = [value.producer() for value in node.inputs if value is not None]
        sources = {source for item in producers if item is not None for source in before[str(item.name)]}
        before[name] = {owner[name]} if name in owner else sources
        if name in owner:
            result[owner[name]] |= sources - {owner[name]}
    return result


@given(st.integers(0, 10**9), st.integers(1, 60), many=150)
def test_fusing_never_makes_a_cycle_and_loses_neither_node_nor_flop(seed: int, count: int) -> None:
    model, shapes = random_model(random.Random(seed), count)
    found = layers_of_graph(model, shapes, GraphTypes(Precision.FP16))
    members = [node for layer in found for node in layer.onnx_nodes]
    assert len(members) == len(set(members))
    free = {str(node.name) for node in model.graph} - set(members)
    assert {node.op_type for node in model.graph if node.name in free} <= {"Identity", "Reshape", "Transpose"}
    assert sum(layer.work.flop for layer in found if layer.work) == flop_of_graph(model, shapes)
    done: set[str] = set()
    reads = waits_for(model, found)
    for layer in found:
        assert reads[layer.name] <= done
        done.add(layer.name)
