"""What changed between the kernels of two reports, aligned by the ONNX nodes they compute."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trtopt.errors import UsageError
from trtopt.gates.facts import Facts, Kernel
from trtopt.gates.limits import BITS
from trtopt.profiling.compare import aligned
from trtopt.report.schema.check import LayerChange

_LEAST_US = 0.05
"""Differences below the printed digit are none."""


def changes(before: Facts, after: Facts) -> tuple[LayerChange, ...]:
    """Every region whose kernels, types or time changed.

    Raises:
        UsageError: The two have no layer in common: they are of different networks.
    """
    found = list(aligned(before.layers, after.layers, lambda kernel: kernel.signature))
    if before.layers and after.layers and not any(old and new for old, new, _ in found):
        raise UsageError(
            "The report and its baseline have no layer in common",
            where=f"{after.checked.report} ({after.layers[0].name}, ...) and {before.checked.report}"
            f" ({before.layers[0].name}, ...)",
            remedy="give a baseline of the same network",
        )
    return tuple(change for old, new, _ in found if _is_change(change := _change(old, new)))


def _change(before: Sequence[Kernel], after: Sequence[Kernel]) -> LayerChange:
    nodes = dict.fromkeys(name for kernel in (*after, *before) for name in (kernel.onnx_nodes or (kernel.name,)))
    return LayerChange(
        tuple(sorted(nodes, key=lambda name: name.startswith("trtopt/") or "quantizelinear" in name.lower())),
        (len(before), len(after)),
        (_dtypes(before), _dtypes(after)),
        (_time(before), _time(after)),
    )


def _dtypes(kernels: Sequence[Kernel]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(kernel.dtype for kernel in kernels))


def _time(kernels: Sequence[Kernel]) -> float | None:
    times = [kernel.us for kernel in kernels if kernel.us is not None]
    return math.fsum(times) if len(times) == len(kernels) else None


def _is_change(change: LayerChange) -> bool:
    return change.kernels[0] != change.kernels[1] or change.dtypes[0] != change.dtypes[1] or slower(change) != 0


def slower(change: LayerChange) -> float:
    """Microseconds that it takes longer than before; 0 where that is not known, or not visible."""
    before, after = change.us
    more = 0.0 if before is None or after is None else after - before
    return more if abs(more) >= _LEAST_US else 0.0


def added(change: LayerChange) -> int:
    """Kernels that it has more than before."""
    return change.kernels[1] - change.kernels[0]


def widened(change: LayerChange) -> int:
    """Bits that its narrowest type has more than before; below 0 where it became narrower."""
    before, after = ([BITS[dtype] for dtype in dtypes if dtype in BITS] for dtypes in change.dtypes)
    return min(after) - min(before) if before and after else 0
