"""The records of the search over builder options. Field names are part of the contract."""

from __future__ import annotations

from dataclasses import dataclass


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
