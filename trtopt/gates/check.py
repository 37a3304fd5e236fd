"""A report against thresholds and a baseline: what ``trtopt check`` and Python callers use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from trtopt.errors import UsageError
from trtopt.gates.evaluate import evaluate
from trtopt.gates.facts import Facts, facts_of
from trtopt.gates.limits import Limits
from trtopt.report.files.for_tools import junit_xml
from trtopt.report.files.markdown import check_markdown
from trtopt.report.schema.check import CheckReport
from trtopt.report.schema.read import read_report
from trtopt.support.files import atomic_write, check_outputs
from trtopt.support.words import did_you_mean


def check(
    report: str | Path,
    *,
    baseline: str | Path | None = None,
    limits: Limits | None = None,
    markdown: str | Path | None = None,
    junit: str | Path | None = None,
    **options: Any,
) -> CheckReport:
    """Judge a report of a build, an analysis or a profile.

    Args:
        report: The JSON file that ``--report`` wrote.
        baseline: One of the same kind, for the same model, GPU and compiler, to compare with.
        limits: The thresholds; ``options`` override its fields by name.
        markdown: Write the result as Markdown.
        junit: Write the result as JUnit XML.
        **options: Fields of :class:`~trtopt.gates.limits.Limits`.

    Returns:
        All gates; ``.failed`` are those that failed.

    Raises:
        UsageError: A file cannot be read or written or has a wrong field, a threshold is wrong, or the two reports
            cannot be compared.
    """
    inputs = {"the report": Path(report)} | ({"the baseline": Path(baseline)} if baseline is not None else {})
    outputs: Mapping[str, str | Path | None] = {"--markdown": markdown, "--junit": junit}
    written = {name: Path(path) for name, path in outputs.items() if path is not None}
    check_outputs(written, inputs)
    known = [item.name for item in fields(Limits)]
    for name in options:
        if name not in known:
            remedy = did_you_mean(name, known) or "see docs/check.md"
            raise UsageError(f"There is no threshold {name!r}", where=name, remedy=remedy)
    limits = replace(limits or Limits(), **options)
    found = evaluate(_facts(report), None if baseline is None else _facts(baseline), limits)
    if "--markdown" in written:
        atomic_write(written["--markdown"], check_markdown(found))
    if "--junit" in written:
        atomic_write(written["--junit"], junit_xml(found))
    return found


def _facts(path: str | Path) -> Facts:
    return facts_of(read_report(Path(path)), Path(path))
