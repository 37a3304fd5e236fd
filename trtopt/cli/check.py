"""``trtopt check``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from trtopt.cli.parser import Parser
from trtopt.cli.streams import print_json, print_renderable
from trtopt.errors import GateError
from trtopt.gates.limits import Limits

_DESCRIPTION = "Judge a report of build, optimize, analyze or profile by thresholds and by a baseline report."
_EPILOG = """\
Against a baseline every gate has a default, which a threshold replaces: see
docs/check.md.

examples:
  trtopt check model.json --baseline main.json --markdown comment.md --junit gates.xml
  trtopt check model.json --max-accuracy-drop 0.01 --min-share int8=0.5 --max-kernels 60
"""


def run(argv: Sequence[str]) -> int:
    """Run the command; returns 0, or 7 when a gate failed."""
    args = _parser().parse(argv)
    limits = Limits(
        args.max_accuracy_drop,
        args.max_latency_regress,
        dict(args.min_share),
        args.max_bytes,
        args.max_kernels,
        args.allow_synthetic,
    )

    from trtopt.api_check import check

    found = check(args.report, baseline=args.baseline, limits=limits, markdown=args.markdown, junit=args.junit)
    if args.json:
        print_json(found.to_json_dict())
    else:
        from trtopt.report import check_terminal

        print_renderable(check_terminal.render(found))
    return GateError.exit_code if found.failed else 0


def _parser() -> Parser:
    parser = Parser(
        prog="trtopt check", usage="trtopt check REPORT [options]", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument("report", metavar="REPORT", help="what --report wrote")
    parser.add_argument("--baseline", metavar="FILE", help="a report of the same kind to compare with")
    gates = parser.add_argument_group("gates")
    gates.add_argument(
        "--max-accuracy-drop",
        metavar="X",
        type=float,
        help="largest drop of the metric (else of agreement or cosine), against FP32 and the baseline",
    )
    gates.add_argument(
        "--max-latency-regress",
        metavar="R",
        type=float,
        help="largest growth of predicted or measured time against the baseline; 0.05 is 5 %%",
    )
    gates.add_argument(
        "--min-share",
        metavar="DTYPE=R",
        type=_share,
        action="append",
        default=[],
        help="smallest share of a type in what the engine runs, int8=0.5; repeat for several types",
    )
    gates.add_argument("--max-bytes", metavar="N", type=int, help="largest engine, in bytes")
    gates.add_argument("--max-kernels", metavar="N", type=int, help="most kernels")
    gates.add_argument("--allow-synthetic", action="store_true", help="accept 8-bit ranges from random data")
    files = parser.add_argument_group("files")
    files.add_argument("--markdown", metavar="FILE", help="write the result as Markdown, for a pull request")
    files.add_argument("--junit", metavar="FILE", help="write the result as JUnit XML")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout, and nothing else")
    return parser


def _share(text: str) -> tuple[str, float]:
    """``int8=0.5``."""
    dtype, _, share = text.partition("=")
    try:
        return dtype, float(share)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not TYPE=SHARE, such as int8=0.5") from error
