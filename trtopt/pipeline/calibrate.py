"""Statistics for the precision decision: from samples, from the cache, and what an old TensorRT cache says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from trtopt.config import BuildConfig
from trtopt.events import ignore
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.skeleton import content_hash
from trtopt.precision.decide import wanted_tensors
from trtopt.precision.fp16.hazards import are_settled
from trtopt.precision.observe.calibrate import CacheFile, Calibration, cached_collect
from trtopt.precision.observe.stream import FEW_ROWS, Samples, SomeSamples
from trtopt.precision.observe.trt_cache import statistics_file
from trtopt.precision.plan import BF16, FP16
from trtopt.report.schema.build import CalibrationRecord
from trtopt.support.clock import Clock
from trtopt.support.precision import Precision


@dataclass(frozen=True)
class Observer:
    """Observes one model, and FP32 forms of it that compute the same; ``backend`` says whose tables tell what
    matters."""

    artifact: ModelArtifact
    precision: Precision
    backend: str
    samples: Samples
    config: BuildConfig
    clock: Clock

    def observe(self, base: ir.Model, *, is_variant: bool = False) -> Calibration | None:
        """Statistics from the cache or from the samples; None where the precision needs none.

        ``is_variant``: ``base`` has other weights than the model, and the user's file of statistics is not for it.
        """
        wanted = wanted_tensors(base, self.precision, self.backend)
        if not wanted.histogram and not wanted.ranges:
            return None
        clock = self.clock
        with clock.stage("calibrate"):
            return cached_collect(
                base,
                self.samples,
                self._cache(base, None if is_variant else statistics_file(self.config)),
                histogram=wanted.histogram | wanted.results,
                ranges=wanted.ranges,
                on_event=clock.listen,
            )

    def _cache(self, base: ir.Model, file: Path | None = None) -> CacheFile:
        """The file of the statistics of a model."""
        folder, key = self.config.cache_dir, content_hash(base)
        return CacheFile(key, self.samples.sha256, folder=folder, file=file, on_event=self.clock.listen)

    def observe_by_need(self, base: ir.Model, shapes: Mapping[str, tuple[int, ...]]) -> Calibration | None:
        """As :meth:`observe` for a 16-bit type, on a few samples where they settle what stays FP32.

        They do where no decision changes with values far beyond those seen, and the inputs of the other samples, which
        are read all the same, are not larger than theirs. Statistics of all samples are used where they are there.

        Args:
            base: The widened model.
            shapes: Static shapes by tensor name, at the largest input shapes.
        """
        few = replace(self.few(FEW_ROWS), clock=Clock(ignore))
        is_less = self.samples.count is None or self.samples.count > (few.samples.count or 0)
        if self.samples.source != "user" or not is_less or statistics_file(self.config) or self._is_known(base):
            return self.observe(base)
        with self.clock.stage("calibrate"):
            found = few.observe(base)
            narrow = BF16 if self.precision.base == Precision.BF16 else FP16
            if found is None or (
                are_settled(base, found.table.stats, shapes, narrow) and self._are_inputs_alike(found)
            ):
                return found
        return self.observe(base)

    def _is_known(self, base: ir.Model) -> bool:
        """Whether the cache holds statistics of all samples."""
        return self._cache(base).load() is not None

    def _are_inputs_alike(self, found: Calibration) -> bool:
        """Whether no sample has an input more than twice as large as those observed."""
        stats = found.table.stats
        return all(
            float(np.abs(array).max(initial=0)) <= 2 * stats[name].absmax
            for sample in self.samples
            for name, array in sample.items()
            if name in stats
        )

    def few(self, count: int) -> Observer:
        """The same on at most so many samples."""
        return replace(self, samples=SomeSamples(self.samples, count))

    @property
    def identity(self) -> str:
        """What results depend on besides the options of the guard: the model, the samples, the method."""
        parts = (self.artifact.sha256, self.samples.sha256, self.precision, self.backend, self.config.calib_method)
        return " ".join((*parts, *(step.name for step in self.artifact.steps)))

    def warn_synthetic(self) -> None:
        """Say loudly that nobody gave samples."""
        if self.samples.source == "synthetic":
            eight = self.precision.is_quantized
            guessed = "8-bit scales and the FP16 overflow check are" if eight else "the overflow check is"
            text = f"no calibration samples: ranges come from SYNTHETIC random data, so {guessed} a guess"
            self.clock.warn("calibrate", f"{text}. Give real samples with --calib")

    def record(self, calibration: Calibration | None) -> CalibrationRecord | None:
        """What the report says of it."""
        if calibration is None:
            return None
        return CalibrationRecord(
            self.samples.source,
            self.config.calib_method,
            calibration.samples,
            calibration.seconds,
            calibration.peak_rss_bytes,
            calibration.cached,
        )
