"""Cross-layer equalization: weights of neighbouring layers rescaled so that one INT8 scale per tensor serves them.

Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction" (ICCV 2019), section 4.1: of two
layers in a row, channel ``i`` is multiplied by a factor that makes its range in the first weight, relative to that
tensor's, equal to its range in the second; repeated over the network until nothing changes. Here a channel may have
several makers and readers (residual sums, concatenations), of which the largest relative range counts. No data is
needed, and none is looked at: the activations' ranges change too, which can cost more than the weights gain. So it is
one candidate among others, to be kept where the error at the network's outputs falls.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from trtopt.precision.ptq.channel_scale_rules import channel_scales
from trtopt.precision.ptq.channel_scales import ChannelScales
from trtopt.precision.ptq.scaling import LARGEST_SCALE, Scaled, Weight, apply_scales, largest_by_scale, linked
from trtopt.report.schema.steps import Refusal

_SWEEPS = 40
_CONVERGED = 0.01
"""Largest change of a scale in a sweep, as a power of two, below which nothing changes any more."""


def equalize(model: ir.Model, nodes: Collection[str]) -> Scaled:
    """A model that computes the same, with the weights of ``nodes`` equalized with those of their neighbours.

    Args:
        model: A widened model, nodes named, shapes inferred.
        nodes: The names of products that may become INT8; channels that none of them makes are left alone.

    Returns:
        Refusals name those of ``nodes`` of whose outputs no channel can be scaled.
    """
    channels = channel_scales(model)
    scales = _equalizing_scales(channels, nodes)
    refusals = [Refusal(name, channels.why_not_written[name]) for name in channels.why_not_written if name in nodes]
    return apply_scales(model, channels, scales, refusals)


def _equalizing_scales(channels: ChannelScales, nodes: Collection[str]) -> np.ndarray:
    weights = [Weight(item) for item in channels.constants if item.is_weight]
    scales = np.ones(channels.count, np.float32)
    groups = [group for group in linked([w.makes for w in weights], channels.count) if _has_int8(group, weights, nodes)]
    around = [
        (
            [w for w in weights if np.isin(w.makes, group).any()],
            [w for w in weights if np.isin(w.sums, group).any()],
        )
        for group in groups
    ]
    for _ in range(_SWEEPS):
        before = scales.copy()
        for group, (makers, readers) in zip(groups, around, strict=True):
            _update(scales, group, makers, readers, nodes)
        if np.abs(np.log2(scales / before)).max() < _CONVERGED:
            break
    return scales.astype(np.float64)


def _has_int8(group: np.ndarray, weights: list[Weight], nodes: Collection[str]) -> bool:
    return any(w.node in nodes and np.isin(w.makes, group).any() for w in weights)


def _update(
    scales: np.ndarray, group: np.ndarray, makers: list[Weight], readers: list[Weight], nodes: Collection[str]
) -> None:
    """One step for the channels of ``group``; those of which a weight holds zeros alone are left as they are.

    Weights that stay 16-bit have no range to keep: channels that only such weights read are made alike.
    """
    made = _ranges(scales, [(weight, weight.makes) for weight in makers if weight.node in nodes])
    read = _ranges(scales, [(weight, weight.sums) for weight in readers if weight.node in nodes])
    if not any(weight.node in nodes for weight in readers):
        read, made = np.ones_like(scales), np.square(made)
    alive = group[(made[group] > 0) & (read[group] > 0)]
    if alive.size:
        updated = scales[alive] * np.sqrt(read[alive] / made[alive])
        # Only ratios matter to weights; activations keep their magnitude on the (geometric) average.
        updated /= np.exp(np.log(updated).mean())
        scales[alive] = np.clip(updated, 1 / LARGEST_SCALE, LARGEST_SCALE)


def _ranges(scales: np.ndarray, weights: list[tuple[Weight, np.ndarray]]) -> np.ndarray:
    """For each scale the largest range in any of the weights, relative to that weight's."""
    found = np.zeros_like(scales)
    for weight, numbers in weights:
        values = weight.scaled(scales)
        ranges = largest_by_scale(values, numbers, len(scales)) / max(float(values.max(initial=0)), 1e-30)
        found = np.maximum(found, ranges)
    return found
