"""``trtopt calibrate-gpu``."""

from __future__ import annotations

from collections.abc import Sequence

from trtopt.cli.parser import Parser
from trtopt.cli.streams import print_error, show
from trtopt.errors import GateError

_DESCRIPTION = "Fit the predictions for a GPU to layers measured on it, and keep that in a configuration file."
_EPILOG = """\
examples:
  trtopt calibrate-gpu layers.json profile.json --gpu "RTX 4090"
  trtopt calibrate-gpu profile-report.json --name my-4090 -o trtopt.toml
  trtopt analyze model.onnx --gpu my-4090 --config trtopt.toml
"""


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser("trtopt calibrate-gpu", "PROFILE... [options]", _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "profiles",
        metavar="PROFILE",
        nargs="+",
        help="what trtexec --exportLayerInfo and --exportProfile wrote, or a report of trtopt profile",
    )
    parser.add_argument("--gpu", metavar="NAME", help="the GPU that was measured (default: as the report says)")
    parser.add_argument("--name", metavar="NAME", help="the name to keep it under (default: that of the GPU)")
    parser.add_argument("-o", "--output", metavar="FILE.toml", default="trtopt.toml", help="the configuration file")
    parser.add_argument("--json", action="store_true", help="print the report as JSON on stdout, and nothing else")
    return parser


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    args = make_parser().parse(argv)

    from trtopt.analysis.calibrate_gpu import calibrate_gpu
    from trtopt.report.text.calibration import view
    from trtopt.report.text.format import percent, some

    found = calibrate_gpu(args.profiles, gpu=args.gpu, name=args.name, output=args.output)
    show(found, view, as_json=args.json)
    if found.written:
        return 0
    errors = f"from {percent(found.calibration.error_before)} to {percent(found.calibration.error_after)}"
    print_error(
        GateError(
            f"The error on layers left out would go {errors}, not a twentieth less: nothing was written",
            where=some(args.profiles),
            remedy="the predictions are as good as a calibration can make them; more and other layers may change that",
        )
    )
    return GateError.exit_code
