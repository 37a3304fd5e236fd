"""Views as Markdown for the comment of a pull request (GitHub's, GitLab's); what is cut here is whole in the JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trtopt.report.schema.analysis import Finding
from trtopt.report.text.blocks import (
    Block,
    Bullets,
    Cell,
    Command,
    Figures,
    Findings,
    Inline,
    Line,
    Pairs,
    Split,
    Table,
    View,
    is_line,
    plain_text,
    typed,
)
from trtopt.report.text.format import percent, time_text, visible

_NAME = 60
_LONGEST_MESSAGE = 400
_SIGNS = {"good": "✅ ", "bad": "❌ ", "none": "➖ "}

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~@$&-])")
_LINKS = re.compile(r"(?<=@)|(?<=#)|(?<=:)(?=//)|(?<=www)(?=\.)|(?<=:)(?=[\w+-]+:)|(?<=GH-)", re.IGNORECASE)
"""Where GitHub makes mentions, references, addresses and emoji of text, after Markdown has dropped its escapes."""

_NOTHING = "\u200b"
"""A space without width, which parts what would be a link."""


def as_markdown(view: View) -> str:
    """The view as GitHub's Markdown."""
    title = ": ".join(filter(None, (view.kind, view.head.text)))
    parts = [
        f"## {_SIGNS.get(view.head.style, '')}{text(title)}",
        *(part for block in view.lead for part in _of(block)),
    ]
    parts += [f"> {text(warning)}" for warning in view.warnings]
    for section in view.parts("text"):
        parts += [f"### {text(section.title)}"] if section.title else []
        parts += [part for block in section.blocks for part in _of(block)]
    return "\n\n".join(parts) + "\n"


def text(value: str) -> str:
    """Text in which nothing is taken for markup, a mention or a reference."""
    return _SPECIAL.sub(r"\\\1", _LINKS.sub(_NOTHING, visible(value)))


def _of(block: Block) -> Iterator[str]:
    if isinstance(block, Line):
        yield ("> " if block.style in ("bad", "warn") else "") + text(block.text)
    elif isinstance(block, Command):
        yield f"```\n{visible(' '.join(typed(block.text))).replace('```', '')}\n```"
    elif isinstance(block, Bullets):
        yield "\n".join(f"- {text(each)}" for each in block.texts)
    elif isinstance(block, Pairs):
        yield "\n".join(
            f"- {text(name)}: {_inline(value)}" if name else f"- {_inline(value)}" for name, value in block.rows
        )
    elif isinstance(block, Figures):
        yield "\n".join(f"- {text(title)}: {text(', '.join(filter(None, rest)))}" for title, *rest in block.rows)
    elif isinstance(block, Split):
        yield "\n".join(
            f"- {text(part.words)}: {text(part.text)}, {percent(part.value / block.total)}"
            for part in block.parts
            if part.value
        )
    elif isinstance(block, Findings):
        yield "\n".join(
            f"- **{text(item.rule)}**{f', {time_text(item.gain_us)}' if item.gain_us > 0 else ''}: "
            f"{text(block.message(item, _LONGEST_MESSAGE))} *{text(item.remedy)}*{_act(item)}"
            for item in block.ordered
        )
    elif isinstance(block, Table):
        yield from _table(block)


def _act(finding: Finding) -> str:
    if not is_line(finding):
        return f" ({text(finding.command)})" if finding.command else ""
    return f" `{visible(' '.join(typed(finding.command))).replace('`', '')}`"


def _table(block: Table) -> Iterator[str]:
    shown, left = block.shown(block.most, ("",))
    head = tuple(text(column.title) for column in shown.columns)
    rule = tuple("---:" if column.style == "number" else "---" for column in shown.columns)
    rows = [tuple(map(_inline, row)) for row in shown.rows]
    yield "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))
    if left:
        yield left


def _inline(item: Inline) -> str:
    sign = _SIGNS.get(item.mark, "") if isinstance(item, Cell) else ""
    return sign + text(plain_text(item, _NAME, ": "))
