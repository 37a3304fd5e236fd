"""A search for the fastest precision within a budget, as a terminal shows it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trtopt.report.schema.search import ParetoPoint, SearchRecord, SearchStep
from trtopt.report.text.analysis import shorten, time_text, visible
from trtopt.report.text.numbers import count, decibels, pairs, percent, some, table

if TYPE_CHECKING:
    from rich.console import RenderableType

_NAME_WIDTH = 40
_MOST_STEPS = 24
ACTIONS = {
    "start": "all that pays",
    "alternative": "another start",
    "16-bit": "16-bit only",
    "take back": "taken back",
    "take fewer back": "fewer taken back",
    "win back": "won back",
}
"""What was tried, in the words of the table."""


def section(record: SearchRecord | None) -> list[RenderableType]:
    """What was asked for, what was found, and every evaluation."""
    if record is None:
        return []
    from rich.text import Text

    rows = [("budget", _budget(record)), ("result", _result(record)), ("work", _work(record))]
    if record.own_qdq:
        rows.append(("in all points", "the model's own Q/DQ"))
    for name, regions in (("taken back", record.reverted), ("won back", record.won_back)):
        if regions:
            rows.append((name, f"{count(len(regions), 'region')}: {_names(regions, 4)}"))
    body: list[RenderableType] = [pairs(rows), Text(""), _steps(record)]
    if len(record.steps) > _MOST_STEPS:
        body.append(Text(f"and {len(record.steps) - _MOST_STEPS} more, in the JSON report"))
    return body


def pareto_section(record: SearchRecord | None) -> list[RenderableType]:
    """The Pareto front, the fastest point first."""
    if record is None or not record.pareto:
        return []
    types = list(dict.fromkeys(dtype for point in record.pareto for dtype in point.flop_share))
    measures = _measures(record)
    headers = (
        *("", "point", "predicted"),
        *(f"{dtype.upper()} of the flop" for dtype in types),
        *measures,
        "budget",
    )
    rows = [
        (
            "*" if point.chosen else "",
            point.name,
            _time(point.predicted_us),
            *(percent(point.flop_share.get(dtype, 0.0)) for dtype in types),
            *(text(point) for text in measures.values()),
            "within" if point.within_budget else "missed",
        )
        for point in record.pareto
    ]
    from rich.text import Text

    numbers = range(2, 3 + len(types) + len(measures))
    return [table(headers, rows, right=numbers), Text("* chosen; no other point is both faster and more accurate")]


def miss_text(record: SearchRecord) -> str:
    """The gate's sentence where no point is within the budget."""
    mix = _mix(record)
    budget = f"{record.budget:g}"
    limit = f"the default of {budget}" if record.is_default_budget else f"the {budget} of --max-accuracy-drop"
    bound = f"is within {limit}" if record.budget < math.inf else "holds --min-sqnr-db"
    return (
        f"accuracy budget: no precision that was tried {bound}; the closest point has {_measured(record)} with {mix}"
        + (f", predicted {_time(record.predicted_us)}" if record.predicted_us < math.inf else "")
    )


def drop_text(drop: float) -> str:
    """A drop: four digits behind the point, more where it is smaller than they can say."""
    if not math.isfinite(drop):
        return "not finite"
    return f"{drop:.4f}" if drop == 0 or abs(drop) >= 5e-4 else f"{drop:.1e}"


def _measures(record: SearchRecord) -> dict[str, Callable[[SearchRecord | SearchStep | ParetoPoint], str]]:
    """What the budget bounds, as texts of a point's figures by the name of their column."""
    found: dict[str, Callable[[SearchRecord | SearchStep | ParetoPoint], str]] = {}
    if record.budget < math.inf:
        found["drop"] = lambda point: drop_text(point.drop)
    if record.min_sqnr_db is not None:
        found["SQNR"] = lambda point: sqnr_text(point.error)
    return found


def _measured(record: SearchRecord) -> str:
    """The result's figures in a sentence."""
    texts = {"drop": f"a drop of {drop_text(record.drop)} ({record.metric})", "SQNR": f"{sqnr_text(record.error)} SQNR"}
    return " and ".join(texts[name] for name in _measures(record))


def sqnr_text(error: float) -> str:
    """An error as a ratio of signal to noise."""
    if not math.isfinite(error):
        return "not finite"
    return decibels(-10 * math.log10(error) if error > 0 else math.inf)


def _budget(record: SearchRecord) -> str:
    least = "" if record.min_sqnr_db is None else f"an SQNR of {record.min_sqnr_db:g} dB"
    if record.budget == math.inf:
        return least
    default = ", the default" if record.is_default_budget else ""
    aim = f"; the search aims at {record.aim:.2g}, for samples it has not seen" if record.aim < record.budget else ""
    return f"a drop of {record.budget:g} ({record.metric}){default}{aim}" + (f"; and {least}" if least else "")


def _result(record: SearchRecord) -> str:
    plain = "with the model's own Q/DQ alone" if record.own_qdq else "in 16-bit"
    against = f" against {_time(record.plain_us)} {plain}" if record.types else ""
    held = "" if record.reached else "NOT REACHED; closest: "
    found = ", ".join(f"{name} {text(record)}" for name, text in _measures(record).items())
    return f"{held}{_mix(record)}: {found}, predicted {_time(record.predicted_us)}{against}"


def _mix(record: SearchRecord) -> str:
    """Which share of the regions is 8-bit, in words."""
    types = list(record.types.values())
    parts = [f"{types.count(dtype)} in {dtype.upper()}" for dtype in dict.fromkeys(types)]
    if not parts:
        return "no region in 8-bit but the model's own Q/DQ" if record.own_qdq else "no region in 8-bit"
    return f"{' and '.join(parts)} of {count(record.regions, 'region')}"


def _work(record: SearchRecord) -> str:
    text = f"{count(record.evaluations, 'evaluation')}, {count(record.rankings, 'ranking')}"
    if record.resumed:
        text += f"; {count(record.resumed, 'answer')} from an earlier run"
    return text + ("; stopped at the most evaluations it makes" if record.stopped_early else "")


def _steps(record: SearchRecord) -> RenderableType:
    rows = []
    measures = _measures(record)
    for number, step in enumerate(record.steps[:_MOST_STEPS], 1):
        verdict = "within" if step.within_aim else "too close" if step.within_budget else "missed"
        if step.action in ("take back", "win back") and not step.within_aim:
            verdict += ", went on" if step.kept else ", undone"
        changed = ""
        if step.regions and step.action not in ("start", "alternative"):
            changed = f"{count(len(step.regions), 'region')}: {_names(step.regions, 1)}"
        figures = [text(step) for text in measures.values()]
        rows.append((str(number), ACTIONS[step.action], step.name, changed, *figures, verdict))
    headers = ("", "tried", "point", "changed", *measures, "budget")
    return table(headers, rows, right=(0, *range(4, 4 + len(measures))))


def _names(regions: Sequence[str], most: int) -> str:
    return some([shorten(visible(name), _NAME_WIDTH) for name in regions], most)


def _time(microseconds: float) -> str:
    return time_text(microseconds) if math.isfinite(microseconds) else "unknown"
