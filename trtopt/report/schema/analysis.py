"""The records of the JSON contract ``trtopt.analysis/1``. Field names are part of the contract.

Conventions: 1 multiply-add = 2 flop; the bytes of a layer are each input, constant and output once; GB = 1e9; times in
microseconds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trtopt.report.schema.layers import NodeName
from trtopt.report.schema.shown import Shown

SCHEMA = "trtopt.analysis/1"

Limiter = Literal["math", "memory", "latency"]
Severity = Literal["error", "warning", "hint", "info"]
Level = Literal["onnx", "engine"]
ExcessReason = Literal[
    "launch",
    "sync",
    "copy",
    "layout",
    "fp32",
    "quantize",
    "element-wise",
    "reduction",
    "activations",
    "read-again",
    "bandwidth",
    "peak",
]
"""Why a kernel takes longer than its necessary work (:data:`trtopt.report.text.limit.REASONS` has them in words)."""

WITHOUT_KERNEL = ("sync", "copy")
"""Kinds of rows that are no kernel: waits between streams, copies between host and GPU."""


@dataclass(frozen=True)
class LayerRow:
    """A layer and its predicted time.

    Attributes:
        name: The layer's name, unique in its list.
        op: The ONNX operator that does the work, or the compiler's layer type.
        onnx_nodes: Names of the ONNX nodes it computes.
        kind: Which kernel does it: ``gemm``, ``conv``, ``depthwise``, ``attention``, ``recurrent``, ``layout`` or
            ``memory``.
        flop: Its arithmetic.
        bytes: Each input, constant and output once.
        arithmetic_intensity: Flop per byte.
        dtype: The type of the operands of its arithmetic.
        gemm: m, n, k and batch of its matrix product; None when it is bound by memory.
        tile: m and n of the output tile of one thread block; None without a product.
        tiles: Thread blocks.
        waves: Rounds of thread blocks over the GPU, rounded up.
        tile_efficiency: Share of the tiles' arithmetic that is useful.
        wave_efficiency: ``tiles / (waves * slots)``: share of the GPU's slots that have a tile.
        alignment_bytes: The largest power of two, at most 128, that divides its rows.
        limiter: What bounds its time (:func:`limiter_of`).
        math_us: Time of the arithmetic alone, as long as it would take with work for every SM all the time.
        memory_us: Time of moving the bytes alone.
        latency_us: The launch.
        predicted_us: All of it, idle SMs included.
        low_us: The least that ``predicted_us`` may stand for: 80 % of the measured kernels of its kind lay between this
            and ``high_us`` (:mod:`trtopt.roofline.intervals`). None where nothing tells, as on a CPU.
        high_us: The most.
    """

    name: str
    op: str
    onnx_nodes: tuple[str, ...]
    kind: str
    flop: int
    bytes: int
    arithmetic_intensity: float
    dtype: str
    gemm: dict[str, int] | None
    tile: dict[str, int] | None
    tiles: int
    waves: int
    tile_efficiency: float
    wave_efficiency: float
    alignment_bytes: int
    limiter: Limiter
    math_us: float
    memory_us: float
    latency_us: float
    predicted_us: float
    low_us: float | None = None
    high_us: float | None = None

    def __post_init__(self) -> None:
        # Of a report that is read back: what shows a layer relies on it.
        sized = self.gemm is None or {"m", "n", "k"} <= self.gemm.keys()
        if not sized or not (self.tile is None or {"m", "n"} <= self.tile.keys()):
            raise ValueError("a product has m, n and k, a tile m and n")


def limiter_of(math_us: float, memory_us: float, predicted_us: float) -> Limiter:
    """What bounds the time of a layer, by the times that reports show of it.

    ``latency``: neither arithmetic nor memory takes more than half of the time; the rest is the launch, idle SMs and
    joining split sums. Else whichever of the two takes longer.
    """
    if 2 * max(math_us, memory_us) <= predicted_us:
        return "latency"
    return "math" if math_us >= memory_us else "memory"


@dataclass(frozen=True)
class Finding:
    """Something that costs time, or could.

    Attributes:
        rule: The rule that found it (``trtopt explain RULE``).
        severity: ``error``, ``warning``, ``hint`` (no gain could be predicted) or ``info``.
        nodes: ONNX nodes, or layers where there are none.
        message: What is so, with the figures.
        remedy: What to change.
        gain_us: Predicted microseconds won by the remedy; 0 when none can be predicted.
        within_noise: Whether that is less than half of the range of the predicted times of the layers it is won in.
        command: The line to type; or what is needed beside trtopt (``needs retraining``). Empty where nothing is said.
    """

    rule: str
    severity: Severity
    nodes: tuple[str, ...]
    message: str
    remedy: str
    gain_us: float
    within_noise: bool = False
    command: str = ""


@dataclass(frozen=True)
class Totals:
    """Sums over layers. ``by_limiter`` and ``by_kind`` split ``predicted_us``; ``low_us`` and ``high_us`` are its range
    (:func:`range_of_sum`), None where that of a layer is not known."""

    flop: int
    bytes: int
    predicted_us: float
    by_limiter: dict[str, float]
    by_kind: dict[str, float]
    low_us: float | None = None
    high_us: float | None = None


@dataclass(frozen=True)
class Memory:
    """Device memory, in bytes.

    Attributes:
        weight_bytes: All weights, once.
        activation_bytes: The largest sum of activations alive at one time.
        peak_node: The node at which it is reached.
        device_bytes: What the GPU has.
        fits: Whether weights and activations fit.
    """

    weight_bytes: int
    activation_bytes: int
    peak_node: str
    device_bytes: int
    fits: bool


@dataclass(frozen=True)
class BatchPoint:
    """One batch size of a sweep. ``throughput`` is in samples per second; ``fits`` says whether weights and activations
    fit the GPU's memory; ``low_us`` and ``high_us`` are the range of ``predicted_us``, as in :class:`Totals`."""

    batch: int
    predicted_us: float
    throughput: float
    activation_bytes: int
    fits: bool = True
    low_us: float | None = None
    high_us: float | None = None


@dataclass(frozen=True)
class BatchSweep:
    """A batch sweep.

    Attributes:
        points: By increasing batch.
        knee: The smallest batch that reaches 90 % of the best throughput of the sweep, among those that fit.
        budget_us: The latency budget asked for; None without one.
        best_within_budget: The batch with the highest throughput within the budget; None when no batch meets it, or
            none was asked for.
    """

    points: tuple[BatchPoint, ...]
    knee: int
    budget_us: float | None = None
    best_within_budget: int | None = None


@dataclass(frozen=True)
class LevelSummary:
    """One level of the model: the ``onnx`` graph with the fusion TensorRT is known to do, or the built ``engine``.

    Attributes:
        level: Which.
        kernels: Layers with work.
        totals: Their sums.
        proxy: The GPU the engine was lowered for when the compiler cannot target the one asked for; else None.
    """

    level: Level
    kernels: int
    totals: Totals
    proxy: str | None = None


@dataclass(frozen=True)
class SparseLayer:
    """A layer whose weight could be 2:4, and what that is predicted to gain.

    Attributes:
        nodes: The Conv, Gemm or MatMul; all that read the weight where several share it.
        weight: The weight; empty where it cannot be 2:4.
        is_sparse: Whether the weight is 2:4 as it is, each four of it looked at; a quantized one by its integers.
        eligible: Whether 2:4 pays here.
        reason: Why, or why not.
        dense_us: Predicted time of the kernels of ``nodes`` as they are; 0 where it is not known.
        sparse_us: The same with sparse kernels; ``dense_us`` where it is not eligible.
    """

    nodes: tuple[str, ...]
    weight: str
    is_sparse: bool
    eligible: bool
    reason: str
    dense_us: float
    sparse_us: float


@dataclass(frozen=True)
class Sparsity:
    """What 2:4 structured sparsity is predicted to gain.

    Attributes:
        backend: ``tensorrt`` or ``tensorrt-rtx``: whose kernels are meant.
        layers: Every Conv, Gemm and MatMul: those whose weights can be 2:4 first, each in the order of the graph.
        dense_us: Predicted time of the network.
        sparse_us: The same with sparse kernels for the eligible layers.
        note: How far to trust it.
    """

    backend: str
    layers: tuple[SparseLayer, ...]
    dense_us: float
    sparse_us: float
    note: str


@dataclass(frozen=True)
class Uncosted:
    """Nodes or layers whose operator has no cost: listed, and in no sum."""

    op: str
    nodes: tuple[str, ...]


def totals_of(rows: Sequence[LayerRow]) -> Totals:
    """The sums over layers."""
    by_limiter: dict[str, float] = {}
    by_kind: dict[str, float] = {}
    for row in rows:
        by_limiter[row.limiter] = by_limiter.get(row.limiter, 0.0) + row.predicted_us
        by_kind[row.kind] = by_kind.get(row.kind, 0.0) + row.predicted_us
    found = range_of_rows(rows)
    return Totals(
        flop=sum(row.flop for row in rows),
        bytes=sum(row.bytes for row in rows),
        predicted_us=sum(row.predicted_us for row in rows),
        by_limiter=by_limiter,
        by_kind=by_kind,
        low_us=None if found is None else found[0],
        high_us=None if found is None else found[1],
    )


def range_of_rows(rows: Iterable[LayerRow]) -> tuple[float, float] | None:
    """The range of the sum of layers' predicted times (:func:`range_of_sum`); None where that of one is not known."""
    parts = []
    for row in rows:
        if row.low_us is None or row.high_us is None:
            return None
        parts.append((row.kind, row.predicted_us, row.low_us, row.high_us))
    return range_of_sum(parts)


def is_noise(gain_us: float, low_high: tuple[float, float] | None) -> bool:
    """Whether a gain is less than half of the range of the predicted time of the layers it is won in; not where no
    range is known."""
    return low_high is not None and gain_us < (low_high[1] - low_high[0]) / 2


_SEVERITIES = ("error", "warning", "hint", "info")


def rank(finding: Finding) -> tuple[bool, bool, float, int]:
    """By what findings are sorted: those with a gain, the largest first, then those whose gain is inside the noise of
    the model, then those without; of equal gains, the more severe first."""
    order = _SEVERITIES.index(finding.severity)
    return finding.gain_us <= 0, finding.within_noise, -finding.gain_us, order


def range_of_sum(parts: Iterable[tuple[str, float, float, float]]) -> tuple[float, float]:
    """The range of a sum of predicted times.

    Errors of kernels of one kind are taken as fully correlated, those of different kinds as independent: distances from
    the prediction are summed within a kind; across kinds the root of the sum of their squares counts, separately
    down and up.

    Args:
        parts: By kernel its kind, predicted_us, low_us and high_us.
    """
    total, down, up = 0.0, dict[str, float](), dict[str, float]()
    for kind, predicted, low, high in parts:
        total += predicted
        down[kind] = down.get(kind, 0.0) + predicted - low
        up[kind] = up.get(kind, 0.0) + high - predicted
    return total - math.hypot(*down.values()), total + math.hypot(*up.values())


@dataclass(frozen=True)
class Excess:
    """Equal kernels that take longer than their necessary work.

    Attributes:
        reason: What takes most of the excess.
        op: Their operator.
        dtype: The type of their arithmetic.
        kernels: How many they are.
        layers: Their names, the first eight.
        predicted_us: Their predicted time together.
        excess_us: That, less the time of their necessary work.
    """

    reason: ExcessReason
    op: str
    dtype: str
    kernels: int
    layers: tuple[str, ...]
    predicted_us: float
    excess_us: float


@dataclass(frozen=True)
class Limit:
    """How near its limit an engine is. The excesses and ``limit_us`` add up to ``predicted_us``.

    Attributes:
        limit_us: The time of the necessary work, kernel by kernel the slower of arithmetic and memory: products at the
            fitted peak of the precision they run in, constants and the network's inputs and outputs once at the fitted
            bandwidth.
        predicted_us: The predicted time of all kernels.
        products_us: The products' part alone.
        needed_bytes: The bytes of constants, inputs and outputs.
        kernels: The kernels that make the difference, equal ones together, the largest excess first.
    """

    limit_us: float
    predicted_us: float
    products_us: float
    needed_bytes: int
    kernels: tuple[Excess, ...]


@dataclass(frozen=True)
class EngineAnalysis:
    """The predicted times of a built engine's layers, at the first profile's optimum, in a captured CUDA graph."""

    gpu: str
    layers: tuple[LayerRow, ...]
    totals: Totals
    uncosted: tuple[Uncosted, ...] = ()
    limit: Limit | None = None


@dataclass(frozen=True, repr=False)
class Analysis(Shown):
    """What ``trtopt analyze`` found. ``layers`` and ``totals`` are of the engine's layers where it was compiled, else
    of the ONNX graph; ``limit`` is that of the engine, None where none was compiled. ``names`` has the modules of
    nodes, by the nodes' names; ``links`` the layers that read from others, as indices (writer, reader)."""

    VIEW = "analysis.analyze:view_of"
    ROWS = "layers"

    model: dict[str, Any]
    gpu: dict[str, Any]
    precision: str
    layers: tuple[LayerRow, ...]
    totals: Totals
    findings: tuple[Finding, ...]
    levels: tuple[LevelSummary, ...]
    memory: Memory
    uncosted: tuple[Uncosted, ...] = ()
    batch_sweep: BatchSweep | None = None
    sparsity: Sparsity | None = None
    warnings: tuple[str, ...] = ()
    limit: Limit | None = None
    names: dict[str, NodeName] = dataclasses.field(default_factory=dict)
    links: tuple[tuple[int, int], ...] = ()
    schema: str = SCHEMA
