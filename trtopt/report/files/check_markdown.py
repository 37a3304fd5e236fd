"""A check as Markdown for a comment on a pull request (GitHub's and GitLab's)."""

from __future__ import annotations

from trtopt.report.files.profile_markdown import markdown_table, text
from trtopt.report.schema.check import CheckReport, Gate, Verdict
from trtopt.report.text import check as words
from trtopt.report.text.analysis import NO_MORE
from trtopt.report.text.numbers import count
from trtopt.report.text.profile import Rows

_NAME = 60
_SIGNS: dict[Verdict, str] = {"passed": "✅ passed", "failed": "❌ failed", "not judged": "➖ not judged"}


def check_markdown(found: CheckReport) -> str:
    """The verdict, the gates, what failed and where to look."""
    sign = "❌" if found.failed else "✅"
    parts = [f"## {sign} trtopt check: {text(words.headline(found))}"]
    of = [f"- Report: {text(words.about(found.subject))}"]
    if found.baseline is not None:
        of.append(f"- Baseline: {text(words.about(found.baseline))}")
    parts.append("\n".join(of))
    rows = words.gate_rows(found)
    if rows.cells:
        cells = tuple((_SIGNS[gate.verdict], *row[1:]) for gate, row in zip(found.gates, rows.cells, strict=True))
        parts.append(markdown_table(Rows(rows.head, cells, rows.right)))
    for verdict, title in (("failed", "What failed"), ("not judged", "Not judged")):
        gates = [gate for gate in found.gates if gate.verdict == verdict]
        if gates:
            parts += [f"### {title}", *(part for gate in gates for part in _reason(gate))]
    if found.notes:
        parts += ["### Notes", "\n".join(f"- {text(note)}" for note in found.notes)]
    return "\n\n".join(parts) + "\n"


def _reason(gate: Gate) -> list[str]:
    parts = [f"**{text(gate.title)}**: {text(gate.reason)}"]
    if gate.layers:
        rows = words.layer_rows(gate.layers, _NAME)
        parts.append(markdown_table(rows))
        if len(gate.layers) > len(rows.cells):
            parts.append(f"and {count(len(gate.layers) - len(rows.cells), 'more place')}; {NO_MORE}")
    return parts
