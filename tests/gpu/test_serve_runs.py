"""Engines served on a real GPU. Skipped where there is none."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
import rtx_nets

import trtopt
from trtopt.engine.backend import TENSORRT, TENSORRT_RTX, Backend
from trtopt.engine.run import why_not_run
from trtopt.errors import UsageError
from trtopt.serve.gpu import WARM_UPS

BACKENDS = [pytest.param(backend, id=backend.name) for backend in (TENSORRT_RTX, TENSORRT)]


def images(batch: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((batch, 16, 16, 16)).astype(np.float32)


@pytest.fixture(params=BACKENDS)
def built(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An engine for batches of 1 to 4 and of 5 to 16, with its model beside it (``model.onnx``)."""
    backend: Backend = request.param
    reason = why_not_run(backend)
    if reason:
        pytest.skip(reason)
    onnx.save(rtx_nets.conv_net(batch="N"), tmp_path / "net.onnx")
    trtopt.build(
        tmp_path / "net.onnx",
        precision="fp32",
        backend=backend.name,
        min_shapes=("x:1x16x16x16", "x:5x16x16x16"),
        opt_shapes=("x:2x16x16x16", "x:8x16x16x16"),
        max_shapes=("x:4x16x16x16", "x:16x16x16x16"),
        save_onnx=str(tmp_path / "model.onnx"),
        output=str(tmp_path / "net.engine"),
    )
    return tmp_path / "net.engine"


def reference(path: Path, x: np.ndarray) -> np.ndarray:
    with trtopt.Engine.load(path.with_name("model.onnx")) as model:
        (found,) = model.run({"x": x}).values()
    return np.asarray(found)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [0, 3])
def test_replies_are_those_of_the_model_with_and_without_graphs(
    graphs: int, built: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with trtopt.Engine.load(built, contexts=1, cuda_graphs=graphs) as engine, caplog.at_level(logging.WARNING):
        assert " on NVIDIA" in engine.runtime and not engine.fallback_reason
        for repeat in range(WARM_UPS + 3):
            for batch in (1, 4, 5, 16, 3):
                x = images(batch, seed=repeat)
                (found,) = engine.run({"x": x}).values()
                np.testing.assert_allclose(found, reference(built, x), rtol=2e-2, atol=2e-2)
        text = engine.metrics()
    assert not caplog.records, caplog.text
    if graphs and "tensorrt-rtx" not in engine.runtime:
        assert 'event="captured"' in text and 'event="failed"} 0' in text


@pytest.mark.gpu
def test_threads_get_what_one_would(built: Path) -> None:
    with trtopt.Engine.load(built, contexts=4, queue=64) as engine:
        calls = [images(1 + seed % 16, seed) for seed in range(200)]
        serial = [engine.run({"x": x}) for x in calls]
        with ThreadPoolExecutor(32) as threads:
            for found, expected in zip(threads.map(lambda x: engine.run({"x": x}), calls), serial, strict=True):
                for name in expected:
                    np.testing.assert_allclose(found[name], expected[name], rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("package", ["torch", "cupy"])
def test_tensors_on_the_gpu_stay_there(package: str, built: Path) -> None:
    library = pytest.importorskip(package, reason=f"needs {package}")
    if package == "torch" and not library.cuda.is_available():
        pytest.skip("torch has no CUDA")
    x = images(4)
    with trtopt.Engine.load(built) as engine:
        tensor = library.asarray(x, device="cuda") if package == "torch" else library.asarray(x)
        for _ in range(WARM_UPS + 2):
            (found,) = engine.run({"x": tensor * 1}).values()
            assert type(found) is type(tensor)
            on_host = found.cpu().numpy() if package == "torch" else found.get()
            np.testing.assert_allclose(on_host, reference(built, x), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_output_that_the_runtime_has_on_the_host(backend: Backend, tmp_path: Path) -> None:
    reason = why_not_run(backend)
    if reason:
        pytest.skip(reason)
    text = """
        <ir_version: 10, opset_import: ["" : 21]>
        net (float[N, 8] x) => (float[N, 8] y, int64[2] size) { y = Relu(x) size = Shape(x) }
    """
    onnx.save(onnx.parser.parse_model(text), tmp_path / "net.onnx")
    ranges = {f"{name}_shapes": (f"x:{size}x8",) for name, size in (("min", 1), ("opt", 4), ("max", 16))}
    path = str(tmp_path / "net.engine")
    trtopt.build(tmp_path / "net.onnx", precision="fp32", backend=backend.name, output=path, **ranges)
    with trtopt.Engine.load(path) as engine:
        for size in (1, 5, 16, 5):
            found = engine.run({"x": np.ones((size, 8), np.float32)})
            assert found["size"].tolist() == [size, 8] and found["y"].shape == (size, 8)


@pytest.mark.gpu
def test_calls_from_a_thread_whose_current_gpu_is_another_one(built: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs torch with two GPUs")
    x = images(4)
    with trtopt.Engine.load(built) as engine, torch.cuda.device(1):
        (found,) = engine.run({"x": x}).values()
        np.testing.assert_allclose(found, reference(built, x), rtol=2e-2, atol=2e-2)
        assert torch.cuda.current_device() == 1
        with pytest.raises(UsageError, match="GPU 1"):
            engine.run({"x": torch.from_numpy(x).to("cuda:1")})
