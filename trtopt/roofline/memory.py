"""Device memory a model needs: its weights, and its activations where most of them are alive."""

from __future__ import annotations

import math
from collections.abc import Iterable

import onnx_ir as ir

from trtopt.graph.edit import all_graphs, all_nodes, constant_tensor_of, is_op, subgraphs_of
from trtopt.hardware.spec import GpuSpec
from trtopt.report.schema.analysis import Memory
from trtopt.roofline.flow import Flow
from trtopt.roofline.node_work import GraphTypes, quantized_inputs
from trtopt.roofline.onnx_layers import FusedGraph, FusedModel
from trtopt.support.precision import ELEMENT_BYTES

RESERVED_BYTES = 1 << 30
"""Left for the CUDA context, the runtime's libraries and the workspace of kernels: an allowance, not a measurement."""


def peak_memory(fused: FusedModel, gpu: GpuSpec) -> Memory:
    """What running a model takes on a GPU.

    Activations are the tensors between kernels (what stays inside a fused kernel needs no memory), each from the kernel
    that writes it to the last that reads it, in the order of :func:`trtopt.roofline.onnx_layers.layers_of_graph`.
    Views share their tensor's memory and the inputs of a Concat lie in its output where they can; no kernel is taken to
    write over its input. The network's inputs stay all the time, its outputs from when they are written. Workspace of
    kernels is not included, nor what an allocator loses in gaps.

    Args:
        fused: The model. Weights are not read; a tensor whose shape is not known counts nothing.
        gpu: Its memory, less :data:`RESERVED_BYTES`, is what weights and activations together have to fit into.
    """
    weights = weight_bytes(fused.model, fused.precision)
    peak, node = _peak(fused, fused.model.graph)
    available = round(gpu.memory_gb * 1e9)
    return Memory(
        weight_bytes=weights,
        activation_bytes=peak,
        peak_node=node,
        device_bytes=available,
        fits=weights + peak <= available - RESERVED_BYTES,
    )


def weight_bytes(model: ir.Model, precision: GraphTypes) -> int:
    """Bytes of all constants of a model, each once, at the type it is used in; nothing is read.

    A constant that only quantized products read as their weight is quantized.
    """
    total = 0
    for value in _constants(model):
        tensor = constant_tensor_of(value)
        if tensor is None:
            continue
        narrow = {quantized_inputs(node, precision) if index == 1 else None for node, index in value.uses()}
        per_element = precision.element_bytes(value)
        if narrow and None not in narrow:
            per_element = min(per_element, *(ELEMENT_BYTES[item] for item in narrow if item is not None))
        total += math.ceil(tensor.size * per_element)
    return total


def _constants(model: ir.Model) -> Iterable[ir.Value]:
    for graph in all_graphs(model.graph):
        yield from graph.initializers.values()
    for node in all_nodes(model.graph):
        if is_op(node, "Constant"):
            yield from node.outputs


def _peak(fused: FusedModel, graph: ir.Graph) -> tuple[int, str]:
    """The largest sum of tensors alive at one time, and the node that runs then.

    A nested graph's own peak comes on top of what is alive around it.
    """
    found = fused.fused(graph)
    flow, kernels = found.flow, found.kernels
    born, freed = _lifetimes(found)
    alive = peak = sum(_elements_bytes(flow, value) for value in graph.inputs if not value.is_initializer())
    place = str(kernels[0].main.name) if kernels else ""
    for index, kernel in enumerate(kernels):
        alive += sum(born[index])
        inner = (_peak(fused, nested) for nested in subgraphs_of(kernel.main))
        extra, name = max(inner, default=(0, str(kernel.main.name)))
        if alive + extra > peak:
            peak, place = alive + extra, name
        alive -= sum(freed[index])
    return peak, place


def _lifetimes(graph: FusedGraph) -> tuple[list[list[int]], list[list[int]]]:
    """By kernel: the sizes of the tensors it is the first to write, and of those it is the last to read."""
    flow, kernels, traffic = graph.flow, graph.kernels, graph.traffic
    first: dict[ir.Value, int] = {}
    last: dict[ir.Value, int] = {}
    for index, kernel in enumerate(kernels):
        for value in (value for node in kernel.nodes for value in flow.inputs(node)):
            home = traffic.storage(value)
            if home in first:
                last[home] = index
        for value in traffic.leaving(kernel):
            home = traffic.storage(value)
            first.setdefault(home, index)
            last[home] = len(kernels) if value in flow.kept else max(index, last.get(home, 0))
    born: list[list[int]] = [[] for _ in kernels]
    freed: list[list[int]] = [[] for _ in range(len(kernels) + 1)]
    for value, index in first.items():
        size = flow.write_bytes(value) or 0
        born[index].append(size)
        freed[last[value]].append(size)
    return born, freed


def _elements_bytes(flow: Flow, value: ir.Value) -> int:
    elements = flow.elements(value)
    return math.ceil(elements * flow.precision.element_bytes(value)) if elements else 0
