"""``trtopt recipe list`` and ``trtopt recipe explain NAME``."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trtopt.cli.parser import Parser
from trtopt.cli.streams import print_json, print_renderable, say
from trtopt.errors import UsageError
from trtopt.report.text.blocks import table
from trtopt.support.words import did_you_mean

if TYPE_CHECKING:
    from trtopt.rewrite.protocol import Recipe

_SCHEMA = "trtopt.recipes/1"


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser("trtopt recipe", description="The graph rewrites that 'trtopt build --recipes' chooses from.")
    commands = parser.add_subparsers(dest="action", metavar="list|explain", required=True, parser_class=Parser)
    listing = commands.add_parser("list", help="name all recipes", description="Name all recipes, in their order.")
    listing.add_argument("--json", action="store_true", help="print JSON")
    explaining = commands.add_parser("explain", help="explain one recipe", description="Explain one recipe.")
    explaining.add_argument("name", metavar="NAME", help="the recipe")
    return parser


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    args = make_parser().parse(argv)

    from trtopt.rewrite.registry import all_recipes, broken_packs

    recipes = all_recipes()
    for refusal in broken_packs():
        say(f"warning: {refusal.node} is left out: {refusal.reason}", sys.stderr)
    if args.action == "explain":
        _explain(_named(recipes, args.name))
    elif args.json:
        print_json({"schema": _SCHEMA, "recipes": [_summary(recipe) for recipe in recipes]})
    else:
        _list(recipes)
    return 0


def _named(recipes: Sequence[Recipe], name: str) -> Recipe:
    names = [recipe.name for recipe in recipes]
    if name not in names:
        raise UsageError(
            f"There is no recipe named {name!r}",
            where="trtopt recipe explain",
            remedy=did_you_mean(name, names) or "trtopt recipe list names them all",
        )
    return recipes[names.index(name)]


def _summary(recipe: Recipe) -> dict[str, str | bool]:
    return {
        "name": recipe.name,
        "stage": recipe.stage.name,
        "lossless": recipe.lossless,
        "summary": (inspect.getdoc(type(recipe)) or "").partition("\n")[0],
    }


def _list(recipes: Sequence[Recipe]) -> None:
    summaries = [_summary(recipe) for recipe in recipes]
    rows = [
        (str(item["stage"]), str(item["name"]), "yes" if item["lossless"] else "no", str(item["summary"]))
        for item in summaries
    ]
    print_renderable(table(("stage", "recipe", "lossless", "what it does"), rows))


def _explain(recipe: Recipe) -> None:
    print(f"{recipe.name} (stage {recipe.stage.name}, {'lossless' if recipe.lossless else 'not lossless'})\n")
    print(inspect.getdoc(type(recipe)))
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(recipe) if dataclasses.is_dataclass(recipe) else ()
    options: list[str] = [item.name for item in fields if item.name not in ("name", "stage", "lossless")]
    if options:
        print("Options:")
    for name in options:
        print(f"    {name} = {getattr(recipe, name)!r}")
