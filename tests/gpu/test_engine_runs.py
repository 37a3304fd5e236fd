"""Engines on a real GPU. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import rtx_nets

from trtopt import api
from trtopt.engine.backend import TENSORRT, TENSORRT_RTX, Backend
from trtopt.engine.run import why_not_run

BACKENDS = [pytest.param(backend, id=backend.name) for backend in (TENSORRT_RTX, TENSORRT)]


@pytest.mark.gpu
def test_a_search_over_builder_options_is_remembered(tmp_path: Path) -> None:
    reason = why_not_run(TENSORRT)
    if reason:
        pytest.skip(reason)
    options = {"backend": TENSORRT.name, "cache_dir": str(tmp_path / "cache"), "builder": ("search=4",)}
    found = []
    for name in ("first", "again"):
        report = api.build(rtx_nets.conv_net(), **options, output=str(tmp_path / f"{name}.engine"))
        assert report.engine is not None and len(report.engine.builder_search) == 4
        found.append(report.engine)
    chosen = [trial for trial in found[0].builder_search if trial.chosen]
    assert len(chosen) == 1 and chosen[0].median_us is not None
    assert found[1].cached and found[1].sha256 == found[0].sha256
    assert all(trial.remembered for trial in found[1].builder_search if trial.median_us is not None)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_the_engines_own_outputs_are_verified(backend: Backend, precision: str, tmp_path: Path) -> None:
    reason = why_not_run(backend)
    if reason:
        pytest.skip(reason)
    samples = {"x": np.random.default_rng(0).standard_normal((8, 16, 16, 16)).astype(np.float32)}
    report = api.build(
        rtx_nets.conv_net(), precision=precision, backend=backend.name, calib=samples, output=str(tmp_path / "m.engine")
    )
    assert report.accuracy is not None and report.accuracy.verified == "engine"
    assert report.accuracy.engine is not None
    assert all(output.sqnr_db > 15 for output in report.accuracy.engine.values())
