"""What the steps of a build did, and what a graph costs: records of ``trtopt.build/1``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """A change that was possible and not made."""

    node: str
    reason: str


@dataclass(frozen=True)
class Cost:
    """What a graph costs as an engine.

    Attributes:
        kernels: Kernels launched, stream syncs apart.
        syncs: Waits of one stream for another, and the signals for them.
        bytes: Activations and constants that all kernels read and write once.
        predicted_us: Predicted microseconds on the target's GPU.
    """

    kernels: int
    syncs: int
    bytes: int
    predicted_us: float


@dataclass(frozen=True)
class RegionRecord:
    """Places of equal structure that a recipe was judged at.

    Attributes:
        nodes: The places by their first node.
        choice: Which of several ways was taken, or came closest; empty where there is one.
        kept: Whether it was rewritten.
        reason: Why not; empty when kept.
        before: The cost of the subgraph of the network around one place; None where it could not be judged.
        after: That of the same subgraph, rewritten.
    """

    nodes: tuple[str, ...]
    choice: str
    kept: bool
    reason: str = ""
    before: Cost | None = None
    after: Cost | None = None


@dataclass(frozen=True)
class RewritingRecord:
    """What the whole model costs at the shapes it is judged at, without recipes and with them; None where nobody could
    say."""

    before: Cost | None = None
    after: Cost | None = None


@dataclass(frozen=True)
class StepRecord:
    """One step of the pipeline: how many changes it made, what it refused, how long it took."""

    name: str
    stage: str
    changes: int
    seconds: float
    refusals: tuple[Refusal, ...] = ()
    details: tuple[str, ...] = ()
    regions: tuple[RegionRecord, ...] = ()
