"""The two levels of a model compared: what the compiler does that the ONNX graph does not ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from trtopt.hardware.spec import GpuSpec
from trtopt.report.schema.analysis import Finding, is_noise, range_of_sum, rank
from trtopt.report.text.format import count, time_text
from trtopt.roofline.constants import constants_for
from trtopt.roofline.intervals import range_of
from trtopt.roofline.layer import layer_times
from trtopt.roofline.work import Layer, Work

RULE = "compiler-gap"

SMALLEST_EXCESS = 0.2
"""A region counts from this share on that it takes more than expected: less is within the model's own error (13 to 18 %
per layer on engines it was not fitted on)."""

SMALLEST_SHARE = 0.01
"""Regions alike that together cost less than this share of the engine's time are not worth a reader's."""

_LISTED = 8

_CAUSES = {
    "quantize": (
        "quantizing in kernels of its own",
        "keep these nodes out of INT8, or leave no operator between a quantizer and the layer it feeds that the "
        "compiler cannot fuse into it",
    ),
    "cast": (
        "casts in kernels of their own",
        "let neighbouring nodes run in one type: `trtopt build` reports which nodes stay FP32 and why",
    ),
    "layout": (
        "copying: transposes, padding, splitting",
        "avoid transposes and reshapes between layers, and channel counts the compiler has to pad",
    ),
    "unfused": (
        "element-wise kernels that were expected to be fused",
        "bring them into a form the compiler fuses: directly behind a product (a MatMul of rank 2 or 3), and no "
        "transpose between the two",
    ),
    "product": (
        "slower products",
        "compare the types and sizes of these layers with those of the graph: padded channels, a wider type, or a "
        "product that was split",
    ),
}
"""What the extra time goes to, and the remedy."""


_COMMANDS = {
    "quantize": "build --int8 --calib samples.npz",
    "cast": "build --fp16 --calib samples.npz --verbose",
    **dict.fromkeys(("layout", "unfused", "product"), "needs a new export"),
}
"""What to type."""


@dataclass(frozen=True)
class _Sum:
    """Kernels, bytes and predicted microseconds of some layers, the time by cause."""

    kernels: int
    bytes: int
    us: float
    by_cause: dict[str, float]


@dataclass(frozen=True)
class GapRegion:
    """Layers of both levels that share nodes with each other and with no other layer."""

    onnx: tuple[Layer, ...]
    engine: tuple[Layer, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """The ONNX nodes, or the engine's layers where it computes none."""
        names = [name for layer in (*self.onnx, *self.engine) for name in layer.onnx_nodes]
        return tuple(dict.fromkeys(names)) or tuple(layer.name for layer in self.engine)

    @property
    def pattern(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What regions of repeated blocks have in common: their operators."""
        return tuple(sorted(layer.op for layer in self.onnx)), tuple(sorted(layer.op for layer in self.engine))


def compare_levels(onnx_layers: Sequence[Layer], engine_layers: Sequence[Layer], gpu: GpuSpec) -> tuple[Finding, ...]:
    """Where the engine is predicted to take longer than the graph with the fusion TensorRT is known to do.

    Regions of repeated blocks (the same operators on both sides) are one finding.

    Args:
        onnx_layers: The layers of the ONNX graph.
        engine_layers: Those of the engine, whose ``onnx_nodes`` are named alike.
        gpu: The GPU.

    Returns:
        Findings by falling gain, which is the difference of the two predictions: what would be won if the compiler
        fused the region as expected.
    """
    works = list(dict.fromkeys(layer.work for layer in (*onnx_layers, *engine_layers) if layer.work is not None))
    found = layer_times(works, gpu, constants_for(gpu))
    times = {work: time.predicted_us for work, time in zip(works, found, strict=True)}
    total = _sum(engine_layers, times).us
    groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[GapRegion]] = {}
    for region in regions(onnx_layers, engine_layers):
        groups.setdefault(region.pattern, []).append(region)
    findings = []
    for group in groups.values():
        before = _sum((layer for region in group for layer in region.onnx), times)
        after = _sum((layer for region in group for layer in region.engine), times)
        excess = after.us - before.us
        if excess > SMALLEST_EXCESS * before.us and excess > SMALLEST_SHARE * total:
            works = [layer.work for region in group for layer in region.engine if layer.work is not None]
            low_high = range_of_sum((work.kind, times[work], *range_of(work, times[work], gpu)) for work in works)
            finding = _finding(group, before, after, times)
            findings.append(replace(finding, within_noise=is_noise(finding.gain_us, low_high)))
    return tuple(sorted(findings, key=rank))


def regions(onnx_layers: Sequence[Layer], engine_layers: Sequence[Layer]) -> list[GapRegion]:
    """The layers of both levels, grouped by the nodes they share, in the engine's order."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for layer in (*onnx_layers, *engine_layers):
        for name in layer.onnx_nodes[1:]:
            parent[root(name)] = root(layer.onnx_nodes[0])
    grouped: dict[str, tuple[list[Layer], list[Layer]]] = {}
    for level, layers in ((1, engine_layers), (0, onnx_layers)):
        for layer in layers:
            key = root(layer.onnx_nodes[0]) if layer.onnx_nodes else f"layer {layer.name}"
            grouped.setdefault(key, ([], []))[level].append(layer)
    return [GapRegion(tuple(onnx), tuple(engine)) for onnx, engine in grouped.values()]


def _sum(layers: Iterable[Layer], times: Mapping[Work, float]) -> _Sum:
    kernels = moved = 0
    by_cause: dict[str, float] = {}
    for layer in layers:
        if layer.work is None:
            continue
        kernels += 1
        moved += layer.work.bytes
        cause = _cause(layer)
        by_cause[cause] = by_cause.get(cause, 0.0) + times[layer.work]
    return _Sum(kernels, moved, sum(by_cause.values()), by_cause)


def _cause(layer: Layer) -> str:
    if layer.work is not None and layer.work.gemm is not None:
        return "product"
    if layer.op in ("QuantizeLinear", "DequantizeLinear"):
        return "quantize"
    if layer.op == "Cast":
        return "cast"
    return "layout" if layer.work is None or layer.work.flop == 0 else "unfused"


def _finding(group: Sequence[GapRegion], before: _Sum, after: _Sum, times: Mapping[Work, float]) -> Finding:
    more = {cause: us - before.by_cause.get(cause, 0.0) for cause, us in after.by_cause.items()}
    cause = max(more, key=lambda name: more[name])
    what, remedy = _CAUSES[cause]
    blamed = [layer for layer in group[0].engine if layer.work is not None and _cause(layer) == cause]
    blamed.sort(key=lambda layer: -times[layer.work] if layer.work is not None else 0.0)
    names = ", ".join(dict.fromkeys(f"{layer.name} ({layer.op})" for layer in blamed[:3]))
    alike = f"{len(group)} regions like this one: " if len(group) > 1 else ""
    message = (
        f"{alike}{count(before.kernels, 'kernel')}, {before.bytes / 1e6:.1f} MB and {time_text(before.us)} expected; "
        f"the compiler makes {count(after.kernels, 'kernel')}, {after.bytes / 1e6:.1f} MB and {time_text(after.us)} of"
        f" it. {time_text(more[cause])} more go to {what}: {names}"
    )
    nodes = tuple(dict.fromkeys(name for region in group for name in region.nodes[:_LISTED]))
    return Finding(RULE, "warning", nodes, message, remedy, after.us - before.us, command=_COMMANDS[cause])
