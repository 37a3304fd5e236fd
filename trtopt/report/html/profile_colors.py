"""By what the layers of a profile's graph are coloured: time, precision, measured against predicted, reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trtopt.report.schema.profile import ProfileLayer
from trtopt.report.text.format import count, percent, time_text, visible

_HEAT = ("#a3224f", "#d6453d", "#ee8a3c", "#f2c14e", "#cfd5a8", "#a9b5c4")
"""From the slowest layers to the fastest, which recede on white and on black."""
_NOTHING = "#8a8f98"
_TYPES = {
    "fp32": "#e0457b", "tf32": "#f08a5d", "fp16": "#3b82f6", "bf16": "#7c6cf2", "int8": "#10a37f", "fp8": "#84b83c",
    "fp4": "#e3c33b",
}  # fmt: skip
"""Colours of the types in which a layer computes; another type has that of nothing."""
_NAMES = {"float": "fp32", "half": "fp16", "bfloat16": "bf16"}
"""What compilers call types that have a shorter name."""
_RATIOS = (
    (0.5, "#2f6fd0", "less than half the prediction"),
    (0.8, "#7fb0ea", "0.5 to 0.8 times"),
    (1.25, "#c3c9d1", "0.8 to 1.25 times"),
    (2.0, "#f4c06a", "1.25 to 2 times"),
    (4.0, "#ea7f3f", "2 to 4 times"),
    (math.inf, "#b3243f", "more than 4 times"),
)
"""Measured over predicted: below what, its colour, and its words."""
_REASONS = (
    "#d6453d", "#e8890c", "#c8a415", "#10a37f", "#2aa7c9", "#3b82f6", "#a855f7", "#e0457b", "#6b7280",
)  # fmt: skip
"""By the order in which the reasons are found, the most time first."""


@dataclass(frozen=True)
class Group:
    """Layers of one colour.

    Attributes:
        color: ``#rrggbb``.
        ink: The colour of text on it.
        text: What they have in common.
        note: How many there are, and their share of the time.
    """

    color: str
    ink: str
    text: str
    note: str


@dataclass(frozen=True)
class Coloring:
    """One way to colour the layers.

    Attributes:
        title: By what.
        groups: Those that hold a layer.
        of_layer: By layer, the index of its group.
    """

    title: str
    groups: tuple[Group, ...]
    of_layer: tuple[int, ...]


def colorings(layers: Sequence[ProfileLayer]) -> tuple[Coloring, ...]:
    """All ways to colour the layers, the first one first; precision and deviation where something is known of them."""
    found = [_by("time", layers, _time_groups(layers)), _by("precision", layers, _precision_group)]
    if any(layer.ratio is not None for layer in layers):
        found.append(_by("measured / predicted", layers, _ratio_group))
    if any(layer.deviation for layer in layers):
        found.append(_by("reason of the deviation", layers, _reason_groups(layers)))
    return tuple(found)


def precision_of(layer: ProfileLayer) -> str:
    """The type in which a layer computes; what it writes where that is not known, and empty without either."""
    if layer.predicted is not None:
        return layer.predicted.dtype
    written = layer.outputs[0].dtype.lower() if layer.outputs else ""
    return _NAMES.get(written, written)


def ink_on(color: str) -> str:
    """Black or white, whichever is read better on a colour (contrast of WCAG 2.2)."""
    channels = (int(color[start : start + 2], 16) / 255 for start in (1, 3, 5))
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#ffffff"


_Key = tuple[int, str, str]
"""Place in the legend, words and colour of a group."""


def _by(title: str, layers: Sequence[ProfileLayer], group_of: Callable[[ProfileLayer], _Key]) -> Coloring:
    keys = [group_of(layer) for layer in layers]
    total = sum(layer.measured_us for layer in layers)
    groups = []
    for key in sorted(set(keys)):
        times = [layer.measured_us for layer, own in zip(layers, keys, strict=True) if own == key]
        share = f", {percent(sum(times) / total)} of the time" if total else ""
        groups.append(Group(key[2], ink_on(key[2]), key[1], count(len(times), "layer") + share))
    index = {key: place for place, key in enumerate(sorted(set(keys)))}
    return Coloring(title, tuple(groups), tuple(index[key] for key in keys))


def _time_groups(layers: Sequence[ProfileLayer]) -> Callable[[ProfileLayer], _Key]:
    """Halves of the time of the slowest layer."""
    longest = max((layer.measured_us for layer in layers), default=0.0)

    def group(layer: ProfileLayer) -> _Key:
        if layer.measured_us <= 0:
            return len(_HEAT), "runs nothing", _NOTHING
        step = min(math.floor(math.log2(longest / layer.measured_us)), len(_HEAT) - 1)
        low, high = (time_text(longest / 2**power, micro="µ") for power in (step + 1, step))
        words = f"less than {high}" if step == len(_HEAT) - 1 else f"{low} to {high}"
        return step, words, _HEAT[step]

    return group


def _precision_group(layer: ProfileLayer) -> _Key:
    name = visible(precision_of(layer))
    known = list(_TYPES)
    place = known.index(name) if name in known else len(known)
    return place, name or "not known", _TYPES.get(name, _NOTHING)


def _ratio_group(layer: ProfileLayer) -> _Key:
    ratio = layer.ratio
    if ratio is None:
        return len(_RATIOS), "no prediction", _NOTHING
    return next((place, words, color) for place, (top, color, words) in enumerate(_RATIOS) if ratio <= top)


def _reason_groups(layers: Sequence[ProfileLayer]) -> Callable[[ProfileLayer], _Key]:
    """The first reason of each layer; the reasons by the time of the layers that have them."""
    times: dict[str, float] = {}
    for layer in layers:
        for reason in layer.deviation[:1]:
            times[reason.reason] = times.get(reason.reason, 0.0) + layer.measured_us
    order = sorted(times, key=lambda reason: -times[reason])

    def group(layer: ProfileLayer) -> _Key:
        if not layer.deviation:
            return len(order), "none", "#c3c9d1"
        place = order.index(layer.deviation[0].reason)
        return place, order[place], _REASONS[place % len(_REASONS)]

    return group
