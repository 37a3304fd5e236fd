"""Which regions are 8-bit and what that wins, as a terminal shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtopt.report.schema.build import BuildReport
from trtopt.report.schema.guard import GuardRecord
from trtopt.report.text.analysis import time_text
from trtopt.report.text.numbers import bytes_text, count, pairs, some, table

if TYPE_CHECKING:
    from rich.console import RenderableType

_MOST_ROWS = 12
_NO_PAY = "it does not pay"


def section(report: BuildReport) -> list[RenderableType]:
    """How many regions pay, and each kind of region with its verdict; equal ones in one row."""
    if not report.guard:
        return []
    from rich.text import Text

    kept = sum(record.kept for record in report.guard)
    rows = [("8-bit", f"{kept} of {count(len(report.guard), 'region')}")]
    plain = report.sixteen_bit
    if plain is not None:
        whole = f"{count(plain.kernels, 'kernel')}, {bytes_text(plain.bytes)}, {time_text(plain.predicted_us)}"
        rows.append(("in 16-bit", f"{whole} predicted"))
    groups = _grouped(report.guard)
    cells = [(_verdict(items[0]), some(items[0].nodes, 1), str(len(items)), _change(items[0])) for items in groups]
    body: list[RenderableType] = [
        pairs(rows),
        table(("type", "such as", "times", "predicted, kernels, bytes"), cells[:_MOST_ROWS]),
    ]
    if len(cells) > _MOST_ROWS:
        body.append(Text(f"and {len(cells) - _MOST_ROWS} more, in the JSON report"))
    return body


def _grouped(records: tuple[GuardRecord, ...]) -> list[list[GuardRecord]]:
    """Records of equal verdict and cost together, those that win most first."""
    groups: dict[tuple[object, ...], list[GuardRecord]] = {}
    for record in records:
        reason = _NO_PAY if record.reason.startswith(_NO_PAY) else record.reason
        key = (record.dtype, reason, record.before_us, record.after_us, record.kernels)
        groups.setdefault(key, []).append(record)
    return sorted(groups.values(), key=lambda items: (not items[0].kept, -_saved(items)))


def _saved(items: list[GuardRecord]) -> float:
    first = items[0]
    return len(items) * (first.before_us - first.after_us) if first.before_us and first.after_us else 0.0


def _verdict(record: GuardRecord) -> str:
    return record.dtype.upper() if record.kept else "16-bit"


def _change(record: GuardRecord) -> str:
    """What 8-bit changes or would change; else the reason."""
    parts = []
    if record.before_us is not None and record.after_us is not None:
        parts.append(f"{time_text(record.before_us)} -> {time_text(record.after_us)}")
    if record.kernels is not None and record.bytes is not None:
        parts.append(f"{record.kernels[0]} -> {record.kernels[1]}")
        parts.append(f"{bytes_text(record.bytes[0])} -> {bytes_text(record.bytes[1])}")
    if not record.reason or record.reason.startswith(_NO_PAY):
        return ", ".join(parts)
    return "; ".join([record.reason, ", ".join(parts)] if parts else [record.reason])
