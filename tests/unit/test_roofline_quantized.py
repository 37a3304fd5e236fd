"""Products of 8-bit and 4-bit operands, and of narrow weights."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest
from drawn_cases import given
from hypothesis import strategies as st
from kernels import product

from trtopt.hardware.spec import GpuSpec, all_gpus, find_gpu, supports
from trtopt.roofline.batch import Batch
from trtopt.roofline.constants import constants_for
from trtopt.roofline.gemm import TILES
from trtopt.roofline.node_work import GraphTypes, narrow_weight, work_of_node
from trtopt.roofline.work import Work
from trtopt.support.precision import ELEMENT_BYTES, Precision

A100, H100, RTX = find_gpu("A100"), find_gpu("H100"), find_gpu("RTX-PRO-6000-BW-Server")
SIZES = st.integers(1, 20000)


def quantized(m: int, n: int, k: int, dtype: Precision, bits: int = 0, block: int = 0) -> Work:
    """A product whose weight has ``bits`` bits, and whose scales are one per ``block`` elements."""
    work = product(m, n, k, dtype)
    weight = int(n * k * bits / 8) if bits else work.weight_bytes
    return dataclasses.replace(work, weight_bytes=weight, weight_bits=bits, scale_block=block)


def times(*works: Work, gpu: GpuSpec) -> list[float]:
    return [float(value) for value in Batch.of(works, gpu).predict(constants_for(gpu)).total]


@given(
    st.data(),
    st.sampled_from([gpu for gpu in all_gpus() if supports(gpu, Precision.FP16)]),
    st.sampled_from(("fp8", "block", "fp4", "int8 weight", "int4 weight")),
)
def test_no_quantized_product_is_faster_than_its_physical_bound(data: st.DataObject, gpu: GpuSpec, what: str) -> None:
    m, n, k = (data.draw(SIZES) for _ in range(3))
    dtype = {"fp8": Precision.FP8, "block": Precision.FP8, "fp4": Precision.FP4}.get(what, Precision.FP16)
    if not supports(gpu, dtype):
        return
    bits, block = {"int8 weight": 8, "int4 weight": 4}.get(what, 0), {"block": 128, "fp4": 16}.get(what, 0)
    found = Batch.of([quantized(m, n, k, dtype, bits, block)], gpu).predict(constants_for(gpu))
    assert np.isfinite(found.total[0])
    assert found.total[0] >= found.bound[0] > 0


def test_fp8_takes_more_than_half_of_the_time_of_16_bits() -> None:
    """Large products, H100: 0.53 of BF16 (median of the measured)."""
    eight, sixteen = times(quantized(8192, 8192, 8192, Precision.FP8), product(8192, 8192, 8192), gpu=H100)
    assert 0.5 < eight / sixteen < 0.57


def test_scales_per_block_of_fp8_cost_time() -> None:
    plain, blocked = times(
        quantized(8192, 8192, 8192, Precision.FP8), quantized(8192, 8192, 8192, Precision.FP8, block=128), gpu=H100
    )
    assert 1.2 < blocked / plain < 1.6


def test_int8_operands_cost_what_their_rate_says() -> None:
    """No constant of 8-bit floats changes them."""
    c = constants_for(A100)
    other = dataclasses.replace(c, fp8_us=9.0, fp8_share=0.5, block_share=0.5, dequant_cycles=1.0)
    batch = Batch.of([product(4096, 4096, 4096, Precision.INT8), product(64, 64, 64)], A100)
    assert batch.predict(c).total.tolist() == batch.predict(other).total.tolist()


def test_fp4_has_no_small_tile_and_no_split_sum() -> None:
    """Few rows and a long k: one block of 128 rows sums all of it (64 us measured at 16384)."""
    batch = Batch.of([quantized(16, 1024, 16384, Precision.FP4, block=16)], RTX)
    choice = batch.predict(constants_for(RTX)).choice
    assert choice is not None
    assert choice.split[0] == 1
    assert TILES[choice.tile[0]][0] >= 128
    assert TILES[choice.tile[0]][1] >= 64


def test_fp8_with_scales_per_block_has_the_blocks_columns_and_narrow_weights_have_not() -> None:
    """128 columns of a weight share a scale, so that no tile has fewer; INT4 weights of FP16 products have such too.
    Few rows are no tile of 128 (H100 and RTX PRO 6000, any number of rows: 16 and 24 % against 37 and 63)."""
    batch = Batch.of(
        [quantized(512, 128, 2048, Precision.FP8, block=128), quantized(1, 1024, 2048, Precision.FP16, 4, 128)], H100
    )
    choice = batch.predict(constants_for(H100)).choice
    assert choice is not None
    assert TILES[choice.tile[0]][1] >= 128
    assert min(TILES[choice.tile[1]]) < 128


def test_few_rows_of_fp8_with_scales_per_block_take_the_time_of_their_weight() -> None:
    few, plain = times(
        quantized(1, 4096, 4096, Precision.FP8, block=128), quantized(1, 4096, 4096, Precision.FP8), gpu=RTX
    )
    assert few < 2.5 * plain


@pytest.mark.parametrize("bits", (4, 8))
def test_narrow_weights_are_read_as_they_are_and_turned_into_16_bits_per_tile(bits: int) -> None:
    """Few rows: the time of their bytes; many: more than that of 16-bit ones."""
    few, wide_few = times(quantized(1, 16384, 8192, Precision.FP16, bits), product(1, 16384, 8192), gpu=A100)
    many, wide_many = times(quantized(8192, 8192, 8192, Precision.FP16, bits), product(8192, 8192, 8192), gpu=A100)
    assert few < 0.75 * wide_few
    assert 1 < many / wide_many < 1.1


def test_narrow_weights_share_a_sum_by_two_at_most() -> None:
    batch = Batch.of([quantized(1, 512, 65536, Precision.FP16, 8), product(1, 512, 65536)], A100)
    choice = batch.predict(constants_for(A100)).choice
    assert choice is not None
    assert choice.split[0] <= 2 < choice.split[1]


def test_narrow_weights_have_tiles_of_128_columns_but_for_a_few_rows() -> None:
    """Up to 15 rows have a kernel of their own (TensorRT-LLM profiles it below 16 rows)."""
    batch = Batch.of([quantized(rows, 1024, 4096, Precision.FP16, 4) for rows in (15, 16, 64, 512)], A100)
    choice = batch.predict(constants_for(A100)).choice
    assert choice is not None
    few, *many = (TILES[tile][1] for tile in choice.tile)
    assert few < 128 <= min(many)


def test_a_sum_of_fp8_is_not_split_into_many_short_parts() -> None:
    batch = Batch.of([quantized(16, 128, k, Precision.FP8) for k in (4096, 65536)], RTX)
    choice = batch.predict(constants_for(RTX)).choice
    assert choice is not None
    assert choice.split.tolist() == [1, 16]


@pytest.mark.parametrize(("dtype", "bits"), ((Precision.FP8, 0), (Precision.FP16, 8), (Precision.FP16, 4)))
@pytest.mark.parametrize("rows", (1, 15, 16, 256))
@pytest.mark.parametrize("gpu", (RTX, H100, find_gpu("L40S")), ids=lambda gpu: gpu.name)
def test_a_sum_twice_as_long_takes_no_less_time(gpu: GpuSpec, rows: int, dtype: Precision, bits: int) -> None:
    lengths = np.geomspace(512, 32768, 60).astype(int)
    works = [quantized(rows, 64, int(k), dtype, bits) for k in (*lengths, *(2 * lengths))]
    aligned = [dataclasses.replace(work, alignment_bytes=128) for work in works]
    short, long = np.array(times(*aligned, gpu=gpu)).reshape(2, -1)
    assert np.all(long >= 0.98 * short)


@pytest.mark.parametrize("bits", (8, 4))
def test_one_row_more_of_a_narrow_product_takes_no_less_time(bits: int) -> None:
    """16 rows and more are another kernel's."""
    for n, k in ((512, 65536), (4096, 4096), (16384, 1024)):
        few, many = times(*(quantized(rows, n, k, Precision.FP16, bits) for rows in (15, 16)), gpu=A100)
        assert many >= 0.98 * few


def test_a_weight_as_wide_as_the_operands_is_not_narrow() -> None:
    work = product(256, 256, 256)
    same = dataclasses.replace(work, weight_bits=round(8 * ELEMENT_BYTES[work.dtype]))
    assert len(set(times(work, same, gpu=A100))) == 1


Shapes = dict[str, tuple[int, ...]]


def graph(stored: ir.DataType, block: int, activation: ir.DataType | None = None) -> tuple[ir.Node, Shapes]:
    """A MatMul [4, 256] x [256, 64] whose weight is dequantized, and whose activation is where a type is given."""

    constants: list[ir.Value] = []

    def constant(name: str, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        value.const_value = ir.tensor(np.zeros(shape, np.float32))
        constants.append(value)
        return value

    def dequantize(name: str, source: ir.Value, block: int) -> ir.Value:
        scale = constant(f"{name}_scale", ir.DataType.FLOAT, (256 // block, 64) if block else ())
        node = ir.node("DequantizeLinear", [source, scale], attributes={"axis": 0, "block_size": block})
        node.outputs[0].name = name
        node.outputs[0].dtype = ir.DataType.FLOAT
        return node.outputs[0]

    shown = ir.Value(name="x", type=ir.TensorType(activation or ir.DataType.FLOAT), shape=ir.Shape((4, 256)))
    x = dequantize("x_float", shown, 0) if activation else shown
    node = ir.node("MatMul", [x, dequantize("w", constant("w_stored", stored, (256, 64)), block)])
    node.outputs[0].name = "y"
    ir.Graph([], [], nodes=[], initializers=constants)
    shapes: Shapes = {
        "x": (4, 256),
        "x_float": (4, 256),
        "w": (256, 64),
        "w_stored": (256, 64),
        "y": (4, 64),
    }
    return node, shapes


@pytest.mark.parametrize(
    ("stored", "block", "activation", "expected"),
    (
        (ir.DataType.INT8, 0, None, (8, 0)),
        (ir.DataType.INT4, 128, None, (4, 128)),
        (ir.DataType.INT8, 0, ir.DataType.INT8, (0, 0)),
        (ir.DataType.FLOAT4E2M1, 16, ir.DataType.FLOAT4E2M1, (0, 16)),
    ),
)
def test_the_weight_of_a_node_by_its_dequantizer(
    stored: ir.DataType, block: int, activation: ir.DataType | None, expected: tuple[int, int]
) -> None:
    node, shapes = graph(stored, block, activation)
    types = GraphTypes(Precision.FP16)
    work = work_of_node(node, shapes, types)
    assert narrow_weight(node, types) == expected
    assert work is not None
    assert (work.weight_bits, work.scale_block) == expected


def test_a_plain_product_has_no_narrow_weight() -> None:
    node = ir.node("MatMul", [ir.Value(name="a"), ir.Value(name="b")])
    assert narrow_weight(node, GraphTypes()) == (0, 0)
