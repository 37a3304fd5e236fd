"""Reports for other tools: JUnit XML, a trace, CSV, and Markdown for a pull request's comment (GitHub's, GitLab's)."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any
from xml.etree import ElementTree

from trtopt.report.schema.check import CheckReport, Gate, Verdict
from trtopt.report.schema.profile import Comparison, ProfileLayer, ProfileReport
from trtopt.report.schema.sweep import SweepReport
from trtopt.report.text import check, profile, sweep
from trtopt.report.text import check as words
from trtopt.report.text.format import Rows, count, left_out_text, shorten, time_text, visible

_PROCESS = 1
_LINES = {"measured": 1, "predicted": 2}


def profile_trace(report: ProfileReport) -> str:
    """The trace as JSON. A layer without a prediction leaves a gap of its measured time on the second line."""
    events: list[dict[str, Any]] = [_named("process_name", 0, str(report.gpu.get("name", "")))]
    events += [_named("thread_name", number, name) for name, number in _LINES.items()]
    starts = dict.fromkeys(_LINES, 0.0)
    for layer in report.layers:
        for line, took in (("measured", layer.measured_us), ("predicted", layer.predicted_us)):
            if took:
                events.append(_event(layer, line, starts[line], took))
            starts[line] += layer.measured_us if took is None else took
    return json.dumps({"displayTimeUnit": "ns", "traceEvents": events}, allow_nan=False) + "\n"


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": _PROCESS, "tid": thread, "name": what, "args": {"name": name}}


def _event(layer: ProfileLayer, line: str, start: float, took: float) -> dict[str, Any]:
    place = {"ph": "X", "pid": _PROCESS, "tid": _LINES[line], "ts": start, "dur": took}
    return {**place, "name": layer.name, "cat": layer.type, "args": dict(_arguments(layer))}


def _arguments(layer: ProfileLayer) -> Iterator[tuple[str, Any]]:
    yield "nodes", list(layer.onnx_nodes)
    if layer.modules:
        yield "modules", list(layer.modules)
    if layer.tactic:
        yield "tactic", layer.tactic
    if layer.predicted is not None:
        yield "limiter", layer.predicted.limiter
    if layer.deviation:
        yield "why", [f"{item.reason}: {item.message}" for item in layer.deviation]


_CSV = (
    *("key", "model", "gpu", "precision", "status", "on_front", "measure", "drop", "verified", "latency"),
    *("latency_us", "batch", "engine_bytes", "kernels", "cost_per_million", "currency", "seconds", "attempts"),
    *("engine", "engine_sha256", "exit_code", "error"),
)


_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet takes for the beginning of a formula."""


def sweep_csv(report: SweepReport) -> str:
    """A line for each job; what the matrix varies is in columns named after the options."""
    axes = [axis for axis in (report.rows[0].varied if report.rows else ()) if axis not in _CSV]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*map(_safe, axes), *_CSV])
    for row in report.rows:
        found, failure = row.result, row.failure
        values = {
            **{"key": row.key, "model": row.model, "gpu": row.gpu, "precision": row.precision, "status": row.status},
            **{"on_front": int(row.on_front), "attempts": row.attempts, "engine": row.engine},
            **({} if row.cost is None else {"cost_per_million": row.cost, "currency": report.currency}),
            **({} if failure is None else {"exit_code": failure.exit_code, "error": failure.what}),
            **({} if found is None else {name: getattr(found, name) for name in _CSV if hasattr(found, name)}),
        }
        values["engine"] = row.engine
        writer.writerow([_safe(row.varied[axis]) for axis in axes] + [_safe(values.get(name)) for name in _CSV])
    return out.getvalue()


def _safe(value: object) -> object:
    """A text of one line that no spreadsheet runs; numbers stay numbers."""
    if not isinstance(value, str):
        return "" if value is None else value
    return visible(f"'{value}" if value.startswith(_FORMULA) else value)


_SUITE = "trtopt check"


def junit_xml(found: CheckReport) -> str:
    """The check as an XML document. A gate that was not judged is a skipped test."""
    skipped = sum(gate.verdict == "not judged" for gate in found.gates)
    counts = {"tests": str(len(found.gates)), "failures": str(len(found.failed)), "errors": "0"}
    root = ElementTree.Element("testsuites", {"name": _SUITE, **counts})
    suite = ElementTree.SubElement(root, "testsuite", {"name": _SUITE, **counts, "skipped": str(skipped), "time": "0"})
    properties = ElementTree.SubElement(suite, "properties")
    for name, checked in (("report", found.subject), ("baseline", found.baseline)):
        if checked is not None:
            ElementTree.SubElement(properties, "property", {"name": name, "value": words.about(checked)})
    for gate in found.gates:
        names = {"classname": f"trtopt.check.{gate.name.partition(':')[0]}", "name": visible(gate.title), "time": "0"}
        _result(ElementTree.SubElement(suite, "testcase", names), gate)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _result(case: ElementTree.Element, gate: Gate) -> None:
    if gate.verdict == "passed":
        return
    message = visible(gate.reason)
    if gate.verdict == "not judged":
        ElementTree.SubElement(case, "skipped", {"message": message})
        return
    failure = ElementTree.SubElement(case, "failure", {"type": "gate", "message": message})
    figures = [("before", words.figure(gate.before, gate.unit)), ("now", words.figure(gate.after, gate.unit))]
    lines = [f"{name}: {value}" for name, value in (*figures, ("limit", words.limit(gate))) if value]
    rows = words.layer_rows(gate.layers, 80)
    lines += ["  ".join(cells) for cells in rows.cells]
    failure.text = "\n".join([message, *lines])


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
