"""The records of a search for the fastest precision within an accuracy budget. Field names are part of the contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    """

    action: Action
    name: str
    regions: tuple[str, ...]
    drop: float
    error: float
    within_budget: bool
    within_aim: bool
    kept: bool


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
        stopped_early: Whether the search ended at the most evaluations it may make.
        own_qdq: Whether the model's own Q/DQ is in every point: 16-bit is what the rest has then.
        resumed: Answers taken from the journal of an earlier run: evaluations, rankings and prices.
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
