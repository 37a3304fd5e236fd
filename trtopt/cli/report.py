"""``trtopt report``."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trtopt.cli.options import from_zero
from trtopt.cli.parser import Parser
from trtopt.cli.streams import print_json, print_renderable, say, show
from trtopt.errors import UsageError
from trtopt.support.files import check_outputs
from trtopt.support.words import did_you_mean

if TYPE_CHECKING:
    from trtopt.report.schema.sweep import SweepReport

_DESCRIPTION = "Show what was written with --report, also in other forms; or what changed between two of a kind."
_EPILOG = """\
examples:
  trtopt report profile.json --html profile.html
  trtopt report int8.json --against fp16.json --html compared.html
  trtopt report after.json --against before.json --markdown comment.md
  trtopt report sweep.json --max-latency-ms 5 --max-drop 1%
  trtopt report sweep.json --max-drop 1% --take engines
"""


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser("trtopt report", "REPORT [options]", _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "report", metavar="REPORT", help="what build, analyze, profile, sensitivity, sweep, ... wrote with --report"
    )
    parser.add_argument(
        "--against", metavar="FILE", help="an older report of the same kind and network, to compare with"
    )
    parser.add_argument("--html", metavar="FILE", help="write the report as one HTML file")
    parser.add_argument("--markdown", metavar="FILE", help="write the report, or the comparison, as Markdown")
    parser.add_argument("--trace", metavar="FILE", help="write the layers as a trace for chrome://tracing or Perfetto")
    parser.add_argument("--csv", metavar="FILE", help="write the jobs of a sweep as CSV")
    parser.add_argument(
        "--max-latency-ms", type=from_zero, metavar="MS", help="of a sweep: what to take within this time"
    )
    parser.add_argument("--max-drop", type=from_zero, metavar="X", help="and within this drop of accuracy, 0.01 or 1%%")
    parser.add_argument("--model", metavar="NAME", help="only for this model of the sweep")
    parser.add_argument("--gpu", metavar="NAME", help="only for this GPU of the sweep")
    parser.add_argument(
        "--take", metavar="DIR", help="of a sweep: copy what to take, with manifest and report, under readable names"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="of a build: show every step, region and refusal")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout, and nothing else")
    return parser


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    args = make_parser().parse(argv)
    for name in ("trace", "csv"):
        if args.against is not None and getattr(args, name) is not None:
            raise UsageError("A comparison has no such form", where=f"--{name}", remedy="leave it or --against out")
    outputs = {
        name: Path(value) for name in ("html", "markdown", "trace", "csv") if (value := getattr(args, name)) is not None
    }
    inputs = {"the report": Path(args.report)} | ({"--against": Path(args.against)} if args.against else {})
    check_outputs({f"--{name}": path for name, path in outputs.items()}, inputs)
    if args.against is not None:
        from trtopt.analysis.against import compare_reports

        show(compare_reports(args.report, args.against, **outputs), as_json=args.json)
    else:
        _one(args, outputs)
    return 0


def _one(args: argparse.Namespace, outputs: dict[str, Path]) -> None:
    """Write one report in the forms that are asked for, and show it."""
    from trtopt.report.files import write_forms
    from trtopt.report.schema.build import BuildReport
    from trtopt.report.schema.profile import ProfileReport
    from trtopt.report.schema.read import read_report
    from trtopt.report.schema.sweep import SweepReport
    from trtopt.report.text import build

    found = read_report(Path(args.report))
    asked = any(getattr(args, name) is not None for name in ("max_latency_ms", "max_drop", "model", "gpu", "take"))
    if not isinstance(found, SweepReport) and (asked or "csv" in outputs):
        what = "--csv, --max-latency-ms, --max-drop, --model, --gpu and --take are for the report of a sweep"
        raise UsageError(what, where=args.report, remedy="leave them out")
    if not isinstance(found, ProfileReport) and "trace" in outputs:
        raise UsageError("A report of this kind has no such form", where="--trace", remedy="leave it out")
    write_forms(found, **outputs)
    if isinstance(found, SweepReport) and asked:
        _choose(found, args)
    elif isinstance(found, BuildReport):
        show(found, functools.partial(build.view, verbose=args.verbose, page=args.html), as_json=args.json)
    else:
        show(found, as_json=args.json)


def _choose(found: SweepReport, args: argparse.Namespace) -> None:
    """Show which engines of a sweep to take."""
    from trtopt.report.text import sweep

    if args.gpu is not None:
        rows = [row for row in found.rows if row.gpu.lower() == args.gpu.lower().replace(" ", "-")]
        if not rows:
            names = dict.fromkeys(row.gpu for row in found.rows)
            remedy = did_you_mean(args.gpu, names) or f"it has {', '.join(names)}"
            raise UsageError(f"The sweep has no GPU {args.gpu!r}", where="--gpu", remedy=remedy)
        found = dataclasses.replace(found, rows=tuple(rows))
    choices = sweep.choose(found, sweep.EngineLimits(args.max_latency_ms, args.max_drop), args.model)
    if not choices:
        names = dict.fromkeys(row.model for row in found.rows)
        remedy = did_you_mean(str(args.model), names) or f"it has {', '.join(names)}"
        raise UsageError(f"The sweep has no model {args.model!r}", where="--model", remedy=remedy)
    taken: list[Path] = []
    if args.take is not None:
        from trtopt.fleet.take import take

        rows = [choice.best for choice in choices if choice.best is not None]
        if not rows:
            what = "There is no engine to take within the limits"
            raise UsageError(what, where="--take", remedy="raise --max-latency-ms or --max-drop")
        taken = take(rows, Path(args.take))
    if args.json:
        print_json(sweep.choices_json(choices))
        return
    print_renderable(sweep.choices_view(found, choices))
    for path in taken:
        say(f"taken: {path}")
