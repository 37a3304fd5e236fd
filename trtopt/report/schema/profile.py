"""The records of ``trtopt.profile/1`` and ``trtopt.comparison/1``. Field names are part of the contract.

Conventions: those of ``trtopt.analysis/1``; measured times are microseconds of one inference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trtopt.report.schema.analysis import Finding, LayerRow
from trtopt.report.schema.build import OutputAccuracy
from trtopt.report.schema.layers import NodeName, TensorInfo
from trtopt.report.schema.shown import Shown
from trtopt.support.precision import TENSORRT_TYPES

SCHEMA = "trtopt.profile/1"

Origin = Literal["trtexec", "tensorrt", "tensorrt-rtx", "onnxruntime", "prediction"]
Launching = Literal["graph", "profile", "single run"]

Reason = Literal[
    "no-tensor-core",
    "reformat-copy",
    "unfused-qdq",
    "misaligned-channels",
    "padded-input",
    "tail-wave",
    "launch-bound",
    "wide-tensors",
    "low-clock",
    "slower-than-predicted",
    "faster-than-predicted",
]
"""Why a layer takes longer than it could (see ``trtopt explain``)."""


@dataclass(frozen=True)
class Deviation:
    """One reason why a layer takes longer than it could.

    Attributes:
        reason: Which.
        us: Measured microseconds it is estimated to account for; 0 where nothing can be said.
        message: What is so, with the figures.
        remedy: What to change.
    """

    reason: Reason
    us: float
    message: str
    remedy: str = ""


@dataclass(frozen=True)
class ProfileLayer:
    """A layer of an engine (or a node of a graph) with its measured and its predicted time.

    In the JSON the fields of ``predicted`` stand beside the others, all null where there is no prediction.

    Attributes:
        name: The layer's name, as the profile has it; unique in its list (``NAME #2`` for a second one of that name).
        type: The compiler's layer type, or the ONNX operator.
        onnx_nodes: Names of the ONNX nodes it computes.
        modules: Paths of the PyTorch modules these came from (``layer1.0.conv1``), as far as they can be told.
        inputs: Tensors read.
        outputs: Tensors written.
        constants: Weights and other constants read.
        tactic: The kernel's name; empty where the engine does not tell.
        tensor_core: Whether the kernel uses Tensor Cores, from its name; None where it cannot be told.
        sparse: Whether it is a 2:4 kernel, from its name; None where it cannot be told.
        measured_us: Mean time of one inference; 0 for what runs nothing.
        median_us: Its median; None where only the mean is known.
        spread_us: Median absolute deviation of the runs; None where the runs are not known.
        predicted: The prediction, for this way of timing; None where the work of the layer is not known.
        ratio: Measured over predicted; None without both.
        math_share: Achieved share of the device's peak arithmetic in the layer's type; None without a prediction.
        bandwidth_share: Achieved share of its memory bandwidth; above 1 for what stays in a cache.
        deviation: Why it takes longer than it could, the most time first.
        work: What it has to do, the fields of :class:`trtopt.roofline.work.Work`; None where that is not known.
    """

    name: str
    type: str
    onnx_nodes: tuple[str, ...]
    modules: tuple[str, ...]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    constants: tuple[TensorInfo, ...]
    tactic: str
    tensor_core: bool | None
    sparse: bool | None
    measured_us: float
    median_us: float | None = None
    spread_us: float | None = None
    predicted: LayerRow | None = None
    ratio: float | None = None
    math_share: float | None = None
    bandwidth_share: float | None = None
    deviation: tuple[Deviation, ...] = ()
    work: Mapping[str, Any] | None = None

    @property
    def predicted_us(self) -> float | None:
        """The predicted time."""
        return None if self.predicted is None else self.predicted.predicted_us


@dataclass(frozen=True)
class ProfileTotals:
    """Sums over the layers, and what one inference took.

    Attributes:
        measured_us: Sum of the measured times of all layers.
        predicted_us: Sum of the predictions.
        low_us, high_us: Its range, as in :class:`~trtopt.report.schema.analysis.Totals`.
        compared_us: Sum of the measured times of the layers that have a prediction.
        end_to_end_us: Median time of one inference without profiling, on the device; None where it is not known.
        end_to_end_spread_us: Median absolute deviation of that.
        host_us: Median time on the host to enqueue one inference; None where it is not known.
        profiling_overhead_us: ``measured_us - end_to_end_us``: what timing each layer by itself adds.
        predicted_end_to_end_us: Prediction of one inference in a captured CUDA graph; None for a CPU, and where a layer
            that ran has no prediction.
        predicted_end_to_end_low_us, predicted_end_to_end_high_us: Its range.
        mean_error: Mean of |predicted / measured - 1| over the layers with both.
        rank_correlation: Spearman's, of predicted and measured times; None below three layers.
    """

    measured_us: float
    predicted_us: float
    compared_us: float
    end_to_end_us: float | None = None
    end_to_end_spread_us: float | None = None
    host_us: float | None = None
    profiling_overhead_us: float | None = None
    predicted_end_to_end_us: float | None = None
    mean_error: float | None = None
    rank_correlation: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    predicted_end_to_end_low_us: float | None = None
    predicted_end_to_end_high_us: float | None = None


@dataclass(frozen=True)
class ProfileSource:
    """Where the measurement comes from.

    Attributes:
        origin: Who measured.
        files: The files read, by what they are (``layer-info``, ``layer-profile``, ``times``, ``engine``, ``model``).
        version: Version of what ran the network; empty where it is not known.
        runs: Inferences behind each layer's time; None where it is not known.
        launching: How the layers were launched and timed.
        conditions: What else was recorded of the machine during the run: clocks, temperature, threads.
    """

    origin: Origin
    files: Mapping[str, str]
    version: str
    runs: int | None
    launching: Launching
    conditions: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class ProfileReport(Shown):
    """A measured network: every layer beside its prediction.

    Attributes:
        gpu: The device: the fields of ``GpuSpec``, or of :class:`~trtopt.hardware.cpu.CpuSpec` for a CPU.
        source: Where the measurement comes from.
        layers: In the order they run; none is left out.
        totals: Sums.
        findings: What costs time, by what could be won.
        accuracy: By output, the engine's outputs against the FP32 reference in the same run; None where it did not run.
        warnings: What the reader should know.
        environment: Versions and machine.
    """

    VIEW = "report.text.profile:view"
    ROWS = "layers"

    gpu: Mapping[str, Any]
    source: ProfileSource
    layers: tuple[ProfileLayer, ...]
    totals: ProfileTotals
    findings: tuple[Finding, ...]
    accuracy: Mapping[str, OutputAccuracy] | None = None
    warnings: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    schema: str = SCHEMA

    def to_json_dict(self) -> dict[str, Any]:
        """Plain JSON values, the prediction's fields beside the measured ones."""
        found = super().to_json_dict()
        layers = [_flat(layer) for layer in found.pop("layers")]
        return {**found, "layers": layers}


_ROW = tuple(item.name for item in dataclasses.fields(LayerRow))
_SHARED = ("name", "onnx_nodes")
"""Fields that a layer and its prediction both have; the layer's stand."""


def _flat(layer: Mapping[str, Any]) -> dict[str, Any]:
    row = layer["predicted"] or dict.fromkeys(_ROW)
    own = {key: value for key, value in layer.items() if key != "predicted"}
    return {**{key: row[key] for key in _ROW if key not in _SHARED}, **own}


def nested(layer: Mapping[str, Any]) -> dict[str, Any]:
    """A layer of the JSON with the prediction's fields under ``predicted``: the inverse of how it is written."""
    own = {key: value for key, value in layer.items() if key not in _ROW or key in _SHARED}
    known = layer.get("predicted_us") is not None
    return {**own, "predicted": {key: layer.get(key) for key in _ROW} if known else None}


def precision_of(layer: ProfileLayer) -> str:
    """The type of a layer's arithmetic where it is a product, else of what it writes; empty where neither is told."""
    row = layer.predicted
    if row is not None and row.gemm is not None:
        return row.dtype
    dtypes = [TENSORRT_TYPES.get(tensor.dtype, tensor.dtype.lower()) for tensor in layer.outputs if tensor.dtype]
    return dtypes[0] if dtypes else "" if row is None else row.dtype


def slowest(layers: Sequence[ProfileLayer]) -> list[ProfileLayer]:
    """The layers, the most measured time first."""
    return sorted(layers, key=lambda layer: -layer.measured_us)


COMPARISON_SCHEMA = "trtopt.comparison/1"

Change = Literal["same", "fused", "split", "regrouped", "appeared", "vanished"]
"""What became of the layers that hold some nodes: as many as before; fewer; more; as many of other nodes; none before;
none after."""

Alignment = Literal["nodes", "name", "shape", "none"]
"""By what layers of both sides were found to belong together."""


@dataclass(frozen=True)
class Side:
    """The layers of one profile that hold some nodes.

    Attributes:
        layers: Their names.
        precisions: The types of their arithmetic, each once.
        tactics: Their kernels' names, where they are told.
        measured_us: Their time.
    """

    layers: tuple[str, ...]
    precisions: tuple[str, ...]
    tactics: tuple[str, ...]
    measured_us: float


@dataclass(frozen=True)
class ComparedRegion:
    """The layers of both profiles that hold the same nodes, and share none with others.

    Attributes:
        nodes: The ONNX nodes; the layers' names where they hold none.
        before: Of the profile compared against.
        after: Of the other.
        change: What became of the layers.
        gain_us: ``before.measured_us - after.measured_us``: above 0 where it became faster.
        aligned: By what they were found to belong together.
    """

    nodes: tuple[str, ...]
    before: Side
    after: Side
    change: Change
    gain_us: float
    aligned: Alignment

    @property
    def changed_precision(self) -> bool:
        """Whether the arithmetic has other types."""
        return self.before.precisions != self.after.precisions and bool(self.before.layers and self.after.layers)


@dataclass(frozen=True)
class Profiled:
    """What was profiled on one side.

    Attributes:
        report: The report's file.
        device: The GPU or the CPU.
        origin: Who measured, and with which version.
        layers: How many take time.
        measured_us: Sum of the layers.
        end_to_end_us: One inference; None where it is not known.
    """

    report: str
    device: str
    origin: str
    layers: int
    measured_us: float
    end_to_end_us: float | None


@dataclass(frozen=True)
class Figure:
    """A figure of the whole that differs, as text: its name, before and after."""

    name: str
    before: str
    after: str


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """Two reports of one kind, of one network. Times are measured in profiles, predicted in others.

    Attributes:
        before: The one compared against.
        after: The other.
        regions: What became of the layers, the largest difference of time first; none of sweeps and sensitivity.
        warnings: What limits the comparison: other devices, other ways of timing, layers without nodes.
        of: ``builds``, ``analyses``, ``profiles``, ``sweeps`` or ``sensitivity reports``.
        figures: What else differs; of a sweep its jobs, of sensitivity its regions.
        names: The modules of the nodes, by the nodes' names.
    """

    VIEW = "report.text.profile:comparison_view"
    ROWS = "regions"

    before: Profiled
    after: Profiled
    regions: tuple[ComparedRegion, ...]
    warnings: tuple[str, ...] = ()
    of: str = "profiles"
    figures: tuple[Figure, ...] = ()
    names: Mapping[str, NodeName] = field(default_factory=dict)
    schema: str = COMPARISON_SCHEMA
