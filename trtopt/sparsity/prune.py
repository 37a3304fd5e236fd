"""A model pruned to 2:4, with its accuracy recovered from samples without labels.

It is a walk along the network: weights are pruned one after the other, each fitted to what the pruned network gives it.
What is found layer by layer is kept only where the error at the network's outputs falls against plain magnitude
pruning, on samples that the search has not seen.

The output of a layer is ``X W`` with rows of inputs ``X [rows, K]`` and the weight ``W [K, N]``. Wanted is a 2:4 weight
``Q`` that minimises ``|X' Q - X W|^2``, where ``X'`` is what the layer reads in the pruned network. With the damped
Gram matrix ``H = X'^T X' + damping`` that is the distance of ``Q`` from ``T`` in the metric of ``H``, where ``T = W +
H^-1 X'^T (X - X') W`` makes up for the errors of the layers before it as far as a weight can (GPTAQ, Li et al. 2025).

It is found by descent over the groups of four, beginning with the weight pruned by magnitude. Of each four in turn, the
two that stay are chosen anew from the six choices, each priced with the best values that its two can take: the Optimal
Brain Surgeon (Hassibi and Stork 1993) of four weights, exactly. SparseGPT (Frantar and Alistarh 2023) goes over the
weights once, when what stands behind is not pruned yet, and prices each weight by itself; here every sweep after the
first sees all other groups as they are, and no inverse is taken. At the end the choices are fixed and the weights that
stay are fitted together: least squares for each output channel, solved for all channels at once by conjugate gradients.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.events import Event, OnEvent, ignore
from trtopt.precision.bias import why_no_bias
from trtopt.precision.observe.feeds import Sample
from trtopt.precision.observe.stream import entries
from trtopt.precision.ptq.correct import mean_error
from trtopt.precision.ptq.layer_walk import (
    ProductLayer,
    Stop,
    layer_of,
    positions,
    reading_key,
    rows_at,
    rows_read,
    samples_held,
    spread,
    walk,
)
from trtopt.precision.ptq.refine import SMALLEST_SAMPLES, TriedPlan, shapes_at, spread_samples
from trtopt.sparsity.layers import (
    GROUP,
    KEPT,
    PrunedWeight,
    SparseCandidate,
    best_mask,
    by_magnitude,
    kept_share,
    with_pruned,
)
from trtopt.support.ort_session import OrtSession

BLOCK_DEPTH = 2048
"""Inputs of a layer that are solved together. A layer with more is pruned in blocks, each of which makes up for the
error of those before it: the Gram matrix of K inputs takes K^2 numbers, and a sweep about 3 K^2 flop for each output
channel."""

DAMPING = 0.1
"""Share of the mean of the diagonal of ``X'^T X'`` that is added to it, as in Model Optimizer's SparseGPT: rows are
few, and what fits them too well does not serve others."""

_SWEEPS = 8
"""The last of them lowers the error of random weights with correlated inputs by less than 0.5 %."""

_MORE_SWEEPS = 2
"""Of a weight that was fitted to most of the rows already."""

_TILE = 64
"""Inputs whose gradient is kept current during a sweep; that of the others is brought up to date once per tile."""

_STEPS = 20
"""Of the fit at the end: 50 lower the error at the outputs of a MiniLM by 0.03 dB, and take half as long again as all
else."""
_CONVERGED = 1e-3
"""The fit ends where the gradient, in the norm of its preconditioner, is this share of the first one."""

_GONE = tuple(list(pair) for pair in itertools.combinations(range(GROUP), GROUP - KEPT))
"""The six choices: which two of the four become zero."""
_GONE_ROWS = list(itertools.chain.from_iterable(_GONE))


class Inputs:
    """What layers read, for the choice of their weights; layers that read the same share it.

    Args:
        exact: Rows in the dense network, float32 ``[rows, K]``; K is a multiple of 4, and each four consecutive ones
            are a group of the pattern.
        pruned: The same rows in the pruned network.

    Raises:
        numpy.linalg.LinAlgError: The rows are not finite, or their squares are not.
    """

    def __init__(self, exact: np.ndarray, pruned: np.ndarray) -> None:
        if not np.isfinite(exact).all():
            raise np.linalg.LinAlgError("the inputs of the dense network are not finite")
        self._exact, self._pruned = exact, pruned
        grams = [(part, _gram(pruned[:, part])) for part in _blocks(exact.shape[1])]
        self._blocks = [(part, gram, _Choices.of(gram)) for part, gram in grams]

    def prune(self, weight: np.ndarray, begin: np.ndarray | None = None) -> np.ndarray:
        """A 2:4 weight in place of a dense one.

        Args:
            weight: The dense weight, float32 ``[K, N]``.
            begin: A 2:4 weight that was fitted to similar rows, to begin with; None for the magnitude mask.
        """
        error = (self._pruned - self._exact) @ weight
        found = np.empty_like(weight)
        before = slice(0)
        for part, gram, choices in self._blocks:
            error += self._pruned[:, before] @ (found[before] - weight[before])
            dense = weight[part]
            target = dense - np.linalg.solve(gram, self._pruned[:, part].T @ error)
            values = dense * best_mask(np.abs(dense), 0) if begin is None else begin[part]
            for _ in range(_SWEEPS if begin is None else _MORE_SWEEPS):
                values = _sweep(gram, choices, target, values)
            found[part], before = _refit(gram, target, values), part
        return found


def _blocks(depth: int) -> list[slice]:
    """The inputs of a layer in blocks of about equal size, whole groups of four."""
    count = -(-depth // BLOCK_DEPTH)
    ends = [index * (depth // GROUP) // count * GROUP for index in range(count + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


def _gram(inputs: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        gram: np.ndarray = inputs.T @ inputs
    diagonal = np.diagonal(gram)
    if not np.isfinite(diagonal).all():
        raise np.linalg.LinAlgError("the inputs are not finite, or too large for their squares")
    gram[np.diag_indices_from(gram)] += DAMPING * max(float(diagonal.mean()), 1e-20)
    return gram


@dataclass(frozen=True)
class _Choices:
    """What the six choices of every group of four do, for a weight of any width.

    Attributes:
        inverse: The inverse of the metric of the four, float32 ``[K / 4, 4, 4]``.
        pull: What takes two away, times the best four: float32 ``[K / 4, 12, 4]``, two rows for each choice.
        result: What is left, times the best four: float32 ``[K / 4, 24, 4]``, four rows for each choice.
    """

    inverse: np.ndarray
    pull: np.ndarray
    result: np.ndarray

    @classmethod
    def of(cls, gram: np.ndarray) -> _Choices:
        """The choices in a metric ``[K, K]``."""
        groups = len(gram) // GROUP
        at = np.arange(len(gram)).reshape(groups, GROUP)
        inverse = np.linalg.inv(gram[at[:, :, None], at[:, None, :]].astype(np.float64))
        pull = np.zeros((groups, len(_GONE), GROUP - KEPT, GROUP))
        result = np.empty((groups, len(_GONE), GROUP, GROUP))
        for index, gone in enumerate(_GONE):
            pull[:, index, :, gone] = np.linalg.inv(inverse[:, gone][:, :, gone]).swapaxes(0, 1)
            result[:, index] = np.eye(GROUP) - inverse[:, :, gone] @ pull[:, index]
            result[:, index, gone] = 0
        narrow = (array.astype(np.float32) for array in (pull, result))
        return cls(inverse.astype(np.float32), *(array.reshape(groups, -1, GROUP) for array in narrow))

    def best_two(self, group: int, best: np.ndarray) -> np.ndarray:
        """Of four weights ``[4, N]`` that are best together, the two that do best without the others; the rest are
        zeros."""
        price = (self.pull[group] @ best) * best[_GONE_ROWS]
        chosen = np.argmin(price[::2] + price[1::2], axis=0)
        results = (self.result[group] @ best).reshape(len(_GONE), GROUP, -1)
        picked: np.ndarray = np.take_along_axis(results, chosen[None, None], axis=0)[0]
        return picked


def _sweep(gram: np.ndarray, choices: _Choices, target: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Choose the two that stay, and their values, of each four in turn, all other weights as they are.

    ``target`` is the weight without a pattern, ``[K, N]``; ``values`` the weight to begin with.
    """
    gradient = gram @ (values - target)
    result = np.empty_like(values)
    for start in range(0, len(values), _TILE):
        tile = slice(start, min(start + _TILE, len(values)))
        slope, now, square = gradient[tile], values[tile].copy(), gram[tile, tile]
        for at in range(0, len(now), GROUP):
            four, group = slice(at, at + GROUP), (start + at) // GROUP
            chosen = choices.best_two(group, now[four] - choices.inverse[group] @ slope[four])
            slope[at:] += square[at:, four] @ (chosen - now[four])
            now[four] = chosen
        gradient[tile.stop :] += gram[tile.stop :, tile] @ (now - values[tile])
        result[tile] = now
    return result


def _refit(gram: np.ndarray, target: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The weights of ``values`` that are not zero, fitted to the target together.

    Conjugate gradients preconditioned by the diagonal, over the weights that stay.
    """
    stays, diagonal = values != 0, np.diagonal(gram)[:, None]
    residual = np.where(stays, gram @ (target - values), 0)
    direction = residual / diagonal
    power = np.sum(residual * direction, axis=0)
    enough = np.square(_CONVERGED) * power
    for _ in range(_STEPS):
        if (power <= enough).all():
            break
        change = np.where(stays, gram @ direction, 0)
        step = _ratio(power, np.sum(direction * change, axis=0))
        values = values + step * direction
        residual -= step * change
        scaled = residual / diagonal
        before, power = power, np.sum(residual * scaled, axis=0)
        direction = scaled + _ratio(power, before) * direction
    return values


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    result: np.ndarray = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
    return result


TASK = "prune"
"""The name of the progress events' task."""

_HELD_OUT = 4
"""Every so many-th sample is kept from the fit of a layer, and decides whether it stays."""


def recover(
    model: ir.Model,
    layers: Sequence[SparseCandidate],
    samples: Sequence[Sample],
    seed: int = 0,
    on_event: OnEvent = ignore,
) -> list[PrunedWeight]:
    """Prune weights in the order of the graph; those that stay, and the biases, make up for what went before.

    A weight that several nodes share is fitted to the dense network's inputs of all of them.

    Args:
        model: The widened model that the layers were found in.
        layers: What to prune.
        samples: At least 4, all held in memory.
        seed: Which positions of the layers' inputs are looked at.
        on_event: ``start``, ``advance`` after each node and ``end`` of the task ``prune``.

    Returns:
        A layer for each of ``layers``, in their order.

    Raises:
        InvalidModelError: ONNX Runtime cannot run a part of the model.
    """
    work = _Walk(model, layers, samples, seed)
    nodes = [name for layer in layers if not layer.sparse for name in layer.nodes]
    on_event(Event("start", TASK, total=len(nodes)))
    for stop in walk(model, nodes, samples):
        work.visit(stop)
        on_event(Event("advance", TASK))
    on_event(Event("end", TASK))
    return [work.found.get(layer.weight) or by_magnitude(model, layer) for layer in layers]


@dataclass(frozen=True)
class _Read:
    """What a layer reads, in rows ``[groups, rows, K]`` whose K stand in fours.

    Attributes:
        key: What tells it from what other layers read.
        exact: Sampled rows in the dense network, float32.
        pruned: The same in the pruned one.
        count: Rows that a first fit takes; the others tell whether it is worth it.
        first: These, per group.
        every: All rows, per group: for the weight that stays.
    """

    key: Hashable
    exact: np.ndarray
    pruned: np.ndarray
    count: int
    first: list[Inputs]
    every: list[Inputs]

    def error(self, dense: np.ndarray, pruned: np.ndarray) -> float:
        """Noise over signal of a layer's outputs on rows that the first fit does not take; weights ``[groups, K,
        N]``."""
        noise = signal = 0.0
        for group, weight in enumerate(dense):
            exact = self.exact[group, self.count :] @ weight
            noise += float(np.square(self.pruned[group, self.count :] @ pruned[group] - exact).sum())
            signal += float(np.square(exact - exact.mean(axis=0)).sum())
        return noise / signal if signal else float(noise > 0)


class _Walk:
    def __init__(
        self, model: ir.Model, layers: Sequence[SparseCandidate], samples: Sequence[Sample], seed: int
    ) -> None:
        self._model, self._samples, self._seed = model, samples, seed
        self._layers = {name: layer for layer in layers for name in layer.nodes}
        self._last: _Read | None = None
        self.found: dict[str, PrunedWeight] = {}

    def visit(self, stop: Stop) -> None:
        """Find what one node is to have, and run it so."""
        name = str(stop.node.name)
        candidate = self._layers[name]
        pruned = self.found.get(candidate.weight)
        if pruned is None:
            pruned = self._pruned(stop, candidate)
        exact, noisy = stop.run(with_pruned(stop.subgraph, [dataclasses.replace(pruned, bias={})]))
        with np.errstate(invalid="ignore"):
            shift = mean_error(stop.node, exact, noisy)
        if why_no_bias(stop.node) is None and np.isfinite(shift).all():
            pruned = dataclasses.replace(pruned, bias={**pruned.bias, name: -shift})
            for index, array in enumerate(noisy):
                noisy[index] = array - spread(shift, stop.node, array.ndim)
        self.found[candidate.weight] = pruned

    def _pruned(self, stop: Stop, candidate: SparseCandidate) -> PrunedWeight:
        layer, plain = layer_of(stop.node), by_magnitude(self._model, candidate)
        if isinstance(layer, str):
            raise ValueError(f"{stop.node.name}: {layer}")
        try:
            read = self._read(layer, stop, candidate)
        except np.linalg.LinAlgError:  # its inputs are not finite
            return plain
        order = _order(layer)
        dense, simple = (layer.matrices(weight)[:, order] for weight in (layer.weight, plain.values))
        first = _fitted(read.first, dense)
        errors = read.error(dense, simple), read.error(dense, first)
        if not errors[1] < errors[0]:
            return dataclasses.replace(plain, errors=(errors[0], errors[0]))
        matrices = np.empty_like(dense)
        matrices[:, order] = _fitted(read.every, dense, first)
        values = layer.weight_of(matrices)
        kept = kept_share(layer.weight, values != 0)
        return PrunedWeight(candidate.weight, candidate.nodes, "recovered", values, kept, errors=errors)

    def _read(self, layer: ProductLayer, stop: Stop, candidate: SparseCandidate) -> _Read:
        """Rows of both networks; remembered for the next node, which may read the same."""
        data = str(stop.node.inputs[0].name)  # type: ignore[union-attr]
        key = (data, reading_key(layer), candidate.nodes[1:])
        if self._last is not None and self._last.key == key:
            return self._last
        self._last = None
        if len(candidate.nodes) > 1:
            exact, pruned, count = self._sampled(self._dense_inputs(candidate), data, len(candidate.nodes))
        else:
            pairs = zip(stop.exact, stop.noisy, strict=True)
            exact, pruned, count = self._sampled(((layer, *pair) for pair in pairs), data, 1)
        groups = list(zip(exact, pruned, strict=True))
        first, every = ([Inputs(x[:end], y[:end]) for x, y in groups] for end in (count, None))
        self._last = _Read(key, exact, pruned, count, first, every)
        return self._last

    def _sampled(
        self, inputs: Iterable[tuple[ProductLayer, np.ndarray, np.ndarray]], data: str, nodes: int
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Rows of the dense and the pruned network, those of held-out samples last, and how many the others are.

        ``inputs`` are nodes that read the weight with their data inputs in both networks: ``nodes`` for each sample.
        The choice of the rows depends on ``data``, beside the seed.
        """
        rng = np.random.default_rng([self._seed, zlib.crc32(data.encode())])
        parts: tuple[list[list[np.ndarray]], ...] = ([], [])
        for index, (layer, *pair) in enumerate(inputs):
            share = max(rows_read(layer) // (nodes * len(self._samples)), 1)
            chosen = positions(layer, pair[0].shape, share, rng)
            order, sample = _order(layer), index // nodes
            both = [rows_at(layer, array, chosen)[:, :, order].astype(np.float32, copy=False) for array in pair]
            parts[sample % _HELD_OUT == _HELD_OUT - 1].append(both)
        exact, pruned = (np.concatenate(side, axis=1) for side in zip(*parts[0], *parts[1], strict=True))
        return exact, pruned, sum(rows[0].shape[1] for rows in parts[0])

    def _dense_inputs(self, candidate: SparseCandidate) -> Iterator[tuple[ProductLayer, np.ndarray, np.ndarray]]:
        """What the nodes of a shared weight read in the dense network, sample by sample, as if it was the pruned."""
        nodes = {str(node.name): node for node in self._model.graph}
        layers = [layer for name in candidate.nodes if isinstance(layer := layer_of(nodes[name]), ProductLayer)]
        names = list(dict.fromkeys(str(layer.node.inputs[0].name) for layer in layers))  # type: ignore[union-attr]
        with OrtSession(self._model, names) as session:
            for sample in self._samples:
                arrays = dict(zip(names, session.run(sample), strict=True))
                for layer in layers:
                    array = arrays[str(layer.node.inputs[0].name)]  # type: ignore[union-attr]
                    yield layer, array, array


def _order(layer: ProductLayer) -> np.ndarray:
    """The inputs of a layer such that each four of the pattern stand together: int64 ``[K]``."""
    numbers = np.arange(layer.depth)
    if layer.node.op_type != "Conv":
        return numbers
    return numbers.reshape(layer.weight.shape[1] // GROUP, GROUP, -1).swapaxes(1, 2).ravel()


def _fitted(inputs: Sequence[Inputs], dense: np.ndarray, begin: np.ndarray | None = None) -> np.ndarray:
    """The pruned weight of each group, ``[groups, K, N]``."""
    begins = [None] * len(dense) if begin is None else list(begin)
    groups = zip(inputs, np.ascontiguousarray(dense), begins, strict=True)
    return np.stack([each.prune(weight, start) for each, weight, start in groups])


ErrorOf = Callable[[ir.Model, Sequence[Sample]], float]
"""The error at a model's outputs on the given samples: noise over signal, the worst output's."""

LARGEST_SAMPLES = 512
"""Samples that layers are fitted to, where memory allows (``layer_walk.HELD_BYTES``)."""

JUDGED_SAMPLES = 16
"""Samples, others, on which the error at the outputs is measured."""


@dataclass(frozen=True)
class PrunedModel:
    """The result of :func:`prune`.

    Attributes:
        model: A clone with all ``layers`` written (:func:`trtopt.sparsity.layers.with_pruned` writes some of them).
        layers: What became of each weight.
        trials: The error at the outputs of what was tried; empty where nothing could be.
        reason: Why nothing was recovered; empty where something was.
    """

    model: ir.Model
    layers: tuple[PrunedWeight, ...]
    trials: tuple[TriedPlan, ...] = ()
    reason: str = ""


def prune(
    model: ir.Model,
    layers: Sequence[SparseCandidate],
    samples: Iterable[Sample] | None,
    error_of: ErrorOf,
    *,
    seed: int = 0,
    on_event: OnEvent = ignore,
) -> PrunedModel:
    """Prune weights to 2:4; with samples, fit the weights that stay.

    Deterministic for a seed. Weights that are 2:4 are left as they are.

    Args:
        model: The widened model that the layers were found in; not changed.
        layers: What to prune.
        samples: Calibration samples, read once; a bounded number spread evenly over them is held. None prunes by
            magnitude.
        error_of: Measures a pruned model on samples of its second argument. Called at most twice.
        seed: Which positions of the layers' inputs are looked at.
        on_event: Progress of the task ``prune``.

    Raises:
        InvalidModelError: ONNX Runtime cannot run a part of the model.
    """
    plain = tuple(by_magnitude(model, layer) for layer in layers)
    simple = with_pruned(model, plain)
    if all(layer.sparse for layer in layers):
        return PrunedModel(simple, plain, reason="no weight is left to prune")
    searched, judged = split_samples(model, () if samples is None else samples, LARGEST_SAMPLES)
    if not judged:
        return PrunedModel(simple, plain, reason=f"fewer than {SMALLEST_SAMPLES} samples")
    found = tuple(recover(model, layers, searched, seed, on_event))
    fitted = with_pruned(model, found)
    trials = (TriedPlan("magnitude", error_of(simple, judged)), TriedPlan("recovered", error_of(fitted, judged)))
    if not trials[1].error < trials[0].error:
        return PrunedModel(simple, plain, trials, "magnitude is better at the outputs, on samples kept from the fit")
    return PrunedModel(fitted, found, trials)


def split_samples(base: ir.Model, samples: Iterable[Sample], limit: int) -> tuple[list[Sample], list[Sample]]:
    """Samples to search with, at most ``limit`` and as many as memory allows, and others to judge by, none where too
    few; they are read once.
    """
    stream = iter(samples)
    first = next(stream, None)
    if first is None:
        return [], []
    size = entries(first)
    held, most = samples_held(base, shapes_at(base, first), -(-limit // size)), -(-JUDGED_SAMPLES // size)
    kept = spread_samples(itertools.chain([first], stream), held + most)
    if len(kept) < SMALLEST_SAMPLES:
        return kept, []
    others = min(most, max(len(kept) // 4, len(kept) - held))
    chosen = {index * len(kept) // others for index in range(others)}
    judged = [sample for index, sample in enumerate(kept) if index in chosen]
    return [sample for index, sample in enumerate(kept) if index not in chosen][:held], judged
