"""How near its limit an engine is, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtopt.report.schema.analysis import Excess, ExcessReason, Limit
from trtopt.report.text.format import (
    bytes_text,
    left_out,
    line,
    percent,
    shorten,
    table,
    time_text,
    visible,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

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
_NAME_WIDTH = 34


def limit_text(limit: Limit, *, micro: str = "u") -> str:
    """The limit in one line: ``412 us of 903 us (46 %): products 401 us; 53.1 MB of weights, inputs and outputs``."""
    share = percent(limit.limit_us / limit.predicted_us) if limit.predicted_us else "all"
    times = [time_text(us, micro=micro) for us in (limit.limit_us, limit.predicted_us, limit.products_us)]
    moved = f"{bytes_text(limit.needed_bytes)} of weights, inputs and outputs"
    return f"{times[0]} of {times[1]} ({share}): products {times[2]}; {moved}"


def by_reason(limit: Limit) -> list[tuple[ExcessReason, int, float]]:
    """What lies between the limit and the prediction: the reason, kernels and microseconds, most time first."""
    sums: dict[ExcessReason, tuple[int, float]] = {}
    for item in limit.kernels:
        kernels, us = sums.get(item.reason, (0, 0.0))
        sums[item.reason] = kernels + item.kernels, us + item.excess_us
    return [(name, *found) for name, found in sorted(sums.items(), key=lambda item: -item[1][1])]


def excess_name(item: Excess) -> str:
    """Which kernels: their operator and the name of the first."""
    return f"{visible(item.op)} {visible(item.layers[0])}"


def limit_section(limit: Limit | None) -> list[RenderableType]:
    """The limit as a terminal shows it; empty without one."""
    if limit is None or not limit.kernels:
        return []
    rows = [
        (
            time_text(item.excess_us),
            percent(item.excess_us / limit.predicted_us) if limit.predicted_us else "",
            str(item.kernels),
            item.dtype,
            shorten(excess_name(item), _NAME_WIDTH),
            REASONS[item.reason],
        )
        for item in limit.kernels[:_MOST_ROWS]
    ]
    rest = limit.kernels[_MOST_ROWS:]
    left = left_out(len(rest), "group", f" of equal kernels with {time_text(sum(item.excess_us for item in rest))}")
    sums = ", ".join(f"{REASONS[name]} {time_text(us)} ({kernels})" for name, kernels, us in by_reason(limit))
    return [
        line(f"necessary: {limit_text(limit)}"),
        table(("beyond", "share", "kernels", "type", "the first of them", "why"), rows, right=(0, 1, 2), gap=2),
        *left,
        line(f"by reason (kernels): {sums}"),
    ]
