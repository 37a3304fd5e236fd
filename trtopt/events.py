"""Progress events. The library draws nothing: callers pass a function and draw what they like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    Attributes:
        kind: ``start`` and ``end`` of a task, ``advance`` by one unit of it, a ``detail`` of what it is at, a ``note``
            of how something was understood or what was decided, or a ``warning``.
        task: The task's name, for example ``calibrate``; for a warning, the stage it comes from.
        total: Units of work of the task, if known (``start`` only).
        text: The text of the warning or note, or a detail of the task: what it is at, or what the unit was.
    """

    kind: Literal["start", "advance", "end", "detail", "note", "warning"]
    task: str
    total: int | None = None
    text: str = ""


OnEvent = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The listener of callers who want no progress."""
