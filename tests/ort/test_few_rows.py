"""16 bits are decided and verified on sixteen rows where these leave no doubt, else on all samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from trtopt import api
from trtopt.report.schema.build import BuildReport

NETWORK = """<ir_version: 10, opset_import: ["" : 21]>
g (float[N,8] x) => (float[N,4] y) <float[8,4] w = {0}> { h = Tanh(x) y = MatMul(h, w) }
"""


def optimized(folder: Path, samples: np.ndarray, **options: Any) -> BuildReport:
    """TensorRT's judge is the model, and needs no compiler."""
    model = ir.from_onnx_text(NETWORK)
    weights = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    model.graph.initializers["w"].const_value = ir.Tensor(weights, name="w")
    model.graph.initializers["w"].shape = ir.Shape(weights.shape)
    ir.save(model, folder / "model.onnx")
    given: dict[str, Any] = {"precision": "fp16", "calib": {"x": samples}, "opt_shapes": [{"x": (1, 8)}], **options}
    return api.optimize(
        folder / "model.onnx",
        backend="tensorrt",
        output=str(folder / "out.onnx"),
        cache_dir=str(folder / "cache"),
        **given,
    )


def rows(count: int = 64) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((count, 8)).astype(np.float32)


def test_sixteen_rows_are_enough_and_reports_count_them(tmp_path: Path) -> None:
    report = optimized(tmp_path, rows())
    assert report.calibration is not None and report.calibration.samples == 16
    assert report.accuracy is not None and report.accuracy.samples == 16
    assert report.accuracy.notes == ("16 of 64 samples were run: every output keeps 50 dB on them",)


def test_the_samples_of_batches_are_counted_without_what_fills_them_up(tmp_path: Path) -> None:
    report = optimized(tmp_path, rows(30), opt_shapes=[{"x": (8, 8)}], calib_cache=str(tmp_path / "ranges"))
    assert report.calibration is not None and report.calibration.samples == 30


def test_inputs_of_two_batch_sizes_are_verified_sample_by_sample(tmp_path: Path) -> None:
    code = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[N,8] x, float[M,8] z) => (float[N,8] y, float[M,8] w) { y = Tanh(x) w = Sigmoid(z) }"""
    ir.save(ir.from_onnx_text(code), tmp_path / "two.onnx")
    shapes = {"x": (2, 8), "z": (3, 8)}
    samples = [{name: rows(size) for name, (size, _) in shapes.items()} for _ in range(4)]
    options: dict[str, Any] = {"precision": "fp16", "calib": samples, "opt_shapes": [shapes], "recipes": "none"}
    options |= {"backend": "tensorrt", "output": str(tmp_path / "out.onnx"), "cache_dir": str(tmp_path / "cache")}
    report = api.optimize(tmp_path / "two.onnx", **options)
    assert report.accuracy is not None and report.accuracy.samples == 4
    assert report.calibration is not None and report.calibration.samples == 4


def test_a_sample_far_beyond_those_that_were_run_is_seen(tmp_path: Path) -> None:
    samples = rows()
    samples[37] = 60000
    report = optimized(tmp_path, samples)
    assert report.calibration is not None and report.calibration.samples == 64
    assert any("values up to 6e+04 in x" in item.reason for item in report.precision.kept)


def test_outputs_below_the_bound_on_samples_that_were_not_decided_on_are_warned_of(tmp_path: Path) -> None:
    """What is added is taken off again: where it is large, FP16 has no bits left for the sum."""
    code = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[N,8] x, float[N,8] z) => (float[N,8] y) { s = Add(x, z) y = Sub(s, z) }"""
    ir.save(ir.from_onnx_text(code), tmp_path / "model.onnx")
    offset = np.zeros((32, 8), np.float32)
    options: dict[str, Any] = {"precision": "fp16", "recipes": "none", "backend": "tensorrt"}
    options |= {"output": str(tmp_path / "out.onnx"), "cache_dir": str(tmp_path / "cache")}
    calib = {"x": rows(32), "z": offset}
    assert not any("keeps" in text for text in api.optimize(tmp_path / "model.onnx", calib=calib, **options).warnings)
    offset[8:] = 200
    report = api.optimize(tmp_path / "model.onnx", calib=calib, **options)
    (text,) = (text for text in report.warnings if "keeps" in text)
    assert text.startswith("y keeps 2") and "on 32 samples, less than the 40" in text and "--min-sqnr-db" in text
    asked = api.optimize(tmp_path / "model.onnx", calib=calib, min_sqnr_db=20.0, **options)
    assert not any("keeps" in text for text in asked.warnings)


def test_who_asks_for_accuracy_gets_all_samples(tmp_path: Path) -> None:
    for options in (
        {"max_accuracy_drop": 0.01},
        {"min_agreement": 0.9},
        {"min_sqnr_db": 60.0},
        {"eval": {"x": rows()}},
    ):
        report = optimized(tmp_path, rows(), **options)
        assert report.accuracy is not None and report.accuracy.samples == 64, options


def test_statistics_of_all_samples_are_used_where_they_are_there(tmp_path: Path) -> None:
    optimized(tmp_path, rows(), precision="int8")
    report = optimized(tmp_path, rows())
    assert report.calibration is not None and report.calibration.samples == 64 and report.calibration.cached
