"""``trtopt build``, what it shares with ``trtopt optimize``, and the builds of ``[matrix]`` one after the other."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtopt.cli import trtexec
from trtopt.cli.options import add_config_options, config_from
from trtopt.cli.parser import Parser
from trtopt.cli.streams import (
    Listener,
    gate,
    own_stdout,
    print_error,
    print_json,
    print_notes,
    print_renderable,
    say,
    show,
)
from trtopt.cli.trtexec_flags import FLAGS
from trtopt.config import BuildConfig, flag, options
from trtopt.config.paths import check_files, product_path
from trtopt.config.toml_file import MATRIX, MODEL, load_matrix, matrix_word
from trtopt.errors import TrtoptError, UsageError
from trtopt.support.words import did_you_mean

if TYPE_CHECKING:
    from trtopt.report.schema.build import BuildReport, MatrixBuild

_DESCRIPTION = (
    "Make a TensorRT engine from an ONNX model or a PyTorch module: rewrite, calibrate, verify, compile, and say what "
    "was done."
)
_EPILOG = """\
examples:
  trtopt build model.onnx --int8 --calib samples.npz --eval labelled.npz --metric top1 --max-accuracy-drop 0.01
  trtopt build nets.py:resnet --input image:float32:1x3x224x224 --dynamic image:0=batch:1..16 --int8
  trtopt build model.onnx --fp16 --gpu "RTX 4090" --opt-shapes input:8x3x224x224 --report model.json

Options of trtexec such as --onnx, --saveEngine, --minShapes and --timingCacheFile work too: see
docs/migrating-from-tensorrt-10.md.
"""


def run_pipeline(command: str, parser: Parser, argv: Sequence[str]) -> int:
    """Run ``build`` or ``optimize`` and print its report; returns 0, or 7 when a gate failed."""
    args = parse_arguments(parser, argv)
    print_notes(args)
    builds = load_matrix(Path(args.config), command) if args.config is not None else []
    if builds:
        from trtopt import api

        return run_matrix(command, args, builds, getattr(api, command))
    config = config_from(args, BuildConfig, command)
    if args.model is None:
        parser.error("the following arguments are required: MODEL")
    trtexec.check_calibration(config.calib)
    check_files(args.model, config, args.config, engine=command == "build")

    from trtopt import api
    from trtopt.report.text.build import view

    with Listener.of(args) as listener, own_stdout(quiet=args.json):
        report = getattr(api, command)(args.model, config, on_event=listener)
    show(report, partial(view, verbose=args.verbose), as_json=args.json, warned=True, quiet=args.quiet)
    return gate(report, config)


def pipeline_parser(command: str, description: str, epilog: str) -> Parser:
    """The options of ``build`` or ``optimize``."""
    parser = Parser(f"trtopt {command}", "MODEL [options]", description, epilog, hints=FLAGS)
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="the ONNX file, or a PyTorch module, nets.py:resnet; may stand in [matrix] of --config instead",
    )
    add_config_options(parser, BuildConfig)
    trtexec.add_aliases(parser)
    return parser


def parse_arguments(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """What ``build`` or ``optimize`` is given, in trtexec's spellings too."""
    arguments, notes = trtexec.translated(argv, "build", parser.option_names())
    args = parser.parse(arguments)
    args.notes = [*notes, *args.notes]
    trtexec.resolve(args)
    return args


def make_parser() -> Parser:
    """The options of the command."""
    return pipeline_parser("build", _DESCRIPTION, _EPILOG)


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    return run_pipeline("build", make_parser(), argv)


_SHARED = ("calib_cache", "timing_cache")
"""Files that builds write one after the other; all others are of one build."""


@dataclass(frozen=True)
class _Build:
    """One build: what is varied, as names of files have it; the model; the options."""

    varied: dict[str, str]
    model: str
    config: BuildConfig


def run_matrix(
    command: str, args: argparse.Namespace, combinations: Sequence[Mapping[str, Any]], make: Callable[..., BuildReport]
) -> int:
    """Run every build, whatever becomes of the others, and print a row for each; returns the largest exit code.

    Raises:
        UsageError: An option is wrong, or builds would write the same file: before the first of them.
    """
    builds = [_build(command, args, varied) for varied in combinations]
    _check_names(builds)
    for build in builds:
        trtexec.check_calibration(build.config.calib)
        check_files(build.model, build.config, args.config, engine=command == "build")
    done = []
    for number, build in enumerate(builds, 1):
        words = ", ".join(f"{axis} {value}" for axis, value in build.varied.items())
        if not args.quiet:
            say(f"build {number} of {len(builds)}: {words}", sys.stderr)
        done.append(_run(make, build, args))
    if args.json:
        from trtopt.report.schema.build import matrix_json

        print_json(matrix_json(done))
    elif not args.quiet:
        from trtopt.report.text.build import matrix_table

        print_renderable(matrix_table(done))
    return max(build.exit_code for build in done)


def _build(command: str, args: argparse.Namespace, combination: Mapping[str, Any]) -> _Build:
    """One build; ``{gpu}`` in the name of an output becomes its GPU."""
    for axis in combination:
        if getattr(args, axis, None) is not None:
            what = "MODEL" if axis == MODEL else flag(axis)
            raise UsageError(
                f"{what} is given, and varied by the matrix",
                where=f"{args.config}: [{MATRIX}] {axis}",
                remedy="leave one out",
            )
    model = combination.get(MODEL, args.model)
    if model is None:
        raise UsageError(
            "There is no model",
            where=f"trtopt {command}",
            remedy=f'give MODEL, or model = ["model.onnx"] in [{MATRIX}]',
        )
    config = config_from(
        args, BuildConfig, command, {name: item for name, item in combination.items() if name != MODEL}
    )
    varied = {axis: matrix_word(_stem(item) if axis == MODEL else item) for axis, item in combination.items()}
    names = {"model": matrix_word(_stem(model)), **varied}
    outputs = {
        name: _filled(value, names, name)
        for name, option in options(BuildConfig).items()
        if option.path == "output" and (value := getattr(config, name)) is not None
    }
    return _Build(varied, model, config.with_options(outputs))


def _stem(model: str) -> str:
    return product_path(model).stem


def _filled(template: str, names: Mapping[str, str], option: str) -> str:
    def fill(match: re.Match[str]) -> str:
        name = match[1]
        if name not in names:
            remedy = did_you_mean(name, names) or f"choose among {', '.join(f'{{{item}}}' for item in names)}"
            raise UsageError(f"The matrix does not vary {{{name}}}", where=flag(option), remedy=remedy)
        return names[name]

    return re.sub(r"\{(\w+)\}", fill, template)


def _check_names(builds: Sequence[_Build]) -> None:
    """Raise where two builds would write the same file."""
    taken: dict[Path, str] = {}
    for build in builds:
        files = {
            name: Path(value)
            for name, option in options(BuildConfig).items()
            if option.path == "output" and name not in _SHARED and (value := getattr(build.config, name)) is not None
        }
        files.setdefault("output", product_path(build.model).with_suffix(".engine"))
        for name, path in files.items():
            if path.absolute() in taken:
                raise UsageError(
                    f"Two builds of the matrix would write {path}",
                    where=flag(name),
                    remedy=f"name what is varied in it: {'-'.join(f'{{{axis}}}' for axis in build.varied)}",
                )
            taken[path.absolute()] = name


def _run(make: Callable[..., BuildReport], build: _Build, args: argparse.Namespace) -> MatrixBuild:
    from trtopt.report.schema.build import MatrixBuild

    try:
        with Listener.of(args) as listener, own_stdout(quiet=args.json):
            report = make(build.model, build.config, on_event=listener, isolate=True)
    except TrtoptError as error:
        print_error(error)
        return MatrixBuild(build.varied, error.exit_code, error.what.partition("\n")[0])
    code = gate(report, build.config)
    return MatrixBuild(build.varied, code, "; ".join(report.gate_failures) if code else "", report)
