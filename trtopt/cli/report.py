"""``trtopt report``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtopt.cli.parser import Parser
from trtopt.cli.streams import print_json, print_renderable
from trtopt.errors import UsageError
from trtopt.support.files import check_outputs
from trtopt.support.words import did_you_mean

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trtopt.report.schema.analysis import Analysis
    from trtopt.report.schema.build import BuildReport
    from trtopt.report.schema.profile import ProfileReport
    from trtopt.report.schema.sweep import SweepReport

_DESCRIPTION = "Show what was written with --report, also in other forms; or what changed between two profiles."
_EPILOG = """\
examples:
  trtopt report profile.json --html profile.html
  trtopt report after.json --against before.json --markdown comment.md
  trtopt report sweep.json --max-latency-ms 5 --max-drop 0.01
"""


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = Parser(
        prog="trtopt report", usage="trtopt report REPORT [options]", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument(
        "report", metavar="REPORT", help="what build, optimize, analyze, profile or sweep wrote with --report"
    )
    parser.add_argument("--against", metavar="FILE", help="an older profile of the same network, to compare with")
    parser.add_argument("--html", metavar="FILE", help="write the report as one HTML file")
    parser.add_argument("--markdown", metavar="FILE", help="write the report, or the comparison, as Markdown")
    parser.add_argument("--trace", metavar="FILE", help="write the layers as a trace for chrome://tracing or Perfetto")
    parser.add_argument("--csv", metavar="FILE", help="write the jobs of a sweep as CSV")
    parser.add_argument(
        "--max-latency-ms", type=_number, metavar="MS", help="of a sweep: what to take within this time"
    )
    parser.add_argument(
        "--max-drop", type=_number, metavar="X", help="and within this drop of accuracy, 0.01 = 1 point"
    )
    parser.add_argument("--model", metavar="NAME", help="only for this model of the sweep")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout, and nothing else")
    args = parser.parse(argv)
    for name in ("html", "trace", "csv"):
        if args.against is not None and getattr(args, name) is not None:
            raise UsageError("A comparison has no such form", where=f"--{name}", remedy="leave it or --against out")
    outputs = {
        name: Path(value) for name in ("html", "markdown", "trace", "csv") if (value := getattr(args, name)) is not None
    }
    inputs = {"the report": Path(args.report)} | ({"--against": Path(args.against)} if args.against else {})
    check_outputs({f"--{name}": path for name, path in outputs.items()}, inputs)
    if args.against is None:
        asked = any(getattr(args, name) is not None for name in ("max_latency_ms", "max_drop", "model"))
        question = _Question(args.max_latency_ms, args.max_drop, args.model) if asked else None
        return _one(args.report, outputs, question, args.json)
    return _two(args.report, args.against, outputs.get("markdown"), args.json)


@dataclass(frozen=True)
class _Question:
    """What to take of a sweep: within these limits, for this model."""

    latency_ms: float | None
    drop: float | None
    model: str | None


def _number(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError("give a number from 0 on")
    return value


def _one(report: str, outputs: dict[str, Path], question: _Question | None, as_json: bool) -> int:
    from trtopt.report.schema.read import read_report
    from trtopt.report.schema.sweep import SweepReport

    found = read_report(Path(report))
    if isinstance(found, SweepReport):
        return _sweep(found, outputs, question, as_json)
    if question is not None or "csv" in outputs:
        what = "--csv, --max-latency-ms, --max-drop and --model are for the report of a sweep"
        raise UsageError(what, where=report, remedy="leave them out")
    shown = _written(found, outputs)
    if as_json:
        print_json(found.to_json_dict())
    else:
        print_renderable(shown)
    return 0


def _written(found: BuildReport | Analysis | ProfileReport, outputs: dict[str, Path]) -> RenderableType:
    """Write a report in the forms that are asked for, and give what a terminal shows of it."""
    from trtopt.report.schema import analysis, profile

    if isinstance(found, profile.ProfileReport):
        from trtopt.analysis.profile import write_profile
        from trtopt.report.text import profile as profile_terminal

        write_profile(found, **outputs)
        return profile_terminal.render(found)
    forms = {"html"} if isinstance(found, analysis.Analysis) else set()
    for name in sorted(outputs.keys() - forms):
        raise UsageError("A report of this kind has no such form", where=f"--{name}", remedy="leave it out")
    if isinstance(found, analysis.Analysis):
        from trtopt.analysis.analyze import write_page
        from trtopt.hardware.spec import gpu_of
        from trtopt.report.text import analysis as analysis_terminal

        shown = analysis_terminal.render(found, gpu_of(found.gpu, "gpu"))
        if "html" in outputs:
            write_page(found, outputs["html"])
        return shown
    from trtopt.report.text import build

    return build.render(found)


def _sweep(found: SweepReport, outputs: dict[str, Path], question: _Question | None, as_json: bool) -> int:
    """Write a sweep's report; show it, or the answer to the question."""
    from trtopt.fleet.sweep import write_sweep
    from trtopt.report.text import sweep
    from trtopt.report.text.sweep import Limits, choices_json, choose

    if "trace" in outputs:
        raise UsageError("A report of this kind has no such form", where="--trace", remedy="leave it out")
    write_sweep(found, **outputs)
    if question is None:
        if as_json:
            print_json(found.to_json_dict())
        else:
            print_renderable(sweep.render(found))
        return 0
    choices = choose(found, Limits(question.latency_ms, question.drop), question.model)
    if not choices:
        names = dict.fromkeys(row.model for row in found.rows)
        remedy = did_you_mean(str(question.model), names) or f"it has {', '.join(names)}"
        raise UsageError(f"The sweep has no model {question.model!r}", where="--model", remedy=remedy)
    if as_json:
        print_json(choices_json(choices))
    else:
        print_renderable(sweep.render_choices(found, choices))
    return 0


def _two(report: str, against: str, markdown: Path | None, as_json: bool) -> int:
    from trtopt.analysis.profile import compare_reports
    from trtopt.report.text import profile as profile_terminal

    found = compare_reports(report, against, markdown=markdown)
    if as_json:
        print_json(found.to_json_dict())
    else:
        print_renderable(profile_terminal.render_comparison(found))
    return 0
