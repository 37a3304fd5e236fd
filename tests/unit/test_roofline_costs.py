"""Flop, bytes and sizes of single nodes: the figures of NVIDIA's performance guides, and counts made by hand."""

from __future__ import annotations

import pytest
from fusion import only, parsed, work

from trtopt.graph.shapes import static_shapes
from trtopt.roofline.node_work import GraphTypes, work_of_node
from trtopt.roofline.work import Gemm, Window
from trtopt.support.precision import Precision

CONV1 = """g (float[32, 3, 224, 224] x) => (y) <float[64, 3, 7, 7] w> {
    y = Conv <strides = [2, 2], pads = [3, 3, 3, 3]> (x, w)
}"""


def intensity(text: str) -> float:
    return work(text).arithmetic_intensity


def test_gemm_8192_128_8192_has_124_flop_per_byte() -> None:
    found = work("g (float[8192, 8192] x) => (y) <float[8192, 128] w> { y = MatMul(x, w) }")
    assert f"{found.arithmetic_intensity:.1f}" == "124.1"
    assert found.gemm == Gemm(8192, 128, 8192)


def test_gemm_8192_cubed_has_2730_flop_per_byte() -> None:
    assert int(intensity("g (float[8192, 8192] x) => (y) <float[8192, 8192] w> { y = MatMul(x, w) }")) == 2730


@pytest.mark.parametrize(("batch", "expected"), [(512, "315"), (1, "1")])
def test_linear_layer_of_4096_outputs(batch: int, expected: str) -> None:
    found = work(f"g (float[{batch}, 1024] x) => (y) <float[1024, 4096] w> {{ y = Gemm(x, w) }}")
    assert f"{found.arithmetic_intensity:.0f}" == expected


def test_max_pool_has_2_25_flop_per_byte() -> None:
    pool = "MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x)"
    assert intensity(f"g (float[8, 64, 56, 56] x) => (y) {{ y = {pool} }}") == 2.25


def test_relu_has_a_quarter_flop_per_byte() -> None:
    assert intensity("g (float[8, 64] x) => (y) { y = Relu(x) }") == 0.25


def test_layer_norm_has_less_than_10_flop_per_byte() -> None:
    text = "g (float[64, 512, 768] x) => (y) <float[768] s, float[768] b> { y = LayerNormalization(x, s, b) }"
    assert 1 < intensity(text) < 10


def test_first_convolution_of_resnet_is_a_gemm_of_7_553_gigaflop() -> None:
    found = work(CONV1)
    assert found.gemm == Gemm(401408, 64, 147)
    assert f"{found.gemm.flop / 1e9:.3f}" == "7.553"
    assert found.flop == found.gemm.flop
    assert found.window == Window((7, 7), (2, 2), (1, 1))
    assert found.alignment_bytes == 2


def test_batch_norm_and_activation_after_a_convolution_move_no_bytes() -> None:
    conv = "x = Identity(i) c = Conv <pads = [1, 1, 1, 1]> (x, w)"
    head = (
        "g (float[8, 64, 56, 56] i) => (y) <float[64, 64, 3, 3] w, float[64] s, float[64] b, float[64] m, float[64] v>"
    )
    alone = only(f"{head} {{ {conv} y = Identity(c) }}")
    fused = only(f"{head} {{ {conv} n = BatchNormalization(c, s, b, m, v) y = Relu(n) }}")
    assert fused.bytes == alone.bytes
    assert fused.flop == alone.flop + 3 * 8 * 64 * 56 * 56


@pytest.mark.parametrize("activation", ["Sigmoid", "Relu", "Tanh"])
def test_activations_cost_alike(activation: str) -> None:
    assert work(f"g (float[8, 64] x) => (y) {{ y = {activation}(x) }}").flop == 512


@pytest.mark.parametrize(
    ("text", "kind", "gemm"),
    [
        ("(float[2, 8, 6, 6] x) => (y) <float[16, 4, 3, 3] w> { y = Conv <group = 2> (x, w) }", "conv", (32, 8, 36, 2)),
        (
            "(float[2, 8, 6, 6] x) => (y) <float[8, 1, 3, 3] w> { y = Conv <group = 8> (x, w) }",
            "depthwise",
            (32, 1, 9, 8),
        ),
        ("(float[2, 8, 9] x) => (y) <float[4, 8, 3] w> { y = Conv <dilations = [2]> (x, w) }", "conv", (10, 4, 24, 1)),
        ("(float[2, 8, 5, 5] x) => (y) <float[8, 4, 2, 2] w> { y = ConvTranspose(x, w) }", "conv", (50, 16, 8, 1)),
        ("(float[2, 3, 5, 8] x) => (y) <float[8, 7] w> { y = MatMul(x, w) }", "gemm", (30, 7, 8, 1)),
        ("(float[2, 3, 5, 8] x, float[2, 3, 8, 7] w) => (y) { y = MatMul(x, w) }", "gemm", (5, 7, 8, 6)),
        ("(float[5, 8] x, float[3, 8, 7] w) => (y) { y = MatMul(x, w) }", "gemm", (5, 7, 8, 3)),
        (
            '(float[2, 5, 3, 8] q, float[2, 7, 3, 8] k) => (y) { y = Einsum <equation = "bihd,bjhd->bhij"> (q, k) }',
            "gemm",
            (5, 7, 8, 6),
        ),
    ],
)
def test_products_have_their_sizes(text: str, kind: str, gemm: tuple[int, ...]) -> None:
    found = work(f"g {text}")
    assert (found.kind, found.gemm) == (kind, Gemm(*gemm))


def test_recurrent_layers_have_one_product_per_step_and_hoist_the_input_product() -> None:
    head = "g (float[10, 4, 32] x) => (y) <float[1, 256, 32] w, float[1, 256, 64] r>"
    found = work(f"{head} {{ y = LSTM <hidden_size = 64> (x, w, r) }}")
    assert (found.kind, found.gemm, found.steps) == ("recurrent", Gemm(4, 256, 64), 10)
    hoisted = Gemm(40, 256, 32)
    assert found.gemm is not None
    assert found.flop == hoisted.flop + 10 * found.gemm.flop


def test_a_gather_reads_what_it_gathers_not_its_table() -> None:
    found = work("g (int64[4, 8] i) => (y) <float[30522, 768] t> { y = Gather(t, i) }")
    assert (found.read_bytes, found.weight_bytes, found.write_bytes) == (4 * 8 * 8, 4 * 8 * 768 * 2, 4 * 8 * 768 * 2)


@pytest.mark.parametrize("view", ["Identity(x)", "Flatten(x)", "Dropout(x)"])
def test_views_cost_nothing(view: str) -> None:
    found = work(f"g (float[4, 8] x) => (y) {{ y = {view} }}")
    assert (found.flop, found.bytes) == (0, 0)


def test_a_value_read_twice_counts_once() -> None:
    assert work("g (float[4, 8] x) => (y) { y = Mul(x, x) }").read_bytes == 4 * 8 * 2


@pytest.mark.parametrize(("base", "size", "dtype"), [("fp32", 4, "fp32"), ("tf32", 4, "tf32"), ("bf16", 2, "bf16")])
def test_float_tensors_take_the_precision(base: str, size: int, dtype: str) -> None:
    precision = GraphTypes(base)  # type: ignore[arg-type]
    found = work("g (float[4, 8] x) => (y) <float[8, 2] w> { y = MatMul(x, w) }", precision)
    assert (found.read_bytes, found.weight_bytes, found.write_bytes) == (32 * size, 16 * size, 8 * size)
    assert found.dtype == dtype
    relu = work("g (float[4, 8] x) => (y) { y = Relu(x) }", precision)
    assert relu.dtype == ("fp32" if base == "tf32" else dtype)


def test_tensors_with_a_type_of_their_own_keep_it() -> None:
    found = work("g (float16[4, 8] x) => (y) <float16[8, 2] w> { y = MatMul(x, w) }", GraphTypes(Precision.FP32))
    assert (found.dtype, found.bytes) == ("fp16", 2 * (32 + 16 + 8))


def test_a_named_product_is_quantized() -> None:
    text = "g (float[4, 32] x) => (y) <float[32, 16] w> { y = MatMul(x, w) }"
    found = work(text, GraphTypes(Precision.FP16, frozenset({"y"})))
    assert (found.dtype, found.read_bytes, found.weight_bytes, found.write_bytes) == ("int8", 128, 512, 128)
    assert found.alignment_bytes == 16


QDQ = """g (float[4, 32] x) => (y) <float a = {0.1}, int8 z = {0}, int8[32, 16] w, float b = {0.1}> {
    q = QuantizeLinear(x, a, z) d = DequantizeLinear(q, a, z) v = DequantizeLinear(w, b, z) y = MatMul(d, v)
}"""


def test_a_product_behind_dequantize_is_quantized() -> None:
    found = work(QDQ)
    assert (found.dtype, found.read_bytes, found.weight_bytes) == ("int8", 128, 512)


def test_the_cost_of_an_unknown_operator_is_none() -> None:
    model = parsed("g (float[4, 4] x) => (y) { y = Det(x) }")
    assert work_of_node(list(model.graph)[-1], static_shapes(model, {}), GraphTypes()) is None


def test_the_cost_of_a_node_whose_shape_depends_on_data_is_none() -> None:
    model = parsed("g (float[4, 4] x) => (y) { y = NonZero(x) }")
    assert work_of_node(list(model.graph)[-1], static_shapes(model, {}), GraphTypes()) is None
