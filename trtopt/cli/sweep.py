"""``trtopt sweep``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trtopt.cli.parser import Parser, one_of
from trtopt.cli.streams import own_stdout, print_json, print_renderable, say
from trtopt.config import flag
from trtopt.config.toml_file import MODEL
from trtopt.errors import UsageError
from trtopt.support.files import check_outputs

if TYPE_CHECKING:
    from trtopt.fleet.sweep import SweepPlan
    from trtopt.report.schema.sweep import SweepReport

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
    args = _arguments(argv)
    outputs = {name: Path(value) for name in ("report", "html", "markdown", "csv") if (value := getattr(args, name))}
    _check_outputs(outputs, {"the sweep's file": Path(args.sweep)})
    if "html" in outputs:
        from trtopt.report.html.page import check_html

        check_html()
    # Ray sends statistics home unless this says otherwise; whoever set it knows better.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from trtopt.fleet import sweep

    where = {"executor": args.executor, "address": args.address, "workers": args.workers}
    if args.dry_run:
        with own_stdout(quiet=True):
            plan = sweep.plan_sweep(args.sweep, **where)
        _print_plan(plan, as_json=args.json)
        return 0
    from trtopt.cli.sweep_progress import SweepProgress

    with own_stdout(quiet=args.json), SweepProgress() as shown:

        def on_plan(plan: SweepPlan) -> None:
            _check_outputs(outputs, _files_read(plan))
            shown.plan(plan)

        report = sweep.sweep(args.sweep, **where, yes=args.yes, on_plan=on_plan, on_progress=shown.progress)
    _write(report, outputs)
    _print(report, as_json=args.json)
    return max((_exit_code(row.failure.exit_code if row.failure else 0, row.status) for row in report.rows), default=0)


def _check_outputs(outputs: Mapping[str, Path], inputs: Mapping[str, Path]) -> None:
    check_outputs({f"--{name}": path for name, path in outputs.items()}, inputs)


def _files_read(plan: SweepPlan) -> dict[str, Path]:
    """What the jobs read, by what messages call it."""
    inputs = {(item.option, item.path): item for planned in plan.jobs for item in planned.job.inputs}
    return {
        f"{'the model' if item.option == MODEL else flag(item.option)} {file.path}": file.path
        for item in inputs.values()
        for file in item.files
    }


def _exit_code(failed: int, status: str) -> int:
    return 7 if status == "gate" else failed


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="trtopt sweep", usage="trtopt sweep SWEEP.toml [options]", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument("sweep", metavar="SWEEP.toml", help="options in [build], lists in [matrix], [sweep], [prices]")
    parser.add_argument("--dry-run", action="store_true", help="show the jobs, what the store has, and the time")
    parser.add_argument("--executor", type=one_of(("local", "ray")), default="local", help="who builds: local, ray")
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
    args = parser.parse(argv)
    if args.address is not None and args.executor != "ray":
        raise UsageError("An address is that of a Ray cluster", where="--address", remedy="add --executor ray")
    return args


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("give 1 or more")
    return number


def _print_plan(plan: SweepPlan, *, as_json: bool) -> None:
    from trtopt.cli.sweep_progress import plan_json, plan_lines, plan_table

    if as_json:
        print_json(plan_json(plan))
        return
    print_renderable(plan_table(plan))
    for line in plan_lines(plan):
        say(line)


def _write(report: SweepReport, outputs: dict[str, Path]) -> None:
    from trtopt.fleet.sweep import write_sweep
    from trtopt.report.schema.write import write_report

    if "report" in outputs:
        write_report(report, outputs["report"])
    write_sweep(report, **{name: path for name, path in outputs.items() if name != "report"})


def _print(report: SweepReport, *, as_json: bool) -> None:
    if as_json:
        print_json(report.to_json_dict())
        return
    from trtopt.report.text.sweep import render

    print_renderable(render(report))
