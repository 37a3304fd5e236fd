"""``trtopt explain [RULE]``: the rules behind the findings of ``trtopt analyze`` and ``trtopt profile``."""

from __future__ import annotations

from collections.abc import Sequence

from trtopt.cli.parser import Parser
from trtopt.cli.streams import print_json, print_renderable
from trtopt.errors import UsageError
from trtopt.report.text.blocks import table
from trtopt.support.words import did_you_mean

_SCHEMA = "trtopt.rules/1"


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        "trtopt explain", description="The rules behind the findings of 'trtopt analyze' and 'trtopt profile'."
    )
    parser.add_argument("rule", metavar="RULE", nargs="?", help="the rule to explain; without one, all are listed")
    parser.add_argument("--list", action="store_true", help="list all rules, as without RULE")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    args = make_parser().parse(argv)

    from trtopt.profiling.explain import PAGES
    from trtopt.roofline.rules.registry import PAGES as RULE_PAGES

    every = dict(RULE_PAGES)
    for name, page in PAGES.items():
        every[name] = f"{every[name]}\n\nOf a layer in a profile: {page}" if name in every else page
    if args.rule is not None and args.list:
        raise UsageError("--list lists all rules", where=f"trtopt explain {args.rule} --list", remedy="leave out one")
    if args.rule is not None and args.rule not in every:
        raise UsageError(
            f"There is no rule named {args.rule!r}",
            where="trtopt explain",
            remedy=did_you_mean(args.rule.lower(), every) or "trtopt explain lists them all",
        )
    pages = {args.rule: every[args.rule]} if args.rule else every
    if args.json:
        rules = [{"name": name, "summary": text.partition("\n")[0], "page": text} for name, text in pages.items()]
        print_json({"schema": _SCHEMA, "rules": rules})
    elif args.rule:
        print(f"{args.rule}\n\n{pages[args.rule]}")
    else:
        _list(pages)
    return 0


def _list(pages: dict[str, str]) -> None:
    print_renderable(
        table(("rule", "what it finds"), [(name, text.partition("\n")[0]) for name, text in pages.items()])
    )
    print("\n'trtopt explain RULE' shows what a rule looks for, why, an example and the remedy.")
