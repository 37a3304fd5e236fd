"""Figures over many layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rank correlation of two equally long sequences; equal values share their mean rank.

    Returns:
        None below three pairs, or where one side is constant.

    Raises:
        ValueError: The lengths differ.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} values against {len(b)}")
    if len(a) < 3:
        return None
    first, second = _centred_ranks(a), _centred_ranks(b)
    scale = float(np.sqrt((first @ first) * (second @ second)))
    return float(first @ second) / scale if scale else None


def _centred_ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks less their mean."""
    _, position, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    found: np.ndarray = ranks[position] - (len(values) + 1) / 2
    return found
