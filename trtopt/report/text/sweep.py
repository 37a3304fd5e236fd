"""A sweep's plan, report and answers as a terminal shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trtopt.report.files import sweep_forms as forms
from trtopt.report.schema.sweep import SweepReport, SweepRow
from trtopt.report.text.analysis import visible
from trtopt.report.text.numbers import bytes_text, table

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

_MOST_OTHERS = 12


def render(report: SweepReport) -> Group:
    """The report: every job, what the figures mean, what failed."""
    from rich.console import Group
    from rich.text import Text

    rows = forms.sweep_rows(report)
    parts: list[RenderableType] = [Text(forms.headline(report)), Text(), table(rows.head, rows.cells, right=rows.right)]
    parts += [Text(), *(Text(line) for line in forms.notes(report))]
    for job, why in forms.failures(report):
        parts.append(Text(f"failed: {job}: {why}"))
    parts.append(Text(f"results: {visible(report.store)}"))
    return Group(*parts)


def render_choices(report: SweepReport, choices: Sequence[forms.Choice]) -> Group:
    """For each model what to take, and why nothing else."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for choice in choices:
        if parts:
            parts.append(Text())
        parts.append(Text(_answer(report, choice)))
        shown = choice.others[:_MOST_OTHERS]
        rows = [(_job(row), why) for row, why in shown]
        if rows:
            parts.append(table(("instead of" if choice.best else "not within", ""), rows))
        if len(choice.others) > len(shown):
            parts.append(Text(f"and {len(choice.others) - len(shown)} more; the JSON has all"))
    return Group(*parts)


def _answer(report: SweepReport, choice: forms.Choice) -> str:
    best, name = choice.best, visible(choice.model)
    if best is None:
        none = f"{name}: no engine of the sweep is within the limits"
        near = choice.nearest
        return none if near is None else f"{none}\n  nearest: {_job(near)}: {_figures(report, near)}"
    how = {"cost": "the cheapest", "latency": "the fastest an inference"}[choice.by] + " within the limits"
    if choice.by == "latency" and report.prices:
        how += "; not all of them have a price"
    lines = f"{name}: {_job(best)} ({how})", _figures(report, best), visible(best.engine)
    return "\n  ".join(lines)


def _figures(report: SweepReport, row: SweepRow) -> str:
    figures = [f"accuracy drop {forms.drop_text(row) or 'not known'}"]
    if row.result is not None:
        figures.insert(0, f"{forms.latency_text(row)} {row.result.latency}")
        figures.append(bytes_text(row.result.engine_bytes))
    if row.cost is not None:
        figures.append(f"{forms.cost_text(row.cost)} {visible(report.currency)} per million inferences")
    return ", ".join(figures)


def _job(row: SweepRow) -> str:
    varied = {"gpu": row.gpu, "precision": row.precision} | row.varied
    return ", ".join(visible(f"{axis} {value}") for axis, value in varied.items() if axis != "model")
