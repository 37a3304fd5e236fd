"""Measurements in the files that trtexec writes, which its users' scripts read.

The forms are those of ``exportJSONTrace`` and ``exportJSONProfile`` of TensorRT 8.5 and later:
https://github.com/NVIDIA/TensorRT/blob/main/samples/common/sampleReporting.cpp. ``--exportLayerInfo`` writes the engine
inspector's JSON as it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trtopt.profiling.gpu import Run, layer_times
from trtopt.profiling.timing import COLUMNS, InferenceTiming

_NANOSECONDS = 6
"""Digits of a time in milliseconds: events resolve half a microsecond."""


def times_json(timing: InferenceTiming) -> str:
    """``--exportTimes``: when each inference ran, and what its parts took, milliseconds."""
    names = {"h2dMs": "H2d", "computeMs": "Compute", "d2hMs": "D2h"}
    spans = {key: timing.span_us(f"start{part}Ms", f"end{part}Ms") / 1e3 for key, part in names.items()}
    columns = {name: timing.trace[:, index] for index, name in enumerate(COLUMNS)} | spans
    columns["latencyMs"] = spans["h2dMs"] + spans["computeMs"] + spans["d2hMs"]
    rows = zip(*(column.round(_NANOSECONDS).tolist() for column in columns.values()), strict=True)
    return _records(dict(zip(columns, row, strict=True)) for row in rows)


def profile_json(runs: Sequence[Run]) -> str:
    """``--exportProfile``: what each layer took over all inferences that were profiled, milliseconds."""
    layers = layer_times(runs)
    total = math.fsum(float(layer.average_us) for layer in layers)
    records: list[Mapping[str, Any]] = [{"count": len(runs)}]
    for layer in layers:
        mean, median = float(layer.average_us), float(layer.median_us or 0)
        times = {"timeMs": mean * len(runs), "averageMs": mean, "medianMs": median}
        row = {key: round(us / 1e3, _NANOSECONDS) for key, us in times.items()}
        records.append({"name": layer.name, **row, "percentage": round(mean / total * 100, 4) if total else 0.0})
    return _records(records)


def _records(records: Iterable[Mapping[str, Any]]) -> str:
    """A list with a line for each record."""
    return "[\n  " + "\n, ".join(json.dumps(record) for record in records) + "\n]\n"
