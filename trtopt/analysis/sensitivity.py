"""Which regions cost accuracy in 8 bits: what ``trtopt sensitivity`` and Python callers use."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir

from trtopt.accuracy.segments import SegmentedModel
from trtopt.accuracy.sensitivity import Errors, growth
from trtopt.accuracy.sensitivity import sensitivity as region_errors
from trtopt.cache.code import entry_key
from trtopt.cache.folder import SENSITIVITY, Blobs, make_cache_folder
from trtopt.config import BuildConfig, SensitivityConfig
from trtopt.config.paths import check_files, files_written
from trtopt.engine.backend import backend_of_rules
from trtopt.errors import InvalidModelError
from trtopt.events import OnEvent, ignore
from trtopt.graph import cost
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.input_values import input_values
from trtopt.graph.module_path import names_of
from trtopt.graph.shapes import static_shapes
from trtopt.graph.skeleton import content_hash
from trtopt.hardware.probe import present_gpu
from trtopt.hardware.spec import choose_gpu
from trtopt.hardware.user import gpu_table
from trtopt.pipeline.calibrate import Observer
from trtopt.pipeline.pictures import with_preprocess
from trtopt.precision.fp16.to_fp32 import to_fp32
from trtopt.precision.observe.decode import open_given
from trtopt.precision.observe.pictures import PictureOptions, PictureSamples
from trtopt.precision.observe.samples import SYNTHETIC, open_samples
from trtopt.precision.observe.stream import Samples
from trtopt.precision.plan import FP16, PrecisionPlan
from trtopt.precision.qdq.existing import is_quantized
from trtopt.precision.regions import Candidates, Problem, find_candidates
from trtopt.precision.write import apply_plan
from trtopt.report.files import write_forms
from trtopt.report.html.page import check_html
from trtopt.report.schema.sensitivity import GrowthStep, Sensitivity
from trtopt.report.text.command import made_by
from trtopt.rewrite import driver
from trtopt.rewrite.protocol import Stage, Target
from trtopt.rewrite.registry import select
from trtopt.source.check import weight_files
from trtopt.source.onnx_file import load
from trtopt.source.pytorch import as_file
from trtopt.support.clock import Clock
from trtopt.support.files import check_outputs
from trtopt.support.json_text import converted
from trtopt.support.temporary import TemporaryFolder

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from trtopt.config.keywords import SensitivityOptions

_MOST_REASONS = 3
_MOST_BYTES = 256 << 20


@dataclass(frozen=True)
class KeptErrors:
    """What is kept of a model: the error of each region, and how the error of all grows."""

    errors: Errors
    growth: tuple[GrowthStep, ...]


@dataclass(frozen=True)
class _Job:
    """What to measure: by whose placement rules, which samples give the ranges, and on which errors are measured."""

    artifact: ModelArtifact
    backend: str
    calibration: Samples
    check: Samples
    config: SensitivityConfig


def _measure(job: _Job, clock: Clock) -> Sensitivity:
    """The error that each region alone makes at the outputs, and its growth with all of them."""
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
        regions=tuple(sorted(regions, key=lambda region: -region.error)),
        together=found.errors.together,
        growth=found.growth,
        refused=candidates.refused,
        calibration=observer.record(calibration),
        cached=cached,
        names=names_of(job.artifact.model, base),
    )


def _cleaned(job: _Job, clock: Clock) -> ModelArtifact:
    """The model as a build cleans it, without the rewrites that a compiler has to judge."""
    recipes = tuple(recipe for recipe in select("all") if recipe.stage in (Stage.CLEAN, Stage.FOLD))
    target = Target(job.backend, job.config.precision, None)
    return driver.apply(job.artifact, recipes, target=target, on_event=clock.listen).artifact


def _measured(job: _Job, base: ir.Model, candidates: Candidates, clock: Clock) -> tuple[KeptErrors, bool]:
    """The figures, and whether they were in the cache."""
    ops = tuple(candidates.all.values())
    key = entry_key(__name__, content_hash(base), job.check.sha256, repr(ops))
    words = ("sensitivity", "sensitivity cache", "measuring anew")
    cache = Blobs(SENSITIVITY, job.config.cache_dir, clock.listen, words, _MOST_BYTES)
    known = cache.load(key, lambda content: converted(bytes(content), KeptErrors))
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
        errors = region_errors(model, regions, job.check, on_event=clock.listen)
    found = KeptErrors(errors, growth(base, quantized, regions, job.check))
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


def sensitivity(
    model: str | Path | onnx.ModelProto | ir.Model | torch.nn.Module,
    config: SensitivityConfig | None = None,
    *,
    on_event: OnEvent = ignore,
    **options: Unpack[SensitivityOptions],
) -> Sensitivity:
    """Measure what each region of a model costs in accuracy when it becomes 8-bit. No GPU is needed.

    Args:
        model: An ONNX file or model; a PyTorch module, or its name in code, ``nets.py:resnet`` (then give
            ``example_inputs`` or ``inputs``).
        config: The options; ``options`` override its fields by name.
        on_event: Called with progress and warnings.
        **options: Fields of :class:`~trtopt.config.SensitivityConfig`, ``example_inputs`` for a PyTorch module, and
            samples as :func:`trtopt.build` takes them.

    Raises:
        UsageError: An option, a sample or a GPU is wrong, or a file cannot be read or written.
        InvalidModelError: The model's content is invalid, or none of its nodes can become 8-bit.
        MissingDependencyError: ONNX Runtime is not installed; for ``html``, Jinja2.

    Example:
        >>> found = trtopt.sensitivity("model.onnx", calib="samples.npz")
        >>> found.precision, len(found.regions) > 0
        ('int8', True)
    """
    given = {**options}
    example_inputs, calib = given.pop("example_inputs", None), given.pop("calib", None)
    evaluation = given.pop("evaluation", None)
    eval_samples = given.pop("eval", evaluation)
    config = SensitivityConfig.given(config, given, "sensitivity(m, precision=...)")
    check_html(config.html)
    with TemporaryFolder() as folder:
        path = as_file(model, Path(folder), config, example_inputs, on_event)
        found = _run(path, config, calib, eval_samples, Clock(on_event))
        if path.parent == Path(folder):
            found = dataclasses.replace(found, model=made_by(found.model, model))
    write_forms(found, html=config.html, markdown=config.markdown, report=config.report)
    return found


def _run(path: Path, config: SensitivityConfig, calib: Any, eval_samples: Any, clock: Clock) -> Sensitivity:
    check_files(str(path), config, None)
    if config.cache_dir is not None:
        make_cache_folder(config.cache_dir)
    gpu = choose_gpu(config.gpu, gpu_table(config.gpus), present_gpu())
    backend = backend_of_rules(config.backend, gpu).name
    with clock.stage("load"):
        loaded = load(path)
    check_outputs(files_written(config), weight_files(loaded.model))
    pictures = PictureOptions(config.preprocess, is_labelled=False)
    given = config.calib if calib is None else calib
    if given is None or (isinstance(given, str) and given == SYNTHETIC):
        samples = open_samples(SYNTHETIC, loaded.inputs, values=input_values(loaded.model))
    else:
        samples = open_given(given, loaded.model, loaded.inputs, pictures=pictures)
    named = str(given) if isinstance(given, str | Path) and given != SYNTHETIC else ""
    given = config.eval if eval_samples is None else eval_samples
    check = samples if given is None else open_given(given, loaded.model, loaded.inputs, pictures=pictures)
    if config.preprocess and not any(isinstance(each, PictureSamples) for each in (samples, check)):
        clock.warn("samples", "--preprocess has no effect: the samples are no pictures")
    for each in dict.fromkeys((samples, check)):
        clock.say_taken(each.taken)
        with_preprocess(each, None, None, loaded.model, clock)
    found = _measure(_Job(loaded, backend, samples, check, config), clock)
    seconds = {name: round(value, 4) for name, value in clock.seconds.items()}
    return dataclasses.replace(found, calib=named, seconds=seconds, warnings=tuple(clock.warnings))
