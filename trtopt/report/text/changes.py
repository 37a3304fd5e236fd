"""Layers that became others, in rows: equal changes of layers whose names differ by numbers only in one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trtopt.report.text.blocks import Cell, Inline, Name
from trtopt.report.text.format import visible
from trtopt.report.text.names import skeleton, starred

Pair = tuple[float, float] | None
"""A figure before and after, for sums; None where it is not known."""


@dataclass(frozen=True)
class Became:
    """What became of some layers.

    Attributes:
        names: What they are called, in one column or several.
        types: The types of their arithmetic, before and after, as :func:`arrow` has them.
        kernels: Their kernels, or what became of them, in words.
        us: Their time, microseconds.
        bytes: What they move.
    """

    names: tuple[str, ...]
    types: str
    kernels: str
    us: Pair = None
    bytes: Pair = None


def together(changes: Iterable[Became]) -> list[tuple[tuple[Inline, ...], Became]]:
    """The names and the number of equal changes, and the sum of their figures; in the order given."""
    groups: dict[tuple[object, ...], list[Became]] = {}
    for item in changes:
        key = (*map(skeleton, item.names), item.types, item.kernels, item.us is None, item.bytes is None)
        groups.setdefault(key, []).append(item)
    found: list[tuple[tuple[Inline, ...], Became]] = []
    for items in groups.values():
        names = [Name(starred(each)) for each in zip(*(item.names for item in items), strict=True)]
        number = Cell(f"x{len(items)}" if len(items) > 1 else "", len(items))
        us, moved = _sum([item.us for item in items]), _sum([item.bytes for item in items])
        found.append(((*names, number), dataclasses.replace(items[0], us=us, bytes=moved)))
    return found


def _sum(pairs: Sequence[Pair]) -> Pair:
    known = [pair for pair in pairs if pair is not None]
    return (sum(pair[0] for pair in known), sum(pair[1] for pair in known)) if known else None


def arrow(before: str, after: str) -> str:
    """``fp16 -> int8``, ``14.7 -> 9.97 us`` of one unit, ``fp16`` where nothing changed."""
    if before == after:
        return visible(after)
    value, _, unit = before.rpartition(" ")
    has_unit = value[:1].isdigit() and unit == after.rpartition(" ")[2]
    return visible(f"{value if has_unit else before or '?'} -> {after or '?'}")


def types_arrow(before: Iterable[str], after: Iterable[str]) -> str:
    """The types of arithmetic before and after; ``none`` of copies."""
    return arrow(" ".join(before) or "none", " ".join(after) or "none")
