"""Search by halving."""

from __future__ import annotations

from collections.abc import Callable


def fewest(count: int, is_enough: Callable[[int], bool], may_ask: Callable[[], bool] = lambda: True) -> int:
    """How many things of a row are enough, counted from its first one, if more of them never do worse.

    Args:
        count: How many there are; all of them are known to be enough, and none not to be.
        is_enough: Whether so many are; asked about the logarithm of ``count`` times.
        may_ask: Whether it may be asked once more; where it may not, the fewest that are known to be enough do.
    """
    too_few, enough = 0, count
    while enough - too_few > 1 and may_ask():
        middle = (too_few + enough) // 2
        if is_enough(middle):
            enough = middle
        else:
            too_few = middle
    return enough
