"""Narrow weights in the kernels of the real TensorRT for RTX builder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper
from rtx_nets import constant, model

import trtopt
from trtopt.report.schema.build import BuildReport

pytest.importorskip("tensorrt_rtx")

RNG = np.random.default_rng(0)
DEPTH, COLUMNS = 1024, 1536


def product(rows: int, depth: int, columns: int) -> onnx.ModelProto:
    """x [rows, depth] -> MatMul -> + bias -> y [rows, columns]."""
    weight = (RNG.standard_normal((depth, columns)) / 32).astype(np.float32)
    constants = [constant("w", weight), constant("b", RNG.standard_normal(columns).astype(np.float32))]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], name="product"),
        helper.make_node("Add", ["m", "b"], ["y"], name="bias"),
    ]
    return model(nodes, [("x", np.float32, [rows, depth])], [("y", np.float32)], constants)


def built(folder: Path, rows: int = 8, size: tuple[int, int] = (DEPTH, COLUMNS), **options: Any) -> BuildReport:
    x = RNG.standard_normal((8 * rows, size[0])).astype(np.float32)
    given: dict[str, Any] = {"calib": {"x": x}, "min_agreement": 0.0, "min_sqnr_db": 5.0, "gpu": "L4", **options}
    return trtopt.build(product(rows, *size), output=folder / "m.engine", backend="tensorrt-rtx", **given)


def types_of_constants(report: BuildReport) -> set[str]:
    assert report.engine is not None and report.engine.layers is not None
    return {tensor.dtype for layer in report.engine.layers for tensor in layer.constants}


@pytest.mark.parametrize("rows", [1, 8, 128])
@pytest.mark.parametrize("block", ["32", "64", "128"])
def test_the_product_reads_four_bits_in_its_own_kernel(rows: int, block: str, tmp_path: Path) -> None:
    report = built(tmp_path, rows, weights="int4", weight_block=block, keep_all_weights=True)
    assert report.engine is not None and report.engine.layers is not None
    layers = [layer for layer in report.engine.layers if "product" in layer.onnx_nodes]
    assert len(layers) == 1 and "Int4" in {tensor.dtype for tensor in layers[0].constants}
    assert report.engine.weight_bytes is not None and report.engine.weight_bytes < 0.3 * 2 * DEPTH * COLUMNS


def test_what_pays_stays_and_the_engine_is_faster(tmp_path: Path) -> None:
    report = built(tmp_path, 1, (4096, 2048), weights="int4")
    assert report.weights is not None and report.weights.nodes == ("product",)
    assert report.shipped is not None and report.plain is not None
    assert report.shipped.predicted_us < report.plain.predicted_us


def test_what_does_not_pay_goes(tmp_path: Path) -> None:
    """The compiler dequantizes FP4 of weights alone in a kernel of its own, for which nothing is faster."""
    report = built(tmp_path, weights="nvfp4", gpu="RTX 5090")
    assert report.weights is not None and not report.weights.nodes
    assert any("--keep-all-weights" in text for text in report.warnings)
    assert [item.kept for item in report.guard] == [False]


@pytest.mark.parametrize("recipes", ["all", "none"])
def test_the_scores_of_an_odd_vocabulary_tied_to_its_embedding_read_four_bits(tmp_path: Path, recipes: str) -> None:
    """The table stays for the embedding, in 16 bits; the columns are filled up by a recipe, or for the weights."""
    words, width = 4001, 512
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["e"], name="embedding"),
        helper.make_node("Relu", ["e"], ["r"], name="relu"),
        helper.make_node("Transpose", ["table"], ["w"], name="transpose", perm=[1, 0]),
        helper.make_node("MatMul", ["r", "w"], ["y"], name="product"),
    ]
    table = constant("table", (RNG.standard_normal((words, width)) / 16).astype(np.float32))
    network = model(nodes, [("ids", np.int64, [1, 1])], [("y", np.float32)], [table])
    ids, saved = RNG.integers(0, words, (16, 1)), tmp_path / "saved.onnx"
    options: dict[str, Any] = {"calib": {"ids": ids}, "min_agreement": 0.0, "min_sqnr_db": 5.0, "gpu": "L4"}
    options |= {"weights": "int4", "keep_all_weights": True, "save_onnx": saved, "recipes": recipes}
    report = trtopt.build(network, output=tmp_path / "m.engine", **options)
    assert report.weights is not None and len(report.weights.nodes) == 1
    assert report.engine is not None and report.engine.layers is not None
    (layer,) = (layer for layer in report.engine.layers if set(report.weights.nodes) & set(layer.onnx_nodes))
    assert "Int4" in {tensor.dtype for tensor in layer.constants}
    kinds = {onnx.TensorProto.DataType.Name(item.data_type) for item in onnx.load(saved).graph.initializer}
    assert {"FLOAT16", "INT4"} <= kinds


@pytest.mark.parametrize(("weights", "dtype"), [("nvfp4", "FP4"), ("mxfp8", "FP8"), ("int8", "Int8")])
def test_each_format_builds(weights: str, dtype: str, tmp_path: Path) -> None:
    report = built(tmp_path, weights=weights, keep_all_weights=True, gpu="RTX 5090")
    assert any(found.startswith(dtype) for found in types_of_constants(report))
    assert report.accuracy is not None and report.accuracy.outputs["y"].sqnr_db > 15


def quantized_elsewhere(kind: str) -> onnx.ModelProto:
    """x [8, 1024] -> MatMul of a weight ``[N, K]`` as Model Optimizer stores it for TensorRT -> y [8, 1536]."""
    exact = RNG.standard_normal((COLUMNS, DEPTH)).astype(np.float32)
    if kind == "nvfp4":
        scales = np.full((COLUMNS, DEPTH // 16), 0.25, ml_dtypes.float8_e4m3fn)
        constants = [stored("w", exact.astype(ml_dtypes.float4_e2m1fn)), stored("s8", scales)]
        constants.append(constant("g", np.array(0.5, np.float32)))
        nodes = [
            helper.make_node("DequantizeLinear", ["s8", "g"], ["s"], name="scale"),
            helper.make_node("DequantizeLinear", ["w", "s"], ["d"], name="weight", axis=1, block_size=16),
        ]
    else:
        constants = [stored("w", exact.astype(ml_dtypes.float8_e4m3fn))]
        constants.append(constant("s", np.full((COLUMNS, DEPTH // 32), 125, np.uint8)))
        attributes = {"axis": -1, "block_size": 32, "output_dtype": 1}
        nodes = [helper.make_node("TRT_MXFP8DequantizeLinear", ["w", "s"], ["d"], domain="trt", **attributes)]
    nodes += [
        helper.make_node("Transpose", ["d"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "t"], ["y"], name="product"),
    ]
    proto = model(nodes, [("x", np.float32, [8, DEPTH])], [("y", np.float32)], constants)
    del proto.opset_import[:]
    proto.opset_import.extend([helper.make_opsetid("", 23), helper.make_opsetid("trt", 1)])
    proto.ir_version = 11
    return proto


def stored(name: str, array: np.ndarray) -> onnx.TensorProto:
    tensor = ir.to_proto(ir.Tensor(array, name=name))
    assert isinstance(tensor, onnx.TensorProto)
    return tensor


@pytest.mark.parametrize(("kind", "dtype"), [("nvfp4", "FP4"), ("mxfp8", "FP8")])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_a_model_that_brings_narrow_weights_builds(kind: str, dtype: str, precision: str, tmp_path: Path) -> None:
    report = trtopt.build(
        quantized_elsewhere(kind), output=tmp_path / "m.engine", precision=precision, gpu="RTX 5090", recipes="none"
    )
    assert any(found.startswith(dtype) for found in types_of_constants(report))
    assert report.accuracy is not None and report.accuracy.outputs["y"].sqnr_db > 40


def test_activations_in_nvfp4_compute_in_fp4(tmp_path: Path) -> None:
    """Weights and activations of a Model Optimizer export, in a kernel of FP4 operands."""
    network = quantized_elsewhere("nvfp4")
    product = next(node for node in network.graph.node if node.op_type == "MatMul")
    x = product.input[0]
    nodes = [
        helper.make_node("TRT_FP4DynamicQuantize", [x, "tensor"], ["xq", "xs"], domain="trt", axis=-1, block_size=16),
        helper.make_node("DequantizeLinear", ["xs", "tensor"], ["xsd"]),
        helper.make_node("DequantizeLinear", ["xq", "xsd"], ["xd"], axis=-1, block_size=16),
    ]
    product.input[0] = "xd"
    others = list(network.graph.node)
    del network.graph.node[:]
    network.graph.node.extend([*nodes, *others])
    network.graph.initializer.append(constant("tensor", np.float32(0.002)))
    report = trtopt.build(network, output=tmp_path / "m.engine", precision="fp16", gpu="RTX 5090", recipes="none")
    assert report.engine is not None and report.engine.layers is not None
    types = [{t.dtype for t in layer.inputs} for layer in report.engine.layers if product.name in layer.onnx_nodes]
    assert {"FP4E2M1", "FP8"} in types, types
    assert report.accuracy is not None and report.accuracy.outputs["y"].sqnr_db > 20
