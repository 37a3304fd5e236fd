"""Reports as files: pages and Markdown for people; JUnit XML, a trace and CSV for other tools."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from trtopt.report.html.page import html_page
from trtopt.report.schema.check import CheckReport, Gate
from trtopt.report.schema.profile import ProfileLayer, ProfileReport
from trtopt.report.schema.shown import Shown
from trtopt.report.schema.sweep import SweepReport
from trtopt.report.schema.write import json_form
from trtopt.report.text import check as words
from trtopt.report.text.blocks import plain_text
from trtopt.report.text.format import visible
from trtopt.report.text.markdown import as_markdown
from trtopt.report.text.names import Labels
from trtopt.support.files import atomic_write

_PROCESS = 1
_LINES = {"measured": 1, "predicted": 2}


def write_forms(found: Shown, **files: str | Path | None) -> None:
    """Write a report in every form that is asked for, each file whole or not at all.

    Args:
        found: The report.
        **files: The file by the name of its form: ``html``, ``markdown`` and ``report`` (JSON); also ``trace`` of a
            profile, ``csv`` of a sweep, ``junit`` of a check.

    Raises:
        UsageError: A file cannot be written.
        MissingDependencyError: ``html`` needs Jinja2.
    """
    for name, path in files.items():
        if path is not None:
            atomic_write(Path(path), _FORMS[name](found))


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
        _result(ElementTree.SubElement(suite, "testcase", names), gate, Labels(found.names))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _result(case: ElementTree.Element, gate: Gate, labels: Labels) -> None:
    if gate.verdict == "passed":
        return
    message = visible(gate.reason)
    if gate.verdict == "not judged":
        ElementTree.SubElement(case, "skipped", {"message": message})
        return
    failure = ElementTree.SubElement(case, "failure", {"type": "gate", "message": message})
    figures = [("before", words.figure(gate.before, gate)), ("now", words.figure(gate.after, gate))]
    lines = [f"{name}: {value}" for name, value in (*figures, ("limit", words.limit(gate))) if value]
    lines += ["  ".join(plain_text(item, 80) for item in row) for row in words.layer_table(gate.layers, labels).rows]
    failure.text = "\n".join([message, *lines])


_FORMS: dict[str, Callable[[Any], str]] = {
    "html": lambda found: html_page(found.view()),
    "markdown": lambda found: as_markdown(found.view()),
    "report": lambda found: json_form(found.to_json_dict()),
    "trace": profile_trace,
    "csv": sweep_csv,
    "junit": junit_xml,
}
"""How each form is made of a report."""
