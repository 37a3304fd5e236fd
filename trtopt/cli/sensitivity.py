"""``trtopt sensitivity``."""

from __future__ import annotations

from collections.abc import Sequence

from trtopt.cli.options import Parser, add_config_options, config_from
from trtopt.cli.streams import Listener, own_stdout, show
from trtopt.config import SensitivityConfig
from trtopt.config.paths import check_files

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
    args = make_parser().parse(argv)
    config = config_from(args, SensitivityConfig, "sensitivity")
    check_files(args.model, config, args.config)

    from trtopt.analysis.sensitivity import sensitivity

    with Listener.of(args) as listener, own_stdout(quiet=args.json):
        found = sensitivity(args.model, config, on_event=listener)
    show(found, as_json=args.json, warned=True, quiet=args.quiet)
    return 0
