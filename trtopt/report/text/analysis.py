"""An analysis, as it is shown: its figures, where the time goes, and what could be won."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trtopt.report.html import plots
from trtopt.report.schema.analysis import Analysis, BatchPoint, BatchSweep, LayerRow, SparseLayer, Sparsity, Totals
from trtopt.report.text.blocks import (
    Block,
    Cell,
    Column,
    Figures,
    Findings,
    Line,
    Note,
    Part,
    Plot,
    Section,
    Split,
    Table,
    View,
    left_out,
    line,
    numbers,
    pairs,
    table,
)
from trtopt.report.text.calibration import calibration_lines
from trtopt.report.text.format import (
    bytes_text,
    count,
    flop_text,
    percent,
    predicted_text,
    range_text,
    shorten,
    some_names,
    time_text,
    visible,
)
from trtopt.report.text.layers import as_layers, graph_blocks, layers_blocks, roofline_blocks
from trtopt.report.text.limit import limit_blocks
from trtopt.report.text.names import Labels
from trtopt.report.text.words import FLOP_NOTE, LIMITERS, model_name, peak_of, rests_on

if TYPE_CHECKING:
    from trtopt.hardware.spec import GpuSpec

LEVELS = {"onnx": "ONNX graph", "engine": "TensorRT for RTX engine"}
BACKENDS = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT for RTX"}
_MOST_ROWS = 12
_NAME = 40
"""Characters of a name in a sentence."""
_NOTE = "gains are not additive; trtopt explain RULE says why and how"


def view(analysis: Analysis, gpu: GpuSpec, *, l2_bandwidth_gbs: float | None = None) -> View:
    """The analysis; the GPU is that of the analysis.

    The bandwidth of the L2 (GB/s) is drawn as a second roof; None leaves it out.
    """
    totals = analysis.totals
    lead = tuple(Line(text, "warn") for text in proxies(analysis))
    labels = Labels(analysis.names)
    findings = labels.found(analysis.findings)
    found = (Findings(findings, totals.predicted_us, _NOTE),) if findings else ()
    layers = as_layers(analysis.layers, labels)
    graph = graph_blocks(layers, analysis.links, findings=analysis.findings, measured=False, names=labels.names)
    roofline = roofline_blocks(layers, gpu.tflops, gpu.bandwidth_gbs, analysis.precision, l2_bandwidth_gbs)
    sections = (
        Section("Predicted", _predicted(analysis, gpu, labels)),
        Section("Time by limiter", _split(totals.by_limiter, LIMITERS)),
        Section("Time by kind of kernel", _split(totals.by_kind, {})),
        Section("Findings", found),
        Section("Layers as a graph", graph, "page"),
        Section("Roofline", roofline, "page"),
        Section("Slowest layers", layers_blocks(analysis.layers, totals.predicted_us, labels)),
        Section("Limit", tuple(limit_blocks(analysis.limit, analysis.layers, labels))),
        Section("2:4 sparsity", _sparsity(analysis, labels)),
        Section("Batch sweep", _batches(analysis)),
        Section("Device memory", _memory(analysis), "page"),
        Section("Levels", _levels(analysis)),
        Section("Without a cost, and in no sum", _uncosted(analysis, labels)),
        _assumptions(analysis),
    )
    name = f"{model_name(analysis)} on {visible(gpu.name)}, {analysis.precision}"
    return View(line(headline(analysis)), lead, sections, name=name, warnings=analysis.warnings)


def headline(analysis: Analysis) -> str:
    """Model, GPU, precision and levels; a proxy is said here already."""
    start = f"{shorten(model_name(analysis), _NAME)} on {visible(str(analysis.gpu.get('name')))}, {analysis.precision}"
    loud = " (PROXY)" if proxies(analysis) else ""
    return f"{start}: predicted from the {levels_text(analysis)}{loud}"


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


def sparsity_text(sparsity: Sparsity) -> str:
    """What 2:4 is predicted to gain: ``2.32 ms, with sparse kernels in 36 layers 1.80 ms: 1.29 times as fast``."""
    where = paying(sparsity)
    if not where:
        return "would gain nothing from 2:4 weights"
    dense, sparse = (time_text(value) for value in (sparsity.dense_us, sparsity.sparse_us))
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


def _predicted(analysis: Analysis, gpu: GpuSpec, labels: Labels) -> tuple[Block, ...]:
    totals, memory = analysis.totals, analysis.memory
    achieved, moved = rates(totals, analysis.layers, gpu)
    layers = count(len(analysis.layers), "layer")
    needed = memory.weight_bytes + memory.activation_bytes
    low_high = range_text(totals.predicted_us, totals.low_us, totals.high_us)
    peak = f", at their peak at {some_names([labels.text(memory.peak_node)], 1)}" if memory.activation_bytes else ""
    in_memory = (
        f"{'fits' if memory.fits else 'DOES NOT FIT'} in {bytes_text(memory.device_bytes)}:"
        f" {bytes_text(memory.weight_bytes)} of weights and {bytes_text(memory.activation_bytes)} of activations{peak}"
    )
    where = f"{low_high} in {layers}" if low_high else f"in {layers}"
    figures = Figures(
        (
            ("time", time_text(totals.predicted_us), where),
            ("arithmetic", flop_text(totals.flop), achieved),
            ("traffic", bytes_text(totals.bytes), moved),
            ("memory", bytes_text(needed), in_memory),
        )
    )
    calibrated = [line(text) for text in calibration_lines(analysis.gpu)]
    lacking = bytes_text(needed - memory.device_bytes)
    short = [] if memory.fits else [Line(f"the GPU lacks {lacking} of memory", "bad")]
    within = [Note(f"80 % of such kernels were within {low_high}.")] if low_high else []
    return figures, *within, *calibrated, *short


def _split(parts: Mapping[str, float], words: Mapping[str, str]) -> tuple[Block, ...]:
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    shown = tuple(
        Part(words.get(name, name), value, time_text(value), name if words else str(index % 6))
        for index, (name, value) in enumerate(ordered)
    )
    return (Split(shown),) if sum(parts.values()) else ()


def _sparsity(analysis: Analysis, labels: Labels) -> tuple[Block, ...]:
    found = analysis.sparsity
    if found is None:
        return ()
    layers = paying(found)
    rows = tuple(
        (
            labels.each(row.nodes),
            "yes" if row.is_sparse else "",
            Cell(time_text(row.dense_us), row.dense_us),
            Cell(time_text(row.sparse_us), row.sparse_us),
            Cell(percent(1 - row.sparse_us / row.dense_us), row.dense_us - row.sparse_us),
        )
        for row in layers
    )
    columns = (Column("layer", "name"), Column("2:4", "short"), *numbers("dense", "sparse", "gain"))
    reasons = pairs(
        (verdict, f"{count(len(nodes), 'node')}: {visible(reason)} ({some_names(labels.each(nodes).names, 2)})")
        for verdict, reason, nodes in by_reason(found)
    )
    return (
        pairs([(BACKENDS[found.backend], sparsity_text(found)), ("2:4 as it is", sparse_weights_text(found))]),
        *([Table(columns, rows, _MOST_ROWS, "layer", sorted_by=4, gap=2)] if rows else []),
        reasons,
        line(found.note),
    )


def _batches(analysis: Analysis) -> tuple[Block, ...]:
    sweep = analysis.batch_sweep
    if sweep is None or not sweep.points:
        return ()
    points = _shown(sweep)
    rows = [
        (
            str(point.batch),
            predicted_text(point),
            f"{point.throughput:,.0f}/s",
            bytes_text(point.activation_bytes),
            batch_notes(analysis, point),
        )
        for point in points
    ]
    body = table(("batch", "latency", "throughput", "activations", ""), rows, right=(0, 1, 2, 3), gap=2)
    said = []
    if sweep.budget_us is not None and sweep.best_within_budget is None:
        said.append(Line(f"no batch of the sweep meets the budget of {time_text(sweep.budget_us)}", "warn"))
    elif sweep.budget_us is not None:
        said.append(line(f"within {time_text(sweep.budget_us)}: batch {sweep.best_within_budget}"))
    said.append(line(f"batch {sweep.knee} is the smallest with 90 % of the best throughput"))
    left = left_out(len(sweep.points) - len(rows), "size", " between them")
    return Plot("batch", lambda: plots.batch_curve(sweep)), body, *left, *said


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


def _memory(analysis: Analysis) -> tuple[Block, ...]:
    memory = analysis.memory
    free = max(memory.device_bytes - memory.weight_bytes - memory.activation_bytes, 0)
    sizes = (("weights", memory.weight_bytes, "2"), ("activations at their peak", memory.activation_bytes, "3"))
    return (
        Split(
            tuple(Part(words, size, bytes_text(size), color) for words, size, color in (*sizes, ("free", free, "free")))
        ),
    )


def _levels(analysis: Analysis) -> tuple[Block, ...]:
    if len(analysis.levels) < 2:
        return ()
    rows = [
        (
            LEVELS[summary.level],
            str(summary.kernels),
            predicted_text(summary.totals),
            flop_text(summary.totals.flop),
            bytes_text(summary.totals.bytes),
            Cell(f"PROXY: {visible(summary.proxy)}", mark="pill warning") if summary.proxy is not None else "",
        )
        for summary in analysis.levels
    ]
    return (table(("level", "kernels", "time", "arithmetic", "traffic", ""), rows, right=(1, 2, 3, 4), gap=2),)


def _uncosted(analysis: Analysis, labels: Labels) -> tuple[Block, ...]:
    groups = sorted(analysis.uncosted, key=lambda group: -len(group.nodes))
    rows = [
        (
            shorten(visible(group.op), _NAME),
            f"{count(len(group.nodes), 'node')}: {some_names(labels.each(group.nodes).names, 2)}",
        )
        for group in groups[:_MOST_ROWS]
    ]
    return (pairs(rows), *left_out(len(groups) - _MOST_ROWS, "operator")) if rows else ()


def _assumptions(analysis: Analysis) -> Section:
    """What the prediction takes for granted."""
    note = (
        " Arithmetic and memory are the times of each alone, that of idle SMs left out; the longer of the two bounds a"
        " layer, and latency where neither is half of its time."
    )
    return rests_on(analysis.schema, {**analysis.gpu, **analysis.model}, Line(FLOP_NOTE + note, "quiet"))
