"""Scales of channels written into the constants of a network, and the ranges of weights that choose them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.conv import survives_half
from trtopt.precision.ptq.channel_scales import FIXED, ChannelScales, ScaledConstant
from trtopt.report.schema.build import Refusal

LARGEST_SCALE = 2.0**8
"""Scales stay between its inverse and itself: beyond, FP16 loses small weights or overflows."""


@dataclass(frozen=True)
class Scaled:
    """A network that computes the same with channels scaled.

    Attributes:
        model: A clone with new constants; the model itself where nothing changed.
        changes: Nodes whose weights changed.
        refusals: Nodes whose channels could not be scaled, with the reason.
    """

    model: ir.Model
    changes: int
    refusals: tuple[Refusal, ...]


class Weight:
    """The magnitudes of a weight by the scales it makes and sums.

    Attributes:
        node: The product's name.
        makes: int64 ``[a, b]`` or with length 1 along either axis: the scales of the first two axes of the weight.
        sums: The same for what is multiplied with it.
        largest: float32 ``[a, b]``, the largest magnitude over the other axes.
    """

    def __init__(self, constant: ScaledConstant) -> None:
        array = edit.constant_of(constant.node.inputs[1])
        if array is None:
            raise ValueError(f"the weight of {constant.name} is no constant")
        others = tuple(range(2, array.ndim))
        self.node = constant.name
        self.largest = np.abs(array).max(axis=others, initial=0.0).astype(np.float32)
        self.makes, self.sums = (
            np.zeros((1, 1), np.int64) if scales is None else scales.reshape(scales.shape[:2])
            for scales in (constant.makes, constant.sums)
        )

    def scaled(self, scales: np.ndarray) -> np.ndarray:
        """``largest`` with float32 ``scales`` ``[count]`` written into it."""
        result: np.ndarray = self.largest * scales[self.makes] / scales[self.sums]
        return result


def largest_by_scale(values: np.ndarray, numbers: np.ndarray, count: int) -> np.ndarray:
    """The largest of ``values`` ``[a, b]`` for each scale, float32 ``[count]``; ``numbers`` broadcasts to them."""
    for axis in (0, 1):
        if numbers.shape[axis] == 1:
            values, numbers = values.max(axis=axis, keepdims=True), numbers.max(axis=axis, keepdims=True)
    found = np.zeros(count, np.float32)
    np.maximum.at(found, np.broadcast_to(numbers, values.shape).ravel(), values.ravel())
    found[FIXED] = 0
    return found


def linked(arrays: Sequence[np.ndarray], count: int) -> list[np.ndarray]:
    """Scales that stand together in some array, as groups of ascending numbers; the fixed one is in none."""
    label = np.arange(count)
    for array in arrays:
        found = np.unique(array)
        found = found[found != FIXED]
        if found.size:
            labels = np.unique(label[found])
            label[np.isin(label, labels)] = labels[0]
    present = np.unique(np.concatenate([np.zeros(0, np.int64), *(np.unique(array) for array in arrays)]))
    present = present[present != FIXED]
    return [present[label[present] == each] for each in np.unique(label[present])]


def apply_scales(
    model: ir.Model, channels: ChannelScales, scales: np.ndarray, refusals: Sequence[Refusal] = ()
) -> Scaled:
    """A clone of ``model`` with scales written into its constants.

    Where a constant that FP16 can hold would become one that it cannot, the scales it takes up stay 1.

    Args:
        model: The model ``channels`` was made from.
        channels: Its free scales.
        scales: float64 ``[count]``, positive; not changed.
        refusals: Of whoever chose the scales.
    """
    scales, found = _that_fit(channels, scales)
    changed = [(item, factor) for item in channels.constants if (factor := _factor(item, scales)) is not None]
    if not changed:
        return Scaled(model, 0, (*refusals, *found))
    clone = model.clone()
    nodes, names = {node.name: node for node in clone.graph}, edit.Names(clone)
    for item, factor in changed:
        node = nodes[item.node.name]
        old, array = node.inputs[item.index], edit.constant_of(node.inputs[item.index])
        if array is None or old is None:
            raise ValueError(f"input {item.index} of {node.name} is no constant")
        name = names.value(f"{node.outputs[0].name}_scaled_{item.index}")
        content = (array * factor).astype(array.dtype)
        content = content.reshape(array.shape) if content.size == array.size else content
        new = edit.add_initializer(clone.graph, name, content)
        node.replace_input_with(item.index, new)
        if old.is_initializer() and not old.uses() and not old.is_graph_input() and not old.is_graph_output():
            clone.graph.initializers.pop(str(old.name), None)
    return Scaled(clone, sum(item.is_weight for item, _ in changed), (*refusals, *found))


def _that_fit(channels: ChannelScales, scales: np.ndarray) -> tuple[np.ndarray, list[Refusal]]:
    """``scales`` without those that would move a constant out of FP16's range."""
    kept = scales.copy()
    found: dict[str, Refusal] = {}
    for _ in range(len(channels.constants)):
        broken = [item for item in channels.constants if item.name not in found and not _fits(item, kept)]
        for item in broken:
            found[item.name] = Refusal(item.name, "its constants would leave the range of FP16")
            for numbers in (item.makes, item.sums):
                if numbers is not None:
                    kept[np.unique(numbers)] = 1.0
        if not broken:
            break
    return kept, list(found.values())


def _fits(item: ScaledConstant, scales: np.ndarray) -> bool:
    factor = _factor(item, scales)
    array = edit.constant_of(item.node.inputs[item.index])
    if factor is None or array is None:
        return True
    return survives_half(array * factor) or not survives_half(array)


def _factor(item: ScaledConstant, scales: np.ndarray) -> np.ndarray | None:
    """What a constant is multiplied by, float64; None for ones."""
    factor = np.ones(())
    if item.makes is not None:
        factor = factor * scales[item.makes]
    if item.sums is not None:
        factor = factor / scales[item.sums]
    return None if (factor == 1).all() else factor
