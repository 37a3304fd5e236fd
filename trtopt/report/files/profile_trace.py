"""A profile as a trace for Chrome (chrome://tracing) or Perfetto: layers one after the other, on a line each for
measured and predicted times.

The format is that of "Trace Event Format" (Google): complete events (``ph: X``) with times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from trtopt.report.schema.profile import ProfileLayer, ProfileReport

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
