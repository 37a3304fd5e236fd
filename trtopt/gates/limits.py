"""The thresholds of ``trtopt check``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from trtopt.errors import UsageError
from trtopt.support.precision import ELEMENT_BYTES
from trtopt.support.words import did_you_mean

BITS: dict[str, int] = {dtype: round(size * 8) for dtype, size in ELEMENT_BYTES.items()}
"""The types a share can be asked of, and their widths."""

DEFAULT_DB_DROP = 1.0
"""Of a metric in dB; of others, see ``DEFAULT_ACCURACY_DROP``."""
DEFAULT_LATENCY_REGRESS = 0.05
DEFAULT_SHARE_LOSS = 0.01
DEFAULT_BYTES_GROWTH = 0.10


@dataclass(frozen=True)
class Limits:
    """What a report must keep. None: against a baseline the default, else nothing.

    Attributes:
        max_accuracy_drop: Largest drop of the metric (or of top-1 agreement or cosine with FP32, where there is none),
            against FP32 and against the baseline.
        max_latency_regress: Largest growth of the predicted or measured time against the baseline, as a share: 0.05 is
            5 %.
        min_share: Smallest share of the arithmetic by type, 0..1.
        max_bytes: Largest engine, in bytes.
        max_kernels: Most kernels.
        allow_synthetic: Whether ranges from random data are fine.

    Raises:
        UsageError: A value is out of range, or a type is unknown.
    """

    max_accuracy_drop: float | None = None
    max_latency_regress: float | None = None
    min_share: Mapping[str, float] = field(default_factory=dict)
    max_bytes: int | None = None
    max_kernels: int | None = None
    allow_synthetic: bool = False

    def __post_init__(self) -> None:
        for name in ("max_accuracy_drop", "max_latency_regress", "max_bytes", "max_kernels"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise UsageError(
                    f"{value:g} is no threshold", where=f"--{name.replace('_', '-')}", remedy="give a number from 0 on"
                )
        for dtype, share in self.min_share.items():
            where = f"--min-share {dtype}={share:g}"
            if dtype not in BITS:
                remedy = did_you_mean(dtype.lower(), BITS) or f"choose one of {', '.join(BITS)}"
                raise UsageError(f"{dtype!r} is no type of arithmetic", where=where, remedy=remedy)
            if not 0 <= share <= 1:
                raise UsageError("A share lies between 0 and 1", where=where, remedy="give 0.5 for 50 %")
