"""The records of what a build decides: 8-bit regions, the search within a budget, 2:4 sparsity, builder options.

Field names are part of the contract ``trtopt.build/1``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class GuardRecord:
    """One region that could be 8-bit, and whether that pays.

    Attributes:
        region: The tensor that its nodes read. The model's own Q/DQ is one region, whose figures are those of the whole
            network without and with it, in the precision of the build.
        nodes: Their names.
        kept: Whether (some of) it is 8-bit.
        dtype: ``int8`` or ``fp8``; empty where it is 16-bit.
        reason: Why not, or which part of it; empty where all of it pays.
        before_us: Predicted microseconds of the subgraph of the network around it, with it in 16-bit; None where
            it was not judged.
        after_us: Those of the same subgraph with it in 8-bit.
        kernels: The kernels of that subgraph, before and after.
        bytes: What they move, before and after.
    """

    region: str
    nodes: tuple[str, ...]
    kept: bool
    dtype: str = ""
    reason: str = ""
    before_us: float | None = None
    after_us: float | None = None
    kernels: tuple[int, int] | None = None
    bytes: tuple[int, int] | None = None


@dataclass(frozen=True)
class WeightsRecord:
    """Weights that are stored narrow while the products compute in 16 bits or FP32.

    Attributes:
        format: ``int4``, ``int8``, ``nvfp4`` or ``mxfp8``.
        block: Weights along the sum that share a scale; 0 for a scale per output channel.
        nodes: The products that read them.
        bytes_before: What these weights take in the type of their products.
        bytes: What they take now, with their scales.
    """

    format: str
    block: int
    nodes: tuple[str, ...]
    bytes_before: int
    bytes: int


Action = Literal["start", "alternative", "16-bit", "take back", "take fewer back", "win back"]
"""What a search tries: everything that pays; another point it could start from; 16-bit everywhere; regions back in
16-bit (or in the more accurate 8-bit type); fewer of them, once the budget holds; regions in 8-bit again."""


@dataclass(frozen=True)
class SearchStep:
    """One evaluation.

    Attributes:
        action: What was tried.
        name: The point, named as in :class:`ParetoPoint`, but not numbered.
        regions: The regions it changed, against the state the search was in; empty where nothing is quantized.
        drop: The drop of accuracy; infinite where the outputs are not finite.
        error: Noise power over signal power of the least accurate output.
        within_budget: Whether the budget holds.
        within_aim: Whether what the search aims at holds as well.
        kept: Whether the search went on from here.
        disagreement: 1 - top-1 agreement of the worst output that holds scores.
        noise: Noise power over signal power of the worst of the others.
    """

    action: Action
    name: str
    regions: tuple[str, ...]
    drop: float
    error: float
    within_budget: bool
    within_aim: bool
    kept: bool
    disagreement: float = 0.0
    noise: float = 0.0


@dataclass(frozen=True)
class ParetoPoint:
    """A point that was evaluated, and than which none is both faster and more accurate; or the one that was chosen.

    Attributes:
        name: ``fp16``, ``bf16``, ``int8``, ``fp8`` (all regions that pay), or how many regions have which type.
        precision: Number of regions by type, the 16-bit one included; the nodes outside of regions are not counted.
        flop_share: By 8-bit type, its share of the flop of the layers that could be 8-bit.
        predicted_us: What the judge says of the whole network, in microseconds; infinite where it cannot be built.
        drop: The drop of accuracy.
        error: Noise power over signal power of the least accurate output.
        metric: What the drop is measured by.
        chosen: Whether it is the result.
        within_budget: Whether the budget holds.
        disagreement: As in :class:`SearchStep`.
        noise: As in :class:`SearchStep`.
        within_aim: As in :class:`SearchStep`.
    """

    name: str
    precision: dict[str, int]
    flop_share: dict[str, float]
    predicted_us: float
    drop: float
    error: float
    metric: str
    chosen: bool
    within_budget: bool
    disagreement: float = 0.0
    noise: float = 0.0
    within_aim: bool = True


@dataclass(frozen=True)
class SearchRecord:
    """A search.

    Attributes:
        budget: The largest drop allowed.
        aim: The largest drop the search took for good: the budget, less a reserve for samples that were not seen.
        metric: What the drop is measured by: a metric's name, ``top-1 agreement`` or ``cosine``.
        reached: Whether a point within the budget was found; if not, the figures are those of the closest one.
        drop: The drop at the result.
        error: Noise power over signal power of its least accurate output.
        predicted_us: What the judge says of the result.
        plain_us: What it says of 16-bit everywhere.
        evaluations: Points evaluated.
        rankings: How often the regions' errors were ranked.
        steps: The evaluations in order.
        pareto: The Pareto front, the fastest first.
        regions: Number of regions that pay in 8-bit.
        types: The result's 8-bit regions, and their type.
        reverted: Regions that are less quantized in the result than at the start.
        won_back: Regions that were taken back, and are in 8-bit again in the result.
        min_sqnr_db: The lowest SQNR of an output that is allowed; None for any.
        is_default_budget: Whether nobody gave the budget.
        stopped_early: Whether the search ended at the most evaluations it may make, or when its time was over.
        own_qdq: Whether the model's own Q/DQ is in every point: 16-bit is what the rest has then.
        resumed: Answers taken from the journal of an earlier run: evaluations, rankings and prices.
        floor_agreement: The least top-1 agreement of outputs that hold scores; None for any.
        floor_sqnr_db: The lowest SQNR of the other outputs; None for any.
        disagreement: 1 - top-1 agreement at the result.
        noise: Noise power over signal power of the worst of the other outputs there.
    """

    budget: float
    aim: float
    metric: str
    reached: bool
    drop: float
    error: float
    predicted_us: float
    plain_us: float
    evaluations: int
    rankings: int
    steps: tuple[SearchStep, ...]
    pareto: tuple[ParetoPoint, ...]
    regions: int
    types: dict[str, str]
    reverted: tuple[str, ...]
    won_back: tuple[str, ...]
    min_sqnr_db: float | None = None
    is_default_budget: bool = False
    stopped_early: bool = False
    own_qdq: bool = False
    resumed: int = 0
    floor_agreement: float | None = None
    floor_sqnr_db: float | None = None
    disagreement: float = 0.0
    noise: float = 0.0


@dataclass(frozen=True)
class PrunedLayer:
    """A Conv, Gemm or MatMul, and whether it is 2:4.

    Attributes:
        nodes: The node; all that read the weight where several share it.
        weight: The weight; empty where it cannot be 2:4.
        sparse: Whether the weight is 2:4 in the model that was made.
        reason: Why it is, or why not.
        method: Where a 2:4 weight comes from: ``was sparse``, ``magnitude`` or ``recovered``; else empty.
        kept_magnitude: The share of the dense weight's magnitude where the new one is not zero, 0..1; None if dense.
        magnitude_sqnr_db: SQNR of the layer's outputs in the pruned network with the smaller weights set to zero, on
            samples kept from the fit; None where nothing was fitted.
        sqnr_db: The same with the weights it got.
        dense_us: Predicted time of its kernels without the pattern; 0 where it is not known.
        sparse_us: The same with sparse kernels, where the backend has them and they pay.
    """

    nodes: tuple[str, ...]
    weight: str
    sparse: bool
    reason: str
    method: str = ""
    kept_magnitude: float | None = None
    magnitude_sqnr_db: float | None = None
    sqnr_db: float | None = None
    dense_us: float = 0.0
    sparse_us: float = 0.0


@dataclass(frozen=True)
class CurvePoint:
    """Some layers 2:4, and what that gains and costs.

    Attributes:
        layers: How many layers are 2:4, those included that were before.
        predicted_us: Predicted time of the whole network; None for a target that is not one GPU.
        drop: The drop of accuracy, by the metric of the budget; infinite where an output is not finite.
        chosen: Whether it is the result, before its weights were fitted anew.
    """

    layers: int
    predicted_us: float | None
    drop: float
    chosen: bool


@dataclass(frozen=True)
class SparsityBudget:
    """How layers were given back until an accuracy budget held.

    Attributes:
        largest_drop: The largest drop of accuracy allowed; half of the build's where 8-bit is to have the other half,
            and infinite where ``--min-sqnr-db`` alone bounds the accuracy.
        aim: The drop that was aimed at, less for samples that were not seen.
        drop: The drop of the layers that were chosen, before their weights were fitted anew.
        reached: Whether that is within the budget.
        given_back: Layers that would gain, and stay dense, by their first nodes.
        evaluations: Models that were measured.
        is_default: Whether nobody gave the budget.
    """

    largest_drop: float
    aim: float
    drop: float
    reached: bool
    given_back: tuple[str, ...]
    evaluations: int
    is_default: bool


@dataclass(frozen=True)
class SparsityRecord:
    """What ``--sparse`` did.

    Attributes:
        backend: Whose kernels the gain is predicted for.
        layers: Every Conv, Gemm and MatMul: those whose weights can be 2:4 first, each in the order of the graph.
        dense_us: Predicted time of the network without sparse kernels, as the performance model has it; None for a
            target that is not one GPU.
        sparse_us: The same with them, for the layers that are 2:4.
        note: How far to trust it.
        recovery: What the fit to samples did to the error at the outputs, or why there was none.
        metric: What drops are measured by; empty where none was.
        curve: Gain against accuracy, the fewest layers first.
        budget: The accuracy budget; None without one.
        sparse_kernels: Layers of the engine that run a sparse kernel, by the names of their tactics; None where the
            engine does not tell.
    """

    backend: str
    layers: tuple[PrunedLayer, ...]
    dense_us: float | None
    sparse_us: float | None
    note: str
    recovery: tuple[str, ...] = ()
    metric: str = ""
    curve: tuple[CurvePoint, ...] = ()
    budget: SparsityBudget | None = None
    sparse_kernels: tuple[str, ...] | None = None

    @property
    def pruned(self) -> int:
        """How many weights were made 2:4."""
        return sum(item.sparse and item.method != "was sparse" for item in self.layers)


@dataclass(frozen=True)
class BuilderTrial:
    """An engine that the search built, or one it knew the time of.

    Attributes:
        options: ``KEY=VALUE`` of the options that were varied; none for the engine as it was asked for.
        build_seconds: What building it took; None where the builder refused the options.
        median_us: Median time of one inference on the GPU, end to end; None where it was not built.
        spread_us: Median absolute deviation from the median.
        chosen: Whether it is the engine of the report.
        remembered: Whether the figures are those of an earlier run.
        reason: Why it was taken, or not.
    """

    options: tuple[str, ...]
    build_seconds: float | None
    median_us: float | None
    spread_us: float | None
    chosen: bool
    remembered: bool
    reason: str
