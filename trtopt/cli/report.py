"""``trtopt report``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trtopt.cli.parser import Parser
from trtopt.cli.streams import print_json, print_renderable
from trtopt.errors import UsageError
from trtopt.files import check_outputs

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trtopt.report.read import Report

_DESCRIPTION = "Show what was written with --report, also in other forms; or what changed between two profiles."
_EPILOG = """\
examples:
  trtopt report profile.json --html profile.html
  trtopt report after.json --against before.json --markdown comment.md
"""


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = Parser(
        prog="trtopt report", usage="trtopt report REPORT [options]", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument("report", metavar="REPORT", help="what build, optimize, analyze or profile wrote with --report")
    parser.add_argument("--against", metavar="FILE", help="an older profile of the same network, to compare with")
    parser.add_argument("--html", metavar="FILE", help="write the report as one HTML file")
    parser.add_argument("--markdown", metavar="FILE", help="write the report, or the comparison, as Markdown")
    parser.add_argument("--trace", metavar="FILE", help="write the layers as a trace for chrome://tracing or Perfetto")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout, and nothing else")
    args = parser.parse(argv)
    for name in ("html", "trace"):
        if args.against is not None and getattr(args, name) is not None:
            raise UsageError("A comparison has no such form", where=f"--{name}", remedy="leave it or --against out")
    outputs = {
        name: Path(value) for name in ("html", "markdown", "trace") if (value := getattr(args, name)) is not None
    }
    inputs = {"the report": Path(args.report)} | ({"--against": Path(args.against)} if args.against else {})
    check_outputs({f"--{name}": path for name, path in outputs.items()}, inputs)
    if args.against is None:
        return _one(args.report, outputs, args.json)
    return _two(args.report, args.against, outputs.get("markdown"), args.json)


def _one(report: str, outputs: dict[str, Path], as_json: bool) -> int:
    from trtopt.report.read import read_report

    found = read_report(Path(report))
    shown = _written(found, outputs)
    if as_json:
        print_json(found.to_json_dict())
    else:
        print_renderable(shown)
    return 0


def _written(found: Report, outputs: dict[str, Path]) -> RenderableType:
    """Write a report in the forms that are asked for, and give what a terminal shows of it."""
    from trtopt.report import analysis, profile

    if isinstance(found, profile.ProfileReport):
        from trtopt.api_profile import write_profile
        from trtopt.report import profile_terminal

        write_profile(found, **outputs)
        return profile_terminal.render(found)
    forms = {"html"} if isinstance(found, analysis.Analysis) else set()
    for name in sorted(outputs.keys() - forms):
        raise UsageError("A report of this kind has no such form", where=f"--{name}", remedy="leave it out")
    if isinstance(found, analysis.Analysis):
        from trtopt.api_analyze import write_page
        from trtopt.hardware.spec import gpu_of
        from trtopt.report import analysis_terminal

        shown = analysis_terminal.render(found, gpu_of(found.gpu, "gpu"))
        if "html" in outputs:
            write_page(found, outputs["html"])
        return shown
    from trtopt.report import terminal

    return terminal.render(found)


def _two(report: str, against: str, markdown: Path | None, as_json: bool) -> int:
    from trtopt.api_profile import compare_reports
    from trtopt.report import profile_terminal

    found = compare_reports(report, against, markdown=markdown)
    if as_json:
        print_json(found.to_json_dict())
    else:
        print_renderable(profile_terminal.render_comparison(found))
    return 0
