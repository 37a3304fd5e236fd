"""``trtopt sweep``, and what is shown of a sweep while it runs: a live table on a terminal, lines elsewhere."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trtopt.cli.parser import OneOf, Parser
from trtopt.cli.streams import own_stdout, print_json, print_renderable, safe, say, show
from trtopt.config import flag
from trtopt.config.toml_file import MODEL
from trtopt.errors import GateError, UsageError
from trtopt.report.text.blocks import table
from trtopt.report.text.format import count, seconds_text, visible
from trtopt.support.files import check_outputs

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

    from trtopt.fleet.sweep import Progress, SweepPlan

_DESCRIPTION = "Build every combination of models, GPUs, precisions, shapes and options, and report on all of them."
_EPILOG = """\
examples:
  trtopt sweep sweep.toml --dry-run
  trtopt sweep sweep.toml --report sweep.json --html sweep.html
  trtopt sweep sweep.toml --executor ray --address 10.0.0.5:6379
  trtopt report sweep.json --max-latency-ms 5 --max-drop 0.01
"""


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the largest exit code of a job."""
    args = make_parser().parse(argv)
    if args.address is not None and args.executor != "ray":
        raise UsageError("An address is that of a Ray cluster", where="--address", remedy="add --executor ray")
    outputs = {name: Path(value) for name in ("report", "html", "markdown", "csv") if (value := getattr(args, name))}
    named = {f"--{name}": path for name, path in outputs.items()}
    check_outputs(named, {"the sweep's file": Path(args.sweep)})
    # Ray sends statistics home unless this says otherwise; whoever set it knows better.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from trtopt.fleet import sweep
    from trtopt.report.files import write_forms
    from trtopt.report.html.page import check_html

    check_html(outputs.get("html"))
    where = {"executor": args.executor, "address": args.address, "workers": args.workers}
    if args.dry_run:
        with own_stdout(quiet=True):
            plan = sweep.plan_sweep(args.sweep, **where)
        if args.json:
            print_json(plan_json(plan))
            return 0
        print_renderable(plan_table(plan))
        for line in plan_lines(plan):
            say(line)
        return 0

    with own_stdout(quiet=args.json), SweepProgress() as shown:

        def on_plan(plan: SweepPlan) -> None:
            check_outputs(named, _files_read(plan))
            shown.plan(plan)

        report = sweep.sweep(args.sweep, **where, yes=args.yes, on_plan=on_plan, on_progress=shown.progress)
    write_forms(report, **outputs)
    show(report, as_json=args.json)
    failed = (row.failure.exit_code if row.failure else 0 for row in report.rows if row.status != "gate")
    return max([0, *failed, *(GateError.exit_code for row in report.rows if row.status == "gate")])


def _files_read(plan: SweepPlan) -> dict[str, Path]:
    """What the jobs read, by what messages call it."""
    inputs = {(item.option, item.path): item for planned in plan.jobs for item in planned.job.inputs}
    return {
        f"{'the model' if item.option == MODEL else flag(item.option)} {file.path}": file.path
        for item in inputs.values()
        for file in item.files
    }


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser("trtopt sweep", "SWEEP.toml [options]", _DESCRIPTION, _EPILOG)
    parser.add_argument("sweep", metavar="SWEEP.toml", help="options in [build], lists in [matrix], [sweep], [prices]")
    parser.add_argument("--dry-run", action="store_true", help="show the jobs, what the store has, and the time")
    parser.add_argument("--executor", type=OneOf(("local", "ray")), default="local", help="who builds: local, ray")
    parser.add_argument(
        "--address", metavar="ADDR", help="of a Ray cluster, host:port or auto (default: start one here)"
    )
    parser.add_argument("--workers", type=_count, metavar="N", help="builds at once on this machine (default: cores)")
    parser.add_argument("--yes", action="store_true", help="also where there are more jobs than [sweep] limit")
    parser.add_argument("--report", "-o", metavar="FILE", help="write the report as JSON")
    parser.add_argument("--html", metavar="FILE", help="write the report as one HTML file")
    parser.add_argument("--markdown", metavar="FILE", help="write the report as Markdown")
    parser.add_argument("--csv", metavar="FILE", help="write the report as CSV")
    parser.add_argument(
        "--json", action="store_true", help="print the report as JSON on stdout, and nothing else there"
    )
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("give 1 or more")
    return number


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
    groups: dict[tuple[str, str, str], list[int]] = {}
    for item in plan.jobs:
        group = groups.setdefault((item.job.model, item.job.gpu, item.job.precision), [0, 0])
        group[0] += 1
        group[1] += item.entry is not None
    rows = [(*(visible(name) for name in names), str(jobs), str(kept)) for names, (jobs, kept) in groups.items()]
    return table(("model", "gpu", "precision", "jobs", "in the store"), rows, right=(3, 4))


def plan_lines(plan: SweepPlan) -> list[str]:
    """What is to be done, by whom, and how long it may take."""
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
