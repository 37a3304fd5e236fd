"""The answers of a search's oracle, kept in a file as they come, so that a killed search goes on where it was."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtopt.cache.entries import Lines
from trtopt.cache.folder import SEARCH
from trtopt.events import OnEvent
from trtopt.precision.search.space import Evaluation, Mix, Oracle


@dataclass
class Checkpoint:
    """An oracle that asks another one, and remembers in a file what it said.

    Answers do not depend on the budget, so that a search with another one finds them again.

    Attributes:
        oracle: Who is asked what is not in the file.
        key: A hash of what the answers depend on: the model and the samples, the metric, the regions with their nodes
            and types, the options, the backend, its version, the GPU, the code.
        folder: Where the cache lies; None for ``~/.cache/trtopt``, which need not be writable.
        on_event: Told why a file was not used, or not written.
        path: The file, named by the key.
        reused: Answers taken from the file.
    """

    oracle: Oracle
    key: str
    folder: str | Path | None
    on_event: OnEvent
    path: Path = field(init=False)
    reused: int = 0
    _known: dict[tuple[str, Mix], Any] = field(default_factory=dict)
    _from_file: set[tuple[str, Mix]] = field(default_factory=set)
    _lines: Lines = field(init=False)

    def __post_init__(self) -> None:
        self._lines = Lines(SEARCH, self.folder, self.on_event, self.key, synced=True)
        self.path = self._lines.path(self.key)
        self._known.update(item for record in self._lines.load() if (item := _read(record)) is not None)
        self._from_file = set(self._known)

    def evaluate(self, mix: Mix) -> Evaluation:
        """As :meth:`~trtopt.precision.search.space.Oracle.evaluate`."""

        def ask() -> list[float | None]:
            found = self.oracle.evaluate(mix)
            return [_plain(found.drop), _plain(found.error)]

        drop, error = self._answer("evaluate", mix, ask)
        return Evaluation(_number(drop), _number(error))

    def time_us(self, mix: Mix) -> float:
        """As :meth:`~trtopt.precision.search.space.Oracle.time_us`."""
        return _number(self._answer("time_us", mix, lambda: _plain(self.oracle.time_us(mix))))

    def rank(self, mix: Mix) -> Mapping[str, float]:
        """As :meth:`~trtopt.precision.search.space.Oracle.rank`."""
        found = self._answer(
            "rank", mix, lambda: {name: _plain(error) for name, error in self.oracle.rank(mix).items()}
        )
        return {name: _number(error) for name, error in found.items()}

    def _answer(self, question: str, mix: Mix, ask: Callable[[], Any]) -> Any:
        key = question, mix
        if key in self._from_file:
            self._from_file.remove(key)
            self.reused += 1
        if key not in self._known:
            self._known[key] = ask()
            self._lines.add({"ask": question, "narrow": mix.narrow, "types": mix.types, "answer": self._known[key]})
        return self._known[key]


def _read(item: Mapping[str, Any]) -> tuple[tuple[str, Mix], Any] | None:
    """A question and its answer; None for what is neither."""
    try:
        question, answer = str(item["ask"]), item["answer"]
        mix = Mix.of(item["narrow"], {str(name): dtype for name, dtype in item["types"].items()})
        hash(mix)
        if question == "evaluate":
            _number(answer[0]), _number(answer[1])
        elif question == "time_us":
            _number(answer)
        else:
            [_number(error) for error in answer.values()]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None
    return (question, mix), answer


def _plain(number: float) -> float | None:
    """JSON has no infinity; a number that is not finite is worse than all others."""
    return float(number) if math.isfinite(number) else None


def _number(value: float | None) -> float:
    return math.inf if value is None else float(value)
