"""Words for a check, shared by the terminal, Markdown and JUnit. Everything cut is whole in the JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trtopt.report.schema.check import Checked, CheckReport, Gate, LayerChange, Unit
from trtopt.report.text.analysis import shorten, time_text, visible
from trtopt.report.text.numbers import bytes_text, count, percent, some
from trtopt.report.text.profile import Rows

MOST_LAYERS = 8
"""Of those that account for a gate."""


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
                some([shorten(visible(name), width) for name in change.nodes], 2),
                _arrow([str(number) for number in change.kernels]),
                visible(_arrow(dtypes)),
                _arrow(times),
            )
        )
    return Rows(("nodes", "kernels", "type", "time"), tuple(cells), (1, 3))


def _arrow(sides: Sequence[str]) -> str:
    return sides[0] if sides[0] == sides[1] else " -> ".join(side or "?" for side in sides)
