"""A sweep, as it is shown: its jobs, and the answer to "which GPU and precision"."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trtopt.config.budget import DEFAULT_ACCURACY_DROP, AccuracyBudget
from trtopt.report.html import plots
from trtopt.report.schema.sweep import SweepReport, SweepRow
from trtopt.report.text.blocks import (
    Block,
    Cell,
    Column,
    Figures,
    Inline,
    Note,
    Plot,
    Section,
    Table,
    View,
    bullets,
    line,
    numbers,
    pairs,
    table,
)
from trtopt.report.text.format import bytes_text, count, from_here, percent, seconds_text, shorten, time_text, visible
from trtopt.report.text.words import VERIFIED, rests_on
from trtopt.support.json_text import plain

_LARGE_RISE = 0.05
_MOST_DIGITS = 17
_MOST_OTHERS = 12
_MOST_PLOTS = 30
_LAST = 1e30
"""What is not known stands at one end of a sorted column."""


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


def headline(report: SweepReport) -> str:
    """How many jobs there were, and what became of them."""
    words = {"done": "built", "cached": "found in the store", "gate": "with a failed gate", "failed": "failed"}
    counts = {word: sum(row.status == status for row in report.rows) for status, word in words.items()}
    parts = ", ".join(f"{number} {word}" for word, number in counts.items() if number)
    return f"{visible(report.name)}: {count(len(report.rows), 'job')}, {parts}, in {seconds_text(report.seconds)}"


def state_text(row: SweepRow) -> str:
    """What became of a job, on one line."""
    if row.failure is not None:
        return f"exit code {row.failure.exit_code}: {visible(row.failure.what.partition(chr(10))[0])}"
    if row.status == "gate" and row.result is not None:
        return visible("; ".join(row.result.failures))
    return "built" if row.status == "done" else "from the store"


def _table(report: SweepReport) -> Table:
    """A row for each job; a star marks the Pareto front of its model."""
    axes = axes_of(report.rows)
    priced = any(row.cost is not None for row in report.rows)
    columns = (
        *(Column(visible(axis)) for axis in axes),
        *numbers("drop", "latency", "size"),
        *numbers("kernels", "batch", on="page"),
        *(numbers(f"{visible(report.currency)}/million") if priced else []),
        *(Column("front"), Column("", "text")),
    )
    rows = tuple(_cells(row, axes, priced) for row in report.rows)
    return Table(columns, rows, sorted_by=len(columns), style="jobs")


def _cells(row: SweepRow, axes: Sequence[str], priced: bool) -> tuple[Inline, ...]:
    found = row.result
    cells: list[Inline] = [visible(row.varied[axis]) for axis in axes]
    if found is None:
        cells += [Cell("", _LAST)] * 5
    else:
        size = found.engine_bytes if row.engine else None
        cells += [
            Cell(drop_text(row), _LAST if found.drop is None else found.drop),
            Cell(latency_text(row), found.latency_us or _LAST),
            Cell("" if size is None else bytes_text(size), _LAST if size is None else size),
            Cell(str(found.kernels), found.kernels),
            Cell(str(found.batch), found.batch),
        ]
    if priced:
        cells.append(Cell(cost_text(row.cost), _LAST if row.cost is None else row.cost))
    state = state_text(row) if row.failure is None else f"failed, exit code {row.failure.exit_code}"
    return (*cells, Cell("*" if row.on_front else "", mark="front" if row.on_front else ""), state)


def notes(report: SweepReport) -> list[str]:
    """What the figures mean, and warnings."""
    results = [row.result for row in report.rows if row.result is not None]
    kinds = sorted({found.latency for found in results if found.latency_us})
    measures = sorted({found.measure for found in results if found.measure})
    lines = [f"latency: {' and '.join(kinds)}, of one run at the optimal shapes"] if kinds else []
    if measures:
        known = sorted({found.verified for found in results if found.verified})
        where = f", verified {' and '.join(VERIFIED.get(each, visible(each)) for each in known)}" if known else ""
        lines.append(f"drop: of {', '.join(map(visible, measures))}, against FP32{where}")
    rise = max((-found.drop for found in results if found.drop), default=0.0)
    if rise > _LARGE_RISE:
        lines.append(f"accuracy rose by up to {rise:.3g}: more must be better; negate a metric of which less is better")
    lines.append("*: no other engine of the model is better in one figure and as good in the others")
    unpriced = sorted({visible(row.gpu) for row in report.rows if row.gpu not in report.prices})
    if report.prices and unpriced:
        lines.append(f"without a price, compared only with engines of the same GPU: {', '.join(unpriced)}")
    if report.prices:
        lines.append(f"{visible(report.currency)}/million: of a million inferences, one run after the other")
    return lines


def failures(report: SweepReport) -> list[tuple[str, str]]:
    """What failed: the job, and what, where and remedy."""
    found = []
    for row in report.rows:
        if row.failure is not None:
            job = ", ".join(visible(f"{axis} {row.varied[axis]}") for axis in axes_of(report.rows))
            parts = (row.failure.what, row.failure.where, row.failure.remedy)
            found.append((job, "; ".join(" ".join(visible(part).split()) for part in parts if part)))
    return found


@dataclass(frozen=True)
class EngineLimits:
    """What an engine must keep: milliseconds of one run, and the drop of accuracy, 0.01 = one point. None: any."""

    latency_ms: float | None = None
    drop: float | None = None


@dataclass(frozen=True)
class Choice:
    """The answer for one model.

    Attributes:
        model: Its name.
        best: The cheapest engine within the limits, where all of those have a cost; else the fastest. None where there
            is none.
        by: What it is best in: ``cost`` or ``latency``.
        others: The jobs that are not it, and why.
        nearest: Where none is within the limits, the engine that exceeds one by the smallest factor; None where there
            is no engine of which all is known that a limit asks for.
    """

    model: str
    best: SweepRow | None
    by: str
    others: tuple[tuple[SweepRow, str], ...]
    nearest: SweepRow | None = None


def choose(report: SweepReport, limits: EngineLimits, model: str | None = None) -> list[Choice]:
    """Which engine to take for each model, or for one of them."""
    names = list(dict.fromkeys(row.model for row in report.rows if model in (None, row.model)))
    return [_choice(name, [row for row in report.rows if row.model == name], limits) for name in names]


def choices_json(choices: Sequence[Choice]) -> dict[str, Any]:
    """The answers as JSON values."""
    return {
        "schema": "trtopt.sweep-choice/1",
        "models": [
            {
                "model": choice.model,
                "best": None if choice.best is None else plain(dataclasses.asdict(choice.best)),
                "nearest": None if choice.nearest is None else plain(dataclasses.asdict(choice.nearest)),
                "by": choice.by,
                "others": [{"key": row.key, "varied": row.varied, "why": why} for row, why in choice.others],
            }
            for choice in choices
        ],
    }


def _choice(model: str, rows: Sequence[SweepRow], limits: EngineLimits) -> Choice:
    out = {row.key: reason for row in rows if (reason := _excluded(row, limits))}
    within = [row for row in rows if row.key not in out]
    kinds = {row.result.latency for row in within if row.result is not None}
    if len(kinds) > 1:  # predicted times are not compared with measured ones: measured ones count
        out.update((row.key, "its time is predicted, others are measured") for row in within if not _is_measured(row))
        within = [row for row in within if _is_measured(row)]
    by = "cost" if within and all(row.cost is not None for row in within) else "latency"
    ranked = sorted(within, key=lambda row: _rank(row, by))
    others = [(row, _behind(row, ranked[0], by)) for row in ranked[1:]]
    others += [(row, out[row.key]) for row in rows if row.key in out]
    nearest = None if ranked else _nearest(rows, limits)
    return Choice(model, ranked[0] if ranked else None, by, tuple(others), nearest)


def _is_measured(row: SweepRow) -> bool:
    return row.result is not None and row.result.latency == "measured"


def _nearest(rows: Sequence[SweepRow], limits: EngineLimits) -> SweepRow | None:
    def excess(value: float, limit: float | None) -> float:
        if limit is None:
            return 0.0
        return value / limit if limit else (math.inf if value > 0 else 0.0)

    found = []
    for row in rows:
        known = row.result
        if known is None or not row.engine or known.latency_us is None:
            continue
        if limits.drop is None or known.drop is not None:
            over = excess(known.latency_us / 1e3, limits.latency_ms), excess(known.drop or 0.0, limits.drop)
            found.append(((max(over), _rank(row, "latency")), row))
    return min(found, key=lambda item: item[0])[1] if found else None


def _rank(row: SweepRow, by: str) -> tuple[float, float, float, float]:
    found = row.result
    if found is None:
        return (0.0, 0.0, 0.0, 0.0)
    latency = found.latency_us or 0.0
    drop = math.inf if found.drop is None else max(found.drop, 0.0)
    return (row.cost or 0.0) if by == "cost" else latency / found.batch, drop, latency, float(found.engine_bytes)


def _behind(row: SweepRow, best: SweepRow, by: str) -> str:
    mine, least = _rank(row, by)[0], _rank(best, by)[0]
    worse, better = ("dearer", "cheaper") if by == "cost" else ("slower", "faster")
    if mine <= least:
        return f"no {better}"
    return f"{percent(mine / least - 1)} {worse}" if least else worse


def _excluded(row: SweepRow, limits: EngineLimits) -> str:
    """Why a job is out; empty where it is not."""
    found = row.result
    if found is None or not row.engine:
        return state_text(row)
    if limits.drop is not None and found.drop is None:
        return "its accuracy is not known"
    if found.latency_us is None:
        return "its latency is not known"
    over = []
    if limits.latency_ms is not None and found.latency_us > 1e3 * limits.latency_ms:
        shown = latency_text(row)
        if shown == time_text(1e3 * limits.latency_ms):
            shown = f"{_apart(found.latency_us / 1e3, limits.latency_ms, 3)} ms"
        over.append(f"takes {shown}")
    if limits.drop is not None and found.drop is not None and not AccuracyBudget(limits.drop).allows(found.drop):
        over.append(f"accuracy drops by {_apart(found.drop, limits.drop, 4)}")
    return "; ".join(over)


def _apart(value: float, limit: float, digits: int) -> str:
    """A value above a limit, with as many decimal places as tell them apart, and at least these."""
    shown = f"{value:.{digits}f}"
    return _apart(value, limit, digits + 1) if shown == f"{limit:.{digits}f}" and digits < _MOST_DIGITS else shown


def view(report: SweepReport, *, drop: float = DEFAULT_ACCURACY_DROP) -> View:
    """Every job, what the figures mean, what failed; in a page first the engine to take, and a plot for each model.

    ``drop`` is the largest drop of accuracy of an engine to take, 0.01 = one point.
    """
    failed = failures(report)
    prices = {f"an hour of {gpu}": f"{price:g} {report.currency}" for gpu, price in report.prices.items()}
    values = {"store": report.store, "executor": report.executor, **prices, **report.environment}
    sections = (
        Section("What to take", _taken(report, drop), "page"),
        *(Section(*group, "page") for group in _plots(report)),
        Section("Jobs", (_table(report), *bullets(notes(report)))),
        Section("Failed", (pairs(failed),) if failed else ()),
        Section("", (pairs([("results", visible(from_here(report.store)))]),), "text"),
        rests_on(report.schema, values),
    )
    name = f"{visible(report.name)}: sweep"
    return View(line(headline(report)), (), sections, name=name, warnings=report.warnings)


def _taken(report: SweepReport, drop: float) -> tuple[Block, ...]:
    choices = choose(report, EngineLimits(drop=drop))
    return (Figures(tuple(_tile(report, choice, drop) for choice in choices[:_MOST_PLOTS])),) if choices else ()


def _tile(report: SweepReport, choice: Choice, drop: float) -> tuple[str, str, str]:
    """The engine to take where accuracy may drop that far; else the nearest."""
    best, model = choice.best or choice.nearest, visible(choice.model)
    if best is None or best.result is None:
        return model, "no engine", f"none drops by at most {drop:g}, as far as is known"
    word = "the cheapest" if choice.by == "cost" else "the fastest per inference"
    word = f"{word} that drops by at most" if choice.best is not None else "none drops by at most"
    others = (axis for axis in axes_of(report.rows) if axis not in ("model", "gpu", "precision"))
    varied = "".join(f"{visible(axis)} {shorten(visible(best.varied[axis]), 40)}; " for axis in others)
    return model, visible(f"{best.gpu} {best.precision}"), f"{varied}{word} {drop:g}: {_figures(report, best)}"


def _plots(report: SweepReport) -> list[tuple[str, tuple[Block, ...]]]:
    """By model, kind of time and measure: a title and its plot."""
    groups: dict[tuple[str, str, str], list[tuple[SweepRow, str]]] = {}
    gpus = list(dict.fromkeys(row.gpu for row in report.rows))
    for row in report.rows:
        found = row.result
        if found is not None and row.engine and found.drop is not None and found.latency_us:
            groups.setdefault((row.model, found.latency, found.measure), []).append((row, _hover(report, row)))
    shown = [
        (
            f"{visible(model)}, {visible(latency)} times",
            (Plot(f"front-{index}", functools.partial(plots.front, rows, gpus, measure)),),
        )
        for index, ((model, latency, measure), rows) in enumerate(groups.items())
    ]
    left = len(shown) - _MOST_PLOTS
    more = [("", (Note(f"{count(left, 'more plot')}: the table has them"),))] if left > 0 else []
    return [*shown[:_MOST_PLOTS], *more]


def _hover(report: SweepReport, row: SweepRow) -> str:
    """What is shown of a job beside the pointer, in the tags that plotly takes; names are escaped."""
    lines = [f"<b>{plots.label(row.gpu)} {plots.label(row.precision)}</b>"]
    others = {axis: value for axis, value in row.varied.items() if axis not in ("gpu", "precision", "model")}
    lines += [f"{plots.label(axis)} {plots.label(value)}" for axis, value in others.items()]
    return "<br>".join([*lines, *map(plots.label, _figures(report, row).split(", "))])


def choices_view(report: SweepReport, choices: Sequence[Choice]) -> View:
    """For each model what to take, and why nothing else."""
    parts = []
    for choice in choices:
        rows = [(_job(row), why) for row, why in choice.others]
        others = table(("instead of" if choice.best else "not within", ""), rows, most=_MOST_OTHERS, noun="job")
        head, *figures = _answer(report, choice)
        parts.append(Section(head, (*map(line, figures), *([others] if rows else []))))
    first, *rest = parts
    return View(line(first.title), (), (Section("", first.blocks), *rest))


def _answer(report: SweepReport, choice: Choice) -> list[str]:
    best, name = choice.best, visible(choice.model)
    if best is None:
        none = f"{name}: no engine of the sweep is within the limits"
        near = choice.nearest
        return [none] if near is None else [none, f"nearest: {_job(near)}: {_figures(report, near)}"]
    how = {"cost": "the cheapest", "latency": "the fastest per inference"}[choice.by] + " within the limits"
    if choice.by == "latency" and report.prices:
        how += "; not all of them have a price"
    return [f"{name}: {_job(best)} ({how})", _figures(report, best), visible(from_here(best.engine))]


def _figures(report: SweepReport, row: SweepRow) -> str:
    figures = [f"accuracy drop {drop_text(row) or 'not known'}"]
    if row.result is not None:
        figures.insert(0, f"{latency_text(row)} {row.result.latency}")
        figures.append(bytes_text(row.result.engine_bytes))
    if row.cost is not None:
        figures.append(f"{cost_text(row.cost)} {visible(report.currency)} per million inferences")
    return ", ".join(figures)


def _job(row: SweepRow) -> str:
    varied = {"gpu": row.gpu, "precision": row.precision} | row.varied
    return ", ".join(visible(f"{axis} {value}") for axis, value in varied.items() if axis != "model")
