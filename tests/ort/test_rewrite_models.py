"""Real models keep their outputs through load, clean and save."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from trtopt.graph import invariants
from trtopt.rewrite.driver import run
from trtopt.source.onnx_file import load
from trtopt.source.save import save_model

MODELS = Path(__file__).resolve().parents[3] / "shared" / "models"
SYMBOLS = {"batch": 3, "sequence": 576}

CASES = {
    "resnet20_cifar10/model.onnx": 1e-5,
    "squeezenet11_fp16/model.onnx": 1e-6,
    # The original runs partly in FP16 kernels, the converted Softmax in another one.
    "squeezenet11_fp16/model_fp16.onnx": 1e-3,
    "fastestdet_coco/model.onnx": 1e-5,
    "dscnn_kws/model.onnx": 1e-5,
    "crepe_tiny/model.onnx": 1e-6,
    "mnist_cntk/model.onnx": 1e-5,
    "silero_vad/model.onnx": 1e-5,
    "silero_vad/model_ifless.onnx": 1e-5,
}
"""Largest absolute difference allowed; outputs are between 0.1 and 20."""


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def inputs(model: onnxruntime.InferenceSession) -> dict[str, np.ndarray]:
    types = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}
    rng = np.random.default_rng(0)
    feeds = {}
    for item in model.get_inputs():
        shape = [SYMBOLS.get(dim, 1) if isinstance(dim, str) else dim for dim in item.shape]
        data = np.full(shape, 16000) if item.name == "sr" else rng.standard_normal(shape)
        feeds[item.name] = np.asarray(data, dtype=types[item.type])
    return feeds


@pytest.mark.shared
@pytest.mark.parametrize("name", CASES)
def test_outputs_stay(name: str, tmp_path: Path) -> None:
    path = MODELS / name
    if not path.exists():
        pytest.skip(f"{path} is not there")
    artifact = run(load(path), strict=True).artifact
    invariants.check(artifact.model)
    save_model(artifact.model, tmp_path / "m.onnx")
    before, after = session(path), session(tmp_path / "m.onnx")
    feeds = inputs(before)
    assert [item.name for item in before.get_outputs()] == [item.name for item in after.get_outputs()]
    for expected, found in zip(before.run(None, feeds), after.run(None, feeds), strict=True):
        assert expected.dtype == found.dtype and expected.shape == found.shape
        np.testing.assert_allclose(found, expected, rtol=0, atol=CASES[name])
