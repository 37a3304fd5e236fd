"""``trtopt profile``."""

from __future__ import annotations

from collections.abc import Sequence

from trtopt.cli.analyze import run_study
from trtopt.cli.options import add_config_options
from trtopt.cli.parser import Parser
from trtopt.cli.trtexec import translated
from trtopt.cli.trtexec_flags import FLAGS
from trtopt.config import ProfileConfig

_DESCRIPTION = "Put the measured time of every layer beside its prediction, with reasons for what deviates."
_EPILOG = """\
examples:
  trtopt profile model.engine --html model.html
  trtopt profile model.onnx --backend onnxruntime
  trtopt profile model.engine --warmup 500 --iterations 1000 --data-transfers --export-times times.json
  trtopt profile --layer-info layers.json --layer-profile profile.json --times times.json --gpu A100

Options of trtexec such as --loadEngine, --warmUp and --exportTimes work too: see docs/migrating-from-tensorrt-10.md.
"""


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        "trtopt profile",
        "ENGINE|MODEL [options]\n"
        "       trtopt profile [MODEL] --layer-info FILE --layer-profile FILE --gpu NAME [options]",
        _DESCRIPTION,
        _EPILOG,
        hints=FLAGS,
    )
    parser.add_argument(
        "model",
        metavar="ENGINE|MODEL",
        nargs="?",
        help="the engine or the ONNX file; with --layer-info, the ONNX file that the engine was built from",
    )
    add_config_options(parser, ProfileConfig)
    return parser


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = make_parser()
    arguments, notes = translated(argv, "profile", parser.option_names())
    args = parser.parse(arguments)
    args.notes = [*notes, *args.notes]
    return run_study("profile", args, ProfileConfig, argv)
