"""``trtopt sensitivity``."""

from __future__ import annotations

from collections.abc import Sequence

from trtopt.cli.analyze import run_study
from trtopt.cli.options import add_config_options
from trtopt.cli.parser import Parser
from trtopt.config import SensitivityConfig

_DESCRIPTION = "Measure what each region of a model costs in accuracy when it alone becomes 8-bit."
_EPILOG = """\
examples:
  trtopt sensitivity model.onnx --calib samples.npz
  trtopt sensitivity model.onnx --calib samples.npz --fp8 --html model.html
"""


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser("trtopt sensitivity", "MODEL [options]", _DESCRIPTION, _EPILOG)
    parser.add_argument("model", metavar="MODEL", help="the ONNX file, or nets.py:resnet with --input")
    add_config_options(parser, SensitivityConfig)
    return parser


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    return run_study("sensitivity", make_parser().parse(argv), SensitivityConfig, argv)
