"""A walk along the network: weights rounded and biases corrected, each with the noise of the layers before it.

INT8 weights that are rounded together, so that the errors of one make up for those of the others.

The output of a layer is ``X W`` with rows of inputs ``X [rows, K]`` and the weight ``W [K, N]``. Rounding each weight
to its nearest level is best for each alone, and poor for their sum. Wanted are levels ``Q`` that minimise
``|X' Q - X W|^2``, where ``X'`` is what the layer will really read: the quantized input, with the noise of the layers
before it.

That is a search for the nearest point of a lattice, per output channel. With ``X'^T X' = R^T R`` (Cholesky, R upper
triangular) the squared distance is a sum over k whose k-th term depends on the weights k, ..., K only: so the last one
is rounded first, and each further one such that its term is as small as it can be. This is Babai's nearest plane
algorithm (Babai 1986), and what GPTQ computes (Frantar et al. 2023, after Optimal Brain Surgeon), without the inverse
that GPTQ takes. The search aims not at ``W`` but at ``W + (X'^T X')^-1 X'^T (X - X') W``, which makes up for as much of
the noise that the layer reads as a weight can (as GPTAQ, Li et al. 2025).

AdaRound (Nagel et al. 2020) solves the same least squares per layer by gradient descent over a soft choice of up or
down: thousands of iterations per layer, for which it needs an automatic differentiation package. The search here is
direct (one factorisation per layer), deterministic, not bound to the two nearest levels, and needs numpy only.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from trtopt.events import Event, OnEvent, ignore
from trtopt.graph import edit
from trtopt.hardware.cpu import available_threads
from trtopt.precision.bias import why_no_bias
from trtopt.precision.observe.feeds import Sample
from trtopt.precision.observe.ranges import LEVELS
from trtopt.precision.plan import PrecisionPlan, QuantizedOp
from trtopt.precision.ptq.layer_walk import (
    ProductLayer,
    Stop,
    channels_of,
    layer_of,
    positions,
    reading_key,
    rows_at,
    rows_read,
    spread,
    walk,
)
from trtopt.precision.write import activation_scale, eight_bit, even_channels, quantize, quantize_weight, scale_channels
from trtopt.support.precision import Precision
from trtopt.support.threads import in_threads

BLOCK_DEPTH = 1024
"""Inputs of a layer that are factorised together. A layer with more is rounded in blocks, each of which makes up for
the error of those before it: the factor of K inputs takes K^2 numbers and K^3 / 3 multiplications, and large layers are
deep (4608 in the last stage of a ResNet-50)."""

_ROWS_PER_INPUT, _FIT_PRODUCTS = 4, 1 << 33
"""Rows that are read of a layer for each of the inputs that are factorised together, where more of them would take more
multiplications with the layer's weight than this."""

DAMPING = 0.01
"""Share of the mean of the diagonal of ``X'^T X'`` that is added to it, as in GPTQ: rows are few, and weights of
inputs that were never seen must not run away."""

_ROWS_AT_ONCE = 192
"""A multiple of the rows that BLAS computes at once: 48 on x86-64 with AVX-512."""

_LONG_PRODUCT = 1 << 27
"""Multiplications above which a product is shared among cores: 2 ms of one."""

_LEAF = 64
"""Inputs that LAPACK factorises at once; more are halved, so that products of matrices do most of the work."""

_UNIT = np.ones((1, 1), np.float32)

_ONE_BY_ONE = 8
"""Inputs that are rounded one by one; more are halved."""


@dataclass(frozen=True)
class LayerRows:
    """Sampled rows of one group of a layer.

    Attributes:
        exact: float32 ``[rows, K]``, as the FP32 network computes them.
        quantized: float32 ``[rows, K]``, as the quantized network's layer reads them, quantized and dequantized.
    """

    exact: np.ndarray
    quantized: np.ndarray


def blocks(depth: int) -> list[slice]:
    """The inputs of a layer in blocks of equal size, at most :data:`BLOCK_DEPTH` each."""
    count = -(-depth // BLOCK_DEPTH)
    ends = [index * depth // count for index in range(count + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


def product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """``left @ right`` of matrices, by rows on all cores where it is long.

    Rows are shared at multiples of what BLAS computes at once, so that the result is that of one core: to the bit on
    x86-64 with AVX-512.
    """
    parts = min(len(left) // _ROWS_AT_ONCE, available_threads())
    if parts < 2 or left.size * right.shape[1] < _LONG_PRODUCT:
        found: np.ndarray = left @ right
        return found
    found = np.empty((len(left), right.shape[1]), np.result_type(left, right))
    ends = [len(left) * index // parts // _ROWS_AT_ONCE * _ROWS_AT_ONCE for index in range(parts)]

    def compute(_: int, rows: slice) -> None:
        np.matmul(left[rows], right, out=found[rows])

    in_threads((slice(*rows) for rows in itertools.pairwise((*ends, len(left)))), compute, parts, TASK)
    return found


class Factor:
    """The factor ``R`` of a block of inputs: ``R^T R = X'^T X' + damping``; for all layers that read them.

    Means are not taken out, though a bias could make up for them: the error grows with the inputs, and is nothing where
    they are zero.

    Args:
        inputs: ``X'``, float32 ``[rows, K]``.

    Raises:
        numpy.linalg.LinAlgError: The rows are not finite, or their squares are not.
    """

    def __init__(self, inputs: np.ndarray) -> None:
        self._inputs = inputs
        with np.errstate(over="ignore", invalid="ignore"):  # it raises below
            gram = inputs.T @ inputs
        diagonal = np.diagonal(gram).copy()
        if not np.isfinite(diagonal).all():
            raise np.linalg.LinAlgError("the inputs are not finite, or too large for their squares")
        # The strongest inputs are rounded first, that is, stand last: the others can make up for their errors.
        self._order = np.argsort(diagonal, kind="stable")
        gram = gram[np.ix_(self._order, self._order)]
        gram[np.diag_indices_from(gram)] += DAMPING * max(float(diagonal.mean()), 1e-20)
        upper, self._inverse = _factorised(gram)
        self._unit = upper / np.diagonal(upper)[:, None]

    def correction(self, error: np.ndarray) -> np.ndarray:
        """What to add to the weight ``[K, N]`` to make up for an error of the outputs ``[rows, N]``; float32."""
        pull = product(self._inputs.T, error)[self._order]
        result: np.ndarray = np.empty_like(pull)
        result[self._order] = -product(self._inverse, product(self._inverse.T, pull))
        return result

    def round(
        self, target: np.ndarray, free: np.ndarray, steps: np.ndarray = _UNIT, largest: float = LEVELS
    ) -> np.ndarray:
        """Levels for a target: int8 ``[K, N]``, within -``largest``..``largest``.

        Args:
            target: In units of the weight, ``[K, N]``.
            free: bool ``[K, N]``: False where the level is to be 0.
            steps: The distance of two levels, ``[K, N]``, or ``[1, N]`` for one of each column.
            largest: The largest level.
        """
        if len(steps) == 1:
            target, steps = target / steps, np.ones((len(target), 1), np.float32)
        left, ordered = target[self._order], steps[self._order]
        levels = left.copy()
        _round(self._unit, levels, left, free[self._order], ordered, largest)
        result = np.empty(target.shape, np.int8)
        result[self._order] = np.rint(levels / ordered)
        return result


def _factorised(gram: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``R``, upper triangular, with ``R^T R = gram``, and its inverse."""
    if len(gram) <= _LEAF:
        root = np.linalg.cholesky(gram).T
        return root, np.triu(np.linalg.inv(root))
    first, last = slice(len(gram) // 2), slice(len(gram) // 2, None)
    upper, inverse = np.zeros_like(gram), np.zeros_like(gram)
    upper[first, first], inverse[first, first] = _factorised(gram[first, first])
    upper[first, last] = beside = inverse[first, first].T @ gram[first, last]
    upper[last, last], inverse[last, last] = _factorised(gram[last, last] - beside.T @ beside)
    inverse[first, last] = -inverse[first, first] @ (beside @ inverse[last, last])
    return upper, inverse


def _round(
    unit: np.ndarray, best: np.ndarray, left: np.ndarray, free: np.ndarray, steps: np.ndarray, largest: float
) -> None:
    """Round in place, the last first; each makes up for what those behind it left.

    ``unit`` is ``R`` with its rows divided by their diagonal elements. ``best`` is what the levels were to be, ``[K,
    N]``, and how far those behind shifted that; it becomes the levels, times their ``steps``, and ``left`` what is
    left. Levels that are not ``free`` are 0.
    """
    size = len(unit)
    if size > _ONE_BY_ONE:
        first, last = slice(size // 2), slice(size // 2, None)
        _round(unit[last, last], best[last], left[last], free[last], steps[last], largest)
        best[first] += product(unit[first, last], left[last])
        _round(unit[first, first], best[first], left[first], free[first], steps[first], largest)
        return
    for row in reversed(range(size)):
        best[row] += unit[row, row + 1 :] @ left[row + 1 :]
        best[row] *= free[row]
        best[row] /= steps[row]
        np.rint(best[row], out=best[row])
        np.clip(best[row], -largest, largest, out=best[row])
        best[row] *= steps[row]
        left[row] -= best[row]


def best_share(error: np.ndarray, effect: np.ndarray) -> float:
    """How much of a correction to apply, 0..1: what gives the least error on rows that it was not made from.

    A correction fits the noise of the rows it is made from too, the more so the fewer they are; the error ``[rows, N]``
    is a parabola in its share. ``effect`` is what the correction changes in it.
    """
    power = float(np.vdot(effect, effect))
    return min(max(-float(np.vdot(effect, error)) / power, 0.0), 1.0) if power > 0 else 0.0


TASK = "refine"
"""The name of the progress events' task."""

LARGEST_DEPTH = 1 << 15
"""The largest K of a layer whose weight is rounded anew: 512 rows of it are within :data:`ROW_ELEMENTS`, and fewer tell
nothing."""

_HELD_OUT = 4
"""Every so many-th sample of the walk is kept from the fit of a layer, and decides whether its rounding stays."""


@dataclass(frozen=True)
class Goal:
    """What is to be found: weights rounded anew, corrected biases, or both."""

    rounding: bool
    bias: bool


@dataclass(frozen=True)
class Corrections:
    """What was found for one wish, as :class:`~trtopt.precision.plan.PrecisionPlan` takes it."""

    rounded: dict[str, np.ndarray] = field(default_factory=dict)
    bias: dict[str, np.ndarray] = field(default_factory=dict)


def correct(
    base: ir.Model,
    plan: PrecisionPlan,
    samples: Sequence[Sample],
    wishes: Sequence[Goal],
    *,
    seed: int = 0,
    on_event: OnEvent = ignore,
) -> list[Corrections]:
    """Round the weights of a plan's nodes and correct their biases, in the order of the graph.

    Each node is fitted to what the quantized network will give it, with the corrections of all nodes before it, and
    to the FP32 network's outputs.

    Args:
        base: The widened model the plan was made for.
        plan: What it says of rounding and biases is not looked at.
        samples: At least 2, all held in memory.
        wishes: What to look for; each has a quantized network of its own, and all share one walk.
        seed: Which positions of the layers' inputs are looked at.
        on_event: ``start``, ``advance`` after each node and ``end`` of the task ``refine``.

    Returns:
        What was found for each wish.
    """
    ops = {op.node: op for op in plan.quantized}
    works = [_Walk(plan, wish, seed) for wish in wishes]
    on_event(Event("start", TASK, total=len(ops)))
    for stop in walk(base, list(ops), samples, len(works)):
        works[stop.network].visit(stop, ops[str(stop.node.name)])
        if stop.network == len(works) - 1:
            on_event(Event("advance", TASK))
    on_event(Event("end", TASK))
    return [work.found for work in works]


@dataclass(frozen=True)
class _Inputs:
    """Rows of a layer's input, per group: for the fit, kept from it, and factorised in blocks."""

    key: Hashable
    fit: tuple[LayerRows, ...]
    kept: tuple[LayerRows, ...]
    factors: tuple[tuple[Factor, ...], ...]


@dataclass(frozen=True)
class _Stored:
    """A weight as the plan stores it: INT8 values, the step of each output channel, and the scale inside the node."""

    values: np.ndarray
    steps: np.ndarray
    scale: float


class _Walk:
    """One wish on its way along the network."""

    def __init__(self, plan: PrecisionPlan, wish: Goal, seed: int) -> None:
        self._plan, self._wish, self._seed = plan, wish, seed
        self.found = Corrections()
        self._inputs: _Inputs | None = None

    def visit(self, stop: Stop, op: QuantizedOp) -> None:
        """Find what one node is to have, and run it so."""
        biased = self._wish.bias and why_no_bias(stop.node) is None
        if self._wish.rounding:
            self._round(stop, op, biased)
        rounded = {name: values for name, values in self.found.rounded.items() if name == op.node}
        part = dataclasses.replace(self._plan, quantized=(op,), rounded=rounded, bias={})
        exact, noisy = stop.run(quantize(stop.subgraph, part).model)
        if biased:
            shift = mean_error(stop.node, exact, noisy)
            self.found.bias[op.node] = -shift
            for index, array in enumerate(noisy):
                noisy[index] = array - spread(shift, stop.node, array.ndim)

    def _round(self, stop: Stop, op: QuantizedOp, biased: bool) -> None:
        """Keep new values of the node's weight where they are better on samples kept from the fit."""
        layer = layer_of(stop.node)
        if isinstance(layer, str) or not _can_round(layer, op):
            return
        try:
            inputs = self._read(layer, op, stop)
        except np.linalg.LinAlgError:  # its inputs are not finite
            return
        before = _stored(layer, op, self._plan)
        levels, noise = _search(layer, before, inputs, biased)
        if noise[1] < noise[0] and _fits(layer, levels, before.scale, op, self._plan):
            self.found.rounded[op.node] = levels

    def _read(self, layer: ProductLayer, op: QuantizedOp, stop: Stop) -> _Inputs:
        """Rows of both networks; remembered for the next node, which may read the same."""
        key = (op.activation, op.activation_amax, reading_key(layer), op.node in self._plan.wide)
        if self._inputs is not None and self._inputs.key == key:
            return self._inputs
        self._inputs = None
        rng = np.random.default_rng([self._seed, zlib.crc32(op.activation.encode())])
        rows = max(_ROWS_PER_INPUT * min(layer.depth, BLOCK_DEPTH), _FIT_PRODUCTS // layer.weight.size)
        share = max(min(rows, rows_read(layer)) // len(stop.exact), 1)
        scale = activation_scale(op.activation_amax, None if op.node in self._plan.wide else self._plan.narrow)
        parts: tuple[list[tuple[np.ndarray, np.ndarray]], ...] = ([], [])
        for index, (exact, noisy) in enumerate(zip(stop.exact, stop.noisy, strict=True)):
            chosen = positions(layer, exact.shape, share, rng)
            both = rows_at(layer, exact, chosen), _quantized(rows_at(layer, noisy, chosen), scale)
            parts[is_held(index, len(stop.exact))].append(both)
        fit, held = (
            tuple(
                LayerRows(*(np.concatenate([pair[side][group] for pair in part]) for side in (0, 1)))
                for group in range(layer.groups)
            )
            for part in parts
        )
        del parts
        parts_of_depth = blocks(layer.depth)
        factors = (tuple(Factor(rows.quantized[:, part]) for part in parts_of_depth) for rows in fit)
        self._inputs = _Inputs(key, fit, held, tuple(factors))
        return self._inputs


def mean_error(node: ir.Node, exact: Sequence[np.ndarray], noisy: Sequence[np.ndarray]) -> np.ndarray:
    """The mean of the error of each output channel, as far as it is more than chance: float32 ``[channels]``.

    Where a ReLU follows, positions at which both networks' outputs are cut off do not count. Samples are taken as
    independent, positions within them are not: the mean is a ratio of sums over samples, and its variance ``v`` that
    of a ratio estimator (Cochran, Sampling Techniques, 1977, section 6.3). A channel with the mean ``m`` gets
    ``m (1 - v / m^2)``, or 0: the positive-part shrinkage of James and Stein.

    Args:
        node: The node.
        exact: Its outputs in the FP32 network, per sample.
        noisy: The same in the quantized network.
    """
    cut = _only_reader_is_relu(node)
    sums, counts = [], []
    for before, after in zip(exact, noisy, strict=True):
        right, wrong = channels_of(before, node), channels_of(after, node)
        seen = (right > 0) | (wrong > 0) if cut else np.ones(right.shape, bool)
        sums.append(np.where(seen, wrong - right, 0).sum(axis=0, dtype=np.float64))
        counts.append(seen.sum(axis=0))
    total = np.maximum(np.sum(counts, axis=0), 1)
    mean = np.sum(sums, axis=0) / total
    residuals = np.stack(sums) - mean * np.stack(counts)
    variance = np.square(residuals).sum(axis=0) / np.square(total) * len(sums) / (len(sums) - 1)
    share = 1 - variance / np.maximum(np.square(mean), np.finfo(np.float64).tiny)
    result: np.ndarray = (mean * np.maximum(share, 0.0)).astype(np.float32)
    return result


def _only_reader_is_relu(node: ir.Node) -> bool:
    output = node.outputs[0]
    return not output.is_graph_output() and [user.op_type for user, _ in output.uses()] == ["Relu"]


def _search(
    layer: ProductLayer, before: _Stored, inputs: _Inputs, biased: bool
) -> tuple[np.ndarray, tuple[float, float]]:
    """New INT8 values of the weight's shape; the noise with the old and with the new ones on the kept rows."""
    weights, nearest = layer.matrices(layer.weight), layer.matrices(before.values)
    steps = before.steps.reshape(layer.groups, 1, -1)
    levels = np.empty(nearest.shape, np.int8)
    noise = np.zeros(2)
    for group, (fit, kept, factors) in enumerate(zip(inputs.fit, inputs.kept, inputs.factors, strict=True)):
        weight, step = np.ascontiguousarray(weights[group]), steps[group]
        errors = product(fit.quantized - fit.exact, weight), product(kept.quantized - kept.exact, weight)
        change = nearest[group] * step - weight
        old = errors[1] + product(kept.quantized, change)
        mean, inputs_mean = errors[0].mean(axis=0), fit.quantized.mean(axis=0)
        levels[group] = search_group(weight, step, (fit, kept), factors, errors)
        # A bias, where there can be one, takes the mean of the error with it.
        for index, (error, values) in enumerate(((old, nearest[group]), (errors[1], levels[group]))):
            left = error - (mean + inputs_mean @ (values * step - weight)) if biased else error
            noise[index] += float(np.vdot(left, left))
    return layer.weight_of(levels), (float(noise[0]), float(noise[1]))


def search_group(
    weight: np.ndarray,
    steps: np.ndarray,
    rows: tuple[LayerRows, LayerRows],
    factors: Sequence[Factor],
    errors: tuple[np.ndarray, np.ndarray],
    largest: float = LEVELS,
) -> np.ndarray:
    """New values of one group, int8 ``[K, N]``, block by block, with a factor per block.

    ``steps`` and ``largest`` are as of :meth:`Factor.round`. ``rows`` are those for the fit, and those kept from it;
    ``errors`` that of the outputs with the exact weight on both: the second becomes that with the new values.
    """
    levels = np.empty(weight.shape, np.int8)
    of_fit, of_kept = errors
    for part, factor in zip(blocks(len(weight)), factors, strict=True):
        correction = factor.correction(of_fit)
        share = best_share(of_kept, product(rows[1].quantized[:, part], correction))
        target = weight[part] + np.float32(share) * correction
        own = steps if len(steps) == 1 else steps[part]
        levels[part] = factor.round(target, weight[part] != 0, own, largest)  # zeros stay: sparse kernels live by them
        change = levels[part] * own - weight[part]
        of_kept += product(rows[1].quantized[:, part], change)
        if part.stop < len(weight):  # what the next blocks make up for
            of_fit += product(rows[0].quantized[:, part], change)
    return levels


def _can_round(layer: ProductLayer, op: QuantizedOp) -> bool:
    """Whether other values than the nearest are looked for: levels of FP8 are not evenly spaced."""
    weight = edit.input_of(layer.node, 1)
    shared = weight is not None and len(list(weight.uses())) > 1
    if op.multiply and op.writes:  # stored with even channels
        return False
    return op.dtype == Precision.INT8 and layer.depth <= LARGEST_DEPTH and not shared


def _stored(layer: ProductLayer, op: QuantizedOp, plan: PrecisionPlan) -> _Stored:
    """As :func:`trtopt.precision.write.quantize` stores the weight."""
    narrow = None if op.node in plan.wide else plan.narrow
    if op.multiply and op.writes and op.weight_axis is not None:
        even, powers = even_channels(layer.weight, op.weight_axis)
        values, scale = eight_bit(even, None, narrow)
        return _Stored(values, scale * powers, 0.0)
    is_conv = op.multiply and edit.is_op(layer.node, "Conv")
    bias = edit.input_of(layer.node, 2) if is_conv else None
    if is_conv and (bias is None or edit.constant_of(bias) is not None):
        scaled = scale_channels(layer.weight, op.activation_amax, narrow)
        if scaled is not None:
            return _Stored(scaled.values, scaled.scale * scaled.ratios, float(scaled.scale))
    values, scales = quantize_weight(layer.weight, None if is_conv else op.weight_axis, narrow)
    return _Stored(values, np.array(np.broadcast_to(scales, layer.channels)), 0.0)


def _fits(layer: ProductLayer, levels: np.ndarray, scale: float, op: QuantizedOp, plan: PrecisionPlan) -> bool:
    """Whether a convolution's sums before its multiplication per channel stay in range (``write.scale_channels``)."""
    narrow = None if op.node in plan.wide else plan.narrow
    largest = int(np.abs(layer.matrices(levels).astype(np.int32)).sum(axis=1).max())
    return narrow is None or op.activation_amax * largest * scale <= narrow.largest


def _quantized(rows: np.ndarray, scale: np.float32) -> np.ndarray:
    """INT8 and back, as QuantizeLinear and DequantizeLinear compute it."""
    levels: np.ndarray = np.clip(np.rint(rows / scale), -LEVELS - 1, LEVELS) * scale
    return levels


def is_held(index: int, count: int) -> bool:
    """Whether the sample of this index, of so many, is kept from the fit."""
    return index % _HELD_OUT == _HELD_OUT - 1 if count >= _HELD_OUT else index == count - 1
