"""Scales of channels written into the constants of a network, and how they are chosen: equalization and migration.

Cross-layer equalization: weights of neighbouring layers rescaled so that one INT8 scale per tensor serves them.

Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction" (ICCV 2019), section 4.1: of two
layers in a row, channel ``i`` is multiplied by a factor that makes its range in the first weight, relative to that
tensor's, equal to its range in the second; repeated over the network until nothing changes. Here a channel may have
several makers and readers (residual sums, concatenations), of which the largest relative range counts. No data is
needed, and none is looked at: the activations' ranges change too, which can cost more than the weights gain. So it is
one candidate among others, to be kept where the error at the network's outputs falls.

Migration: the ranges of a layer's input channels traded against those of its weight, in the sense of SmoothQuant.

Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models" (ICML 2023):
input channel ``i`` is divided by ``s_i`` and the weight's columns are multiplied by it, ``s_i = max|x_i|^a /
max|w_i|^(1-a)``, and the division is folded into what computes the channel (equation 4). There ``a`` is one number
per network. Here the scale of each channel is the one of least expected error: ``a`` would be a path through the same
space, and on four of five networks of ``benchmarks/accuracy`` the best ``a`` was 0.5 to 1.6 dB behind.

The expected error of a product in INT8, with scales ``t`` written into its input (``x_i t_i``, ``w_ki / t_i``), is that
of uniform noise of one level's width (Widrow and Kollar, "Quantization Noise", 2008):

    (max_i a_i t_i)^2 sum_ki w_ki^2 / t_i^2  +  sum_k (max_i |w_ki| / t_i)^2 sum_i m_i t_i^2,    over 12 * 127^2

with ``a`` the largest magnitude and ``m`` the mean square of each channel, and the weight scaled per output channel
(TensorRT's convolutions and products; on TensorRT for RTX by a multiplication, see ``rules``). It counts relative to
the signal ``sum_ki w_ki^2 m_i``. Maxima are norms of order 8: they have a gradient, and a calibrated range clips the
rare extreme as well. Scales are found by descent on their logarithms, layer by layer, or together for layers that
share them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.conv import survives_half
from trtopt.precision.observe.calibrate import ChannelStats
from trtopt.precision.observe.ranges import LEVELS
from trtopt.precision.ptq.channel_scale_rules import channel_scales
from trtopt.precision.ptq.channel_scales import FIXED, ChannelScales, ScaledConstant
from trtopt.report.schema.steps import Refusal

_EPSILON = 1e-5
"""Epsilon of ONNX's normalizations where they do not say."""

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
        array = edit.array_of(constant.node.inputs[1])
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
    """A clone of ``model`` with positive float64 scales ``[count]`` written into its constants.

    Where a constant that FP16 can hold would become one that it cannot, the scales it takes up stay 1. ``channels`` was
    made from this model; ``refusals`` are those of whoever chose the scales.
    """
    scales, found = _that_fit(channels, scales)
    scaled = written_scales(model, channels, scales)
    return replace(scaled, refusals=(*refusals, *found))


def written_scales(model: ir.Model, channels: ChannelScales, scales: np.ndarray) -> Scaled:
    """As :func:`apply_scales`, whatever the constants become."""
    changed = [(item, factor) for item in channels.constants if (factor := _factor(item, scales)) is not None]
    epsilons = {name: scales[number] ** 2 for name, number in channels.epsilons.items() if scales[number] != 1}
    if not changed and not epsilons:
        return Scaled(model, 0, ())
    clone = model.clone()
    nodes, names = {node.name: node for node in clone.graph}, edit.Names(clone)
    for item, factor in changed:
        node = nodes[item.node.name]
        old, array = node.inputs[item.index], edit.array_of(node.inputs[item.index])
        name = names.value(f"{node.outputs[0].name}_scaled_{item.index}")
        content = np.asarray(array * factor, array.dtype)
        content = content.reshape(array.shape) if content.size == array.size else content
        new = edit.add_initializer(clone.graph, name, content)
        node.replace_input_with(item.index, new)
        used = old is None or old.uses() or old.is_graph_input() or old.is_graph_output()
        if old is not None and old.is_initializer() and not used:
            clone.graph.initializers.pop(str(old.name), None)
    for name, factor in epsilons.items():
        epsilon = edit.float_attribute(nodes[name], "epsilon", _EPSILON)
        nodes[name].attributes["epsilon"] = ir.AttrFloat32("epsilon", float(epsilon * factor))
    return Scaled(clone, sum(item.is_weight for item, _ in changed), ())


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


_SWEEPS = 40
_CONVERGED = 0.01
"""Largest change of a scale in a sweep, as a power of two, below which nothing changes any more."""


def equalize(model: ir.Model, nodes: Collection[str]) -> Scaled:
    """A model that computes the same, with the weights of ``nodes`` equalized with those of their neighbours.

    The model is widened, its nodes named, its shapes inferred; ``nodes`` are products that may become INT8, and
    channels that none of them makes are left alone. Refusals name those of whose outputs no channel can be scaled.
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


_ORDER = 8
_STEPS = 120
_MOST_OUTPUTS = 512
"""Outputs of a group that stand for all of them in the error of a weight, evenly spread: a descent reads its weight 120
times."""
_RATE = 0.1
"""First step of a scale, as a natural logarithm; it falls linearly to zero."""

_MEANS = (0.9, 0.99)
"""Decay of the running means of the gradient and of its square (Adam: Kingma and Ba, 2015)."""

_PROGRESS, _PATIENCE = 1e-3, 8
"""The descent ends when the error has not fallen by this share for so many steps."""

_LEAST_GAIN = 0.05
"""Share of the expected error that scales have to save."""

_TINY = 1e-30
_PREFIX = "trtopt/migrate/"


def smooth(
    model: ir.Model, nodes: Collection[str], stats: Mapping[str, ChannelStats], multiply: bool = False
) -> Scaled:
    """A model that computes the same, with the inputs of ``nodes`` scaled for the least expected INT8 error.

    Args:
        model: A widened model, nodes named, shapes inferred.
        nodes: The names of products that may become INT8. Leave out those that are kept from it for their input's
            heavy tail: once it is scaled away the tensor looks harmless, and its error at the outputs is as before.
        stats: What was observed of their data inputs, by tensor (see ``calibrate.product_inputs``).
        multiply: Whether matrix products whose input nothing can be folded into (behind GELU, behind a norm that a
            residual reads too) get a multiplication per channel in front, which quantizing then takes in.

    Returns:
        Refusals name those of ``nodes`` of whose inputs no channel can be scaled.
    """
    base, channels = model, channel_scales(model)
    if multiply:
        model, stats = with_multiplications(model, channels, nodes, stats)
        channels = channel_scales(model)
    products = [node for node in model.graph if node.name in nodes and node.name in channels.reads]
    free = [node for node in products if channels.reads[str(node.name)].any()]
    observed = [(node, found) for node in free if (found := stats.get(str(node.inputs[0].name))) is not None]  # type: ignore[union-attr]
    scales = _migrating_scales(channels, observed)
    why = channels.why_not_read
    scaled = apply_scales(model, channels, scales, [Refusal(name, why[name]) for name in why if name in nodes])
    if not scaled.changes:
        return replace(scaled, model=base)
    if multiply:
        _drop_ones(scaled.model)
    return scaled


def with_multiplications(
    model: ir.Model, channels: ChannelScales, nodes: Collection[str], stats: Mapping[str, ChannelStats]
) -> tuple[ir.Model, dict[str, ChannelStats]]:
    """A clone with a multiplication by ones in front of matrix products whose inputs have no free channel, and
    ``stats`` with those of the new tensors."""
    clone, known = model.clone(), dict(stats)
    names = edit.Names(clone)
    made: dict[ir.Value, ir.Value] = {}
    for node in list(clone.graph):
        data = node.inputs[0] if node.op_type in ("MatMul", "Gemm") and node.name in nodes else None
        if data is None or node.name not in channels.why_not_read or data.producer() is None or data.name not in known:
            continue
        if data not in made:
            width = known[str(data.name)].absmax.size
            ones = edit.add_initializer(clone.graph, names.value(f"{data.name}_migration"), np.ones(width, np.float32))
            output = names.value(f"{data.name}_migrated")
            mul = edit.new_node("Mul", [data, ones], name=names.node(f"{_PREFIX}{output}"), output=output, like=data)
            clone.graph.insert_before(node, mul)  # of its readers, nodes in order, this is the first
            known[output] = known[str(data.name)]
            made[data] = mul.outputs[0]
        node.replace_input_with(0, made[data])
    return clone, known


def _drop_ones(model: ir.Model) -> None:
    """Remove the multiplications that were not wanted after all, in place."""
    for node in list(model.graph):
        factor = edit.constant_of(node.inputs[1]) if str(node.name).startswith(_PREFIX) else None
        data, ones = (node.inputs[0], node.inputs[1]) if factor is not None else (None, None)
        if factor is not None and data is not None and ones is not None and (factor == 1).all():
            edit.replace_value(node.outputs[0], data)
            edit.remove_node(node)
            model.graph.initializers.pop(str(ones.name), None)


def _migrating_scales(channels: ChannelScales, observed: Sequence[tuple[ir.Node, ChannelStats]]) -> np.ndarray:
    """The scales of least expected error, float64 ``[channels.count]``; weights are held for one group at a time."""
    scales = np.ones(channels.count)
    reads = {str(node.name): channels.reads[str(node.name)] for node, _ in observed}
    for group in linked(list(reads.values()), channels.count):
        own = [
            ExpectedError(node, reads[str(node.name)], stats)
            for node, stats in observed
            if np.isin(reads[str(node.name)], group).any()
        ]
        own = [reader for reader in own if reader.has_signal]
        if own:
            scales[group] = _descend(group, own, channels.count)
    return scales


class ExpectedError:
    """The expected INT8 error of one product as a function of the scales of its input.

    Its weight is held as ``[groups, K, C]``: outputs and inputs of each group.
    """

    def __init__(self, node: ir.Node, reads: np.ndarray, stats: ChannelStats) -> None:
        weight = _grouped(node)
        groups, _, width, positions = weight.shape
        self.reads = reads.reshape(groups, width)
        self.largest = stats.absmax.astype(np.float64).reshape(groups, width)
        self._amax = max(float(self.largest.max()), _TINY)
        self._relative = self.largest / self._amax
        self._squares = positions * stats.mean_square.astype(np.float64).reshape(groups, width)
        magnitudes = np.abs(weight).max(axis=-1)
        self._wmax = max(float(magnitudes.max(initial=0)), _TINY)
        some = magnitudes[:, :: -(-magnitudes.shape[1] // _MOST_OUTPUTS)]
        self._powers = (some / np.float32(self._wmax)) ** np.float32(_ORDER)
        self._share = magnitudes.shape[1] / some.shape[1]
        self._columns = np.square(weight, dtype=np.float32).sum(axis=(1, 3), dtype=np.float64)
        self._signal = float((self._columns * self._squares).sum()) / positions
        self._unit = 1 / (12 * LEVELS**2 * max(self._signal, _TINY))

    @property
    def has_signal(self) -> bool:
        """Whether the product is ever anything but zero: there is an error relative to something."""
        return bool(self._signal > _TINY)

    def error(self, scales: np.ndarray, slope: np.ndarray) -> float:
        """Noise over signal at the output; its derivative by the logarithm of each scale is added to ``slope``."""
        own = scales[self.reads]
        squared = own * own
        rounded = (self._relative * own) ** _ORDER
        total = float(rounded.sum())
        range_ = total ** (2 / _ORDER) * self._amax**2
        spread = self._columns / squared
        data = self._unit * range_ * float(spread.sum())
        by_data = 2 * data * (rounded / total - spread / float(spread.sum()))
        inverse = (own**-_ORDER).astype(np.float32)
        rows = _rows(self._powers, inverse) + 1e-38
        steps = self._share * rows ** (2 / _ORDER) * self._wmax**2
        power = self._squares * squared
        powers = power.sum(axis=1, keepdims=True)
        weight = self._unit * float((steps * powers).sum())
        by_steps = _columns((steps / rows * powers).astype(np.float32), self._powers) * inverse
        by_weight = 2 * self._unit * (steps.sum(axis=1, keepdims=True) * power - by_steps)
        np.add.at(slope, self.reads, by_data + by_weight)
        return float(data + weight)


def _grouped(node: ir.Node) -> np.ndarray:
    """The weight of a product as ``[groups, outputs, inputs, positions]``, float32."""
    array = edit.array_of(node.inputs[1])
    groups = edit.int_attribute(node, "group", 1)
    if node.op_type == "Conv":
        return array.reshape(groups, array.shape[0] // groups, array.shape[1], -1)
    if node.op_type == "ConvTranspose":
        return array.reshape(groups, array.shape[0] // groups, array.shape[1], -1).swapaxes(1, 2)
    return (array if edit.int_attribute(node, "transB", 0) else array.T)[None, :, :, None]


def _rows(matrices: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """``[g, K, C]`` times ``[g, C]``, as float64 ``[g, K]``."""
    if len(matrices) == 1:  # a plain product is several times faster than one of stacked matrices
        return np.asarray(matrices[0] @ vectors[0], np.float64)[None]
    return np.asarray(np.einsum("gkc,gc->gk", matrices, vectors), np.float64)


def _columns(vectors: np.ndarray, matrices: np.ndarray) -> np.ndarray:
    """``[g, K]`` times ``[g, K, C]``, as float64 ``[g, C]``."""
    if len(matrices) == 1:
        return np.asarray(vectors[0] @ matrices[0], np.float64)[None]
    return np.asarray(np.einsum("gk,gkc->gc", vectors, matrices), np.float64)


def _descend(group: np.ndarray, readers: Sequence[ExpectedError], count: int) -> np.ndarray:
    """The best scales found for ``group``, ones where they save too little."""
    logs, limit = np.zeros(count), math.log(LARGEST_SCALE) / 2
    mean, square = np.zeros(len(group)), np.zeros(len(group))
    first, least, best, last = math.inf, math.inf, np.zeros(len(group)), 0
    for step in range(1, _STEPS + 1):
        slope, scales = np.zeros(count), np.exp(logs)
        error = sum(reader.error(scales, slope) for reader in readers)
        first = error if step == 1 else first
        if error < least * (1 - _PROGRESS):
            last = step
        if error < least:
            least, best = error, logs[group].copy()
        if step - last > _PATIENCE:
            break
        mean = _MEANS[0] * mean + (1 - _MEANS[0]) * slope[group]
        square = _MEANS[1] * square + (1 - _MEANS[1]) * slope[group] ** 2
        direction = (mean / (1 - _MEANS[0] ** step)) / (np.sqrt(square / (1 - _MEANS[1] ** step)) + _TINY)
        rate = _RATE * (1 - (step - 1) / _STEPS)
        logs[group] = np.clip(logs[group] - rate * direction, -limit, limit)
    if not least < (1 - _LEAST_GAIN) * first:
        return np.ones(len(group))
    logs[group] = best
    return np.asarray(np.exp(best) * _without_growth(np.exp(logs), readers))


def _without_growth(scales: np.ndarray, readers: Sequence[ExpectedError]) -> float:
    """A common factor, which changes no error, with which no tensor's largest magnitude grows."""
    if any((reader.reads == FIXED).any() for reader in readers):
        return 1.0
    growth = max(
        float((reader.largest * scales[reader.reads]).max()) / max(float(reader.largest.max()), _TINY)
        for reader in readers
    )
    return 1 / growth if growth > 0 else 1.0
