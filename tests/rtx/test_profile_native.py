"""What of measuring on a GPU can be checked without one, against the real packages."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import rtx_nets

from trtopt.engine import cuda, loaded, run
from trtopt.engine.backend import AS_BUILT, TENSORRT_RTX, describe, identify
from trtopt.engine.build import build_engine
from trtopt.engine.manifest import load_engine
from trtopt.engine.native_log import heard, logger_of
from trtopt.errors import TargetError, UsageError
from trtopt.hardware.probe import probe
from trtopt.profiling import inference
from trtopt.profiling.gpu import measure_engine
from trtopt.serve import gpu as serving

trt = pytest.importorskip("tensorrt_rtx")
SOURCES = (run, loaded, cuda, inference, serving)
OWNERS = {
    "trt": trt,
    "self.trt": trt,
    "self._runner.trt": trt,
    "context": trt.IExecutionContext,
    "self.context": trt.IExecutionContext,
    "engine": trt.ICudaEngine,
    "self.engine": trt.ICudaEngine,
    "self._runner.engine": trt.ICudaEngine,
    "inspector": trt.EngineInspector,
    "config": trt.IRuntimeConfig,
    "self._runtime": trt.Runtime,
    "trt.get_plugin_registry()": trt.IPluginRegistry,
}
"""What the expressions in the modules stand for."""


def attributes(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Every ``owner.attribute`` of a module's source."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node.value), node.attr


def native_uses() -> list[tuple[str, str]]:
    """``owner.attribute`` where the owner is one of ``OWNERS``, or of the module: ``trt.TensorIOMode.INPUT``."""
    roots = tuple(f"{name}." for name, owner in OWNERS.items() if owner is trt)
    return [use for module in SOURCES for use in attributes(module) if use[0] in OWNERS or use[0].startswith(roots)]


def resolved(owner: str) -> Any:
    if owner in OWNERS:
        return OWNERS[owner]
    root = next(name for name in OWNERS if owner.startswith(f"{name}.") and OWNERS[name] is trt)
    return functools.reduce(getattr, owner.removeprefix(f"{root}.").split("."), trt)


def test_every_attribute_of_the_runtime_that_is_used_exists() -> None:
    uses = native_uses()
    assert {owner for owner, _ in uses} >= {"trt", "context", "self.context", "inspector", "config", "self._runtime"}
    assert [f"{owner}.{name}" for owner, name in uses if not hasattr(resolved(owner), name)] == []


def test_every_call_of_the_cuda_runtime_that_is_used_exists() -> None:
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("cuda-python is not installed")
    runtime = pytest.importorskip("cuda.bindings.runtime")
    words = {
        node.value
        for module in SOURCES
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    calls = {word for word in words if re.fullmatch(r"cuda[A-Z]\w*", word)}
    assert {"cudaMalloc", "cudaEventElapsedTime", "cudaGraphLaunch", "cudaStreamEndCapture"} <= calls
    assert [name for name in calls if not hasattr(runtime, name) and not hasattr(runtime.cudaMemcpyKind, name)] == []
    uses = (f"{owner}.{name}".partition("api.")[2] for module in SOURCES for owner, name in attributes(module))
    names = {name for name in uses if name.startswith("cuda")}
    assert {"cudaMemcpyKind.cudaMemcpyHostToDevice", "cudaGetLastError"} <= names
    for name in names:
        functools.reduce(getattr, name.split("."), runtime)


def test_the_profiler_keeps_names_and_microseconds() -> None:
    profiler = inference._profiler(trt)
    assert isinstance(profiler, trt.IProfiler)
    profiler.report_layer_time("conv", 0.25)
    profiler.report_layer_time("copy", 0.001)
    assert profiler.times == [("conv", pytest.approx(250.0)), ("copy", pytest.approx(1.0))]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An engine for compute capability 8.9."""
    return build_engine(rtx_nets.request(rtx_nets.conv_net(), tmp_path_factory.mktemp("engine"))).data


def test_a_real_engine_tells_what_built_it_and_what_for(engine: bytes) -> None:
    backend, header = identify(engine)
    assert backend == TENSORRT_RTX
    assert describe(backend, header) == f"tensorrt-rtx {trt.__version__} for compute capability 8.9"


def test_without_a_gpu_an_engine_is_not_measured_but_explained(engine: bytes, tmp_path: Path) -> None:
    if probe().gpu is not None:
        pytest.skip("there is a GPU")
    path = tmp_path / "m.rtx.engine"
    path.write_bytes(engine)
    with pytest.raises(TargetError) as caught:
        measure_engine(load_engine(path, allow_unverified=True), {})
    assert caught.value.exit_code == 4
    for part in ("compute capability 8.9", trt.__version__, probe().reason, "--backend onnxruntime", "--layer-info"):
        assert part in str(caught.value)


def test_a_cut_engine_is_a_usage_error(engine: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.rtx.engine"
    path.write_bytes(engine[:-1])
    with pytest.raises(UsageError, match="bytes"):
        load_engine(path, allow_unverified=True)


def test_without_a_gpu_the_runtime_loads_no_engine_so_that_there_is_no_inspector(engine: bytes) -> None:
    if probe().gpu is not None:
        pytest.skip("there is a GPU")
    messages: list[str] = []
    with heard(lambda severity, message: messages.append(message)):
        assert trt.Runtime(logger_of(trt)).deserialize_cuda_engine(engine) is None
    assert any("cuda" in message.lower() for message in messages)


def test_the_runtimes_own_words_reach_the_error(engine: bytes) -> None:
    if importlib.util.find_spec("cuda") is None or probe().gpu is not None:
        pytest.skip("cuda-python is not installed, or there is a GPU")
    with contextlib.ExitStack() as stack, pytest.raises(TargetError, match=r"for compute capability 8\.9: .*(?i:cuda)"):
        run._Runner(trt, engine, AS_BUILT, stack, rtx_graphs=True)
