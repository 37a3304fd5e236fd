"""An analysis in words, for the terminal and the page, and as a terminal shows it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from trtopt.report.schema.analysis import (
    Analysis,
    BatchPoint,
    BatchSweep,
    Finding,
    LayerRow,
    SparseLayer,
    Sparsity,
    Totals,
    rank,
)
from trtopt.report.text.calibration import calibration_lines
from trtopt.report.text.format import (
    bytes_text,
    count,
    flop_text,
    left_out,
    line,
    list_lines,
    pairs,
    percent,
    predicted_text,
    range_text,
    sections,
    shorten,
    some_names,
    table,
    time_text,
    visible,
)
from trtopt.report.text.limit import limit_section
from trtopt.support.precision import Precision

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
    from rich.table import Table

    from trtopt.hardware.spec import GpuSpec
    from trtopt.report.schema.sensitivity import Sensitivity

LEVELS = {"onnx": "ONNX graph", "engine": "TensorRT for RTX engine"}
BACKENDS = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT for RTX"}
LIMITERS = {"math": "arithmetic", "memory": "memory traffic", "latency": "latency"}
_MOST_ROWS, _MOST_FINDINGS = 12, 10
_NAME = 40
"""Characters of a name where it is one of several."""
_LEAST_NAME, _MOST_NAME = 16, 60
_OTHER_COLUMNS = 74
"""Columns the table of layers needs beside the name."""
_RANGE_COLUMNS = 16
"""Columns that their ranges need; left out where the terminal is narrower than :data:`_WIDE`."""
_WIDE = 110
NOISE = "the gain is inside the model's noise"
_BAR = 24


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
    """The findings in the order of :func:`~trtopt.report.schema.analysis.rank`.

    Findings that say the same of different nodes become one, with all the nodes and the sum of the gains.
    """
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.rule, finding.severity, finding.message, finding.remedy), []).append(finding)
    merged = [
        dataclasses.replace(
            group[0],
            nodes=tuple(node for finding in group for node in finding.nodes),
            gain_us=sum(finding.gain_us for finding in group),
            within_noise=all(finding.within_noise for finding in group),
        )
        for group in groups.values()
    ]
    return sorted(merged, key=rank)


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
    names = [row.weight for row in able if row.is_sparse]
    return f"{len(names)} of {count(len(able), 'weight')} that can be" + (f" ({some_names(names, 3)})" if names else "")


def by_reason(sparsity: Sparsity) -> list[tuple[str, str, tuple[str, ...]]]:
    """Where it pays and where not: the verdict, the reason, and the nodes it holds for; the most frequent first."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in sparsity.layers:
        groups.setdefault(("pays" if row.eligible else "dense", row.reason), []).extend(row.nodes)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0] != "pays", -len(item[1])))
    return [(verdict, reason, tuple(nodes)) for (verdict, reason), nodes in ordered]


def render(analysis: Analysis, gpu: GpuSpec) -> Group:
    """The analysis, to be printed by a ``rich`` console of 80 columns or more; the GPU is that of the analysis."""
    return sections(
        [line(headline(analysis), "bold"), *(line(text, "bold yellow") for text in proxies(analysis))],
        (
            ("Predicted", _predicted(analysis, gpu)),
            ("Time by limiter", _split(analysis.totals.by_limiter, LIMITERS)),
            ("Time by kind of kernel", _split(analysis.totals.by_kind, {})),
            ("Slowest layers", _layers(analysis)),
            ("Limit", limit_section(analysis.limit)),
            ("Findings", _findings(analysis)),
            ("2:4 sparsity", _sparsity(analysis)),
            ("Batch sweep", _batches(analysis)),
            ("Levels", _levels(analysis)),
            ("Without a cost, and in no sum", _uncosted(analysis)),
            ("Warnings", list_lines(analysis.warnings, "yellow")),
        ),
    )


def headline(analysis: Analysis) -> str:
    """Model, GPU, precision and levels; a proxy is said here already."""
    start = f"{shorten(model_name(analysis), _NAME)} on {analysis.gpu.get('name')}, {analysis.precision}"
    loud = " (PROXY)" if proxies(analysis) else ""
    return f"{start}: predicted from the {levels_text(analysis)}{loud}"


def _predicted(analysis: Analysis, gpu: GpuSpec) -> list[RenderableType]:
    totals, memory = analysis.totals, analysis.memory
    achieved, moved = rates(totals, analysis.layers, gpu)
    needed = memory.weight_bytes + memory.activation_bytes
    fits = "fits" if memory.fits else "DOES NOT FIT"
    rows = [
        ("time", f"{predicted_text(totals)} in {count(len(analysis.layers), 'layer')}"),
        ("arithmetic", f"{flop_text(totals.flop)}, {achieved}"),
        ("traffic", f"{bytes_text(totals.bytes)}, {moved}"),
        (
            "memory",
            f"{bytes_text(memory.weight_bytes)} of weights and {bytes_text(memory.activation_bytes)} of activations:"
            f" {fits} in {bytes_text(memory.device_bytes)}",
        ),
    ]
    if memory.activation_bytes:
        rows.append(("", f"activations peak at {shorten(visible(memory.peak_node), _NAME)}"))
    rows += [("calibrated", text) for text in calibration_lines(analysis.gpu)]
    if memory.fits:
        return [pairs(rows)]
    return [pairs(rows), line(f"the GPU lacks {bytes_text(needed - memory.device_bytes)} of memory", "bold red")]


def _split(parts: Mapping[str, float], words: Mapping[str, str]) -> list[RenderableType]:
    total = sum(parts.values())
    if not total:
        return []
    rows = [
        (words.get(name, name), time_text(value), percent(value / total), "#" * max(round(_BAR * value / total), 1))
        for name, value in sorted(parts.items(), key=lambda item: -item[1])
        if value > 0
    ]
    return [_table(("", "time", "share", ""), rows, right=(1, 2))]


def _layers(analysis: Analysis) -> list[RenderableType]:
    rows = slowest(analysis.layers)
    if not rows:
        return []
    rest = sum(row.predicted_us for row in rows[_MOST_ROWS:])
    left = left_out(len(rows) - _MOST_ROWS, "layer", f" with {time_text(rest)}")
    return [_LayerTable(rows[:_MOST_ROWS], analysis.totals.predicted_us), *left]


class _LayerTable:
    """The table of layers: the names get the width the terminal has left."""

    def __init__(self, layers: Sequence[LayerRow], total_us: float) -> None:
        self.layers = layers
        self.total_us = total_us

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.cells import cell_len

        wide = options.max_width >= _WIDE and any(layer.low_us is not None for layer in self.layers)
        others = _OTHER_COLUMNS + (_RANGE_COLUMNS if wide else 0)
        width = min(max(options.max_width - others, _LEAST_NAME), _MOST_NAME)
        rows = []
        for layer in self.layers:
            tile = tile_text(layer)
            rows.append(
                (
                    shorten(visible(layer.name), width, measure=cell_len),
                    shorten(visible(layer.op), 11, measure=cell_len),
                    layer.dtype,
                    product_text(layer),
                    f"{tile} {layer.waves}w" if tile else "",
                    layer.limiter,
                    time_text(layer.predicted_us),
                    *([range_text(layer.predicted_us, layer.low_us, layer.high_us)] if wide else []),
                    percent(layer.predicted_us / self.total_us) if self.total_us else "",
                )
            )
        spans = ("80 %",) if wide else ()
        heads = ("layer", "op", "type", "m x n x k", "tile, waves", "limiter", "time", *spans, "share")
        yield _table(heads, rows, right=range(6, len(heads)))


def _findings(analysis: Analysis) -> list[RenderableType]:
    findings = by_gain(analysis.findings)
    rows = [_finding(finding) for finding in findings[:_MOST_FINDINGS]]
    if not rows:
        return []
    left = left_out(len(findings) - _MOST_FINDINGS, "finding")
    return [pairs(rows), *left, line("gains are not additive; trtopt explain RULE says why and how")]


def _finding(finding: Finding) -> tuple[str, str]:
    gain = f"-{time_text(finding.gain_us)}" if finding.gain_us > 0 else finding.severity
    where = f" ({some_names(finding.nodes, 2)})" if finding.nodes else ""
    noise = f"; {NOISE}" if finding.within_noise else ""
    return gain, f"{finding.rule}: {visible(finding.message)}{where}{noise}\n> {visible(finding.remedy)}"


def _sparsity(analysis: Analysis) -> list[RenderableType]:
    found = analysis.sparsity
    if found is None:
        return []
    body: list[RenderableType] = [
        pairs([(BACKENDS[found.backend], sparsity_text(found)), ("2:4 as it is", sparse_weights_text(found))])
    ]
    layers = paying(found)
    rows = [
        (
            some_names(row.nodes, 1, _MOST_NAME),
            "yes" if row.is_sparse else "",
            time_text(row.dense_us),
            time_text(row.sparse_us),
            percent(1 - row.sparse_us / row.dense_us),
        )
        for row in layers[:_MOST_ROWS]
    ]
    if rows:
        body.append(_table(("layer", "2:4", "dense", "sparse", "gain"), rows, right=(2, 3, 4)))
    body += left_out(len(layers) - _MOST_ROWS, "layer")
    reasons = [
        (verdict, f"{count(len(nodes), 'node')}: {visible(reason)} ({some_names(nodes, 2)})")
        for verdict, reason, nodes in by_reason(found)
    ]
    left = left_out(len(reasons) - _MOST_ROWS, "reason")
    return [*body, pairs(reasons[:_MOST_ROWS]), *left, line(found.note)]


def _batches(analysis: Analysis) -> list[RenderableType]:
    sweep = analysis.batch_sweep
    if sweep is None or not sweep.points:
        return []
    rows = [
        (
            str(point.batch),
            predicted_text(point),
            f"{point.throughput:,.0f}/s",
            bytes_text(point.activation_bytes),
            batch_notes(analysis, point),
        )
        for point in _shown(sweep)
    ]
    headers = ("batch", "latency", "throughput", "activations", "")
    left = left_out(len(sweep.points) - len(rows), "size", " between them")
    body: list[RenderableType] = [_table(headers, rows, right=(0, 1, 2, 3)), *left]
    if sweep.budget_us is not None and sweep.best_within_budget is None:
        body.append(line(f"no batch of the sweep meets the budget of {time_text(sweep.budget_us)}", "yellow"))
    elif sweep.budget_us is not None:
        body.append(line(f"within {time_text(sweep.budget_us)}: batch {sweep.best_within_budget}"))
    body.append(line(f"batch {sweep.knee} is the smallest with 90 % of the best throughput"))
    return body


def _shown(sweep: BatchSweep) -> list[BatchPoint]:
    """Points evenly spread over the doublings of the batch, the first, the last and the named ones among them."""
    if len(sweep.points) <= _MOST_ROWS:
        return list(sweep.points)
    low, high = math.log2(sweep.points[0].batch), math.log2(sweep.points[-1].batch)
    slots = _MOST_ROWS - 3
    wanted = [low + (high - low) * index / slots for index in range(slots + 1)]
    batches = {min(sweep.points, key=lambda point: abs(math.log2(point.batch) - at)).batch for at in wanted}
    batches |= {sweep.knee, sweep.best_within_budget or sweep.knee}
    return [point for point in sweep.points if point.batch in batches]


def _levels(analysis: Analysis) -> list[RenderableType]:
    if len(analysis.levels) < 2:
        return []
    rows = [
        (
            LEVELS[summary.level],
            str(summary.kernels),
            predicted_text(summary.totals),
            flop_text(summary.totals.flop),
            bytes_text(summary.totals.bytes),
            f"PROXY: {visible(summary.proxy)}" if summary.proxy is not None else "",
        )
        for summary in analysis.levels
    ]
    return [_table(("level", "kernels", "time", "arithmetic", "traffic", ""), rows, right=(1, 2, 3, 4))]


def _uncosted(analysis: Analysis) -> list[RenderableType]:
    groups = sorted(analysis.uncosted, key=lambda group: -len(group.nodes))
    rows = [
        (shorten(visible(group.op), _NAME), f"{count(len(group.nodes), 'node')}: {some_names(group.nodes, 2)}")
        for group in groups[:_MOST_ROWS]
    ]
    return [pairs(rows), *left_out(len(groups) - _MOST_ROWS, "operator")] if rows else []


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> Table:
    """As :func:`~trtopt.report.text.format.table`, closer together: eight columns have to fit. No empty last one."""
    if not headers[-1] and not any(row[-1] for row in rows):
        headers, rows = headers[:-1], [row[:-1] for row in rows]
    return table(headers, rows, right=right, gap=2)
