"""The figures of a sweep's jobs in words."""

from __future__ import annotations

from collections.abc import Sequence

from trtopt.report.schema.sweep import SweepRow
from trtopt.report.text.format import time_text


def axes_of(rows: Sequence[SweepRow]) -> tuple[str, ...]:
    """What tells the jobs apart: of what the matrix varies, what has more than one value."""
    axes = tuple(rows[0].varied) if rows else ()
    return tuple(axis for axis in axes if len({row.varied[axis] for row in rows}) > 1) or axes


def drop_text(row: SweepRow) -> str:
    """To four digits; no drop where accuracy rose."""
    return "" if row.result is None or row.result.drop is None else f"{max(row.result.drop, 0.0):.4f}"


def latency_text(row: SweepRow) -> str:
    """The time of one run."""
    return "" if row.result is None or row.result.latency_us is None else time_text(row.result.latency_us)


def cost_text(cost: float | None) -> str:
    """To three digits."""
    return "" if cost is None else (f"{cost:.2f}" if cost >= 100 else f"{cost:.3g}")
