"""What the user calls the layers of a report, and layers of equal work as one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from trtopt.report.schema.analysis import Finding, LayerRow
from trtopt.report.schema.layers import NodeName
from trtopt.report.text.blocks import Name, Names

_PRODUCTS = frozenset(
    ("Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum", "Attention", "LSTM", "GRU", "RNN", "ConvInteger")
)
"""Operators after which a kernel is called that computes others as well."""
_INDEX = re.compile(r"(?<![^./_])(\d+|\*)(?![^./_])")
"""A number that is a part of a path by itself: ``3`` of ``layer1.3.conv2``."""


@dataclass(frozen=True)
class Labels:
    """What the user calls nodes: the paths of the modules they come from.

    Example:
        >>> Labels({"node_conv2d": NodeName("layer1.0.conv1", "Conv")}).of(["node_conv2d"]).text
        'layer1.0.conv1'
    """

    names: Mapping[str, NodeName]

    def of(self, nodes: Sequence[str], own: str = "", after: str = "") -> Name:
        """The name of what computes ``nodes``: that of their products, else of all; ``own`` is its own name, which
        stands where no module is known. ``after`` stands behind it."""
        return replace(named(self.modules(nodes), own or (nodes[0] if nodes else "")), after=after)

    def modules(self, nodes: Sequence[str]) -> tuple[str, ...]:
        """The modules of the products among nodes, else of all of them, each once."""
        known = [self.names[node] for node in nodes if node in self.names]
        found = [item.module for item in known if item.op in _PRODUCTS] or [item.module for item in known]
        return tuple(dict.fromkeys(found))

    def region(self, nodes: Sequence[str]) -> str:
        """The name of what computes ``nodes``, and how many more they are where no module says so."""
        telling = sorted(nodes, key=lambda name: "quantizelinear" in name.lower())  # a layer is not its Q/DQ
        more = f" +{len(telling) - 1}" if len(telling) > 1 and not self.modules(telling) else ""
        return self.of(telling).text + more

    def each(self, nodes: Iterable[str]) -> Names:
        """The name of each node, each once."""
        return Names(tuple(dict.fromkeys(self.text(node) for node in nodes)))

    def found(self, findings: Iterable[Finding]) -> tuple[Finding, ...]:
        """Findings with the names of their nodes."""
        return tuple(replace(item, nodes=self.each(item.nodes).names) for item in findings)

    def text(self, node: str) -> str:
        """The name of a node in a sentence."""
        return self.names[node].module if node in self.names else node


def named(modules: Sequence[str], own: str) -> Name:
    """The name of what computes ``modules``, whose own name is ``own``: the module that holds them all, where there is
    one below the outermost, else the first of them."""
    if not modules:
        return Name(own)
    label = _common(modules)
    return Name(label, own=own if own != label else "")


def _common(modules: Sequence[str]) -> str:
    if len(modules) < 2:
        return modules[0]
    paths = [module.split(".") for module in modules]
    shared = next(
        (index for index, parts in enumerate(zip(*paths, strict=False)) if len(set(parts)) > 1), min(map(len, paths))
    )
    if shared < 2:
        return f"{modules[0]} +{len(modules) - 1}"
    return ".".join(paths[0][:shared]) + ("" if shared in map(len, paths) else ".*")


@dataclass(frozen=True)
class Equal:
    """Layers of equal work whose names differ by indices only, in the order of the report.

    Attributes:
        name: Their common name, ``*`` for an index that differs.
        rows: The layers.
    """

    name: Name
    rows: tuple[LayerRow, ...]

    @property
    def predicted_us(self) -> float:
        return sum(row.predicted_us for row in self.rows)


def equal_layers(rows: Sequence[LayerRow], labels: Labels) -> list[Equal]:
    """Equal layers together, those that take most time together first.

    Layers are equal where operator, type, product, arithmetic and bytes are, and their names but for indices.
    """
    groups: dict[tuple[object, ...], list[tuple[str, LayerRow]]] = {}
    for row in rows:
        name = labels.of(row.onnx_nodes, row.name).text
        product = None if row.gemm is None else tuple(sorted(row.gemm.items()))
        key = (row.op, row.dtype, row.kind, product, row.flop, row.bytes, skeleton(name))
        groups.setdefault(key, []).append((name, row))
    found = []
    for items in groups.values():
        names, members = zip(*items, strict=True)
        first = labels.of(members[0].onnx_nodes, members[0].name)
        found.append(Equal(first if len(members) == 1 else Name(starred(names)), members))
    return sorted(found, key=lambda group: -group.predicted_us)


def skeleton(name: str) -> str:
    """What names that differ by indices only have in common."""
    return _INDEX.sub("*", name)


def starred(names: Sequence[str]) -> str:
    """Names that differ by indices as one, ``*`` for each that differs."""
    parts = zip(*(_INDEX.split(name) for name in names), strict=True)
    return "".join(part[0] if len(set(part)) == 1 else "*" for part in parts)
