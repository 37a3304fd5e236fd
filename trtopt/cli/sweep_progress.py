"""What is shown of a sweep while it runs: a live table on a terminal, lines elsewhere; and its plan."""

from __future__ import annotations

import sys
import time
from collections import Counter
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trtopt.cli.streams import safe, say

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

    from trtopt.fleet.sweep import Progress, SweepPlan

_MOST_ROWS = 24


class SweepProgress:
    """Shows a sweep on stderr."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._plan: SweepPlan | None = None
        self._running: dict[int, tuple[str, float]] = {}
        self._counts: dict[tuple[str, str], Counter[str]] = {}
        self._ended = 0
        self._began = time.monotonic()

    def __enter__(self) -> SweepProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def plan(self, plan: SweepPlan) -> None:
        """Take what is going to be done."""
        self._plan = plan
        for item in plan.jobs:
            state = "waiting" if item.entry is None else "in the store"
            self._counts.setdefault((item.job.model, item.job.gpu), Counter())[state] += 1
        self._print("\n".join(plan_lines(plan)))
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                console=Console(stderr=True, highlight=False),
                get_renderable=self._table,
                refresh_per_second=4,
                transient=True,
            )
            self._live.start()

    def progress(self, event: Progress) -> None:
        """Take what happened to a job."""
        counts = self._counts[event.job.model, event.job.gpu]
        if event.kind == "start":
            counts["waiting"] -= 1
            counts["started"] += 1
            self._running[event.number] = (event.job.words, time.monotonic())
            return
        counts["started"] -= 1
        self._running.pop(event.number, None)
        if event.kind == "lost":
            counts["waiting"] += 1
            self._print(f"warning: {event.text}")
            return
        self._ended += 1
        row = event.row
        failed = row is not None and row.failure is not None
        counts["failed" if failed else "done"] += 1
        missing = self._plan.missing if self._plan is not None else 0
        from trtopt.report.text.format import seconds_text
        from trtopt.report.text.sweep import state_text

        state = "" if row is None else state_text(row)
        where = f" on {event.node}" if event.node else ""
        self._print(f"{self._ended} of {missing}: {event.job.words}: {state}, {seconds_text(event.seconds)}{where}")

    def _print(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(safe(text), markup=False, highlight=False)
        else:
            say(text, sys.stderr)

    def _table(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        from trtopt.report.text.format import seconds_text, table, visible

        states = ("in the store", "done", "failed", "started", "waiting")
        rows = [
            (visible(model), visible(gpu), *(str(counts[state]) if counts[state] else "" for state in states))
            for (model, gpu), counts in list(self._counts.items())[:_MOST_ROWS]
        ]
        now = time.monotonic()
        running = [
            Text(f"  {words}: {seconds_text(now - began)}")
            for words, began in list(self._running.values())[:_MOST_ROWS]
        ]
        head = Text(f"{self._ended} jobs ended in {seconds_text(now - self._began)}; started:")
        return Group(table(("model", "gpu", *states), rows, right=tuple(range(2, 7))), head, *running)


def plan_table(plan: SweepPlan) -> RenderableType:
    """Jobs by model, GPU and precision: how many there are, and how many the store has."""
    from trtopt.report.text.format import table, visible

    groups: dict[tuple[str, str, str], list[int]] = {}
    for item in plan.jobs:
        group = groups.setdefault((item.job.model, item.job.gpu, item.job.precision), [0, 0])
        group[0] += 1
        group[1] += item.entry is not None
    rows = [(*(visible(name) for name in names), str(jobs), str(kept)) for names, (jobs, kept) in groups.items()]
    return table(("model", "gpu", "precision", "jobs", "in the store"), rows, right=(3, 4))


def plan_lines(plan: SweepPlan) -> list[str]:
    """What is to be done, by whom, and how long it may take."""
    from trtopt.report.text.format import count, seconds_text

    where = f"{plan.workers} at once, {'on Ray' if plan.executor == 'ray' else 'in processes of this machine'}"
    took = "unknown: nothing like them is in the store yet"
    if plan.estimate_s is not None:
        took = f"about {seconds_text(plan.estimate_s)}, by what the store says of jobs like them"
    lines = [f"{count(len(plan.jobs), 'job')}, {len(plan.jobs) - plan.missing} in the store, {plan.missing} to build"]
    return [*lines, f"{where}; time: {took}"] if plan.missing else lines


def plan_json(plan: SweepPlan) -> dict[str, Any]:
    """The plan as JSON values."""
    return {
        "schema": "trtopt.sweep-plan/1",
        "jobs": [
            {"key": item.key, **{name: getattr(item.job, name) for name in ("model", "gpu", "precision", "varied")}}
            | {"in_store": item.entry is not None, "place": item.job.place}
            for item in plan.jobs
        ],
        "missing": plan.missing,
        "workers": plan.workers,
        "executor": plan.executor,
        "estimate_s": plan.estimate_s,
    }
