"""An analysis as one HTML file that loads nothing else (see :mod:`trtopt.report.html.page`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trtopt.report.html import analysis_plots as plots
from trtopt.report.html import analysis_tables as tables
from trtopt.report.html.analysis_tables import text, time
from trtopt.report.html.page import Draw, check_html, drawing, page
from trtopt.report.schema.analysis import Analysis, Totals
from trtopt.report.text.analysis import (
    BACKENDS,
    LEVELS,
    LIMITERS,
    by_gain,
    flop_text,
    levels_text,
    model_name,
    paying,
    proxies,
    rates,
    slowest,
    sparse_weights_text,
    sparsity_text,
)
from trtopt.report.text.numbers import bytes_text, count, percent
from trtopt.support.files import atomic_write
from trtopt.support.version import VERSION

if TYPE_CHECKING:
    from trtopt.hardware.spec import GpuSpec

__all__ = ["check_html", "html", "write_html"]

_MOST_ROWS = 500
"""Rows of the tables of layers and of findings: beyond it a browser takes more than a second to lay them out."""


def write_html(analysis: Analysis, gpu: GpuSpec, path: Path, *, l2_bandwidth_gbs: float | None = None) -> None:
    """Write the page, whole or not at all; arguments and errors as of :func:`html`.

    Raises:
        UsageError: The file cannot be written.
    """
    atomic_write(path, html(analysis, gpu, l2_bandwidth_gbs=l2_bandwidth_gbs))


def html(analysis: Analysis, gpu: GpuSpec, *, l2_bandwidth_gbs: float | None = None) -> str:
    """The page of an analysis: one file of about 5 MB, without any request to the network.

    Args:
        analysis: What was found.
        gpu: The GPU it is about.
        l2_bandwidth_gbs: The bandwidth of its L2 in GB/s, drawn as a second roof; None leaves it out.

    Raises:
        MissingDependencyError: plotly is not installed.
    """
    draw = drawing()
    sections = (
        _head(analysis, gpu),
        _time(analysis),
        _findings(analysis),
        _roofline(analysis, gpu, l2_bandwidth_gbs, draw),
        _layers(analysis, draw),
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
    tiles = (
        ("predicted time", time(totals.predicted_us), count(len(analysis.layers), "layer")),
        ("arithmetic", flop_text(totals.flop), achieved),
        ("memory traffic", bytes_text(totals.bytes), moved),
        (
            "device memory",
            bytes_text(needed),
            f"{'fits' if memory.fits else 'DOES NOT FIT'} in {bytes_text(memory.device_bytes)}",
        ),
    )
    boxes = "".join(
        f'<div class="tile"><span>{text(title)}</span><b>{text(value)}</b><span>{text(note)}</span></div>'
        for title, value, note in tiles
    )
    banners = [f'<p class="banner loud">{text(line)}</p>' for line in proxies(analysis)]
    if not memory.fits:
        over = bytes_text(needed - memory.device_bytes)
        banners.append(
            f'<p class="banner bad loud">Weights and activations exceed the memory of {text(gpu.name)} by {over}.</p>'
        )
    banners += [f'<p class="banner">{text(line)}</p>' for line in analysis.warnings]
    return (
        f"<header><h1>{text(model_name(analysis))} on {text(gpu.name)}, {text(analysis.precision)}</h1>"
        f'<p class="quiet">Predicted, not measured, from the {text(levels_text(analysis))}.</p></header>'
        f'{"".join(banners)}<div class="tiles">{boxes}</div>'
    )


def _time(analysis: Analysis) -> str:
    totals = analysis.totals
    limiters = [
        (f"c-{limiter}", word, totals.by_limiter.get(limiter, 0.0), time(totals.by_limiter.get(limiter, 0.0)))
        for limiter, word in LIMITERS.items()
    ]
    return (
        '<div class="columns">'
        f"<section><h2>Time by limiter</h2>{tables.split_bar(limiters, totals.predicted_us)}</section>"
        f"<section><h2>Time by kind of kernel</h2>{_kinds(totals)}</section></div>"
    )


def _kinds(totals: Totals) -> str:
    kinds = sorted(totals.by_kind.items(), key=lambda item: -item[1])
    parts = [(f"c-{index % 6}", kind, value, time(value)) for index, (kind, value) in enumerate(kinds)]
    return tables.split_bar(parts, totals.predicted_us)


def _findings(analysis: Analysis) -> str:
    findings = by_gain(analysis.findings)
    if not findings:
        return "<section><h2>Findings</h2><p>None.</p></section>"
    note = "Gains are predicted one by one and do not add up. <code>trtopt explain RULE</code> says why and how."
    if len(findings) > _MOST_ROWS:
        note += f" The first {_MOST_ROWS} of {len(findings)}; all of them are in the JSON."
    body = tables.finding_table(findings[:_MOST_ROWS], analysis.totals.predicted_us)
    return f'<section><h2>Findings</h2><p class="quiet">{note}</p><div class="scroll tall">{body}</div></section>'


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
    return f'<section><h2>Roofline</h2><p class="quiet">{" ".join(notes)}</p>{draw("roofline", figure)}</section>'


def _layers(analysis: Analysis, draw: Draw) -> str:
    if not analysis.layers:
        return ""
    rows = slowest(analysis.layers)
    size = plots.group_size(len(rows))
    note = "" if size == 1 else f'<p class="quiet">Each bar is {size} layers.</p>'
    cut = ""
    if len(rows) > _MOST_ROWS:
        rest = sum(row.predicted_us for row in rows[_MOST_ROWS:])
        cut = (
            f'<p class="quiet">The {_MOST_ROWS} slowest of {len(rows)}; the others take {time(rest)} and are in the'
            " JSON.</p>"
        )
    body = tables.layer_table(rows[:_MOST_ROWS], analysis.totals.predicted_us)
    return (
        f"<section><h2>Time by layer</h2>{note}{draw('order', plots.in_order(analysis.layers))}{cut}"
        f'<div class="scroll tall">{body}</div></section>'
    )


def _sparsity(analysis: Analysis) -> str:
    found = analysis.sparsity
    if found is None:
        return ""
    rows = [*paying(found), *(row for row in found.layers if not row.eligible)]
    cut = f" The first {_MOST_ROWS} of {len(rows)}; all of them are in the JSON." if len(rows) > _MOST_ROWS else ""
    total = f"{BACKENDS[found.backend]}: {sparsity_text(found, micro='µ')}. 2:4 as it is: {sparse_weights_text(found)}."
    return (
        f'<section><h2>2:4 sparsity</h2><p>{text(total)}</p><p class="quiet">{text(found.note)}{cut}</p>'
        f'<div class="scroll tall">{tables.sparsity_table(rows[:_MOST_ROWS])}</div></section>'
    )


def _batches(analysis: Analysis, draw: Draw) -> str:
    sweep = analysis.batch_sweep
    if sweep is None or not sweep.points:
        return ""
    note = f"Batch {sweep.knee} is the smallest with 90 % of the best throughput."
    if sweep.budget_us is not None:
        best = sweep.best_within_budget
        found = "no batch of the sweep" if best is None else f"batch {best} has the highest throughput"
        note += f" Within {time(sweep.budget_us)}: {found}."
    return (
        f"<section><h2>Batch</h2><p>{note}</p>{draw('batch', plots.batch_curve(sweep))}"
        f'<div class="scroll tall">{tables.batch_table(analysis, sweep.points)}</div></section>'
    )


def _memory(analysis: Analysis) -> str:
    memory = analysis.memory
    free = max(memory.device_bytes - memory.weight_bytes - memory.activation_bytes, 0)
    parts = [
        ("c-2", "weights", memory.weight_bytes, bytes_text(memory.weight_bytes)),
        ("c-3", "activations at their peak", memory.activation_bytes, bytes_text(memory.activation_bytes)),
        ("c-free", "free", free, bytes_text(free)),
    ]
    total = memory.weight_bytes + memory.activation_bytes + free
    peak = f"<p>The peak is reached at {tables.name(memory.peak_node)}.</p>" if memory.activation_bytes else ""
    return f"<section><h2>Device memory</h2>{tables.split_bar(parts, total)}{peak}</section>"


def _levels(analysis: Analysis) -> str:
    if len(analysis.levels) < 2:
        return ""
    shown = LEVELS[analysis.levels[-1].level]
    return (
        f"<section><h2>Levels</h2><p>The layers on this page are of the {shown}.</p>"
        f'<div class="scroll">{tables.level_table(analysis)}</div></section>'
    )


def _uncosted(analysis: Analysis) -> str:
    if not analysis.uncosted:
        return ""
    return (
        "<section><h2>Operators without a cost</h2><p>They are in no sum above.</p>"
        f'<div class="scroll">{tables.uncosted_table(analysis)}</div></section>'
    )


def _assumptions(analysis: Analysis, gpu: GpuSpec) -> str:
    return (
        "<section><h2>What this rests on</h2><p>One multiply-add is 2 FLOP; the bytes of a layer are each input,"
        " constant and output once; 1 GB is 10⁹ bytes. Arithmetic and memory are the times of each alone, that of idle"
        " SMs left out; the longer of the two bounds a layer, and latency where neither is half of its time."
        f'</p><div class="columns"><div>{tables.description(tables.gpu_values(gpu))}</div>'
        f"<div>{tables.description({**analysis.model, 'trtopt': VERSION, 'schema': analysis.schema})}</div>"
        "</div></section>"
    )
