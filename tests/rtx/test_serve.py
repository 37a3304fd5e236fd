"""Engines of the real builder, served where their GPU is not: by the optimized model and the part for the host."""

from __future__ import annotations

import json
from pathlib import Path

import detectors
import numpy as np
import onnx
import onnx.parser
import pytest

import trtopt
from trtopt.engine.loaded import LoadedEngine
from trtopt.engine.manifest import verify
from trtopt.engine.native_log import logger_of
from trtopt.errors import IntegrityError, UsageError
from trtopt.hardware.probe import probe
from trtopt.source.check import sha256_of
from trtopt.source.onnx_file import load
from trtopt.support.ort_session import OrtSession

tensorrt_rtx = pytest.importorskip("tensorrt_rtx", reason="needs TensorRT for RTX")


@pytest.mark.skipif(probe().gpu is not None, reason="this machine has a GPU")
def test_a_cut_model_answers_as_the_original(tmp_path: Path) -> None:
    onnx.save(detectors.detector(), tmp_path / "det.onnx")
    samples, saved = {"image": detectors.images(8)}, tmp_path / "saved" / "det.opt.onnx"
    saved.parent.mkdir()
    report = trtopt.build(tmp_path / "det.onnx", precision="fp32", calib=samples, save_onnx=str(saved))
    assert report.engine is not None and report.engine.path is not None
    manifest = verify(report.engine.path)
    assert manifest.onnx_sha256 == sha256_of([saved])
    assert manifest.host is not None
    assert manifest.host.model_outputs == ("detections", "selected", "scores")
    with (
        OrtSession(load(tmp_path / "det.onnx").model) as original,
        trtopt.Engine.load(report.engine.path, fallback=saved) as engine,
    ):
        for image in detectors.images(4, seed=7):
            expected = dict(zip(original.output_names, original.run({"image": image[None]}), strict=True))
            found = engine.run({"image": image[None]})
            assert list(found) == ["detections", "selected", "scores"]
            for name, array in expected.items():
                np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)
    with pytest.raises(IntegrityError, match="hash"):
        trtopt.Engine.load(report.engine.path, fallback=tmp_path / "det.onnx")
    # Beside the whole model, as a build of it leaves it there, the part for the host is not its part.
    (tmp_path / "det.host.onnx").write_bytes((tmp_path / manifest.host.files[0].name).read_bytes())
    with trtopt.Engine.load(tmp_path / "det.onnx") as whole:
        assert list(whole.run({"image": detectors.images(1)})) == list(original.output_names)


def test_without_save_onnx_the_manifest_has_no_hash_of_it(tmp_path: Path) -> None:
    onnx.save(detectors.detector(), tmp_path / "det.onnx")
    trtopt.build(tmp_path / "det.onnx", precision="fp32", calib={"image": detectors.images(8)})
    manifest = json.loads((tmp_path / "det.rtx.engine.manifest.json").read_text())
    assert manifest["onnx_sha256"] == ""


def test_what_the_runtime_logs_is_bounded() -> None:
    engine = LoadedEngine.__new__(LoadedEngine)
    engine.trt, engine.messages = tensorrt_rtx, []
    with engine.heard():
        for index in range(1000):
            logger_of(tensorrt_rtx).log(tensorrt_rtx.ILogger.Severity.ERROR, f"error {index}")
    assert len(engine.messages) <= 100 and engine.messages[-1] == "error 999"


def test_rows_of_two_batches_are_not_filled_up(tmp_path: Path) -> None:
    """One image beside two texts: whose rows an output has, nothing says."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    net (float[N, 3] image, float[M, 3] text) => (float[N, 3] a, float[M, 3] b) { a = Relu(image) b = Relu(text) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "net.onnx")
    least, most = (dict.fromkeys(("image", "text"), (rows, 3)) for rows in (2, 4))
    report = trtopt.build(tmp_path / "net.onnx", min_shapes=[least], opt_shapes=[most], max_shapes=[most])
    assert report.engine is not None and report.engine.path is not None
    assert verify(report.engine.path).filled_rows == 0


@pytest.mark.skipif(probe().gpu is not None, reason="this machine has a GPU")
@pytest.mark.parametrize("mixed", [False, True])
def test_a_fixed_batch_takes_fewer_rows_where_they_are_alone(tmp_path: Path, mixed: bool) -> None:
    middle = "m = ReduceMean <keepdims = 1> (c, first)" if mixed else "m = ReduceMean <keepdims = 1> (c, last)"
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
    net (float[N, 4, 8, 8] x) => (float[N, 4, 8, 8] y)
    <int64[1] first = {{0}}, int64[1] last = {{3}}> {{ c = Conv(x, w) {middle} y = Sub(c, m) }}"""
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    model.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=(4, 4, 1, 1)).astype(np.float32), "w"))
    onnx.save(model, tmp_path / "net.onnx")
    images = rng.normal(size=(8, 4, 8, 8)).astype(np.float32)
    saved = tmp_path / "net.opt.onnx"
    report = trtopt.build(
        tmp_path / "net.onnx", precision="fp16", opt_shapes=[{"x": images.shape}], save_onnx=str(saved)
    )
    assert report.engine is not None and report.engine.path is not None
    assert verify(report.engine.path).filled_rows == (0 if mixed else 8)
    with trtopt.Engine.load(report.engine.path, fallback=saved) as engine:
        whole = engine.run({"x": images})["y"]
        if mixed:
            with pytest.raises(UsageError, match="the model takes"):
                engine.run({"x": images[:3]})
        else:
            np.testing.assert_array_equal(engine.run({"x": images[:3]})["y"], whole[:3])
