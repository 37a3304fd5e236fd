"""What a 16-bit float does to constants."""

from __future__ import annotations

import math

import numpy as np

from trtopt.precision.observe.ranges import finite_range
from trtopt.precision.plan import NarrowType

WEIGHT_ERROR = 1e-2
"""Largest relative error (L2) that rounding a weight tensor may cause; normal values cost 2e-4."""


def overflows(constant: np.ndarray | None, narrow: NarrowType) -> bool:
    """Whether a finite entry is too large for the type."""
    return constant is not None and constant.size > 0 and max(map(abs, finite_range(constant))) > narrow.largest


def loses_weights(weights: np.ndarray, narrow: NarrowType) -> bool:
    """Whether rounding changes the tensor by more than ``WEIGHT_ERROR`` of its norm.

    An element is off by at most half the type's precision, or half its smallest number: where that bound suffices,
    nothing needs to be rounded.
    """
    flat = np.asarray(weights, np.float32).reshape(-1)
    norm = float(np.linalg.norm(flat))
    if not math.isfinite(norm):
        flat = flat[np.isfinite(flat)].astype(np.float64)
        norm = float(np.linalg.norm(flat))
    bound = narrow.smallest_normal * narrow.precision / 2 * math.sqrt(flat.size) + narrow.precision / 2 * norm
    if bound <= WEIGHT_ERROR * norm:
        return False
    return norm > 0 and float(np.linalg.norm(narrow.round(flat) - flat)) > WEIGHT_ERROR * norm


def lost_entries(constant: np.ndarray, narrow: NarrowType) -> np.ndarray:
    """The entries that rounding changes by more than ``WEIGHT_ERROR`` of themselves."""
    exact = np.asarray(constant, np.float32)
    nonzero = exact[np.isfinite(exact) & (exact != 0) & (np.abs(exact) <= narrow.largest)]
    return np.asarray(nonzero[np.abs(narrow.round(nonzero) - nonzero) > WEIGHT_ERROR * np.abs(nonzero)])
