"""A model pruned to 2:4, with its accuracy recovered from samples without labels.

What is found layer by layer is kept only where the error at the network's outputs falls against plain magnitude
pruning, on samples that the search has not seen. It is a walk along the
network: weights are pruned one after the other, each fitted to what the pruned network gives it.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.events import Event, OnEvent, ignore
from trtopt.precision.observe.feeds import Sample
from trtopt.precision.ptq.bias import spread, why_no_bias
from trtopt.precision.ptq.correct import mean_error
from trtopt.precision.ptq.layer_walk import ProductLayer, Stop, layer_of, positions, rows_at, walk
from trtopt.precision.ptq.refine import SMALLEST_SAMPLES, TriedPlan, split_samples
from trtopt.sparsity.descent import Inputs
from trtopt.sparsity.layers import GROUP, PrunedWeight, SparseCandidate, by_magnitude, kept_share, with_pruned
from trtopt.support.ort_session import OrtSession

TASK = "prune"
"""The name of the progress events' task."""

LARGEST_ROWS = 8192
"""Rows of a layer's input that are sampled, over all samples: few enough for a layer to take seconds."""

ROW_ELEMENTS = 1 << 24
"""Bound on rows times K: 64 MiB for each of the two networks."""

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
        """Noise over signal of a layer's outputs on the rows that the first fit does not take.

        Args:
            dense: The layer's weight, ``[groups, K, N]``.
            pruned: What it has in the pruned network.
        """
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
        node, data = layer.node, str(stop.node.inputs[0].name)  # type: ignore[union-attr]
        window = tuple(sorted((name, str(a.value)) for name, a in node.attributes.items() if name not in _OUTPUT_SIDE))
        taps = layer.weight.shape[1:] if node.op_type == "Conv" else ()
        key = (data, node.op_type, window, layer.groups, layer.depth, taps, candidate.nodes[1:])
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

        Args:
            inputs: A node that reads the weight with its data input in both networks: ``nodes`` for each sample.
            data: What the choice of the rows depends on, beside the seed.
            nodes: How many nodes read the weight.
        """
        rng = np.random.default_rng([self._seed, zlib.crc32(data.encode())])
        parts: tuple[list[list[np.ndarray]], ...] = ([], [])
        for index, (layer, *pair) in enumerate(inputs):
            rows = min(LARGEST_ROWS, ROW_ELEMENTS // (layer.depth * layer.groups))
            chosen = positions(layer, pair[0].shape, max(rows // (nodes * len(self._samples)), 1), rng)
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


_OUTPUT_SIDE = frozenset({"transB", "alpha", "beta", "kernel_shape"})
"""Attributes that do not change what a node reads."""


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


@dataclass(frozen=True)
class PrunedModel:
    """The result of :func:`prune`.

    Attributes:
        model: A clone with all ``layers`` written (:func:`trtopt.sparsity.layers.write` writes some of them).
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
