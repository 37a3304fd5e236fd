"""What ``trtopt build`` and ``trtopt optimize`` share: parse, check the outputs, call the library, print the report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trtopt.cli import trtexec
from trtopt.cli.options import add_config_options, config_from
from trtopt.cli.outcome import gate
from trtopt.cli.parser import Parser
from trtopt.cli.streams import Listener, own_stdout, print_json, print_renderable, say
from trtopt.config import BuildConfig
from trtopt.config.paths import check_files
from trtopt.config.toml_file import load_matrix
from trtopt.errors import UsageError

if TYPE_CHECKING:
    from trtopt.report.schema.build import BuildReport


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
        from trtopt.cli.matrix import run_matrix

        return run_matrix(command, args, builds)
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

    with Listener(verbose=args.verbose) as listener, own_stdout(quiet=args.json):
        report = getattr(api, command)(args.model, config, on_event=listener)
    _print(report, as_json=args.json)
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


def _print(report: BuildReport, *, as_json: bool) -> None:
    if as_json:
        print_json(report.to_json_dict())
        return
    from trtopt.report.text import build

    print_renderable(build.render(report))
