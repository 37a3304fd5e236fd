"""Every kind of engine run, timed and served, on every release that a table describes."""

from __future__ import annotations

import functools
import gc
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from declared import TABLES, read_table
from extract import of_tensorrt
from machine import RELEASES, Machine
from plans import KINDS

from trtopt.engine.backend import TENSORRT, TENSORRT_RTX, Backend, RuntimeOptions, identify
from trtopt.engine.manifest import VerifiedEngine
from trtopt.engine.run import EngineSession
from trtopt.errors import UsageError
from trtopt.profiling import gpu
from trtopt.profiling.inference import TimedEngine
from trtopt.profiling.inputs import feeds_of
from trtopt.profiling.measured import RunLimits
from trtopt.profiling.timing import TimingOptions
from trtopt.serve.gpu import WARM_UPS, GpuRunner

_LIMITS = RunLimits(warm_up_runs=1, warm_up_seconds=0.0, min_runs=4, min_seconds=0.0, fixed=True)
_TIMING = TimingOptions(_LIMITS)
CASES = [
    pytest.param(release, name, id=f"{release}-{name}")
    for release in RELEASES
    for name in KINDS
    if name != "aliased-output"
    or "get_aliased_input_tensor" in read_table(release)["classes"]["ICudaEngine"]["methods"]
]
every_case = pytest.mark.parametrize(("machine", "name"), CASES, indirect=["machine"])


@pytest.fixture(autouse=True)
def nothing_left(machine: Machine) -> Iterator[None]:
    """Everything is freed when its owner closes, not by a collection that may never come."""
    gc.disable()
    try:
        yield
        assert not machine.left()
    finally:
        gc.enable()


def backend_of(machine: Machine) -> Backend:
    return TENSORRT_RTX if machine.is_rtx else TENSORRT


def check(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


@every_case
def test_a_session_runs_it(machine: Machine, name: str) -> None:
    kind = KINDS[name]
    with EngineSession(machine.engine(kind.plan), backend_of(machine)) as session:
        for feeds, expected in [*kind.calls, *reversed(kind.calls)]:
            check(dict(zip(session.output_names, session.run(feeds), strict=True)), expected)


@every_case
def test_it_is_timed_from_its_own_profile(machine: Machine, name: str) -> None:
    kind, backend = KINDS[name], backend_of(machine)
    data = machine.engine(kind.plan)
    with TimedEngine(data, backend) as session:
        feeds = feeds_of(session.inputs(), {}, session.optimum, values=session.values())
        session.prepare(feeds)
        assert set(session.time(_TIMING).device.us) == {250.0}
        run = session.profiled()
        assert run() == run() == [("a", 125.0), ("b", 125.0)]
        assert json.loads(session.layer_information()) == {"Layers": ["a", "b"]}


@every_case
def test_a_service_runs_it(machine: Machine, name: str, caplog: pytest.LogCaptureFixture) -> None:
    kind = KINDS[name]
    data = machine.engine(kind.plan)
    verified = VerifiedEngine(Path("m.engine"), data, *identify(data), None)
    runner = GpuRunner(verified, RuntimeOptions(), 2, 2)
    try:
        with caplog.at_level(logging.WARNING):
            for repeat in range(WARM_UPS + 3):
                for feeds, expected in kind.calls:
                    check(runner.run(repeat % 2, dict(feeds)), expected)
                    check(runner.run(0, dict(feeds)), expected)
        counts = runner.graph_counts
        assert not caplog.records
        assert bool(counts["captured"]) == (kind.is_captured and not machine.is_rtx) and not counts["failed"]
    finally:
        runner.close()


@pytest.mark.parametrize("machine", RELEASES, indirect=True)
def test_values_outside_of_every_profile_are_refused_by_a_service(machine: Machine) -> None:
    data = machine.engine(KINDS["shape-tensor"].plan)
    runner = GpuRunner(VerifiedEngine(Path("m.engine"), data, *identify(data), None), RuntimeOptions(), 1, 0)
    try:
        with pytest.raises(UsageError, match="'s'"):
            runner.run(0, {"x": np.ones((16, 8), np.float32), "s": np.array([32, 4])})
    finally:
        runner.close()


def test_the_table_of_an_installed_release_is_what_it_has() -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="needs TensorRT for RTX")
    if not (TABLES / f"tensorrt_rtx-{trt.__version__}.json").exists():
        pytest.skip(f"no table of {trt.__version__}: write it with extract.py")
    table = read_table(f"tensorrt_rtx-{trt.__version__}")
    assert of_tensorrt(trt) == {key: table[key] for key in ("classes", "enums", "functions")}


@every_case
def test_it_is_measured(machine: Machine, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "profiled_runs", functools.partial(gpu.profiled_runs, limits=_LIMITS))
    plan = KINDS[name].plan
    data = machine.engine(plan)
    verified = VerifiedEngine(Path("m.engine"), data, *identify(data), None)
    found = gpu.measure_engine(verified, {}, timing=_TIMING).measurement
    assert found.end_to_end_us == 250.0 and [layer.measured_us for layer in found.layers] == [125.0, 125.0]
    is_captured = found.source.conditions["end_to_end"] == "cuda_graph"
    assert is_captured == (machine.is_rtx or name not in ("data-dependent",)), found.warnings
