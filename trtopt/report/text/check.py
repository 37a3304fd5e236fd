"""Checks of reports and of engines, as they are shown; what is cut here is whole in the JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from trtopt.report.schema.check import Checked, CheckReport, Gate, LayerChange, Unit
from trtopt.report.schema.manifest import Manifest
from trtopt.report.text.blocks import (
    Block,
    Cell,
    Column,
    Command,
    Line,
    Section,
    Table,
    View,
    bullets,
    line,
    numbers,
    pairs,
    table,
)
from trtopt.report.text.changes import Became, arrow, together, types_arrow
from trtopt.report.text.command import shell
from trtopt.report.text.format import bytes_text, count, percent, time_text, visible
from trtopt.report.text.names import Labels

MOST_LAYERS = 8
"""Of those that account for a gate."""
_MARKS = {"passed": "good", "failed": "bad", "not judged": "none"}


def headline(found: CheckReport) -> str:
    """The verdict."""
    failed, judged = len(found.failed), sum(gate.verdict != "not judged" for gate in found.gates)
    if failed:
        return f"{failed} of {count(judged, 'gate')} failed"
    if not judged:
        return "nothing was judged"
    return f"{count(judged, 'gate')} passed"


def about(checked: Checked) -> str:
    """What a report is of, in a line."""
    return f"{_what(checked)} ({visible(checked.report)})"


def _what(checked: Checked) -> str:
    name = checked.model.replace("\\", "/").rpartition("/")[2]
    parts = [name, checked.precision, f"on {checked.gpu}" if checked.gpu else "", checked.backend]
    return ", ".join(visible(part) for part in parts if part)


def gate_table(found: CheckReport) -> Table:
    """All gates."""
    rows = [
        (
            Cell(gate.verdict, mark=_MARKS[gate.verdict]),
            visible(gate.title),
            figure(gate.before, gate),
            figure(gate.after, gate),
            limit(gate),
        )
        for gate in found.gates
    ]
    columns = (Column(""), Column("gate", "text"), *numbers("before", "now", "limit"))
    return Table(columns, tuple(rows))


def limit(gate: Gate) -> str:
    """How the figure is bounded, and whether nobody chose it."""
    if gate.bound is None:
        return ""
    return f"{gate.bound} {figure(gate.limit, gate)}{' (default)' if gate.is_default else ''}"


_UNITS: dict[Unit, tuple[Callable[[float], str], float, str]] = {
    "us": (time_text, 1.0, " us"),
    "bytes": (lambda value: bytes_text(int(value)), 1.0, " B"),
    "kernels": ("{:.0f}".format, 1.0, ""),
    "share": (percent, 100.0, " %"),
    "dB": ("{:.1f} dB".format, 1.0, " dB"),
    "metric": ("{:.4f}".format, 1.0, ""),
}
"""By unit: how a figure is rounded; by what it is multiplied, and its unit, where all its digits are shown."""


def figure(value: float | None, gate: Gate) -> str:
    """A gate's figure, with as many digits as tell what failed from its limit."""
    if value is None or gate.unit is None:
        return ""
    if not math.isfinite(value):
        return "not finite"
    rounded, factor, name = _UNITS[gate.unit]
    texts = {rounded(each) for each in (gate.after, gate.limit) if each is not None and math.isfinite(each)}
    is_near = gate.verdict == "failed" and gate.after is not None and gate.limit is not None and len(texts) == 1
    return f"{factor * value:.9g}{name}" if is_near else rounded(value)


def layer_table(layers: Sequence[LayerChange], labels: Labels) -> Table:
    """The layers that account for a gate."""
    changes = []
    for layer in layers:
        us = None if layer.us[0] is None or layer.us[1] is None else (layer.us[0], layer.us[1])
        kernels = arrow(*map(str, layer.kernels))
        changes.append(Became((labels.region(layer.nodes),), types_arrow(*layer.dtypes), kernels, us))
    rows = [
        (*called, item.kernels, item.types, "" if item.us is None else arrow(*map(time_text, item.us)))
        for called, item in together(changes)
    ]
    columns = (Column("layers", "name"), *numbers("x", "kernels"), Column("type"), *numbers("time"))
    return Table(columns, tuple(rows), MOST_LAYERS, "place", gap=2)


def view(found: CheckReport) -> View:
    """The check: the verdict, the gates, and why gates failed or were not judged."""
    of = [("report", about(found.subject))]
    if found.baseline is not None:
        of.append(("baseline", about(found.baseline)))
    gates = gate_table(found)
    parts = [Section("", (pairs(of),)), Section("Gates", (gates,) if gates.rows else ())]
    for gate in found.gates:
        if gate.reason and gate.verdict != "passed":
            body: tuple[Block, ...] = (
                line(visible(gate.reason)),
                *([layer_table(gate.layers, Labels(found.names))] if gate.layers else []),
            )
            parts.append(Section(f"{gate.verdict.capitalize()}: {visible(gate.title)}", body))
    parts.append(Section("Notes", bullets(found.notes)))
    if found.failed:
        parts.append(Section("Worth doing next", _advice(found)))
    head, name = Line(headline(found), "bad" if found.failed else "good"), f"{_what(found.subject)}: check"
    return View(head, (), tuple(parts), kind="trtopt check", name=name)


def _advice(found: CheckReport) -> tuple[Block, ...]:
    """A line that shows why a gate failed."""
    report = found.subject.report
    if found.baseline is None:
        return line("see the report"), Command(shell("trtopt", "report", report))
    words = ("trtopt", "report", report, "--against", found.baseline.report)
    return line("see what changed, layer by layer"), Command(shell(*words))


def engine_view(manifest: Manifest, *, key: str | None) -> View:
    """What an engine was built by and for, and what of it was checked.

    ``key`` is the public key that the manifest is signed with; None where signatures were not looked at.
    """
    asked, achieved = manifest.precision.requested, manifest.precision.achieved
    layers = ", ".join(f"{count(share.layers, 'layer')} {dtype}" for dtype, share in achieved.items())
    rows = [
        ("built by", f"{manifest.backend} {manifest.backend_version}, trtopt {manifest.trtopt}"),
        ("built for", f"{manifest.gpu}, compute capability {', '.join(manifest.compute_capabilities)}"),
        ("model", f"SHA-256 {manifest.model_sha256}"),
        ("precision", f"{asked} asked for; {layers}" if layers else f"{asked} asked for"),
        ("engine", f"{manifest.engine_bytes} bytes, SHA-256 {manifest.engine_sha256}"),
    ]
    if manifest.host is not None:
        rows.append(("with", ", ".join(file.name for file in manifest.host.files)))
    rows.append(("signature", f"fits the key {key}" if key else "not looked at; give --key FILE"))
    return View(line("The engine is what was built", "good"), (), (Section("", (_visible_pairs(rows),)),))


def bundle_view(command: str, files: Sequence[tuple[str, int]], manifest: Manifest, *, key: str | None) -> View:
    """What a bundle holds, by name and bytes, and what its engine was built by and for; arguments as of
    :func:`engine_view`."""
    engine = engine_view(manifest, key=key)
    made = _visible_pairs([("command", command)])
    content = table(("file", "size"), [(visible(name), bytes_text(size)) for name, size in files], right=(1,))
    parts = (*engine.sections, Section("Made by", (made,)), Section("Files", (content,)))
    return View(line("The bundle is what was made", "good"), (), parts)


def _visible_pairs(rows: Sequence[tuple[str, str]]) -> Block:
    return pairs([(name, visible(text)) for name, text in rows])
