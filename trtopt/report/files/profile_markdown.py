"""A profile, and a comparison of two, as Markdown for a comment on a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from trtopt.report.schema.comparison import Comparison
from trtopt.report.schema.profile import ProfileReport
from trtopt.report.text import profile as words
from trtopt.report.text.analysis import NO_MORE, shorten, time_text, visible
from trtopt.report.text.numbers import count
from trtopt.report.text.profile import Rows

_MOST_LAYERS = 15
_MOST_REGIONS = 30
_NAME = 60
_LONGEST_MESSAGE = 400

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~@$&-])")
_LINKS = re.compile(r"(?<=@)|(?<=#)|(?<=:)(?=//)|(?<=www)(?=\.)|(?<=:)(?=[\w+-]+:)|(?<=GH-)", re.IGNORECASE)
"""Where GitHub makes mentions, references, addresses and emoji of text, after Markdown has dropped its escapes."""

_NOTHING = "\u200b"
"""A space without width, which parts what would be a link."""


def profile_markdown(report: ProfileReport) -> str:
    """The profile: totals, findings, the slowest layers (GitHub's Markdown)."""
    shown = words.layer_rows(report, _MOST_LAYERS, _NAME, ": ")
    parts = [f"## Profile: {text(words.headline(report))}", _bullets(words.totals(report))]
    parts += [_bullets(words.accuracy(report))] if report.accuracy else []
    parts += [_bullets([("measured under", ", ".join(words.conditions(report)))])] if report.source.conditions else []
    parts += [_warning(line) for line in report.warnings]
    if report.findings:
        lines = (
            f"- **{text(item.rule)}**{f', {time_text(item.gain_us)}' if item.gain_us > 0 else ''}: "
            f"{text(shorten(visible(item.message), _LONGEST_MESSAGE))} *{text(item.remedy)}*"
            for item in report.findings
        )
        parts += ["### Findings", "\n".join(lines)]
    if shown.cells:
        parts += [f"### {count(len(shown.cells), 'slowest layer')}", markdown_table(shown)]
    if len(report.layers) > len(shown.cells):
        parts.append(f"and {count(len(report.layers) - len(shown.cells), 'more layer')}; {NO_MORE}")
    return "\n\n".join(parts) + "\n"


def comparison_markdown(found: Comparison) -> str:
    """The comparison: both sides, and what changed."""
    shown = words.region_rows(found, _MOST_REGIONS, _NAME)
    parts = ["## Two profiles compared", _bullets(words.compared(found))]
    parts += [_warning(line) for line in found.warnings]
    parts += ["### What changed", markdown_table(shown) if shown.cells else "Nothing."]
    left = len(words.changed(found.regions)) - len(shown.cells)
    if left > 0:
        parts.append(f"and {count(left, 'more region')}; {NO_MORE}")
    return "\n\n".join(parts) + "\n"


def text(value: str) -> str:
    """Text in which nothing is taken for markup, a mention or a reference."""
    return _SPECIAL.sub(r"\\\1", _LINKS.sub(_NOTHING, visible(value)))


def _bullets(rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"- {text(name)}: {text(value)}" if name else f"- {text(value)}" for name, value in rows)


def _warning(line: str) -> str:
    return f"> {text(line)}"


def markdown_table(rows: Rows) -> str:
    """A table of GitHub's Markdown."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    rule = ["---:" if index in rows.right else "---" for index in range(len(rows.head))]
    return "\n".join(
        [
            line([text(cell) for cell in rows.head]),
            line(rule),
            *(line([text(cell) for cell in cells]) for cells in rows.cells),
        ]
    )
