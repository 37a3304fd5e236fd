"""One measuring function for everybody's ONNX files: the real builder's kernels, and two judges of their time.

The first judge is the performance model of trtopt. The second is a plain roofline that shares nothing with it but the
list of kernels: ``max(bytes / (0.8 * bandwidth), flop / (0.7 * peak of the operands' type)) + 2 us`` per kernel.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnx_ir as ir

from trtopt.engine.backend import TENSORRT_RTX
from trtopt.engine.build import build_engine
from trtopt.engine.layers import buffer_sizes, constant_bytes, moved_bytes
from trtopt.engine.request import BuildRequest
from trtopt.engine.work import layers_of_engine, trip_counts
from trtopt.graph import edit
from trtopt.graph.shapes import static_shapes
from trtopt.hardware.spec import find_gpu
from trtopt.report.schema.layers import LayerInfo
from trtopt.roofline.constants import fit_for
from trtopt.roofline.layer import predict
from trtopt.roofline.peaks import peak_rate
from trtopt.roofline.work import Work
from trtopt.source.onnx_file import load
from trtopt.source.save import save_model

sys.path.append(str(Path(__file__).parents[1]))
from second_judge import MB, PLAIN, PlainGpu, kernel_us


def plain_us(work: Work, gpu: PlainGpu) -> float:
    """The plain judge's time of one kernel."""
    return kernel_us(work.bytes, work.flop, work.dtype, gpu)


def measure(path: Path) -> dict[str, Any]:
    """Compile an ONNX file of static shapes for compute capability 8.9 and judge its kernels.

    Returns:
        ``kernels``, ``activation_mb``, ``weight_mb`` (bytes that all kernels read and write once), ``engine_mb``,
        ``int8_flop_share`` and ``fp8_flop_share`` (of the flop of matrix products and convolutions), and by GPU
        ``predicted_us`` and ``plain_us``.

    Raises:
        EngineBuildError: The compiler refused the file.
    """
    model = load(path).model
    with tempfile.TemporaryDirectory(prefix="precision-") as folder:
        file = Path(folder) / "model.onnx"
        save_model(model, file)
        nodes = tuple(str(node.name) for node in edit.all_nodes(model.graph))
        engine = build_engine(BuildRequest(file, TENSORRT_RTX, find_gpu("L4"), nodes))
    return {**judged(engine.sized_layers, model), "engine_mb": round(len(engine.data) / MB, 2)}


def judged(layers: tuple[LayerInfo, ...], model: ir.Model) -> dict[str, Any]:
    """What :func:`measure` says, but for the size of the engine.

    Args:
        layers: What the compiler lists for ``model``.
        model: The model that was compiled; node names unique.
    """
    work = layers_of_engine(layers, model, static_shapes(model, {}))
    sizes = buffer_sizes(layers)
    launched = [(layer, trips or 1) for layer, trips in zip(layers, trip_counts(layers), strict=True)]
    launched = [(layer, trips) for layer, trips in launched if layer.is_kernel]
    works = [layer.work for layer in work.layers if layer.work is not None]
    products = [item for item in works if item.gemm is not None]
    total = sum(item.flop for item in products) or 1
    found: dict[str, Any] = {
        "kernels": sum(trips for _, trips in launched),
        "activation_mb": round(sum(trips * moved_bytes(layer, sizes) for layer, trips in launched) / MB, 2),
        "weight_mb": round(sum(trips * constant_bytes(layer) for layer, trips in launched) / MB, 2),
    }
    for dtype in ("int8", "fp8"):
        share = sum(item.flop for item in products if item.dtype == dtype) / total
        found[f"{dtype}_flop_share"] = round(share, 4)
    found["predicted_us"] = {
        name: round(sum(row.predicted_us for row in predict(work.layers, find_gpu(name))[0]), 1) for name in PLAIN
    }
    found["plain_us"] = {name: round(sum(plain_us(item, gpu) for item in works), 1) for name, gpu in PLAIN.items()}
    return found


def constants() -> dict[str, Any]:
    """The figures both judges rest on."""
    found: dict[str, Any] = {}
    for name, plain in PLAIN.items():
        gpu = find_gpu(name)
        fit = fit_for(gpu.name, gpu.compute_capability)
        model = {"bandwidth_gbs": gpu.bandwidth_gbs, "tflops": dict(gpu.tflops), "l2_mib": gpu.l2_mib, "sm": gpu.sm}
        model.update(clock_mhz=gpu.clock_tensor_mhz, fitted_set=fit.name, fitted_to=fit.data)
        model["fp16_acc16_tflops"] = round(peak_rate(gpu, "fp16", accumulate_fp16=True) / 1e6, 1)
        model["constants"] = asdict(fit.constants)
        found[name] = {"model": model, "plain": {"bandwidth_gbs": plain.bandwidth, "tflops": plain.tflops}}
    return found
