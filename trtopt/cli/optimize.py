"""``trtopt optimize``."""

from __future__ import annotations

from collections.abc import Sequence

from trtopt.cli.build import pipeline_parser, run_pipeline
from trtopt.cli.parser import Parser

_DESCRIPTION = "Make an optimized ONNX model: everything 'trtopt build' does but the engine."
_EPILOG = """\
The tensors keep the types they have unless a precision is given.

example:
  trtopt optimize model.onnx -o model.int8.onnx --int8 --calib samples.npz
"""


def make_parser() -> Parser:
    """The options of the command."""
    return pipeline_parser("optimize", _DESCRIPTION, _EPILOG)


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    return run_pipeline("optimize", make_parser(), argv)
