"""Measured layers beside their predictions: the report of a profile."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtopt.engine.achieved import is_sparse, uses_tensor_cores
from trtopt.errors import UsageError
from trtopt.graph.module_path import module_of
from trtopt.hardware.cpu import CpuSpec
from trtopt.hardware.spec import GpuSpec
from trtopt.profiling.cpu import predict_cpu
from trtopt.profiling.explain import LayerInNetwork, Network, deviations, network_of
from trtopt.profiling.findings import findings_of
from trtopt.profiling.measured import MeasuredLayer, Measurement
from trtopt.report.schema.analysis import LayerRow, range_of_rows
from trtopt.report.schema.profile import Launching, ProfileLayer, ProfileReport, ProfileTotals
from trtopt.report.schema.write import environment
from trtopt.report.text.format import count
from trtopt.roofline.layer import predict
from trtopt.roofline.peaks import peak_rate
from trtopt.roofline.work import Layer, Work
from trtopt.support.precision import Precision

_MOST_SHARE = 1.1
"""Of the peak: clocks may be above the datasheet's."""


ModuleOf = Callable[[str], str]
"""The path of the PyTorch module that an ONNX node came from, by the node's name; empty where it cannot be told."""


@dataclass(frozen=True)
class Device:
    """What a network was measured on."""

    spec: GpuSpec | CpuSpec

    def rows(self, layers: Sequence[MeasuredLayer], launching: Launching) -> list[LayerRow | None]:
        """The prediction of each layer whose work is known.

        Raises:
            UsageError: The GPU has no units for the type of a layer's arithmetic.
        """
        works = [Layer(item.info.name, item.op, item.info.onnx_nodes, item.work) for item in layers]
        if isinstance(self.spec, CpuSpec):
            return list(predict_cpu(works, self.spec))
        try:
            rows = iter(predict(works, self.spec, timing=launching)[0])
        except UsageError as error:
            remedy = "name the GPU that was measured; 'trtopt gpu list' names those known"
            raise UsageError(f"{error.what}, and the profile has layers in it", where="--gpu", remedy=remedy) from error
        return [None if layer.work is None else next(rows) for layer in layers]

    def peak_flop_per_us(self, work: Work) -> float:
        """The peak rate in the type of a layer's arithmetic."""
        if isinstance(self.spec, CpuSpec):
            return self.spec.tflops.get(work.dtype, self.spec.tflops[Precision.FP32]) * 1e6
        return peak_rate(self.spec, work.dtype, work.accumulate_fp16)

    @property
    def gpu(self) -> GpuSpec | None:
        """The GPU; None for a CPU."""
        return self.spec if isinstance(self.spec, GpuSpec) else None


def join(measurement: Measurement, device: Device, module: ModuleOf = module_of) -> ProfileReport:
    """The report of a measurement; ``module`` says which module a node came from, by default from its name alone.

    Raises:
        UsageError: The GPU has no units for the type of a layer's arithmetic: the profile is of another one.
    """
    rows = device.rows(measurement.layers, measurement.source.launching)
    source = measurement.source
    clock = _clock_share(source.conditions, device.gpu)
    network = network_of(measurement.layers, device.gpu, source.launching, clock)
    pairs = zip(measurement.layers, rows, strict=True)
    layers = tuple(_joined(layer, row, device, network, module) for layer, row in pairs)
    return ProfileReport(
        gpu=dataclasses.asdict(device.spec),
        source=measurement.source,
        layers=layers,
        totals=_totals(measurement, layers, device),
        findings=findings_of(layers, network),
        accuracy=measurement.accuracy,
        warnings=(*measurement.warnings, *_impossible(layers, device)),
        environment=environment(),
    )


def _joined(
    layer: MeasuredLayer, row: LayerRow | None, device: Device, network: Network, module: ModuleOf
) -> ProfileLayer:
    info, us, work = layer.info, layer.measured_us, layer.work
    runs = row is not None and work is not None and us > 0
    return ProfileLayer(
        name=info.name,
        type=info.type,
        onnx_nodes=info.onnx_nodes,
        modules=tuple(dict.fromkeys(path for name in info.onnx_nodes if (path := module(name)))),
        inputs=info.inputs,
        outputs=info.outputs,
        constants=info.constants,
        tactic=info.tactic,
        tensor_core=uses_tensor_cores(info.tactic),
        sparse=is_sparse(info.tactic),
        measured_us=us,
        median_us=layer.median_us,
        spread_us=layer.spread_us,
        predicted=row,
        ratio=us / row.predicted_us if row is not None and runs and row.predicted_us > 0 else None,
        math_share=work.flop / us / device.peak_flop_per_us(work) if work is not None and runs else None,
        bandwidth_share=work.bytes / us / (device.spec.bandwidth_gbs * 1e3) if work is not None and runs else None,
        deviation=deviations(LayerInNetwork(layer, row, network)),
        work=None if work is None else dataclasses.asdict(work),
    )


def _totals(measurement: Measurement, layers: Sequence[ProfileLayer], device: Device) -> ProfileTotals:
    pairs = [(layer.measured_us, layer.predicted) for layer in layers if layer.predicted is not None]
    both = [(us, row.predicted_us) for us, row in pairs if us > 0]
    total = math.fsum(layer.measured_us for layer in layers)
    end = measurement.end_to_end_us
    in_graph, graph_range = None, None
    known = range_of_rows(row for us, row in pairs if us > 0) if both else None
    ran = [layer for layer in measurement.layers if layer.measured_us > 0]
    if device.gpu is not None and all(layer.work is not None for layer in ran):
        rows = [row for row in device.rows(ran, "graph") if row is not None]
        in_graph, graph_range = math.fsum(row.predicted_us for row in rows), range_of_rows(rows)
    return ProfileTotals(
        measured_us=total,
        predicted_us=math.fsum(predicted for _, predicted in both),
        compared_us=math.fsum(us for us, _ in both),
        end_to_end_us=end,
        end_to_end_spread_us=measurement.end_to_end_spread_us,
        host_us=measurement.host_us,
        profiling_overhead_us=None if end is None else total - end,
        predicted_end_to_end_us=in_graph,
        mean_error=sum(abs(predicted / us - 1) for us, predicted in both) / len(both) if both else None,
        rank_correlation=rank_correlation([us for us, _ in both], [predicted for _, predicted in both]),
        low_us=known[0] if known else None,
        high_us=known[1] if known else None,
        predicted_end_to_end_low_us=graph_range[0] if graph_range else None,
        predicted_end_to_end_high_us=graph_range[1] if graph_range else None,
    )


def _impossible(layers: Sequence[ProfileLayer], device: Device) -> list[str]:
    """A warning where products are faster than the GPU can multiply. FP32 ones may be, by Winograd's algorithm."""
    if device.gpu is None:
        return []
    fast = [
        layer
        for layer in layers
        if layer.predicted is not None and layer.predicted.gemm is not None and layer.predicted.dtype != Precision.FP32
        if layer.math_share is not None and layer.math_share > _MOST_SHARE
    ]
    if not fast:
        return []
    share = max(layer.math_share or 0.0 for layer in fast)
    what = f"{count(len(fast), 'layer')} would reach up to {share:.1f} times the peak of {device.gpu.name}"
    return [f"{what}: is it the GPU that was measured?"]


def _clock_share(conditions: Mapping[str, Any], gpu: GpuSpec | None) -> float:
    """The recorded clock over the datasheet's, at most 1; 1 where none was recorded."""
    clock = conditions.get("sm_clock_mhz")
    if gpu is None or not isinstance(clock, (int, float)) or clock <= 0:
        return 1.0
    return min(clock / gpu.clock_tensor_mhz, 1.0)


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's of two sequences; None below three pairs, or where one side is constant.

    Raises:
        ValueError: The lengths differ.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} values against {len(b)}")
    if len(a) < 3:
        return None
    first, second = _centred_ranks(a), _centred_ranks(b)
    scale = float(np.sqrt((first @ first) * (second @ second)))
    return float(first @ second) / scale if scale else None


def _centred_ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks less their mean; equal values share their mean rank."""
    _, position, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    found: np.ndarray = ranks[position] - (len(values) + 1) / 2
    return found
