"""Statistics for the precision decision: from samples, from the cache, and what an old TensorRT cache says."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from trtopt.config import BuildConfig
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.skeleton import content_hash
from trtopt.precision.decide import wanted_tensors
from trtopt.precision.observe.calibrate import CacheFile, Calibration, cached_collect
from trtopt.precision.observe.samples import Samples, SomeSamples
from trtopt.precision.observe.trt_cache import statistics_file
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
        config, clock = self.config, self.clock
        with clock.stage("calibrate"):
            cache = CacheFile(
                content_hash(base),
                self.samples.sha256,
                folder=config.cache_dir,
                file=None if is_variant else statistics_file(config),
                on_event=clock.listen,
            )
            return cached_collect(
                base,
                self.samples,
                cache,
                histogram=wanted.histogram,
                ranges=wanted.ranges,
                on_event=clock.listen,
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
