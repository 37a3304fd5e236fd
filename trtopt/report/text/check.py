"""Checks of reports and of engines, in words and as a terminal shows them; what is cut here is whole in the JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trtopt.report.schema.check import Checked, CheckReport, Gate, LayerChange, Unit
from trtopt.report.schema.manifest import Manifest
from trtopt.report.text.format import (
    Rows,
    bytes_text,
    count,
    left_out,
    line,
    list_lines,
    pairs,
    percent,
    sections,
    some_names,
    time_text,
    visible,
)

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

MOST_LAYERS = 8
"""Of those that account for a gate."""
_NAME = 40


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
    name = checked.model.replace("\\", "/").rpartition("/")[2]
    parts = [name, checked.precision, f"on {checked.gpu}" if checked.gpu else "", checked.backend]
    return f"{', '.join(visible(part) for part in parts if part)} ({visible(checked.report)})"


def gate_rows(found: CheckReport) -> Rows:
    """All gates."""
    cells = [
        (
            gate.verdict,
            visible(gate.title),
            figure(gate.before, gate.unit),
            figure(gate.after, gate.unit),
            limit(gate),
        )
        for gate in found.gates
    ]
    return Rows(("", "gate", "before", "now", "limit"), tuple(cells), (2, 3, 4))


def limit(gate: Gate) -> str:
    """How the figure is bounded, and whether nobody chose it."""
    if gate.bound is None:
        return ""
    return f"{gate.bound} {figure(gate.limit, gate.unit)}{' (default)' if gate.is_default else ''}"


def figure(value: float | None, unit: Unit | None) -> str:
    """A gate's figure."""
    if value is None or unit is None:
        return ""
    if not math.isfinite(value):
        return "not finite"
    if unit == "us":
        return time_text(value)
    if unit == "bytes":
        return bytes_text(int(value))
    if unit == "kernels":
        return f"{value:.0f}"
    if unit == "share":
        return percent(value)
    return f"{value:.1f} dB" if unit == "dB" else f"{value:.4f}"


def layer_rows(layers: Sequence[LayerChange], width: int) -> Rows:
    """The layers that account for a gate."""
    cells = []
    for change in layers[:MOST_LAYERS]:
        dtypes = [" ".join(dtypes) or "none" for dtypes in change.dtypes]
        times = ["" if us is None else figure(us, "us") for us in change.us]
        cells.append(
            (
                some_names(change.nodes, 2, width),
                _arrow([str(number) for number in change.kernels]),
                visible(_arrow(dtypes)),
                _arrow(times),
            )
        )
    return Rows(("nodes", "kernels", "type", "time"), tuple(cells), (1, 3))


def _arrow(sides: Sequence[str]) -> str:
    return sides[0] if sides[0] == sides[1] else " -> ".join(side or "?" for side in sides)


def render(found: CheckReport) -> Group:
    """The check, to be printed by a ``rich`` console of 80 columns or more."""
    of = [("report", about(found.subject))]
    if found.baseline is not None:
        of.append(("baseline", about(found.baseline)))
    rows = gate_rows(found)
    parts: list[tuple[str, list[RenderableType]]] = [("", [pairs(of)]), ("Gates", [rows.table()] if rows.cells else [])]
    for gate in found.gates:
        if gate.reason and gate.verdict != "passed":
            body: list[RenderableType] = [line(visible(gate.reason))]
            if gate.layers:
                layers = layer_rows(gate.layers, _NAME)
                body += [layers.table(), *left_out(len(gate.layers) - len(layers.cells), "place")]
            parts.append((f"{gate.verdict.capitalize()}: {visible(gate.title)}", body))
    parts.append(("Notes", list_lines(found.notes)))
    return sections([line(headline(found), "bold red" if found.failed else "bold green")], parts)


def render_engine(manifest: Manifest, *, key: str | None) -> Group:
    """What an engine was built by and for, and what of it was checked.

    ``key`` is the public key that the manifest is signed with; None where signatures were not looked at.
    """
    asked, achieved = manifest.precision.requested, manifest.precision.achieved
    layers = ", ".join(f"{share.layers} layers {dtype}" for dtype, share in achieved.items())
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
    body = pairs([(name, visible(text)) for name, text in rows])
    return sections([line("The engine is what was built", "bold green")], [("", [body])])
