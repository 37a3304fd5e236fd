"""A check as a terminal shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtopt.report.schema.check import CheckReport
from trtopt.report.text import check as words
from trtopt.report.text.analysis import NO_MORE, visible
from trtopt.report.text.numbers import count, pairs, table

if TYPE_CHECKING:
    from rich.console import RenderableType

_NAME = 40


def render(found: CheckReport) -> RenderableType:
    """The check, to be printed by a ``rich`` console of 80 columns or more."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    of = [("report", words.about(found.subject))]
    if found.baseline is not None:
        of.append(("baseline", words.about(found.baseline)))
    rows = words.gate_rows(found)
    sections: list[tuple[str, list[RenderableType]]] = [
        ("", [pairs(of)]),
        ("Gates", [table(rows.head, rows.cells, right=rows.right)] if rows.cells else []),
    ]
    for gate in found.gates:
        if gate.reason and gate.verdict != "passed":
            body: list[RenderableType] = [Text(visible(gate.reason))]
            if gate.layers:
                layers = words.layer_rows(gate.layers, _NAME)
                body.append(table(layers.head, layers.cells, right=layers.right))
                if len(gate.layers) > len(layers.cells):
                    more = count(len(gate.layers) - len(layers.cells), "more place")
                    body.append(Text(f"and {more}; {NO_MORE}"))
            sections.append((f"{gate.verdict.capitalize()}: {visible(gate.title)}", body))
    sections.append(("Notes", [Text(f"- {visible(note)}") for note in found.notes]))
    parts: list[RenderableType] = [Text(words.headline(found), style="bold red" if found.failed else "bold green")]
    for title, body in sections:
        if body:
            parts += [Text(""), Text(title, style="bold")] if title else []
            parts += [Padding(item, (0, 0, 0, 2), expand=False) for item in body]
    return Group(*parts)
