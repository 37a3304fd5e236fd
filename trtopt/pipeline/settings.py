"""What a run of build or optimize is asked for and reads: refused where it cannot be done, before the first stage."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from trtopt.accuracy.box_forms import parse_boxes
from trtopt.accuracy.metric import Metric, load_metric, python_metric
from trtopt.accuracy.recorded import Recorded, read_recorded
from trtopt.accuracy.scores import holds_numbers
from trtopt.config import DEFAULT_ACCURACY_DROP, DEFAULT_FLOOR, RANDOM_FLOOR, AccuracyBudget, BuildConfig, Floor, flag
from trtopt.config.idle import idle_options
from trtopt.config.paths import check_files, files_read
from trtopt.engine.backend import TENSORRT, Backend, backend_of_rules, choose_backend
from trtopt.engine.cache import EngineCache
from trtopt.engine.manifest import Signer, manifest_path, signature_path
from trtopt.engine.request import ShapeProfile, fixed_sizes, plan_profiles, split_values
from trtopt.errors import TargetError, UsageError
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.input_values import InputValues, input_values
from trtopt.graph.shapes import with_sizes
from trtopt.graph.states import find_states
from trtopt.hardware.probe import present_gpu, probe
from trtopt.hardware.spec import GpuSpec, choose_gpu, supports
from trtopt.hardware.user import gpu_table
from trtopt.images.preprocess import Preprocess
from trtopt.judge.target import BuildTarget
from trtopt.pipeline import network_io, pixels
from trtopt.pipeline.compile import check_search, engine_cache
from trtopt.pipeline.manifest import other_files
from trtopt.pipeline.pictures import with_preprocess
from trtopt.pipeline.polygraphy import make_folder
from trtopt.pipeline.shapes import given_shapes, sample_shapes
from trtopt.pipeline.verify import with_baseline
from trtopt.precision.fp16.network_io import IoRequest, parse_io
from trtopt.precision.fp16.to_fp32 import to_fp32
from trtopt.precision.observe.batches import BatchedSamples, FixedAxes, fixed_axes
from trtopt.precision.observe.decode import open_given
from trtopt.precision.observe.pictures import PictureOptions, PictureSamples, find_pictures
from trtopt.precision.observe.samples import SYNTHETIC, open_samples, unseen_samples
from trtopt.precision.observe.stream import FilledSamples, Samples
from trtopt.precision.observe.trt_cache import ImportedCache, imported_cache
from trtopt.report.html.page import check_html
from trtopt.report.schema.manifest import FileHash
from trtopt.report.schema.steps import StepRecord
from trtopt.rewrite import registry
from trtopt.source.check import weight_files
from trtopt.source.last_token import of_last_token
from trtopt.source.lora import adapter_feeds, as_inputs, merged, read_adapter
from trtopt.source.onnx_file import load
from trtopt.source.torch_call import bounds_of
from trtopt.support.clock import Clock
from trtopt.support.files import check_outputs
from trtopt.support.precision import Precision
from trtopt.support.temporary import TEMPORARY


@dataclass(frozen=True)
class Outputs:
    """The files that a run writes, by what they are: as the user named them, and absolute (scripts may leave the
    folder)."""

    named: Mapping[str, Path]
    places: Mapping[str, Path]

    @property
    def main(self) -> Path:
        """The engine, or without one the optimized model."""
        return self.named["engine"] if "engine" in self.named else self.named["onnx"]

    def with_host(self, path: Path) -> Outputs:
        """And the part of the model for the host, beside the main file."""
        place = self.places["engine"] if "engine" in self.places else self.places["onnx"]
        return Outputs({**self.named, "host": path}, {**self.places, "host": place.with_name(path.name)})


def described(files: Mapping[str, Path]) -> dict[str, Path]:
    """Outputs by what messages call them."""
    return {f"the output {file.name} ({kind})": file for kind, file in files.items()}


@dataclass(frozen=True)
class BuildSettings:
    """What a run is asked for.

    Attributes:
        path: The model.
        config: The options.
        make_engine: Whether an engine is built; else the optimized model is all.
        precision: The precision written into the graph; None for the types the model has.
        budget: The accuracy that may be lost.
        target: For whom the model is prepared; the shapes are not known yet.
        outputs: The files to write.
        io: The types and layouts asked of inputs and outputs.
        signer: Signs the manifest; None where that was not asked for.
        files: What else is read (:func:`~trtopt.pipeline.manifest.other_files`).
        cache: Where engines are kept; None to build anew.
        kept: The folder for what Polygraphy compares; None where that is not asked for.
    """

    path: Path
    config: BuildConfig
    make_engine: bool
    precision: Precision | None
    budget: AccuracyBudget
    target: BuildTarget
    outputs: Outputs
    io: tuple[IoRequest, ...]
    signer: Signer | None
    files: tuple[FileHash, ...]
    cache: EngineCache | None
    kept: Path | None

    @property
    def judged_in(self) -> Precision | None:
        """The precision recipes are judged in: FP16 where 8-bit regions must win against the best FP16 engine."""
        guarded = self.precision is not None and self.precision.is_quantized and not self.config.keep_all_int8
        return Precision.FP16 if guarded else self.precision

    @property
    def uses_tf32(self) -> bool:
        """Whether FP32 products may be TF32."""
        return self.precision == Precision.TF32

    def checked_on(self, samples: Samples, compared: ir.Model | None = None) -> BuildSettings:
        """The settings once it is known what is verified on: a caller's samples give INT8 and FP8 a floor, and random
        ones bound the noise of ``compared``, None with a metric, where its outputs are numbers; a floor that nobody
        asked for takes regions back there, and fails nothing."""
        budget, config, least = self.budget, self.config, Floor()
        is_narrow = self.precision in (Precision.INT8, Precision.FP8)
        if samples.source == "user":
            least = DEFAULT_FLOOR if is_narrow or config.weights is not None else least
        elif compared is not None and not prunes(config) and holds_numbers(compared):
            budget = budget.on_random_data()
            is_asked = budget.is_given or config.min_agreement is not None or config.weights is not None
            least = RANDOM_FLOOR if is_narrow and not (is_asked or config.keep_all_int8) else least
        return replace(self, budget=replace(budget, floor=least.with_given(config.min_agreement, config.min_sqnr_db)))

    def budget_after(self, is_pruned: bool) -> AccuracyBudget:
        """The budget once it is known whether a weight was pruned.

        A default is that of ``--auto`` or of pruning: other precisions are gated only when asked.
        """
        return self.budget if self.precision == Precision.AUTO or is_pruned else self.budget.as_asked()

    def builder_config(self) -> BuildConfig:
        """The options with the builder told to look for sparse kernels, where it can and nobody has said otherwise."""
        config = self.config
        is_said = any(item.lower().startswith("sparsity") for item in config.builder)
        if not prunes(config) or self.target.backend != TENSORRT or is_said:
            return config
        return replace(config, builder=(*config.builder, "sparsity=true"))


def settle(path: Path, config: BuildConfig, calib: Any, clock: Clock, *, make_engine: bool) -> BuildSettings:
    """Resolve what a run is asked for, and refuse what it cannot do; ``calib`` is None where no samples were given.

    Raises:
        UsageError: Options contradict one another, or a file cannot be read or written.
        TargetError: The target cannot do what is asked for.
        MissingDependencyError: The compiler is not installed, or what signs; for a page, Jinja2.
    """
    target = _target(config, make_engine)
    if config.gpu is None and probe().gpu is not None and probe().reason:
        clock.warn("gpu", probe().reason)
    outputs = _outputs(path, config, target.backend, make_engine)
    check_html(config.html)
    check_files(str(path), config, None, engine=make_engine)
    signer = _signer(config, make_engine)
    _check_epcontext(config, outputs, make_engine)
    registry.select(config.recipes)
    if config.boxes is not None:
        parse_boxes(config.boxes)
    _check_pruning(config, target.backend, target.gpu, calib)
    precision = config.precision or (Precision.FP16 if make_engine else None)
    _check_precision(precision, target)
    _check_weights(target, config)
    io = parse_io(config.io)
    if make_engine:
        check_search(config, target.backend)
    return BuildSettings(
        path,
        config,
        make_engine,
        precision,
        _budget(config),
        target,
        outputs,
        io,
        signer,
        other_files(config) if make_engine else (),
        engine_cache(config, clock, make_engine),
        None if config.polygraphy is None else make_folder(config.polygraphy),
    )


def prunes(config: BuildConfig) -> bool:
    """Whether layers are to be pruned."""
    return config.sparse or config.sparse_all


def _target(config: BuildConfig, make_engine: bool) -> BuildTarget:
    """The GPU asked for, the one present, or the default; and the compiler for it."""
    present = present_gpu()
    gpu = choose_gpu(config.gpu, gpu_table(config.gpus), present)
    choose = choose_backend(config.backend, gpu, present) if make_engine else backend_of_rules(config.backend, gpu)
    return BuildTarget(choose, gpu)


def _outputs(path: Path, config: BuildConfig, backend: Backend, make_engine: bool) -> Outputs:
    files: dict[str, str | Path | None] = {name: getattr(config, name) for name in ("report", "html", "markdown")}
    files["layers"] = config.export_layer_info
    if make_engine:
        made = path.parent.name.startswith(TEMPORARY)  # of a module that code makes: it lies in no folder of the user's
        engine = Path(config.output or (Path(path.name) if made else path).with_suffix(backend.suffix))
        files.update(engine=engine, manifest=manifest_path(engine), signature=signature_path(engine))
        files["onnx"] = config.save_onnx
        if config.epcontext is not None:
            model = Path(config.epcontext)
            files["epcontext"], files["manifest of epcontext"] = model, manifest_path(model)
            files["signature of epcontext"] = signature_path(model)
    else:
        if config.export_layer_info is not None:
            remedy = "leave it out, or use `trtopt build`"
            raise UsageError("There is no engine that has layers", where="--export-layer-info", remedy=remedy)
        if config.output is None:
            raise UsageError("optimize needs an output file", where="-o", remedy="give -o OUT.onnx")
        files["onnx"] = config.output
    named = {kind: Path(name) for kind, name in files.items() if name is not None}
    return Outputs(named, {kind: file.absolute() for kind, file in named.items()})


def _signer(config: BuildConfig, make_engine: bool) -> Signer | None:
    if config.sign is None:
        return None
    if not make_engine:
        raise UsageError("There is no engine to sign", where="--sign", remedy="leave it out, or use `trtopt build`")
    return Signer(Path(config.sign))


def _check_epcontext(config: BuildConfig, outputs: Outputs, make_engine: bool) -> None:
    """Refuse a model for ONNX Runtime that it could not load the engine from."""
    if config.epcontext is None:
        if config.epcontext_embed:
            what, remedy = "There is no model to embed the engine in", "give --epcontext OUT.onnx"
            raise UsageError(what, where="--epcontext-embed", remedy=remedy)
        return
    where = f"--epcontext {config.epcontext}"
    if not make_engine:
        raise UsageError("There is no engine to load", where=where, remedy="leave it out, or use `trtopt build`")
    engine = outputs.places["engine"]
    if outputs.places["epcontext"].parent.resolve() != engine.parent.resolve():
        raise UsageError(
            "ONNX Runtime loads an engine from the folder of its model, and the two lie apart",
            where=where,
            remedy=f"name a file in {outputs.named['engine'].parent}",
        )
    for item in parse_io(config.io):
        if item.layout != "chw":
            raise UsageError(
                "ONNX Runtime gives an engine tensors in the order of their shape, whatever their layout",
                where=f"{where}, --io {item.name}:{item.dtype}:{item.layout}",
                remedy="leave the layout out",
            )


def _check_pruning(config: BuildConfig, backend: Backend, gpu: GpuSpec | None, calib: object) -> None:
    """Refuse what ``--sparse`` cannot do: a gain for no single GPU, weights taken out without samples."""
    if not prunes(config):
        return
    if gpu is None and not config.sparse_all:
        raise TargetError(
            "The gain of sparse kernels cannot be predicted for every GPU at once",
            where="--gpu portable",
            remedy="name a GPU with --gpu, or prune whatever the gain with --sparse-all",
        )
    if calib is None and (config.sparse_all or backend == TENSORRT):
        raise UsageError(
            "Half of the weights would be taken out without a sample to fit the others to",
            where="--sparse-all" if config.sparse_all else "--sparse",
            remedy="give samples with --calib; --calib synthetic prunes by magnitude alone, which costs accuracy",
        )


def _check_precision(precision: Precision | None, target: BuildTarget) -> None:
    """Refuse FP8 where a GPU that the engine is for has no units for it."""
    if precision == Precision.FP8 and (target.gpu is None or not supports(target.gpu, Precision.FP8)):
        remedy = "name a GPU of compute capability 8.9 or later with --gpu, or use --int8"
        raise TargetError("The target has no FP8 units", where=f"--gpu {target.gpu_name}", remedy=remedy)


_FP4 = ir.DataType.FLOAT4E2M1
_UNITS = {"nvfp4": Precision.FP4, "mxfp8": Precision.FP8}
"""Formats of weights that only GPUs with units for the type read."""


def _check_weights(target: BuildTarget, config: BuildConfig) -> None:
    """Refuse narrow weights that a GPU which the engine is for does not read."""
    needed = _UNITS.get(str(config.weights))
    if needed is not None and (target.gpu is None or not supports(target.gpu, needed)):
        least = "10.0 or 12.0" if needed == Precision.FP4 else "8.9"
        remedy = f"name a GPU of compute capability {least} or later with --gpu, or use --weights int4"
        what = f"The target does not read weights in {needed.upper()}"
        raise TargetError(what, where=f"--gpu {target.gpu_name}", remedy=remedy)


def _budget(config: BuildConfig) -> AccuracyBudget:
    """What the user gave, and a default where something is searched for within it.

    Raises:
        UsageError: The metric is an SQNR, which no drop bounds, and nothing else bounds it.
    """
    given = AccuracyBudget(config.max_accuracy_drop, config.min_sqnr_db)
    is_auto = config.precision == Precision.AUTO
    searches = is_auto or (prunes(config) and not config.allow_accuracy_loss)
    if not searches or given.drop is not None:
        return given
    if config.metric != "sqnr":
        return AccuracyBudget(DEFAULT_ACCURACY_DROP, config.min_sqnr_db, "default")
    if given.sqnr_db is None:
        raise UsageError(
            f"{'--auto' if is_auto else '--sparse'} has no budget: the drop that it allows by default cannot bound the "
            "metric sqnr, whose baseline is infinite",
            where="--metric sqnr",
            remedy="give --min-sqnr-db X",
        )
    return given


@dataclass(frozen=True)
class DataSources:
    """What the options name, or Python callers hand in: samples to calibrate on and to verify on, and the metric."""

    calib: Any = None
    eval: Any = None
    metric: Any = None


@dataclass(frozen=True)
class BuildInputs:
    """What a run works on.

    Attributes:
        loaded: The model.
        fixed: The model with the sizes that all profiles agree in.
        axes: Those sizes; None where there are none.
        calibration: The samples that ranges come from.
        check: The samples that are verified on.
        source: Where those come from: ``eval``, ``calibration`` or ``synthetic``.
        metric: The user's metric, with what the model has in FP32; None without one.
        ranges: INT8 ranges of a calibration cache of TensorRT, if any.
        profiles: The shapes an engine takes.
        recorded: The outputs to compare with where they are not the model's own in FP32.
    """

    loaded: ModelArtifact
    fixed: ModelArtifact
    axes: FixedAxes | None
    calibration: Samples
    check: Samples
    source: str
    metric: Metric | None
    ranges: ImportedCache | None
    profiles: tuple[ShapeProfile, ...]
    recorded: Recorded | None


def read_inputs(settings: BuildSettings, sources: DataSources, clock: Clock) -> BuildInputs:
    """Read what a run works on, and refuse what does not fit the model.

    Raises:
        UsageError: A file cannot be read, or does not fit the model.
        InvalidModelError: The model's content is invalid.
    """
    config = settings.config
    for text in idle_options({**vars(config), **vars(sources), "precision": settings.precision}):
        clock.warn("options", text)
    with clock.stage("load"):
        loaded = load(settings.path)
        loaded = _with_adapters(of_last_token(loaded) if config.last_token else loaded, settings, clock)
    _check_types(settings, loaded.model)
    ranges = imported_cache(config, settings.precision, loaded.model, clock)
    check_outputs(described(settings.outputs.named), read_files(settings, loaded))
    how: str | Preprocess | None = config.preprocess
    if config.preprocess_in_engine:
        loaded, how = _with_pixels(settings, sources, loaded, clock)
        clock.warn("pixels", loaded.steps[-1].details[0])
    calibration, check, source = _samples(settings, sources, loaded, how, clock)
    for samples in dict.fromkeys((calibration, check)):
        clock.say_taken(samples.taken)
    outputs = [str(value.name) for value in loaded.model.graph.outputs]
    if config.tolerances is not None:
        config.tolerances.check(outputs)
    recorded = _recorded(config, check, source, outputs)
    check = check if recorded is None else check.undivided()
    network_io.check(loaded.model, settings.io, calibration, check)
    profiles = _profiles(settings, loaded, calibration, clock)
    fixed, axes = _fix(settings, loaded, profiles, clock)
    if axes is not None:
        check = check if recorded is not None else BatchedSamples(check, axes, filled=False)
        calibration = BatchedSamples(calibration, axes, filled=True)
    metric = _metric(settings, sources.metric, loaded, check, clock)
    return BuildInputs(loaded, fixed, axes, calibration, check, source, metric, ranges, profiles, recorded)


def _with_adapters(loaded: ModelArtifact, settings: BuildSettings, clock: Clock) -> ModelArtifact:
    """The model with the adapters of ``--lora`` in its weights, or as inputs: what everything is compared with, too."""
    config, precision = settings.config, settings.precision
    if not config.lora:
        return loaded
    adapters = [read_adapter(text) for text in config.lora]
    for note in (note for adapter in adapters for note in adapter.notes):
        clock.warn("lora", note)
    if config.lora_inputs is None:
        return merged(loaded, adapters)
    is_wide = precision is None or precision.is_wide
    half = ir.DataType.BFLOAT16 if precision == Precision.BF16 else ir.DataType.FLOAT16
    return as_inputs(loaded, adapters, int(config.lora_inputs), ir.DataType.FLOAT if is_wide else half)


def _recorded(config: BuildConfig, check: Samples, source: str, outputs: Sequence[str]) -> Recorded | None:
    """The outputs of ``--reference``, which belong to the feeds of ``--eval`` as they are."""
    if config.reference is None:
        return None
    if source != "eval" or check.source == "synthetic":
        raise UsageError(
            "Recorded outputs belong to inputs, and these are not given",
            where=f"--reference {config.reference}",
            remedy="give the inputs that the outputs were computed from with --eval",
        )
    return read_recorded(Path(config.reference), check.undivided(), outputs)


def _fix(
    settings: BuildSettings, loaded: ModelArtifact, profiles: tuple[ShapeProfile, ...], clock: Clock
) -> tuple[ModelArtifact, FixedAxes | None]:
    """The model with the sizes in it that all profiles agree in, and those."""
    sizes = {} if settings.config.keep_dynamic else fixed_sizes(loaded.inputs, profiles)
    if not sizes:
        return loaded, None
    start = time.perf_counter()
    with clock.stage("fix shapes"):
        model = with_sizes(loaded.model, sizes)
    details = tuple(
        f"{name} " + ", ".join(f"axis {axis}: {size}" for axis, size in axes.items()) for name, axes in sizes.items()
    )
    changes = sum(map(len, sizes.values()))
    step = StepRecord("fixed-shapes", "SHAPES", changes, time.perf_counter() - start, details=details)
    return loaded.with_step(model, step), fixed_axes(loaded.model, loaded.inputs, sizes)


def read_files(settings: BuildSettings, loaded: ModelArtifact) -> dict[str, Any]:
    """The files that a run reads, by what messages call them."""
    return {**files_read(str(settings.path), settings.config), **weight_files(loaded.model)}


def _check_types(settings: BuildSettings, model: ir.Model) -> None:
    """Refuse to prune a model that is to keep types other than FP32: pruning and its predictions would be in FP32.

    And FP4 in the model, for a GPU that does not read it.
    """
    config, target = settings.config, settings.target
    fp4 = next((v for node in model.graph for v in (*node.inputs, *node.outputs) if v and v.dtype == _FP4), None)
    if fp4 is not None and (target.gpu is None or not supports(target.gpu, Precision.FP4)):
        what, remedy = (
            "The model holds FP4, which the target does not read",
            "name a GPU of compute capability 10.0 or ",
        )
        raise TargetError(what, where=f"tensor {fp4.name}, --gpu {target.gpu_name}", remedy=f"{remedy}12.0 with --gpu")
    if prunes(config) and settings.precision is None and to_fp32(model) is not model:
        raise UsageError(
            "Weights are pruned in FP32, and the model holds other floating types",
            where="--sparse-all" if config.sparse_all else "--sparse",
            remedy="say what the result is to run in, with --fp16 for one",
        )


def _with_pixels(
    settings: BuildSettings, sources: DataSources, loaded: ModelArtifact, clock: Clock
) -> tuple[ModelArtifact, Preprocess]:
    """The model that prepares pixels itself, and what is left to do before it."""
    config, spec = settings.config, pixels.picture_input(loaded.inputs)
    for request in settings.io:
        if request.name == spec.name:
            raise UsageError(
                f"{spec.name!r} is to take pixels, uint8 with the channels last",
                where=request.where,
                remedy="leave it out, or --preprocess-in-engine",
            )
    given = (config.opt_shapes or config.max_shapes or ({},))[0].get(spec.name, ())
    if config.preprocess is not None:
        return pixels.in_model(loaded, pixels.said(config.preprocess, loaded.inputs, given))
    labels = None if config.labels is None else Path(config.labels)
    shapes = {spec.name: pixels.shape_before(spec, given)}
    options = PictureOptions(None, labels, skip_bad=config.skip_bad, shapes=shapes)
    for source in (sources.eval, sources.calib):
        if isinstance(source, (str, Path)) and Path(source).is_dir() and find_pictures(Path(source)):
            found = open_samples(source, loaded.inputs, pictures=options)
            if isinstance(found, PictureSamples):
                found.notes = ()  # they are said when the pictures are opened as samples
            found = with_preprocess(found, sources.metric, config.boxes, loaded.model, clock)
            if isinstance(found, PictureSamples):
                return pixels.in_model(loaded, found.how)
    raise UsageError(
        "Nobody says how pixels become the input of the network",
        where="--preprocess-in-engine",
        remedy="say it with --preprocess, or give pictures with --calib, by which it is guessed",
    )


def _samples(
    settings: BuildSettings, sources: DataSources, loaded: ModelArtifact, how: str | Preprocess | None, clock: Clock
) -> tuple[Samples, Samples, str]:
    """Calibration samples, verification samples, and where the latter come from."""
    config = settings.config
    rank = config.lora_inputs
    adapters = [] if rank is None else adapter_feeds(loaded.inputs, config.lora, int(rank))
    fed = [item for item in loaded.inputs if not adapters or item.name not in adapters[0]]
    best = sample_shapes(config, fed)
    shapes, numbers = split_values(fed, best)
    given = {name: InputValues("given", numbers=each) for name, each in numbers.items()}
    # Values that say a shape say it of the optimum, so that the samples have its shapes too.
    inputs = [replace(item, shape=shapes.get(item.name, item.shape)) for item in fed] if given else fed
    how_made: dict[str, Any] = {"shapes": shapes, "values": input_values(loaded.model) | given}

    def read(source: Any) -> Samples:
        is_made = source is None or (isinstance(source, str) and source == SYNTHETIC)
        if is_made:
            return open_samples(SYNTHETIC, inputs, **how_made)
        return open_given(source, loaded.model, fed, config.steps, pictures=pictures)

    labels = None if config.labels is None else Path(config.labels)
    pictures = PictureOptions(how, labels, skip_bad=config.skip_bad, shapes=best)
    check = None if sources.eval is None else read(sources.eval)
    if check is not None:
        # What was found of these, whose labels say more, holds for the others; --labels is of these.
        check = with_preprocess(check, sources.metric, config.boxes, loaded.model, clock)
        found = check.how if isinstance(check, PictureSamples) else how
        pictures = replace(pictures, preprocess=found, labels=None, is_labelled=False)
    samples = read(sources.calib)
    if not any(isinstance(item, PictureSamples) for item in (samples, check)):
        for name in ("preprocess", "labels", "skip_bad"):
            if getattr(config, name) and not (name == "preprocess" and config.preprocess_in_engine):
                clock.warn("samples", f"{flag(name)} has no effect: the samples are no pictures")
    samples = with_preprocess(samples, None if check is not None else sources.metric, config.boxes, loaded.model, clock)
    source = "eval" if check is not None else "synthetic" if samples.source == "synthetic" else "calibration"
    if source == "synthetic" and settings.precision is not None and settings.precision.is_quantized:
        check = unseen_samples(inputs, **how_made)  # ranges are fitted to the others, which nothing exceeds
    if adapters:
        samples = FilledSamples(samples, adapters)
        check = None if check is None else FilledSamples(check, adapters)
    return samples, samples if check is None else check, source


def _metric(settings: BuildSettings, asked: Any, loaded: ModelArtifact, check: Samples, clock: Clock) -> Metric | None:
    if asked is None:
        return None
    drop = settings.budget.drop
    if callable(asked):
        metric = python_metric(asked)
    else:
        metric = load_metric(asked, has_labels=check.labels is not None, max_drop=drop, boxes=settings.config.boxes)
    metric = with_baseline(metric, loaded.model, check, clock)
    if metric.note:
        clock.warn("metric", metric.note)
    if metric.labelled is not None and metric.baseline == 0:
        text = f"{metric.name} is 0 in FP32: it says nothing of what is lost"
        clock.warn("metric", f"{text}; check the labels, --preprocess and, of a detector, --boxes")
    return metric


def _profiles(
    settings: BuildSettings, loaded: ModelArtifact, samples: Samples, clock: Clock
) -> tuple[ShapeProfile, ...]:
    given = given_shapes(settings.config, loaded, settings.precision, settings.target.gpu, clock)
    plan = plan_profiles(
        loaded.inputs,
        min_shapes=given.least,
        opt_shapes=given.best,
        max_shapes=given.most,
        observed=samples.shapes() if samples.source == "user" else (),
        growing={str(state.input.name) for state in find_states(loaded.model) if not state.in_place},
        bounds=bounds_of(settings.config.dynamic or ()),
    )
    for note in plan.notes:
        clock.note("shapes", note)
    return plan.profiles
