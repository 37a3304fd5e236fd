"""The stages of ``trtopt sensitivity``: observe, decide what could be 8-bit, measure."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

import onnx_ir as ir

from trtopt.accuracy.segments import SegmentedModel
from trtopt.accuracy.sensitivity import Errors, growth, sensitivity
from trtopt.cache.code import entry_key
from trtopt.cache.folder import SENSITIVITY, Blobs
from trtopt.config import BuildConfig, SensitivityConfig
from trtopt.errors import InvalidModelError
from trtopt.graph import cost
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.shapes import static_shapes
from trtopt.graph.skeleton import content_hash
from trtopt.pipeline.calibrate import Observer
from trtopt.precision.fp16.to_fp32 import to_fp32
from trtopt.precision.observe.samples import Samples
from trtopt.precision.plan import FP16, PrecisionPlan
from trtopt.precision.qdq.existing import is_quantized
from trtopt.precision.regions import Candidates, Problem, find_candidates
from trtopt.precision.write import apply_plan
from trtopt.report.schema.sensitivity import GrowthStep, RegionError, Sensitivity
from trtopt.rewrite import driver
from trtopt.rewrite.protocol import Stage, Target
from trtopt.rewrite.registry import select
from trtopt.support.clock import Clock
from trtopt.support.json_text import converted

_MOST_REASONS = 3
_MOST_BYTES = 256 << 20


@dataclass(frozen=True)
class Measured:
    """What is kept of a model: the error of each region, and how the error of all grows."""

    errors: Errors
    growth: tuple[GrowthStep, ...]


@dataclass(frozen=True)
class SensitivityJob:
    """What to measure.

    Attributes:
        artifact: The model as loaded.
        backend: Whose placement rules apply: ``tensorrt-rtx`` or ``tensorrt``.
        calibration: Samples that give the ranges.
        check: Samples that errors are measured on.
        config: The options.
    """

    artifact: ModelArtifact
    backend: str
    calibration: Samples
    check: Samples
    config: SensitivityConfig


def measure(job: SensitivityJob, clock: Clock) -> Sensitivity:
    """The error that each region alone makes at the outputs, and its growth with all of them.

    The model is cleaned as a build does it, without the rewrites that a compiler has to judge.

    Raises:
        InvalidModelError: No node can become 8-bit, or ONNX Runtime cannot run the model.
        UsageError: A sample is bad, or the cache cannot be written where it was asked for.
    """
    config, precision = job.config, job.config.precision
    with clock.stage("rewrite"):
        cleaned = _cleaned(job, clock)
    base = to_fp32(cleaned.model)
    build = BuildConfig(calib_method=config.calib_method, cache_dir=config.cache_dir)
    observer = Observer(job.artifact, precision, job.backend, job.calibration, build, clock)
    observer.warn_synthetic()
    calibration = observer.observe(base)
    stats = {} if calibration is None else calibration.table.stats
    with clock.stage("decide"):
        shapes = {name: tuple(dims) for name, dims in job.calibration.shapes()[0].items()}
        values = static_shapes(base, shapes)
        problem = Problem(base, job.backend, stats, values, config.calib_method, FP16)
        candidates = find_candidates(problem, precision.quantized_types)
    if not candidates.regions:
        raise _nothing(precision, candidates, base)
    with clock.stage("sensitivity"):
        found, cached = _measured(job, base, candidates, clock)
    flop = cost.flop_by_node(base, values)
    total = sum(flop.values()) or 1
    regions = [
        dataclasses.replace(item, flop_share=sum(flop.get(node, 0) for node in item.nodes) / total)
        for item in found.errors.regions.values()
    ]
    return Sensitivity(
        model=job.artifact.to_json_dict(),
        precision=precision,
        backend=job.backend,
        samples=found.errors.samples,
        regions=tuple(sorted(regions, key=_worst_first)),
        together=found.errors.together,
        growth=found.growth,
        refused=candidates.refused,
        calibration=observer.record(calibration),
        cached=cached,
    )


def _worst_first(region: RegionError) -> float:
    return -region.error


def _cleaned(job: SensitivityJob, clock: Clock) -> ModelArtifact:
    recipes = tuple(recipe for recipe in select("all") if recipe.stage in (Stage.CLEAN, Stage.FOLD))
    target = Target(job.backend, job.config.precision, None)
    return driver.apply(job.artifact, recipes, target=target, on_event=clock.listen).artifact


def _measured(job: SensitivityJob, base: ir.Model, candidates: Candidates, clock: Clock) -> tuple[Measured, bool]:
    """The figures, and whether they were in the cache."""
    ops = tuple(candidates.all.values())
    key = entry_key(__name__, content_hash(base), job.check.sha256, repr(ops))
    words = ("sensitivity", "sensitivity cache", "measuring anew")
    cache = Blobs(SENSITIVITY, job.config.cache_dir, clock.listen, words, _MOST_BYTES)
    known = cache.load(key, lambda content: converted(bytes(content), Measured))
    if known is not None:
        return known, True
    quantized = apply_plan(base, PrecisionPlan(job.config.precision, quantized=ops))
    # The additions that read a region's tensor quantized change with it.
    skips = {op.node: op.skips for op in ops}
    regions = {
        region.name: tuple(dict.fromkeys((*region.nodes, *(skip for node in region.nodes for skip in skips[node]))))
        for region in candidates.regions
    }
    with SegmentedModel(base, quantized, {name for nodes in regions.values() for name in nodes}) as model:
        errors = sensitivity(model, regions, job.check, on_event=clock.listen)
    found = Measured(errors, growth(base, quantized, regions, job.check))
    cache.store(key, [json.dumps(dataclasses.asdict(found)).encode()])
    return found, False


def _nothing(precision: str, candidates: Candidates, base: ir.Model) -> InvalidModelError:
    reasons = "; ".join(f"{item.node}: {item.reason}" for item in candidates.refused[:_MOST_REASONS])
    more = len(candidates.refused) - _MOST_REASONS
    other = "it has no product with a constant weight"
    remedy = "there is no sensitivity to measure; give another backend or other samples if a reason names them"
    if is_quantized(base):
        other, remedy = "it is quantized already", "give the model as it was before it was quantized"
    return InvalidModelError(
        f"No node of the model can become {precision.upper()}",
        where=f"{reasons} and {more} more" if more > 0 else reasons or other,
        remedy=remedy,
    )
