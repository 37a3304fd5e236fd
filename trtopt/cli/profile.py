"""``trtopt profile``."""

from __future__ import annotations

from collections.abc import Sequence

from trtopt.cli.options import add_config_options, config_from
from trtopt.cli.parser import Parser
from trtopt.cli.streams import Listener, own_stdout, print_json, print_renderable
from trtopt.config import ProfileConfig
from trtopt.config.paths import check_files

_DESCRIPTION = "Put the measured time of every layer beside its prediction, with reasons for what deviates."
_EPILOG = """\
examples:
  trtopt profile model.engine --html model.html
  trtopt profile model.onnx --backend onnxruntime
  trtopt profile --layer-info layers.json --layer-profile profile.json --times times.json --gpu A100
"""


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = Parser(
        prog="trtopt profile",
        usage="trtopt profile ENGINE|MODEL [options]\n"
        "       trtopt profile [MODEL] --layer-info FILE --layer-profile FILE --gpu NAME [options]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument(
        "target",
        metavar="ENGINE|MODEL",
        nargs="?",
        help="the engine or the ONNX file; with --layer-info, the ONNX file that the engine was built from",
    )
    add_config_options(parser, ProfileConfig)
    args = parser.parse(argv)
    config = config_from(args, ProfileConfig, "profile")
    check_files(args.target, config, args.config)

    from trtopt.analysis.profile import profile

    with Listener(verbose=args.verbose) as listener, own_stdout(quiet=args.json):
        found = profile(args.target, config, on_event=listener)
    if args.json:
        print_json(found.to_json_dict())
        return 0

    from trtopt.report.text import profile as profile_terminal

    print_renderable(profile_terminal.render(found))
    return 0
