"""Calibration data that cannot be right: ranges that are constant, empty or absurd, each with the tensor's name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np

from trtopt.precision.observe.statistics import TensorStats, bin_edges

LARGEST_SANE = 1e6
"""Pixels reach 255, 16-bit audio 32768, activations of trained networks thousands; beyond are fill values, counters
and samples without their normalisation."""

SMALLEST_SANE = 1e-6
"""A tensor that stays below is normalised twice, or empty but for noise."""

LARGEST_TAIL = 254.0
"""Largest ``|x|`` over the 99.99th percentile. From here on 99.99 % of the values are less than half a step of an INT8
range that spans them all (127 steps), and become 0. The largest seen in five trained networks is 6.3 (MiniLM)."""

_QUANTILE = 0.9999
_FEWEST = 256
"""A tensor of fewer elements, over all samples, may be constant: a sampling rate, a threshold."""

_SHOWN = 5


def range_warnings(stats: Mapping[str, TensorStats], inputs: Collection[str] = ()) -> list[str]:
    """What is suspicious in calibration statistics, one line per kind, the tensors named.

    Tensors with a histogram (INT8 will take its scale from them) and inputs of the network are looked at. Others may be
    what they like: a mask is constant, or reaches -3.4e38. Thresholds are this module's constants.

    Returns:
        Texts for the user; empty when nothing is suspicious.
    """
    found: dict[str, list[str]] = {}
    for name, each in stats.items():
        if each.has_histogram or name in inputs:
            label = f"input {name}" if name in inputs else name
            for kind, number in _suspicions(each):
                found.setdefault(kind, []).append(f"{label}{number}")
    return [f"{_listed(names)}: {kind}" for kind, names in found.items()]


def _suspicions(stats: TensorStats) -> Iterator[tuple[str, str]]:
    """What is wrong and what that means, and the number that shows it."""
    if stats.count == stats.nonfinite:
        return  # calibration warns of these itself
    largest = stats.absmax
    if largest == 0:
        yield "0 in every sample, so that the samples do not show its range; check how the samples are made", ""
    elif stats.minimum == stats.maximum and stats.count >= _FEWEST:
        text = "the same number in every element of every sample; check how the samples are made"
        yield text, f" ({stats.minimum:.3g})"
    elif largest > LARGEST_SANE:
        yield "values this large are fill values or data without normalisation", f" (up to {largest:.3g})"
    elif largest < SMALLEST_SANE:
        yield "values this small are data normalised twice, or noise", f" (up to {largest:.3g})"
    else:
        tail = _tail(stats)
        if tail > LARGEST_TAIL:
            text = "a few values far beyond the others: outliers in the samples set the range, or INT8 does not suit it"
            yield text, f" (largest is {tail:.3g} times the 99.99th percentile)"


def _tail(stats: TensorStats) -> float:
    """The largest ``|x|`` over the 99.99th percentile of those above zero; 1 without a histogram."""
    if stats.bins is None or stats.counts is None or not stats.bins.size:
        return 1.0
    total = np.cumsum(stats.counts)
    index = int(np.searchsorted(total, _QUANTILE * total[-1]))
    _, high = bin_edges(stats.bins[index : index + 1])
    return stats.absmax / float(high[0])


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
