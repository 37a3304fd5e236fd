"""INT8 ranges that a build takes over from earlier quantization: of the model's own Q/DQ, and TensorRT's caches."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from trtopt.config import BuildConfig
from trtopt.precision.observe.samples import Samples
from trtopt.precision.observe.statistics_cache import check_own
from trtopt.precision.observe.trt_cache import (
    TrtCache,
    check_belongs,
    imported_ranges,
    is_trt_cache,
    read_trt_cache,
    tensor_names,
)
from trtopt.precision.qdq.existing import existing_ranges
from trtopt.report.schema.steps import StepRecord
from trtopt.support.clock import Clock
from trtopt.support.precision import Precision


@dataclass(frozen=True)
class ImportedCache:
    """A calibration cache of TensorRT, and the tensors of the model as loaded, which it names."""

    cache: TrtCache
    names: frozenset[str]


@dataclass(frozen=True)
class Imports:
    """INT8 ranges that were not observed.

    Attributes:
        amax: Largest magnitude by tensor name.
        unknown: Why a tensor has no range, by tensor name: it is not in the cache, and there are no samples.
        steps: What of a cache was used, for the report; empty without one.
    """

    amax: Mapping[str, float] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[StepRecord, ...] = ()


def imported_cache(
    config: BuildConfig, precision: Precision | None, model: ir.Model, clock: Clock
) -> ImportedCache | None:
    """The calibration cache of TensorRT that ``--calib-cache`` names; None when it names none, or a file of our own.

    Args:
        config: The options.
        precision: The precision asked for.
        model: The model as loaded.
        clock: Told when the cache has no use.

    Raises:
        UsageError: The cache is damaged, or that of another model; the file is no cache at all.
    """
    if config.calib_cache is None:
        return None
    if not is_trt_cache(Path(config.calib_cache)):
        check_own(Path(config.calib_cache))
        return None
    cache, names = read_trt_cache(Path(config.calib_cache)), tensor_names(model)
    check_belongs(cache, names)
    if precision not in (Precision.INT8, Precision.AUTO):
        kind = "keeps its types" if precision is None else f"is {precision}"
        clock.warn("calibrate", f"{config.calib_cache} holds INT8 ranges, and the engine {kind}: they are not used")
    return ImportedCache(cache, names)


def statistics_file(config: BuildConfig) -> Path | None:
    """Where the user wants the statistics kept; None for the default. TensorRT's file is read, never written."""
    if config.calib_cache is None or is_trt_cache(Path(config.calib_cache)):
        return None
    return Path(config.calib_cache)


def imports(
    base: ir.Model, given: ImportedCache | None, wanted: Collection[str], samples: Samples, own: Mapping[str, float]
) -> Imports:
    """The INT8 ranges that the model's own Q/DQ and a cache give.

    Args:
        base: The widened model that is quantized.
        given: A calibration cache of TensorRT, if any.
        wanted: Names of the tensors that INT8 needs the range of.
        samples: Calibration samples.
        own: Ranges of Q/DQ that was taken out of the model.
    """
    own = {**own, **existing_ranges(base)}
    if given is None:
        return Imports(own)
    began = time.perf_counter()
    found = imported_ranges(given.cache, given.names, base, wanted)
    unknown = found.unknown(given.cache.path) if samples.source == "synthetic" else {}
    seconds = time.perf_counter() - began
    return Imports(
        {**found.amax, **own},
        {name: why for name, why in unknown.items() if name not in own},
        (StepRecord("calibration-cache", "PRECISION", len(found.amax), seconds, details=found.details),),
    )
