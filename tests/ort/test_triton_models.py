"""Repositories of real models: names, types and dimensions are those that ONNX Runtime reports."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import triton_schema
from onnx import numpy_helper

import trtopt

ort = pytest.importorskip("onnxruntime", reason="needs ONNX Runtime")
MODELS = Path(__file__).parents[3] / "shared" / "models"
FILES = sorted(MODELS.glob("*/*.onnx"))

ORT_TYPES = {
    "tensor(float)": "TYPE_FP32",
    "tensor(float16)": "TYPE_FP16",
    "tensor(int64)": "TYPE_INT64",
}


def check(path: Path, folder: Path) -> None:
    """Compare as the backend does, and dimensions exactly: a scalar of the model is [1], the first axis of a batch is
    left out."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    config = triton_schema.read(folder)
    triton_schema.check_valid(config)
    for kind, own, wanted in (
        ("input", config.input, session.get_inputs()),
        ("output", config.output, session.get_outputs()),
    ):
        assert [tensor.name for tensor in own] == [tensor.name for tensor in wanted]
        for tensor, want in zip(own, wanted, strict=True):
            assert triton_schema.type_name(tensor.data_type) == ORT_TYPES[want.type]
            dims = [dim if isinstance(dim, int) else -1 for dim in want.shape]
            if config.max_batch_size:
                assert dims.pop(0) == -1, f"{kind} {tensor.name} has no batch"
            assert list(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims) == (dims or [1])


def filled(skeleton: Path, path: Path) -> Path:
    """A model that is kept without its weights, with zeros in their place: its tensors are those of the whole."""
    proto = onnx.load(skeleton)
    for tensor in proto.graph.initializer:
        if not tensor.raw_data and not tensor.int64_data and not tensor.float_data:
            zeros = np.zeros(tuple(tensor.dims), onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
            tensor.CopyFrom(numpy_helper.from_array(zeros, tensor.name))
    onnx.save(proto, path)
    return path


@pytest.mark.shared
@pytest.mark.skipif(not FILES, reason="needs the models folder beside the checkout")
@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_real_model(path: Path, tmp_path: Path) -> None:
    model = filled(path, tmp_path / "model.onnx") if path.stem == "skeleton" else path
    report = trtopt.triton(model, tmp_path / "repo", name=path.parent.name)
    check(model, Path(report.models[0].path))
    assert (Path(report.models[0].path) / "1" / "model.onnx").read_bytes() == model.read_bytes()
