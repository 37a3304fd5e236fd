"""Numbers and names as people read them, in a terminal, a pipe or a page."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

NO_MORE = "all of them are in the JSON"
_MICRO = re.compile(r"(?<=\d) us\b")


def bytes_text(count: int) -> str:
    """A number of bytes: ``2.6 MB``. 1 MB = 1e6 bytes."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"


def percent(share: float) -> str:
    """A share in percent: ``93.4 %``; never rounded to 100 or 0 when it is not."""
    if 0.999 <= share < 1:
        return "99.9 %"
    if 0 < share < 0.001:
        return "0.1 %"
    return f"{100 * share:.1f} %" if 0 < share < 1 else f"{100 * share:.0f} %"


def seconds_text(seconds: float) -> str:
    """A duration: ``0.42 s``, ``12.5 s``, ``3 min 20 s``; never ``60 s`` or ``10.00 s``."""
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    return f"{minutes} min {rest} s"


def decibels(value: float) -> str:
    """An SQNR: ``42.1 dB``, ``equal`` when there is no difference, ``not finite`` when it cannot be said."""
    if math.isnan(value):
        return "not finite"
    if math.isinf(value):
        return "equal" if value > 0 else "-inf dB"
    return f"{value:.1f} dB"


def some(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def some_names(names: Iterable[str], most: int, width: int = 40) -> str:
    """As :func:`some`, of names of a model: each visible and within ``width``."""
    return some([short_name(visible(name), width) for name in names], most)


def count(number: int, noun: str) -> str:
    """``1 kernel``, ``23 kernels``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def from_here(path: str) -> str:
    """A path below the current folder as it is written there."""
    return path.removeprefix(f"{os.getcwd()}{os.sep}")


def near(path: str) -> str:
    """A path from the current folder, or of elsewhere its last part: pages are shown to others."""
    shown = from_here(path)
    return os.path.basename(shown) if os.path.isabs(shown) else shown


def visible(text: str) -> str:
    """``text`` with everything that is not printable as an escape.

    Names come from the model and may hold terminal escapes, line breaks, marks that reverse the direction of writing,
    and halves of surrogate pairs, which no encoding takes.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


_PARTS = re.compile(r"(?<=[./])(?=[^./])|(?<=[_ ])(?=[^_ ])")
"""Where a name may be cut."""


def short_name(text: str, width: int, *, measure: Callable[[str], int] = len) -> str:
    """A name within ``width``: the end of a path says most, and its parts stay whole where they fit."""
    if measure(text) <= width:
        return text
    cuts = (match.start() for match in _PARTS.finditer(text))
    cut = next((start for start in cuts if measure(text[start:]) < width), None)
    return shorten(text, width, measure=measure) if cut is None else f"…{text[cut:]}"


def shorten(text: str, width: int, *, mark: str = "...", measure: Callable[[str], int] = len) -> str:
    """``text`` within ``width``, cut in the middle: the ends of a layer's name say most.

    ``mark`` stands for the part left out. ``width``, as ``measure`` says it, is that of ``mark`` and two more at least.
    """
    if measure(text) <= width:
        return text
    room = width - measure(mark)
    head, tail = text[: room // 2], text[-(room - room // 2) :]
    while measure(head) > room // 2:
        head = head[:-1]
    while measure(tail) > room - room // 2:
        tail = tail[1:]
    return head + mark + tail


def time_text(microseconds: float) -> str:
    """A time to three digits: ``3.25 us``, ``12.3 ms``, ``1.20 s``."""
    for size, unit in ((1.0, "us"), (1e3, "ms")):
        if abs(microseconds) < 999.5 * size:
            return f"{_three(microseconds / size)} {unit}"
    return f"{_three(microseconds / 1e6)} s"


class Prediction(Protocol):
    """A predicted time and its range, in microseconds; None for a range that is not known."""

    @property
    def predicted_us(self) -> float: ...
    @property
    def low_us(self) -> float | None: ...
    @property
    def high_us(self) -> float | None: ...


def predicted_text(found: Prediction) -> str:
    """A predicted time and its range: ``179 us, 150 to 210``; the time alone where no range is known."""
    low_high = range_text(found.predicted_us, found.low_us, found.high_us)
    return time_text(found.predicted_us) + (f", {low_high}" if low_high else "")


def range_text(microseconds: float, low: float | None, high: float | None) -> str:
    """The range of a time in the unit that :func:`time_text` gives it: ``150 to 210``; empty where it is not known."""
    if low is None or high is None:
        return ""
    size = next((size for size in (1.0, 1e3) if abs(microseconds) < 999.5 * size), 1e6)
    return f"{_three(low / size)} to {_three(high / size)}"


def with_micro(text: str) -> str:
    """``text`` with the real sign of micro, which a page can show, in the times of :func:`time_text`."""
    return _MICRO.sub(" µs", text)


def page_time(microseconds: float) -> str:
    """As :func:`time_text`, for a page."""
    return with_micro(time_text(microseconds))


def flop_text(flop: int) -> str:
    """An amount of arithmetic: ``8.18 GFLOP``."""
    value = float(flop)
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if unit == "FLOP" else f"{_three(value)} {unit}"
        value /= 1000
    return f"{_three(value)} TFLOP"


def _three(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 or size == 0 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
