"""What is installed, what it can build for, and whether it works: made to be attached to an issue."""

from __future__ import annotations

import importlib.metadata
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from trtopt.engine.achieved import achieved_precision
from trtopt.engine.backend import RTX_TARGETS, TENSORRT, TENSORRT_RTX, Backend
from trtopt.engine.build import EngineArtifact, build_engine
from trtopt.engine.request import BuildRequest
from trtopt.engine.run import EngineSession, why_not_run
from trtopt.errors import TrtoptError
from trtopt.hardware.probe import present_gpu, probe
from trtopt.hardware.spec import DEFAULT_GPU, PORTABLE, GpuSpec, find_gpu
from trtopt.support._lazy import is_available, require
from trtopt.support.ort_session import Feeds, OrtSession
from trtopt.support.precision import Precision
from trtopt.support.temporary import TemporaryFolder

PACKAGES = (
    *("numpy", "onnx", "onnx_ir", "ml_dtypes", "rich", "onnxruntime", "onnxruntime-gpu"),
    *("torch", "onnxscript", "tensorrt", "tensorrt-cu12", "tensorrt-cu13", "tensorrt_rtx", "cuda-python"),
)
_PRECISIONS = (Precision.FP16, Precision.INT8)
_BATCH, _CHANNELS, _SIZE, _CLASSES = 4, 16, 16, 8
TOLERANCE_RATIO = 0.02
"""Largest difference from ONNX Runtime over the largest output: FP16 sums over 4096 products stay well below it."""


def diagnose() -> dict[str, Any]:
    """What is installed and what it can do. Holds no paths and no names of people or machines."""
    versions = {name: _version(name) for name in PACKAGES}
    found = probe()
    problems = []
    if versions["onnxruntime"] and versions["onnxruntime-gpu"]:
        problems.append(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files: uninstall both, "
            "then install one"
        )
    return {
        "trtopt": _version("trtopt"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": versions,
        "gpu": found.name or None,
        "driver": found.driver or None,
        "gpu_note": found.reason or None,
        "backends": {backend.name: _backend_state(backend) for backend in (TENSORRT_RTX, TENSORRT)},
        "problems": problems,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _backend_state(backend: Backend) -> dict[str, Any]:
    present = present_gpu()
    if not is_available(backend.module):
        return {"usable": False, "reason": f"not installed: {backend.install}", "targets": []}
    try:
        version = require(backend.module, "rtx", "build engines").__version__
    except TrtoptError as error:
        return {"usable": False, "reason": scrubbed(error.what, None), "targets": []}
    if backend.needs_gpu and present is None:
        return {"usable": False, "version": version, "reason": "builds on the target GPU only", "targets": []}
    targets = [present.compute_capability] if backend.needs_gpu and present else [*RTX_TARGETS, PORTABLE]
    reason = why_not_run(backend)
    return {
        "usable": True,
        "version": version,
        "targets": targets,
        "runs_here": not reason,
        "runs_here_note": reason or None,
    }


def selftest() -> dict[str, Any]:
    """Build a small network (two convolutions, ReLU, Gemm) with every backend that can be used, in FP16 and INT8.

    Where a GPU is, the engine runs and its outputs are compared with ONNX Runtime's.

    Returns:
        ``ok``, ``environment`` (see :func:`diagnose`) and ``checks``, one per backend and precision.
    """
    environment = diagnose()
    checks = [
        _check(backend, precision)
        for backend in (TENSORRT_RTX, TENSORRT)
        if environment["backends"][backend.name]["usable"]
        for precision in _PRECISIONS
    ]
    return {
        "ok": bool(checks) and all(check["ok"] for check in checks),
        "environment": environment,
        "checks": checks,
    }


def _check(backend: Backend, precision: Precision) -> dict[str, Any]:
    check: dict[str, Any] = {"backend": backend.name, "precision": precision, "ok": False}
    start = time.perf_counter()
    with TemporaryFolder("selftest-") as name:
        folder = Path(name)
        try:
            model = _network(precision)
            gpu = target_of(backend)
            check["target"] = gpu.name
            path = folder / "model.onnx"
            onnx.save(model, path)
            artifact = build_engine(BuildRequest(path, backend, gpu, tuple(node.name for node in model.graph.node)))
            check["kernels"] = artifact.record.kernels
            achieved = achieved_precision(artifact.record.layers or (), _FLOP)
            check["flop_share"] = {dtype: round(share.flop_share, 3) for dtype, share in achieved.items()}
            check["not_run_because"] = why_not_run(backend, artifact.data) or None
            if check["not_run_because"] is None:
                check["difference_ratio"] = _difference_ratio(model, artifact, backend)
            check["ok"] = check.get("difference_ratio", 0.0) <= TOLERANCE_RATIO and (
                precision != Precision.INT8 or Precision.INT8 in achieved
            )
        except TrtoptError as error:
            check["error"] = scrubbed(str(error), folder)
    check["seconds"] = round(time.perf_counter() - start, 2)
    return check


def target_of(backend: Backend) -> GpuSpec:
    """The GPU of this machine where the backend builds for it, else the default one."""
    present = present_gpu()
    usable = present is not None and (backend.needs_gpu or present.compute_capability in RTX_TARGETS)
    return present if present is not None and usable else find_gpu(DEFAULT_GPU)


def _difference_ratio(model: onnx.ModelProto, artifact: EngineArtifact, backend: Backend) -> float:
    shape = (_BATCH, _CHANNELS, _SIZE, _SIZE)
    feeds: Feeds = {"x": np.random.default_rng(1).standard_normal(shape).astype(np.float16)}
    with OrtSession(ir.serde.deserialize_model(model), keep_qdq=True) as session:
        (expected,) = session.run(feeds)
    with EngineSession(artifact.data, backend) as session:
        (actual,) = session.run(feeds)
    difference = np.abs(actual.astype(np.float64) - expected.astype(np.float64)).max()
    return float(difference / np.abs(expected.astype(np.float64)).max())


_FLOP = {
    "conv1": 2 * _BATCH * _SIZE**2 * _CHANNELS**2 * 9,
    "conv2": 2 * _BATCH * _SIZE**2 * _CHANNELS**2 * 9,
    "gemm": 2 * _BATCH * _SIZE**2 * _CHANNELS * _CLASSES,
}


def _network(precision: Precision) -> onnx.ModelProto:
    """x [4, 16, 16, 16] -> conv, ReLU, conv, ReLU, Gemm; FP16, with INT8 Q/DQ at the convolutions on request."""
    rng = np.random.default_rng(0)
    constants = {
        "scale_x": np.asarray(1 / 32, np.float16),
        "scale_w": np.asarray(1 / 512, np.float16),
        "w3": (rng.standard_normal((_CHANNELS * _SIZE**2, _CLASSES)) / 64).astype(np.float16),
    }
    nodes = []
    value = "x"
    for layer in ("conv1", "conv2"):
        weight = np.rint(rng.standard_normal((_CHANNELS, _CHANNELS, 3, 3)) * 32).clip(-127, 127)
        constants[f"{layer}_w"] = (
            weight.astype(np.int8) if precision == Precision.INT8 else (weight / 512).astype(np.float16)
        )
        operands = [value, f"{layer}_w"]
        if precision == Precision.INT8:
            nodes += [
                helper.make_node("QuantizeLinear", [value, "scale_x"], [f"{layer}_q"], f"{layer}_q", output_dtype=3),
                helper.make_node("DequantizeLinear", [f"{layer}_q", "scale_x"], [f"{layer}_x"], f"{layer}_dq"),
                helper.make_node("DequantizeLinear", [f"{layer}_w", "scale_w"], [f"{layer}_v"], f"{layer}_dqw"),
            ]
            operands = [f"{layer}_x", f"{layer}_v"]
        nodes += [
            helper.make_node("Conv", operands, [f"{layer}_y"], layer, pads=[1, 1, 1, 1]),
            helper.make_node("Relu", [f"{layer}_y"], [f"{layer}_r"], f"{layer}_relu"),
        ]
        value = f"{layer}_r"
    nodes += [
        helper.make_node("Flatten", [value], ["flat"], "flatten"),
        helper.make_node("Gemm", ["flat", "w3"], ["y"], "gemm"),
    ]
    shape = [_BATCH, _CHANNELS, _SIZE, _SIZE]
    graph = helper.make_graph(
        nodes,
        "selftest",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT16, shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT16, [_BATCH, _CLASSES])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def scrubbed(text: str, folder: Path | None) -> str:
    """``text`` without the folders of this machine."""
    for path, stand_in in ((folder, "<folder>"), (Path(tempfile.gettempdir()), "<tmp>"), (Path.home(), "~")):
        if path is not None and path != Path(path.anchor):
            text = text.replace(str(path), stand_in)
    return text
