"""How near its limit an engine is, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trtopt.report.schema.analysis import Excess, ExcessReason, LayerRow, Limit
from trtopt.report.text.blocks import Block, Cell, Column, Inline, Name, Table, line, numbers, sum_of
from trtopt.report.text.format import bytes_text, percent, time_text, visible
from trtopt.report.text.names import Labels

REASONS: dict[ExcessReason, str] = {
    "launch": "launch",
    "sync": "waits of streams",
    "copy": "host copies",
    "layout": "only copies",
    "fp32": "FP32 among narrower ones",
    "quantize": "quantizes alone",
    "element-wise": "element-wise alone",
    "reduction": "norm, reduction, pool alone",
    "activations": "moves activations",
    "read-again": "reads again what was read",
    "bandwidth": "short of the bandwidth",
    "peak": "short of the peak",
}
"""Why a kernel takes longer than its necessary work; docs/analyze.md has each in a sentence."""

_MOST_ROWS = 6


def limit_text(limit: Limit) -> str:
    """The limit in one line: ``412 us of 903 us (46 %): products 401 us; 53.1 MB of weights, inputs and outputs``."""
    share = percent(limit.limit_us / limit.predicted_us) if limit.predicted_us else "all"
    times = [time_text(us) for us in (limit.limit_us, limit.predicted_us, limit.products_us)]
    moved = f"{bytes_text(limit.needed_bytes)} of weights, inputs and outputs"
    return f"{times[0]} of {times[1]} ({share}): products {times[2]}; {moved}"


def by_reason(limit: Limit) -> list[tuple[ExcessReason, int, float]]:
    """What lies between the limit and the prediction: the reason, kernels and microseconds, most time first."""
    sums: dict[ExcessReason, tuple[int, float]] = {}
    for item in limit.kernels:
        kernels, us = sums.get(item.reason, (0, 0.0))
        sums[item.reason] = kernels + item.kernels, us + item.excess_us
    return [(name, *found) for name, found in sorted(sums.items(), key=lambda item: -item[1][1])]


def limit_blocks(limit: Limit | None, layers: Sequence[LayerRow], labels: Labels) -> list[Block]:
    """The limit, and what ``layers`` take beyond it; empty without one."""
    if limit is None or not limit.kernels:
        return []
    nodes = {layer.name: layer.onnx_nodes for layer in layers}
    columns = (
        *(*numbers("beyond"), *numbers("share", on="wide"), *numbers("predicted", on="page"), *numbers("kernels")),
        *(Column("type", on="wide"), Column("operator", "short"), Column("the first of them", "name"), Column("why")),
    )
    sums = ", ".join(f"{REASONS[name]} {time_text(us)} ({kernels})" for name, kernels, us in by_reason(limit))
    return [
        line(f"necessary: {limit_text(limit)}"),
        Table(
            columns,
            tuple(_row(item, limit.predicted_us, _name(item, nodes, labels)) for item in limit.kernels),
            *(_MOST_ROWS, "group"),
            rest=lambda rows: f" of equal kernels with {time_text(sum_of(rows, 0))}",
            sorted_by=0,
            style="layers",
            gap=2,
        ),
        line(f"by reason (kernels): {sums}"),
    ]


def _name(item: Excess, nodes: Mapping[str, tuple[str, ...]], labels: Labels) -> Name:
    return labels.of(nodes.get(item.layers[0], ()), item.layers[0])


def _row(item: Excess, total_us: float, name: Name) -> tuple[Inline, ...]:
    return (
        Cell(time_text(item.excess_us), item.excess_us),
        Cell(percent(item.excess_us / total_us) if total_us else "", item.excess_us),
        Cell(time_text(item.predicted_us), item.predicted_us),
        Cell(str(item.kernels), item.kernels),
        *(visible(item.dtype), visible(item.op), name, REASONS[item.reason]),
    )
