"""The options of ``trtopt sensitivity``."""

from __future__ import annotations

from dataclasses import dataclass

from trtopt.config.base import (
    BACKENDS,
    CALIB_METHODS,
    FILES,
    PRECISION,
    REPORT_HELP,
    SAMPLES,
    TARGET,
    Config,
    option_field,
)
from trtopt.support.precision import EIGHT_BIT_TYPES, Precision


@dataclass(frozen=True)
class SensitivityConfig(Config):
    """The options of ``trtopt sensitivity``.

    Raises:
        UsageError: As of :class:`BuildConfig`.
    """

    precision: Precision = option_field(
        Precision.INT8, "8-bit type (default: int8)", PRECISION, choices=EIGHT_BIT_TYPES
    )
    calib: str | None = option_field(
        None,
        "calibration samples: .npz, .npy, a folder of either, script.py:function, or 'synthetic'",
        SAMPLES,
        metavar="SRC",
        path="source",
        words=("synthetic",),
    )
    calib_method: str = option_field(
        "auto", "how a tensor's INT8 range is chosen from its statistics", SAMPLES, choices=CALIB_METHODS
    )
    eval: str | None = option_field(
        None,
        "samples to measure errors on (default: the calibration samples)",
        SAMPLES,
        metavar="SRC",
        path="source",
        words=("synthetic",),
    )
    cache_dir: str | None = option_field(
        None,
        "folder for cached statistics and errors (default: ~/.cache/trtopt)",
        SAMPLES,
        metavar="DIR",
        path="folder",
    )
    backend: str = option_field("auto", "compiler whose placement rules choose the regions", TARGET, choices=BACKENDS)
    report: str | None = option_field(None, REPORT_HELP, FILES, metavar="FILE", path="output")
    html: str | None = option_field(None, "write the report as one HTML file", FILES, metavar="FILE", path="output")
