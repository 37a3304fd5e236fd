"""What the recipes won, as a terminal shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtopt.report.schema.build import BuildReport
from trtopt.report.schema.steps import Cost, RegionRecord
from trtopt.report.text.analysis import time_text
from trtopt.report.text.numbers import bytes_text, count, pairs, some, table

if TYPE_CHECKING:
    from rich.console import RenderableType


def section(report: BuildReport) -> list[RenderableType]:
    """The whole network without and with recipes, and each judged place that was rewritten; refusals stand elsewhere.

    Kernels, bytes and time are those of one place.
    """
    rows = [
        (
            step.name + (f" ({region.choice})" if region.choice else ""),
            some(region.nodes, 1),
            *_change(region.before, region.after),
        )
        for step in report.steps
        for region in _grouped(step.regions)
        if region.kept
    ]
    body: list[RenderableType] = []
    before, after = report.rewriting.before, report.rewriting.after
    if before is not None and after is not None:
        body.append(pairs([("without recipes", _whole(before)), ("with recipes", _whole(after))]))
    if rows:
        body.append(table(("recipe", "where", "kernels", "bytes", "predicted"), rows, right=(2, 3, 4)))
    return body


def _grouped(regions: tuple[RegionRecord, ...]) -> list[RegionRecord]:
    """Regions of equal cost and choice as one."""
    groups: dict[tuple[object, ...], RegionRecord] = {}
    for region in regions:
        key = (region.choice, region.kept, region.reason, region.before, region.after)
        known = groups.get(key)
        nodes = region.nodes if known is None else known.nodes + region.nodes
        groups[key] = RegionRecord(nodes, region.choice, region.kept, region.reason, region.before, region.after)
    return list(groups.values())


def _whole(cost: Cost) -> str:
    syncs = f" and {count(cost.syncs, 'stream sync')}" if cost.syncs else ""
    return f"{count(cost.kernels, 'kernel')}{syncs}, {bytes_text(cost.bytes)}, {time_text(cost.predicted_us)} predicted"


def _change(before: Cost | None, after: Cost | None) -> tuple[str, str, str]:
    if before is None or after is None:
        return "", "", ""
    return (
        f"{before.kernels} -> {after.kernels}",
        f"{bytes_text(before.bytes)} -> {bytes_text(after.bytes)}",
        f"{time_text(before.predicted_us)} -> {time_text(after.predicted_us)}",
    )
