"""The records of the JSON contract ``trtopt.build/1``. Field names are part of the contract.

Conventions: 1 multiply-add = 2 flop; the bytes of a layer are each input, constant and output once; GB = 1e9.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trtopt.errors import GateError
from trtopt.report.schema.analysis import EngineAnalysis
from trtopt.report.schema.decisions import BuilderTrial, GuardRecord, SearchRecord, SparsityRecord, WeightsRecord
from trtopt.report.schema.layers import LayerInfo, NodeName
from trtopt.report.schema.shipped import AccuracyCost, DynamicCost, PlainCost
from trtopt.report.schema.shown import Shown
from trtopt.report.schema.steps import Cost, RewritingRecord, StepRecord
from trtopt.support.json_text import plain
from trtopt.support.precision import Precision

SCHEMA = "trtopt.build/1"
MATRIX_SCHEMA = "trtopt.matrix/1"


@dataclass(frozen=True)
class EngineRecord:
    """The engine that was built.

    Attributes:
        kernels: How many there are; None, as all that follows from the layers, where these are not known.
        layers: Its layers; None where the runtime does not list them, or in words that trtopt does not know.
        unclaimed_nodes: ONNX nodes that no layer says it computes (folded into weights, or fused without a trace).
        activation_bytes: Bytes of activations read and written by all kernels once.
        weight_bytes: Bytes of constants read by all kernels once.
        runtime: Which runtime loads this file.
        manifest: The file with its manifest (:mod:`trtopt.report.schema.manifest`); None until both are written.
        build_seconds: What the compiler took; for an engine from the cache, what it took then, and was saved now.
        cached: Whether it was taken from the cache.
        builder_search: The engines that ``--builder search=N`` compared, in their order.
    """

    path: str | None
    sha256: str
    bytes: int
    backend: str
    backend_version: str
    compute_capabilities: tuple[str, ...]
    runtime: str
    kernels: int | None
    activation_bytes: int | None
    weight_bytes: int | None
    build_seconds: float
    layers: tuple[LayerInfo, ...] | None
    unclaimed_nodes: tuple[str, ...]
    ignored_options: tuple[str, ...] = ()
    profiles: tuple[dict[str, dict[str, list[int]]], ...] = ()
    manifest: str | None = None
    cached: bool = False
    builder_search: tuple[BuilderTrial, ...] = ()


@dataclass(frozen=True)
class CalibrationRecord:
    """How the ranges were found. ``source`` is ``user`` or ``synthetic``."""

    source: Literal["user", "synthetic"]
    method: str
    samples: int
    seconds: float
    peak_rss_bytes: int
    cached: bool = False


@dataclass(frozen=True)
class Achieved:
    """The share of one dtype in what the engine really runs (by kernels and by flop)."""

    layers: int
    flop_share: float
    time_share: float | None = None


@dataclass(frozen=True)
class KeptNode:
    """A node that stays in a wider type than asked for, and why."""

    node: str
    dtype: str
    reason: str


@dataclass(frozen=True)
class PrecisionRecord:
    """What was asked for, what the graph says, and what the engine's layers say.

    Attributes:
        int8_flop_share: Share of the flop of eligible layers (Conv, Gemm, MatMul with constant weights, not depthwise)
            that carry INT8 Q/DQ in the graph; None when INT8 was not asked for.
        achieved: By compiler dtype, from the engine's layers; empty without an engine.
    """

    requested: str
    achieved: dict[str, Achieved] = field(default_factory=dict)
    int8_flop_share: float | None = None
    kept: tuple[KeptNode, ...] = ()


@dataclass(frozen=True)
class ToleranceRecord:
    """Values of an output judged one by one (``--atol``, ``--rtol``).

    Attributes:
        atol: The largest absolute difference.
        rtol: The largest difference as a share of the reference's value.
        beyond: Values that are off by more than both, or not finite; all of a sample whose shape differs.
        values: Values that were judged: those whose reference is finite.
    """

    atol: float
    rtol: float
    beyond: int
    values: int


@dataclass(frozen=True)
class OutputAccuracy:
    """One output (or tensor) compared with the FP32 reference over all samples.

    Attributes:
        sqnr_db: 10 log10(sum ref^2 / sum (ref - out)^2), infinite when equal; nan when not finite.
        cosine: Cosine similarity over all elements.
        max_abs: Largest absolute difference.
        top1_agreement: Share of samples and positions whose argmax over the last axis agrees; None when the output is
            not class-like: floating point, [N, C] or [N, positions, C] without unit axes, C >= 2. Of a network with
            states those that are not ``ties``; its states have none.
        nonfinite: Elements that are NaN or infinite in the output but finite in the reference.
        shapes_differ: Samples in which the output has another shape than the reference, as the boxes that
            NonMaxSuppression finds may; where there is one, the measures are nan.
        tolerance: Values beyond a tolerance; None where none was given.
        ties: Of a network with states, samples and positions whose two best FP32 scores differ by less than 1 % of
            their range.
        held_against: The root mean square that the error is held against in ``sqnr_db``, where the output's own is
            smaller: 0.01 of probabilities that a Sigmoid gives; None elsewhere.
    """

    sqnr_db: float
    cosine: float
    max_abs: float
    top1_agreement: float | None
    nonfinite: int = 0
    shapes_differ: int = 0
    tolerance: ToleranceRecord | None = None
    ties: int = 0
    held_against: float | None = None


@dataclass(frozen=True)
class MetricRecord:
    """A user's metric on the FP32 reference and on the optimized model; higher is better."""

    name: str
    baseline: float
    optimized: float
    drop: float


@dataclass(frozen=True)
class FloorRecord:
    """The least that outputs keep of FP32.

    Attributes:
        agreement: The least top-1 agreement of outputs that hold scores; None for any.
        sqnr_db: The lowest SQNR of the others, in dB; None for any.
        outputs: What bounds each output: ``agreement``, ``sqnr``, or ``none`` behind a selection, where the least
            rounding makes entries change places.
    """

    agreement: float | None
    sqnr_db: float | None
    outputs: dict[str, Literal["agreement", "sqnr", "none"]]


@dataclass(frozen=True)
class AccuracyRecord:
    """The verification.

    Attributes:
        samples: Samples compared.
        source: ``eval``, ``calibration`` or ``synthetic``: where the samples came from.
        verified: ``onnx-only`` when only the graph's FP32 emulation ran, ``engine`` when the engine itself ran.
        outputs: By output name; then the tensors between the parts of a model whose end runs on the host.
        engine: Likewise with the engine's own outputs, where it can run.
        tensors: By tensor name in graph order, when intermediate tensors were asked for.
        first_bad: Of those, the one where the error enters; None when there is none, or they were not asked for.
        metric: The metric on the FP32 model and on the graph's FP32 emulation.
        host_outputs: Of ``outputs``, those the host computes from the tensors between: gates judge these instead.
        engine_metric: The metric on the FP32 model and on the engine; None where the engine did not run, and where the
            metric could not be measured on it.
        saved_metric: The metric on the FP32 model and on the saved one, as ONNX Runtime runs its file on the CPU; None
            where no model was saved, ONNX Runtime does not run it, or the metric compares with FP32.
        floor: The least that outputs have to keep; None where nothing was asked.
        notes: What the reader has to know of the samples, a sentence each: their number's own noise, samples left out.
        selections: Of ``outputs``, those behind a selection (TopK, boxes): the least rounding makes entries change
            places, so that their SQNR says little.
        ranked: By name, the tensors that those selections rank or take: in 8 bits these keep the floor for them.
    """

    samples: int
    source: str
    verified: Literal["onnx-only", "engine"]
    outputs: dict[str, OutputAccuracy]
    engine: dict[str, OutputAccuracy] | None = None
    metric: MetricRecord | None = None
    tensors: dict[str, OutputAccuracy] | None = None
    first_bad: str | None = None
    host_outputs: tuple[str, ...] = ()
    engine_metric: MetricRecord | None = None
    saved_metric: MetricRecord | None = None
    floor: FloorRecord | None = None
    notes: tuple[str, ...] = ()
    selections: tuple[str, ...] = ()
    ranked: dict[str, OutputAccuracy] = field(default_factory=dict)

    @property
    def product_metric(self) -> MetricRecord | None:
        """The metric of what was made: of the engine where it was measured there, else of the graph."""
        return self.engine_metric or self.metric

    @property
    def worst_metric(self) -> MetricRecord | None:
        """The metric of what was made, or of the saved model where that loses more: what gates judge."""
        found = [metric for metric in (self.product_metric, self.saved_metric) if metric is not None]
        return max(found, key=lambda metric: metric.drop, default=None)


@dataclass(frozen=True)
class PassedTensor:
    """A tensor between two parts of a model. ``shape``: an int, or a symbol (``"?"`` without a name) where dynamic."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class HostRecord:
    """The end of a model that the compiler refuses: a second ONNX file, to be run on the host behind the engine.

    Attributes:
        path: The file; None when nothing was written.
        reasons: What the compiler does not run, and why: one sentence per operator.
        nodes: Nodes in the file.
        inputs: Names of its inputs: the tensors between, and inputs of the model.
        outputs: Names of its outputs; the engine gives the other outputs of the model.
        between: The tensors the engine passes on.
        model_outputs: Names of the outputs of the whole model, in its order.
    """

    path: str | None
    reasons: tuple[str, ...]
    nodes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    between: tuple[PassedTensor, ...]
    model_outputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class NetworkIo:
    """An input or output of the network whose type or memory layout was asked for, or is that of its state.

    Attributes:
        name: Its name.
        kind: ``input`` or ``output``.
        dtype: ``fp32``, ``fp16``, ``bf16``, ``uint8``, ...
        layout: ``chw``, ``hwc``, ``hwc4`` or ``hwc8``.
        shape: Its logical shape, [N, C, H, W] whatever the layout.
        caller: What the caller has to do, in words.
        state: Whether it is a state, which one step hands on to the next, in the type that the network computes it in.
    """

    name: str
    kind: str
    dtype: str
    layout: str
    shape: tuple[int | str, ...]
    caller: str
    state: bool = False


@dataclass(frozen=True, repr=False)
class BuildReport(Shown):
    """Everything a build or an optimization did. ``to_json_dict`` gives the contract's JSON.

    Attributes:
        guard: The regions that could be 8-bit; the model's own Q/DQ, where it stays, is the first.
        sixteen_bit: What the model costs with all of them in 16-bit, where that was judged.
        search: How the regions that pay were chosen within an accuracy budget, where there is one.
        sparsity: What was pruned to 2:4, where that was asked for.
        weights: What was stored narrow, where ``--weights`` was given.
        saved: Whether ONNX Runtime (CPU) loads the saved model, in one line; empty where none was written.
        judge: Who says all costs: the compiler's kernels or a model of fusions.
        shipped: What the engine costs, or without one the model as the judge compiles it with the same profiles.
        plain: What the plain form costs, likewise.
        accuracy_cost: What accuracy costs beyond plain; None where it costs nothing.
        dynamic_cost: What a range of shapes costs at its optimum; None without one.
        reduce: The command that cuts the model down to the nodes with which a gate fails; empty where none failed, or
            nothing was kept for it (``--polygraphy``).
        judged_apart: How ``shipped`` differs from what was judged before, in one line; empty where it does not.
        plain_forms: What each plain form costs that was priced, the 16-bit one first; ``plain`` is the fastest of them.
        names: What the user calls the nodes: their modules, by the names of the nodes.
        parameters: Elements of the float weights of the model.
    """

    VIEW = "report.text.build:view"
    ROWS = "analysis.layers"

    model: dict[str, Any]
    gpu: dict[str, Any] | None
    steps: tuple[StepRecord, ...]
    calibration: CalibrationRecord | None
    precision: PrecisionRecord
    accuracy: AccuracyRecord | None
    judge: str
    warnings: tuple[str, ...]
    engine: EngineRecord | None
    config: dict[str, Any]
    environment: dict[str, str]
    seconds: dict[str, float]
    gate_failures: tuple[str, ...] = ()
    analysis: EngineAnalysis | None = None
    host: HostRecord | None = None
    network_io: tuple[NetworkIo, ...] = ()
    rewriting: RewritingRecord = field(default_factory=RewritingRecord)
    guard: tuple[GuardRecord, ...] = ()
    sixteen_bit: Cost | None = None
    search: SearchRecord | None = None
    sparsity: SparsityRecord | None = None
    weights: WeightsRecord | None = None
    saved: str = ""
    shipped: Cost | None = None
    plain: PlainCost | None = None
    accuracy_cost: AccuracyCost | None = None
    dynamic_cost: DynamicCost | None = None
    judged_apart: str = ""
    reduce: str = ""
    plain_forms: tuple[PlainCost, ...] = ()
    names: dict[str, NodeName] = field(default_factory=dict)
    parameters: int = 0
    schema: str = SCHEMA

    def raise_for_gate(self) -> None:
        """Raise :class:`GateError` where a gate failed, unless accuracy loss was allowed."""
        if self.gate_failures and not self.config.get("allow_accuracy_loss"):
            raise GateError(
                "A gate failed: " + "; ".join(self.gate_failures),
                where=str(self.model.get("path") or "the model"),
                remedy="allow_accuracy_loss=True turns failed gates into warnings",
            )

    def to_json_dict(self) -> dict[str, Any]:
        result = super().to_json_dict()
        found, plain_fp16 = self.analysis, self._fp16()
        baseline = None if plain_fp16 is None else plain_fp16.predicted_us
        times = ("predicted_us", "low_us", "high_us")
        prediction = (
            None
            if found is None
            else {
                **{name: getattr(found.totals, name) for name in times},
                "limit_us": None if found.limit is None else found.limit.limit_us,
                "baseline_fp16_us": baseline,
            }
        )
        pareto = None if self.search is None else result["search"]["pareto"]
        result.update(pareto=pareto, prediction=prediction)
        return result

    def _fp16(self) -> Cost | None:
        """What the model costs in FP16: the best FP16 engine; without recipes where that was asked for, if it is not
        quantized by itself."""
        if self.precision.requested != Precision.FP16 or self.sixteen_bit is not None:
            return self.sixteen_bit
        return self.plain if self.rewriting.before is None else self.rewriting.before


def layer_dicts(engine: EngineRecord) -> list[dict[str, Any]] | None:
    """The layers of an engine as plain JSON values, as in ``engine.layers`` of the report; None where not known."""
    return None if engine.layers is None else [dict(plain(dataclasses.asdict(layer))) for layer in engine.layers]


@dataclass(frozen=True)
class MatrixBuild:
    """One build.

    Attributes:
        varied: What the matrix varies, by option, as names of files have it.
        exit_code: Of the build.
        error: Why it failed: one line; empty when it did not.
        report: Its report; None where it did not come to one.
    """

    varied: dict[str, str]
    exit_code: int
    error: str = ""
    report: BuildReport | None = None


def matrix_json(builds: Sequence[MatrixBuild]) -> dict[str, Any]:
    """The builds as plain JSON values."""
    return {
        "schema": MATRIX_SCHEMA,
        "builds": [
            {
                "matrix": build.varied,
                "exit_code": build.exit_code,
                "error": build.error,
                "report": None if build.report is None else build.report.to_json_dict(),
            }
            for build in builds
        ],
    }
