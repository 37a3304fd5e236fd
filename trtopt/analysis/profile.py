"""Measured times beside predicted ones: what ``trtopt profile``, ``trtopt report`` and Python callers use."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import onnx
import onnx_ir as ir

from trtopt.analysis.advice import IN_MEMORY, Target, model_words, with_line
from trtopt.config import ONNXRUNTIME, TIMING, BuildConfig, ProfileConfig, ShapeMap, flag, options
from trtopt.config.paths import check_files, files_written
from trtopt.engine.backend import is_engine
from trtopt.engine.kernel_cache import kernels_folder
from trtopt.engine.manifest import load_engine, manifest_path, runtime_options
from trtopt.engine.options import weight_budget
from trtopt.engine.request import input_shapes, split_values
from trtopt.errors import TargetError, UsageError
from trtopt.events import OnEvent, ignore
from trtopt.graph.input_values import input_values
from trtopt.graph.module_path import module_of, module_of_node
from trtopt.hardware.cpu import available_threads
from trtopt.hardware.probe import present_gpu, probe
from trtopt.hardware.spec import GpuSpec, choose_gpu
from trtopt.hardware.user import gpu_table
from trtopt.precision.fp16.to_fp32 import to_fp32
from trtopt.precision.observe.samples import random_feeds
from trtopt.profiling.inputs import read_values
from trtopt.profiling.join import Device, ModuleOf, join
from trtopt.profiling.measured import Measurement
from trtopt.report.files import write_forms
from trtopt.report.html.page import check_html
from trtopt.report.schema.profile import ProfileReport
from trtopt.source.check import weight_files
from trtopt.source.onnx_file import load
from trtopt.source.pytorch import as_file
from trtopt.source.torch_call import bounds_of
from trtopt.support.clock import Clock
from trtopt.support.files import atomic_write, check_outputs
from trtopt.support.ort_session import Feeds, OrtSession
from trtopt.support.temporary import TemporaryFolder

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from trtopt.config.keywords import ProfileOptions
    from trtopt.engine.backend import Specialization
    from trtopt.graph.artifact import ModelArtifact
    from trtopt.profiling.gpu import EngineRun
    from trtopt.profiling.timing import TimingOptions

_DURATION_S, _ITERATIONS = 3.0, 10
"""trtexec's defaults (``defaultDuration`` and ``defaultIterations`` of its samples/common/sampleOptions.h)."""


def profile(
    target: str | Path | onnx.ModelProto | ir.Model | torch.nn.Module | None = None,
    config: ProfileConfig | None = None,
    *,
    on_event: OnEvent = ignore,
    **options: Unpack[ProfileOptions],
) -> ProfileReport:
    """Put the measured time of every layer beside its prediction, with reasons for what deviates.

    Args:
        target: An engine, an ONNX file or model, or a PyTorch module (then give ``example_inputs`` or ``inputs``). With
            ``layer_info`` it may be left out, or be the ONNX file that the engine was built from, whose nodes say which
            module they came from.
        config: The options; ``options`` override its fields by name.
        on_event: Called with progress and warnings.
        **options: Fields of :class:`~trtopt.config.ProfileConfig`, and ``example_inputs`` for a PyTorch module.

    Raises:
        UsageError: An option or a GPU is wrong, a file cannot be read or written or is not what it should be, or files
            are of different engines.
        InvalidModelError: The model's content is invalid, or it cannot run at these shapes.
        IntegrityError: The engine is not what its manifest says.
        TargetError: There is no GPU, or the engine is for another one.
        MissingDependencyError: ONNX Runtime or the engine's runtime is not installed; for ``html``, Jinja2.
        EngineBuildError: The compiler refuses the model, or the engine fails to run.

    Example:
        >>> report = trtopt.profile("model.onnx", backend="onnxruntime")
        >>> report.totals.measured_us > 0
        True
    """
    given = {**options}
    example_inputs = given.pop("example_inputs", None)
    config = ProfileConfig.given(config, given, "profile(m, backend=...)")
    check_html(config.html)
    clock = Clock(on_event)
    with TemporaryFolder() as folder:
        path = None if target is None else as_file(target, Path(folder), config, example_inputs, on_event)
        found = _Run(config, clock).run(path)
    words = (IN_MEMORY,) if path is None or _is_engine(path) else model_words(target, path, config)
    gpu = "" if config.backend == ONNXRUNTIME else str(found.gpu["name"])
    lines = Target(words, gpu, profile=config.report or "profile.json")
    findings = tuple(with_line(item, lines) for item in found.findings)
    found = dataclasses.replace(found, findings=findings, warnings=(*found.warnings, *clock.warnings))
    write_forms(found, html=config.html, markdown=config.markdown, trace=config.trace, report=config.report)
    return found


def timing_options(config: ProfileConfig) -> TimingOptions:
    """How an engine is timed: until its median stands still; as long as trtexec would with a duration or iterations."""
    from trtopt.profiling.timing import TimingOptions

    limits = TimingOptions().limits
    if config.warmup is not None:
        limits = dataclasses.replace(limits, warm_up_seconds=config.warmup / 1e3, warm_up_runs=0)
    if config.duration is not None or config.iterations is not None:
        seconds = _DURATION_S if config.duration is None else config.duration
        runs = _ITERATIONS if config.iterations is None else int(config.iterations)
        limits = dataclasses.replace(limits, fixed=True, min_seconds=seconds, min_runs=runs)
    return TimingOptions(limits, int(config.inf_streams or 1), config.data_transfers, not config.no_cuda_graph)


def _is_engine(path: Path) -> bool:
    """Whether a file is an engine, or was one that was written over, which is refused."""
    return is_engine(path) or os.path.lexists(manifest_path(path))


class _Run:
    """One profile."""

    def __init__(self, config: ProfileConfig, clock: Clock) -> None:
        self.config = config
        self.clock = clock

    def run(self, path: Path | None) -> ProfileReport:
        config = self.config
        check_files(None if path is None else str(path), config, None)
        if len(config.shapes) > 1:
            raise UsageError("A network is measured at one set of shapes", where="--shapes", remedy="give it once")
        is_loaded = path is not None and config.layer_info is None and _is_engine(path)
        if not is_loaded:
            self._refuse(("key",), "Only an engine is signed", "name an engine, or leave it out")
            what = "Only an engine is loaded with plugins, a weight streaming budget, a specialization and a cache"
            loading = ("plugins", "weight_streaming_budget", "specialization", "cache_dir")
            self._refuse(loading, what, "name an engine, or leave it out")
        if config.layer_info is not None:
            remedy = "leave it out, or name an engine or a model"
            self._refuse(("polygraphy",), "Files of trtexec hold no inputs", remedy)
            self._refuse(("load_inputs", "shapes", "backend"), "Files of trtexec were measured already", remedy)
            self._refuse_timing()
            return self._ingested(path)
        if path is None:
            raise UsageError(
                "There is nothing to profile",
                where="trtopt profile",
                remedy="name an engine or a model, or give --layer-info and --layer-profile",
            )
        if is_loaded:
            return self._engine(path)
        if config.backend == ONNXRUNTIME:
            self._refuse_timing()
            return self._on_cpu(path)
        return self._built(path)

    def _refuse_timing(self) -> None:
        """Raise where an option is about how an engine is timed, and none is."""
        timing = [name for name, option in options(ProfileConfig).items() if option.group == TIMING]
        self._refuse(timing, "No engine is timed", "name an engine, or leave it out")

    def _refuse(self, names: Sequence[str], what: str, remedy: str) -> None:
        """Raise where one of these options is given."""
        default = ProfileConfig()
        for name in names:
            if getattr(self.config, name) != getattr(default, name):
                raise UsageError(what, where=flag(name), remedy=remedy)

    def _ingested(self, path: Path | None) -> ProfileReport:
        from trtopt.profiling.ingest import ingest

        config = self.config
        gpu = self._gpu()
        with self.clock.stage("read"):
            times = None if config.times is None else Path(config.times)
            measurement = ingest(Path(str(config.layer_info)), Path(str(config.layer_profile)), times)
        module: ModuleOf = module_of
        if path is not None:
            module = self._modules(self._load(path), measurement)
        return join(measurement, Device(gpu), module)

    def _gpu(self) -> GpuSpec:
        """The GPU that was measured, which no file of trtexec names."""
        present = present_gpu()
        gpu = choose_gpu(self.config.gpu, gpu_table(self.config.gpus), present)
        if gpu is None or (self.config.gpu is None and present is None):
            raise UsageError(
                "The files do not say which GPU they were measured on",
                where="--gpu",
                remedy="name it: --gpu A100; 'trtopt gpu list' names those known",
            )
        return gpu

    def _modules(self, loaded: ModelArtifact, measurement: Measurement) -> ModuleOf:
        """Modules as the model's nodes have them, with a warning about nodes that it does not have."""
        nodes = {str(node.name): node for node in loaded.model.graph.all_nodes()}
        claimed = {name for layer in measurement.layers for name in layer.info.onnx_nodes}
        missing = sorted(claimed - nodes.keys())
        if claimed and len(missing) == len(claimed):
            raise UsageError(
                "The engine holds no node of the model",
                where=f"{loaded.path}: no {missing[0]}",
                remedy="name the ONNX file that the engine was built from",
            )
        if missing:
            self.clock.warn("modules", f"the model has no {', '.join(missing[:3])}{' ...' if missing[3:] else ''}")
        return lambda name: module_of_node(nodes[name]) if name in nodes else module_of(name)

    def _on_cpu(self, path: Path) -> ProfileReport:
        from trtopt.profiling import onnxruntime
        from trtopt.profiling.cpu import probe_cpu

        if self.config.gpu is not None:
            remedy = "leave it out; `trtopt analyze --gpu` predicts for a GPU"
            raise UsageError("ONNX Runtime measures this machine's CPU", where="--gpu", remedy=remedy)
        loaded = self._load(path)
        given, shapes = self._given(loaded)
        decided = input_shapes(loaded.inputs, [shapes], bounds_of(self.config.dynamic))
        for note in decided.notes:
            self.clock.note("shapes", note)
        threads = available_threads()
        with self.clock.stage("probe"):
            cpu = probe_cpu(threads)
        with self.clock.stage("measure"):
            feeds = {**random_feeds(loaded.inputs, decided.shapes, input_values(loaded.model)), **given}
            measurement = onnxruntime.measure(loaded, feeds, threads=threads)
        if self.config.polygraphy is not None:
            with OrtSession(loaded.model) as session:
                outputs = dict(zip(session.output_names, session.run(feeds), strict=True))
            self._keep(feeds, outputs, "trtopt-onnxruntime")
        return join(measurement, Device(cpu), self._modules(loaded, measurement))

    def _given(self, loaded: ModelArtifact) -> tuple[Feeds, ShapeMap]:
        """The values of a model's inputs that are asked for or in files, and the shapes that are known by them."""
        asked, numbers = split_values(loaded.inputs, self._asked())
        files = self.config.load_inputs
        given = {} if files is None else read_values(files, loaded.inputs, asked, numbers)
        for item in loaded.inputs:
            if item.name in numbers:
                values = numbers[item.name]
                given[item.name] = np.array(values, item.dtype).reshape((len(values),) * len(item.shape))
        return given, {**asked, **{name: array.shape for name, array in given.items()}}

    def _asked(self) -> ShapeMap:
        """What ``--shapes`` says."""
        return self.config.shapes[0] if self.config.shapes else {}

    def _load(self, path: Path) -> ModelArtifact:
        with self.clock.stage("load"):
            loaded = load(path, hash_weights=False)
        check_outputs(files_written(self.config), weight_files(loaded.model))
        return loaded

    def _engine(self, path: Path) -> ProfileReport:
        """An engine, on this machine's GPU, with random inputs."""
        from trtopt.profiling import gpu

        engine = load_engine(path, key=self.config.key, allow_unverified=True)
        if engine.manifest is None:
            self.clock.warn("load engine", f"{path} has no manifest: nobody knows whether it is what was built")
        if self.config.backend not in ("auto", engine.backend.name):
            what = f"The engine was built by {engine.backend.name}"
            raise UsageError(what, where=f"--backend {self.config.backend}", remedy="leave it out")
        if probe().gpu is not None:
            self._present()  # a wrong --gpu is refused before the run; without a GPU, the engine says what it is for
        with self.clock.stage("measure"):
            budget = weight_budget(self.config.weight_streaming_budget)
            specialization = cast("Specialization | None", self.config.specialization)
            kernels = kernels_folder(self.config.cache_dir)
            loaded = runtime_options(engine, map(Path, self.config.plugins), budget, specialization, kernels)
            found = gpu.measure_engine(
                engine, self._asked(), loaded, timing=timing_options(self.config), inputs=self.config.load_inputs
            )
        self._export(found)
        self._keep(found.feeds, found.outputs, "trtopt-engine")
        return join(found.measurement, Device(self._present()))

    def _export(self, found: EngineRun) -> None:
        """Write the files of trtexec that are asked for."""
        from trtopt.profiling.export import profile_json, times_json

        config = self.config
        if config.export_times is not None:
            atomic_write(Path(config.export_times), times_json(found.timing))
        if config.export_profile is not None:
            atomic_write(Path(config.export_profile), profile_json(found.runs))
        if config.export_layer_info is not None:
            atomic_write(Path(config.export_layer_info), found.layer_information)

    def _keep(self, feeds: Feeds, outputs: Mapping[str, np.ndarray], runner: str) -> None:
        """Write what was run, and what it gave, where that is asked for."""
        if self.config.polygraphy is not None:
            from trtopt.pipeline import polygraphy

            polygraphy.keep_inference(polygraphy.make_folder(self.config.polygraphy), feeds, outputs, runner)

    def _built(self, path: Path) -> ProfileReport:
        """A model: built as ``trtopt build`` does by default, then measured, its outputs compared with FP32."""
        from trtopt.pipeline.session import run_build
        from trtopt.pipeline.settings import DataSources
        from trtopt.profiling import gpu

        self._present()
        loaded = self._load(path)
        given, shapes = self._given(loaded)
        numbers = {name: tuple(array.reshape(-1).tolist()) for name, array in given.items() if array.ndim < 2}
        shapes |= split_values(loaded.inputs, numbers)[1]
        opt_shapes = (shapes,) if shapes else ()
        config = BuildConfig(gpu=self.config.gpu, backend=self.config.backend, opt_shapes=opt_shapes)
        with TemporaryFolder() as folder:
            built = Path(folder) / "model.engine"
            run_build(path, dataclasses.replace(config, output=str(built)), DataSources(), self.clock, make_engine=True)
            with self.clock.stage("measure"), OrtSession(to_fp32(loaded.model)) as reference:
                timing, inputs = timing_options(self.config), self.config.load_inputs
                found = gpu.measure_engine(
                    load_engine(built), self._asked(), reference=reference, timing=timing, inputs=inputs
                )
        self._export(found)
        self._keep(found.feeds, found.outputs, "trtopt-engine")
        measurement = found.measurement
        measurement = dataclasses.replace(
            measurement, source=dataclasses.replace(measurement.source, files={"model": str(path)})
        )
        return join(measurement, Device(self._present()), self._modules(loaded, measurement))

    def _present(self) -> GpuSpec:
        """The GPU of this machine."""
        found = probe()
        if found.gpu is None:
            raise TargetError(
                f"There is no GPU to measure on: {found.reason}",
                where=f"--backend {self.config.backend}",
                remedy="measure on the CPU with --backend onnxruntime, or read files of trtexec with --layer-info and "
                "--layer-profile",
            )
        table = gpu_table(self.config.gpus)
        asked = choose_gpu(self.config.gpu, table, found.gpu)
        if asked is None or asked.name != found.gpu.name:
            raise UsageError(
                f"It runs on the GPU of this machine, {found.gpu.name}",
                where=f"--gpu {self.config.gpu}",
                remedy="leave it out",
            )
        return asked
