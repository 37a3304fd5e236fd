"""The ranges in which 80 % of the measured times lie around the predicted ones, by kind of kernel.

    python benchmarks/predictor/intervals.py    writes trtopt/roofline/intervals.toml and the table of the README

`run.py` does this too. Only kernels that a prediction was not fitted to count; each row has the same weight.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from readme import replace_table
from scoring import HeldBack, Row

from trtopt.roofline.constants import fit_for
from trtopt.roofline.intervals import Interval

OUT = Path(__file__).parents[2] / "trtopt" / "roofline" / "intervals.toml"

_LEVELS = (0.1, 0.9)
_FEW = 8
"""Kernels from which on a dataset has the weight of any other; below, it has less in proportion."""

_LEAST_GROUPS = 10
"""Groups from which on a dataset is halved by groups; the layers of fewer engines are taken one by one."""

_OWN = 10
"""Kernels of a kind from which on a GPU counts as measured."""

_SPLITS = 20
"""Splits into halves that coverage is the mean of."""

_KINDS = ("gemm", "gemm 8-bit", "conv", "depthwise", "attention", "decode", "rows", "memory", "layout")

Sets = dict[tuple[bool, str], list[HeldBack]]
"""Datasets by whether constants are the GPU's own and by kind; each has kernels of that kind alone."""


@dataclass(frozen=True)
class Coverage:
    """How many measured kernels of a kind lie inside an interval.

    Attributes:
        kind: The kind.
        own: Whether the constants were fitted to other kernels of the same GPU.
        interval: Of all datasets.
        datasets: How many datasets.
        other_half: Share inside the interval of the other half of the groups of every dataset.
        by_dataset: Share inside the interval of all datasets, by dataset.
        left_out: Share inside the interval of the other datasets, by dataset; empty for one dataset.
    """

    kind: str
    own: bool
    interval: Interval
    datasets: int
    other_half: float
    by_dataset: dict[str, float]
    left_out: dict[str, float]


def by_kind(rows: Iterable[Row]) -> Sets:
    """The kernels of all rows, by whose constants and by kind."""
    found: Sets = {}
    for row in rows:
        every = row.held_back
        for kind in sorted(set(every.kinds)):
            found.setdefault((every.own, str(kind)), []).append(every.only(every.kinds == kind))
    return {key: found[key] for key in sorted(found, key=lambda key: (not key[0], _KINDS.index(key[1])))}


def bounds(sets: Sequence[HeldBack]) -> tuple[float, float]:
    """The quantiles of 10 and 90 % of measured over predicted, every dataset with the same weight.

    The i-th of n values is the quantile i / (n + 1): of the next one, 80 % are expected inside however few there were.
    """
    ratios = np.concatenate([item.ratios for item in sets])
    weights = np.concatenate([np.full(len(item.ratios), 1 / max(len(item.ratios), _FEW)) for item in sets])
    order = np.argsort(ratios)
    total, effective = weights.sum(), weights.sum() ** 2 / (weights**2).sum()
    below = np.cumsum(weights[order]) / total / (1 + 1 / effective)
    low, high = np.interp(_LEVELS, below, ratios[order])
    return float(low), float(high)


def inside(sets: Sequence[HeldBack], low: float, high: float) -> float:
    """The share of measured kernels inside, every dataset with the same weight."""
    found = [item for item in sets if len(item.ratios)]
    shares = [np.mean((item.ratios >= low) & (item.ratios <= high)) for item in found]
    return float(np.average(shares, weights=[min(len(item.ratios) / _FEW, 1.0) for item in found]))


def coverage(own: bool, kind: str, sets: Sequence[HeldBack]) -> Coverage:
    """The interval of a kind, and what share of kernels that were not used for it lie inside."""
    low, high = bounds(sets)
    known = [item.gpu for item in sets if len(item.ratios) >= _OWN]
    gpus = {name for gpu in known for name in (gpu.name, fit_for(gpu.name, gpu.compute_capability).name)}
    interval = Interval(round(low, 4), round(high, 4), sum(len(item.ratios) for item in sets), tuple(sorted(gpus)))
    others = {item.name: [other for other in sets if other is not item] for item in sets}
    halves = [_other_half(sets, seed) for seed in range(_SPLITS)]
    return Coverage(
        kind,
        own,
        interval,
        len(sets),
        float(np.mean(halves)),
        {item.name: inside([item], low, high) for item in sets},
        {item.name: inside([item], *bounds(others[item.name])) for item in sets if others[item.name]},
    )


def _other_half(sets: Sequence[HeldBack], seed: int) -> float:
    """The share inside of one half of the groups, the interval being that of the other half; each half once."""
    random = np.random.default_rng(seed)
    first, second = [], []
    for item in sets:
        groups = item.groups if len(set(item.groups)) >= _LEAST_GROUPS else np.arange(len(item.groups))
        names = random.permutation(np.unique(groups))
        chosen = np.isin(groups, names[: (len(names) + 1) // 2])
        first.append(item.only(chosen))
        second.append(item.only(~chosen))
    return (inside(second, *bounds(first)) + inside(first, *bounds(second))) / 2


def write(rows: Sequence[Row]) -> list[Coverage]:
    """Write the intervals and the table of the README.

    Args:
        rows: All rows of the benchmark.

    Returns:
        What the table shows.
    """
    found = [coverage(own, kind, sets) for (own, kind), sets in by_kind(rows).items()]
    lines = [
        "# Measured over predicted time: the quantiles of 10 and 90 % by kind of kernel, of kernels that constants",
        "# were not fitted to; written by benchmarks/predictor/run.py, and intervals.py explains them.",
        f'date = "{datetime.date.today().isoformat()}"',
    ]
    for item in found:
        interval = item.interval
        gpus = ", ".join(f'"{name}"' for name in interval.gpus)
        lines += ["", f'[{"own" if item.own else "unseen"}."{item.kind}"]', f"low = {interval.low}"]
        lines += [f"high = {interval.high}", f"kernels = {interval.kernels}", f"gpus = [{gpus}]"]
    OUT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    replace_table("intervals", [_HEAD, "|---" * 8 + "|", *map(_line, found)])
    return found


_HEAD = "| kind of kernel | constants | 10 % | 90 % | inside, other half | single rows | row left out | kernels |"


def _line(item: Coverage) -> str:
    every, left = item.by_dataset.values(), item.left_out.values()
    cells = [
        item.kind,
        "own" if item.own else "of other GPUs",
        f"{item.interval.low:.2f}",
        f"{item.interval.high:.2f}",
        f"{item.other_half:.0%}",
        f"{min(every):.0%} to {max(every):.0%}",
        f"{min(left):.0%} to {max(left):.0%}" if left else "",
        f"{item.interval.kernels} in {item.datasets}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Score all rows, and write."""
    from run import all_rows

    for item in write(all_rows()):
        print(_line(item))


if __name__ == "__main__":
    main()
