"""Engines of TensorRT run, timed and served on stand-ins of its modules (fake_tensorrt.py, fake_cuda.py)."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from machine import Machine, Plan
from plans import doubling, formatted, kept_cache, static, two_profiles

from trtopt.engine import native_log
from trtopt.engine.backend import TENSORRT, EngineHeader, RuntimeOptions
from trtopt.engine.cuda import Cuda
from trtopt.engine.loaded import LoadedEngine
from trtopt.engine.manifest import VerifiedEngine, runtime_options
from trtopt.engine.run import EngineSession, why_not_run
from trtopt.errors import EngineBuildError, IntegrityError, TargetError, UsageError
from trtopt.graph.artifact import InputSpec
from trtopt.pipeline.verify import Verification, engine_of
from trtopt.precision.observe.samples import open_samples
from trtopt.profiling.inference import TimedEngine
from trtopt.report.schema.manifest import FileHash
from trtopt.serve.gpu import WARM_UPS, GpuRunner
from trtopt.serve.runner import FilledRunner
from trtopt.support.files import hash_file

X = np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2)


def verified(data: bytes) -> VerifiedEngine:
    return VerifiedEngine(Path("m.engine"), data, TENSORRT, EngineHeader("10.13.0.35", (), len(data)), None)


@contextlib.contextmanager
def serving(data: bytes, graphs: int = 0) -> Iterator[GpuRunner]:
    runner = GpuRunner(verified(data), RuntimeOptions(), 1, graphs)
    try:
        yield runner
    finally:
        runner.close()


def run_twice(data: bytes, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The first output, of a session and of a service."""
    with EngineSession(data, TENSORRT) as session:
        first = session.run(feeds)[0]
    with serving(data) as runner:
        return [first, next(iter(runner.run(0, dict(feeds)).values()))]


def test_an_engine_runs_in_a_session_and_in_a_service(machine: Machine) -> None:
    for found in run_twice(machine.engine(doubling()), {"x": X}):
        np.testing.assert_array_equal(found, 2 * X)
    assert not machine.device.memory


@pytest.mark.parametrize("plan", [static(), formatted("HWC", 3)])
def test_an_engine_of_a_fixed_batch_takes_fewer_rows(plan: Plan, machine: Machine) -> None:
    with serving(machine.engine(plan)) as runner:
        filled = FilledRunner(runner, runner.inputs, 2)
        assert [spec.shape for spec in (*filled.inputs, *filled.outputs)] == [("batch", 3, 2, 2)] * 2
        for rows in (1, 2):
            np.testing.assert_array_equal(filled.run(0, {"x": X[:rows]})["y"], 2 * X[:rows])


def test_an_engine_that_brings_its_runtime_loads_where_that_is_allowed(machine: Machine) -> None:
    data = machine.engine(doubling(is_version_compatible=True))
    with pytest.raises(TargetError, match="engine_host_code_allowed"):
        EngineSession(data, TENSORRT)
    with EngineSession(data, TENSORRT, RuntimeOptions(host_code=True)) as session:
        np.testing.assert_array_equal(session.run({"x": X})[0], 2 * X)


def test_code_for_the_host_is_allowed_where_the_manifest_says_so(machine: Machine) -> None:
    manifest = types.SimpleNamespace(version_compatible=True, files=())
    engine = replace(verified(machine.engine(doubling())), manifest=manifest)  # type: ignore[arg-type]
    assert runtime_options(engine).host_code
    assert not runtime_options(verified(engine.data)).host_code


def test_all_engines_of_a_process_have_one_logger_that_stays(machine: Machine) -> None:
    data = machine.engine(doubling())
    for _ in range(3):
        with EngineSession(data, TENSORRT):
            pass
    with serving(data):
        pass
    assert len({id(logger) for logger in machine.loggers}) == 1
    assert native_log._LOGGERS["tensorrt"] is machine.loggers[0]


def test_errors_are_told_to_the_engine_that_was_called(machine: Machine) -> None:
    trt = sys.modules["tensorrt"]
    one, two = (LoadedEngine(trt, machine.engine(doubling(), name)) for name in (b"1", b"2"))

    def of_another_thread() -> None:
        with two.heard():
            two.engine._refuse("yours")

    with one.heard(), ThreadPoolExecutor(1) as pool:
        pool.submit(of_another_thread).result()
        one.engine._refuse("mine")
        pool.submit(two.engine._refuse, "of a thread of the runtime").result()
    assert (one.messages, two.messages) == (["mine", "of a thread of the runtime"], ["yours"])


def test_the_real_registry_survives_the_engine_that_came_first() -> None:
    """With a logger for each engine it ends in SIGSEGV (TensorRT for RTX 1.7.1)."""
    pytest.importorskip("tensorrt_rtx")
    script = """
import gc, tensorrt_rtx as trt
from trtopt.engine.native_log import logger_of
def load():
    runtime = trt.Runtime(logger_of(trt))
    trt.init_libnvinfer_plugins(logger_of(trt), "")
    return runtime
first, second = load(), load()
del first
gc.collect()
junk = [bytearray(200) for _ in range(10000)]
assert trt.get_plugin_registry().load_library("/nowhere.so") is None
"""
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(("form", "channels"), [("HWC", 3), ("HWC8", 8)])
def test_channels_that_lie_last_are_put_in_the_models_order(form: str, channels: int, machine: Machine) -> None:
    x = np.arange(8 * channels, dtype=np.float32).reshape(2, channels, 2, 2)
    for found in run_twice(machine.engine(formatted(form, channels)), {"x": x}):
        np.testing.assert_array_equal(found, 2 * x)


@pytest.mark.parametrize(
    ("form", "channels"), [("HWC8", 3), ("CHW4", 4), ("CHW32", 32), ("CHW2", 2), ("CHW16", 16), ("DLA_LINEAR", 3)]
)
def test_a_memory_format_that_is_not_filled_is_refused(form: str, channels: int, machine: Machine) -> None:
    data = machine.engine(formatted(form, channels))
    with pytest.raises(UsageError, match=form):
        EngineSession(data, TENSORRT)
    with pytest.raises(UsageError, match=form), serving(data):
        pass


def test_outputs_have_the_size_that_the_runtime_says(machine: Machine) -> None:
    with serving(machine.engine(doubling())) as runner:
        runner.run(0, {"x": X})
        assert sorted(block.nbytes for block in machine.device.memory.values()) == [X.nbytes, X.nbytes]


def test_a_driver_that_does_not_start_gives_its_reason_and_remedy(machine: Machine) -> None:
    machine.driver_error = "CUDA initialization failure with error: 35"
    with pytest.raises(TargetError, match="error: 35") as caught:
        EngineSession(machine.engine(doubling()), TENSORRT)
    assert "gpu-cu12" in caught.value.remedy


def test_cuda_python_without_a_driver_is_a_target_error(machine: Machine) -> None:
    machine.device.missing_driver = True
    with pytest.raises(TargetError, match=r"libcuda\.so\.1"):
        GpuRunner(verified(machine.engine(doubling())), RuntimeOptions(), 1, 0)
    with pytest.raises(TargetError, match=r"libcuda\.so\.1"), Cuda().first_gpu():
        pass


def test_a_folder_of_cuda_without_bindings_is_not_cuda_python(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cuda.bindings", "cuda.bindings.runtime"):
        monkeypatch.delitem(sys.modules, name)
    assert "cuda-python" in why_not_run(TENSORRT)
    monkeypatch.setitem(sys.modules, "cuda", None)  # no such package, whatever is installed here
    assert "cuda-python" in why_not_run(TENSORRT)


def test_closing_frees_the_context_and_the_engine_too(machine: Machine) -> None:
    gc.disable()  # what only a collection frees stays for long
    try:
        data = machine.engine(doubling())
        with EngineSession(data, TENSORRT) as session:
            session.run({"x": X})
        runner = GpuRunner(verified(data), RuntimeOptions(), 2, 4)
        runner.run(0, {"x": X})
        runner.close()
        assert set(machine.alive.values()) == {0}, machine.alive
    finally:
        gc.enable()
    assert not machine.device.memory and session.output_names and runner.runtime


def test_a_graph_of_a_capture_that_failed_is_destroyed(machine: Machine) -> None:
    machine.uncapturable = True
    data = machine.engine(doubling())
    with pytest.raises(EngineBuildError, match="capturing"), TimedEngine(data, TENSORRT, graph=True) as session:
        session.prepare({"x": X})
    with serving(data, graphs=2) as runner:
        for _ in range(WARM_UPS + 2):
            np.testing.assert_array_equal(runner.run(0, {"x": X})["y"], 2 * X)
        assert runner.graph_counts["failed"] == 1
    assert not machine.device.graphs


@pytest.mark.parametrize("machine", ["tensorrt-11.4.0.106"], indirect=True)
def test_an_output_that_lies_where_an_input_does_has_its_memory(machine: Machine) -> None:
    cache = np.arange(8, dtype=np.float32).reshape(2, 4)
    data = machine.engine(kept_cache())
    for found in run_twice(data, {"cache": cache}):
        np.testing.assert_array_equal(found, cache + 1)
    with serving(data, graphs=2) as runner:
        for _ in range(WARM_UPS + 2):
            found = runner.run(0, {"cache": cache})
            np.testing.assert_array_equal(found["new"], cache + 1)
        assert not runner.graph_counts["captured"]
    assert cache[0, 1] == 1


def test_what_an_allocator_raises_is_what_the_run_raises(machine: Machine) -> None:
    data = machine.engine(doubling())
    with EngineSession(data, TENSORRT) as session:
        machine.device.free_bytes = X.nbytes + 8
        with pytest.raises(EngineBuildError, match="cudaErrorMemoryAllocation"):
            session.run({"x": X})


def test_libraries_of_plugins_are_loaded_once(machine: Machine, tmp_path: Path) -> None:
    library = tmp_path / "libplugin.so"
    library.write_bytes(b"code")
    options = RuntimeOptions(plugins=(library,))
    data = machine.engine(doubling())
    for _ in range(2):
        with EngineSession(data, TENSORRT, options):
            pass
    assert machine.loaded_libraries == [str(library)]
    other = tmp_path / "other.so"
    machine.loaded_libraries.append(str(other))
    with pytest.raises(UsageError, match="plugin library"):
        EngineSession(data, TENSORRT, RuntimeOptions(plugins=(other,)))


def test_a_library_must_be_one_that_the_engine_was_built_with(machine: Machine, tmp_path: Path) -> None:
    library = tmp_path / "libplugin.so"
    library.write_bytes(b"code")
    plain = verified(machine.engine(doubling()))
    assert runtime_options(plain, [library]).plugins == (library,)
    files = (FileHash("libother.so", *hash_file(library, "it")),)
    manifest = types.SimpleNamespace(version_compatible=False, files=files)
    engine = replace(plain, manifest=manifest)  # type: ignore[arg-type]
    assert runtime_options(engine, [library]).plugins == (library,)
    library.write_bytes(b"other code")
    with pytest.raises(IntegrityError, match="plugin"):
        runtime_options(engine, [library])


@pytest.mark.parametrize(("budget", "resident"), [(0, 0), (300, 300), ("auto", 250), (1 << 70, None)])
def test_a_weight_budget_is_set_before_there_is_a_context(machine: Machine, budget: int, resident: int | None) -> None:
    data = machine.engine(doubling(streamable=1000))
    with TimedEngine(data, TENSORRT, RuntimeOptions(weight_budget=budget)) as session:
        found = session.weight_streaming()
        kept = {"streamable_bytes": 1000, "resident_bytes": resident, "scratch_bytes": 16}
        assert found == (None if resident is None else kept)  # more than there is streams nothing
    with TimedEngine(data, TENSORRT) as session:
        assert session.weight_streaming() is None


def test_a_weight_budget_for_an_engine_that_streams_nothing_is_refused(machine: Machine) -> None:
    with pytest.raises(UsageError, match="streams no weights"):
        EngineSession(machine.engine(doubling()), TENSORRT, RuntimeOptions(weight_budget=0))


def test_a_session_takes_memory_for_activations(machine: Machine) -> None:
    with EngineSession(machine.engine(doubling()), TENSORRT):
        assert machine.contexts == ["STATIC"]


def test_an_engine_is_timed_in_the_profile_that_takes_its_inputs(machine: Machine) -> None:
    with TimedEngine(machine.engine(two_profiles()), TENSORRT, graph=True, streams=2) as timed:
        timed.prepare({"x": np.zeros((9, 3, 2, 2), np.float32)})
        timed.busy(2)
        with pytest.raises(UsageError, match=r"\[1, 3, 2, 2\] to \[4, 3, 2, 2\]; \[5, 3, 2, 2\] to \[16, 3, 2, 2\]"):
            timed.prepare({"x": np.zeros((17, 3, 2, 2), np.float32)})
    assert not machine.left()


@pytest.mark.parametrize("rows", [1, 2, 6, 16, 20])
def test_an_engine_is_verified_on_any_number_of_rows(machine: Machine, rows: int) -> None:
    """Its profiles take 5 to 16."""
    plan = two_profiles()
    tensors = (replace(plan.tensors[0], profiles=plan.tensors[0].profiles[1:]), plan.tensors[1])
    data = machine.engine(replace(plan, tensors=tensors))
    text = '<ir_version: 10, opset_import: ["": 21]> g (float[N,3,2,2] x) => (float[N,3,2,2] y) {y = Add(x, x)}'
    model, x = ir.from_onnx_text(text), np.arange(12 * rows, dtype=np.float32).reshape(rows, 3, 2, 2)
    samples = open_samples({"x": x}, [InputSpec("x", np.dtype(np.float32), ("N", 3, 2, 2))])
    job = Verification(model, model, samples, "eval", None, tensors=False)
    with engine_of(job, data, TENSORRT, RuntimeOptions()) as runner:
        np.testing.assert_array_equal(runner.run({"x": x})[0], 2 * x)
