"""Weights in blocks that models bring along: MatMulNBits and zero points in the form the compilers read."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from trtopt.errors import InvalidModelError
from trtopt.graph import edit
from trtopt.precision.qdq.existing import canonicalize_qdq
from trtopt.source.onnx_file import load

RNG = np.random.default_rng(0)
DEPTH, COLUMNS, BLOCK = 64, 24, 32
SCALES = RNG.uniform(0.5, 1, (COLUMNS, DEPTH // BLOCK)).astype(np.float32)


def nbits(
    path: Path, *, bits: int = 4, zero: bool = False, depth: int = DEPTH, scales: np.ndarray = SCALES
) -> np.ndarray:
    """x [3, 64] -> MatMulNBits with a bias -> y; the weight ``[K, N]`` that it stands for."""
    numbers = RNG.integers(0, 1 << bits, (COLUMNS, DEPTH // BLOCK, BLOCK)).astype(np.uint8)
    points = RNG.integers(0, 1 << bits, (COLUMNS, DEPTH // BLOCK)).astype(np.uint8)

    def packed(array: np.ndarray) -> np.ndarray:
        return array if bits == 8 else (array[..., ::2] | array[..., 1::2] << 4).astype(np.uint8)

    tensors = {"w": packed(numbers), "s": scales.reshape(-1), "b": np.ones(COLUMNS, np.float32)}
    if zero:
        tensors["z"] = packed(points).reshape(-1)
    node = helper.make_node(
        "MatMulNBits",
        ["x", "w", "s", "z" if zero else "", "", "b"],
        ["y"],
        name="product",
        domain="com.microsoft",
        K=depth,
        N=COLUMNS,
        bits=bits,
        block_size=BLOCK,
    )
    save(path, node, tensors, [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)])
    centre = points[..., None].astype(np.float32) if zero else float(1 << (bits - 1))
    exact: np.ndarray = ((numbers - centre) * scales[..., None]).reshape(COLUMNS, DEPTH).T
    return exact


def save(
    path: Path, node: onnx.NodeProto, tensors: dict[str, np.ndarray], opsets: list[onnx.OperatorSetIdProto]
) -> None:
    value = helper.make_tensor_value_info
    nodes = [node]
    if node.output[0] != "y":
        nodes.append(helper.make_node("MatMul", ["x", node.output[0]], ["y"], name="product"))
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", TensorProto.FLOAT, [3, DEPTH])],
        [value("y", TensorProto.FLOAT, [3, COLUMNS])],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)


def mended(path: Path) -> ir.Model:
    found = canonicalize_qdq(load(path).model, "tensorrt-rtx")
    assert found is not None
    return found.model


def weight_of(model: ir.Model) -> ir.DataType | None:
    node = next(node for node in model.graph if node.op_type == "DequantizeLinear")
    assert len(node.inputs) == 2 and node.inputs[0] is not None
    return node.inputs[0].dtype


def run(model: ir.Model, x: np.ndarray) -> np.ndarray:
    (y,) = ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": x})
    return np.asarray(y)


@pytest.mark.parametrize(
    ("bits", "zero", "dtype"),
    [(4, False, ir.DataType.INT4), (4, True, ir.DataType.INT8), (8, False, ir.DataType.INT8)],
)
def test_matmulnbits_is_a_product_of_a_dequantized_weight(
    bits: int, zero: bool, dtype: ir.DataType, tmp_path: Path
) -> None:
    exact = nbits(tmp_path / "net.onnx", bits=bits, zero=zero)
    model = mended(tmp_path / "net.onnx")
    x = RNG.standard_normal((3, DEPTH)).astype(np.float32)
    assert np.allclose(run(model, x), x @ exact + 1, atol=1e-3)
    assert weight_of(model) is dtype and [node.name for node in model.graph if node.op_type == "MatMul"] == ["product"]
    assert not any(node.domain for node in edit.all_nodes(model.graph))


def test_signed_scales_of_eight_bits_become_a_wide_weight(tmp_path: Path) -> None:
    """ONNX Runtime's default quantizer gives a block the sign of its largest number; TensorRT for RTX reads no negative
    scale of INT8."""
    exact = nbits(tmp_path / "net.onnx", bits=8, scales=-SCALES)
    model = mended(tmp_path / "net.onnx")
    x = RNG.standard_normal((3, DEPTH)).astype(np.float32)
    assert np.allclose(run(model, x), x @ exact + 1, atol=1e-3)
    assert not any(node.op_type == "DequantizeLinear" for node in model.graph)


def test_zero_points_that_eight_bits_do_not_hold_give_a_wide_weight(tmp_path: Path) -> None:
    exact = nbits(tmp_path / "net.onnx", bits=8, zero=True)
    model = mended(tmp_path / "net.onnx")
    x = RNG.standard_normal((3, DEPTH)).astype(np.float32)
    assert np.allclose(run(model, x), x @ exact + 1, atol=1e-3)
    assert not any(node.op_type == "DequantizeLinear" for node in model.graph)


def test_sizes_that_do_not_fit_are_one_clear_error(tmp_path: Path) -> None:
    nbits(tmp_path / "net.onnx", depth=DEPTH + BLOCK)
    with pytest.raises(InvalidModelError, match="sizes"):
        mended(tmp_path / "net.onnx")


def dequantized(path: Path, opset: int) -> np.ndarray:
    """x -> MatMul with a UINT4 weight in blocks with zero points -> y."""
    numbers = RNG.integers(0, 16, (DEPTH, COLUMNS)).astype(np.int32)
    points = np.full((DEPTH // BLOCK, COLUMNS), 8)
    tensors = {
        "q": numbers.astype(ml_dtypes.uint4),
        "s": np.ascontiguousarray(SCALES.T),
        "z": points.astype(ml_dtypes.uint4),
    }
    node = helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"], axis=0, block_size=BLOCK)
    save(path, node, tensors, [helper.make_opsetid("", opset)])
    exact: np.ndarray = ((numbers - 8) * np.repeat(SCALES.T, BLOCK, axis=0)).astype(np.float32)
    return exact


@pytest.mark.parametrize("opset", [17, 21])
def test_a_weight_in_blocks_loses_its_zero_point_and_nothing_else(opset: int, tmp_path: Path) -> None:
    """Model Optimizer writes Q/DQ in blocks into models of opset 17 too."""
    exact = dequantized(tmp_path / "net.onnx", opset)
    model = mended(tmp_path / "net.onnx")
    x = RNG.standard_normal((3, DEPTH)).astype(np.float32)
    assert np.allclose(run(model, x), x @ exact, atol=1e-3)
    assert weight_of(model) is ir.DataType.INT4
