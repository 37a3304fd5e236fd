"""What a run takes, and what it warned of."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from trtopt.events import Event, OnEvent


@dataclass
class Clock:
    """Seconds by stage, and the warnings met on the way."""

    on_event: OnEvent
    seconds: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def listen(self, event: Event) -> None:
        """Pass an event on, and keep it if it is a warning; one that was said is not said again."""
        if event.kind == "warning":
            if event.text in self.warnings:
                return
            self.warnings.append(event.text)
        self.on_event(event)

    def warn(self, stage: str, text: str) -> None:
        """Raise a warning of the pipeline itself."""
        self.listen(Event("warning", stage, text=text))

    def note(self, stage: str, text: str) -> None:
        """Say how something was understood, or what was decided that the user did not say."""
        self.on_event(Event("note", stage, text=text))

    def say_taken(self, text: str) -> None:
        """Say how samples were understood; nothing where there is nothing to say."""
        if text:
            self.note("samples", f"samples: {text}")

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
