"""Two profiles of one network, compared: their layers are aligned by the parameters and the ONNX nodes they hold."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from trtopt.errors import UsageError
from trtopt.report.schema.profile import (
    Alignment,
    Change,
    ComparedRegion,
    Comparison,
    Profiled,
    ProfileLayer,
    ProfileReport,
    Side,
    precision_of,
)
from trtopt.report.text.format import count, percent

_WEIGHT = re.compile(r"[^ ]+\.weight$")
"""A part of a fused layer's name that is a parameter of PyTorch."""


class NamedLayer(Protocol):
    """What is aligned."""

    @property
    def name(self) -> str:
        """Its name in the engine."""

    @property
    def onnx_nodes(self) -> tuple[str, ...]:
        """Names of the ONNX nodes it computes."""


_Layer = TypeVar("_Layer", bound=NamedLayer)


def aligned(
    before: Sequence[_Layer],
    after: Sequence[_Layer],
    signature: Callable[[_Layer], Hashable],
    fits: Callable[[Sequence[_Layer], Sequence[_Layer]], bool] = lambda before, after: True,
) -> Iterator[tuple[list[_Layer], list[_Layer], Alignment]]:
    """Every layer of both sides once, with what it is aligned to, and by what.

    Layers that share parameters (in the names of fused layers) or nodes, directly or through others, belong together;
    layers without either by their names. What is left on both sides is aligned in its order where ``signature`` is
    equal. Layers that share names belong together where ``fits``: exporters number nodes anew when a model changes.
    """
    left: tuple[list[_Layer], list[_Layer]] = ([], [])
    for group in _grouped(before, after):
        if all(group) and fits(*group):
            yield *group, "nodes" if group[0][0].onnx_nodes else "name"
        else:
            for side, layers in zip(left, group, strict=True):
                side += layers
    order = {id(layer): index for layers in (before, after) for index, layer in enumerate(layers)}
    for side in left:
        side.sort(key=lambda layer: order[id(layer)])
    first, second = ([signature(layer) for layer in side] for side in left)
    for what, i, i_end, j, j_end in difflib.SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        if what == "equal":
            for old, new in zip(left[0][i:i_end], left[1][j:j_end], strict=True):
                yield [old], [new], "shape"
        else:
            yield from (([old], [], "none") for old in left[0][i:i_end])
            yield from (([], [new], "none") for new in left[1][j:j_end])


class _Union:
    """Names that belong together."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def root(self, name: str) -> str:
        while self._parent.setdefault(name, name) != name:
            self._parent[name] = self._parent[self._parent[name]]
            name = self._parent[name]
        return name

    def join(self, names: Sequence[str]) -> None:
        for name in names[1:]:
            self._parent[self.root(name)] = self.root(names[0])


def _grouped(before: Sequence[_Layer], after: Sequence[_Layer]) -> list[tuple[list[_Layer], list[_Layer]]]:
    """The layers of both sides that hold the same parameters or nodes."""
    by_weight = _Union()
    for layer in (*before, *after):
        by_weight.join(_weights(layer))
    owners: dict[str, set[str]] = {}
    for layer in (*before, *after):
        for name in layer.onnx_nodes:
            owners.setdefault(name, set()).update(by_weight.root(weight) for weight in _weights(layer))
    union = _Union()
    keys = [_keys(layer, by_weight, owners) for layer in (*before, *after)]
    for names in keys:
        union.join(names)
    groups: dict[str, tuple[list[_Layer], list[_Layer]]] = {}
    for index, (layer, names) in enumerate(zip((*before, *after), keys, strict=True)):
        groups.setdefault(union.root(names[0]), ([], []))[index >= len(before)].append(layer)
    return list(groups.values())


def _weights(layer: NamedLayer) -> list[str]:
    return [part for part in layer.name.split(" + ") if _WEIGHT.match(part)]


def _keys(layer: NamedLayer, by_weight: _Union, owners: Mapping[str, set[str]]) -> list[str]:
    """What a layer is known by: its parameters; its nodes, but for those that layers of other parameters have too,
    where the same name is of another node; else its name."""
    weights = [f"weight {by_weight.root(name)}" for name in _weights(layer)]
    nodes = [f"node {name}" for name in layer.onnx_nodes if len(owners[name]) < 2]
    return [*weights, *nodes] or [f"layer {layer.name}"]


LEAST_SHARED = 0.1
"""Share of either side's time in layers that both have: below it the profiles are of different networks."""

_KINDS = ("reformat", "pool", "conv", "gemm", "softmax", "norm")
"""Words that are in the types of layers that do the same, in different kernels (``CudaPooling``, ``TiledPooling``)."""


def compare(before: ProfileReport, after: ProfileReport, names: tuple[str, str] = ("before", "after")) -> Comparison:
    """What became faster or slower, which fusions appeared or vanished, which types changed.

    Layers that share a parameter (by its name, where fused layers have it in theirs) or nodes, directly or through
    others, are one region, unless their weights or outputs have other sizes: exporters number nodes anew when a model
    changes. Layers without nodes (reformats) are aligned by name. What is left on both sides is aligned in its order by
    what layers do and by the sizes of inputs, outputs and weights.

    Raises:
        UsageError: They have next to nothing in common: they are of different networks. It calls them ``names``.
    """
    found = aligned(before.layers, after.layers, _signature, _fits)
    regions = [_region(old, new, how) for old, new, how in found]
    shares = [_shared(regions, side) for side in ("before", "after")]
    if before.layers and after.layers and min(shares) < LEAST_SHARED:
        raise UsageError(
            f"The two reports have {percent(shares[0])} and {percent(shares[1])} of their time in common",
            where=f"{names[0]} ({before.layers[0].name}, ...) and {names[1]} ({after.layers[0].name}, ...)",
            remedy="compare reports of one network",
        )
    regions.sort(key=lambda item: -abs(item.gain_us))
    return Comparison(
        _profiled(before, names[0]),
        _profiled(after, names[1]),
        tuple(regions),
        tuple(_warnings(before, after, regions)),
    )


def _signature(layer: ProfileLayer) -> Hashable:
    """What tells a layer where its names do not; layers that run nothing or list no tensors are like no other."""
    if layer.measured_us <= 0 or not layer.outputs or not layer.inputs:
        return layer.name, id(layer)
    kind = next((word for word in _KINDS if word in layer.type.lower()), layer.type)
    return kind, layer.inputs[0].shape, layer.outputs[0].shape, _weight_size([layer])


def _fits(before: Sequence[ProfileLayer], after: Sequence[ProfileLayer]) -> bool:
    """Whether layers of the same names can be the same: equal sizes of weights and of the last output, where told."""
    sizes = _weight_size(before), _weight_size(after)
    ends = [layers[-1].outputs[0].shape for layers in (before, after) if layers[-1].outputs]
    return (not all(sizes) or sizes[0] == sizes[1]) and (len(ends) < 2 or ends[0] == ends[1])


def _weight_size(layers: Sequence[ProfileLayer]) -> int:
    """Elements of the largest constant; 0 without one."""
    return max((math.prod(item.shape) for layer in layers for item in layer.constants), default=0)


def _shared(regions: Sequence[ComparedRegion], side: str) -> float:
    """Share of one side's time in layers that both have; copies of equal size are no sign of one network."""
    total = math.fsum(getattr(item, side).measured_us for item in regions)
    both = [item for item in regions if item.before.layers and item.after.layers]
    known = [
        item
        for item in both
        if item.aligned == "nodes"
        or not all("reformat" in name.lower() for name in (*item.before.layers, *item.after.layers))
    ]
    return math.fsum(getattr(item, side).measured_us for item in known) / total if total else 1.0


def _region(before: Sequence[ProfileLayer], after: Sequence[ProfileLayer], how: Alignment) -> ComparedRegion:
    sides = _side(before), _side(after)
    nodes = dict.fromkeys(name for layer in (*before, *after) for name in (layer.onnx_nodes or (layer.name,)))
    gain = sides[0].measured_us - sides[1].measured_us
    return ComparedRegion(tuple(nodes), *sides, _change(before, after, how), gain, how)


def _side(layers: Sequence[ProfileLayer]) -> Side:
    return Side(
        tuple(layer.name for layer in layers),
        tuple(dict.fromkeys(name for layer in layers if layer.measured_us > 0 and (name := precision_of(layer)))),
        tuple(dict.fromkeys(layer.tactic for layer in layers if layer.tactic)),
        math.fsum(layer.measured_us for layer in layers),
    )


def _change(before: Sequence[ProfileLayer], after: Sequence[ProfileLayer], how: Alignment) -> Change:
    old, new = ([layer for layer in side if layer.measured_us > 0] for side in (before, after))
    if not before or (new and not old):
        return "appeared"
    if not after or (old and not new):
        return "vanished"
    if len(old) != len(new):
        return "fused" if len(new) < len(old) else "split"
    same = {layer.onnx_nodes for layer in old} == {layer.onnx_nodes for layer in new}
    return "same" if same or how == "shape" else "regrouped"


def _profiled(report: ProfileReport, name: str) -> Profiled:
    source, totals = report.source, report.totals
    return Profiled(
        name,
        str(report.gpu.get("name", "")),
        f"{source.origin} {source.version}".strip(),
        sum(layer.measured_us > 0 for layer in report.layers),
        totals.measured_us,
        totals.end_to_end_us,
    )


def _warnings(before: ProfileReport, after: ProfileReport, regions: Sequence[ComparedRegion]) -> Iterator[str]:
    for what, first, second in (
        ("on different devices", before.gpu.get("name"), after.gpu.get("name")),
        ("by different means", before.source.origin, after.source.origin),
        ("in different ways", before.source.launching, after.source.launching),
    ):
        if first != second:
            yield f"{'predicted' if before.source.origin == 'prediction' else 'measured'} {what}: {first} and {second}"
    total = before.totals.measured_us
    shared = math.fsum(item.before.measured_us for item in regions if item.before.layers and item.after.layers)
    if total and shared < 0.5 * total:
        yield f"only {percent(shared / total)} of the time of the first is in layers that both have"
    by_shape = sum(item.aligned == "shape" for item in regions)
    if by_shape:
        yield f"{count(by_shape, 'layer')} of each share no node: aligned by what they do and their sizes, in order"
