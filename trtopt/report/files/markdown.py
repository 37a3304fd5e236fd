"""Profiles, comparisons, checks and sweeps as Markdown for a comment on a pull request (GitHub's and GitLab's)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from trtopt.report.schema.check import CheckReport, Gate, Verdict
from trtopt.report.schema.profile import Comparison, ProfileReport
from trtopt.report.schema.sweep import SweepReport
from trtopt.report.text import check, profile, sweep
from trtopt.report.text.format import Rows, count, left_out_text, shorten, time_text, visible

_MOST_LAYERS = 15
_MOST_REGIONS = 30
_NAME = 60
_LONGEST_MESSAGE = 400
_SIGNS: dict[Verdict, str] = {"passed": "✅ passed", "failed": "❌ failed", "not judged": "➖ not judged"}

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~@$&-])")
_LINKS = re.compile(r"(?<=@)|(?<=#)|(?<=:)(?=//)|(?<=www)(?=\.)|(?<=:)(?=[\w+-]+:)|(?<=GH-)", re.IGNORECASE)
"""Where GitHub makes mentions, references, addresses and emoji of text, after Markdown has dropped its escapes."""

_NOTHING = "\u200b"
"""A space without width, which parts what would be a link."""


def profile_markdown(report: ProfileReport) -> str:
    """The profile: totals, findings, the slowest layers (GitHub's Markdown)."""
    shown = profile.layer_rows(report, _MOST_LAYERS, _NAME, ": ")
    parts = [f"## Profile: {text(profile.headline(report))}", _bullets(profile.totals(report))]
    parts += [_bullets(profile.accuracy(report))] if report.accuracy else []
    parts += [_bullets([("measured under", ", ".join(profile.conditions(report)))])] if report.source.conditions else []
    parts += [f"> {text(line)}" for line in report.warnings]
    if report.findings:
        lines = (
            f"- **{text(item.rule)}**{f', {time_text(item.gain_us)}' if item.gain_us > 0 else ''}: "
            f"{text(shorten(visible(item.message), _LONGEST_MESSAGE))} *{text(item.remedy)}*"
            for item in report.findings
        )
        parts += ["### Findings", "\n".join(lines)]
    if shown.cells:
        parts += [f"### {count(len(shown.cells), 'slowest layer')}", *_table(shown, len(report.layers), "layer")]
    return _document(parts)


def comparison_markdown(found: Comparison) -> str:
    """The comparison: both sides, and what changed."""
    shown = profile.region_rows(found, _MOST_REGIONS, _NAME)
    parts = ["## Two profiles compared", _bullets(profile.compared(found))]
    parts += [f"> {text(line)}" for line in found.warnings]
    regions = len(profile.changed(found.regions))
    parts += ["### What changed", *(_table(shown, regions, "region") if shown.cells else ["Nothing."])]
    return _document(parts)


def text(value: str) -> str:
    """Text in which nothing is taken for markup, a mention or a reference."""
    return _SPECIAL.sub(r"\\\1", _LINKS.sub(_NOTHING, visible(value)))


def _bullets(rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"- {text(name)}: {text(value)}" if name else f"- {text(value)}" for name, value in rows)


def _document(parts: Iterable[str]) -> str:
    return "\n\n".join(parts) + "\n"


def _table(rows: Rows, number: int, noun: str) -> list[str]:
    """A table of GitHub's Markdown, and how many of all rows it leaves out."""
    rule = tuple("---:" if index in rows.right else "---" for index in range(len(rows.head)))
    escaped = [tuple(map(text, cells)) for cells in (rows.head, *rows.cells)]
    found = "\n".join(f"| {' | '.join(cells)} |" for cells in (escaped[0], rule, *escaped[1:]))
    left = number - len(rows.cells)
    return [found, left_out_text(left, noun)] if left > 0 else [found]


def sweep_markdown(report: SweepReport) -> str:
    """The report as GitHub's Markdown."""
    parts = [f"## {text(sweep.headline(report))}", *_table(sweep.sweep_rows(report), len(report.rows), "job")]
    parts.append(_bullets(("", line) for line in sweep.notes(report)))
    found = sweep.failures(report)
    if found:
        parts += ["### Failed", "\n".join(f"- **{text(job)}**: {text(why)}" for job, why in found)]
    return _document(parts)


def check_markdown(found: CheckReport) -> str:
    """The verdict, the gates, what failed and where to look."""
    sign = "❌" if found.failed else "✅"
    parts = [f"## {sign} trtopt check: {text(check.headline(found))}"]
    of = {"Report": found.subject, "Baseline": found.baseline}
    parts.append(_bullets((name, check.about(item)) for name, item in of.items() if item is not None))
    rows = check.gate_rows(found)
    if rows.cells:
        cells = tuple((_SIGNS[gate.verdict], *row[1:]) for gate, row in zip(found.gates, rows.cells, strict=True))
        parts += _table(Rows(rows.head, cells, rows.right), len(cells), "gate")
    for verdict, title in (("failed", "What failed"), ("not judged", "Not judged")):
        gates = [gate for gate in found.gates if gate.verdict == verdict]
        if gates:
            parts += [f"### {title}", *(part for gate in gates for part in _reason(gate))]
    if found.notes:
        parts += ["### Notes", _bullets(("", note) for note in found.notes)]
    return _document(parts)


def _reason(gate: Gate) -> list[str]:
    layers = _table(check.layer_rows(gate.layers, _NAME), len(gate.layers), "place") if gate.layers else []
    return [f"**{text(gate.title)}**: {text(gate.reason)}", *layers]
