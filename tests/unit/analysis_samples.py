"""Analyses of hand-made networks, timed by the real model, for the tests of how they are shown."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from trtopt.hardware.spec import GpuSpec, find_gpu
from trtopt.report.schema.analysis import (
    Analysis,
    BatchPoint,
    BatchSweep,
    Finding,
    LayerRow,
    LevelSummary,
    Memory,
    Totals,
    Uncosted,
)
from trtopt.roofline.layer import predict
from trtopt.roofline.work import Gemm, Layer, Window, Work, alignment_of
from trtopt.support.precision import ELEMENT_BYTES, Precision

GPU = find_gpu("L4")
HOSTILE = (
    "</script><script>document.title='owned'</script>",
    '"><img src=x onerror="document.title=\'owned\'">',
    "' onmouseover='document.title=1' x='",
    "%{x} <b>bold</b><br>line &amp; &lt;",
    "[bold red]markup[/] :smile:",
    "\x1b[31mred\x1b[0m\nline\ttab",
    "\u202eesrever \udc80 half",
    "层/名字/卷积/" * 12,
    "/encoder/layers." + "very_long_" * 40 + "/MatMul",
    "",
)
"""Names a model may hold."""


def conv(
    name: str, batch: int, channels: tuple[int, int], size: int, window: tuple[int, int] = (3, 1), *, group: int = 1
) -> Layer:
    """A 2-D convolution with padding of half its kernel.

    Args:
        name: The layer's name.
        batch: Images.
        channels: In and out.
        size: Rows and columns of the input.
        window: Size and stride of the kernel.
        group: Groups.
    """
    (inner, outer), (kernel, stride) = channels, window
    out = -(-size // stride)
    dtype: Precision = Precision.FP16
    gemm = Gemm(batch * out * out, outer // group, inner // group * kernel * kernel, group)
    work = Work(
        "depthwise" if group == inner else "conv",
        gemm.flop,
        2 * batch * inner * size * size,
        2 * outer * (inner // group) * kernel * kernel,
        2 * batch * outer * out * out,
        dtype,
        gemm=gemm,
        window=Window((kernel, kernel), (stride, stride), (1, 1), group),
        alignment_bytes=alignment_of(inner, outer, dtype=dtype),
    )
    return Layer(name, "Conv", (f"{name}/Conv",), work)


def product(name: str, m: int, n: int, k: int, *, batch: int = 1, dtype: Precision = Precision.FP16) -> Layer:
    """A matrix product with a constant second operand."""
    size = ELEMENT_BYTES[dtype]
    gemm = Gemm(m, n, k, batch)
    read, weight, write = (round(size * batch * elements) for elements in (m * k, n * k, m * n))
    work = Work(
        "gemm", gemm.flop, read, weight, write, dtype, gemm=gemm, alignment_bytes=alignment_of(n, k, dtype=dtype)
    )
    return Layer(name, "MatMul", (f"{name}/MatMul",), work)


def elementwise(name: str, elements: int, *, flop_per_element: int = 1, op: str = "Add") -> Layer:
    """A layer that reads two tensors and writes one."""
    work = Work("memory", elements * flop_per_element, 4 * elements, 0, 2 * elements, "fp16")
    return Layer(name, op, (name,), work)


def small_layers(batch: int) -> list[Layer]:
    """Two convolutions, a product, an element-wise layer and one without arithmetic."""
    return [
        conv("/stem", batch, (3, 64), 224, (7, 2)),
        conv("/body/conv", batch, (64, 128), 112),
        elementwise("/body/add", batch * 128 * 112 * 112),
        product("/head", batch, 10, 128),
        elementwise("/transpose", batch * 10, flop_per_element=0, op="Transpose"),
    ]


def resnet50_layers(batch: int) -> list[Layer]:
    """The 53 convolutions, the pooling and the classifier of ResNet-50."""
    layers = [conv("/conv1", batch, (3, 64), 224, (7, 2))]
    inner, size = 64, 56
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for block in range(blocks):
            stride = 2 if stage > 1 and block == 0 else 1
            name = f"/layer{stage}/layer{stage}.{block}"
            layers.append(conv(f"{name}/conv1", batch, (inner, width), size, (1, 1)))
            layers.append(conv(f"{name}/conv2", batch, (width, width), size, (3, stride)))
            if block == 0:
                layers.append(conv(f"{name}/downsample/downsample.0", batch, (inner, 4 * width), size, (1, stride)))
            size //= stride
            layers.append(conv(f"{name}/conv3", batch, (width, 4 * width), size, (1, 1)))
            inner = 4 * width
    layers.append(elementwise("/avgpool", batch * 2048 * 49, op="GlobalAveragePool"))
    return [*layers, product("/fc", batch, 1000, 2048)]


def many_layers(batch: int, number: int = 2400) -> list[Layer]:
    """A network of very many layers of many sizes."""
    layers: list[Layer] = []
    for index in range(number // 3):
        width = 64 + 8 * (index * 7 % 120)
        rows = batch * (16 + index * 13 % 400)
        layers.append(product(f"/blocks.{index}/attn/qkv", rows, 3 * width, width))
        layers.append(elementwise(f"/blocks.{index}/add", rows * width))
        layers.append(
            product(f"/blocks.{index}/mlp/fc1", rows, 4 * width, width, dtype="int8" if index % 5 else "fp16")
        )
    return layers


def hostile_layers(batch: int) -> list[Layer]:
    """Layers with the names, operators and nodes that a model may bring to harm a report."""
    layers = [product(name, 64 * batch, 256, 128 * (1 + index)) for index, name in enumerate(HOSTILE)]
    return [dataclasses.replace(layer, op=layer.name[:60], onnx_nodes=(layer.name,)) for layer in layers]


def totals_of(rows: Sequence[LayerRow]) -> Totals:
    """The sums over rows."""
    limiter: dict[str, float] = defaultdict(float)
    kind: dict[str, float] = defaultdict(float)
    for row in rows:
        limiter[row.limiter] += row.predicted_us
        kind[row.kind] += row.predicted_us
    total = sum(row.predicted_us for row in rows)
    return Totals(sum(row.flop for row in rows), sum(row.bytes for row in rows), total, dict(limiter), dict(kind))


def sweep_of(
    make: Callable[[int], list[Layer]], gpu: GpuSpec, batches: Sequence[int], budget_us: float | None = None
) -> BatchSweep:
    """The batch sweep of a network."""
    points = []
    for batch in batches:
        rows, _ = predict(make(batch), gpu)
        total = sum(row.predicted_us for row in rows)
        points.append(BatchPoint(batch, total, batch / total * 1e6, 2 * max(row.bytes for row in rows)))
    best = max(point.throughput for point in points)
    knee = next(point.batch for point in points if point.throughput >= 0.9 * best)
    within = [point for point in points if budget_us is not None and point.predicted_us <= budget_us]
    chosen = max(within, key=lambda point: point.throughput).batch if within else None
    return BatchSweep(tuple(points), knee, budget_us, chosen)


def analysis_of(make: Callable[[int], list[Layer]], *, batch: int = 8, gpu: GpuSpec = GPU, **changes: Any) -> Analysis:
    """The analysis of a network at one batch, with other values of the named fields."""
    layers = make(batch)
    rows, _ = predict(layers, gpu)
    totals = totals_of(rows)
    weights = sum(layer.work.weight_bytes for layer in layers if layer.work)
    peak = max(rows, key=lambda row: row.bytes)
    device = round(gpu.memory_gb * 1e9)
    analysis = Analysis(
        model={"path": "models/model.onnx", "sha256": "ab" * 32, "opset": 21},
        gpu=dataclasses.asdict(gpu),
        precision="fp16",
        layers=rows,
        totals=totals,
        findings=findings_of(rows),
        levels=(LevelSummary("onnx", len(rows), totals),),
        memory=Memory(weights, 2 * peak.bytes, peak.name, device, weights + 2 * peak.bytes <= device),
    )
    return dataclasses.replace(analysis, **changes)


def findings_of(rows: Sequence[LayerRow]) -> tuple[Finding, ...]:
    """A hint, and a finding for each product, with the part of its waves that is idle as the gain."""
    found = [
        Finding(
            "wave-quantization",
            "warning",
            row.onnx_nodes,
            f"{row.tiles} tiles leave {1 - row.wave_efficiency:.0%} of the GPU's slots idle",
            "choose sizes that fill whole waves, for example by another batch",
            max(row.predicted_us * (1 - row.wave_efficiency), 0.01),
        )
        for row in rows
        if row.gemm is not None
    ]
    hint = Finding("first-layer", "hint", rows[0].onnx_nodes, "3 input channels", "pad the channels to 4", 0.0)
    return (hint, *found)


def full_analysis() -> Analysis:
    """An analysis with every part filled in: two levels, a proxy, a sweep with a budget that batch 32
    meets, operators without a cost."""
    base = analysis_of(resnet50_layers)
    fused = tuple(row for row in base.layers if row.op == "Conv")
    totals = totals_of(fused)
    batches = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    budget = 1.01 * sweep_of(resnet50_layers, GPU, (32,)).points[0].predicted_us
    return dataclasses.replace(
        base,
        layers=fused,
        totals=totals,
        levels=(base.levels[0], LevelSummary("engine", len(fused), totals, "RTX-4090 (compute capability 8.9)")),
        uncosted=(
            Uncosted("com.acme::Fancy", ("/fancy1", "/fancy2", "/fancy3")),
            Uncosted("NonMaxSuppression", ("/nms",)),
        ),
        batch_sweep=sweep_of(resnet50_layers, GPU, batches, budget),
        warnings=("batch 8 was taken for the dynamic axis N of x; --shapes fixes another",),
    )
