"""``trtopt diff``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trtopt.cli.options import add_config_options, config_from, from_zero
from trtopt.cli.parser import Parser
from trtopt.cli.streams import Listener, own_stdout, print_json, say, show
from trtopt.config import BuildConfig
from trtopt.config.toml_file import MODEL, load_matrix
from trtopt.errors import GateError, UsageError
from trtopt.report.schema.diff import DiffReport
from trtopt.support.files import check_outputs

_DESCRIPTION = "Build a model with two compilers, and say by its nodes what differs: kernels, bytes, types, time."
_EPILOG = """\
A compiler is tensorrt-rtx==1.6 (two to four parts; installed on first use
into an environment of its own, which is kept in the cache), 'installed', or
the report of a build. Recipes are left out unless --recipes says otherwise, so
that both compile the same graph.

examples:
  trtopt diff model.onnx --compiler tensorrt-rtx==1.6 --compiler tensorrt-rtx==1.7.1
  trtopt diff model.onnx --int8 --calib samples.npz --compiler tensorrt-rtx==1.6 --compiler installed
  trtopt diff before.json after.json --markdown diff.md
"""
_FORMS = ("report", "html", "markdown")


def run(argv: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    parser = make_parser()
    args = parser.parse(argv)
    _name_sides(parser, args)
    outputs = {name: Path(value) for name in _FORMS if (value := getattr(args, name, None)) is not None}
    for name in _FORMS:
        args.__dict__.pop(name, None)
    builds = [] if args.config is None else load_matrix(Path(args.config), "build")
    if builds:
        return _run_matrix(args, builds, outputs)
    config = _config(args)
    inputs = {"the model": Path(args.model)} if args.model is not None else {}
    check_outputs({f"--{name}": path for name, path in outputs.items()}, inputs)

    from trtopt.fleet.diff import diff
    from trtopt.report.files import write_forms
    from trtopt.report.html.page import check_html

    check_html(outputs.get("html"))
    with Listener.of(args) as listener, own_stdout(quiet=args.json):
        found = diff(args.model, args.compiler, config, max_slowdown=args.max_slowdown, on_event=listener)
    write_forms(found, **outputs)
    show(found, as_json=args.json, quiet=args.quiet)
    return _exit_code(found)


def _name_sides(parser: Parser, args: argparse.Namespace) -> None:
    """Take two files without ``--compiler`` for the reports, and else one for the model."""
    if len(args.models) == 2 and not args.compiler:
        args.compiler, args.models = args.models, []
    elif len(args.models) > 1:
        parser.error(f"one model, or two reports without --compiler, not {len(args.models)} files")
    args.model = args.models[0] if args.models else None
    del args.models


def _exit_code(found: DiffReport) -> int:
    """7 where the second is slower than may be or alone refused; that of the build where neither made an engine."""
    failures = [side.failure for side in (found.before, found.after)]
    codes = [failure.exit_code for failure in failures if failure is not None]
    return max(codes) if len(codes) == len(failures) else GateError.exit_code if found.is_failed else 0


def _config(args: argparse.Namespace, varied: Mapping[str, Any] | None = None) -> BuildConfig:
    """The options of the builds; without recipes where nothing is said of them."""
    config = config_from(args, BuildConfig, "build", varied)
    is_said = hasattr(args, "recipes") or args.config is not None or args.model is None
    return config if is_said else config.with_options({"recipes": "none"})


def _run_matrix(args: argparse.Namespace, builds: Sequence[Mapping[str, Any]], outputs: Mapping[str, Path]) -> int:
    """Compare for every combination of ``[matrix]``, and print the verdict of each; returns the largest code."""
    from trtopt.fleet.diff import diff
    from trtopt.report.text.diff import headline

    for name in outputs:
        raise UsageError(
            "Several comparisons have no such form", where=f"--{name}", remedy="leave it out; --json has all"
        )
    found = []
    for varied in builds:
        config = _config(args, {name: value for name, value in varied.items() if name != MODEL})
        with Listener.of(args) as listener, own_stdout(quiet=args.json):
            model = varied.get(MODEL, args.model)
            found.append(diff(model, args.compiler, config, max_slowdown=args.max_slowdown, on_event=listener))
        if not args.json:
            words = ", ".join(f"{name} {value}" for name, value in varied.items())
            say(f"{words}: {headline(found[-1])}")
    if args.json:
        print_json({"schema": "trtopt.diffs/1", "diffs": [item.to_json_dict() for item in found]})
    return max(map(_exit_code, found), default=0)


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        "trtopt diff",
        "MODEL --compiler A --compiler B [options]\n       trtopt diff A.json B.json [options]",
        _DESCRIPTION,
        _EPILOG,
    )
    parser.add_argument("models", metavar="MODEL", nargs="*", help="the ONNX file, or two reports of builds")
    parser.add_argument(
        "--compiler", metavar="NAME", action="append", default=[], help="tensorrt-rtx==VERSION, installed, or a report"
    )
    parser.add_argument(
        "--max-slowdown",
        metavar="R",
        type=from_zero,
        help="fail (exit code 7) when the second is slower; 0.05 or 5%%",
    )
    add_config_options(parser, BuildConfig)
    return parser
