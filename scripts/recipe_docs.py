"""Writes docs/recipes.md anew: the introduction as it stands, then what each recipe says of itself.

python scripts/recipe_docs.py
"""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path

from trtopt_recipes import PACK

PAGE = Path(__file__).parents[1] / "docs" / "recipes.md"
MARK = "<!-- below: written by scripts/recipe_docs.py -->\n"


def page(text: str) -> str:
    """The page with everything after the mark written anew."""
    head = text.partition(MARK)[0]
    rows = [f"| [{r.name}](#{r.name}) | {r.stage.name} | {_summary(r)} |" for r in PACK]
    table = ["| recipe | stage | |", "|---|---|---|", *rows]
    return head + MARK + "\n".join(["", *table, "", *(_section(recipe) for recipe in PACK)]).rstrip() + "\n"


def _summary(recipe: object) -> str:
    text = inspect.getdoc(type(recipe)) or ""
    return " ".join(text.partition("\n\n")[0].split())


def _section(recipe: object) -> str:
    text = inspect.getdoc(type(recipe)) or ""
    lines = [f"## {getattr(recipe, 'name', '')}", "", _summary(recipe), ""]
    body = text.partition("\n\n")[2]
    for block in _blocks(body):
        title, _, content = block.partition(":\n")
        lines += [f"**{title}.** {' '.join(textwrap.dedent(content).split())}", ""]
    return "\n".join(lines)


def _blocks(body: str) -> list[str]:
    blocks: list[list[str]] = []
    for line in body.splitlines():
        if line and not line.startswith(" ") and line.endswith(":"):
            blocks.append([])
        if blocks:
            blocks[-1].append(line)
    return ["\n".join(block) for block in blocks]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
