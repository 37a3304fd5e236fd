"""The reasons of all layers, gathered: one finding for each, by the time it accounts for."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trtopt.report.schema.analysis import Finding, Severity
from trtopt.report.schema.profile import Deviation, ProfileLayer, Reason
from trtopt.report.text.format import count, percent, shorten

_LISTED = 5
"""Layers that a finding's message names."""
_REMEDIES = 2
"""Remedies it gives, those of the layers with most time."""
_NAME = 60
"""Characters of a name: a fused layer of TensorRT has those of all its parts."""

_WORTH_A_WARNING = 0.01
"""Share of the measured time."""

_WHAT: dict[Reason, str] = {
    "no-tensor-core": "not on Tensor Cores",
    "reformat-copy": "only copying into another format or type",
    "unfused-qdq": "only quantizing",
    "misaligned-channels": "rows that are no multiples of 16 bytes",
    "padded-input": "fewer than four input channels",
    "tail-wave": "a last wave that does not fill the GPU",
    "launch-bound": "launch and idle SMs take half of the time",
    "wide-tensors": "FP32 between layers of fewer bits",
    "low-clock": "a clock below the datasheet's",
    "slower-than-predicted": "more time than predicted, beyond other reasons",
    "faster-than-predicted": "less time than predicted",
}


def findings_of(layers: Sequence[ProfileLayer]) -> tuple[Finding, ...]:
    """A finding for each reason that some layers have, by what could be won, the largest first.

    Args:
        layers: All layers of the profile.
    """
    total = math.fsum(layer.measured_us for layer in layers)
    found = [_finding(reason, layers, total) for reason in _WHAT]
    return tuple(sorted((item for item in found if item is not None), key=lambda item: -item.gain_us))


def _finding(reason: Reason, layers: Sequence[ProfileLayer], total: float) -> Finding | None:
    hits = [(layer, item) for layer in layers for item in layer.deviation if item.reason == reason]
    if not hits:
        return None
    hits.sort(key=lambda hit: (-hit[1].us, -hit[0].measured_us))
    gain = math.fsum(item.us for _, item in hits)
    measured = math.fsum(layer.measured_us for layer, _ in hits)
    severity: Severity = "warning" if gain > _WORTH_A_WARNING * total else "hint" if gain > 0 else "info"
    remedies = list(dict.fromkeys(item.remedy for _, item in hits))
    listed = "; ".join(_line(layer, item) for layer, item in hits[:_LISTED])
    more = f"; and {len(hits) - _LISTED} more" if len(hits) > _LISTED else ""
    share = f", {measured:.1f} us ({percent(measured / total)})" if total else ""
    message = f"{count(len(hits), 'layer')}{share}: {_WHAT[reason]}. {listed}{more}"
    nodes = tuple(dict.fromkeys(name for layer, _ in hits for name in (layer.onnx_nodes or (layer.name,))))
    return Finding(reason, severity, nodes, message, "; ".join(remedies[:_REMEDIES]), gain)


def _line(layer: ProfileLayer, item: Deviation) -> str:
    return f"{shorten(layer.name, _NAME)}: {item.message}"
