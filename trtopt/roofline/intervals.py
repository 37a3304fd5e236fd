"""The range around a predicted time in which 80 % of the measured kernels of its kind lay.

The quantiles are in ``intervals.toml``, written by ``benchmarks/predictor/run.py`` from kernels that the constants were
not fitted to.
"""

from __future__ import annotations

import functools
import importlib.resources
import sys
from dataclasses import dataclass
from typing import Any

from trtopt.hardware.spec import GpuSpec
from trtopt.roofline.work import Work
from trtopt.support.precision import Precision

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_NARROW = (Precision.INT8, Precision.FP8, Precision.FP4)


@dataclass(frozen=True)
class Interval:
    """Measured over predicted time of the kernels of one kind, each dataset with the same weight.

    Attributes:
        low: The quantile of 10 %.
        high: The quantile of 90 %.
        kernels: How many kernels were left out of a fit and predicted.
        gpus: The GPUs they were measured on.
    """

    low: float
    high: float
    kernels: int
    gpus: tuple[str, ...]


def kind_of(work: Work) -> str:
    """The kind of kernel whose errors are taken together.

    Returns:
        ``Work.kind``; ``gemm 8-bit`` for products of 8 or 4 bits or of narrow weights, ``decode`` for attention of one
        query against many keys, ``rows`` for norms, softmax and reductions.
    """
    if work.rows is not None:
        return "rows"
    if work.kind == "gemm" and (work.weight_bits or work.dtype in _NARROW):
        return "gemm 8-bit"
    sizes = work.attention
    return "decode" if sizes is not None and sizes.queries == 1 < sizes.keys else work.kind


@functools.cache
def table(seen: bool) -> dict[str, Interval]:
    """The intervals by kind, of ``intervals.toml``.

    Args:
        seen: Those of kernels predicted with constants fitted to others of the same GPU; else those of GPUs that
            nothing was fitted to.
    """
    entries: dict[str, Any] = _file()["own" if seen else "unseen"]
    return {kind: Interval(**{**entry, "gpus": tuple(entry["gpus"])}) for kind, entry in entries.items()}


@functools.cache
def _file() -> dict[str, Any]:
    text = importlib.resources.files("trtopt.roofline").joinpath("intervals.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@functools.lru_cache(maxsize=4096)
def interval_of(kind: str, gpu: GpuSpec) -> tuple[float, float]:
    """The factors by which 80 % of the measured times differ from the predicted one at most.

    Where kernels of this kind were measured on the GPU, they are those of its own constants; else those of GPUs that
    nothing was fitted to, or of its own constants where these are wider. A kind without data (recurrent layers) has
    the widest there are. The model is too slow or too fast for some kinds; so that a prediction lies in its own
    interval, ``low`` is 1 at most and ``high`` 1 at least.

    Args:
        kind: As :func:`kind_of` says it.
        gpu: The GPU.

    Returns:
        low and high, with 0 < low <= 1 <= high.
    """
    own, unseen = table(True), table(False)
    if kind in own and gpu.name in own[kind].gpus:
        found = [own[kind]]
    else:
        found = [item[kind] for item in (own, unseen) if kind in item] or [*own.values(), *unseen.values()]
    return min(1.0, *(item.low for item in found)), max(1.0, *(item.high for item in found))


def range_of(work: Work, predicted_us: float, gpu: GpuSpec) -> tuple[float, float]:
    """The range of a kernel's predicted time, in microseconds, the launch included."""
    low, high = interval_of(kind_of(work), gpu)
    return predicted_us * low, predicted_us * high
