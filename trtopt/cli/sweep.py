"""``trtopt sweep``, and what is shown of a sweep while it runs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtopt.cli.parser import OneOf, Parser
from trtopt.cli.streams import Listener, own_stdout, print_json, print_renderable, say, show
from trtopt.config import flag
from trtopt.config.toml_file import MODEL
from trtopt.errors import GateError, UsageError
from trtopt.events import Event
from trtopt.report.text.blocks import table
from trtopt.report.text.command import shell
from trtopt.report.text.format import count, seconds_text, visible
from trtopt.support.files import check_outputs

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trtopt.fleet.sweep import Progress, SweepPlan

_DESCRIPTION = "Build every combination of models, GPUs, precisions, shapes and options, and report on all of them."
_IN_THE_FILE = 'what to build stands in SWEEP.toml, such as gpu = ["T4", "L4"] under [matrix]; see trtopt sweep --help'
_EPILOG = """\
SWEEP.toml has what varies in [matrix], and what does not in [build]:
  [matrix]
  model = ["model.onnx"]
  gpu = ["T4", "L4"]
  precision = ["fp16"]

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

    with own_stdout(quiet=args.json), Listener() as listener:
        shown = SweepProgress(listener)

        def on_plan(plan: SweepPlan) -> None:
            check_outputs(named, _files_read(plan))
            shown.plan(plan)

        report = sweep.sweep(args.sweep, **where, yes=args.yes, on_plan=on_plan, on_progress=shown.progress)
    write_forms(report, **outputs)
    show(report, as_json=args.json)
    if args.report and not args.json and any(row.engine for row in report.rows):
        say(f"copy what to take, with manifests: {shell('trtopt', 'report', args.report, '--take', 'engines')}")
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
    parser = Parser("trtopt sweep", "SWEEP.toml [options]", _DESCRIPTION, _EPILOG, elsewhere=_IN_THE_FILE)
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


class SweepProgress:
    """Shows a sweep on stderr: a line for each job that ends, and on a terminal how many are left and which run."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._running: dict[int, str] = {}
        self._ended = self._missing = 0

    def plan(self, plan: SweepPlan) -> None:
        """Take what is going to be done."""
        self._missing = plan.missing
        self._listener.print("\n".join(plan_lines(plan)))
        self._listener(Event("start", "jobs", total=plan.missing))

    def progress(self, event: Progress) -> None:
        """Take what happened to a job."""
        self._running.pop(event.number, None)
        if event.kind == "start":
            self._running[event.number] = event.job.words
        elif event.kind == "lost":
            self._listener(Event("warning", "jobs", text=event.text))
        else:
            from trtopt.report.text.sweep import state_text

            self._ended += 1
            state = "" if event.row is None else state_text(event.row)
            took = seconds_text(event.seconds) + (f" on {event.node}" if event.node else "")
            self._listener.print(f"{self._ended} of {self._missing}: {event.job.words}: {state}, {took}")
            self._listener(Event("advance", "jobs"))
        self._listener(Event("detail", "jobs", text="; ".join(list(self._running.values())[:2])))


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
