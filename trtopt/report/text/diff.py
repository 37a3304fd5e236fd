"""What two compilers made of one model, as it is shown. Everything that is cut here is whole in the JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from trtopt.report.schema.diff import DiffReport, DiffSide, RegionDiff
from trtopt.report.text.blocks import Block, Column, Line, Name, Section, Table, View, bullets, numbers
from trtopt.report.text.changes import Became, arrow, together, types_arrow
from trtopt.report.text.format import bytes_text, count, percent, time_text, visible
from trtopt.report.text.names import Labels

_MOST = 20
_TITLES = {
    **{"Fuses no more": "parted", "Fuses now": "joined", "Fuses with others now": "parted"},
    **{"More kernels": "", "Fewer kernels": "", "Other bytes, types or times": ""},
}
"""The kinds of regions, and the field with the nodes that each is about; empty where it is about all."""
_HEADS = {
    "parted": ("node", "which shared a kernel with"),
    "joined": ("node", "shares a kernel with"),
    "": ("nodes",),
}


def view(found: DiffReport) -> View:
    """The verdict, the two sides, and what changed by node."""
    labels = Labels(found.names)
    sections = (
        Section("", (_sides(found),)),
        Section("Refused", bullets([_refusal(side) for side in (found.before, found.after) if side.failure])),
        *(
            Section(title, _regions([item for item in found.changes if _title(item) == title], which, labels))
            for title, which in _TITLES.items()
        ),
        Section("Notes", bullets(found.notes)),
    )
    return View(Line(headline(found), "bad" if found.is_failed else "good"), (), sections, kind="trtopt diff")


def headline(found: DiffReport) -> str:
    """By how much the second is slower or faster, or that one refuses the model."""
    sides = found.after, found.before
    differ = called(found.after) != called(found.before)
    names = " against ".join(visible(called(side) if differ else side.name) for side in sides)
    failed = [side for side in (found.before, found.after) if side.failure is not None]
    if failed:
        return f"{names}: {' and '.join(visible(called(side)) for side in failed)} made no engine"
    change = found.slowdown
    if change is None:
        return f"{names}: no predicted time"
    if not found.changes:
        return f"{names}: nothing differs"
    word = "slower" if change > 0 else "faster"
    amount = f"{percent(abs(change))} {word} by prediction" if abs(change) >= 0.0005 else "as fast by prediction"
    limit = f", more than {percent(found.max_slowdown or 0)}" if found.is_failed else ""
    return f"{names}: {amount}{limit}; differs in {count(len(found.changes), 'region')}"


def called(side: DiffSide) -> str:
    """The compiler and its version where that is known, else what the user called it."""
    return side.compiler or side.name


def _sides(found: DiffReport) -> Table:
    rows = []
    for side in (found.before, found.after):
        us = "" if side.predicted_us is None else time_text(side.predicted_us)
        moved = "" if side.bytes is None else bytes_text(side.bytes)
        kernels = "" if side.kernels is None else str(side.kernels)
        rows.append((Name(side.name), visible(side.compiler), kernels, moved, us, str(len(side.host_nodes) or "")))
    shown = 6 if any(row[-1] for row in rows) else 5
    columns = (
        Column("", "name"),
        Column("compiler"),
        *numbers("kernels", "bytes", "predicted", "left to the host"),
    )
    return Table(columns[:shown], tuple(row[:shown] for row in rows))


def _refusal(side: DiffSide) -> str:
    if side.failure is None:
        return ""
    return f"{visible(called(side))}: {visible(side.failure.what)}, at {visible(side.failure.where)}"


def _title(item: RegionDiff) -> str:
    """Under which title a region stands."""
    if item.parted or item.joined:
        fused = "Fuses no more" if item.parted else "Fuses now"
        return "Fuses with others now" if item.parted and item.joined else fused
    more = len(item.kernels[1]) - len(item.kernels[0])
    return "More kernels" if more > 0 else "Fewer kernels" if more else "Other bytes, types or times"


def _regions(items: Sequence[RegionDiff], which: str, labels: Labels) -> tuple[Block, ...]:
    """The regions of a title; beside the nodes that parted or joined (``which``) those they did so from."""
    if not items:
        return ()
    changes = []
    for item in items:
        own: tuple[str, ...] = getattr(item, which) if which else item.nodes
        rest = [labels.region([name for name in item.nodes if name not in own])] if which else []
        kernels = arrow(*(str(len(kernels)) for kernels in item.kernels))
        copies = f", {arrow(*map(str, item.copies))} copies" if any(item.copies) else ""
        names = (labels.region(own), *rest)
        changes.append(Became(names, types_arrow(*item.dtypes) + copies, kernels, item.us, item.bytes))
    rows = []
    for called, change in together(changes):
        moved = [bytes_text(int(number)) for number in change.bytes or ()]
        times = [time_text(us) for us in change.us or ()]
        rows.append((*called, change.kernels, change.types, arrow(*moved), arrow(*times)))
    heads = [Column(title, "name") for title in _HEADS[which]]
    on: Literal["", "wide"] = "wide" if which else ""
    more = (*numbers("x", "kernels"), Column("type", on=on), *numbers("bytes", on=on), *numbers("time"))
    return (Table((*heads, *more), tuple(rows), _MOST, "place", gap=2),)
