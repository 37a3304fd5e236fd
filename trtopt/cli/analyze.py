"""``trtopt analyze``."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from trtopt.cli.options import Parser, add_config_options, config_from
from trtopt.cli.streams import Listener, own_stdout, print_notes, show
from trtopt.config import AnalyzeConfig
from trtopt.config.paths import check_files

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
    args = make_parser().parse(argv)
    print_notes(args)
    config = config_from(args, AnalyzeConfig, "analyze")
    check_files(args.model, config, args.config)
    # Graphs are many small objects that live until the end: collecting at every 700 of them takes a fifth of the time.
    gc.set_threshold(_COLLECT_EVERY)

    from trtopt.analysis.analyze import analyze

    with Listener.of(args) as listener, own_stdout(quiet=args.json):
        analysis = analyze(args.model, config, on_event=listener)
    gc.freeze()  # a last collection of the whole graph would only delay the end of the process
    show(analysis, as_json=args.json, warned=True, quiet=args.quiet)
    return 0
