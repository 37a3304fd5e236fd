"""The batch sizes of a sweep, as users write them."""

from __future__ import annotations

from collections.abc import Sequence

from trtopt.errors import UsageError

LARGEST_BATCH = 1 << 16
"""Beyond it curves are flat, and most models exceed every GPU's memory."""

MOST_BATCHES = 128
"""Sizes of one sweep; each takes a shape inference and a prediction of every layer."""

_MOST_DIGITS = 12
"""Digits of a number that are read: enough to tell that it is out of range."""


def parse_batches(text: str, where: str) -> tuple[int, ...]:
    """Read ``1,2,4``, ``1..256`` or both mixed.

    A range stands for its ends and four sizes per doubling between them (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20,
    ...): performance is not monotonic in the batch, and powers of two alone would hide its dips.

    Args:
        text: The sizes.
        where: The option, for messages.

    Raises:
        UsageError: It has another form.
    """
    sizes: list[int] = []
    for part in text.split(","):
        first, dots, last = (word.strip() for word in part.partition(".."))
        low, high = _number(first), _number(last) if dots else _number(first)
        if low is None or high is None or low > high:
            raise UsageError(
                f"Not a batch size or a range of them: {part.strip()!r}",
                where=where,
                remedy="write 1,2,4 or 1..256, the smallest first",
            )
        sizes += [low, high, *(size for size in _grid() if low < size < high)]
    return tuple(sorted(set(sizes)))


def checked_batches(sizes: Sequence[int], where: str) -> tuple[int, ...]:
    """The sizes in increasing order, each once.

    Raises:
        UsageError: One is below 1 or above :data:`LARGEST_BATCH`, or there are more than :data:`MOST_BATCHES`.
    """
    wrong = next((size for size in sizes if not 1 <= size <= LARGEST_BATCH), None)
    if wrong is not None or len(set(sizes)) > MOST_BATCHES:
        raise UsageError(
            f"The batch size {wrong} is out of range" if wrong is not None else "There are too many batch sizes",
            where=where,
            remedy=f"give at most {MOST_BATCHES} sizes from 1 to {LARGEST_BATCH}",
        )
    return tuple(sorted(set(sizes)))


def _number(text: str) -> int | None:
    return int(text[:_MOST_DIGITS]) if text.isascii() and text.isdecimal() else None


def _grid() -> list[int]:
    """1 to 8, then four evenly spaced sizes per doubling."""
    octaves = range(1, LARGEST_BATCH.bit_length() - 3)
    return [*range(1, 9), *((4 + step) << octave for octave in octaves for step in (1, 2, 3, 4))]
