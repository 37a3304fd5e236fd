"""The record of a region that could be 8-bit. Field names are part of the contract."""

from __future__ import annotations

from dataclasses import dataclass


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
        before_us: Predicted microseconds of the kernels that compute it in 16-bit; None where it was not judged.
        after_us: That, changed by what 8-bit changes around the region; not below 0.
        kernels: Their number, before and after.
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
