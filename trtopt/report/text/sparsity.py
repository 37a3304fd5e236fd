"""2:4 sparsity of a build, as a terminal shows it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trtopt.report.schema.sparsity import CurvePoint, PrunedLayer, SparsityRecord
from trtopt.report.text.analysis import shorten, time_text, visible
from trtopt.report.text.numbers import count, decibels, pairs, percent, some, table
from trtopt.report.text.search import drop_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

_NAME_WIDTH = 40
_MOST_LAYERS = 16


def section(record: SparsityRecord | None) -> list[RenderableType]:
    """What is 2:4, what it is predicted to gain, and what it costs."""
    if record is None:
        return []
    from rich.text import Text

    sparse = [item for item in record.layers if item.sparse]
    rows = [("2:4", f"{len(sparse)} of {count(len(record.layers), 'layer')}; {record.pruned} pruned now")]
    if record.dense_us is not None and record.sparse_us is not None:
        gain = record.dense_us / record.sparse_us if record.sparse_us else 1.0
        times = f"{time_text(record.dense_us)} -> {time_text(record.sparse_us)}"
        rows.append(("predicted", f"{times}, {gain:.2f} times as fast on {record.backend}"))
    rows.append(("but", record.note))
    if record.sparse_kernels is not None:
        ran = some([visible(name) for name in record.sparse_kernels], 4) or "none"
        rows.append(("sparse kernels", f"{count(len(record.sparse_kernels), 'layer')} by tactic: {ran}"))
    rows += [("fitted", line) for line in record.recovery]
    rows += _budget(record)
    body: list[RenderableType] = [pairs(rows)]
    if record.pruned:
        body += [Text(""), _layers(sparse)]
    if len(sparse) > _MOST_LAYERS:
        body.append(Text(f"and {len(sparse) - _MOST_LAYERS} more, in the JSON report"))
    if record.curve:
        body += [Text(""), _curve(record.curve, record.metric)]
    return body


def _budget(record: SparsityRecord) -> list[tuple[str, str]]:
    found = record.budget
    if found is None:
        return []
    default = ", the default of --sparse" if found.is_default else ""
    text = f"a drop of {found.largest_drop:g} ({record.metric}){default}: at {drop_text(found.drop)}"
    if math.isinf(found.largest_drop):
        text = f"the SQNR of --min-sqnr-db: at a drop of {drop_text(found.drop)} ({record.metric})"
    rows = [("budget", text)]
    if found.given_back:
        names = some([shorten(visible(name), _NAME_WIDTH) for name in found.given_back], 4)
        rows.append(("left dense for it", f"{count(len(found.given_back), 'layer')}: {names}"))
    return rows


def _layers(sparse: Sequence[PrunedLayer]) -> RenderableType:
    """The layers that are 2:4, those that gain most first."""
    ordered = sorted(sparse, key=lambda item: item.sparse_us - item.dense_us)
    rows = [
        (
            shorten(visible(item.nodes[0]), _NAME_WIDTH) + (f" +{len(item.nodes) - 1}" if item.nodes[1:] else ""),
            item.method,
            "" if item.kept_magnitude is None else percent(item.kept_magnitude),
            "" if item.magnitude_sqnr_db is None else decibels(item.magnitude_sqnr_db),
            "" if item.sqnr_db is None else decibels(item.sqnr_db),
            f"{time_text(item.dense_us)} -> {time_text(item.sparse_us)}",
        )
        for item in ordered[:_MOST_LAYERS]
    ]
    return table(("layer", "weights", "keeps of abs(w)", "SQNR", "fitted", "predicted"), rows, right=range(2, 6))


def _curve(points: Sequence[CurvePoint], metric: str) -> RenderableType:
    rows = [
        (
            "*" if point.chosen else "",
            str(point.layers),
            "" if point.predicted_us is None else time_text(point.predicted_us),
            drop_text(point.drop),
        )
        for point in points
    ]
    return table(("", "layers 2:4", "predicted", f"drop ({metric})"), rows, right=(1, 2, 3))
