"""Migration: the ranges of a layer's input channels traded against those of its weight, in the sense of SmoothQuant.

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
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.precision.observe.channel_stats import ChannelStats
from trtopt.precision.observe.ranges import LEVELS
from trtopt.precision.ptq.channel_scale_rules import channel_scales
from trtopt.precision.ptq.channel_scales import FIXED, ChannelScales
from trtopt.precision.ptq.scaling import LARGEST_SCALE, Scaled, apply_scales, linked
from trtopt.report.schema.steps import Refusal

_ORDER = 8
_STEPS = 120
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
        stats: What was observed of their data inputs, by tensor (see ``channel_stats.product_inputs``).
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
    """A clone with a multiplication by ones in front of matrix products whose inputs have no free channel.

    Returns:
        The clone, and ``stats`` with those of the new tensors.
    """
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
        self._powers = (magnitudes / np.float32(self._wmax)) ** np.float32(_ORDER)
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
        steps = rows ** (2 / _ORDER) * self._wmax**2
        power = self._squares * squared
        powers = power.sum(axis=1, keepdims=True)
        weight = self._unit * float((steps * powers).sum())
        by_steps = _columns((steps / rows * powers).astype(np.float32), self._powers) * inverse
        by_weight = 2 * self._unit * (steps.sum(axis=1, keepdims=True) * power - by_steps)
        np.add.at(slope, self.reads, by_data + by_weight)
        return float(data + weight)


def _grouped(node: ir.Node) -> np.ndarray:
    """The weight of a product as ``[groups, outputs, inputs, positions]``, float32."""
    array = edit.constant_of(node.inputs[1])
    if array is None:
        raise ValueError(f"the weight of {node.name} is no constant")
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
