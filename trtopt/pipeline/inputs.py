"""What a run reads: the model, the samples, the metric, and the shapes that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from trtopt.accuracy.metric import Metric, load_metric, python_metric
from trtopt.config.paths import files_read
from trtopt.engine.profiles import plan_profiles
from trtopt.engine.request import Profile
from trtopt.errors import UsageError
from trtopt.graph.artifact import ModelArtifact
from trtopt.pipeline import network_io
from trtopt.pipeline.imported_ranges import ImportedCache, imported_cache
from trtopt.pipeline.settings import BuildSettings, described, prunes
from trtopt.pipeline.verify import with_baseline
from trtopt.precision.fp16.to_fp32 import to_fp32
from trtopt.precision.observe.samples import SYNTHETIC, Samples, open_samples
from trtopt.source.check import weight_files
from trtopt.source.onnx_file import load
from trtopt.support.clock import Clock
from trtopt.support.files import check_outputs


@dataclass(frozen=True)
class Sources:
    """What the options name, or Python callers hand in: samples to calibrate on and to verify on, and the metric."""

    calib: Any = None
    eval: Any = None
    metric: Any = None


@dataclass(frozen=True)
class BuildInputs:
    """What a run works on.

    Attributes:
        loaded: The model.
        calibration: The samples that ranges come from.
        check: The samples that are verified on.
        source: Where those come from: ``eval``, ``calibration`` or ``synthetic``.
        metric: The user's metric, with what the model has in FP32; None without one.
        ranges: INT8 ranges of a calibration cache of TensorRT, if any.
        profiles: The shapes an engine takes.
    """

    loaded: ModelArtifact
    calibration: Samples
    check: Samples
    source: str
    metric: Metric | None
    ranges: ImportedCache | None
    profiles: tuple[Profile, ...]


def read_inputs(settings: BuildSettings, sources: Sources, clock: Clock) -> BuildInputs:
    """Read what a run works on, and refuse what does not fit the model.

    Raises:
        UsageError: A file cannot be read, or does not fit the model.
        InvalidModelError: The model's content is invalid.
    """
    config = settings.config
    with clock.stage("load"):
        loaded = load(settings.path)
    _check_types(settings, loaded.model)
    ranges = imported_cache(config, settings.precision, loaded.model, clock)
    check_outputs(described(settings.outputs.named), read_files(settings, loaded))
    calibration, check, source = _samples(settings, sources, loaded)
    network_io.check(loaded.model, settings.io, calibration, check)
    metric = _metric(settings, sources.metric, loaded, check, clock)
    return BuildInputs(
        loaded, calibration, check, source, metric, ranges, _profiles(settings, loaded, calibration, clock)
    )


def read_files(settings: BuildSettings, loaded: ModelArtifact) -> dict[str, Any]:
    """The files that a run reads, by what messages call them."""
    return {**files_read(str(settings.path), settings.config), **weight_files(loaded.model)}


def _check_types(settings: BuildSettings, model: ir.Model) -> None:
    """Refuse to prune a model that is to keep types other than FP32: pruning and its predictions would be in FP32."""
    config = settings.config
    if prunes(config) and settings.precision is None and to_fp32(model) is not model:
        raise UsageError(
            "Weights are pruned in FP32, and the model holds other floating types",
            where="--sparse-all" if config.sparse_all else "--sparse",
            remedy="say what the result is to run in, with --fp16 for one",
        )


def _samples(settings: BuildSettings, sources: Sources, loaded: ModelArtifact) -> tuple[Samples, Samples, str]:
    """Calibration samples, verification samples, and where the latter come from."""
    config = settings.config
    shapes = config.opt_shapes[0] if config.opt_shapes else None
    calib = SYNTHETIC if sources.calib is None else sources.calib
    samples = open_samples(calib, loaded.inputs, shapes=shapes)
    if sources.eval is not None:
        return samples, open_samples(sources.eval, loaded.inputs, shapes=shapes), "eval"
    return samples, samples, "synthetic" if samples.source == "synthetic" else "calibration"


def _metric(settings: BuildSettings, asked: Any, loaded: ModelArtifact, check: Samples, clock: Clock) -> Metric | None:
    if asked is None:
        return None
    if callable(asked):
        metric = python_metric(asked)
    else:
        metric = load_metric(asked, has_labels=check.labels is not None, max_drop=settings.budget.drop)
    return with_baseline(metric, loaded.model, check, clock)


def _profiles(settings: BuildSettings, loaded: ModelArtifact, samples: Samples, clock: Clock) -> tuple[Profile, ...]:
    config = settings.config
    plan = plan_profiles(
        loaded.inputs,
        min_shapes=config.min_shapes,
        opt_shapes=config.opt_shapes,
        max_shapes=config.max_shapes,
        observed=samples.shapes() if samples.source == "user" else (),
    )
    for note in plan.notes:
        clock.warn("shapes", note)
    return plan.profiles
