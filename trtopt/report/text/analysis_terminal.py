"""An analysis as a terminal shows it. Everything that is cut here is whole in the JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trtopt.report.schema.analysis import Analysis, BatchPoint, BatchSweep, Finding, LayerRow
from trtopt.report.text.analysis import (
    BACKENDS,
    LEVELS,
    LIMITERS,
    NO_MORE,
    batch_notes,
    by_gain,
    by_reason,
    flop_text,
    levels_text,
    model_name,
    paying,
    product_text,
    proxies,
    rates,
    shorten,
    slowest,
    sparse_weights_text,
    sparsity_text,
    tile_text,
    time_text,
    visible,
)
from trtopt.report.text.numbers import bytes_text, count, pairs, percent, some, table

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table

    from trtopt.hardware.spec import GpuSpec

_MOST_LAYERS = 12
_MOST_FINDINGS = 10
_MOST_BATCHES = 12
_MOST_OPERATORS = 12
_MOST_REASONS = 12
_NAME = 40
"""Characters of a node's name where it is one of several."""
_LEAST_NAME, _MOST_NAME = 16, 60
_OTHER_COLUMNS = 74
"""Columns the table of layers needs beside the name."""
_BAR = 24


def render(analysis: Analysis, gpu: GpuSpec) -> RenderableType:
    """The analysis, to be printed by a ``rich`` console of 80 columns or more.

    Args:
        analysis: What was found.
        gpu: The GPU it is about, for its peaks.
    """
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    parts: list[RenderableType] = [Text(headline(analysis), style="bold")]
    parts += [Text(line, style="bold yellow") for line in proxies(analysis)]
    sections: tuple[tuple[str, list[RenderableType]], ...] = (
        ("Predicted", _predicted(analysis, gpu)),
        ("Time by limiter", _split(analysis.totals.by_limiter, LIMITERS)),
        ("Time by kind of kernel", _split(analysis.totals.by_kind, {})),
        ("Slowest layers", _layers(analysis)),
        ("Findings", _findings(analysis)),
        ("2:4 sparsity", _sparsity(analysis)),
        ("Batch sweep", _batches(analysis)),
        ("Levels", _levels(analysis)),
        ("Without a cost, and in no sum", _uncosted(analysis)),
        ("Warnings", [Text(f"- {visible(line)}", style="yellow") for line in analysis.warnings]),
    )
    for title, body in sections:
        if body:
            parts += [Text(""), Text(title, style="bold")]
            parts += [Padding(item, (0, 0, 0, 2), expand=False) for item in body]
    return Group(*parts)


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
        ("time", f"{time_text(totals.predicted_us)} in {count(len(analysis.layers), 'layer')}"),
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
    body: list[RenderableType] = [pairs(rows)]
    if not memory.fits:
        over = bytes_text(needed - memory.device_bytes)
        body.append(_plain(f"the GPU lacks {over} of memory", "bold red"))
    return body


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
    body: list[RenderableType] = [_LayerTable(rows[:_MOST_LAYERS], analysis.totals.predicted_us)]
    if len(rows) > _MOST_LAYERS:
        rest = sum(row.predicted_us for row in rows[_MOST_LAYERS:])
        body.append(_plain(f"and {count(len(rows) - _MOST_LAYERS, 'more layer')} with {time_text(rest)}; {NO_MORE}"))
    return body


class _LayerTable:
    """The table of layers: the names get the width the terminal has left."""

    def __init__(self, layers: Sequence[LayerRow], total_us: float) -> None:
        self.layers = layers
        self.total_us = total_us

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.cells import cell_len

        width = min(max(options.max_width - _OTHER_COLUMNS, _LEAST_NAME), _MOST_NAME)
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
                    percent(layer.predicted_us / self.total_us) if self.total_us else "",
                )
            )
        headers = ("layer", "op", "type", "m x n x k", "tile, waves", "limiter", "time", "share")
        yield _table(headers, rows, right=(6, 7))


def _findings(analysis: Analysis) -> list[RenderableType]:
    findings = by_gain(analysis.findings)
    rows = [_finding(finding) for finding in findings[:_MOST_FINDINGS]]
    if not rows:
        return []
    body: list[RenderableType] = [pairs(rows)]
    if len(findings) > _MOST_FINDINGS:
        body.append(_plain(f"and {count(len(findings) - _MOST_FINDINGS, 'more finding')}; {NO_MORE}"))
    body.append(_plain("gains are not additive; trtopt explain RULE says why and how"))
    return body


def _finding(finding: Finding) -> tuple[str, str]:
    gain = f"-{time_text(finding.gain_us)}" if finding.gain_us > 0 else finding.severity
    nodes = [shorten(visible(node), _NAME) for node in finding.nodes]
    where = f" ({some(nodes, 2)})" if nodes else ""
    return gain, f"{finding.rule}: {visible(finding.message)}{where}\n> {visible(finding.remedy)}"


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
            some([shorten(visible(node), _MOST_NAME) for node in row.nodes], 1),
            "yes" if row.is_sparse else "",
            time_text(row.dense_us),
            time_text(row.sparse_us),
            percent(1 - row.sparse_us / row.dense_us),
        )
        for row in layers[:_MOST_LAYERS]
    ]
    if rows:
        body.append(_table(("layer", "2:4", "dense", "sparse", "gain"), rows, right=(2, 3, 4)))
    if len(layers) > _MOST_LAYERS:
        body.append(_plain(f"and {count(len(layers) - _MOST_LAYERS, 'more layer')}; {NO_MORE}"))
    reasons = [
        (
            verdict,
            f"{count(len(nodes), 'node')}: {visible(reason)}"
            f" ({some([shorten(visible(node), _NAME) for node in nodes], 2)})",
        )
        for verdict, reason, nodes in by_reason(found)
    ]
    body.append(pairs(reasons[:_MOST_REASONS]))
    if len(reasons) > _MOST_REASONS:
        body.append(_plain(f"and {count(len(reasons) - _MOST_REASONS, 'more reason')}; {NO_MORE}"))
    body.append(_plain(found.note))
    return body


def _batches(analysis: Analysis) -> list[RenderableType]:
    sweep = analysis.batch_sweep
    if sweep is None or not sweep.points:
        return []
    rows = [
        (
            str(point.batch),
            time_text(point.predicted_us),
            f"{point.throughput:,.0f}/s",
            bytes_text(point.activation_bytes),
            batch_notes(analysis, point),
        )
        for point in _shown(sweep)
    ]
    headers = ("batch", "latency", "throughput", "activations", "")
    body: list[RenderableType] = [_table(headers, rows, right=(0, 1, 2, 3))]
    left = len(sweep.points) - len(rows)
    if left:
        body.append(_plain(f"and {count(left, 'more size')} between them; {NO_MORE}"))
    if sweep.budget_us is not None and sweep.best_within_budget is None:
        body.append(_plain(f"no batch of the sweep meets the budget of {time_text(sweep.budget_us)}", "yellow"))
    elif sweep.budget_us is not None:
        body.append(_plain(f"within {time_text(sweep.budget_us)}: batch {sweep.best_within_budget}"))
    body.append(_plain(f"batch {sweep.knee} is the smallest with 90 % of the best throughput"))
    return body


def _shown(sweep: BatchSweep) -> list[BatchPoint]:
    """Points evenly spread over the doublings of the batch, the first, the last and the named ones among them."""
    if len(sweep.points) <= _MOST_BATCHES:
        return list(sweep.points)
    low, high = math.log2(sweep.points[0].batch), math.log2(sweep.points[-1].batch)
    slots = _MOST_BATCHES - 3
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
            time_text(summary.totals.predicted_us),
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
        (
            shorten(visible(group.op), _NAME),
            f"{count(len(group.nodes), 'node')}: {some([shorten(visible(node), _NAME) for node in group.nodes], 2)}",
        )
        for group in groups[:_MOST_OPERATORS]
    ]
    if not rows:
        return []
    body: list[RenderableType] = [pairs(rows)]
    if len(groups) > _MOST_OPERATORS:
        body.append(_plain(f"and {count(len(groups) - _MOST_OPERATORS, 'more operator')}; {NO_MORE}"))
    return body


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> Table:
    """As :func:`~trtopt.report.text.numbers.table`, closer together: eight columns have to fit. No empty last one."""
    if not headers[-1] and not any(row[-1] for row in rows):
        headers, rows = headers[:-1], [row[:-1] for row in rows]
    result = table(headers, rows, right=right)
    result.padding = (0, 2, 0, 0)
    return result


def _plain(text: str, style: str = "") -> RenderableType:
    from rich.text import Text

    return Text(text, style=style)
