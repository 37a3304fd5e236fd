"""Input channels of products in another order, so that 2:4 masks keep more; the network computes what it did.

A mask drops two of each four consecutive channels, so three heavy channels in one four cost more than one in each of
three. Which channels are neighbours is free: whoever makes them makes them in the new order, and so does everything
that has an entry per channel. What is kept is counted in w^2, or w^2 E[x^2] where the mean squares of the inputs are
known: the squared error that a layer's outputs get from a dropped weight, as long as its inputs do not correlate. Each
weight counts as its share, since layers that read the same channels may differ in scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.events import Event, OnEvent, ignore
from trtopt.graph.channels.groups import ChannelGroup
from trtopt.graph.channels.links import Param
from trtopt.graph.channels.orders import entries, put_in_order
from trtopt.graph.edit import constant_of, constant_tensor_of, int_attribute
from trtopt.sparsity.movable import Channels, channels_dim, channels_read
from trtopt.sparsity.pattern import GROUP, best_mask, reduction_axis
from trtopt.sparsity.stripes import best_order, rows_looked_at

_TASK = "permute"

_LEAST_GAIN = 1e-6
"""Of a weight, by which what masks keep has to rise: less is rounding."""


@dataclass(frozen=True)
class LayerKept:
    """What the best 2:4 mask of a layer's weight keeps: shares, 0..1, of w^2 or w^2 E[x^2].

    Attributes:
        node: The layer.
        before: Of the weight as it was.
        after: In the new order of its input channels.
    """

    node: str
    before: float
    after: float


@dataclass(frozen=True)
class PermutedChannels:
    """Channels that got another order.

    Attributes:
        nodes: The layers to be pruned that read them.
        channels: How many.
        before: What masks keep of these layers' weights, the mean of the shares.
        after: The same in the new order.
    """

    nodes: tuple[str, ...]
    channels: int
    before: float
    after: float


@dataclass(frozen=True)
class RefusedChannels:
    """Channels that stay in the order they have: the layers to be pruned that read them, how many, and why."""

    nodes: tuple[str, ...]
    channels: int
    reason: str


@dataclass(frozen=True)
class Permuted:
    """The result of :func:`permute`.

    Attributes:
        model: A clone with the channels in their new order; the model given where nothing changed.
        groups: Channels with a new order.
        refused: The others.
        layers: Every layer asked about, in the order asked.
    """

    model: ir.Model
    groups: tuple[PermutedChannels, ...]
    refused: tuple[RefusedChannels, ...]
    layers: tuple[LayerKept, ...]


def permute(
    model: ir.Model,
    nodes: Sequence[str],
    *,
    seed: int = 0,
    on_event: OnEvent = ignore,
    importance: Mapping[str, np.ndarray] | None = None,
) -> Permuted:
    """Order channels so that the best 2:4 masks of some layers keep most; deterministic for a seed.

    Args:
        model: A model with inferred shapes and named nodes. Not changed.
        nodes: Conv, Gemm and MatMul of its main graph whose weights are to be 2:4 (``sparsity.layers.candidates``).
        seed: Of the search.
        on_event: Progress of the task ``permute``: one unit per group of channels, named after a layer that reads it.
        importance: By node, the mean square of each channel of its data input, ``[channels]``; 1 where it is missing.

    Raises:
        ValueError: A name is not that of such a node, or its weight does not sum over a multiple of 4.
    """
    clone = model.clone()
    weights = _weights(clone, nodes, importance or {})
    before = {name: weight.kept() for name, weight in weights.items()}
    around = channels_read([weight.node for weight in weights.values()])
    found = [(channels, names) for channels in around if (names := _readers(channels, weights))]
    search = _Search(weights, seed)
    groups: list[PermutedChannels] = []
    refused: list[RefusedChannels] = []
    on_event(Event("start", _TASK, total=len(found)))
    for channels, names in found:
        outcome = channels.reason or search.run(channels)
        if isinstance(outcome, str):
            refused.append(RefusedChannels(names, channels.size, outcome))
        else:
            groups.append(PermutedChannels(names, channels.size, *outcome))
        on_event(Event("advance", _TASK, text=names[0]))
    on_event(Event("end", _TASK))
    after = before | {name: weights[name].kept(columns) for name, columns in search.columns.items()}
    layers = tuple(LayerKept(name, before[name], after[name]) for name in nodes)
    put_in_order(clone, search.orders)
    return Permuted(clone if groups else model, tuple(groups), tuple(refused), layers)


@dataclass(frozen=True, eq=False)
class _Weight:
    """The weight of a layer to be pruned, in the model as given; ``mean_square`` of its input's channels, if known."""

    node: ir.Node
    mean_square: np.ndarray | None

    def saliency(self) -> np.ndarray:
        """float32 ``[columns, rows]``: the share of each weight in what all are worth; zeros for a weight of zeros."""
        array, axis = constant_of(self.node.inputs[1]), reduction_axis(self.node)
        if array is None:
            raise ValueError(f"the weight of {self.node.name} is not a constant")
        squares = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1).astype(np.float32) ** 2
        if self.mean_square is not None:
            parts = int_attribute(self.node, "group", 1)
            of_part = np.asarray(self.mean_square, np.float32).reshape(parts, -1)
            squares *= np.repeat(of_part.T, squares.shape[1] // parts, axis=1)
        total = float(squares.sum(dtype=np.float64))
        return squares / np.float32(total) if total else squares

    def kept(self, columns: np.ndarray | None = None) -> float:
        """The share that the best mask keeps, with the columns in another order if one is given."""
        saliency = self.saliency() if columns is None else self.saliency()[columns]
        total = float(saliency.sum(dtype=np.float64))
        return float(saliency.sum(where=best_mask(saliency, 0), dtype=np.float64)) / total if total else 1.0


def _weights(model: ir.Model, names: Iterable[str], importance: Mapping[str, np.ndarray]) -> dict[str, _Weight]:
    nodes = {str(node.name): node for node in model.graph if node.op_type in ("Conv", "Gemm", "MatMul")}
    found = {}
    for name in names:
        if name not in nodes or constant_tensor_of(nodes[name].inputs[1]) is None:
            raise ValueError(f"{name} is no Conv, Gemm or MatMul with a constant weight")
        found[name] = _Weight(nodes[name], importance.get(name))
    return found


def _readers(channels: Channels, weights: Mapping[str, _Weight]) -> tuple[str, ...]:
    """The layers to be pruned that read some channels."""
    dims = {span.dim for group in channels.groups for span in group.spans}
    return tuple(name for name, weight in weights.items() if channels_dim(weight.node) in dims)


class _Search:
    """Finds orders, one after the other.

    Attributes:
        orders: What was found: groups with the channels that come first, second, ...
        columns: By layer, the columns of its weight that come first, second, ... under all of them.
    """

    def __init__(self, weights: Mapping[str, _Weight], seed: int) -> None:
        self._weights, self._seed = weights, seed
        self.orders: list[tuple[ChannelGroup, np.ndarray]] = []
        self.columns: dict[str, np.ndarray] = {}

    def run(self, channels: Channels) -> tuple[float, float] | str:
        """What masks keep before and after, where an order was found that keeps more; else why not."""
        reads = [
            (group, param, self._weights[str(param.node.name)])
            for group in channels.groups
            for param in group.params
            if param.kind == "sums" and param.node.name in self._weights
        ]
        stacked = self._stacked(reads, channels.size // GROUP * GROUP)
        if stacked is None:
            return "no weight has them in two or more fours of their own"
        order = np.arange(channels.size)
        order[: len(stacked)] = best_order(stacked, self._seed)
        columns: dict[str, np.ndarray] = {}
        for group, param, weight in reads:
            name, taken = str(weight.node.name), entries(group, order, param)
            so_far = columns.get(name, self.columns.get(name))
            columns[name] = taken if so_far is None else so_far[taken]
        before = float(np.mean([self._weights[name].kept(self.columns.get(name)) for name in columns]))
        after = float(np.mean([self._weights[name].kept(found) for name, found in columns.items()]))
        if after < before + _LEAST_GAIN:
            return "no order was found that keeps more"
        self.columns.update(columns)
        self.orders += [(group, order) for group in channels.groups]
        return before, after

    def _stacked(self, reads: Sequence[tuple[ChannelGroup, Param, _Weight]], size: int) -> np.ndarray | None:
        """float32 ``[size, rows]``: what the weights that read some channels are worth, as many rows as are looked at.

        None where no weight has the channels in fours of their own; a weight that has them otherwise does not count.
        """
        found = []
        for group, param, weight in reads:
            starts = [span.start for span in group.spans_of(param.dim) if span.each == 1]
            saliency = weight.saliency()
            found += [saliency[at : at + size] for at in starts if at % GROUP == 0 and at + size <= len(saliency)]
        if not found or size < 2 * GROUP:
            return None
        rng = np.random.default_rng(self._seed)
        share = rows_looked_at(size) / sum(part.shape[1] for part in found)
        if share < 1:
            found = [part[:, _some(part.shape[1], share, rng)] for part in found]
        return np.concatenate(found, axis=1)


def _some(rows: int, share: float, rng: np.random.Generator) -> np.ndarray:
    """Random rows, in order."""
    return np.sort(rng.permutation(rows)[: math.ceil(share * rows)])
