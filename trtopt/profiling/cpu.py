"""A CPU: what ONNX Runtime reaches on it, and what that lets a node take.

The rates are measured by small graphs of ONNX Runtime's own operators, in one to three seconds; the user's model has no
part in it. The time of a node follows from them by the roofline, and nothing is fitted.
"""

from __future__ import annotations

import functools
import math
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir

from trtopt.hardware.cpu import CpuSpec
from trtopt.profiling.onnxruntime import Run, read_profile
from trtopt.report.schema.analysis import LayerRow, limiter_of
from trtopt.roofline.layer import PredictedTime, row_of
from trtopt.roofline.work import Layer, Work
from trtopt.support.ort_session import Feeds, TimedSession
from trtopt.support.precision import Precision
from trtopt.support.temporary import TemporaryFolder


def predict_cpu(layers: Sequence[Layer], cpu: CpuSpec) -> tuple[LayerRow | None, ...]:
    """Predict the time of every node, each timed by itself: arithmetic or memory, whichever takes longer, and a node's
    latency.

    What a node reads and writes comes from the caches where all of it fits into them, as its producer has just written
    it; weights, where those of the whole network do, as each inference reads them all. The rates are those of a large
    matrix product and of a plain element-wise operator: transcendental functions, padded or strided windows, and thin
    products reach less, which is what the comparison is to show.

    Args:
        layers: All nodes of the network.
        cpu: What the CPU reaches. A type without a rate of its own computes at that of FP32.

    Returns:
        A row for each layer, None where its work is not known. Tiles and waves are those of no GPU: none, efficiency 1.
    """
    weights = sum(layer.work.weight_bytes // _executions(layer.work) for layer in layers if layer.work is not None)
    weights_gbs = _bandwidth(weights, cpu)
    return tuple(None if layer.work is None else _row(layer, layer.work, cpu, weights_gbs) for layer in layers)


def _executions(work: Work) -> int:
    """The steps of a recurrent layer are one node; those of anything else are executions of it, in a loop."""
    return 1 if work.kind == "recurrent" else work.steps


def _bandwidth(size: int, cpu: CpuSpec) -> float:
    return cpu.cache_bandwidth_gbs if size <= cpu.cache_bytes else cpu.bandwidth_gbs


def _row(layer: Layer, work: Work, cpu: CpuSpec, weights_gbs: float) -> LayerRow:
    math_us = work.flop / cpu.tflops.get(work.dtype, cpu.tflops[Precision.FP32]) / 1e6
    activations_gbs = _bandwidth(work.bytes // _executions(work), cpu)
    memory_us = ((work.moved_bytes - work.weight_bytes) / activations_gbs + work.weight_bytes / weights_gbs) / 1e3
    latency_us = (cpu.latency_us + cpu.profiled_us) * _executions(work)
    predicted_us = max(math_us, memory_us) + latency_us
    limiter = limiter_of(math_us, memory_us, predicted_us)
    return row_of(layer, work, PredictedTime(math_us, memory_us, latency_us, predicted_us, limiter))


_WIDTH = 1024
"""Width and depth of the matrix product: large enough for the peak, and its operands fit into caches."""

_SIZES = tuple(1 << power for power in range(20, 29))
"""Bytes read and written together, 1 MiB to 256 MiB: from what an L2 cache holds to more than the caches of most
processors."""

_REPEATS = 8
_RUNS = 50
"""Runs of a chain, which takes microseconds."""

_CHAIN = 256
"""Nodes of the chain that tells what a node costs by itself."""


@functools.cache
def probe_cpu(threads: int) -> CpuSpec:
    """Measure what a number of threads reach, the best of several runs each; kept for the life of the process.

    - Arithmetic: a matrix product [1024 per thread, 1024] x [1024, 1024] in FP32, the second matrix constant.
    - Memory: ``Neg`` of FP32 vectors, 4 bytes read and 4 written per element. The rate of the caches is the best of all
      sizes, that of the DRAM belongs to the largest; ``cache_bytes`` is the last size nearer (by ratio) to the former.
    - A node: a chain of ``Neg`` of one element, without and with profiling.

    Raises:
        MissingDependencyError: ONNX Runtime is not installed.
    """
    rates = _bandwidths(threads)
    cache, dram = max(rates.values()), rates[_SIZES[-1]]
    cached = [size for size, rate in rates.items() if rate > math.sqrt(cache * dram)]
    plain, profiled = _node_us(threads)
    return CpuSpec(
        name=_name(),
        threads=threads,
        tflops={Precision.FP32: _tflops(threads)},
        bandwidth_gbs=dram,
        cache_bandwidth_gbs=cache,
        cache_bytes=max(cached, default=_SIZES[0]),
        latency_us=plain,
        profiled_us=profiled - plain,
        source=f"measured with ONNX Runtime: MatMul [{_WIDTH * threads}, {_WIDTH}, {_WIDTH}], Neg on "
        f"{_SIZES[0] >> 20} to {_SIZES[-1] >> 20} MiB, a chain of {_CHAIN} nodes; the best of several runs",
    )


def _tflops(threads: int) -> float:
    weight = np.random.default_rng(0).standard_normal((_WIDTH, _WIDTH), dtype=np.float32)
    model = _model("float[M, K] x", ["timed = MatMul (x, w)"], {"w": weight})
    x = np.ones((_WIDTH * threads, _WIDTH), dtype=np.float32)
    return 2 * x.size * _WIDTH / min(_timed_us(model, [x] * _REPEATS, threads)) / 1e6


def _bandwidths(threads: int) -> dict[int, float]:
    """GB/s by the bytes read and written."""
    x = np.ones(_SIZES[-1] // 8, dtype=np.float32)
    arrays = [x[: size // 8] for size in _SIZES for _ in range(_REPEATS)]
    times = _timed_us(_model("float[N] x", ["timed = Neg (x)"]), arrays, threads)
    return {
        size: size / min(times[index * _REPEATS : (index + 1) * _REPEATS]) / 1e3 for index, size in enumerate(_SIZES)
    }


def _node_us(threads: int) -> tuple[float, float]:
    """What a node takes, without and with profiling."""
    x = np.ones(1, dtype=np.float32)
    chains = {count: _chain(count) for count in (1, _CHAIN)}
    whole = {}
    for count, model in chains.items():
        with TimedSession(model, threads=threads) as session:
            whole[count] = min(_wall_us(session, {"x": x}) for _ in range(_RUNS))
    plain = (whole[_CHAIN] - whole[1]) / (_CHAIN - 1)
    runs = _profiled(chains[_CHAIN], [x] * _REPEATS, threads)
    return plain, min(sum(run.own_us.values()) for run in runs) / _CHAIN


def _chain(count: int) -> ir.Model:
    return _model("float[1] x", ["v0 = Neg (x)", *(f"v{index} = Neg (v{index - 1})" for index in range(1, count))])


def _model(given: str, nodes: Sequence[str], constants: Mapping[str, np.ndarray] = MappingProxyType({})) -> ir.Model:
    """A graph of these nodes. Its output is the shape of the last one's result: a large one would be copied."""
    last = nodes[-1].split()[0]
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> probe ({given}) => (int64[R] shape) '
        f"{{ {' '.join(nodes)} shape = Shape ({last}) }}"
    )
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in constants.items())
    for node in proto.graph.node:
        node.name = node.output[0]
    return ir.from_proto(proto)


def _timed_us(model: ir.Model, arrays: Sequence[np.ndarray], threads: int) -> list[int]:
    """Microseconds of the node ``timed`` on each array."""
    return [max(run.own_us["timed"], 1) for run in _profiled(model, arrays, threads)]


def _profiled(model: ir.Model, arrays: Sequence[np.ndarray], threads: int) -> tuple[Run, ...]:
    with TemporaryFolder("probe-") as folder:
        with TimedSession(model, threads=threads, profile=Path(folder) / "runs") as session:
            for array in arrays:
                session.run({"x": array})
            file = session.end_profiling()
        return read_profile(file).runs


def _wall_us(session: TimedSession, feeds: Feeds) -> float:
    start = time.perf_counter()
    session.run(feeds)
    return (time.perf_counter() - start) * 1e6


def _name() -> str:
    """The processor's name: Linux tells the model, other systems at least the architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
