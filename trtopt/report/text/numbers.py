"""Numbers and tables as people read them, in a terminal or a pipe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.table import Table


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> Table:
    """A table without lines.

    Args:
        headers: The columns' headings.
        rows: The cells: plain text, in which nothing is taken for markup.
        right: The indices of the columns that are aligned to the right.
    """
    from rich.table import Table
    from rich.text import Text

    result = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for index, header in enumerate(headers):
        justify: Literal["left", "right"] = "right" if index in right else "left"
        result.add_column(Text(header), justify=justify, overflow="fold")
    for row in rows:
        result.add_row(*(Text(cell) for cell in row))
    return result


def pairs(rows: Sequence[tuple[str, str]]) -> Table:
    """Names and values in two columns."""
    from rich.table import Table
    from rich.text import Text

    result = Table.grid(padding=(0, 3, 0, 0))
    result.add_column(no_wrap=True)
    result.add_column(overflow="fold")
    for name, value in rows:
        result.add_row(Text(name), Text(value))
    return result


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


def count(number: int, noun: str) -> str:
    """``1 kernel``, ``23 kernels``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
