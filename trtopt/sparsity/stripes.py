"""Which order of channels lets 2:4 masks keep most: an exchange of channels between fours, repeated.

Of the four channels of every stripe, one is pulled out, and all of them are put back where they are worth most. In
each row a stripe of the other three keeps its largest and the larger one of its second largest and the channel put
in, so that

    kept(stripe, channel) = sum over rows of max(second largest of three, channel)

says what each channel is worth in each stripe, whatever the other stripes get. Swaps of two channels are made until
none gains. Pool and Yu search with single swaps and with all splits of two stripes ("Channel Permutations for N:M
Sparsity", NeurIPS 2021); here one round tries a swap of every stripe with every other one.
"""

from __future__ import annotations

import numpy as np

from trtopt.sparsity.pattern import GROUP, KEPT

_BLOCK = 128
"""Stripes that exchange channels in one step; others meet in the next round. 16 to 384 of them find the same, in more
steps or with larger matrices."""

_COMPARISONS = 1_000_000_000
"""Comparisons of two numbers in one search, at most: a second or two."""

_STARTS = 4
"""Searches, each on other random choices, as long as they are cheap: the best of 4 keeps as much as trying all splits
of two stripes until none gains, in a tenth of the time (16 to 128 channels, 64 to 256 rows)."""

_CHEAP = 100_000_000
"""Comparisons after which no other search is begun."""

_LEAST_ROUNDS = 12
"""Rounds that a search has; most of what can be gained is gained in the first eight."""

_MOST_ROUNDS = 100
"""Rounds that a search has, at most."""

_PATIENCE = 16
"""Rounds without a gain after which nothing more is expected."""

_CHUNK = 32_768
"""Numbers looked at in one go: they stay in the cache."""

_LEAST_GAIN = 1e-6
"""Of what a stripe keeps: less is rounding."""


def rows_looked_at(channels: int) -> int:
    """How many rows a search over this many channels can look at within its bound."""
    stripes = channels // GROUP
    return max(1, _COMPARISONS // (_LEAST_ROUNDS * stripes * min(stripes, _BLOCK)))


def best_order(saliency: np.ndarray, seed: int) -> np.ndarray:
    """Order channels so that the best two of each four consecutive ones hold more, summed over the rows.

    Args:
        saliency: float32 ``[channels, rows]``, not negative: what each weight is worth. Channels are a multiple of 4,
            rows at most ``rows_looked_at(channels)``.
        seed: Which channels are pulled out, and which stripes meet.

    Returns:
        int64 ``[channels]``: the channel that comes first, second, ... It is the order as it was where none is better.
    """
    best = np.arange(len(saliency))
    rng, spent = np.random.default_rng(seed), 0
    for _ in range(_STARTS):
        if spent > _CHEAP:
            break
        order, comparisons = _search(saliency, rng)
        best, spent = max(best, order, key=lambda tried: _kept(saliency, tried)), spent + comparisons
    return best


def _kept(saliency: np.ndarray, order: np.ndarray) -> float:
    """What the best two of each four hold."""
    fours = np.sort(saliency[order].reshape(-1, GROUP, saliency.shape[1]), axis=1)
    return float(fours[:, -KEPT:].sum(dtype=np.float64))


def _search(saliency: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """An order that no single swap tried lately improves, and the comparisons made."""
    channels, rows = saliency.shape
    stripes = np.arange(channels).reshape(-1, GROUP)
    steps = -(-len(stripes) // _BLOCK)
    comparisons = idle = 0
    for _ in range(_MOST_ROUNDS):
        if comparisons >= _COMPARISONS or idle >= _PATIENCE:
            break
        stripes = rng.permutation(rng.permuted(stripes, axis=1))
        gained = False
        for step in np.array_split(np.arange(len(stripes)), steps):
            order = _swapped(_worth(saliency[stripes[step]]))
            gained |= bool((order != np.arange(len(step))).any())
            stripes[step, 0] = stripes[step[order], 0]
            comparisons += len(step) ** 2 * rows
        idle = 0 if gained else idle + 1
    # In the order of the first channels: what need not move stays where it is.
    stripes = np.sort(stripes, axis=1)
    return stripes[np.argsort(stripes[:, 0])].reshape(-1), comparisons


def _worth(fours: np.ndarray) -> np.ndarray:
    """float64 ``[stripes, stripes]``: what the first channel of each stripe (column) adds to each stripe (row)."""
    count, _, rows = fours.shape
    worth = np.zeros((count, count))
    size = max(1, _CHUNK // count)
    for start in range(0, rows, size):
        part = fours[:, :, start : start + size]
        pulled, one, two, three = (np.ascontiguousarray(part[:, slot]) for slot in range(GROUP))
        second = np.maximum(np.minimum(one, two), np.minimum(np.maximum(one, two), three))
        larger = np.empty_like(pulled)
        for stripe in range(count):
            worth[stripe] += np.maximum(pulled, second[stripe], out=larger).sum(axis=1)
    return worth


def _swapped(worth: np.ndarray) -> np.ndarray:
    """Which column each row gets when pairs of rows swap theirs as long as that gains, the largest gains first."""
    count = len(worth)
    order = np.arange(count)
    first, second = np.triu_indices(count, 1)
    least = _LEAST_GAIN * float(worth.trace()) / count
    while True:
        now = worth[:, order]
        own = now.diagonal()
        gain = (now + now.T - own[:, None] - own[None])[first, second]
        found = np.flatnonzero(gain > least)
        if not len(found):
            return order
        free = np.ones(count, bool)
        for pair in found[np.argsort(-gain[found], kind="stable")]:
            one, other = first[pair], second[pair]
            if free[one] and free[other]:
                free[one] = free[other] = False
                order[[one, other]] = order[[other, one]]
