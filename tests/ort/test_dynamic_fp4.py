"""Activations in NVFP4: computed as the specification says, and kept for the GPUs that have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

import trtopt
from trtopt.errors import InvalidModelError, TargetError
from trtopt.graph.shapes import infer_shapes
from trtopt.support.ort_session import OrtSession

K, TENSOR = 64, np.float32(0.01)


def network(*, block: int = 16, weighted: bool = False) -> onnx.ModelProto:
    """As Model Optimizer writes it: the quantizer, and two DequantizeLinear."""
    nodes = [
        helper.make_node(
            "TRT_FP4DynamicQuantize", ["x", "t"], ["q", "s"], "dyn", domain="trt", axis=-1, block_size=block
        ),
        helper.make_node("DequantizeLinear", ["s", "second"], ["sd"], "dq1"),
        helper.make_node("DequantizeLinear", ["q", "sd"], ["xd"], "dq2", axis=-1, block_size=16),
    ]
    made = "xd"
    if weighted:
        nodes.append(helper.make_node("MatMul", ["xd", "w"], ["y"], "mm"))
        made = "y"
    values: dict[str, Any] = {"t": TENSOR, "second": TENSOR}
    if weighted:
        values["w"] = np.random.default_rng(1).standard_normal((K, K)).astype(np.float32)
    graph = helper.make_graph(
        nodes,
        "fp4",
        [helper.make_tensor_value_info("x", 1, ["rows", 3, K])],
        [helper.make_tensor_value_info(made, 1, ["rows", 3, K])],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in values.items()],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("trt", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def expected(x: np.ndarray) -> np.ndarray:
    """By the types of ``ml_dtypes``."""
    blocks = x.reshape(*x.shape[:-1], -1, 16)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    scale = np.minimum(largest / np.float32(6) / TENSOR, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
    whole = scale.astype(np.float32) * TENSOR
    ratio = np.divide(blocks, whole, out=np.zeros_like(blocks), where=whole > 0)
    numbers = np.clip(ratio, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    exact: np.ndarray = (numbers * whole).reshape(x.shape)
    return exact


def test_the_numbers_are_those_of_the_specification() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 3, K)).astype(np.float32) * np.exp(rng.uniform(-12, 6, (40, 3, 1))).astype(np.float32)
    x[0, 0] = 0
    x[1, 0, :16] = np.arange(16) / 4 * TENSOR * 16  # ties between numbers
    x[1, 0, 15] = 6 * TENSOR * 16
    with OrtSession(ir.from_proto(network())) as session:
        (found,) = session.run({"x": x})
    np.testing.assert_array_equal(found, expected(x))
    assert len(np.unique(np.abs(found[1, 0, :16]))) == 8


def test_types_and_shapes_follow() -> None:
    model = infer_shapes(ir.from_proto(network()))
    found = {str(v.name): (v.dtype, list(map(str, v.shape or ()))) for node in model.graph for v in node.outputs}
    assert found["q"] == (ir.DataType.FLOAT4E2M1, ["rows", "3", "64"])
    assert found["s"] == (ir.DataType.FLOAT8E4M3FN, ["rows", "3", "4"])
    assert found["xd"] == (ir.DataType.FLOAT, ["rows", "3", "64"])


def test_other_blocks_are_refused() -> None:
    with pytest.raises(InvalidModelError, match="blocks are not 16"):
        OrtSession(ir.from_proto(network(block=32)))


def test_a_gpu_without_fp4_is_one_clear_error(tmp_path: Path) -> None:
    onnx.save(network(weighted=True), tmp_path / "m.onnx")
    with pytest.raises(TargetError, match="holds FP4"):
        trtopt.optimize(tmp_path / "m.onnx", output=tmp_path / "o.onnx", precision="fp16", gpu="L4")


def test_the_quantizer_stays_for_a_gpu_that_has_fp4(tmp_path: Path) -> None:
    onnx.save(network(weighted=True), tmp_path / "m.onnx")
    x = np.random.default_rng(2).standard_normal((8, 3, K)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    report = trtopt.optimize(
        tmp_path / "m.onnx",
        output=tmp_path / "o.onnx",
        precision="fp16",
        gpu="RTX 5090",
        calib=tmp_path / "x.npz",
    )
    ops = [node.op_type for node in onnx.load(tmp_path / "o.onnx").graph.node]
    assert ops.count("TRT_FP4DynamicQuantize") == 1
    assert report.accuracy is not None
