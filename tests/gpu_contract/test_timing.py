"""Inferences timed one by one, on a device whose clock runs and copies move."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from machine import Machine, Plan
from plans import KINDS, X, doubling

from trtopt.engine.backend import TENSORRT, TENSORRT_RTX, RuntimeOptions, identify
from trtopt.engine.manifest import VerifiedEngine
from trtopt.precision.observe.polygraphy import write_inputs
from trtopt.profiling import gpu, inference
from trtopt.profiling.export import profile_json, times_json
from trtopt.profiling.inference import TimedEngine, time_engine
from trtopt.profiling.measured import RunLimits
from trtopt.profiling.timing import COLUMNS, InferenceTiming, TimingOptions

LIMITS = RunLimits(warm_up_runs=0, warm_up_seconds=0.0, min_runs=20, min_seconds=0.0, fixed=True)
TWENTY = TimingOptions(LIMITS, graph=False)
COPY_MS = 0.25


def slow_and_fast() -> Plan:
    """y = 2 x, in 1 and in 2 milliseconds by turns."""
    return replace(doubling(), took_ms=(1.0, 2.0), layers={"a": 0.75, "b": 0.25})


def timed(machine: Machine, options: TimingOptions, *, graph: bool = False) -> InferenceTiming:
    machine.device.copy_ms = COPY_MS
    with TimedEngine(machine.engine(slow_and_fast()), TENSORRT, graph=graph, streams=options.streams) as session:
        session.prepare({"x": X})
        found = session.time(options)
    assert not machine.left()
    return found


@pytest.mark.parametrize("graph", [False, True])
def test_each_inference_has_events_of_its_own(machine: Machine, graph: bool) -> None:
    found = timed(machine, TWENTY, graph=graph)
    assert sorted(found.device.us) == [1000.0] * 10 + [2000.0] * 10  # the mean of a batch would be 1500 each time
    assert found.figures()["device_p99_us"] == 2000.0
    assert found.trace.shape == (20, len(COLUMNS))
    assert found.per_second == pytest.approx(1e3 / 1.5)
    assert found.host_us > 0 and "h2d_us" not in found.figures()


def test_transfers_are_timed_on_request(machine: Machine) -> None:
    found = timed(machine, replace(TWENTY, transfers=True)).figures()
    assert (found["h2d_us"], found["d2h_us"]) == (COPY_MS * 1e3, COPY_MS * 1e3)
    assert found["latency_p99_us"] == found["device_p99_us"] + 2 * COPY_MS * 1e3


def test_streams_run_contexts_of_one_engine_in_turn(machine: Machine) -> None:
    found = timed(machine, replace(TWENTY, streams=3))
    assert len(machine.contexts) == 3 and len(found.trace) == 20


@pytest.mark.parametrize("machine", ["tensorrt_rtx-1.7.1.116"], indirect=True)
def test_contexts_of_several_streams_share_the_kernels_that_are_kept(machine: Machine, tmp_path: Path) -> None:
    data = machine.engine(doubling())
    for _ in range(2):  # the second finds what the first has written
        with TimedEngine(data, TENSORRT_RTX, RuntimeOptions(kernels=tmp_path), streams=3) as session:
            session.prepare({"x": X})
    assert len(machine.contexts) == 6 and len(machine.compiled) == 1


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("machine", ["tensorrt-11.4.0.106"], indirect=True)
def test_every_kind_is_timed_with_transfers_on_several_streams(machine: Machine, name: str) -> None:
    kind = KINDS[name]
    with TimedEngine(machine.engine(kind.plan), TENSORRT, streams=2) as session:
        session.prepare(kind.calls[0][0])
        found = session.time(replace(TWENTY, streams=2, transfers=True))
    assert len(found.device.us) == 20 and min(found.device.us) == 250.0  # runs of two streams may overlap


def test_an_engine_of_a_search_is_timed_at_its_best_values(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "DEFAULT_TIMING", TWENTY)
    assert time_engine(machine.engine(KINDS["shape-tensor"].plan), TENSORRT).device.us == (250.0,) * 20
    assert not machine.left()


def test_what_is_exported_has_the_fields_of_trtexec(machine: Machine) -> None:
    times = json.loads(times_json(timed(machine, replace(TWENTY, transfers=True))))
    assert len(times) == 20
    assert list(times[0]) == [*COLUMNS, "h2dMs", "computeMs", "d2hMs", "latencyMs"]
    row = times[7]
    assert row["computeMs"] == pytest.approx(row["endComputeMs"] - row["startComputeMs"], abs=1e-6)
    assert row["latencyMs"] == pytest.approx(row["computeMs"] + 2 * COPY_MS, abs=1e-6)
    assert row["startH2dMs"] < row["endH2dMs"] == row["startComputeMs"] < row["endComputeMs"] == row["startD2hMs"]


def test_an_engine_is_measured_with_all_that_is_exported(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "profiled_runs", functools.partial(gpu.profiled_runs, limits=LIMITS))
    data, plan = machine.engine(slow_and_fast()), slow_and_fast()
    engine = VerifiedEngine(Path("m.engine"), data, *identify(data), None)
    saved, image = tmp_path / "inputs.json", np.arange(36, dtype=np.float32).reshape(3, 3, 2, 2)
    write_inputs(saved, [{"x": image}])
    found = gpu.measure_engine(engine, {}, timing=replace(TWENTY, graph=True, streams=2), inputs=str(saved))
    conditions = found.measurement.source.conditions
    assert found.measurement.end_to_end_us == 1500.0 and len(found.timing.trace) == 20
    assert (conditions["end_to_end"], conditions["streams"]) == ("cuda_graph", 2)
    assert conditions["stream_device_p99_us"] == conditions["cuda_graph_device_p99_us"] == 2000.0
    assert conditions["input_shapes"] == {"x": [3, 3, 2, 2]}
    np.testing.assert_array_equal(found.feeds["x"], image)
    np.testing.assert_array_equal(found.outputs["y"], 2 * image)
    assert [layer.measured_us for layer in found.measurement.layers] == [750.0, 250.0]
    assert json.loads(profile_json(found.runs))[1]["averageMs"] == 0.75
    assert len(json.loads(times_json(found.timing))) == 20 and found.layer_information == plan.inspected
    assert not machine.left()
