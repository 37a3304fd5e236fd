"""Whether a report may be compared with a baseline, and what differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trtopt.errors import UsageError
from trtopt.gates.facts import Facts, ModelIdentity


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
