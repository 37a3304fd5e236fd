"""What gates judge of a report, the same for every kind of report."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trtopt.engine.achieved import math_dtype
from trtopt.engine.layers import layers_of_profile
from trtopt.errors import UsageError
from trtopt.report.schema.analysis import WITHOUT_KERNEL, Analysis, LayerRow
from trtopt.report.schema.build import AccuracyRecord, BuildReport, EngineRecord, MetricRecord, OutputAccuracy
from trtopt.report.schema.check import Checked
from trtopt.report.schema.diff import DiffReport
from trtopt.report.schema.layers import LayerInfo, NodeName
from trtopt.report.schema.profile import ProfileLayer, ProfileReport, precision_of
from trtopt.report.schema.read import Report, converted
from trtopt.report.schema.sensitivity import Sensitivity
from trtopt.report.schema.sweep import SweepReport
from trtopt.report.text.words import VERIFIED
from trtopt.support.precision import EIGHT_BIT_TYPES, PRECISIONS, Precision

EIGHT_BIT = "8-bit"
"""The type of a share that is known for all 8-bit types together only."""


_WITHOUT_RANGES = tuple(item for item in PRECISIONS if not item.is_quantized)
"""Precisions for which samples say what overflows, and give no ranges."""


@dataclass(frozen=True)
class ModelInput:
    """An input of the network. ``shape``: an int, or a symbol where dynamic."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class ModelIdentity:
    """The ``model`` of a report."""

    path: str | None
    sha256: str
    inputs: tuple[ModelInput, ...]
    target: str | None = None


@dataclass(frozen=True)
class KernelFacts:
    """A kernel: of an engine, predicted, or measured.

    Attributes:
        name: Its name.
        onnx_nodes: Names of the nodes it computes.
        dtype: The type of its arithmetic.
        us: Its time, microseconds; None where it is not known.
        signature: What tells it where its nodes were numbered anew.
    """

    name: str
    onnx_nodes: tuple[str, ...]
    dtype: str
    us: float | None
    signature: Hashable


@dataclass(frozen=True)
class Facts:
    """What a report says. None: it does not say.

    Attributes:
        checked: What the report is of.
        model: The model; None for a profile.
        shapes: Input shapes the times hold for, by name, as far as they are known.
        compiler: The backend without its version; empty where nothing was compiled.
        times: Microseconds of one inference by how they came about, the most telling first.
        shares: Share of the arithmetic by type, 0..1.
        share_of: What the shares are of.
        all_shares: Whether all types have theirs; else those of 8 bits alone.
        kernels: Number of kernels.
        layers: The kernels: those whose time is predicted (of an engine of static shapes), else the engine's.
        bytes: Size of the engine.
        output_names: The model's outputs.
        outputs: Accuracy by output, against ``reference``; for outputs that the host computes, the tensors they come
            from.
        reference: What outputs were compared with: FP32, or the outputs of ``--reference``.
        metric: The metric.
        metric_ran: Whether it was measured on what was made; False where an engine ran and only its graph has a metric.
        accuracy_samples: How many samples accuracy was measured on, which, and what ran.
        own_failures: The gates of the build that failed.
        allowed: Those that ``--allow-accuracy-loss`` made warnings.
        synthetic: Whether ranges come from random data; None where there are none.
        names: The modules of its nodes.
    """

    checked: Checked
    model: ModelIdentity | None = None
    shapes: Mapping[str, tuple[int, ...]] | None = None
    compiler: str = ""
    times: Mapping[str, float] | None = None
    shares: Mapping[str, float] | None = None
    share_of: str = "flop"
    all_shares: bool = True
    kernels: int | None = None
    layers: tuple[KernelFacts, ...] = ()
    bytes: int | None = None
    output_names: tuple[str, ...] = ()
    outputs: Mapping[str, OutputAccuracy] | None = None
    reference: str = "FP32"
    metric: MetricRecord | None = None
    metric_ran: bool = True
    accuracy_samples: str = ""
    own_failures: tuple[str, ...] | None = None
    allowed: tuple[str, ...] = ()
    synthetic: bool | None = None
    names: dict[str, NodeName] = field(default_factory=dict)


def facts_of(report: Report, path: Path) -> Facts:
    """What a report says; ``path`` is its file, for messages.

    Raises:
        UsageError: Its model is no model.
    """
    if isinstance(report, ProfileReport):
        return _of_profile(report, path)
    if isinstance(report, SweepReport):
        remedy = "give the report.json of one of its jobs, which is beside the engine in the store"
        raise UsageError("A sweep is not judged as a whole", where=str(path), remedy=remedy)
    if isinstance(report, (Sensitivity, DiffReport)):
        remedy = "give the report of a build, an analysis or a profile"
        raise UsageError("A report of this kind has no gates", where=f"{path}, {report.schema}", remedy=remedy)
    model = converted(dict(report.model), ModelIdentity, path)
    return _of_build(report, model, path) if isinstance(report, BuildReport) else _of_analysis(report, model, path)


def _of_build(report: BuildReport, model: ModelIdentity, path: Path) -> Facts:
    engine, accuracy, precision, found = report.engine, report.accuracy, report.precision, report.analysis
    compiler = "" if engine is None else f"{engine.backend} {engine.backend_version}"
    shares = {name: share.flop_share for name, share in precision.achieved.items()} or None
    share_of = "flop"
    if shares is not None and not any(shares.values()):
        shares = {name: share.time_share or 0.0 for name, share in precision.achieved.items()}
        share_of = "predicted time"
    if engine is None and precision.int8_flop_share is not None:
        known = precision.requested if precision.requested in EIGHT_BIT_TYPES else EIGHT_BIT
        shares, share_of = {known: precision.int8_flop_share}, "flop in the graph"
    allowed = report.config.get("allow_accuracy_loss") is True
    layers: tuple[KernelFacts, ...] = ()
    if found is not None:
        layers = _kernels(found.layers)
    elif engine is not None and engine.layers is not None:
        layers = tuple(_compiled(layer) for layer in layers_of_profile(engine.layers) if layer.is_kernel)
    return Facts(
        _checked(path, report.schema, model, _name(report.gpu), compiler, precision.requested),
        model,
        None if engine is None else _optimum(engine),
        "" if engine is None else engine.backend,
        times=None if found is None else {"predicted": found.totals.predicted_us},
        shares=shares,
        share_of=share_of,
        all_shares=engine is not None,
        kernels=None if engine is None else engine.kernels,
        layers=layers,
        bytes=None if engine is None else engine.bytes,
        output_names=_outputs(report),
        outputs=None if accuracy is None else _judged(accuracy),
        reference="FP32" if report.config.get("reference") is None else "the recorded outputs",
        metric=None if accuracy is None else accuracy.worst_metric,
        metric_ran=accuracy is not None and (accuracy.engine is None or accuracy.engine_metric is not None),
        accuracy_samples=""
        if accuracy is None
        else f"{accuracy.samples} samples ({accuracy.source}, {VERIFIED[accuracy.verified]})",
        own_failures=() if allowed else report.gate_failures,
        allowed=report.gate_failures if allowed else (),
        synthetic=None
        if report.calibration is None or precision.requested in _WITHOUT_RANGES
        else report.calibration.source == "synthetic",
        names=report.names,
    )


def _of_analysis(report: Analysis, model: ModelIdentity, path: Path) -> Facts:
    shapes, kernels = report.model.get("input_shapes"), _kernels(report.layers)
    return Facts(
        _checked(path, report.schema, model, _name(report.gpu), "", report.precision),
        model,
        converted(shapes, dict[str, tuple[int, ...]], path) if shapes else None,
        times={"predicted": report.totals.predicted_us},
        shares=_shares([(row.dtype, float(row.flop)) for row in report.layers]),
        kernels=len(kernels),
        layers=kernels,
        names=report.names,
    )


def _of_profile(report: ProfileReport, path: Path) -> Facts:
    source, totals = report.source, report.totals
    kernels = tuple(_measured(layer) for layer in report.layers if layer.measured_us > 0)
    inference = {} if totals.end_to_end_us is None else {"measured, one inference": totals.end_to_end_us}
    name = source.files.get("model") or source.files.get("engine") or source.files.get("layer-info") or ""
    return Facts(
        Checked(str(path), report.schema, name, "", _name(report.gpu), f"{source.origin} {source.version}".strip(), ""),
        compiler=source.origin,
        times={**inference, "measured, sum of the layers": totals.measured_us},
        shares=_shares([(kernel.dtype, kernel.us or 0.0) for kernel in kernels]),
        share_of="measured time",
        kernels=len(kernels),
        layers=kernels,
        output_names=tuple(report.accuracy or ()),
        outputs=report.accuracy,
    )


def _checked(path: Path, schema: str, model: ModelIdentity, gpu: str, compiler: str, precision: str) -> Checked:
    return Checked(str(path), schema, model.path or model.target or "", model.sha256, gpu, compiler, precision)


def _name(gpu: Mapping[str, object] | None) -> str:
    return str((gpu or {}).get("name", ""))


def _optimum(engine: EngineRecord) -> dict[str, tuple[int, ...]] | None:
    if not engine.profiles:
        return None
    return {name: tuple(shapes.get("opt", ())) for name, shapes in engine.profiles[0].items()}


def _outputs(report: BuildReport) -> tuple[str, ...]:
    """The model's outputs: those that were compared, without the tensors between engine and host."""
    between = () if report.host is None else tuple(item.name for item in report.host.between)
    return () if report.accuracy is None else tuple(name for name in report.accuracy.outputs if name not in between)


def _judged(accuracy: AccuracyRecord) -> dict[str, OutputAccuracy]:
    """The engine's own outputs where it ran. Where boxes are chosen on the host, the tensors they are chosen from."""
    found = accuracy.engine or accuracy.outputs
    return {name: item for name, item in found.items() if name not in accuracy.host_outputs}


def _shares(parts: Sequence[tuple[str, float]]) -> dict[str, float] | None:
    """Shares by type; None where there is nothing to share. TF32 counts as FP32, as in the report of a build."""
    total = sum(amount for _, amount in parts)
    if not total > 0:
        return None
    found: dict[str, float] = {}
    for dtype, amount in parts:
        name = Precision.FP32 if dtype == Precision.TF32 else dtype
        found[name] = found.get(name, 0.0) + amount / total
    return found


def _kernels(rows: Sequence[LayerRow]) -> tuple[KernelFacts, ...]:
    """The rows that are kernels: waits between streams and copies to the host are not."""
    return tuple(_predicted(row) for row in rows if row.kind not in WITHOUT_KERNEL)


def _predicted(row: LayerRow) -> KernelFacts:
    signature = (row.kind, row.flop) if row.flop else (row.op, row.bytes)
    return KernelFacts(row.name, row.onnx_nodes, row.dtype, row.predicted_us, signature)


def _compiled(layer: LayerInfo) -> KernelFacts:
    shapes = tuple(tensor.shape for tensor in layer.outputs)
    return KernelFacts(layer.name, layer.onnx_nodes, math_dtype(layer), None, (layer.type, shapes))


def _measured(layer: ProfileLayer) -> KernelFacts:
    shapes = tuple(tensor.shape for tensor in layer.outputs)
    return KernelFacts(layer.name, layer.onnx_nodes, precision_of(layer), layer.measured_us, (layer.type, shapes))
