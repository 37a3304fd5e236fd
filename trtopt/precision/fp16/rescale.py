"""Values that FP16 does not hold, moved into its range by powers of two that weights take up.

A product scales what it makes by a scale of its weights and bias, and the products behind it divide theirs by it;
between them everything has to commute with the scale (see ``precision.ptq.channel_scales``). Powers of two change no
digit: the network computes the same numbers in FP32, and needs neither Casts nor nodes in FP32. Networks of small
weights need it (activations that halve from layer to layer, down to 1e-8), hidden layers beyond 65504, and group
normalizations that sum many squares, whose epsilon takes up the square of the scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.shapes import infer_in_place
from trtopt.precision.fp16.hazards import HEADROOM, reduced
from trtopt.precision.observe.ranges import ValueRanges
from trtopt.precision.observe.statistics import TensorStats
from trtopt.precision.plan import NarrowType
from trtopt.precision.ptq.channel_scale_rules import channel_scales
from trtopt.precision.ptq.channel_scales import FIXED
from trtopt.precision.ptq.scaling import written_scales

_SMALL, _LARGE = 0, 6
"""Powers of two that the largest value of what was too small, and of what was too large, is brought to: a sum of a
thousand terms still fits."""

_MOST = 90
"""Largest exponent: the bounds and weights that take it up stay normal numbers in FP32."""


RESCALE = "rescale"
"""Name of the step."""


_SQUARED = frozenset({"InstanceNormalization", "GroupNormalization"})
"""Operators of which nobody says that they sum squares in FP32: what they read is made small enough, with epsilon."""


@dataclass(frozen=True)
class Rescaled:
    """A model that computes the same, with other magnitudes inside.

    Attributes:
        model: A clone with new constants.
        stats: The statistics, as they are of its tensors.
        values: Names of the values that were moved.
    """

    model: ir.Model
    stats: Mapping[str, TensorStats]
    values: tuple[str, ...]


def rescaled(
    model: ir.Model, stats: Mapping[str, TensorStats], shapes: Mapping[str, tuple[int, ...]], narrow: NarrowType
) -> Rescaled | None:
    """``model`` with what ``narrow`` cannot hold moved into its range, where weights can take that up; else None.

    Args:
        model: A widened model, nodes named; not changed.
        stats: What was observed, by tensor.
        shapes: Static shapes by tensor name.
        narrow: The 16-bit type.
    """
    ranges = ValueRanges(stats, shapes)
    largest = {
        str(value.name): bounds.largest
        for node in model.graph
        for value in node.outputs
        if value.dtype is ir.DataType.FLOAT and (bounds := ranges.of(value)) is not None and bounds.largest > 0
    }
    squared = {
        str(node.inputs[0].name): power
        for node in model.graph
        if node.op_type in _SQUARED and node.inputs[0] is not None and (power := _power_of_sum(node, ranges, narrow))
    }
    if not squared and not any(_power(size, narrow) for size in largest.values()):
        return None
    inferred = model.clone()
    infer_in_place(inferred)
    channels = channel_scales(inferred, alike=True)
    tops = np.zeros(channels.count)
    for name, number in channels.values.items():
        tops[number] = max(tops[number], largest.get(name, 0.0))
    powers = np.array([_power(top, narrow) for top in tops], np.int64)
    for name, power in squared.items():
        number = channels.values.get(name, FIXED)
        powers[number] = min(powers[number], power)
    powers[FIXED] = 0
    scaled = written_scales(inferred, channels, np.exp2(powers.astype(np.float64)))
    if not scaled.changes:
        return None
    moved = {name: int(powers[number]) for name, number in channels.values.items() if powers[number]}
    _raise_epsilons(scaled.model, {name: largest.get(name, 0.0) * 2.0**power for name, power in moved.items()}, narrow)
    found = {name: each.times_power(moved[name]) if name in moved else each for name, each in stats.items()}
    return Rescaled(scaled.model, found, tuple(moved))


def _raise_epsilons(model: ir.Model, largest: Mapping[str, float], narrow: NarrowType) -> None:
    """Give an epsilon that a scale made 0 the least number of the type, where what rounding takes from the largest
    value read, squared, is more than that."""
    least = float(ml_dtypes.finfo(narrow.dtype.numpy()).smallest_subnormal)
    for node in model.graph:
        if node.op_type not in _SQUARED or node.inputs[0] is None:
            continue
        epsilon, top = edit.float_attribute(node, "epsilon", 1e-5), largest.get(str(node.inputs[0].name), 0.0)
        if 0 < epsilon < least <= (narrow.precision * top) ** 2:
            node.attributes["epsilon"] = ir.AttrFloat32("epsilon", least)


def _power(largest: float, narrow: NarrowType) -> int:
    """The power of two that brings a value of this magnitude into the range of the type; 0 where it is."""
    if 0 < largest < 4 * narrow.smallest_normal:
        return min(_SMALL - math.frexp(largest)[1] + 1, _MOST)
    if largest * HEADROOM > narrow.largest:
        return max(_LARGE - math.frexp(largest)[1] + 1, -_MOST)
    return 0


def _power_of_sum(node: ir.Node, ranges: ValueRanges, narrow: NarrowType) -> int:
    """The power of two with which the squares that ``node`` sums stay within the type; 0 where they do."""
    bounds, count = ranges.of(node.inputs[0]), reduced(node, ranges)
    if bounds is None or not count or count * bounds.largest**2 <= narrow.largest:
        return 0
    return max(math.floor(math.log2(narrow.largest / count) / 2 - math.log2(bounds.largest)), -_MOST)
