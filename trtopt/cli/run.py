"""What ``trtopt build`` and ``trtopt optimize`` share: parse, check the outputs, call the library, print the report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trtopt.cli import trtexec
from trtopt.cli.options import add_config_options, config_from
from trtopt.cli.parser import Parser
from trtopt.cli.streams import Listener, own_stdout, print_json, print_renderable
from trtopt.config import BuildConfig
from trtopt.errors import GateError
from trtopt.outputs import check_files

if TYPE_CHECKING:
    from trtopt.report.records import BuildReport


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
    args, config = parse(command, description, epilog, argv)
    for note in args.notes:
        print(f"note: {note}", file=sys.stderr)
    trtexec.check_calibration(config.calib)
    check_files(args.model, config, args.config, engine=command == "build")

    from trtopt import api

    with Listener(verbose=args.verbose) as listener, own_stdout(quiet=args.json):
        report = getattr(api, command)(args.model, config, on_event=listener)
    _print(report, as_json=args.json)
    return _gate(report, config)


def parse(command: str, description: str, epilog: str, argv: Sequence[str]) -> tuple[argparse.Namespace, BuildConfig]:
    """The parsed arguments and the configuration they make.

    Raises:
        UsageError: An option, the configuration file or a shape is wrong.
    """
    parser = Parser(
        prog=f"trtopt {command}",
        usage=f"trtopt {command} MODEL [options]",
        description=description,
        epilog=epilog,
        refused=trtexec.REFUSED,
    )
    parser.add_argument("model", metavar="MODEL", help="the ONNX file")
    add_config_options(parser, BuildConfig)
    trtexec.add_aliases(parser)
    args = parser.parse(trtexec.model_of(argv))
    trtexec.resolve(args)
    return args, config_from(args, BuildConfig, command)


def _print(report: BuildReport, *, as_json: bool) -> None:
    if as_json:
        print_json(report.to_json_dict())
        return
    from trtopt.report import terminal

    print_renderable(terminal.render(report))


def _gate(report: BuildReport, config: BuildConfig) -> int:
    if not report.gate_failures:
        return 0
    if config.allow_accuracy_loss:
        return 0
    for failure in report.gate_failures:
        print(f"error: a gate failed: {failure}", file=sys.stderr)
    print("  remedy: --allow-accuracy-loss turns failed gates into warnings", file=sys.stderr)
    return GateError.exit_code
