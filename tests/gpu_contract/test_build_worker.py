"""The worker's steps that only TensorRT has, on a strict stand-in; and a build whose layers nobody can list."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from machine import Machine, Plan, Tensor
from plans import shaped

from trtopt.engine import build, worker
from trtopt.engine.backend import TENSORRT
from trtopt.engine.cache import Compiled, TimingCache, timing_for
from trtopt.engine.process import driver_failed, refusal
from trtopt.engine.request import BuildRequest, ShapeProfile
from trtopt.errors import TargetError
from trtopt.events import Event
from trtopt.hardware.spec import find_gpu

LAYERS = '{"Layers": [{"Name": "a", "LayerType": "gemm", "Inputs": [], "Outputs": [{"Name": "y", "Dimensions": [1], '
FLOAT = LAYERS + '"Format/Datatype": "Row major linear FP32 format"}]}]}'
UNKNOWN_TYPE = LAYERS + '"Format/Datatype": "Row major linear FP3 format"}]}]}'


def plan(**more: object) -> Plan:
    profiles = (((1, 2), (3, 2), (4, 2)),)
    tensors = (Tensor("x", (-1, 2), profiles=profiles), Tensor("y", (-1, 2), is_input=False))
    return Plan(tensors, lambda feeds: {"y": np.asarray(feeds["x"])}, **more)  # type: ignore[arg-type]


def test_an_engine_is_inspected_without_memory_for_activations(machine: Machine, tmp_path: Path) -> None:
    trt, data = sys.modules["tensorrt"], machine.engine(plan(inspected=FLOAT))
    worker._inspect(trt, data, tmp_path, host_code=False)
    assert (tmp_path / worker.LAYERS).read_text(encoding="utf-8") == FLOAT
    assert machine.contexts == ["USER_MANAGED"]


def test_the_inspector_is_given_the_values_of_shape_tensors(machine: Machine, tmp_path: Path) -> None:
    trt, data = sys.modules["tensorrt"], machine.engine(replace(shaped(), inspected=FLOAT))
    worker._inspect(trt, data, tmp_path, host_code=False)
    assert (tmp_path / worker.LAYERS).read_text(encoding="utf-8") == FLOAT
    assert not machine.left()


def test_a_version_compatible_engine_is_inspected(machine: Machine, tmp_path: Path) -> None:
    trt, data = sys.modules["tensorrt"], machine.engine(plan(inspected=FLOAT, is_version_compatible=True))
    worker._inspect(trt, data, tmp_path, host_code=True)
    assert (tmp_path / worker.LAYERS).is_file()


def test_a_driver_that_does_not_start_is_no_crash_of_the_worker(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trt, said = sys.modules["tensorrt"], "CUDA initialization failure with error: 35"

    def builder(logger: object) -> None:
        logger.log(trt.ILogger.Severity.ERROR, said)  # type: ignore[attr-defined]
        raise TypeError("pybind11::init(): factory function returned nullptr")

    monkeypatch.setattr(trt, "Builder", builder, raising=False)
    messages: list[tuple[str, str]] = []
    with pytest.raises(worker._RefusedError) as caught:
        worker._build({"module": "tensorrt", "plugins": []}, tmp_path, messages, sys.stdout)
    error = refusal(caught.value.stage, caught.value.details, messages, "model.onnx")
    assert isinstance(error, TargetError) and said in error.what and "gpu-cu12" in error.remedy


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (["CUDA initialization failure with error: 100. Please check"], "CUDA_VISIBLE_DEVICES"),
        (["CUDA initialization failure with error: 999"], "nvidia_uvm"),
        ([], "nvidia-smi"),
    ],
)
def test_a_remedy_follows_from_what_cuda_says(messages: Sequence[str], words: str) -> None:
    assert words in driver_failed(messages).remedy


@pytest.mark.parametrize("layers", [UNKNOWN_TYPE, FLOAT.replace('"a"', '"other"'), "", "{"])
def test_an_engine_whose_layers_are_not_understood_is_delivered(
    layers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = find_gpu("L4")
    compiled = Compiled(b"engine", layers, (), "10.13.0.35", 600.0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(build, "present_gpu", lambda: gpu)
    monkeypatch.setattr(build, "_run", lambda *_: compiled)
    (tmp_path / "m.onnx").write_bytes(b"")
    said: list[Event] = []
    found = build.build_engine(BuildRequest(tmp_path / "m.onnx", TENSORRT, gpu, ("a", "b")), said.append)
    assert found.data == b"engine"
    assert found.record.layers is None and found.record.kernels is None
    assert any("its layers are not known" in event.text for event in said if event.kind == "warning")


def test_an_engine_that_the_inspector_fails_on_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT for RTX under the name of TensorRT: without a GPU it gives no context to inspect with."""
    pytest.importorskip("tensorrt_rtx")
    import onnx
    import onnx.parser

    gpu = find_gpu("L4")
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[2] y) {y = Relu(x)}'
    )
    onnx.save(model, tmp_path / "m.onnx")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(build, "present_gpu", lambda: gpu)
    request = BuildRequest(tmp_path / "m.onnx", replace(TENSORRT, module="tensorrt_rtx"), gpu, ("r",))
    found = build.build_engine(request)
    assert found.data[:4] == b"vtrt" and found.record.layers is None


@pytest.mark.parametrize("shapes", [{}, {"s": ((1, 8), (4, 8), (16, 8))}])
def test_a_build_for_tensorrt_by_another_module_of_its_name(
    shapes: dict[str, tuple[tuple[int, ...], ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole path of the backend: profiles, flags, progress, the timing cache that there is none of."""
    pytest.importorskip("tensorrt_rtx")
    import onnx
    import onnx.parser

    (tmp_path / "tensorrt.py").write_text("import sys, tensorrt_rtx\nsys.modules[__name__] = tensorrt_rtx\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    gpu, body = find_gpu("L4"), "g (float[N,8] x) => (float[N,8] y) {y = Relu(x)}"
    if shapes:
        body = "g (float[N,8] x, int64[2] s) => (float[A,B] y) {r = Relu(x) y = Reshape(r, s)}"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {body}'), tmp_path / "m.onnx")
    monkeypatch.setattr(build, "present_gpu", lambda: gpu)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    batches = {"x": ((1, 8), (4, 8), (16, 8))}
    profile = ShapeProfile({**batches, **({"s": ((2,),) * 3} if shapes else {})}, shapes)  # type: ignore[arg-type]
    request = BuildRequest(
        tmp_path / "m.onnx", TENSORRT, gpu, ("r",), (profile,), builder=("builder_optimization_level=1",)
    )
    said: list[Event] = []
    found = build.build_engine(request, said.append)
    assert found.data[:4] == b"vtrt" and any(event.kind == "advance" for event in said)
    assert found.record.profiles == (profile.to_json_dict(),)


def test_two_builds_at_once_both_add_to_a_timing_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, file = find_gpu("L4"), tmp_path / "times.cache"
    file.write_bytes(b"0")
    both_asked = threading.Barrier(2)

    def run(request: BuildRequest, settings: object, timing: TimingCache, on_event: object) -> Compiled:
        time.sleep(0.05)
        content = (timing.content or b"") + request.name.encode()
        return Compiled(b"engine", FLOAT, (), "10.13.0.35", 1.0, timing_cache=content)

    def timing(request: BuildRequest, version: str, cache: object) -> TimingCache:
        found = timing_for(request, version, None)
        both_asked.wait()
        return found

    monkeypatch.setattr(build, "present_gpu", lambda: gpu)
    monkeypatch.setattr(build, "_run", run)
    monkeypatch.setattr(build, "timing_for", timing)
    (tmp_path / "m.onnx").write_bytes(b"")
    asked = [BuildRequest(tmp_path / "m.onnx", TENSORRT, gpu, ("a",), name=name, timing_cache=file) for name in "12"]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(build.build_engine, asked))
    assert all(item.record.layers is not None for item in found)
    assert file.read_bytes() in (b"012", b"021")
