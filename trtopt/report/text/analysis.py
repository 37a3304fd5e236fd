"""What the terminal and the page say about an analysis in the same words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from trtopt.report.schema.analysis import Analysis, BatchPoint, Finding, LayerRow, SparseLayer, Sparsity, Totals
from trtopt.report.text.numbers import count, percent, some
from trtopt.support.precision import Precision

if TYPE_CHECKING:
    from trtopt.hardware.spec import GpuSpec
    from trtopt.report.schema.sensitivity import Sensitivity

LEVELS = {"onnx": "ONNX graph", "engine": "TensorRT for RTX engine"}
BACKENDS = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT for RTX"}
LIMITERS = {"math": "arithmetic", "memory": "memory traffic", "latency": "latency"}
NO_MORE = "all of them are in the JSON"
_WEIGHT_NAME = 40
"""Characters of a weight's name where it is one of several."""


def visible(text: str) -> str:
    """``text`` with everything that is not printable as an escape.

    Names come from the model and may hold terminal escapes, line breaks, marks that reverse the direction of writing,
    and halves of surrogate pairs, which no encoding takes.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def shorten(text: str, width: int, *, mark: str = "...", measure: Callable[[str], int] = len) -> str:
    """``text`` within ``width``, cut in the middle: the ends of a layer's name say most.

    Args:
        text: Any text.
        width: At most this wide; at least ``mark`` and two more.
        mark: What stands for the part left out.
        measure: The width of a text; characters unless told otherwise.
    """
    if measure(text) <= width:
        return text
    room = width - measure(mark)
    head, tail = text[: room // 2], text[-(room - room // 2) :]
    while measure(head) > room // 2:
        head = head[:-1]
    while measure(tail) > room - room // 2:
        tail = tail[1:]
    return head + mark + tail


def model_name(analysis: Analysis | Sensitivity) -> str:
    """The model's file name."""
    path = analysis.model.get("path")
    return visible(PurePath(str(path)).name) if path else "model in memory"


def levels_text(analysis: Analysis) -> str:
    """The levels looked at, the one whose layers are listed last."""
    return " and ".join(LEVELS[summary.level] for summary in analysis.levels)


def proxies(analysis: Analysis) -> list[str]:
    """What to say of an engine that was lowered for another GPU."""
    return [
        f"PROXY: the compiler cannot target {analysis.gpu.get('name')}; these layers are of an engine for"
        f" {visible(summary.proxy)}, timed as if {analysis.gpu.get('name')} ran them"
        for summary in analysis.levels
        if summary.proxy is not None
    ]


def rate_of(dtype: str) -> str:
    """The key of ``GpuSpec.tflops`` for a type: BF16 runs at the rate of FP16."""
    return Precision.FP16 if dtype == Precision.BF16 else dtype


def peak_of(gpu: GpuSpec, dtype: str) -> float | None:
    """The GPU's 1e12 operations per second in a type; None when it is not known."""
    return gpu.tflops.get(rate_of(dtype))


def share_of_peak(layers: Sequence[LayerRow], gpu: GpuSpec) -> float | None:
    """The time all arithmetic would take at the peak of its type, as a share of the predicted time.

    None when there is no time, or the peak of a type is not known.
    """
    at_peak = 0.0
    for layer in layers:
        peak = peak_of(gpu, layer.dtype)
        if layer.flop and peak is None:
            return None
        at_peak += layer.flop / (peak * 1e6) if peak else 0.0
    total = sum(layer.predicted_us for layer in layers)
    return at_peak / total if total else None


def rates(totals: Totals, layers: Sequence[LayerRow], gpu: GpuSpec) -> tuple[str, str]:
    """What is achieved of the arithmetic and of the memory bandwidth, in words."""
    if not totals.predicted_us:
        return "nothing runs", "nothing is moved"
    share = share_of_peak(layers, gpu)
    types = sorted({layer.dtype for layer in layers if layer.flop})
    of_peak = "" if share is None else f": {percent(share)} of the peak of {', '.join(types) or 'the GPU'}"
    gigabytes = totals.bytes / totals.predicted_us / 1e3
    return (
        f"{totals.flop / totals.predicted_us / 1e6:.3g} TFLOP/s{of_peak}",
        f"{gigabytes:.3g} GB/s: {percent(gigabytes / gpu.bandwidth_gbs)} of the bandwidth of the memory",
    )


def time_text(microseconds: float, *, micro: str = "u") -> str:
    """A time to three digits: ``3.25 us``, ``12.3 ms``, ``1.20 s``.

    Args:
        microseconds: The time.
        micro: How the unit's prefix is written.
    """
    for size, unit in ((1.0, f"{micro}s"), (1e3, "ms")):
        if abs(microseconds) < 999.5 * size:
            return f"{_three(microseconds / size)} {unit}"
    return f"{_three(microseconds / 1e6)} s"


def flop_text(flop: int) -> str:
    """An amount of arithmetic: ``8.18 GFLOP``."""
    value = float(flop)
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if unit == "FLOP" else f"{_three(value)} {unit}"
        value /= 1000
    return f"{_three(value)} TFLOP"


def _three(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 or size == 0 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def product_text(layer: LayerRow, *, times: str = "x") -> str:
    """m, n and k of a layer's matrix product, and how many there are: ``784x512x128``, ``12 * 197x197x64``."""
    if layer.gemm is None:
        return ""
    sizes = times.join(str(layer.gemm[axis]) for axis in ("m", "n", "k"))
    batch = layer.gemm.get("batch", 1)
    return sizes if batch == 1 else f"{batch} * {sizes}"


def tile_text(layer: LayerRow, *, times: str = "x") -> str:
    """The output tile of a thread block: ``128x64``."""
    return f"{layer.tile['m']}{times}{layer.tile['n']}" if layer.tile else ""


def by_gain(findings: Sequence[Finding]) -> list[Finding]:
    """The largest gain first; of equal gains, the more severe first.

    Findings that say the same of different nodes become one, with all the nodes and the sum of the gains.
    """
    order = ("error", "warning", "hint", "info")
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.rule, finding.severity, finding.message, finding.remedy), []).append(finding)
    merged = [
        dataclasses.replace(
            group[0],
            nodes=tuple(node for finding in group for node in finding.nodes),
            gain_us=sum(finding.gain_us for finding in group),
        )
        for group in groups.values()
    ]
    return sorted(merged, key=lambda finding: (-finding.gain_us, order.index(finding.severity)))


def slowest(layers: Sequence[LayerRow]) -> list[LayerRow]:
    """The layers by time, the slowest first."""
    return sorted(layers, key=lambda layer: -layer.predicted_us)


def batch_notes(analysis: Analysis, point: BatchPoint) -> str:
    """What a point of the batch sweep is known for."""
    sweep = analysis.batch_sweep
    if sweep is None:
        return ""
    notes = ["knee"] if point.batch == sweep.knee else []
    if point.batch == sweep.best_within_budget:
        notes.append("best within the budget")
    if not point.fits:
        notes.append("does not fit")
    return ", ".join(notes)


def paying(sparsity: Sparsity) -> list[SparseLayer]:
    """The layers in which 2:4 pays, the largest gain first."""
    return sorted((row for row in sparsity.layers if row.eligible), key=lambda row: row.sparse_us - row.dense_us)


def sparsity_text(sparsity: Sparsity, *, micro: str = "u") -> str:
    """What 2:4 is predicted to gain: ``2.32 ms, with sparse kernels in 36 layers 1.80 ms: 1.29 times as fast``."""
    where = paying(sparsity)
    if not where:
        return "would gain nothing from 2:4 weights"
    dense, sparse = (time_text(value, micro=micro) for value in (sparsity.dense_us, sparsity.sparse_us))
    ratio = sparsity.dense_us / sparsity.sparse_us
    return f"{dense}, with sparse kernels in {count(len(where), 'layer')} {sparse}: {ratio:.2f} times as fast"


def sparse_weights_text(sparsity: Sparsity) -> str:
    """How many weights are 2:4 as they are: ``2 of 36 weights that can be (fc1.weight, fc2.weight)``."""
    able = [row for row in sparsity.layers if row.weight]
    names = [shorten(visible(row.weight), _WEIGHT_NAME) for row in able if row.is_sparse]
    return f"{len(names)} of {count(len(able), 'weight')} that can be" + (f" ({some(names, 3)})" if names else "")


def by_reason(sparsity: Sparsity) -> list[tuple[str, str, tuple[str, ...]]]:
    """Where it pays and where not: the verdict, the reason, and the nodes it holds for; the most frequent first."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in sparsity.layers:
        groups.setdefault(("pays" if row.eligible else "dense", row.reason), []).extend(row.nodes)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0] != "pays", -len(item[1])))
    return [(verdict, reason, tuple(nodes)) for (verdict, reason), nodes in ordered]
