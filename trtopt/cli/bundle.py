"""``trtopt bundle``."""

from __future__ import annotations

from collections.abc import Sequence

from trtopt.cli.parser import Parser
from trtopt.cli.streams import print_json, say

_DESCRIPTION = "Put an engine and all that belongs to it into one folder, which `trtopt check` checks as a whole."
_EPILOG = """\
examples:
  trtopt build model.onnx --int8 --calib samples.npz --report model.json
  trtopt bundle model.rtx.engine --report model.json -o model.bundle
  trtopt check model.bundle
"""


def run(argv: Sequence[str]) -> int:
    """Run the command; returns 0."""
    args = make_parser().parse(argv)

    from trtopt.serve.bundle import bundle

    found = bundle(args.engine, args.report, args.output, sign=args.sign)
    if args.json:
        print_json(found.to_json_dict())
    else:
        say(f"{args.output}: {len(found.files)} files, the engine in {found.engine}")
        say(f"made by: {found.command}")
    return 0


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser("trtopt bundle", "ENGINE --report REPORT.json -o FOLDER [options]", _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "engine", metavar="ENGINE", help="an engine, or the ONNX model of --epcontext, with its manifest"
    )
    parser.add_argument("--report", metavar="FILE", required=True, help="the report of its build")
    parser.add_argument(
        "-o", "--output", metavar="FOLDER", required=True, help="the bundle, a folder that is not there"
    )
    parser.add_argument("--sign", metavar="KEY.pem", help="private key (Ed25519, PEM) to sign the bundle with")
    parser.add_argument("--json", action="store_true", help="print the bundle's index as JSON, and nothing else")
    return parser
