"""A plain second judge of engines: a roofline that shares nothing with trtopt's performance model.

Per kernel ``max(bytes / (0.8 * bandwidth), flop / (0.7 * peak of the operands' type)) + 2 us``. Bytes are what the
compiler lists for a kernel, each buffer once, of an embedding table only what is read; flop are those of the products
of the ONNX nodes the kernel computes. For benchmarks only: ``trtopt`` and its recipes never import it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from trtopt.engine.layers import buffer_sizes, in_place, layers_of_profile, moved_bytes, tensor_bytes
from trtopt.engine.work import claims_of, trip_counts
from trtopt.report.schema.layers import LayerInfo

MB = 1e6
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class PlainGpu:
    """What the judge knows of a GPU: GB/s and dense TFLOP/s of the datasheet.

    RTX 4090: NVIDIA Ada GPU Architecture white paper (2022), appendix A: FP16 and FP8 with FP32 sums. L4: datasheet
    (2023); its figures with sparsity are halved.
    """

    bandwidth: float
    tflops: dict[str, float]


PLAIN = {
    "L4": PlainGpu(300, {"fp32": 30.3, "tf32": 60, "fp16": 121, "bf16": 121, "fp8": 242, "int8": 242}),
    "RTX-4090": PlainGpu(1008, {"fp32": 82.6, "tf32": 82.6, "fp16": 165, "bf16": 165, "fp8": 330, "int8": 660}),
}
BANDWIDTH_SHARE, PEAK_SHARE, LAUNCH_US = 0.8, 0.7, 2.0


def kernel_us(size: float, flop: float, dtype: str, gpu: PlainGpu) -> float:
    """The time of one kernel that moves ``size`` bytes and computes ``flop`` in ``dtype``."""
    memory = size / (BANDWIDTH_SHARE * gpu.bandwidth * 1e3)
    return max(memory, flop / (PEAK_SHARE * gpu.tflops[dtype] * 1e6)) + LAUNCH_US


@dataclass(frozen=True)
class Kernel:
    """A kernel of an engine.

    Attributes:
        nodes: The ONNX nodes it computes, in part too.
        trips: How often it runs: the trip count of its loop.
        moved: Bytes of activations, once, of one trip; of a cache that is filled up in place, its new entries.
        bytes: Those and constants.
        flop: Of products, of all trips.
        dtype: The type its products have.
    """

    name: str
    type: str
    nodes: tuple[str, ...]
    trips: int
    moved: int
    bytes: int
    flop: int
    dtype: str

    def us(self, gpu: PlainGpu) -> float:
        """The time of all trips."""
        return self.trips * kernel_us(self.bytes, self.flop / self.trips, self.dtype, gpu)


def kernels_of(layers: Sequence[LayerInfo], model: ir.Model, shapes: Shapes) -> tuple[Kernel, ...]:
    """The kernels of an engine's first profile.

    Args:
        layers: Of a build at static shapes.
        model: What was compiled; node names are unique.
        shapes: Static shapes of its values.
    """
    mine = layers_of_profile(layers)
    pairs = [(layer, trips or 1) for layer, trips in zip(mine, trip_counts(mine), strict=True) if layer.is_kernel]
    flop = {str(node.name): product_flop(node, shapes) for node in ir.traversal.RecursiveGraphIterator(model.graph)}
    claims = claims_of([layer for layer, _ in pairs], model, lambda node: flop[str(node.name)] > 0)
    sizes, tables, entries = buffer_sizes(mine), _tables(model, shapes), _entries(model, shapes)
    found = []
    for (layer, trips), owned, touched in zip(pairs, claims.owned, claims.touched, strict=True):
        read = [tables[name] for name in touched if name in tables]
        constants = {item.name: tensor_bytes(item) for item in layer.constants}
        for item in layer.constants:
            elements = math.prod(item.shape)
            part = next((rows for size, rows in read if size == elements), elements)
            constants[item.name] = constants[item.name] * min(part, elements) // max(elements, 1)
        moved = _moved(layer, sizes, sum(entries[name] for name in touched if name in entries))
        work = sum(flop[str(node.name)] for node in owned)
        size = moved + sum(constants.values())
        found.append(Kernel(layer.name, layer.type, tuple(touched), trips, moved, size, work, _dtype(layer)))
    return tuple(found)


def _moved(layer: LayerInfo, sizes: Mapping[str, int], entries: int) -> int:
    """Bytes of activations that a kernel moves, of which ``entries`` go into a cache where it lies."""
    placed = in_place(layer) if entries else frozenset()
    inputs, outputs = (tuple(i for i in items if i.name not in placed) for items in (layer.inputs, layer.outputs))
    return moved_bytes(replace(layer, inputs=inputs, outputs=outputs), sizes) + entries


def _entries(model: ir.Model, shapes: Shapes) -> dict[str, int]:
    """By TensorScatter: the bytes that it writes."""
    found = {}
    for node in model.graph:
        new = node.inputs[1] if node.op_type == "TensorScatter" else None
        if new is not None and new.dtype is not None:
            found[str(node.name)] = math.prod(shapes.get(str(new.name), ())) * new.dtype.bitwidth // 8
    return found


def _dtype(layer: LayerInfo) -> str:
    """The narrowest type of what a kernel reads."""
    read = {item.dtype for item in (*layer.inputs, *layer.constants)}
    names = {"FP8": "fp8", "Int8": "int8", "Half": "fp16", "BFloat16": "bf16"}
    return next((name for dtype, name in names.items() if dtype in read), "fp32")


def product_flop(node: ir.Node, shapes: Shapes) -> int:
    """2 flop per multiply-add of a matrix product, a convolution, an attention or a recurrent layer; 0 for others."""
    read = [() if value is None else shapes.get(str(value.name), ()) for value in node.inputs]
    made = shapes.get(str(node.outputs[0].name), ()) if node.outputs else ()
    op, elements = node.op_type, math.prod(made)
    if op in ("MatMul", "MatMulInteger") and read[0]:
        return 2 * elements * read[0][-1]
    if op == "Gemm" and read[0]:
        transposed = node.attributes.get_int("transA", 0)
        return 2 * elements * read[0][0 if transposed else -1]
    if op == "Conv":
        return 2 * elements * math.prod(read[1][1:])
    if op == "ConvTranspose":
        return 2 * math.prod(read[0]) * math.prod(read[1][1:])
    if op == "Attention" and all(len(shape) == 4 for shape in read[:3]):
        return 2 * math.prod(read[0][:3]) * read[1][2] * (read[0][3] + read[2][3])
    if op in ("LSTM", "GRU", "RNN"):  # weights [directions, gates * hidden, input]
        return 2 * math.prod(read[0][:2]) * (math.prod(read[1]) + math.prod(read[2]))
    return 0


def _tables(model: ir.Model, shapes: Shapes) -> dict[str, tuple[int, int]]:
    """By Gather: the elements of its table, and how many it reads."""
    found = {}
    for node in model.graph:
        if node.op_type == "Gather" and node.inputs[0] is not None:
            table, read = (math.prod(shapes.get(str(value.name), ())) for value in (node.inputs[0], node.outputs[0]))
            found[str(node.name)] = (table, read)
    return found


def judged(
    layers: Sequence[LayerInfo], sized: Sequence[LayerInfo], model: ir.Model, shapes: Shapes
) -> dict[str, object]:
    """What an engine costs by this judge.

    Kernels that the engine has and a build at its optimum has not, as those that compute shapes, cost their launch.

    Args:
        layers: The layers of the engine.
        sized: Those of a build at static shapes.
        model: What was compiled.
        shapes: Static shapes of its values.

    Returns:
        ``kernels``, ``syncs``, ``mb`` (activations), ``weight_mb`` and by GPU ``us``.
    """
    mine = layers_of_profile(layers)
    kernels = kernels_of(sized, model, shapes)
    counts = zip(mine, trip_counts(mine), strict=True)
    launched = sum(trips or 1 for layer, trips in counts if layer.is_kernel)
    more = max(0, launched - sum(kernel.trips for kernel in kernels))
    moved = sum(kernel.trips * kernel.moved for kernel in kernels)
    total = sum(kernel.trips * kernel.bytes for kernel in kernels)
    return {
        "kernels": launched,
        "syncs": sum(layer.type in ("signal", "wait") for layer in mine),
        "mb": round(moved / MB, 2),
        "weight_mb": round((total - moved) / MB, 2),
        "us": {name: round(sum(each.us(gpu) for each in kernels) + LAUNCH_US * more, 1) for name, gpu in PLAIN.items()},
    }
