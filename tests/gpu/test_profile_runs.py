"""Engines measured on a real GPU. Skipped where there is none."""

from __future__ import annotations

import json
import math
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import rtx_nets

from trtopt.engine.backend import RTX_TARGETS, TENSORRT, TENSORRT_RTX, Backend
from trtopt.engine.build import build_engine
from trtopt.engine.manifest import load_engine
from trtopt.engine.request import BuildRequest
from trtopt.engine.run import why_not_run
from trtopt.hardware.probe import present_gpu
from trtopt.profiling.export import times_json
from trtopt.profiling.gpu import measure_engine
from trtopt.profiling.measured import RunLimits
from trtopt.profiling.timing import TimingOptions
from trtopt.support.ort_session import OrtSession

BACKENDS = [pytest.param(backend, id=backend.name) for backend in (TENSORRT_RTX, TENSORRT)]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_is_measured_layer_by_layer_and_end_to_end(backend: Backend, tmp_path: Path) -> None:
    reason, gpu = why_not_run(backend), present_gpu()
    if reason or gpu is None:
        pytest.skip(reason)
    if backend == TENSORRT_RTX and gpu.compute_capability not in RTX_TARGETS:
        pytest.skip(f"TensorRT for RTX does not build for compute capability {gpu.compute_capability}")
    model = rtx_nets.conv_net("fp16")
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    nodes = {node.name for node in model.graph.node}
    engine = tmp_path / f"model{backend.suffix}"
    engine.write_bytes(build_engine(BuildRequest(path, backend, gpu, tuple(nodes))).data)
    with OrtSession(ir.serde.deserialize_model(model)) as reference:
        loaded = load_engine(engine, allow_unverified=True)
        found = measure_engine(loaded, {}, reference=reference).measurement
    limits = RunLimits(warm_up_seconds=0.1, min_runs=50, min_seconds=0.1, fixed=True)
    both = measure_engine(loaded, {}, timing=TimingOptions(limits, streams=2, transfers=True, graph=False))

    claimed = {node for layer in found.layers for node in layer.info.onnx_nodes}
    assert {"conv1", "conv2", "gemm"} <= claimed
    assert all(layer.measured_us >= 0 and layer.spread_us is not None for layer in found.layers)
    assert sum(layer.measured_us for layer in found.layers) > 0
    assert found.end_to_end_us is not None and found.end_to_end_us > 0
    assert found.host_us is not None and found.host_us > 0
    assert found.source.origin == backend.name and found.source.runs
    assert found.source.conditions["stream_device_us"] > 0
    assert found.source.conditions["stream_device_p99_us"] >= found.source.conditions["stream_device_us"]
    assert found.source.conditions["stream_per_second"] > 0
    assert found.source.conditions["end_to_end"] == "cuda_graph", found.warnings
    assert found.source.conditions["sm_clock_mhz"] > 0
    assert both.measurement.source.conditions["stream_h2d_us"] > 0 and len(both.timing.trace) >= 50
    assert {"startComputeMs", "latencyMs"} <= json.loads(times_json(both.timing))[0].keys()
    assert found.accuracy is not None and list(found.accuracy) == ["y"]
    assert found.accuracy["y"].sqnr_db > 30 and math.isfinite(found.accuracy["y"].max_abs)
