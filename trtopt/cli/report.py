"""``trtopt report``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trtopt.cli.parser import Parser
from trtopt.cli.streams import print_json, print_renderable
from trtopt.errors import UsageError
from trtopt.files import check_outputs

_DESCRIPTION = "Show a profile that was written with --report, in other forms, or what changed against another."
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
    parser.add_argument("report", metavar="REPORT", help="what 'trtopt profile --report' wrote")
    parser.add_argument("--against", metavar="FILE", help="an older report of the same network, to compare with")
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
    from trtopt.api_profile import write_profile
    from trtopt.report import profile_terminal
    from trtopt.report.read import read_profile

    found = read_profile(Path(report))
    write_profile(found, **outputs)
    if as_json:
        print_json(found.to_json_dict())
    else:
        print_renderable(profile_terminal.render(found))
    return 0


def _two(report: str, against: str, markdown: Path | None, as_json: bool) -> int:
    from trtopt.api_profile import compare_reports
    from trtopt.report import profile_terminal

    found = compare_reports(report, against, markdown=markdown)
    if as_json:
        print_json(found.to_json_dict())
    else:
        print_renderable(profile_terminal.render_comparison(found))
    return 0
