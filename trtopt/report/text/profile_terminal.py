"""A profile, and a comparison of two, as a terminal shows them. Everything that is cut here is whole in the JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtopt.report.text import profile as words
from trtopt.report.text.analysis import NO_MORE, shorten, time_text, visible
from trtopt.report.text.numbers import count, decibels, pairs, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from trtopt.report.schema.analysis import Finding
    from trtopt.report.schema.comparison import Comparison
    from trtopt.report.schema.profile import ProfileReport

_MOST_LAYERS = 15
_MOST_REGIONS = 25
_NAME = 36
_LONGEST_MESSAGE = 600


def render(report: ProfileReport) -> RenderableType:
    """The profile, to be printed by a ``rich`` console of 80 columns or more."""
    return _sections(
        words.headline(report),
        (
            ("Time", [pairs(words.totals(report))]),
            ("Conditions", _conditions(report)),
            ("Outputs against FP32", _accuracy(report)),
            ("Slowest layers", _layers(report)),
            ("Findings", _findings(report.findings)),
            ("Warnings", _warnings(report.warnings)),
        ),
    )


def render_comparison(found: Comparison) -> RenderableType:
    """The comparison, likewise."""
    from rich.text import Text

    shown = words.region_rows(found, _MOST_REGIONS, _NAME)
    left = len(words.changed(found.regions)) - len(shown.cells)
    body: list[RenderableType] = [table(shown.head, shown.cells, right=shown.right)] if shown.cells else []
    if left > 0:
        body.append(Text(f"and {count(left, 'more region')}; {NO_MORE}"))
    return _sections(
        "Two profiles compared",
        (
            ("Time", [pairs(words.compared(found))]),
            ("What changed, the most time first", body or [Text("nothing")]),
            ("Warnings", _warnings(found.warnings)),
        ),
    )


def _sections(title: str, sections: Sequence[tuple[str, Sequence[RenderableType]]]) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    parts: list[RenderableType] = [Text(title, style="bold")]
    for heading, body in sections:
        if body:
            parts += [Text(""), Text(heading, style="bold")]
            parts += [Padding(item, (0, 0, 0, 2), expand=False) for item in body]
    return Group(*parts)


def _conditions(report: ProfileReport) -> list[RenderableType]:
    rows = [(key.replace("_", " "), visible(str(value))) for key, value in report.source.conditions.items()]
    return [pairs(rows)] if rows else []


def _accuracy(report: ProfileReport) -> list[RenderableType]:
    if not report.accuracy:
        return []
    rows = [(shorten(visible(name), _NAME), decibels(item.sqnr_db)) for name, item in report.accuracy.items()]
    return [table(("output", "SQNR"), rows, right=(1,))]


def _layers(report: ProfileReport) -> list[RenderableType]:
    from rich.text import Text

    shown = words.layer_rows(report, _MOST_LAYERS, _NAME, "\n> ")
    if not shown.cells:
        return []
    body: list[RenderableType] = [table(shown.head, shown.cells, right=shown.right)]
    if len(report.layers) > len(shown.cells):
        body.append(Text(f"and {count(len(report.layers) - len(shown.cells), 'more layer')}; {NO_MORE}"))
    return body


def _findings(findings: Sequence[Finding]) -> list[RenderableType]:
    from rich.text import Text

    rows = [
        (
            f"-{time_text(item.gain_us)}" if item.gain_us > 0 else item.severity,
            f"{item.rule}: {shorten(visible(item.message), _LONGEST_MESSAGE)}\n> {visible(item.remedy)}",
        )
        for item in findings
    ]
    if not rows:
        return []
    return [pairs(rows), Text("times overlap and do not add up; trtopt explain RULE says why and how")]


def _warnings(warnings: Sequence[str]) -> list[RenderableType]:
    from rich.text import Text

    return [Text(f"- {visible(line)}", style="yellow") for line in warnings]
