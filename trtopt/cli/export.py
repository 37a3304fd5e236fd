"""``trtopt export``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtopt.cli.parser import Parser
from trtopt.cli.streams import Listener, print_renderable
from trtopt.config.base import DYNAMIC_HELP, DYNAMIC_METAVAR, INPUT_HELP, INPUT_METAVAR
from trtopt.report.text.blocks import pairs

if TYPE_CHECKING:
    from trtopt.source.pytorch import ExportRecord

_DESCRIPTION = "Make an ONNX model from a PyTorch module, and check it against PyTorch before it is written."
_EPILOG = """\
TARGET is package.module:attribute or file.py:attribute, a module, a class or a function that makes one without
arguments, or an exported program, file.pt2. It is your code, and it is run.

example:
  trtopt export nets.py:resnet -o resnet.onnx --input image:float32:1x3x224x224 --dynamic image:0=batch:1..16
"""


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser("trtopt export", "TARGET -o MODEL [options]", _DESCRIPTION, _EPILOG)
    parser.add_argument("target", metavar="TARGET", help="what to export")
    parser.add_argument("-o", "--output", metavar="MODEL", required=True, help="the ONNX file to write")
    parser.add_argument("--input", metavar=INPUT_METAVAR, action="append", default=[], help=INPUT_HELP)
    parser.add_argument("--dynamic", metavar=DYNAMIC_METAVAR, action="append", default=[], help=DYNAMIC_HELP)
    parser.add_argument(
        "--output-names",
        metavar="NAME,...",
        default="",
        help="names of all outputs, in their order; without, the fields of what the module gives",
    )
    parser.add_argument("--opset", metavar="N", type=int, help="the opset of the ONNX model")
    return parser


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    args = make_parser().parse(argv)

    from trtopt import api

    options: dict[str, Any] = {} if args.opset is None else {"opset": args.opset}
    if args.output_names:
        options["output_names"] = args.output_names.split(",")
    with Listener() as listener:
        record = api.export(
            args.target, args.output, inputs=args.input, dynamic=args.dynamic, on_event=listener, **options
        )
    _print(record)
    return 0


def _print(record: ExportRecord) -> None:
    rows = [("written", f"{Path(record.path)}: opset {record.opset}, {record.nodes} nodes")]
    for spec in record.inputs:
        rows.append(("input", f"{spec.name} {spec.dtype} [{', '.join(map(str, spec.shape))}]"))
    rows += [("output", name) for name in record.outputs]
    for check in record.checks:
        text = f"{check.inputs} inputs, largest difference {check.max_abs:.3g} ({check.max_ratio:.1g} of the output)"
        rows.append(("checked", f"against PyTorch: {text}"))
    print_renderable(pairs(rows))
