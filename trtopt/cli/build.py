"""``trtopt build``, and what it shares with ``trtopt optimize``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trtopt.cli import trtexec
from trtopt.cli.options import Parser, add_config_options, config_from
from trtopt.cli.outcome import gate
from trtopt.cli.streams import Listener, own_stdout, say, show
from trtopt.config import BuildConfig
from trtopt.config.paths import check_files
from trtopt.config.toml_file import load_matrix
from trtopt.errors import UsageError

if TYPE_CHECKING:
    pass


_DESCRIPTION = "Make a TensorRT engine from an ONNX model: rewrite, calibrate, verify, compile, and say what was done."
_EPILOG = """\
examples:
  trtopt build model.onnx --int8 --calib samples.npz --eval labelled.npz --metric top1 --max-accuracy-drop 0.01
  trtopt build model.onnx --fp16 --gpu "RTX 4090" --opt-shapes input:8x3x224x224 --report model.json

Options of trtexec such as --onnx, --saveEngine, --minShapes and --timingCacheFile work too: see
docs/migrating-from-tensorrt-10.md.
"""


def run_pipeline(command: str, description: str, epilog: str, argv: Sequence[str]) -> int:
    """Run ``build`` or ``optimize`` and print its report.

    Args:
        command: ``build`` or ``optimize``.
        description: The first lines of ``--help``.
        epilog: The last lines of ``--help``.
        argv: The arguments after the command.

    Returns:
        0, or 7 when a gate failed.

    Raises:
        TrtoptError: The command failed.
    """
    args = parse_arguments(command, description, epilog, argv)
    for note in args.notes:
        say(f"note: {note}", sys.stderr)
    builds = load_matrix(Path(args.config), command) if args.config is not None else []
    if builds:
        from trtopt import api
        from trtopt.cli.matrix import run_matrix

        return run_matrix(command, args, builds, getattr(api, command))
    config = config_from(args, BuildConfig, command)
    if args.model is None:
        raise UsageError(
            "The following arguments are required: MODEL",
            where=f"trtopt {command}",
            remedy=f"see trtopt {command} --help",
        )
    trtexec.check_calibration(config.calib)
    check_files(args.model, config, args.config, engine=command == "build")

    from trtopt import api
    from trtopt.report.text.build import render

    with Listener(verbose=args.verbose) as listener, own_stdout(quiet=args.json):
        report = getattr(api, command)(args.model, config, on_event=listener)
    show(report, render, as_json=args.json)
    return gate(report, config)


def parse(command: str, description: str, epilog: str, argv: Sequence[str]) -> tuple[argparse.Namespace, BuildConfig]:
    """The parsed arguments and the configuration they make, without the matrix of the configuration file.

    Raises:
        UsageError: An option, the configuration file or a shape is wrong.
    """
    args = parse_arguments(command, description, epilog, argv)
    return args, config_from(args, BuildConfig, command)


def parse_arguments(command: str, description: str, epilog: str, argv: Sequence[str]) -> argparse.Namespace:
    """The parsed arguments.

    Raises:
        UsageError: An option is wrong.
    """
    parser = Parser(
        prog=f"trtopt {command}",
        usage=f"trtopt {command} MODEL [options]",
        description=description,
        epilog=epilog,
        refused=trtexec.REFUSED,
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="the ONNX file; may stand in [matrix] of --config instead"
    )
    add_config_options(parser, BuildConfig)
    trtexec.add_aliases(parser)
    args = parser.parse(trtexec.model_of(argv))
    trtexec.resolve(args)
    return args


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    return run_pipeline("build", _DESCRIPTION, _EPILOG, argv)
