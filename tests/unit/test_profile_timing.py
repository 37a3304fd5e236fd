"""Inferences timed one by one, on strict stand-ins of TensorRT and CUDA whose device has a clock of its own."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import strict_tensorrt
from strict_tensorrt import Machine, Plan, Tensor
from test_tensorrt_runtime import X, machine  # noqa: F401 - a fixture

from trtopt.analysis.profile import timing_options
from trtopt.config import ProfileConfig
from trtopt.engine.backend import TENSORRT, EngineHeader
from trtopt.engine.manifest import VerifiedEngine
from trtopt.errors import UsageError
from trtopt.graph.artifact import InputSpec
from trtopt.profiling import gpu
from trtopt.profiling.export import profile_json, times_json
from trtopt.profiling.inference import TimedEngine
from trtopt.profiling.ingest import ingest
from trtopt.profiling.inputs import feeds_of
from trtopt.profiling.measured import RunLimits, RunTimes, until_stable
from trtopt.profiling.timing import COLUMNS, DEFAULT_TIMING, InferenceTiming, TimingOptions, percentile

TWENTY = TimingOptions(
    RunLimits(warm_up_runs=0, warm_up_seconds=0.0, min_runs=20, min_seconds=0.0, fixed=True), graph=False
)
COPY_MS = 0.25


class Device:
    """A clock that inferences and copies of the stand-ins move, and the events that read it."""

    def __init__(self, runtime: ModuleType, took_ms: list[float]) -> None:
        self.ms, self._took, self._runtime = 100.0, itertools.cycle(took_ms), runtime
        self.recorded: dict[int, float] = {}
        self.copies: list[Any] = []
        ok, copy, numbers = runtime.cudaError_t.cudaSuccess, runtime.cudaMemcpyAsync, itertools.count(1)

        def copied(target: int, source: int, size: int, kind: Any, stream: Any) -> Any:
            self.ms += COPY_MS
            self.copies.append((kind.name, size))
            return copy(target, source, size, kind, stream)

        def record(event: int, stream: Any) -> Any:
            self.recorded[event] = self.ms
            return (ok,)

        def elapsed(start: int, end: int) -> Any:
            return ok, self.recorded[end] - self.recorded[start]

        def launched(graph: int, stream: Any) -> Any:
            self.run()
            return (ok,)

        runtime.cudaMemcpyAsync = copied  # type: ignore[attr-defined]
        runtime.cudaEventCreate = lambda: (ok, next(numbers))  # type: ignore[attr-defined]
        runtime.cudaEventDestroy = lambda event: (ok,)  # type: ignore[attr-defined]
        runtime.cudaEventRecord = record  # type: ignore[attr-defined]
        runtime.cudaEventSynchronize = lambda event: (ok,)  # type: ignore[attr-defined]
        runtime.cudaEventElapsedTime = elapsed  # type: ignore[attr-defined]
        runtime.cudaGraphLaunch = launched  # type: ignore[attr-defined]

    def run(self) -> None:
        self.ms += next(self._took)

    def plan(self) -> Plan:
        """y = 2 x, which takes time."""

        def compute(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            self.run()
            return {"y": 2 * feeds["x"]}

        shape = (-1, 3, 2, 2)
        profile = ((1, 3, 2, 2), (2, 3, 2, 2), (4, 3, 2, 2))
        return Plan((Tensor("x", shape, profile=profile), Tensor("y", shape, is_input=False)), compute)


@pytest.fixture
def device(machine: Machine) -> Device:  # noqa: F811
    return Device(sys.modules["cuda.bindings.runtime"], [1.0, 2.0])


def timed(machine: Machine, device: Device, options: TimingOptions, *, graph: bool = False) -> InferenceTiming:  # noqa: F811
    data = machine.engine(device.plan())
    with TimedEngine(data, TENSORRT, graph=graph, streams=options.streams) as session:
        session.prepare({"x": X})
        found = session.time(options)
    assert not machine.memory and not machine.graphs
    assert machine.alive["Context"] == 0
    return found


@pytest.mark.parametrize("graph", [False, True])
def test_each_inference_has_events_of_its_own(machine: Machine, device: Device, graph: bool) -> None:  # noqa: F811
    found = timed(machine, device, TWENTY, graph=graph)
    assert sorted(found.device.us) == [1000.0] * 10 + [2000.0] * 10  # the mean of a batch would be 1500 each time
    assert found.figures()["device_p99_us"] == 2000.0
    assert found.trace.shape == (20, len(COLUMNS))
    assert found.per_second == pytest.approx(1e3 / 1.5)
    assert found.host_us > 0 and "h2d_us" not in found.figures()


def test_transfers_are_timed_on_request(machine: Machine, device: Device) -> None:  # noqa: F811
    found = timed(machine, device, replace(TWENTY, transfers=True)).figures()
    assert (found["h2d_us"], found["d2h_us"]) == (COPY_MS * 1e3, COPY_MS * 1e3)
    assert found["latency_p99_us"] == found["device_p99_us"] + 2 * COPY_MS * 1e3
    assert device.copies[-2:] == [("cudaMemcpyHostToDevice", X.nbytes), ("cudaMemcpyDeviceToHost", X.nbytes)]


def test_streams_run_contexts_of_one_engine_in_turn(machine: Machine, device: Device) -> None:  # noqa: F811
    found = timed(machine, device, replace(TWENTY, streams=3))
    assert len(machine.contexts) == 3 and len(found.trace) == 20
    assert machine.alive["Engine"] == 0


def test_a_percentile_is_the_one_that_trtexec_takes() -> None:
    values = np.arange(100.0)[::-1]
    assert [percentile(values, percent) for percent in (0, 50, 90, 95, 99, 100)] == [0.0, 49.0, 89.0, 94.0, 99.0, 99.0]
    assert percentile(np.array([7.0]), 99) == 7.0


def test_the_options_of_trtexec_mean_what_they_mean_there() -> None:
    assert timing_options(ProfileConfig()) == DEFAULT_TIMING and not DEFAULT_TIMING.limits.fixed
    found = timing_options(ProfileConfig(warmup=500, iterations=100))
    assert (found.limits.warm_up_seconds, found.limits.min_runs, found.limits.min_seconds) == (0.5, 100, 3.0)
    found = timing_options(ProfileConfig(duration=7, inf_streams=2, data_transfers=True, no_cuda_graph=True))
    assert found.limits.fixed and (found.limits.min_runs, found.limits.min_seconds) == (10, 7.0)
    assert (found.streams, found.transfers, found.graph) == (2, True, False)


def test_a_fixed_number_of_runs_all_count_and_last_as_long_as_was_asked_for() -> None:
    numbers, clock = itertools.count(1), itertools.count()
    limits = RunLimits(warm_up_runs=2, warm_up_seconds=0.0, min_runs=5, min_seconds=9.0, fixed=True)
    found = until_stable(lambda: float(next(numbers)), limits, lambda: float(next(clock)))
    assert found.us[0] == 3.0 and len(found.us) >= 5 and not found.stable  # none of the first is left out
    at_once = replace(limits, min_seconds=0.0)
    assert len(until_stable(lambda: 1.0, at_once).us) == 5


RUNS = [[("conv", 30.0), ("copy", 10.0)], [("conv", 50.0), ("copy", 10.0)], [("conv", 31.0), ("copy", 10.0)]]
LAYERS = '{"Layers": ["conv", "copy"], "Bindings": []}'


def test_what_is_exported_has_the_fields_of_trtexec(machine: Machine, device: Device) -> None:  # noqa: F811
    found = timed(machine, device, replace(TWENTY, transfers=True))
    times = json.loads(times_json(found))
    assert len(times) == 20
    assert list(times[0]) == [*COLUMNS, "h2dMs", "computeMs", "d2hMs", "latencyMs"]
    row = times[7]
    assert row["computeMs"] == pytest.approx(row["endComputeMs"] - row["startComputeMs"], abs=1e-6)
    assert row["latencyMs"] == pytest.approx(row["computeMs"] + 2 * COPY_MS, abs=1e-6)
    assert row["startH2dMs"] < row["endH2dMs"] == row["startComputeMs"] < row["endComputeMs"] == row["startD2hMs"]
    count, conv, copy = json.loads(profile_json(RUNS))
    assert count == {"count": 3}
    assert conv == {"name": "conv", "timeMs": 0.111, "averageMs": 0.037, "medianMs": 0.031, "percentage": 78.7234}
    assert copy["percentage"] == 21.2766


class ProfiledContext(strict_tensorrt.Context):
    """Tells a profiler of the layers of a run."""

    profiler: Any = None
    enqueue_emits_profile = True

    def report_to_profiler(self) -> bool:
        assert not self.enqueue_emits_profile
        for name, us in RUNS[0]:
            self.profiler.report_layer_time(name, us / 1e3)
        return True


def test_an_engine_is_measured_with_all_that_is_exported(
    machine: Machine,  # noqa: F811
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(strict_tensorrt, "Context", ProfiledContext)
    trt, runtime = sys.modules["tensorrt"], sys.modules["cuda.bindings.runtime"]
    trt.IProfiler = type("IProfiler", (), {})  # type: ignore[attr-defined]
    runtime.cudaDeviceGetPCIBusId = lambda size, gpu: (runtime.cudaError_t.cudaSuccess, b"0:1\0")  # type: ignore[attr-defined]
    monkeypatch.setattr(gpu, "check_runs_here", lambda engine: "10.13.0.35")
    data = machine.engine(replace(device.plan(), inspected=LAYERS))
    engine = VerifiedEngine(Path("m.engine"), data, TENSORRT, EngineHeader("10.13.0.35", (), len(data)), None)
    found = gpu.measure_engine(engine, {"x": (3, 3, 2, 2)}, timing=replace(TWENTY, graph=True, streams=2))
    conditions = found.measurement.source.conditions
    assert found.measurement.end_to_end_us == 1500.0 and len(found.timing.trace) == 20
    assert (conditions["end_to_end"], conditions["streams"]) == ("cuda_graph", 2)
    assert conditions["stream_device_p99_us"] == conditions["cuda_graph_device_p99_us"] == 2000.0
    assert conditions["input_shapes"] == {"x": [3, 3, 2, 2]}
    assert [layer.measured_us for layer in found.measurement.layers] == [30.0, 10.0]
    assert json.loads(profile_json(found.runs))[1]["averageMs"] == 0.03
    assert len(json.loads(times_json(found.timing))) == 20 and found.layer_information == LAYERS
    assert not machine.memory and machine.alive["Engine"] == 0


def test_what_is_exported_can_be_read_again(tmp_path: Path) -> None:
    us = np.array([40.0, 41.0, 90.0])
    ends = np.cumsum(us) / 1e3
    trace = np.stack([ends, ends + 0.004, *[ends - us / 1e3] * 3, *[ends] * 3], axis=1)
    timing = InferenceTiming(RunTimes(tuple(us), stable=True), trace)
    for name, text in (("l", LAYERS), ("p", profile_json(RUNS)), ("t", times_json(timing))):
        (tmp_path / name).write_text(text)
    found = ingest(tmp_path / "l", tmp_path / "p", tmp_path / "t")
    assert (found.end_to_end_us, found.host_us) == (pytest.approx(41.0), pytest.approx(4.0))
    assert [layer.measured_us for layer in found.layers] == [pytest.approx(37.0), pytest.approx(10.0)]


INPUTS = (InputSpec("image", np.dtype(np.float32), ("?", 2)), InputSpec("a:b", np.dtype(np.int32), (2,)))
IDS = np.array([5, 7], np.int32)


def inputs_of(files: str, shapes: dict[str, tuple[int, ...]] | None = None) -> dict[str, np.ndarray]:
    return dict(feeds_of(INPUTS, shapes or {}, {"image": (4, 2)}.__getitem__, files))


def test_inputs_are_read_from_the_files_that_trtexec_reads(tmp_path: Path) -> None:
    image = np.arange(8, dtype=np.float32).reshape(4, 2)
    (tmp_path / "image.bin").write_bytes(image.tobytes())
    (tmp_path / "ids.bin").write_bytes(IDS.tobytes())
    found = inputs_of(f"image:{tmp_path}/image.bin,'a:b':{tmp_path}/ids.bin")
    np.testing.assert_array_equal(found["image"], image)
    np.testing.assert_array_equal(found["a:b"], IDS)


def test_arrays_bring_their_shape_and_what_is_left_out_is_random(tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", image=np.ones((3, 2)))
    found = inputs_of(str(tmp_path / "in.npz"))
    assert found["image"].shape == (3, 2) and found["image"].dtype == np.float32 and found["a:b"].shape == (2,)
    np.save(tmp_path / "ids.npy", IDS.astype(np.int64))
    np.testing.assert_array_equal(inputs_of(f"a:b:{tmp_path}/ids.npy")["a:b"], IDS)


@pytest.mark.parametrize(
    ("files", "shapes", "words"),
    [
        ("image", {}, "names no input"),
        ("other:{}/seven.bin", {}, "no input 'other'"),
        ("image:{}/missing.bin", {}, "missing.bin"),
        ("image:{}/seven.bin", {}, "less than the 32 bytes"),
        ("image:{}/seven.bin", {"image": (3, 2)}, "more than the 24 bytes"),
        ("image:{}/three.npy", {}, "image"),
        ("a:b:{}/half.npy", {}, "are float32, the engine reads int32"),
        ("image:{}/pair.npy", {"image": (3, 2)}, "--shapes says"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    tmp_path: Path, files: str, shapes: dict[str, tuple[int, ...]], words: str
) -> None:
    (tmp_path / "seven.bin").write_bytes(np.zeros(7, np.float32).tobytes())
    np.save(tmp_path / "three.npy", np.zeros((1, 3), np.float32))
    np.save(tmp_path / "half.npy", np.zeros(2, np.float32))
    np.save(tmp_path / "pair.npy", np.zeros((1, 2), np.float32))
    with pytest.raises(UsageError) as caught:
        inputs_of(files.format(tmp_path), shapes)
    assert words in str(caught.value)
