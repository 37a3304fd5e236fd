"""``trtopt check``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from trtopt.cli.parser import Parser
from trtopt.cli.streams import show
from trtopt.config.base import share
from trtopt.errors import GateError, UsageError

_DESCRIPTION = (
    "Judge a report of build, optimize, analyze or profile by thresholds and by a baseline report; or verify an engine "
    "by its manifest."
)
_EPILOG = """\
Against a baseline every gate has a default, which a threshold replaces: see
docs/check.md.

examples:
  trtopt check model.json --baseline main.json --markdown comment.md --junit gates.xml
  trtopt check model.json --max-accuracy-drop 0.01 --min-share int8=0.5 --max-kernels 60
  trtopt check model.rtx.engine --key key.pub.pem
"""

_OF_REPORTS = (
    *("baseline", "max_accuracy_drop", "max_latency_regress", "min_share", "max_bytes", "max_kernels"),
    *("allow_synthetic", "html", "markdown", "junit"),
)
"""What an engine by itself cannot be asked."""


def run(argv: Sequence[str]) -> int:
    """Run the command; returns 0, or 7 when a gate failed."""
    args = make_parser().parse(argv)

    from trtopt.engine.backend import is_engine
    from trtopt.engine.manifest import manifest_path

    path = Path(args.report)
    if path.is_dir():
        return _verify_bundle(args)
    if path.name and (os.path.lexists(manifest_path(path)) or is_engine(path)):
        return _verify(args)
    if args.key is not None:
        raise UsageError("Only an engine is signed", where="--key", remedy="name an engine, or leave the key out")

    from trtopt.gates.check import Limits, check

    limits = Limits(
        max_accuracy_drop=args.max_accuracy_drop,
        max_latency_regress=args.max_latency_regress,
        min_share=dict(args.min_share),
        max_bytes=args.max_bytes,
        max_kernels=args.max_kernels,
        allow_synthetic=args.allow_synthetic,
    )
    forms = {name: getattr(args, name) for name in ("html", "markdown", "junit")}
    found = check(args.report, baseline=args.baseline, limits=limits, **forms)
    show(found, as_json=args.json)
    return GateError.exit_code if found.failed else 0


def _verify(args: argparse.Namespace) -> int:
    """Check an engine against its manifest, and say what it was built by and for; returns 0."""
    _refuse_gates(args)

    from trtopt.engine.manifest import verify
    from trtopt.report.text.check import engine_view

    manifest = verify(args.report, key=args.key)
    show(manifest, lambda found: engine_view(found, key=args.key), as_json=args.json)
    return 0


def _verify_bundle(args: argparse.Namespace) -> int:
    """Check every file of a bundle, and say what is in it; returns 0."""
    _refuse_gates(args)

    from trtopt.report.text.check import bundle_view
    from trtopt.serve.bundle import open_bundle

    index, engine = open_bundle(args.report, key=args.key)
    manifest = engine.manifest
    if manifest is None:
        raise ValueError("the engine of a bundle has a manifest")
    rows = [(file.name, file.bytes) for file in index.files]
    show(index, lambda found: bundle_view(found.command, rows, manifest, key=args.key), as_json=args.json)
    return 0


def _refuse_gates(args: argparse.Namespace) -> None:
    given = [name for name in _OF_REPORTS if getattr(args, name) not in (None, False, [])]
    if given:
        where = f"--{given[0].replace('_', '-')}"
        raise UsageError("An engine has no gates", where=where, remedy="check the report of its build, or leave it out")


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        "trtopt check",
        "REPORT [options]\n       trtopt check ENGINE|BUNDLE [--key FILE] [--json]",
        _DESCRIPTION,
        _EPILOG,
    )
    parser.add_argument(
        "report",
        metavar="REPORT|ENGINE|BUNDLE",
        help="what --report wrote; or an engine, with its manifest; or a bundle",
    )
    parser.add_argument("--key", metavar="FILE", help="public key (Ed25519, PEM) that the engine has to be signed with")
    parser.add_argument("--baseline", metavar="FILE", help="a report of the same kind to compare with")
    gates = parser.add_argument_group("gates")
    gates.add_argument(
        "--max-accuracy-drop",
        metavar="X",
        type=share,
        help="largest drop of the metric (else of agreement or cosine), against FP32 and the baseline; 0.01 or 1%%",
    )
    gates.add_argument(
        "--max-latency-regress",
        metavar="R",
        type=share,
        help="largest growth of predicted or measured time against the baseline; 0.05 or 5%%",
    )
    gates.add_argument(
        "--min-share",
        metavar="DTYPE=R",
        type=_share,
        action="append",
        default=[],
        help="smallest share of a type in what the engine runs, int8=0.5 or int8=50%%; repeat for several types",
    )
    gates.add_argument("--max-bytes", metavar="N", type=int, help="largest engine, in bytes")
    gates.add_argument("--max-kernels", metavar="N", type=int, help="most kernels")
    gates.add_argument("--allow-synthetic", action="store_true", help="accept 8-bit ranges from random data")
    files = parser.add_argument_group("files")
    files.add_argument("--html", metavar="FILE", help="write the result as one HTML file")
    files.add_argument("--markdown", metavar="FILE", help="write the result as Markdown, for a pull request")
    files.add_argument("--junit", metavar="FILE", help="write the result as JUnit XML")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout, and nothing else")
    return parser


def _share(text: str) -> tuple[str, float]:
    """``int8=0.5``."""
    dtype, _, least = text.partition("=")
    try:
        return dtype, share(least)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not TYPE=SHARE, such as int8=0.5") from error
