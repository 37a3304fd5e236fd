"""Which layer of an engine does the arithmetic of which ONNX node."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from trtopt.engine.layers import tensor_bytes
from trtopt.graph import edit
from trtopt.report.schema.layers import LayerInfo

_PRODUCT_KINDS = ("conv", "gemm", "mha", "fused")
"""Kinds of kernels with matrix products, those that surely have one first (as in ``engine.achieved``)."""

_SEPARATORS = re.compile(r" \+ | \|\| |, |\.\.\.|PWN\(|\{ForeignNode\[|\]\}|[()]")
"""What stands between ONNX names in the layer names of TensorRT 8 to 10: ``a + b``, ``a || b``, ``PWN(a, b)``,
``{ForeignNode[first...last]}``."""

_SHAPES = ("Shape", "Size")


@dataclass(frozen=True)
class Claims:
    """Who computes what.

    Attributes:
        owned: Per layer, the nodes whose arithmetic it does; each node of the graph is in one layer at most.
        touched: Per layer, the names of all nodes it computes part of, in the order it lists them; a layer that lists
            none has those of the layer that reads its result, whose operands it prepares, and products that one takes
            over from no layer at all: a GRU leaves no trace in the names of its kernels.
        lost: Nodes that belong to no layer, because nothing near them does. Those that depend on constants and static
            shapes only are not among them: nothing is left of them to compute.
    """

    owned: tuple[tuple[ir.Node, ...], ...]
    touched: tuple[tuple[str, ...], ...]
    lost: tuple[str, ...]


def claims_of(layers: Sequence[LayerInfo], model: ir.Model, is_product: Callable[[ir.Node], bool]) -> Claims:
    """Match layers and nodes.

    A node that several layers list belongs to the one that most surely does its arithmetic: a kernel of products
    before a generated one, and the one that moves most. A product that only generated kernels list belongs to the
    kernel of products that prepares their operands, if there is one. Nodes that no layer lists (fused without a trace)
    belong to the layer of the nearest consumer, else of the nearest producer.

    Args:
        layers: Kernels only, in the order of the engine.
        model: The model that was compiled; node names are unique.
        is_product: Whether a node is a matrix product.
    """
    nodes = {str(node.name): node for node in edit.all_nodes(model.graph)}
    direct = _claims_by_output(layers, [_names(layer, nodes) for layer in layers], nodes)
    touched, helpers = _with_helpers(layers, direct)
    owner: dict[str, int] = {}
    for index, names in enumerate(direct):
        for name in names:
            if name not in owner or _preference(layers[index]) < _preference(layers[owner[name]]):
                owner[name] = index
    for index, names in enumerate(touched):
        for name in names if layers[index].kind in _PRODUCT_KINDS else ():
            if is_product(nodes[name]) and layers[owner[name]].kind not in _PRODUCT_KINDS:
                owner[name] = index
    folded = _folded(model)
    lost = []
    adopted: dict[str, int] = {}
    for name, node in nodes.items():
        if name in owner or name in folded:
            continue
        found = _nearest(node, owner, _consumers)
        found = _nearest(node, owner, _producers) if found is None else found
        if found is None:
            lost.append(name)
        else:
            adopted[name] = found
    owned: list[list[ir.Node]] = [[] for _ in layers]
    for name, node in nodes.items():
        at = owner.get(name, adopted.get(name))
        if at is None:
            continue
        owned[at].append(node)
        if name not in touched[at]:
            for index in helpers.get(at, ()) if is_product(node) else ():
                touched[index].append(name)
            touched[at].append(name)
    return Claims(tuple(map(tuple, owned)), tuple(map(tuple, touched)), tuple(lost))


def _names(layer: LayerInfo, nodes: Mapping[str, ir.Node]) -> list[str]:
    """The names of nodes a layer lists, whole or inside the names TensorRT makes of several."""
    found: dict[str, None] = {}
    for name in layer.onnx_nodes:
        parts = [name] if name in nodes else _SEPARATORS.split(name)
        found.update((part, None) for part in parts if part in nodes)
    return list(found)


def _claims_by_output(
    layers: Sequence[LayerInfo], direct: list[list[str]], nodes: Mapping[str, ir.Node]
) -> list[list[str]]:
    """A layer that lists no node computes the one whose output it writes, where the compiler kept the tensor's name
    (that of a network output) and no other layer lists the node."""
    makers = {str(value.name): name for name, node in nodes.items() for value in node.outputs if value.name}
    claimed = {name for names in direct for name in names}
    makers = {value: name for value, name in makers.items() if name not in claimed}
    return [
        names or [makers[item.name] for item in layer.outputs if item.name in makers]
        for layer, names in zip(layers, direct, strict=True)
    ]


def _with_helpers(
    layers: Sequence[LayerInfo], direct: Sequence[list[str]]
) -> tuple[list[list[str]], dict[int, list[int]]]:
    """A layer without nodes takes those of the first layer after it that reads what it writes; and which layers such
    ones help in the end."""
    readers: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        for name in dict.fromkeys(item.name for item in layer.inputs):
            readers.setdefault(name, []).append(index)
    touched = [list(names) for names in direct]
    helped: dict[int, int] = {}
    for index in reversed(range(len(layers))):
        if touched[index]:
            continue
        after = sorted(
            reader for item in layers[index].outputs for reader in readers.get(item.name, ()) if reader > index
        )
        reader = next((reader for reader in after if touched[reader]), None)
        if reader is not None:
            touched[index] = list(touched[reader])
            helped[index] = helped.get(reader, reader)
    helpers: dict[int, list[int]] = {}
    for index, at in helped.items():
        helpers.setdefault(at, []).append(index)
    return touched, helpers


def _preference(layer: LayerInfo) -> tuple[int, int]:
    rank = _PRODUCT_KINDS.index(layer.kind) if layer.kind in _PRODUCT_KINDS else len(_PRODUCT_KINDS)
    return rank, -sum(tensor_bytes(item) for item in (*layer.inputs, *layer.outputs, *layer.constants))


def _folded(model: ir.Model) -> set[str]:
    """Names of nodes that depend on constants and static shapes only."""
    folded: set[str] = set()
    constant: set[ir.Value] = set()
    for node in edit.all_nodes(model.graph):
        known = node.op_type in _SHAPES or all(
            value is None or value in constant or edit.constant_tensor_of(value) is not None for value in node.inputs
        )
        if known and not edit.subgraphs_of(node) and not node.op_type.startswith(("Random", "Bernoulli")):
            folded.add(str(node.name))
            constant.update(node.outputs)
    return folded


def _nearest(node: ir.Node, owner: Mapping[str, int], step: Callable[[ir.Node], Iterable[ir.Node]]) -> int | None:
    """The owner of the nearest node that has one, in one direction."""
    waiting, seen = deque([node]), {node}
    while waiting:
        for other in step(waiting.popleft()):
            if other in seen:
                continue
            if str(other.name) in owner:
                return owner[str(other.name)]
            seen.add(other)
            waiting.append(other)
    return None


def _consumers(node: ir.Node) -> list[ir.Node]:
    return [user for value in node.outputs for user, _ in value.uses()]


def _producers(node: ir.Node) -> list[ir.Node]:
    found = [value.producer() for value in node.inputs if value is not None]
    return [producer for producer in found if producer is not None]
