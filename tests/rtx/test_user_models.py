"""Models and samples as users have them, from Python."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import trtopt


def matmul(dtype: int, weight: np.ndarray) -> onnx.ModelProto:
    """y = Relu(x w), x [4, 8], w [8, 8], all of ``dtype``."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="product"),
        helper.make_node("Relu", ["a"], ["y"], name="relu"),
    ]
    borders = [helper.make_tensor_value_info(name, dtype, [4, 8]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", borders[:1], borders[1:], [numpy_helper.from_array(weight, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def weights() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8"])
def test_a_model_whose_border_is_bf16_is_calibrated_verified_and_built(precision: str, tmp_path: Path) -> None:
    model = matmul(TensorProto.BFLOAT16, weights().astype(ml_dtypes.bfloat16))
    report = trtopt.build(model, precision=precision, output=str(tmp_path / "m.engine"))
    assert report.engine is not None and report.accuracy is not None
    assert report.accuracy.outputs["y"].sqnr_db > 30


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_a_graph_without_operators_is_built(precision: str, tmp_path: Path) -> None:
    model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 21]> g (float[2,3] x) => (float[2,3] x) {}')
    report = trtopt.build(model, precision=precision, output=str(tmp_path / "m.engine"))
    assert report.engine is not None


def test_nan_weights_stay_out_of_int8_and_are_named(tmp_path: Path) -> None:
    broken = weights()
    broken[0, 0] = np.nan
    report = trtopt.optimize(
        matmul(TensorProto.FLOAT, broken), precision="int8", output=str(tmp_path / "m.onnx"), allow_accuracy_loss=True
    )
    refused = [refusal for step in report.steps for refusal in step.refusals]
    assert any(refusal.node == "product" and "w holds NaN" in refusal.reason for refusal in refused)


def test_outputs_overwrite_neither_the_model_nor_its_weights(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(
        matmul(TensorProto.FLOAT, weights()), path, save_as_external_data=True, location="w.bin", size_threshold=0
    )
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(trtopt.TrtoptError, match="would overwrite the model"):
        trtopt.build(path, output=str(path))
    with pytest.raises(trtopt.TrtoptError, match="would overwrite the weights"):
        trtopt.build(path, save_onnx=str(tmp_path / "w.bin"))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_labels_beyond_the_classes_are_refused(tmp_path: Path) -> None:
    samples = {"x": np.ones((8, 8), np.float32), "__labels__": np.full(8, 99)}
    with pytest.raises(trtopt.TrtoptError, match="there are 8 classes"):
        trtopt.optimize(
            matmul(TensorProto.FLOAT, weights()), calib=samples, metric="top1", output=str(tmp_path / "m.onnx")
        )


def test_a_negative_accuracy_drop_is_a_usage_error() -> None:
    with pytest.raises(trtopt.TrtoptError, match="negative"):
        trtopt.BuildConfig(max_accuracy_drop=-1)
