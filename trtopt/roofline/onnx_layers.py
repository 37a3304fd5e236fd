"""The layers an ONNX graph would have in an engine, from the fusions TensorRT is known to do."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import onnx_ir as ir

from trtopt.graph import cost
from trtopt.graph.edit import is_op
from trtopt.graph.products import Shapes, products_of
from trtopt.roofline.clusters import FusedKernel
from trtopt.roofline.flow import Flow
from trtopt.roofline.fuse import kernels_of
from trtopt.roofline.node_work import GraphTypes, read, shaped, written
from trtopt.roofline.row_work import rows_of
from trtopt.roofline.work import AttentionSizes, Layer, Work, alignment_of, in_network


def layers_of_graph(model: ir.Model, shapes: Shapes, precision: GraphTypes) -> tuple[Layer, ...]:
    """The kernels of a model, in an order in which they can run.

    Views, constants, shape arithmetic on the host, and what kernels read or write in place (slices, concatenations,
    transposes beside a matrix product) are no layers. Nested graphs are fused by themselves; the layers of a loop's
    body stand once, with the work of all iterations (see :func:`trtopt.graph.cost.iterations`). What writes nothing,
    because a tensor has no elements or a loop no iterations, is no layer either.

    Returns:
        Layers; ``work`` is None for an operator without a cost, and where a shape depends on data.
    """
    return FusedModel(model, shapes, precision).layers()


class FusedModel:
    """A model as kernels: each of its graphs is fused once, for its layers and its memory alike.

    Attributes:
        model: The model; every node has a unique name, and values have types. It must not change.
        shapes: Static shapes by value name.
        precision: The types it runs in.
    """

    def __init__(self, model: ir.Model, shapes: Shapes, precision: GraphTypes) -> None:
        self.model, self.shapes, self.precision = model, shapes, precision
        self._fused: dict[ir.Graph, FusedGraph] = {}

    def fused(self, graph: ir.Graph) -> FusedGraph:
        """One of its graphs."""
        if graph not in self._fused:
            flow = Flow(graph, self.shapes, self.precision)
            kernels = tuple(kernels_of(flow))
            self._fused[graph] = FusedGraph(flow, kernels, tuple(_flop(each, flow) for each in kernels))
        return self._fused[graph]

    def in_types(self, precision: GraphTypes) -> FusedModel:
        """The same kernels in other types, for those that change no fusion: products with a constant weight, of a model
        without quantizers, in 8 bits."""
        other = FusedModel(self.model, self.shapes, precision)
        other._fused = {
            graph: FusedGraph(found.flow.in_types(precision), found.kernels, found.flop)
            for graph, found in self._fused.items()
        }
        return other

    def layers(self) -> tuple[Layer, ...]:
        """See :func:`layers_of_graph`."""
        counted = [
            (self.fused(graph), times)
            for graph, times in cost.graphs_with_counts(self.model.graph, self.shapes)
            if times
        ]
        layers = [layer for graph, times in counted for layer in _layers(graph, times)]
        return in_network(layers, sum(sum(graph.traffic.constants.values()) for graph, _ in counted))


@dataclass(frozen=True)
class FusedGraph:
    """A graph, its kernels in an order in which they can run, the arithmetic of each (None where it is not known), and
    what crosses their borders."""

    flow: Flow
    kernels: tuple[FusedKernel, ...]
    flop: tuple[int | None, ...]

    @functools.cached_property
    def traffic(self) -> KernelTraffic:
        return KernelTraffic(self.flow)


def _flop(kernel: FusedKernel, flow: Flow) -> int | None:
    total = 0
    for node in kernel.nodes:
        flop = cost.flop_of(node, flow.shapes)
        if flop is None:
            return None
        total += flop
    return total


def _layers(graph: FusedGraph, times: int) -> Iterator[Layer]:
    for kernel, flop in zip(graph.kernels, graph.flop, strict=True):
        if kernel.main in graph.flow.free:
            continue
        names = tuple(str(node.name) for node in kernel.nodes)
        op = "Attention" if kernel.is_attention else kernel.main.op_type
        work = None if flop is None else _work(graph.flow, kernel, graph.traffic, flop)
        if work is None:
            yield Layer(str(kernel.main.name), op, names, None)
        elif work.write_bytes:
            yield Layer(str(kernel.main.name), op, names, repeated(work, times))


def repeated(work: Work, times: int) -> Work:
    """The work of all iterations of a loop. A recurrent layer's weights stand once, read in each of its steps."""
    if times == 1:
        return work
    return replace(
        work,
        flop=work.flop * times,
        read_bytes=work.read_bytes * times,
        weight_bytes=work.weight_bytes * (1 if work.kind == "recurrent" else times),
        write_bytes=work.write_bytes * times,
        steps=work.steps * times,
    )


def _work(flow: Flow, kernel: FusedKernel, traffic: KernelTraffic, flop: int) -> Work | None:
    moved = traffic.moved(kernel)
    if moved is None:
        return None
    work = shaped(kernel.main, flow.shapes, flow.precision, flop, moved[:3])
    work = replace(work, network_share=moved[3] / max(moved[0] + moved[2], 1))
    if work.kind == "memory":
        return replace(work, rows=rows_of(kernel.nodes, flow.shapes))
    if not kernel.is_attention or work.gemm is None:
        return work
    second = next((found for node in reversed(kernel.nodes) if (found := products_of(node, flow.shapes))), ())
    if not second:
        return work
    gemm, value_size = work.gemm, second[0].n
    attention = AttentionSizes(gemm.m, gemm.n, gemm.k, value_size, gemm.batch, gemm.batch)
    alignment = alignment_of(gemm.k, value_size, dtype=work.dtype)
    return replace(work, kind="attention", attention=attention, alignment_bytes=alignment)


class KernelTraffic:
    """What crosses the borders of kernels: each tensor and constant once per kernel.

    A Concat is free for the tensors whose producers can write them in place: whole tensors that a kernel of the graph
    writes and that lie in no other Concat. The rest are copied.

    Attributes:
        home: The Concat that each such tensor is written into.
        constants: Bytes of each constant that the kernels asked about read.
    """

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self.home: dict[ir.Value, ir.Value] = {}
        self.constants: dict[ir.Value, int] = {}
        for node in flow.nodes:
            if is_op(node, "Concat"):
                self._place(node)

    def copied(self, concat: ir.Node) -> list[ir.Value]:
        """The inputs of a Concat that it has to copy."""
        out = concat.outputs[0]
        return [
            value for value in dict.fromkeys(concat.inputs) if value is not None and self.home.get(value) is not out
        ]

    def moved(self, kernel: FusedKernel) -> tuple[int, int, int, int] | None:
        """Bytes of activations read, constants read, activations written, and of the activations those of the
        network's inputs and outputs; None when a shape is not known."""
        flow = self._flow
        if is_op(kernel.main, "Concat") and len(kernel.nodes) == 1:
            sizes = {value: flow.read_bytes(kernel.main, value) for value in self.copied(kernel.main)}
            copied = {value: size for value, size in sizes.items() if size is not None}
            total = sum(copied.values())
            crossing = sum(size for value, size in copied.items() if flow.behind(value).is_graph_input())
            crossing += total if kernel.main.outputs[0] in flow.kept else 0
            return (total, 0, total, crossing) if len(copied) == len(sizes) else None
        writes = {value: flow.write_bytes(value) for value in self.leaving(kernel)}
        known = {value: size for value, size in writes.items() if size is not None}
        reads = self._reads(kernel)
        if reads is None or len(known) < len(writes):
            return None
        read, constants, entering = reads
        leaving = sum(size for value, size in known.items() if value in flow.kept)
        return read, constants, sum(known.values()), entering + leaving

    def leaving(self, kernel: FusedKernel) -> list[ir.Value]:
        """The tensors a kernel writes: what others read, and what has to be there at the end."""
        inside, flow = set(kernel.nodes), self._flow
        return [
            value
            for node in kernel.nodes
            for value in written(node)
            if value in flow.kept or not flow.users.get(value) or not inside.issuperset(flow.users[value])
        ]

    def storage(self, value: ir.Value) -> ir.Value:
        """The tensor whose memory holds ``value``: itself, or the Concat it is written into."""
        while value in self.home:
            value = self.home[value]
        return value

    def _place(self, concat: ir.Node) -> None:
        for value in concat.inputs:
            if value is None or value in self.home or value in self._flow.kept or self._flow.behind(value) is not value:
                continue
            if value.producer() in self._flow.position and not self._flow.is_constant(value):
                self.home[value] = concat.outputs[0]

    def _reads(self, kernel: FusedKernel) -> tuple[int, int, int] | None:
        """Bytes of activations and of constants, and of the activations those of the network's inputs."""
        flow = self._flow
        inside = {value for node in kernel.nodes for value in node.outputs}
        shown: dict[ir.Value, dict[ir.Value, int]] = {}
        constants: dict[ir.Value, int] = {}
        for node in kernel.nodes:
            for value in read(node):
                if flow.behind(value) in inside or self._is_folded(kernel, node, value):
                    continue
                size = flow.read_bytes(node, value)
                if size is None:
                    return None
                table = constants if flow.is_constant(value) else shown.setdefault(flow.behind(value), {})
                table[value] = max(size, table.get(value, 0))
        self.constants |= constants
        sizes = {source: self._capped(source, views) for source, views in shown.items()}
        entering = sum(size for source, size in sizes.items() if source.is_graph_input())
        return sum(sizes.values()), sum(constants.values()), entering

    def _capped(self, source: ir.Value, views: dict[ir.Value, int]) -> int:
        """Several views of one tensor read it at most once."""
        elements = self._flow.elements(source)
        sizes = sum(views.values())
        if elements is None or len(views) == 1:
            return sizes
        return min(sizes, math.ceil(elements * self._flow.precision.element_bytes(source)))

    def _is_folded(self, kernel: FusedKernel, node: ir.Node, value: ir.Value) -> bool:
        """Whether a constant is no more when the engine is built: a batch normalisation's parameters go into the
        weights of the convolution before it."""
        return (
            is_op(node, "BatchNormalization")
            and is_op(kernel.main, "Conv", "ConvTranspose")
            and value is not node.inputs[0]
            and node.inputs[0] in kernel.main.outputs
        )
