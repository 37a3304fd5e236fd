"""The search over builder options around real builds. Their times are made up here, since taking them needs the GPU.

The backend is TensorRT for RTX, which takes one of the options that are searched (``max_aux_streams``) and ignores the
others: with a cache, their engines have the key of the one as asked for.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rtx_nets import conv_net, request

from trtopt.cache.checksummed import read_checksummed, write_checksummed
from trtopt.cache.folder import FORMATS
from trtopt.engine.backend import TENSORRT_RTX
from trtopt.engine.build import EngineArtifact, build_engine
from trtopt.engine.cache import EngineCache
from trtopt.events import ignore
from trtopt.judge.target import BuildTarget
from trtopt.pipeline import compile
from trtopt.pipeline.compile import Compilation
from trtopt.profiling.measured import RunTimes
from trtopt.profiling.timing import InferenceTiming
from trtopt.support.clock import Clock

pytest.importorskip("tensorrt_rtx")

FASTER = {True: ("max_aux_streams=0",), False: ("builder_optimization_level=4",)}
"""The second engine that is timed, with a cache and without."""


class Search:
    """Searches for one network. The first engine that is timed takes 100 us in each search, all others 90 us."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, *, is_kept: bool) -> None:
        self.asked = request(conv_net(), folder)
        self.cache = EngineCache(folder / "cache", ignore) if is_kept else None
        self.clock = Clock(ignore)
        self.timed = 0
        patch.setattr(compile, "time_engine", self._time)

    def _time(self, engine: bytes, backend: object, options: object) -> InferenceTiming:
        self.timed += 1
        samples = RunTimes((100.0 if self.timed == 1 else 90.0,) * 3, stable=True)
        return InferenceTiming(samples, np.zeros((3, 8)))

    def run(self) -> EngineArtifact:
        self.timed = 0
        job = Compilation(BuildTarget(TENSORRT_RTX, self.asked.gpu), False, self.cache)
        return compile.fastest(self.asked, 7, job, self.clock)


@pytest.mark.parametrize("is_kept", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_fastest_engine_comes_back_and_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    search = Search(tmp_path, monkeypatch, is_kept=is_kept)
    found = search.run()
    trials = found.record.builder_search
    assert len(trials) == 7 and search.timed == (2 if is_kept else 7)
    assert [trial.options for trial in trials if trial.chosen] == [FASTER[is_kept]]
    assert found.data == build_engine(replace(search.asked, builder=FASTER[is_kept])).data
    assert trials[0].options == () and trials[0].median_us == 100.0 and trials[0].build_seconds
    again = search.run()
    assert again.data == found.data and search.clock.warnings == []
    assert [trial.options for trial in again.record.builder_search] == [trial.options for trial in trials]
    assert search.timed == (0 if is_kept else 7)
    assert again.record.cached == is_kept == all(trial.remembered for trial in again.record.builder_search)


def test_an_engine_that_is_not_the_one_that_was_timed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an eviction: TensorRT does not build the same again."""
    search = Search(tmp_path, monkeypatch, is_kept=True)
    search.run()
    for path in (tmp_path / "cache" / "times").iterdir():
        content = json.loads(bytes(read_checksummed(path, FORMATS["times"], path.stem, 1 << 16)))
        write_checksummed(path, FORMATS["times"], path.stem, [json.dumps({**content, "sha256": "0"}).encode()])
    search.run()
    assert len(search.clock.warnings) == 1 and "built again" in search.clock.warnings[0]
