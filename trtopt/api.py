"""The only orchestration: the command line, CI and Python callers use these functions."""

from __future__ import annotations

import dataclasses
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir

from trtopt import __version__, pipeline, pipeline_host, pipeline_io, pipeline_judge
from trtopt.accuracy.gate import gate
from trtopt.accuracy.metric import Metric, load_metric
from trtopt.accuracy.whole import HostPart
from trtopt.clock import Clock
from trtopt.config import BuildConfig
from trtopt.engine.achieved import achieved_precision
from trtopt.engine.backend import RTX_TARGETS, TENSORRT, TENSORRT_RTX, Backend, choose_backend
from trtopt.engine.build import EngineArtifact, check_options
from trtopt.engine.profiles import Profile, plan_profiles
from trtopt.errors import UsageError
from trtopt.events import OnEvent, ignore
from trtopt.files import atomic_write, check_outputs
from trtopt.graph.artifact import ModelArtifact
from trtopt.hardware.probe import present_gpu
from trtopt.hardware.spec import PORTABLE, GpuSpec, choose_gpu, supports
from trtopt.hardware.user import gpu_table
from trtopt.outputs import check_files, files_read
from trtopt.precision.calib_synthetic import SYNTHETIC
from trtopt.precision.network_io import parse_io
from trtopt.precision.samples import Samples, open_samples
from trtopt.report.analysis import EngineAnalysis
from trtopt.report.json_file import write_layers, write_report
from trtopt.report.records import BuildReport, EngineRecord, PrecisionRecord, RewritingRecord
from trtopt.rewrite import driver, registry
from trtopt.source.external import weight_files
from trtopt.source.in_memory import as_file
from trtopt.source.onnx_file import load
from trtopt.source.save import save_model

if TYPE_CHECKING:
    import torch

    from trtopt.source.pytorch import ExportRecord


def build(
    model: str | Path | onnx.ModelProto | ir.Model | torch.nn.Module,
    config: BuildConfig | None = None,
    *,
    on_event: OnEvent = ignore,
    calib: Any = None,
    eval: Any = None,
    **options: Any,
) -> BuildReport:
    """Make an engine: rewrite, calibrate, write the precision into the graph, verify, compile.

    Args:
        model: An ONNX file or model, or a PyTorch module (then give ``example_inputs``).
        config: The options; ``options`` override its fields by name.
        on_event: Called with progress and warnings.
        calib: Calibration samples: what ``--calib`` takes, or a dict of arrays by input name (first axis = samples),
            an iterable of feed dicts or a function returning one.
        eval: Samples to verify on, likewise; default: the calibration samples.
        **options: Fields of :class:`~trtopt.config.BuildConfig`, and ``example_inputs`` for a PyTorch module.

    Returns:
        The report. When a gate failed (``report.gate_failures``) and ``allow_accuracy_loss`` is off, nothing but the
        report is written.

    Raises:
        TrtoptError: See the subclasses in :mod:`trtopt.errors`.
    """
    return _run(model, config, calib, eval, options, on_event, make_engine=True)


def optimize(
    model: str | Path | onnx.ModelProto | ir.Model | torch.nn.Module,
    config: BuildConfig | None = None,
    *,
    on_event: OnEvent = ignore,
    calib: Any = None,
    eval: Any = None,
    **options: Any,
) -> BuildReport:
    """Everything :func:`build` does but the engine: writes the optimized ONNX model to ``output``.

    The model keeps the types it has unless ``precision`` is given. Arguments and errors as :func:`build`.
    """
    return _run(model, config, calib, eval, options, on_event, make_engine=False)


def export(module: Any, path: str | Path, **options: Any) -> ExportRecord:
    """Write a PyTorch module as an ONNX file, checked numerically against PyTorch.

    Arguments and errors: :func:`trtopt.source.pytorch.export`.
    """
    from trtopt.source.pytorch import export as export_module

    return export_module(module, path, **options)


@dataclass(frozen=True)
class _Target:
    """What the model is prepared for: the compiler (or the one whose rules apply), and the GPU, None for portable."""

    backend: Backend
    gpu: GpuSpec | None


def _run(
    model: Any,
    config: BuildConfig | None,
    calib: Any,
    eval_samples: Any,
    options: dict[str, Any],
    on_event: OnEvent,
    *,
    make_engine: bool,
) -> BuildReport:
    example_inputs = options.pop("example_inputs", None)
    if config is not None and not isinstance(config, BuildConfig):
        raise UsageError(
            "config is not a BuildConfig", where="config", remedy="pass options as keywords: build(m, precision=...)"
        )
    config = (config or BuildConfig()).with_options(options)
    with tempfile.TemporaryDirectory(prefix="trtopt-") as folder:
        path = as_file(model, Path(folder), example_inputs)
        if path.parent == Path(folder) and config.output is None:
            raise UsageError("A model in memory needs an output file", where="output", remedy="give output=FILE")
        session = _Session(config, Clock(on_event), make_engine)
        return session.run(
            path,
            config.calib if calib is None else calib,
            config.eval if eval_samples is None else eval_samples,
        )


class _Session:
    """One run of build or optimize."""

    def __init__(self, config: BuildConfig, clock: Clock, make_engine: bool) -> None:
        self.config = config
        self.clock = clock
        self.make_engine = make_engine
        self.precision = config.precision or ("fp16" if make_engine else None)

    def run(self, path: Path, calib: Any, eval_samples: Any) -> BuildReport:
        config, clock = self.config, self.clock
        target = self._target()
        outputs = self._outputs(path, target)
        check_files(str(path), config, None, engine=self.make_engine)
        registry.select(config.recipes)
        wanted = parse_io(config.io)
        if self.make_engine:
            check_options(config.builder, config.plugins, target.backend)
        with clock.stage("load"):
            loaded = load(path)
        check_outputs({f"the output {file.name}": file for file in outputs.values()}, weight_files(loaded.model))
        samples, check, source = self._samples(loaded, calib, eval_samples)
        pipeline_io.check(loaded.model, wanted, samples, check)
        metric = self._metric(check)
        profiles = self._profiles(loaded, samples)
        parts = self._cut(loaded, target, profiles, outputs)
        profiles = parts.profiles(profiles)
        rewritten = self._rewrite(parts.artifact, target, profiles)
        lowered = self._lower(rewritten.artifact, target, samples, profiles)
        border = pipeline_io.change(lowered, profiles, wanted, loaded.model, parts.host)
        lowered, profiles = border.lowered, border.profiles
        job = pipeline.Verification(
            loaded.model, border.compared, check, source, metric, config.compare_tensors, parts.host, border.feeds
        )
        accuracy = pipeline.verify(job, clock)
        failures = gate(accuracy, config)
        engine = None
        if self.make_engine and (not failures or config.allow_accuracy_loss):
            engine = pipeline.compile_engine(
                lowered.artifact, target.backend, target.gpu, profiles, config, self.precision == "tf32", clock
            )
            accuracy = pipeline.verify_engine(accuracy, job, engine, target.backend, clock)
            failures = gate(accuracy, config)
        written = failures == () or config.allow_accuracy_loss
        for failure in failures if config.allow_accuracy_loss else ():
            clock.warn("gate", failure)
        analysis = self._predicted(lowered, engine, profiles, target)
        report = BuildReport(
            model=loaded.to_json_dict(),
            gpu=self._describe_gpu(target),
            steps=lowered.artifact.steps,
            calibration=lowered.calibration,
            precision=self._achieved(lowered, engine, profiles, analysis),
            accuracy=accuracy,
            judge=rewritten.judge,
            rewriting=RewritingRecord(rewritten.before, rewritten.after),
            warnings=tuple(clock.warnings),
            engine=_engine_record(engine, outputs["engine"] if written and engine else None),
            config=dataclasses.asdict(config),
            environment=_environment(),
            seconds={name: round(value, 4) for name, value in clock.seconds.items()},
            gate_failures=failures,
            analysis=analysis,
            host=pipeline_host.at_path(parts.record, outputs.get("host") if written else None),
            network_io=border.records,
        )
        self._write(report, engine, lowered.artifact, parts.host, outputs)
        return report

    def _target(self) -> _Target:
        """The GPU asked for, the one present, or the default; and the compiler for it."""
        present = present_gpu()
        gpu = choose_gpu(self.config.gpu, gpu_table(self.config.gpus), present)
        if self.make_engine:
            return _Target(choose_backend(self.config.backend, gpu, present), gpu)
        if self.config.backend == "auto":
            return _Target(TENSORRT_RTX if gpu is None or gpu.compute_capability in RTX_TARGETS else TENSORRT, gpu)
        return _Target(TENSORRT if self.config.backend == TENSORRT.name else TENSORRT_RTX, gpu)

    def _outputs(self, path: Path, target: _Target) -> dict[str, Path]:
        """Every file this run writes, by what it is."""
        config = self.config
        files: dict[str, str | Path | None] = {"report": config.report, "layers": config.export_layer_info}
        if self.make_engine:
            files["engine"] = config.output or path.with_name(path.stem + target.backend.suffix)
            files["onnx"] = config.save_onnx
        else:
            if config.output is None:
                raise UsageError("optimize needs an output file", where="-o", remedy="give -o OUT.onnx")
            files["onnx"] = config.output
        return {kind: Path(name) for kind, name in files.items() if name is not None}

    def _samples(self, model: ModelArtifact, calib: Any, eval_samples: Any) -> tuple[Samples, Samples, str]:
        """Calibration samples, verification samples, and where the latter come from."""
        shapes = self.config.opt_shapes[0] if self.config.opt_shapes else None
        samples = open_samples(SYNTHETIC if calib is None else calib, model.inputs, shapes=shapes)
        if eval_samples is not None:
            return samples, open_samples(eval_samples, model.inputs, shapes=shapes), "eval"
        return samples, samples, "synthetic" if samples.source == "synthetic" else "calibration"

    def _metric(self, check: Samples) -> Metric | None:
        name = self.config.metric
        if name is None:
            return None
        has_labels = check.labels is not None
        return load_metric(name, has_labels=has_labels, max_drop=self.config.max_accuracy_drop)

    def _profiles(self, model: ModelArtifact, samples: Samples) -> tuple[Profile, ...]:
        config = self.config
        observed = samples.shapes() if samples.source == "user" else ()
        plan = plan_profiles(
            model.inputs,
            min_shapes=config.min_shapes,
            opt_shapes=config.opt_shapes,
            max_shapes=config.max_shapes,
            observed=observed,
        )
        for note in plan.notes:
            self.clock.warn("shapes", note)
        return plan.profiles

    def _rewrite(self, loaded: ModelArtifact, target: _Target, profiles: tuple[Profile, ...]) -> driver.Rewritten:
        with self.clock.stage("rewrite"):
            return pipeline_judge.rewrite(
                loaded,
                target.backend,
                target.gpu,
                self.precision,
                _optimum(profiles),
                self.config,
                self.clock.listen,
            )

    def _cut(
        self, loaded: ModelArtifact, target: _Target, profiles: tuple[Profile, ...], outputs: dict[str, Path]
    ) -> pipeline_host.Cut:
        """The model without what its compiler refuses; where something is cut off, its file joins ``outputs``."""
        with self.clock.stage("cut"):
            parts = pipeline_host.cut(
                loaded, target.backend, _optimum(profiles), self.clock, plugins=bool(self.config.plugins)
            )
        if parts.host is not None:
            path = pipeline_host.host_path(outputs.get("engine", outputs.get("onnx", Path())), target.backend)
            others = {f"the output {file.name}": file for file in outputs.values()}
            inputs = {**files_read(str(loaded.path), self.config), **weight_files(loaded.model), **others}
            check_outputs({"the part of the model for the host": path}, inputs)
            outputs["host"] = path
        return parts

    def _lower(
        self, cleaned: ModelArtifact, target: _Target, samples: Samples, profiles: tuple[Profile, ...]
    ) -> pipeline.Lowered:
        if self.precision is None:
            return pipeline.Lowered(cleaned, None, PrecisionRecord("as-is"))
        largest = {name: top for profile in profiles for name, (_, _, top) in profile.shapes.items()}
        return pipeline.lower(cleaned, self.precision, target.backend.name, samples, self.config, largest, self.clock)

    def _achieved(
        self,
        lowered: pipeline.Lowered,
        engine: EngineArtifact | None,
        profiles: tuple[Profile, ...],
        analysis: EngineAnalysis | None,
    ) -> PrecisionRecord:
        """The precision record, with what the engine's layers say when there is an engine."""
        if engine is None:
            return lowered.record
        flop = pipeline.flop_of(lowered.artifact.model, _optimum(profiles))
        achieved = achieved_precision(engine.record.layers, flop, analysis.layers if analysis else ())
        return dataclasses.replace(lowered.record, achieved=achieved)

    def _predicted(
        self,
        lowered: pipeline.Lowered,
        engine: EngineArtifact | None,
        profiles: tuple[Profile, ...],
        target: _Target,
    ) -> EngineAnalysis | None:
        """The engine's predicted time; None without an engine, and for a target that is not one chip."""
        if engine is None or target.gpu is None:
            return None
        tf32 = self.precision == "tf32" and supports(target.gpu, "tf32")
        shapes = _optimum(profiles)
        return pipeline.predict_engine(lowered.artifact.model, engine, target.gpu, shapes, tf32, self.clock)

    def _describe_gpu(self, target: _Target) -> dict[str, Any]:
        if target.gpu is None:
            return {"name": PORTABLE, "compute_capability": "8.0 and later"}
        return {"name": target.gpu.name, "compute_capability": target.gpu.compute_capability}

    def _write(
        self,
        report: BuildReport,
        engine: EngineArtifact | None,
        artifact: ModelArtifact,
        host: HostPart | None,
        outputs: Mapping[str, Path],
    ) -> None:
        """Write the outputs; after a failed gate, the report only."""
        passed = not report.gate_failures or self.config.allow_accuracy_loss
        with self.clock.stage("write"):
            if passed and host is not None:
                save_model(host.model, outputs["host"])
            if passed and "onnx" in outputs:
                save_model(artifact.model, outputs["onnx"])
            if passed and engine is not None:
                atomic_write(outputs["engine"], engine.data)
                if "layers" in outputs:
                    write_layers(engine.record, outputs["layers"])
            if "report" in outputs:
                if engine is not None:
                    atomic_write(outputs["report"].with_suffix(".build.log"), engine.raw_log)
                write_report(report, outputs["report"])


def _optimum(profiles: tuple[Profile, ...]) -> dict[str, tuple[int, ...]]:
    """The input shapes of the first profile's optimum."""
    return {name: best for name, (_, best, _) in profiles[0].shapes.items()} if profiles else {}


def _engine_record(engine: EngineArtifact | None, path: Path | None) -> EngineRecord | None:
    if engine is None:
        return None
    return dataclasses.replace(engine.record, path=str(path) if path else None)


def _environment() -> dict[str, str]:
    """Versions that a report must carry to be reproducible."""
    found = {"trtopt": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for package in ("numpy", "onnx", "onnx_ir", "onnxruntime", "onnxruntime-gpu", "tensorrt-rtx", "tensorrt", "torch"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
