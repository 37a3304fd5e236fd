"""A report and its baseline: whether the two may be compared, what differs, and what changed between their kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from trtopt.errors import UsageError
from trtopt.gates.facts import Facts, Kernel, ModelIdentity
from trtopt.gates.limits import BITS
from trtopt.profiling.compare import aligned
from trtopt.report.schema.check import LayerChange


def comparable(after: Facts, before: Facts) -> tuple[str, ...]:
    """What differs between a report and its baseline and may explain a difference, one sentence each.

    The same model is one with the same inputs and outputs: weights change with every training, files are moved.

    Args:
        after: The report.
        before: The baseline.

    Raises:
        UsageError: They are of other kinds (predicted against measured), models, GPUs or compilers, or hold for other
            input shapes.
    """
    for what, old, new in _identity(after, before):
        if old != new:
            raise UsageError(
                f"The baseline is of another {what}: {old or 'none'}, the report of {new or 'none'}",
                where=f"{before.checked.report}, for {after.checked.report}",
                remedy="give a baseline that was made in the same way, or make it anew on the branch compared with",
            )
    return tuple(_notes(after, before))


def _identity(after: Facts, before: Facts) -> Iterator[tuple[str, str, str]]:
    """What has to be equal: its name, in the baseline, in the report. Left out where a side does not say."""
    yield "kind", before.checked.schema, after.checked.schema
    if before.model is not None and after.model is not None:
        yield "model, by its inputs", _inputs(before.model), _inputs(after.model)
    if before.output_names and after.output_names:
        yield "model, by its outputs", _names(before), _names(after)
    yield "GPU", before.checked.gpu, after.checked.gpu
    if before.compiler and after.compiler:
        yield "backend", before.compiler, after.compiler
    if before.shapes and after.shapes:
        yield "shape", _shapes(before.shapes), _shapes(after.shapes)


def _inputs(model: ModelIdentity) -> str:
    """The inputs in words; a symbol's name says nothing."""
    return ", ".join(
        f"{item.name}: {item.dtype} {'x'.join(str(dim) if isinstance(dim, int) else '?' for dim in item.shape)}"
        for item in model.inputs
    )


def _names(facts: Facts) -> str:
    return ", ".join(sorted(facts.output_names))


def _shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name}:{'x'.join(map(str, dims))}" for name, dims in sorted(shapes.items()))


def _notes(after: Facts, before: Facts) -> Iterator[str]:
    old, new = before.checked, after.checked
    if old.sha256 != new.sha256:
        yield f"the model changed: sha256 {old.sha256[:12]} in the baseline, {new.sha256[:12]} here"
    for what, first, second in (
        ("the precision asked for", old.precision, new.precision),
        ("the compiler", old.backend, new.backend),
        ("the samples of the accuracy", before.accuracy_samples, after.accuracy_samples),
    ):
        if first != second:
            yield f"{what} changed: {first or 'none'} in the baseline, {second or 'none'} here"


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
