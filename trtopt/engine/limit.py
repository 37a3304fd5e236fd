"""How near its limit an engine is: the time of its necessary work, and the kernels that make the difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from trtopt.engine.layers import buffer_sizes, in_place, layers_of_profile, own_name, tensor_bytes, views_bytes
from trtopt.hardware.spec import GpuSpec
from trtopt.report.schema.analysis import Excess, ExcessReason, LayerRow, Limit
from trtopt.report.schema.layers import LayerInfo, TensorInfo
from trtopt.roofline.necessary import necessary_times
from trtopt.roofline.node_work import READ_AS_WRITTEN
from trtopt.roofline.work import Layer, Work
from trtopt.support.precision import Precision

COPIES = ("Cast", "Concat", "DepthToSpace", "Expand", "Pad", "Slice", "SpaceToDepth", "Split", "Tile", "Transpose")
"""Operators that compute nothing."""

_WIDE = (Precision.FP32, Precision.TF32)

_NAMED = 8
"""Kernels of a group that the report names."""


def limit_of(
    listed: Sequence[LayerInfo], layers: Sequence[Layer], rows: Sequence[LayerRow], model: ir.Model, gpu: GpuSpec
) -> Limit:
    """The time of an engine's necessary work, and which kernels take longer, by how much and why.

    Necessary are the products, each in the precision it runs in (of an attention those that its mask leaves), the
    constants once (of an embedding the rows that are read) and the network's inputs and outputs once. Each kernel has a
    bound of its own, the slower of its arithmetic and its necessary bytes, since kernels run one after another; the
    limit is their sum.

    Args:
        listed: What the compiler lists, with all sizes known.
        layers: Its kernels with their work, as :func:`~trtopt.engine.work.layers_of_engine` gives them.
        rows: The predicted times of those of ``layers`` whose work is known, in their order.
        model: The model that was compiled: its inputs and outputs are those of the network.
        gpu: The GPU that ``rows`` are of.

    Returns:
        The limit; kernels without a known cost are in none of its sums.
    """
    kernels = [layer for layer in layers_of_profile(listed) if layer.is_kernel]
    needed = _NeededBytes(kernels, model)
    costed = [(layer, layer.work, kernel) for layer, kernel in _beside(layers, kernels) if layer.work is not None]
    counted = [_Moved() if kernel is None else needed.of(kernel, layer, work) for layer, work, kernel in costed]
    bounds = necessary_times([work for _, work, _ in costed], [item.needed for item in counted], gpu)
    reasons = _Reasons(rows, needed.network)
    groups: dict[tuple[ExcessReason, object], list[_Kernel]] = {}
    for (_, work, kernel), row, moved, least in zip(costed, rows, counted, bounds.total, strict=True):
        reason = reasons.of(work, kernel, row, moved, float(least))
        key = (reason, (row.op, row.kind, row.dtype, row.flop, row.bytes, str(row.gemm)))
        times = 1 if kernel is not None else work.steps
        groups.setdefault(key, []).append(_Kernel(row, row.predicted_us - float(least), times))
    found = [_excess(key[0], group) for key, group in groups.items()]
    return Limit(
        limit_us=float(bounds.total.sum()),
        predicted_us=sum(row.predicted_us for row in rows),
        products_us=float(bounds.math.sum()),
        needed_bytes=sum(item.needed for item in counted),
        kernels=tuple(sorted(found, key=lambda item: -item.excess_us)),
    )


def _beside(layers: Sequence[Layer], kernels: Sequence[LayerInfo]) -> list[tuple[Layer, LayerInfo | None]]:
    """Each layer with what the compiler lists of it; those without a kernel (syncs, copies) are behind the others."""
    return list(zip(layers, (*kernels, *[None] * (len(layers) - len(kernels))), strict=True))


@dataclass(frozen=True)
class _Kernel:
    """A row, its excess in microseconds, and how many it stands for: all stream syncs are one row."""

    row: LayerRow
    excess_us: float
    times: int


def _excess(reason: ExcessReason, group: Sequence[_Kernel]) -> Excess:
    row = group[0].row
    return Excess(
        reason=reason,
        op=row.op,
        dtype=row.dtype,
        kernels=sum(item.times for item in group),
        layers=tuple(item.row.name for item in group[:_NAMED]),
        predicted_us=sum(item.row.predicted_us for item in group),
        excess_us=sum(item.excess_us for item in group),
    )


@dataclass(frozen=True)
class _Moved:
    """Bytes of what a kernel moves: what has to be moved, and constants and operands of products that a kernel before
    has read."""

    needed: int = 0
    again: int = 0


class _NeededBytes:
    """Counts what has to be moved, each tensor for the first kernel that moves it."""

    def __init__(self, kernels: Sequence[LayerInfo], model: ir.Model) -> None:
        self.network = {str(value.name) for value in (*model.graph.inputs, *model.graph.outputs)}
        self._sizes = buffer_sizes(kernels)
        self._seen: set[str] = set()
        self._operands: set[str] = set()

    def of(self, kernel: LayerInfo, layer: Layer, work: Work) -> _Moved:
        """What of a kernel's constants, and of inputs and outputs of the network, no kernel before has moved."""
        placed = in_place(kernel)  # a cache, which is moved by what reads it
        crossing = [
            item
            for item in (*kernel.inputs, *kernel.outputs)
            if own_name(item) in self.network and item.name not in placed and self._is_new(item)
        ]
        new = {item.name: item for item in kernel.constants if self._is_new(item)}
        self._seen.update(item.name for item in crossing)
        self._seen.update(new)
        moved = views_bytes(crossing, self._sizes)
        if not work.flop and layer.op not in READ_AS_WRITTEN:
            return _Moved(moved)  # the zeros of a padding
        once = min(work.distinct_weight_bytes, sum(map(tensor_bytes, new.values())))
        again = work.weight_bytes - once + (self._read_again(kernel) if work.gemm is not None else 0)
        return _Moved(moved + once, again)

    def _read_again(self, kernel: LayerInfo) -> int:
        """Bytes of the largest tensor that a product reads, where a product before has read it."""
        largest = max(kernel.inputs, key=tensor_bytes, default=None)
        if largest is None or largest.name not in self._operands:
            self._operands.update(() if largest is None else (largest.name,))
            return 0
        return tensor_bytes(largest)

    def _is_new(self, item: TensorInfo) -> bool:
        return item.name not in self._seen


@dataclass
class _Reasons:
    """Says why kernels take longer than their necessary work."""

    rows: Sequence[LayerRow]
    network: set[str]

    def __post_init__(self) -> None:
        flop: dict[bool, int] = {True: 0, False: 0}
        for row in self.rows:
            flop[row.dtype in _WIDE] += row.flop if row.gemm is not None else 0
        self.is_narrow = flop[False] > flop[True]

    def of(self, work: Work, kernel: LayerInfo | None, row: LayerRow, moved: _Moved, least_us: float) -> ExcessReason:
        """The reason that takes most of a kernel's excess."""
        if kernel is None:
            return "sync" if work.kind == "sync" else "copy"
        wide = self.is_narrow and (row.dtype in _WIDE if work.gemm is not None else self._moves_wide(kernel))
        if work.gemm is None:
            return _without_product(work, row.op, is_wide=wide)
        if 2 * row.latency_us >= row.predicted_us - least_us:
            return "launch"
        if wide:
            return "fp32"
        beyond = row.predicted_us - row.latency_us
        if row.memory_us <= row.math_us or 2 * row.memory_us < beyond:
            return "peak"
        rest = work.moved_bytes - moved.needed - moved.again
        parts: dict[ExcessReason, float] = {"activations": rest, "read-again": moved.again, "bandwidth": moved.needed}
        return max(parts, key=lambda reason: parts[reason])

    def _moves_wide(self, kernel: LayerInfo) -> bool:
        """Whether most that a kernel moves between kernels is FP32."""
        inner = [item for item in (*kernel.inputs, *kernel.outputs) if own_name(item) not in self.network]
        moved = sum(map(tensor_bytes, inner))
        return 2 * sum(tensor_bytes(item) for item in inner if item.dtype == "Float") > moved


def _without_product(work: Work, op: str, *, is_wide: bool) -> ExcessReason:
    if op in READ_AS_WRITTEN and op.startswith("Gather"):
        return "element-wise"
    if op in ("QuantizeLinear", "DequantizeLinear"):
        return "quantize"
    if not work.flop or op in COPIES:
        return "layout"
    if is_wide:
        return "fp32"
    return "reduction" if work.rows is not None or work.pooled else "element-wise"
