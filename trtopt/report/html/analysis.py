"""An analysis as one HTML file that loads nothing else (see :mod:`trtopt.report.html.page`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trtopt.report.html import plots
from trtopt.report.html.page import (
    MOST_ROWS,
    Cell,
    Column,
    Draw,
    _nodes,
    assumptions,
    banners,
    drawing,
    findings,
    first_rows,
    name,
    numbers,
    page,
    quiet,
    quiet_lines,
    scroll,
    section,
    split_bar,
    table,
    text,
    tiles,
)
from trtopt.report.schema.analysis import Analysis, BatchPoint, Excess, LayerRow, Limit, SparseLayer, Totals
from trtopt.report.text.analysis import (
    BACKENDS,
    LEVELS,
    LIMITERS,
    batch_notes,
    levels_text,
    model_name,
    paying,
    product_text,
    proxies,
    rates,
    slowest,
    sparse_weights_text,
    sparsity_text,
    tile_text,
)
from trtopt.report.text.calibration import calibration_lines
from trtopt.report.text.format import (
    bytes_text,
    count,
    flop_text,
    page_time,
    percent,
    predicted_text,
    range_text,
    visible,
)
from trtopt.report.text.limit import REASONS, limit_text
from trtopt.support.version import VERSION

if TYPE_CHECKING:
    from trtopt.hardware.spec import GpuSpec


_NO_SUM = "Gains are predicted one by one and do not add up. <code>trtopt explain RULE</code> says why and how."


def html(analysis: Analysis, gpu: GpuSpec, *, l2_bandwidth_gbs: float | None = None) -> str:
    """The page of an analysis: one file of about 5 MB, without any request to the network.

    The bandwidth of the L2 (GB/s) is drawn as a second roof; None leaves it out.

    Raises:
        MissingDependencyError: plotly is not installed.
    """
    draw = drawing()
    sections = (
        _head(analysis, gpu),
        _time(analysis),
        findings(analysis.findings, analysis.totals.predicted_us, _NO_SUM),
        _roofline(analysis, gpu, l2_bandwidth_gbs, draw),
        _layers(analysis, draw),
        _limit(analysis),
        _sparsity(analysis),
        _batches(analysis, draw),
        _memory(analysis),
        _levels(analysis),
        _uncosted(analysis),
        _assumptions(analysis, gpu),
    )
    return page(f"{model_name(analysis)} on {gpu.name}, {analysis.precision}", sections)


def _head(analysis: Analysis, gpu: GpuSpec) -> str:
    totals, memory = analysis.totals, analysis.memory
    achieved, moved = rates(totals, analysis.layers, gpu)
    needed = memory.weight_bytes + memory.activation_bytes
    fits = "fits" if memory.fits else "DOES NOT FIT"
    figures = (
        ("predicted time", page_time(totals.predicted_us), f"{count(len(analysis.layers), 'layer')}{_range(totals)}"),
        ("arithmetic", flop_text(totals.flop), achieved),
        ("memory traffic", bytes_text(totals.bytes), moved),
        ("device memory", bytes_text(needed), f"{fits} in {bytes_text(memory.device_bytes)}"),
    )
    over = bytes_text(needed - memory.device_bytes)
    lacking = [] if memory.fits else [f"Weights and activations exceed the memory of {gpu.name} by {over}."]
    return (
        f"<header><h1>{text(model_name(analysis))} on {text(gpu.name)}, {text(analysis.precision)}</h1>"
        f'<p class="quiet">Predicted, not measured, from the {text(levels_text(analysis))}.</p>'
        f"{quiet_lines(calibration_lines(analysis.gpu))}</header>"
        f"{banners(proxies(analysis), ' loud')}{banners(lacking, ' bad loud')}{banners(analysis.warnings)}"
        f"{tiles(figures)}"
    )


def _range(totals: Totals) -> str:
    low_high = range_text(totals.predicted_us, totals.low_us, totals.high_us)
    return f"; 80 % of such kernels were within {low_high}" if low_high else ""


def _time(analysis: Analysis) -> str:
    totals = analysis.totals
    limiters = [
        (f"c-{limiter}", word, totals.by_limiter.get(limiter, 0.0), page_time(totals.by_limiter.get(limiter, 0.0)))
        for limiter, word in LIMITERS.items()
    ]
    ordered = sorted(totals.by_kind.items(), key=lambda item: -item[1])
    kinds = [(f"c-{index % 6}", kind, value, page_time(value)) for index, (kind, value) in enumerate(ordered)]
    by_limiter = section("Time by limiter", split_bar(limiters, totals.predicted_us))
    by_kind = section("Time by kind of kernel", split_bar(kinds, totals.predicted_us))
    return f'<div class="columns">{by_limiter}{by_kind}</div>'


def _roofline(analysis: Analysis, gpu: GpuSpec, l2_bandwidth_gbs: float | None, draw: Draw) -> str:
    placed = slowest(plots.placed(analysis.layers))
    if not placed:
        return ""
    notes = ["A point is a layer; its area is its time. The ceilings are the peaks of the GPU by type, in TFLOP/s."]
    notes.append(
        "Bytes count each tensor once: data kept in the L2 or skipped by a stride lifts a layer over the memory roof."
    )
    hidden = placed[plots.MOST_POINTS :]
    if hidden:
        share = sum(layer.predicted_us for layer in hidden) / analysis.totals.predicted_us
        notes.append(
            f"The {plots.MOST_POINTS} slowest are drawn; the other {len(hidden)} take {percent(share)} of the time."
        )
    unplaced = len(analysis.layers) - len(placed)
    if unplaced:
        notes.append(f"{count(unplaced, 'layer')} without arithmetic cannot be drawn.")
    figure = plots.roofline(analysis.layers, gpu, analysis.precision, l2_bandwidth_gbs)
    return section("Roofline", quiet(" ".join(notes)), draw("roofline", figure))


def _layers(analysis: Analysis, draw: Draw) -> str:
    if not analysis.layers:
        return ""
    rows = slowest(analysis.layers)
    size = plots.group_size(len(rows))
    note = "" if size == 1 else quiet(f"Each bar is {size} layers.")
    rest = page_time(sum(row.predicted_us for row in rows[MOST_ROWS:]))
    cut = quiet(f"The {MOST_ROWS} slowest of {len(rows)}; the others take {rest} and are in the JSON.")
    return section(
        "Time by layer",
        note,
        draw("order", plots.in_order(analysis.layers)),
        cut if len(rows) > MOST_ROWS else "",
        scroll(layer_table(rows[:MOST_ROWS], analysis.totals.predicted_us)),
    )


def _limit(analysis: Analysis) -> str:
    limit = analysis.limit
    if limit is None or not limit.kernels:
        return ""
    note = f"<p>Necessary: {text(limit_text(limit, micro='µ'))}. Beyond it, equal kernels together:</p>"
    rows = limit.kernels[:MOST_ROWS]
    return section("Limit", note, scroll(limit_table(limit, rows)))


def _sparsity(analysis: Analysis) -> str:
    found = analysis.sparsity
    if found is None:
        return ""
    rows = [*paying(found), *(row for row in found.layers if not row.eligible)]
    total = f"{BACKENDS[found.backend]}: {sparsity_text(found, micro='µ')}. 2:4 as it is: {sparse_weights_text(found)}."
    note = quiet(f"{text(found.note)}{first_rows(len(rows))}")
    return section("2:4 sparsity", f"<p>{text(total)}</p>", note, scroll(sparsity_table(rows[:MOST_ROWS])))


def _batches(analysis: Analysis, draw: Draw) -> str:
    sweep = analysis.batch_sweep
    if sweep is None or not sweep.points:
        return ""
    note = f"Batch {sweep.knee} is the smallest with 90 % of the best throughput."
    if sweep.budget_us is not None:
        best = sweep.best_within_budget
        found = "no batch of the sweep" if best is None else f"batch {best} has the highest throughput"
        note += f" Within {page_time(sweep.budget_us)}: {found}."
    curve = draw("batch", plots.batch_curve(sweep))
    return section("Batch", f"<p>{note}</p>", curve, scroll(batch_table(analysis, sweep.points)))


def _memory(analysis: Analysis) -> str:
    memory = analysis.memory
    free = max(memory.device_bytes - memory.weight_bytes - memory.activation_bytes, 0)
    parts = [
        ("c-2", "weights", memory.weight_bytes, bytes_text(memory.weight_bytes)),
        ("c-3", "activations at their peak", memory.activation_bytes, bytes_text(memory.activation_bytes)),
        ("c-free", "free", free, bytes_text(free)),
    ]
    total = memory.weight_bytes + memory.activation_bytes + free
    peak = f"<p>The peak is reached at {name(memory.peak_node)}.</p>" if memory.activation_bytes else ""
    return section("Device memory", split_bar(parts, total), peak)


def _levels(analysis: Analysis) -> str:
    if len(analysis.levels) < 2:
        return ""
    note = f"<p>The layers on this page are of the {LEVELS[analysis.levels[-1].level]}.</p>"
    return section("Levels", note, f'<div class="scroll">{level_table(analysis)}</div>')


def _uncosted(analysis: Analysis) -> str:
    if not analysis.uncosted:
        return ""
    body = f'<div class="scroll">{uncosted_table(analysis)}</div>'
    return section("Operators without a cost", "<p>They are in no sum above.</p>", body)


def _assumptions(analysis: Analysis, gpu: GpuSpec) -> str:
    more = (
        " Arithmetic and memory are the times of each alone, that of idle SMs left out; the longer of the two bounds a"
        " layer, and latency where neither is half of its time."
    )
    return assumptions(gpu_values(gpu), {**analysis.model, "trtopt": VERSION, "schema": analysis.schema}, more)


def layer_table(layers: Sequence[LayerRow], total_us: float) -> str:
    """The layers, the slowest first."""
    columns = [
        *(Column("layer"), Column("operator", "operator"), Column("type", "short")),
        *(*numbers("time", "share", "80 %"), Column("limited by", "short")),
        *numbers("arithmetic", "memory", "FLOP", "bytes", "FLOP/byte"),
        *(Column("m×n×k", "short"), Column("tile", "short")),
        *numbers("tiles", "waves", "tiles used", "waves used", "aligned"),
    ]
    rows = [_layer_cells(layer, total_us) for layer in layers]
    return table(columns, rows, style="layers", sorted_by=3)


def _layer_cells(layer: LayerRow, total_us: float) -> list[Cell]:
    share = layer.predicted_us / total_us if total_us else 0.0
    product = layer.gemm is not None
    return [
        Cell(name(layer.name) + _computed(layer), visible(layer.name)),
        Cell(name(layer.op, 40), visible(layer.op)),
        Cell(text(layer.dtype)),
        Cell(page_time(layer.predicted_us), layer.predicted_us),
        Cell(percent(share), share),
        Cell(range_text(layer.predicted_us, layer.low_us, layer.high_us), layer.high_us or 0.0),
        Cell(f'<i class="dot c-{layer.limiter}"></i>{LIMITERS[layer.limiter]}', layer.limiter),
        Cell(page_time(layer.math_us), layer.math_us),
        Cell(page_time(layer.memory_us), layer.memory_us),
        Cell(flop_text(layer.flop), layer.flop),
        Cell(bytes_text(layer.bytes), layer.bytes),
        Cell(f"{layer.arithmetic_intensity:.3g}", layer.arithmetic_intensity),
        Cell(product_text(layer, times="×")),
        Cell(tile_text(layer, times="×")),
        Cell(str(layer.tiles) if product else "", layer.tiles),
        Cell(str(layer.waves) if product else "", layer.waves),
        Cell(percent(layer.tile_efficiency) if product else "", layer.tile_efficiency),
        Cell(percent(layer.wave_efficiency) if product else "", layer.wave_efficiency),
        Cell(f"{layer.alignment_bytes} B", layer.alignment_bytes),
    ]


def _computed(layer: LayerRow) -> str:
    """Under the name of a layer, the node it computes, where the name does not say it."""
    nodes = layer.onnx_nodes
    if not nodes or nodes == (layer.name,):
        return ""
    more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
    return f'<br><span class="quiet">{name(nodes[0], 60)}{more}</span>'


def level_table(analysis: Analysis) -> str:
    """The levels side by side."""
    columns = [Column("level"), *numbers("layers", "time", *LIMITERS.values(), "FLOP", "bytes")]
    rows = []
    for summary in analysis.levels:
        proxy = "" if summary.proxy is None else f' <span class="pill warning">PROXY: {text(summary.proxy)}</span>'
        totals = summary.totals
        limiters = [Cell(page_time(totals.by_limiter.get(limiter, 0.0))) for limiter in LIMITERS]
        rows.append(
            [
                Cell(LEVELS[summary.level] + proxy),
                Cell(str(summary.kernels)),
                Cell(predicted_text(totals, micro="µ")),
                *limiters,
                Cell(flop_text(totals.flop)),
                Cell(bytes_text(totals.bytes)),
            ]
        )
    return table(columns, rows, style="levels", sorted_by=None)


def limit_table(limit: Limit, kernels: Sequence[Excess]) -> str:
    """What kernels take beyond their necessary work, and why."""
    columns = [
        *numbers("beyond", "share", "predicted", "kernels"),
        *(Column("operator", "operator"), Column("type", "short"), Column("the first of them"), Column("why", "short")),
    ]
    rows = [
        [
            Cell(page_time(item.excess_us), item.excess_us),
            Cell(percent(item.excess_us / limit.predicted_us) if limit.predicted_us else ""),
            Cell(page_time(item.predicted_us), item.predicted_us),
            Cell(str(item.kernels), item.kernels),
            Cell(name(item.op, 40), visible(item.op)),
            Cell(text(item.dtype)),
            Cell(name(item.layers[0]), visible(item.layers[0])),
            Cell(text(REASONS[item.reason])),
        ]
        for item in kernels
    ]
    return table(columns, rows, style="layers", sorted_by=0)


def batch_table(analysis: Analysis, points: Sequence[BatchPoint]) -> str:
    """The points of the batch sweep."""
    columns = numbers("batch", "latency", "throughput", "activations")
    rows = [
        [
            Cell(str(point.batch)),
            Cell(predicted_text(point, micro="µ")),
            Cell(f"{point.throughput:,.0f}/s"),
            Cell(bytes_text(point.activation_bytes)),
            Cell(f"<b>{batch_notes(analysis, point)}</b>"),
        ]
        for point in points
    ]
    return table([*columns, Column("")], rows, style="batches", sorted_by=None)


def sparsity_table(layers: Sequence[SparseLayer]) -> str:
    """Where 2:4 pays and where not, in the order given."""
    columns = [
        *(*numbers("gain", "dense", "sparse"), Column("2:4 as it is", "short")),
        *(Column("why, or why not", "text"), Column("nodes", "nodes")),
    ]
    rows = []
    for layer in layers:
        gain = layer.dense_us - layer.sparse_us
        rows.append(
            [
                Cell(f'<span class="gain">−{page_time(gain)}</span>' if layer.eligible else "–", gain),
                Cell(page_time(layer.dense_us), layer.dense_us),
                Cell(page_time(layer.sparse_us), layer.sparse_us),
                Cell("yes" if layer.is_sparse else ""),
                Cell(text(layer.reason)),
                Cell(_nodes(layer.nodes)),
            ]
        )
    return table(columns, rows, style="findings", sorted_by=0)


def uncosted_table(analysis: Analysis) -> str:
    """Operators without a cost and the nodes that have them."""
    rows = [
        [Cell(name(group.op)), Cell(count(len(group.nodes), "node")), Cell(_nodes(group.nodes))]
        for group in sorted(analysis.uncosted, key=lambda group: -len(group.nodes))
    ]
    return table([Column("operator"), Column("", "short"), Column("nodes")], rows, style="uncosted", sorted_by=None)


def gpu_values(gpu: GpuSpec) -> dict[str, str]:
    """What the prediction takes for granted about the GPU."""
    peaks = ", ".join(f"{dtype} {value:g}" for dtype, value in gpu.tflops.items())
    return {
        "GPU": f"{gpu.name}, compute capability {gpu.compute_capability}",
        "multiprocessors": str(gpu.sm),
        "clocks": f"{gpu.clock_cuda_mhz:g} MHz, Tensor Cores {gpu.clock_tensor_mhz:g} MHz",
        "peaks, TFLOP/s": peaks,
        "memory": f"{gpu.memory_gb:g} GB at {gpu.bandwidth_gbs:g} GB/s, L2 {gpu.l2_mib:g} MiB",
        "power limit": f"{gpu.tdp_w:g} W",
        "source": gpu.source,
    }
