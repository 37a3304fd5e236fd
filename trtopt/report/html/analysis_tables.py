"""The tables and bars of the page of an analysis. Every text from the model is escaped in :func:`text`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from trtopt.report.schema.analysis import Analysis, BatchPoint, Finding, LayerRow, SparseLayer
from trtopt.report.text.analysis import LEVELS, LIMITERS, batch_notes, product_text, tile_text
from trtopt.report.text.format import bytes_text, count, flop_text, percent, shorten, time_text, visible

if TYPE_CHECKING:
    from trtopt.hardware.spec import GpuSpec

_NAME = 120
"""Characters of a name in a table; the whole name shows when the pointer rests on it."""
_NODES = 3
_LONGEST_VALUE = 400
"""Characters of one value of the model's description."""


@dataclass(frozen=True)
class Column:
    """A column: its heading, and the class of its cells (``number`` is sorted as one)."""

    title: str
    style: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell: its HTML, and the value it is sorted by where that is not its text."""

    html: str
    value: float | str | None = None


def text(value: object) -> str:
    """``value`` as HTML: every character shown, none taken for markup."""
    return escape(visible(str(value)), quote=True)


def name(value: str, most: int = _NAME) -> str:
    """A name of the model; a long one is cut in the middle and whole in its tooltip."""
    short = shorten(visible(value), most, mark="…")
    title = f' title="{text(value)}"' if short != visible(value) else ""
    broken = escape(short).replace("/", "<wbr>/")
    return f'<span class="name"{title}>{broken or "(no name)"}</span>'


def time(microseconds: float) -> str:
    """A time, with the real sign of micro."""
    return time_text(microseconds, micro="µ")


def table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], *, style: str, sorted_by: int | None) -> str:
    """A table whose headings sort it.

    Args:
        columns: The columns.
        rows: The cells.
        style: The table's class.
        sorted_by: The column it is sorted by already, the largest first; None when it stays as it is and cannot be
            sorted.
    """
    heads = []
    for index, column in enumerate(columns):
        now = ' aria-sort="descending"' if index == sorted_by else ""
        title = text(column.title) if sorted_by is None else f'<button type="button">{text(column.title)}</button>'
        heads.append(f'<th scope="col" class="{column.style}"{now}>{title}</th>')
    lines = []
    for row in rows:
        cells = []
        for column, cell in zip(columns, row, strict=True):
            value = "" if cell.value is None else f' data-value="{text(cell.value)}"'
            cells.append(f'<td class="{column.style}"{value}>{cell.html}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    body = "\n".join(lines)
    return f'<table class="{style}"><thead><tr>{"".join(heads)}</tr></thead>\n<tbody>{body}</tbody></table>'


def layer_table(layers: Sequence[LayerRow], total_us: float) -> str:
    """The layers, the slowest first."""
    columns = [
        Column("layer"),
        Column("operator", "operator"),
        Column("type", "short"),
        Column("time", "number"),
        Column("share", "number"),
        Column("limited by", "short"),
        Column("arithmetic", "number"),
        Column("memory", "number"),
        Column("FLOP", "number"),
        Column("bytes", "number"),
        Column("FLOP/byte", "number"),
        Column("m×n×k", "short"),
        Column("tile", "short"),
        Column("tiles", "number"),
        Column("waves", "number"),
        Column("tiles used", "number"),
        Column("waves used", "number"),
        Column("aligned", "number"),
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
        Cell(time(layer.predicted_us), layer.predicted_us),
        Cell(percent(share), share),
        Cell(f'<i class="dot c-{layer.limiter}"></i>{LIMITERS[layer.limiter]}', layer.limiter),
        Cell(time(layer.math_us), layer.math_us),
        Cell(time(layer.memory_us), layer.memory_us),
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


def finding_table(findings: Sequence[Finding], total_us: float) -> str:
    """The findings, in the order given: the largest gain first."""
    columns = [
        Column("gain", "number"),
        Column("of the time", "number"),
        Column("rule", "short"),
        Column("what, and what to do", "text"),
        Column("nodes", "nodes"),
    ]
    rows = []
    for finding in findings:
        share = finding.gain_us / total_us if total_us else 0.0
        gain = f'<span class="gain">−{time(finding.gain_us)}</span>' if finding.gain_us > 0 else "–"
        rows.append(
            [
                Cell(gain, finding.gain_us),
                Cell(percent(share) if finding.gain_us > 0 else "", share),
                Cell(f'<span class="pill {finding.severity}">{text(finding.rule)}</span>', finding.rule),
                Cell(f'{text(finding.message)}<br><span class="remedy">→ {text(finding.remedy)}</span>'),
                Cell(_nodes(finding.nodes)),
            ]
        )
    return table(columns, rows, style="findings", sorted_by=0)


def _nodes(nodes: Sequence[str]) -> str:
    shown = "<br>".join(name(node, 60) for node in nodes[:_NODES])
    more = len(nodes) - _NODES
    return f'{shown}<br><span class="quiet">and {more} more</span>' if more > 0 else shown


def level_table(analysis: Analysis) -> str:
    """The levels side by side."""
    columns = [
        Column("level"),
        Column("layers", "number"),
        Column("time", "number"),
        *(Column(word, "number") for word in LIMITERS.values()),
        Column("FLOP", "number"),
        Column("bytes", "number"),
    ]
    rows = []
    for summary in analysis.levels:
        proxy = "" if summary.proxy is None else f' <span class="pill warning">PROXY: {text(summary.proxy)}</span>'
        totals = summary.totals
        limiters = [Cell(time(totals.by_limiter.get(limiter, 0.0))) for limiter in LIMITERS]
        rows.append(
            [
                Cell(LEVELS[summary.level] + proxy),
                Cell(str(summary.kernels)),
                Cell(time(totals.predicted_us)),
                *limiters,
                Cell(flop_text(totals.flop)),
                Cell(bytes_text(totals.bytes)),
            ]
        )
    return table(columns, rows, style="levels", sorted_by=None)


def batch_table(analysis: Analysis, points: Sequence[BatchPoint]) -> str:
    """The points of the batch sweep."""
    columns = [Column(title, "number") for title in ("batch", "latency", "throughput", "activations")]
    rows = [
        [
            Cell(str(point.batch)),
            Cell(time(point.predicted_us)),
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
        Column("gain", "number"),
        Column("dense", "number"),
        Column("sparse", "number"),
        Column("2:4 as it is", "short"),
        Column("why, or why not", "text"),
        Column("nodes", "nodes"),
    ]
    rows = []
    for layer in layers:
        gain = layer.dense_us - layer.sparse_us
        rows.append(
            [
                Cell(f'<span class="gain">−{time(gain)}</span>' if layer.eligible else "–", gain),
                Cell(time(layer.dense_us), layer.dense_us),
                Cell(time(layer.sparse_us), layer.sparse_us),
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


def split_bar(parts: Sequence[tuple[str, str, float, str]], total: float) -> str:
    """A bar in parts, and its key.

    Args:
        parts: Class of the colour, words, value, and value in words.
        total: What the whole bar stands for; 0 shows no bar.
    """
    if not total:
        return ""
    shown = [part for part in parts if part[2] > 0]
    pieces = "".join(
        f'<i class="{style}" style="width:{100 * value / total:.3f}%"></i>' for style, _, value, _ in shown
    )
    key = "".join(
        f'<li><i class="{style}"></i>{text(word)}: {text(amount)}'
        f' <span class="quiet">{percent(value / total)}</span></li>'
        for style, word, value, amount in shown
    )
    return f'<div class="bar">{pieces}</div><ul class="key">{key}</ul>'


def description(values: Mapping[str, Any]) -> str:
    """Names and values, lists and tables as JSON."""
    rows = []
    for key, value in values.items():
        words = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        rows.append(f"<dt>{text(key)}</dt><dd>{text(shorten(words, _LONGEST_VALUE, mark=' … '))}</dd>")
    return f"<dl>{''.join(rows)}</dl>"


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
