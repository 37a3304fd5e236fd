"""Element-wise kernels: chains of operators on the same elements, with the reductions of their rows.

Kernels have a level, above that of every kernel they read. They are joined only if what reads them stays above the
level of the whole, so that no kernel comes to wait for itself.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph.edit import int_attribute, is_op
from trtopt.roofline.flow import Flow, is_pointwise

_LONGEST_ROW = 1 << 16
"""Elements of a row that one thread block reduces in one pass; longer reductions are kernels of their own."""

ROWWISE = frozenset(
    "Softmax LogSoftmax Hardmax LayerNormalization RMSNormalization GroupNormalization LpNormalization "
    "MeanVarianceNormalization ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin "
    "ReduceProd ReduceSum ReduceSumSquare".split()
)
_FLEXIBLE_MOVES = frozenset({"Gather", "GatherElements", "GatherND", "Pad", "RotaryEmbedding", "Transpose", "Trilu"})
"""Operators that element-wise kernels take in: they change where a value is read."""


@dataclass(frozen=True, eq=False)
class FusedKernel:
    """Nodes that become one kernel.

    Attributes:
        main: The node that names it: its product, or the last row-wise or element-wise operator.
        nodes: All of its nodes, in topological order.
        is_attention: Whether it is a fused attention.
    """

    main: ir.Node
    nodes: list[ir.Node]
    is_attention: bool = False


class _Cluster:
    """A kernel while it grows: its level, what reads it, and its iteration space."""

    def __init__(self, node: ir.Node, level: int, size: int | None, row: int) -> None:
        self.nodes = [node]
        self.level = level
        self.size = size
        self.row = row
        self.readers: set[_Cluster] = set()
        self.lowest = math.inf  # no reader is below this level: levels only rise
        self.parent: _Cluster | None = None
        self.kernel: FusedKernel | None = None

    def add_reader(self, reader: _Cluster) -> None:
        """Note that ``reader`` reads this kernel."""
        self.readers.add(reader)
        self.lowest = min(self.lowest, reader.level)

    def top(self) -> _Cluster:
        """The cluster this one was joined into."""
        cluster = self
        while cluster.parent is not None:
            if cluster.parent.parent is not None:
                cluster.parent = cluster.parent.parent
            cluster = cluster.parent
        return cluster


def joined_kernels(flow: Flow, owned: Mapping[ir.Node, FusedKernel]) -> list[FusedKernel]:
    """Every kernel of a graph, in an order in which they can run: those that are owned as they are, the remaining nodes
    joined where they can be."""
    return _ordered(flow, _clusters(flow, owned))


def _clusters(flow: Flow, owned: Mapping[ir.Node, FusedKernel]) -> list[_Cluster]:
    """The kernels, in the order of their first nodes."""
    made: dict[ir.Node, _Cluster] = {}
    result: list[_Cluster] = []
    ends = {kernel: _last_reader(flow, kernel) for kernel in owned.values()}
    for node in flow.nodes:
        kernel = owned.get(node)
        if kernel is None:
            cluster = _placed(flow, node, made)
            if cluster.nodes[0] is node:
                result.append(cluster)
        elif ends[kernel] is node:
            cluster = _opaque(flow, kernel, made)
            result.append(cluster)
    return [cluster for cluster in result if cluster.parent is None]


def _last_reader(flow: Flow, kernel: FusedKernel) -> ir.Node:
    """The last node of a kernel that reads something from outside: from there on the kernel can run."""
    inside = set(kernel.nodes)
    outer = (node for node in reversed(kernel.nodes) if any(v.producer() not in inside for v in flow.inputs(node)))
    return next(outer, kernel.nodes[0])


def _sources(flow: Flow, nodes: Iterable[ir.Node], made: dict[ir.Node, _Cluster]) -> list[_Cluster]:
    found: dict[_Cluster, None] = {}
    for node in nodes:
        for value in flow.inputs(node):
            producer = value.producer()
            cluster = made.get(producer) if producer is not None else None
            if cluster is not None:
                found[cluster.top()] = None
    return list(found)


def _opaque(flow: Flow, kernel: FusedKernel, made: dict[ir.Node, _Cluster]) -> _Cluster:
    sources = _sources(flow, kernel.nodes, made)
    cluster = _Cluster(kernel.main, 1 + max((item.level for item in sources), default=0), None, 0)
    cluster.nodes, cluster.kernel = list(kernel.nodes), kernel
    made.update(dict.fromkeys(kernel.nodes, cluster))
    for item in sources:
        item.add_reader(cluster)
    return cluster


def _placed(flow: Flow, node: ir.Node, made: dict[ir.Node, _Cluster]) -> _Cluster:
    """Put a node into the kernels it reads, as many of them as can be one with it, or into one of its own."""
    sources = _sources(flow, [node], made)
    size, row = _space(flow, node)
    cluster = _Cluster(node, 1 + max((item.level for item in sources), default=0), size, row)
    joined: list[_Cluster] = []
    for item in sorted(sources, key=lambda item: -item.level):
        if _fits(item, size, row) and _agree(item, joined) and _can_join([*joined, item], sources):
            joined.append(item)
    made[node] = cluster
    if joined:
        return _merge(joined, cluster, sources)
    for item in sources:
        item.add_reader(cluster)
    return cluster


def _space(flow: Flow, node: ir.Node) -> tuple[int | None, int]:
    """The elements a node runs over, and those of a row it reduces; None when it is no element-wise kernel."""
    if node in flow.free:
        return None, 0
    if is_pointwise(node) or (node.domain == "" and node.op_type in _FLEXIBLE_MOVES):
        return flow.elements(node.outputs[0]), 0
    if node.domain != "" or node.op_type not in ROWWISE or node.inputs[0] is None:
        return None, 0
    shape = flow.shapes.get(str(node.inputs[0].name))
    if not shape or 0 in shape:
        return None, 0
    row = _row(node, shape, flow.elements(node.outputs[0]))
    return (math.prod(shape), row) if row and row <= _LONGEST_ROW else (None, 0)


def _row(node: ir.Node, shape: tuple[int, ...], out: int | None) -> int | None:
    size = math.prod(shape)
    if node.op_type.startswith("Reduce"):
        return size // out if out else None
    if is_op(node, "GroupNormalization"):
        return size // (shape[0] * int_attribute(node, "num_groups", 1))
    if is_op(node, "MeanVarianceNormalization"):
        return size // shape[1]
    axis = int_attribute(node, "axis", -1)
    if is_op(node, "LayerNormalization", "RMSNormalization"):
        return math.prod(shape[axis:])
    return shape[axis] if -len(shape) <= axis < len(shape) else None


def _fits(cluster: _Cluster, size: int | None, row: int) -> bool:
    """Whether a node belongs into a kernel's iteration space: all of it, or one element per row of it."""
    if cluster.size is None or size is None:
        return False
    rows_agree = not row or not cluster.row or row == cluster.row
    per_row = cluster.row > 1 and not row and size * cluster.row == cluster.size
    return rows_agree and (size == cluster.size or per_row)


def _agree(cluster: _Cluster, others: list[_Cluster]) -> bool:
    return all(
        item.size == cluster.size and (not item.row or not cluster.row or item.row == cluster.row) for item in others
    )


def _can_join(joined: list[_Cluster], sources: list[_Cluster]) -> bool:
    """Whether nothing lies between ``joined``, or between them and the other ``sources``: every reader of them stays
    above the level they would have together."""
    level = _joint_level(joined, sources)
    return all(
        item.lowest > level or all(reader.top().level > level or reader.top() in joined for reader in item.readers)
        for item in joined
    )


def _joint_level(joined: list[_Cluster], sources: list[_Cluster]) -> int:
    others = max((item.level for item in sources if item not in joined), default=0)
    return max(others + 1, *(item.level for item in joined))


def _merge(joined: list[_Cluster], added: _Cluster, sources: list[_Cluster]) -> _Cluster:
    """Make one kernel of several and a node that reads them all; the largest takes the others in."""
    level = _joint_level(joined, sources)
    target = max(joined, key=lambda item: len(item.nodes) + len(item.readers))
    for item in [*(item for item in joined if item is not target), added]:
        item.parent = target
        target.nodes += item.nodes
        target.readers |= item.readers
        target.lowest = min(target.lowest, item.lowest)
        target.row = target.row or item.row
    target.level = level
    for item in sources:
        if item not in joined:
            item.add_reader(target)
    return target


def _ordered(flow: Flow, clusters: list[_Cluster]) -> list[FusedKernel]:
    """Kernels in an order in which they can run, each as early as the graph's own order has its last node."""
    owner = {node: cluster for cluster in clusters for node in cluster.nodes}
    readers: dict[_Cluster, set[_Cluster]] = {cluster: set() for cluster in clusters}
    waiting = dict.fromkeys(clusters, 0)
    for node in flow.nodes:
        for value in flow.inputs(node):
            producer = value.producer()
            source = owner.get(producer) if producer is not None else None
            if source is not None and source is not owner[node] and owner[node] not in readers[source]:
                readers[source].add(owner[node])
                waiting[owner[node]] += 1
    place = {cluster: max(flow.position[node] for node in cluster.nodes) for cluster in clusters}
    ready = [(place[cluster], index, cluster) for index, cluster in enumerate(clusters) if not waiting[cluster]]
    heapq.heapify(ready)
    order = {cluster: index for index, cluster in enumerate(clusters)}
    result: list[FusedKernel] = []
    while ready:
        cluster = heapq.heappop(ready)[2]
        result.append(cluster.kernel or _kernel(flow, cluster))
        for reader in readers[cluster]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, (place[reader], order[reader], reader))
    return result


def _kernel(flow: Flow, cluster: _Cluster) -> FusedKernel:
    nodes = sorted(cluster.nodes, key=flow.position.__getitem__)
    rowwise = [node for node in nodes if node.op_type in ROWWISE]
    return FusedKernel((rowwise or nodes)[-1], nodes)
