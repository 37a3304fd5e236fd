"""The layers of two engines of one network, aligned by the parameters and the ONNX nodes they hold."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from trtopt.report.schema.profile import Alignment

_WEIGHT = re.compile(r"[^ ]+\.weight$")
"""A part of a fused layer's name that is a parameter of PyTorch."""


class Layer(Protocol):
    """What is aligned."""

    @property
    def name(self) -> str:
        """Its name in the engine."""

    @property
    def onnx_nodes(self) -> tuple[str, ...]:
        """Names of the ONNX nodes it computes."""


_Layer = TypeVar("_Layer", bound=Layer)


def aligned(
    before: Sequence[_Layer],
    after: Sequence[_Layer],
    signature: Callable[[_Layer], Hashable],
    fits: Callable[[Sequence[_Layer], Sequence[_Layer]], bool] = lambda before, after: True,
) -> Iterator[tuple[list[_Layer], list[_Layer], Alignment]]:
    """Every layer of both sides once, with what it is aligned to, and by what.

    Layers that share parameters (in the names of fused layers) or nodes, directly or through others, belong together;
    layers without either by their names. What is left on both sides is aligned in its order where ``signature`` is
    equal.

    Args:
        before: The layers of one engine, in its order.
        after: Those of the other.
        signature: What tells a layer where its names do not.
        fits: Whether layers that share names can be the same: exporters number nodes anew when a model changes.
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


def _weights(layer: Layer) -> list[str]:
    return [part for part in layer.name.split(" + ") if _WEIGHT.match(part)]


def _keys(layer: Layer, by_weight: _Union, owners: Mapping[str, set[str]]) -> list[str]:
    """What a layer is known by: its parameters; its nodes, but for those that layers of other parameters have too,
    where the same name is of another node; else its name."""
    weights = [f"weight {by_weight.root(name)}" for name in _weights(layer)]
    nodes = [f"node {name}" for name in layer.onnx_nodes if len(owners[name]) < 2]
    return [*weights, *nodes] or [f"layer {layer.name}"]
