"""The formats of narrow weights: their numbers, their scales, and how a graph holds them."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from drawn_cases import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnx.reference import ReferenceEvaluator

from trtopt.graph import edit
from trtopt.precision.weights.fit import plain
from trtopt.precision.weights.formats import FORMATS, INT4, MXFP8, NVFP4, nearest, scales_of
from trtopt.precision.weights.tied import untied
from trtopt.precision.weights.write import exact_weight, products_of, with_stored
from trtopt.support.dequantize import dequantized, fold_unknown

RNG = np.random.default_rng(0)
FLOAT, HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16


def weight(depth: int = 256, columns: int = 128) -> np.ndarray:
    return RNG.standard_normal((depth, columns)).astype(np.float32)


def model(text: str, opset: int = 21, **constants: np.ndarray) -> ir.Model:
    found = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : {opset}]>\n{text}')
    for name, array in constants.items():
        value = edit.add_initializer(found.graph, name, array)
        for node in found.graph:
            for index, read in enumerate(node.inputs):
                if read is not None and read.name == name:
                    node.replace_input_with(index, value)
    for node in found.graph:
        node.name = str(node.outputs[0].name)
    return found


def dequantizers(found: ir.Model) -> list[ir.Node]:
    return [node for node in found.graph if node.op_type == "DequantizeLinear"]


@pytest.mark.parametrize("name", FORMATS)
def test_no_number_is_further_than_half_a_step_from_its_weight(name: str) -> None:
    kind, exact = FORMATS[name], weight()
    block = next(iter(kind.blocks), 0)
    scales = scales_of(exact, kind, block, HALF)
    stored = nearest(exact, kind, scales)
    assert stored.values.dtype == kind.dtype.numpy() and len(scales.values) == (256 // block if block else 1)
    levels = np.unique(np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32))
    if not kind.is_even:
        bits = np.arange(1 << kind.dtype.bitwidth, dtype=np.uint8)
        numbers = bits.view(kind.dtype.numpy()).astype(np.float32)
        levels = np.unique(numbers[np.isfinite(numbers)])
    levels = levels[np.abs(levels) <= kind.largest]
    ratio = np.clip(exact / scales.spread(256), -kind.largest, kind.largest)
    at = np.clip(np.searchsorted(levels, ratio), 1, len(levels) - 1)
    best = np.minimum(np.abs(levels[at] - ratio), np.abs(levels[at - 1] - ratio))
    assert np.allclose(np.abs(stored.values.astype(np.float32) - ratio), best, atol=1e-5)


def test_scales_of_mxfp8_are_powers_of_two_that_clip_nothing() -> None:
    exact = weight() * np.exp2(RNG.integers(-12, 8, (256, 1))).astype(np.float32)
    scales = scales_of(exact, MXFP8, 32, HALF)
    assert (np.exp2(np.round(np.log2(scales.values))) == scales.values).all()
    assert (np.abs(exact) <= 448 * scales.spread(256)).all()
    as_e8m0 = scales.values.astype(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(as_e8m0, scales.values)


def test_scales_of_nvfp4_are_e4m3_times_one_number() -> None:
    scales = scales_of(weight(), NVFP4, 16, HALF)
    assert scales.narrow is not None and scales.narrow.dtype == ml_dtypes.float8_e4m3fn
    assert np.array_equal(scales.values, scales.narrow.astype(np.float32) * np.float32(scales.tensor))
    assert float(scales.narrow.astype(np.float32).max()) == 448


@given(arrays.arrays(np.float32, (32, 3), elements=st.floats(-1e4, 1e4, width=32)), st.sampled_from(sorted(FORMATS)))
def test_every_finite_weight_has_finite_numbers(exact: np.ndarray, name: str) -> None:
    kind = FORMATS[name]
    stored = nearest(exact, kind, scales_of(exact, kind, next((b for b in kind.blocks if b <= 32), 0), HALF))
    assert np.isfinite(stored.exact).all()
    assert not stored.exact[:, ~exact.any(axis=0)].any()


@pytest.mark.parametrize(("name", "transposed"), [("int4", False), ("int4", True), ("int8", False), ("int8", True)])
def test_a_graph_computes_with_the_numbers_that_are_stored(name: str, transposed: bool) -> None:
    kind, exact = FORMATS[name], weight()
    text = "g (float[4, 256] x) => (float[4, 128] y) { y = Gemm <transB = 1> (x, w) }"
    found = model(
        text if transposed else text.replace("Gemm <transB = 1>", "MatMul"), w=exact.T if transposed else exact
    )
    products = products_of(found, kind, next(iter(kind.blocks), 0)).found
    stored = nearest(exact, kind, scales_of(exact, kind, next(iter(kind.blocks), 0), FLOAT))
    written = with_stored(found, {"w": stored}, products)
    x = RNG.standard_normal((4, 256)).astype(np.float32)
    (y,) = ReferenceEvaluator(ir.to_proto(written)).run(None, {"x": x})
    assert np.allclose(y, x @ stored.exact, rtol=1e-5, atol=1e-4)
    assert "w" not in written.graph.initializers and "w" in found.graph.initializers


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_what_onnx_runtime_cannot_dequantize_is_dequantized_bit_by_bit(name: str) -> None:
    kind, exact = FORMATS[name], weight().astype(np.float16)
    found = model("g (float16[4, 256] x) => (float16[4, 128] y) { y = MatMul (x, w) }", w=exact)
    products = products_of(found, kind, kind.blocks[0]).found
    stored = nearest(exact.astype(np.float32), kind, scales_of(exact.astype(np.float32), kind, kind.blocks[0], HALF))
    written = with_stored(found, {"w": stored}, products)
    assert written.graph.opset_imports[""] == kind.opset and dequantizers(written)
    fold_unknown(written)
    assert not dequantizers(written)
    (y,) = ReferenceEvaluator(ir.to_proto(written)).run(None, {"x": np.eye(4, 256, dtype=np.float16)})
    assert np.array_equal(y, stored.exact[:4].astype(np.float16))


def test_the_bits_of_fp4_mean_what_the_specification_says() -> None:
    """Table 7 of the MX specification: sign, two bits of exponent (bias 1), one of mantissa."""
    numbers = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).reshape(16, 1)
    expected = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    expected = np.concatenate([expected, -expected])
    scale = np.array([[3.0]], np.float32)
    body = "w = DequantizeLinear <axis = 0, block_size = 16> (q, s) y = MatMul (x, w)"
    found = model(f"g (float[1, 16] x) => (float[1, 1] y) {{ {body} }}", 23, q=numbers, s=scale)
    result = dequantized(dequantizers(found)[0])
    assert result is not None and np.array_equal(result[:, 0], 3 * expected)


def test_int4_stands_two_in_a_byte_the_first_in_the_low_half() -> None:
    found = model("g (float[4, 256] x) => (float[4, 128] y) { y = MatMul (x, w) }", w=weight())
    products = products_of(found, INT4, 128).found
    stored = nearest(weight(), INT4, scales_of(weight(), INT4, 128, FLOAT))
    proto = ir.to_proto(with_stored(found, {"w": stored}, products))
    tensor = next(item for item in proto.graph.initializer if item.name == "w_int4")
    low = np.frombuffer(tensor.raw_data, np.uint8) & 15
    assert len(tensor.raw_data) == 256 * 128 // 2
    assert np.array_equal(((low.astype(np.int16) ^ 8) - 8), stored.values.reshape(-1)[::2].astype(np.int16))


@pytest.mark.parametrize(
    ("body", "shape", "reason"),
    [
        ("y = MatMul (x, w)", (200, 128), "no multiple of the block"),
        ("y = MatMul (x, w)", (16, 16), "fewer than"),
        ("y = MatMul (x, w)", (2, 128, 128), "3 axes"),
        ("r = Relu (w) z = MatMul (x, w) y = MatMul (z, r)", (128, 128), "other operators"),
        ("z = MatMul (x, w) y = Gemm <transB = 1> (z, w)", (128, 128), "transposed"),
    ],
)
def test_a_weight_that_cannot_be_stored_is_refused_with_the_reason(
    body: str, shape: tuple[int, ...], reason: str
) -> None:
    found = model(f"g (float[8, {shape[-2]}] x) => (y) {{ {body} }}", w=RNG.standard_normal(shape).astype(np.float32))
    products = products_of(found, INT4, 128)
    assert not products.found and all(reason in item.reason for item in products.refused) and products.refused


def test_weights_of_one_shape_behind_different_operators_are_of_different_kinds() -> None:
    """A compiler reads INT4 in the kernel of the product behind one, and not behind the other."""
    body = "q = MatMul (x, a) t = Transpose <perm = [1, 0]> (q) o = MatMul (t, b) y = MatMul (o, c)"
    found = model(f"g (float[128, 128] x) => (y) {{ {body} }}", a=weight(128), b=weight(128), c=weight(128))
    kinds = [item.kind for item in products_of(found, INT4, 128).found]
    assert kinds == ["128x128", "128x128 behind Transpose", "128x128 behind MatMul"]


@pytest.mark.parametrize("words", [128, 131])
def test_a_table_that_scores_too_keeps_its_rows_and_its_product_gets_a_narrow_weight(words: int) -> None:
    """An odd vocabulary is filled up: no compiler reads its INT4 in the kernel of the product."""
    body = "e = Gather (w, ids) t = Transpose <perm = [1, 0]> (w) y = MatMul (e, t)"
    tied = model(f"g (int64[4] ids) => (float[4, {words}] y) {{ {body} }}", w=weight(words, 128))
    found = untied(tied)
    (product,) = products_of(found, INT4, 128).found
    assert product.shape == (128, 136 if words % 2 else 128) and product.behind == "Gather"
    assert products_of(untied(tied, ()), INT4, 128).found == ()
    feeds = {"ids": np.array([0, 5, 7, words - 1])}
    first, second = (ReferenceEvaluator(ir.to_proto(each)).run(None, feeds)[0] for each in (tied, found))
    assert np.allclose(first, second, atol=1e-4)
    narrow = plain({product.weight: exact_weight(found, product)}, [product], INT4, 128)
    written = with_stored(found, narrow, [product])
    assert [value.name for value in written.graph.outputs] == ["y"]
    assert {node.op_type for node in written.graph} == {"Gather", "DequantizeLinear", "MatMul"} | (
        {"Slice"} if words % 2 else set()
    )


def test_a_constant_with_an_odd_vocabulary_is_filled_up_where_it_is_stored() -> None:
    """A tied table whose Transpose was folded, or the scores' own weight."""
    odd = model("g (float[4, 128] x) => (float[4, 131] y) { y = MatMul (x, w) }", w=weight(128, 131))
    found = untied(odd)
    (product,) = products_of(found, INT4, 128).found
    assert product == replace(products_of(odd, INT4, 128).found[0], shape=(128, 136))
    assert [node.op_type for node in untied(odd, ()).graph] == ["MatMul"]
    feeds = {"x": RNG.standard_normal((4, 128)).astype(np.float32)}
    first, second = (ReferenceEvaluator(ir.to_proto(each)).run(None, feeds)[0] for each in (odd, found))
    assert second.shape == (4, 131) and np.allclose(first, second, atol=1e-4)


def test_a_table_that_is_transposed_to_itself_stays() -> None:
    same = model("g (float[2, 64] x) => (float[2, 64] y) { t = Transpose <perm = [0, 1]> (w) y = MatMul (x, t) }",
                 w=weight(64, 64))  # fmt: skip
    assert [node.op_type for node in untied(same).graph] == ["Transpose", "MatMul"]
