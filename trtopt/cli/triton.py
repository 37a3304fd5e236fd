"""``trtopt triton``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trtopt.cli.parser import OneOf, Parser
from trtopt.cli.streams import print_json, say

if TYPE_CHECKING:
    from trtopt.serve.triton_repository import TritonReport

_DESCRIPTION = "Write a TensorRT engine or an ONNX model into a model repository of Triton Inference Server."
_EPILOG = """\
examples:
  trtopt triton model.engine -o repository
  trtopt triton model.opt.onnx -o repository --max-batch 32 --max-delay-us 500 --max-queue 256
"""
_SHAPES = ("min", "opt", "max")


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    args = make_parser().parse(argv)

    from trtopt.engine.request import parse_shapes
    from trtopt.serve.triton import TritonConfig
    from trtopt.serve.triton_repository import triton

    options: dict[str, Any] = vars(args)
    for name in (f"{end}_shapes" for end in _SHAPES):
        options[name] = None if options[name] is None else parse_shapes(options[name])
    model, repository, as_json = (options.pop(name) for name in ("model", "output", "json"))
    report = triton(model, repository, TritonConfig(**options))
    if as_json:
        print_json(report.to_json_dict())
    else:
        _print(report)
    return 0


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser("trtopt triton", "ENGINE|MODEL -o REPOSITORY [options]", _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "model", metavar="ENGINE|MODEL", help="an engine of TensorRT with its manifest, or an ONNX model"
    )
    parser.add_argument("-o", "--output", metavar="REPOSITORY", required=True, help="the model repository, a folder")
    parser.add_argument("--name", metavar="NAME", help="the model's name (default: that of the file)")
    parser.add_argument("--version", metavar="N", type=int, help="its version (default: the one after the latest)")
    parser.add_argument(
        "--max-batch", metavar="N", type=int, help="the largest batch, 0 for none (default: the engine's, or 16)"
    )
    parser.add_argument(
        "--max-delay-us", metavar="US", type=int, default=0, help="how long a request waits for others (default: 0)"
    )
    parser.add_argument(
        "--max-queue", metavar="N", type=int, default=0, help="reject requests when N wait (default: never)"
    )
    parser.add_argument("--instances", metavar="N", type=int, default=1, help="instances on each device (default: 1)")
    parser.add_argument(
        "--device", metavar="gpu|cpu", type=OneOf(("gpu", "cpu")), default="gpu", help="what an ONNX model runs on"
    )
    parser.add_argument(
        "--engine-cache", metavar="DIR", help="folder on the server that keeps what TensorRT builds from an ONNX model"
    )
    for end, what in zip(_SHAPES, ("smallest", "best", "largest"), strict=True):
        parser.add_argument(
            f"--{end}-shapes", metavar="S", help=f"the {what} shapes of an ONNX model, name:1x3x224x224"
        )
    parser.add_argument("--json", action="store_true", help="print the report as JSON on stdout, and nothing else")
    return parser


def _print(report: TritonReport) -> None:
    for model in report.models:
        say(f"{model.path}: version {report.version}, {model.backend}")
    if report.max_batch:
        axis = "the first axis" if report.batch_axis is None else f"the axis {report.batch_axis}"
        say(f"batches of up to {report.max_batch} along {axis}")
    else:
        say("no batching: each request is one call of the model")
    if report.profiles > 1:
        say(f"{report.profiles} optimization profiles")
    for note in report.notes:
        say(f"note: {note}")
