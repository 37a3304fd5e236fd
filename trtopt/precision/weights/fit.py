"""Weights of a network stored narrow, each fitted to what the layers before it really give.

Per weight four ways are tried, and the one with the least error at the layer's outputs on samples kept from the fit
stays: the nearest numbers with scales of the largest magnitude; with scales that clip a little where that costs less
(each block's share of its largest magnitude, the error weighted by the mean square of what the weight is multiplied
with, as AWQ searches its clipping: Lin et al. 2024); and, for evenly spaced numbers, both rounded together
(:mod:`trtopt.precision.ptq.correct`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from trtopt.events import Event, OnEvent, ignore
from trtopt.graph import edit
from trtopt.precision.observe.feeds import Sample
from trtopt.precision.ptq.correct import LARGEST_DEPTH, Factor, LayerRows, blocks, is_held, search_group
from trtopt.precision.ptq.layer_walk import (
    ProductLayer,
    Stop,
    layer_of,
    positions,
    reading_key,
    rows_at,
    rows_read,
    walk,
)
from trtopt.precision.weights.formats import Scales, StoredWeight, WeightFormat, nearest, scales_of
from trtopt.precision.weights.write import Product

TASK = "weights"
"""The name of the progress events' task."""

_SHARES = tuple(1 - 0.05 * step for step in range(1, 9))
"""Shares of a block's largest magnitude that are tried as the largest number: 0.95 to 0.6."""


def plain(
    weights: Mapping[str, np.ndarray], products: Sequence[Product], kind: WeightFormat, block: int
) -> dict[str, StoredWeight]:
    """Each weight, float32 ``[K, N]`` by name, as the nearest numbers."""
    found = {}
    for product in products:
        weight = weights[product.weight]
        found[product.weight] = nearest(weight, kind, scales_of(weight, kind, block, product.floating))
    return found


def fitted(
    base: ir.Model,
    products: Sequence[Product],
    kind: WeightFormat,
    block: int,
    samples: Sequence[Sample],
    *,
    on_event: OnEvent = ignore,
) -> dict[str, StoredWeight]:
    """Each weight as the numbers that fit samples best.

    Args:
        base: The FP32 form of the model, nodes named.
        products: Weights to store, in the order of the graph; of several nodes with one weight the first is fitted.
        kind: The format.
        block: Weights along the sum that share a scale; 0 for all.
        samples: At least 2, all held in memory.
        on_event: ``start``, ``advance`` after each weight and ``end`` of the task ``weights``.

    Raises:
        InvalidModelError: ONNX Runtime cannot run a part of the model.
    """
    of_node = {name: product for product in products for name in product.nodes}
    work = _Walk(kind, block)
    on_event(Event("start", TASK, total=len(products)))
    for stop in walk(base, list(of_node), samples):
        product = of_node[str(stop.node.name)]
        if product.weight not in work.found:
            work.found[product.weight] = work.best(stop, product)
            on_event(Event("advance", TASK))
        stop.run(_with_weight(stop, work.found[product.weight]))
    on_event(Event("end", TASK))
    return work.found


def _with_weight(stop: Stop, stored: StoredWeight) -> ir.Model:
    """The node's own model with the stored weight."""
    clone = stop.subgraph.clone()
    value = edit.input_of(next(node for node in clone.graph if node.name == stop.node.name), 1)
    layer = layer_of(stop.node)
    if value is None or isinstance(layer, str):
        raise ValueError(f"{stop.node.name} has no constant weight")
    value.const_value = ir.Tensor(layer.weight_of(stored.exact[None]), name=value.name)
    return clone


class _Walk:
    def __init__(self, kind: WeightFormat, block: int) -> None:
        self._kind, self._block = kind, block
        self._read: tuple[object, tuple[LayerRows, LayerRows], tuple[Factor, ...]] | None = None
        self.found: dict[str, StoredWeight] = {}

    def best(self, stop: Stop, product: Product) -> StoredWeight:
        """The numbers of one weight."""
        layer = layer_of(stop.node)
        if isinstance(layer, str):
            raise ValueError(f"{stop.node.name}: {layer}")
        weight = np.ascontiguousarray(layer.matrices(layer.weight)[0])
        full = scales_of(weight, self._kind, self._block, product.floating)
        first = nearest(weight, self._kind, full)
        try:
            (fit, kept), factors = self._rows(layer, stop)
        except np.linalg.LinAlgError:  # its inputs are not finite
            return first
        tried = [first]
        for scales in (full, self._clipped(weight, fit, product.floating)):
            tried += [nearest(weight, self._kind, scales)] if scales is not full else []
            if self._kind.is_even and layer.depth <= LARGEST_DEPTH:
                tried.append(self._joint(weight, scales, (fit, kept), factors))
        wanted = kept.exact @ weight
        errors = [float(np.square(kept.quantized @ item.exact - wanted).sum(dtype=np.float64)) for item in tried]
        return tried[int(np.argmin(errors))]

    def _joint(
        self,
        weight: np.ndarray,
        scales: Scales,
        rows: tuple[LayerRows, LayerRows],
        factors: Sequence[Factor],
    ) -> StoredWeight:
        errors = tuple((item.quantized - item.exact) @ weight for item in rows)
        steps = scales.values if len(scales.values) == 1 else scales.spread(len(weight))
        levels = search_group(weight, steps, rows, factors, (errors[0], errors[1]), self._kind.largest)
        return StoredWeight(self._kind, levels.astype(self._kind.dtype.numpy()), scales)

    def _clipped(self, weight: np.ndarray, fit: LayerRows, floating: ir.DataType) -> Scales:
        """Scales with the share of the largest magnitude that costs least, block by block."""
        power = np.square(fit.quantized).mean(axis=0)[:, None]
        best: tuple[np.ndarray, np.ndarray] | None = None
        for share in (1.0, *_SHARES):
            scales = scales_of(weight, self._kind, self._block, floating, share)
            error = np.square(nearest(weight, self._kind, scales).exact - weight) * power
            error = error.reshape(len(scales.values), -1, weight.shape[1]).sum(axis=1)
            if best is None:
                best = error, np.full(error.shape, share, np.float32)
            better = error < best[0]
            best = np.where(better, error, best[0]), np.where(better, np.float32(share), best[1])
        if best is None:
            raise ValueError("no share was tried")
        return scales_of(weight, self._kind, self._block, floating, best[1])

    def _rows(self, layer: ProductLayer, stop: Stop) -> tuple[tuple[LayerRows, LayerRows], tuple[Factor, ...]]:
        """Rows for the fit and rows kept from it, and the factors of the former; remembered for the next node, which
        may read the same."""
        data = str(stop.node.inputs[0].name)  # type: ignore[union-attr]
        key = (data, reading_key(layer))
        if self._read is not None and self._read[0] == key:
            return self._read[1:]
        self._read = None
        fit, kept = (_stacked(part) for part in _parts(layer, stop, data))
        factors = tuple(Factor(fit.quantized[:, part]) for part in blocks(layer.depth)) if self._kind.is_even else ()
        self._read = key, (fit, kept), factors
        return self._read[1:]


def _parts(layer: ProductLayer, stop: Stop, data: str) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
    """Rows that the FP32 network's and the stored network's layer read, for the fit and kept from it."""
    rng = np.random.default_rng(zlib.crc32(data.encode()))
    share = max(rows_read(layer) // len(stop.exact), 1)
    parts: tuple[list[tuple[np.ndarray, np.ndarray]], ...] = ([], [])
    for index, (exact, noisy) in enumerate(zip(stop.exact, stop.noisy, strict=True)):
        chosen = positions(layer, exact.shape, share, rng)
        parts[is_held(index, len(stop.exact))].append(
            (rows_at(layer, exact, chosen)[0], rows_at(layer, noisy, chosen)[0])
        )
    yield from parts


def _stacked(part: Sequence[tuple[np.ndarray, np.ndarray]]) -> LayerRows:
    return LayerRows(*(np.concatenate([pair[side] for pair in part]) for side in (0, 1)))
