"""``trtopt analyze``."""

from __future__ import annotations

import argparse
import gc
import importlib
from collections.abc import Sequence
from typing import Any

from trtopt.cli.options import add_config_options, as_typed, config_from
from trtopt.cli.parser import Parser
from trtopt.cli.streams import Listener, own_stdout, print_notes, show
from trtopt.config import AnalyzeConfig
from trtopt.config.paths import check_files
from trtopt.errors import TrtoptError

_COLLECT_EVERY = 100_000
"""New objects between two runs of the garbage collector."""

_DESCRIPTION = "Predict the time of every layer of an ONNX model on a GPU, what limits it, and what to change."
_EPILOG = """\
examples:
  trtopt analyze model.onnx --gpu "RTX 4090" --precision int8
  trtopt analyze model.onnx --gpu T4 --shapes input:8x3x224x224 --compile --html model.html
  trtopt analyze model.onnx --batch-sweep 1..256 --latency-budget 5 --json
"""


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser("trtopt analyze", "MODEL [options]", _DESCRIPTION, _EPILOG)
    parser.add_argument("model", metavar="MODEL", help="the ONNX file, or nets.py:resnet with --input")
    add_config_options(parser, AnalyzeConfig)
    return parser


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    # Graphs are many small objects that live until the end: collecting at every 700 of them takes a fifth of the time.
    gc.set_threshold(_COLLECT_EVERY)
    return run_study("analyze", make_parser().parse(argv), AnalyzeConfig, argv)


def run_study(command: str, args: argparse.Namespace, kind: type[Any], argv: Sequence[str]) -> int:
    """Run ``analyze``, ``sensitivity`` or ``profile`` of ``args.model`` with options of ``kind``, and print its report;
    returns 0. Errors name options as ``argv`` does."""
    print_notes(args)
    try:
        config = config_from(args, kind, command)
        check_files(args.model, config, args.config)
        study = getattr(importlib.import_module(f"trtopt.analysis.{command}"), command)
        with Listener.of(args) as listener, own_stdout(quiet=args.json):
            found = study(args.model, config, on_event=listener)
    except TrtoptError as error:
        as_typed(error, kind, argv)
        raise
    gc.freeze()  # a last collection of the whole graph would only delay the end of the process
    show(found, as_json=args.json, warned=True, quiet=args.quiet)
    return 0
