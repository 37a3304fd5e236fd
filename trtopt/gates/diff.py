"""What two compilers made of one model: which nodes share kernels no more, what is copied and moved, and the time.

Functions of two reports; :mod:`trtopt.fleet.compilers` makes the reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from trtopt.engine.layers import constant_bytes
from trtopt.engine.limit import COPIES
from trtopt.gates.check import comparable
from trtopt.gates.facts import facts_of
from trtopt.profiling.compare import aligned
from trtopt.report.schema.analysis import WITHOUT_KERNEL, LayerRow
from trtopt.report.schema.build import BuildReport
from trtopt.report.schema.diff import DiffReport, DiffSide, RegionDiff

_LEAST_US = 0.05
"""Differences below the printed digit are none."""


def diff_of(
    before: BuildReport, after: BuildReport, names: tuple[str, str], max_slowdown: float | None = None
) -> DiffReport:
    """Compare two builds of one model.

    Args:
        before: The build by the first compiler.
        after: That by the second.
        names: What messages call them.
        max_slowdown: How much slower, as a share, the second may be; None for any.

    Raises:
        UsageError: They are of other models, GPUs, backends or shapes.
    """
    facts = [facts_of(report, Path(name)) for report, name in zip((before, after), names, strict=True)]
    notes = [note for note in comparable(facts[1], facts[0]) if not note.startswith("the compiler changed")]
    silent = [report for report in (before, after) if not _lists_constants(report)]
    old, new = (_kernels(report, constants=not silent) for report in (before, after))
    sides = [side_of(before, names[0], old), side_of(after, names[1], new)]
    for report in silent:
        said = "does not list constants: bytes are those of activations, and its times without reading weights"
        notes.append(f"{facts_of(report, Path()).checked.backend} {said}")
    if any(side.predicted_us is None for side in sides):
        notes.append("the layers of an engine are not known: nothing is said of its kernels")
    return DiffReport(
        {"path": str(after.model.get("path", "")), "sha256": str(after.model.get("sha256", ""))},
        facts[1].checked.gpu,
        after.precision.requested,
        sides[0],
        sides[1],
        changes_of(old, new),
        max_slowdown,
        tuple(notes),
        {**before.names, **after.names},
    )


def side_of(report: BuildReport, name: str, kernels: Sequence[LayerRow] = ()) -> DiffSide:
    """What one report says of the whole engine."""
    engine = report.engine
    compiler = "" if engine is None else f"{engine.backend} {engine.backend_version}"
    refused = () if report.host is None else report.host.reasons
    if report.analysis is None:
        return DiffSide(name, compiler, None if engine is None else engine.kernels, host_nodes=refused)
    rows = kernels or _kernels(report, constants=True)
    moved, us = sum(row.bytes for row in rows), report.analysis.totals.predicted_us
    return DiffSide(name, compiler, len(rows), moved, us, refused)


def _lists_constants(report: BuildReport) -> bool:
    """Whether the compiler says what constants its kernels read: TensorRT for RTX 1.4 does not."""
    layers = None if report.engine is None else report.engine.layers
    return not layers or any(layer.constants for layer in layers)


def _kernels(report: BuildReport, *, constants: bool) -> tuple[LayerRow, ...]:
    """The rows that are kernels, with the bytes of their constants or without."""
    rows = () if report.analysis is None else report.analysis.layers
    found = tuple(row for row in rows if row.kind not in WITHOUT_KERNEL)
    layers = None if report.engine is None else report.engine.layers
    if constants or layers is None:
        return found
    own = {layer.name: constant_bytes(layer) for layer in layers}
    # Of a table a row counts what is read of it, which is not known apart.
    return tuple(
        replace(row, bytes=row.bytes - own.get(row.name, 0)) if own.get(row.name, 0) <= row.bytes else row
        for row in found
    )


def changes_of(before: Sequence[LayerRow], after: Sequence[LayerRow]) -> tuple[RegionDiff, ...]:
    """Every region whose kernels differ, the one that became slower by most first; nothing of equal kernels."""
    groups = aligned(before, after, lambda row: (row.kind, row.flop) if row.flop else (row.op, row.bytes))
    found = [_region(old, new) for old, new, _ in groups]
    return tuple(sorted(filter(_is_change, found), key=lambda item: item.us[0] - item.us[1]))


def _region(before: Sequence[LayerRow], after: Sequence[LayerRow]) -> RegionDiff:
    old, new = (tuple(row.onnx_nodes or (row.name,) for row in rows) for rows in (before, after))
    nodes = dict.fromkeys(name for kernel in (*old, *new) for name in kernel)
    return RegionDiff(
        tuple(sorted(nodes, key=lambda name: name.startswith("trtopt/"))),
        (old, new),
        tuple(_parted(old, new)),
        tuple(_parted(new, old)),
        (_copies(before), _copies(after)),
        (_dtypes(before), _dtypes(after)),
        (sum(row.bytes for row in before), sum(row.bytes for row in after)),
        (sum(row.predicted_us for row in before), sum(row.predicted_us for row in after)),
    )


def _is_change(item: RegionDiff) -> bool:
    pairs = (item.dtypes, item.bytes, item.copies, tuple(map(len, item.kernels)))
    differs = any(old != new for old, new in pairs) or abs(item.us[1] - item.us[0]) >= _LEAST_US
    return differs or bool(item.parted or item.joined)


def _copies(rows: Sequence[LayerRow]) -> int:
    return sum(row.op in COPIES for row in rows)


def _dtypes(rows: Sequence[LayerRow]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(row.dtype for row in rows))


def _parted(before: Sequence[Sequence[str]], after: Sequence[Sequence[str]]) -> Iterator[str]:
    """Nodes of one kernel before that no kernel after computes together with the kernel's first node, each once.

    A node that several kernels compute is together with the nodes of each of them.
    """
    seen: set[str] = set()
    known = {name for kernel in after for name in kernel}
    for kernel in before:
        left = [name for name in kernel if name in known]
        reached = set(left[:1])
        grown = True
        while grown:
            more = {name for other in after if reached & set(other) for name in other if name in left} - reached
            reached |= more
            grown = bool(more)
        for name in left:
            if name not in reached and name not in seen:
                seen.add(name)
                yield name
