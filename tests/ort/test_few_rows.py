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
    given: dict[str, Any] = {"precision": "fp16", "calib": {"x": samples}, **options}
    return api.optimize(
        folder / "model.onnx",
        backend="tensorrt",
        opt_shapes=[{"x": (1, 8)}],
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


def test_a_sample_far_beyond_those_that_were_run_is_seen(tmp_path: Path) -> None:
    samples = rows()
    samples[37] = 60000
    report = optimized(tmp_path, samples)
    assert report.calibration is not None and report.calibration.samples == 64
    assert any("values up to 6e+04 in x" in item.reason for item in report.precision.kept)


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
