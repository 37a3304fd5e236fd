"""Every kind of engine, built small, run, timed and served on this machine's GPU: for ``trtopt doctor --selftest``.

What is checked are the native calls, on a GPU for the first time wherever trtopt was only ever tested without one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir

from trtopt.engine.backend import RTX_TARGETS, TENSORRT, TENSORRT_RTX, Backend, RuntimeOptions, identify
from trtopt.engine.build import build_engine
from trtopt.engine.doctor import TOLERANCE_RATIO, scrubbed, target_of
from trtopt.engine.manifest import VerifiedEngine
from trtopt.engine.request import BuildRequest, ShapeProfile
from trtopt.engine.run import EngineSession, why_not_run
from trtopt.errors import TrtoptError
from trtopt.hardware.probe import present_gpu
from trtopt.profiling.inference import TimedEngine
from trtopt.profiling.inputs import feeds_of
from trtopt.profiling.measured import RunLimits
from trtopt.profiling.timing import TimingOptions
from trtopt.serve.gpu import WARM_UPS, GpuRunner
from trtopt.support.ort_session import Feeds, OrtSession
from trtopt.support.temporary import TemporaryFolder

_TIMING = TimingOptions(RunLimits(warm_up_runs=2, warm_up_seconds=0.0, min_runs=10, min_seconds=0.0, fixed=True))

Call = tuple[Feeds, Mapping[str, np.ndarray]]
"""Inputs and the outputs that they give, by name."""


@dataclass(frozen=True)
class EngineKind:
    """A network whose engine is of one kind.

    Attributes:
        body: Its graph in ONNX's text form.
        calls: Inputs of calls.
        formats: The compiler's memory formats of inputs and outputs.
        backends: Those whose parser takes it.
    """

    body: str
    calls: tuple[Feeds, ...]
    profiles: tuple[ShapeProfile, ...] = ()
    formats: Mapping[str, str] = field(default_factory=dict)
    backends: tuple[Backend, ...] = (TENSORRT_RTX, TENSORRT)

    @property
    def model(self) -> onnx.ModelProto:
        """The network, its nodes named."""
        model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {self.body}')
        for index, node in enumerate(model.graph.node):
            node.name = f"{node.op_type}_{index}"
        return model


def _rows(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, 8)).astype(np.float32)


def _batches(*ends: tuple[int, int, int]) -> tuple[ShapeProfile, ...]:
    return tuple(ShapeProfile({"x": ((low, 8), (best, 8), (high, 8))}) for low, best, high in ends)


def engine_kinds() -> dict[str, EngineKind]:
    """The kinds by name. Outputs that lie where an input does are missing: no operator of ONNX makes one; TensorRT for
    RTX has no NonZero."""
    relu = "g (float[N,8] x) => (float[N,8] y) {y = Relu(x)}"
    image = np.random.default_rng(0).standard_normal((2, 3, 4, 4)).astype(np.float32)
    rows = {"x": ((1, 8), (4, 8), (16, 8)), "s": ((2,), (2,), (2,))}
    shaped = ShapeProfile(rows, {"s": rows["x"]})
    return {
        "static": EngineKind("g (float[4,8] x) => (float[4,8] y) {y = Relu(x)}", ({"x": _rows(4)}, {"x": -_rows(4)})),
        "dynamic": EngineKind(relu, tuple({"x": _rows(n)} for n in (4, 16, 1)), _batches((1, 4, 16))),
        "multi-profile": EngineKind(
            relu, tuple({"x": _rows(n)} for n in (4, 9, 16, 1)), _batches((1, 2, 4), (5, 8, 16))
        ),
        "data-dependent": EngineKind(
            "g (float[4,8] x) => (int64[2,M] i) {r = Relu(x) i = NonZero(r)}",
            ({"x": _rows(4)}, {"x": -_rows(4)}),
            backends=(TENSORRT,),
        ),
        "host-output": EngineKind(
            "g (float[N,8] x) => (float[N,8] y, int64[2] size) {y = Relu(x) size = Shape(x)}",
            tuple({"x": _rows(n)} for n in (4, 16, 1)),
            _batches((1, 4, 16)),
        ),
        "shape-tensor": EngineKind(
            "g (float[N,8] x, int64[2] s) => (float[A,B] y) {r = Relu(x) y = Reshape(r, s)}",
            tuple({"x": _rows(n), "s": np.array([n, 8])} for n in (4, 16, 1)),
            (shaped,),
        ),
        "channels-last": EngineKind(
            "g (float[2,3,4,4] x) => (float[2,3,4,4] y) {y = Relu(x)}",
            ({"x": image}, {"x": -image}),
            formats={"x": "HWC", "y": "HWC"},
        ),
    }


def why_not_checked(backend: Backend) -> str:
    """Why engines of a backend are not run here; empty where they are."""
    gpu, reason = present_gpu(), why_not_run(backend)
    if not reason and backend == TENSORRT_RTX and gpu is not None and gpu.compute_capability not in RTX_TARGETS:
        return f"TensorRT for RTX does not build for compute capability {gpu.compute_capability}"
    return reason


def selftest_kinds() -> Iterator[dict[str, Any]]:
    """Check every kind with every backend whose engines run here; nothing where none does.

    Yields:
        The record of a check, twice: before it runs, with an ``error`` that says that it did not end, and after. So
        who writes each down has a file that names the check in which native code crashed.
    """
    for backend in (TENSORRT_RTX, TENSORRT):
        if why_not_checked(backend):
            continue
        for name, kind in engine_kinds().items():
            if backend not in kind.backends:
                continue
            check: dict[str, Any] = {"backend": backend.name, "kind": name, "ok": False, "error": "it did not end"}
            yield check
            start = time.perf_counter()
            with TemporaryFolder("selftest-") as folder:
                del check["error"]
                try:
                    check |= _checked(kind, backend, Path(folder))
                except TrtoptError as error:
                    check["error"] = scrubbed(str(error), Path(folder))
            check["seconds"] = round(time.perf_counter() - start, 2)
            yield check


def _checked(kind: EngineKind, backend: Backend, folder: Path) -> dict[str, Any]:
    path, model = folder / "model.onnx", kind.model
    onnx.save(model, path)
    nodes = tuple(node.name for node in model.graph.node)
    asked = BuildRequest(path, backend, target_of(backend), nodes, kind.profiles, formats=kind.formats)
    data = build_engine(asked).data
    with OrtSession(ir.serde.deserialize_model(model)) as session:
        calls = [(feeds, dict(zip(session.output_names, session.run(feeds), strict=True))) for feeds in kind.calls]
    return run_everywhere(data, backend, calls, folder)


def run_everywhere(data: bytes, backend: Backend, calls: Sequence[Call], folder: Path) -> dict[str, Any]:
    """Run an engine in a session, timed, and in a service of two contexts with CUDA graphs.

    Args:
        data: The engine file's content.
        backend: What built it.
        calls: What it is given, and what it has to give.
        folder: Where kernels that are compiled are kept meanwhile.

    Returns:
        ``ok``; ``difference_ratio``, the largest difference over the largest expected value; ``device_us`` of one
        inference at the optimum; how many ``layers`` the profiler named; ``graphs``, what became of them.

    Raises:
        TrtoptError: It cannot be loaded, or fails.
    """
    options, found = RuntimeOptions(kernels=folder), [0.0]
    with EngineSession(data, backend, options) as session:
        for feeds, expected in (*calls, *calls):
            found.append(_difference(dict(zip(session.output_names, session.run(feeds), strict=True)), expected))
    with TimedEngine(data, backend, options) as timed:
        timed.prepare(feeds_of(timed.inputs(), {}, timed.optimum, values=timed.values()))
        device_us, layers = timed.time(_TIMING).device.median_us, len(timed.profiled()())
        timed.layer_information()
    verified = VerifiedEngine(Path("selftest.engine"), data, *identify(data), None)
    runner = GpuRunner(verified, options, 2, 2)
    try:
        for _ in range(WARM_UPS + 2):
            for feeds, expected in calls:
                found += [_difference(runner.run(lane, dict(feeds)), expected) for lane in (0, 1)]
        graphs = runner.graph_counts
    finally:
        runner.close()
    return {
        "ok": max(found) <= TOLERANCE_RATIO and not graphs["failed"],
        "difference_ratio": max(found),
        "device_us": round(device_us, 2),
        "layers": layers,
        "graphs": graphs,
    }


def _difference(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """The largest difference over the largest value; infinite where shapes or names differ, or a value is NaN."""
    if any(name not in found or found[name].shape != array.shape for name, array in expected.items()):
        return float("inf")
    pairs = [(found[name].astype(np.float64), array.astype(np.float64)) for name, array in expected.items()]
    ratios = [np.abs(one - two).max(initial=0) / max(np.abs(two).max(initial=0), 1e-6) for one, two in pairs]
    return float(np.nan_to_num(max(ratios), nan=np.inf))
