"""Engines on a real GPU. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import rtx_nets

from trtopt import api
from trtopt.engine.backend import TENSORRT, TENSORRT_RTX, Backend
from trtopt.engine.run import why_not_run
from trtopt.precision.observe.polygraphy import read_inputs, read_outputs

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


@pytest.mark.gpu
def test_polygraphys_runner_computes_what_the_engines_session_does(tmp_path: Path) -> None:
    """Polygraphy's ``TrtRunner`` is the oracle. Written to its documented API and never run."""
    pytest.importorskip("polygraphy", reason="Polygraphy is not installed: the extra polygraphy")
    reason = why_not_run(TENSORRT)
    if reason:
        pytest.skip(reason)
    from polygraphy.backend.common import BytesFromPath
    from polygraphy.backend.trt import EngineFromBytes, TrtRunner

    samples = {"x": np.random.default_rng(0).standard_normal((4, 16, 16, 16)).astype(np.float32)}
    engine, kept = tmp_path / "m.engine", tmp_path / "kept"
    api.build(rtx_nets.conv_net(), backend=TENSORRT.name, calib=samples, output=str(engine), polygraphy=str(kept))
    name, own = read_outputs(kept / "outputs.json")
    assert name == "trtopt-engine"
    with TrtRunner(EngineFromBytes(BytesFromPath(str(engine)))) as runner:
        for feeds, outputs in zip(read_inputs(kept / "inputs.json"), own, strict=True):
            found = runner.infer(feeds)
            assert found.keys() == outputs.keys()
            for output, array in outputs.items():
                np.testing.assert_allclose(array, found[output], rtol=1e-3, atol=1e-3)
