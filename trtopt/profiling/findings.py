"""What a profile's layers have in common that takes time, as findings: the reasons of all layers, and what to type."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from trtopt.profiling.explain import Network
from trtopt.report.schema.analysis import Finding, Severity
from trtopt.report.schema.profile import ProfileLayer, Reason
from trtopt.report.text.format import count, percent, shorten, time_text
from trtopt.report.text.names import named
from trtopt.support.precision import EIGHT_BIT_TYPES

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

_SWEEP = ("analyze", "--batch-sweep", "1..256")
_MORE_KERNELS = ("build", "--builder", "builder_optimization_level=5")

_ACTS: dict[Reason, tuple[str, ...]] = {
    "no-tensor-core": ("build",),
    "reformat-copy": ("analyze", "--compile"),
    "misaligned-channels": ("build",),
    "tail-wave": _SWEEP,
    "launch-bound": _SWEEP,
    "wide-tensors": ("build",),
    "low-clock": ("needs a locked clock (nvidia-smi --lock-gpu-clocks)",),
    "slower-than-predicted": _MORE_KERNELS,
    "faster-than-predicted": ("calibrate-gpu",),
}
"""What to type after a finding: a command of trtopt without its file, GPU and precision; else what it needs."""


def findings_of(layers: Sequence[ProfileLayer], network: Network) -> tuple[Finding, ...]:
    """A finding for each reason that some layers have, by what could be won, the largest first.

    Its command is one of trtopt without the model, as that of a rule (:mod:`trtopt.roofline.rules.registry`).
    """
    found = [_finding(reason, layers, network) for reason in _WHAT]
    return tuple(sorted((item for item in found if item is not None), key=lambda item: -item.gain_us))


def _act(reason: Reason, remedy: str, layers: Sequence[ProfileLayer], network: Network) -> tuple[str, ...]:
    """What to type, in the precision of the network; an input in another form where ``remedy`` names ``--io``."""
    if network.gpu is None:
        return ("analyze",)  # a CPU's prediction says nothing about a GPU, which is what can be changed
    narrow = network.narrow
    samples = ("--calib", "samples.npz") if narrow in EIGHT_BIT_TYPES else ()
    precision = (f"--{narrow}", *samples) if narrow else ("--fp16",)
    if reason == "unfused-qdq":
        return ("build", "--int8", "--calib", "samples.npz")
    image = _image(layers, network) if "--io" in remedy else ""
    if image:
        return ("build", *precision, "--io", f"{image}:fp16:hwc4")
    act = _ACTS.get(reason, ("build",))
    return (*act, *precision) if act[0] == "build" else act


def _image(layers: Sequence[ProfileLayer], network: Network) -> str:
    """The input of the network that is an image of up to four channels; empty without one."""
    read = (item for layer in layers for item in layer.inputs)
    found = (item.name for item in read if len(item.shape) == 4 and 0 < item.shape[1] <= 4)
    return next((name for name in found if name not in network.made), "")


def _finding(reason: Reason, layers: Sequence[ProfileLayer], network: Network) -> Finding | None:
    total = math.fsum(layer.measured_us for layer in layers)
    hits = [(layer, item) for layer in layers for item in layer.deviation if item.reason == reason]
    if not hits:
        return None
    hits.sort(key=lambda hit: (-hit[1].us, -hit[0].measured_us))
    gain = math.fsum(item.us for _, item in hits)
    measured = math.fsum(layer.measured_us for layer, _ in hits)
    severity: Severity = "warning" if gain > _WORTH_A_WARNING * total else "hint" if gain > 0 else "info"
    remedies = list(dict.fromkeys(item.remedy for _, item in hits))
    listed = "; ".join(
        f"{shorten(named(layer.modules, layer.name).text, _NAME)}: {item.message}" for layer, item in hits[:_LISTED]
    )
    more = f"; and {len(hits) - _LISTED} more" if len(hits) > _LISTED else ""
    share = f", {time_text(measured)} ({percent(measured / total)})" if total else ""
    message = f"{count(len(hits), 'layer')}{share}: {_WHAT[reason]}. {listed}{more}"
    nodes = tuple(dict.fromkeys(name for layer, _ in hits for name in (layer.onnx_nodes or (layer.name,))))
    act = _act(reason, hits[0][1].remedy, layers, network)
    command = act[0] if act[0].startswith("needs ") else shlex.join(act)
    return Finding(reason, severity, nodes, message, "; ".join(remedies[:_REMEDIES]), gain, command=command)
