"""What a compiler or its runtime says: one logger for each, alive as long as the process.

TensorRT keeps the first logger that it is given, for its registry of plugins too, and the Python interface does not
keep it alive: with a logger for each engine, the next message after the first engine is gone is written to freed
memory (SIGSEGV, seen with TensorRT for RTX 1.7.1).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

Sink = Callable[[Any, str], None]
"""Called with a message's severity and text."""

_LOGGERS: dict[str, Any] = {}
_OPEN: list[tuple[int, Sink]] = []
"""Who listens, and in which thread; the last of a thread gets its messages."""


def logger_of(trt: Any) -> Any:
    """The logger to give to everything of a backend's module."""
    if trt.__name__ not in _LOGGERS:
        _LOGGERS.setdefault(trt.__name__, _new_logger(trt))
    return _LOGGERS[trt.__name__]


@contextlib.contextmanager
def heard(sink: Sink) -> Iterator[None]:
    """Give ``sink`` what is said by calls of this thread.

    What is said by threads of the runtime's own, which nobody listens to, goes to the one who began to listen last.
    """
    entry = (threading.get_ident(), sink)
    _OPEN.append(entry)
    try:
        yield
    finally:
        _OPEN.remove(entry)


def _new_logger(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            _pass_on(severity, message)

    return Logger()


def _pass_on(severity: Any, message: str) -> None:
    listening = tuple(_OPEN)
    own = [sink for thread, sink in listening if thread == threading.get_ident()]
    for sink in (own or [sink for _, sink in listening])[-1:]:
        sink(severity, message)
