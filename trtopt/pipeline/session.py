"""One run of ``trtopt build`` or ``trtopt optimize``: the stages strung together."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trtopt.accuracy.gate import gate
from trtopt.accuracy.metric import Metric, load_metric, python_metric
from trtopt.config import AUTO, DEFAULT_ACCURACY_DROP, BuildConfig
from trtopt.config.paths import check_files, files_read
from trtopt.engine.achieved import achieved_precision
from trtopt.engine.backend import RTX_TARGETS, TENSORRT, TENSORRT_RTX, Backend, choose_backend
from trtopt.engine.build import EngineArtifact
from trtopt.engine.cache import EngineCache
from trtopt.engine.manifest import manifest_path, signature_path
from trtopt.engine.profiles import Profile, plan_profiles
from trtopt.errors import EngineBuildError, UsageError
from trtopt.graph.artifact import ModelArtifact
from trtopt.hardware.probe import present_gpu
from trtopt.hardware.spec import PORTABLE, GpuSpec, choose_gpu, supports
from trtopt.hardware.user import gpu_table
from trtopt.pipeline import compile, lower, manifest, network_io, search, stages
from trtopt.pipeline import host as pipeline_host
from trtopt.pipeline import outputs as pipeline_write
from trtopt.pipeline import sparse as pipeline_sparse
from trtopt.pipeline.guard import GuardTarget
from trtopt.pipeline.imported_ranges import Given, given_ranges
from trtopt.pipeline.own_qdq import OwnQdq, mended, own_qdq
from trtopt.pipeline.rewrite import rewrite
from trtopt.pipeline.search import missed
from trtopt.precision.decide import QUANTIZED_TYPES
from trtopt.precision.fp16.network_io import parse_io
from trtopt.precision.observe.samples import SYNTHETIC, Samples, open_samples
from trtopt.report.schema.analysis import EngineAnalysis
from trtopt.report.schema.build import AccuracyRecord, BuildReport, EngineRecord, PrecisionRecord, RewritingRecord
from trtopt.report.schema.environment import environment
from trtopt.rewrite import driver, registry
from trtopt.source.check import weight_files
from trtopt.source.onnx_file import load
from trtopt.support.clock import Clock
from trtopt.support.files import check_outputs


@dataclass(frozen=True)
class Target:
    """What the model is prepared for: the compiler (or the one whose rules apply), and the GPU, None for portable."""

    backend: Backend
    gpu: GpuSpec | None


@dataclass(frozen=True)
class _Made:
    """What came of a lowered model: with its borders as asked for, verified, and built."""

    lowered: lower.Lowered
    border: network_io.Border
    accuracy: AccuracyRecord
    engine: EngineArtifact | None
    failures: tuple[str, ...]


class Session:
    """One run of build or optimize."""

    def __init__(self, config: BuildConfig, clock: Clock, make_engine: bool) -> None:
        asks = config.precision == AUTO or (pipeline_sparse.is_asked(config) and not config.allow_accuracy_loss)
        self._is_default_budget = asks and config.max_accuracy_drop is None
        self.config = (
            dataclasses.replace(config, max_accuracy_drop=DEFAULT_ACCURACY_DROP) if self._is_default_budget else config
        )
        self.clock = clock
        self.make_engine = make_engine
        self.precision = config.precision or ("fp16" if make_engine else None)
        self._cache: EngineCache | None = None

    def run(self, path: Path, calib: Any, eval_samples: Any, metric: Any) -> BuildReport:
        config, clock = self.config, self.clock
        target = self._target()
        outputs = self._outputs(path, target)
        places = {kind: file.absolute() for kind, file in outputs.items()}  # users' scripts may leave the folder
        check_files(str(path), config, None, engine=self.make_engine)
        signer = pipeline_write.signer_of(config, self.make_engine)
        registry.select(config.recipes)
        pipeline_sparse.check_sparse(config, target.backend, target.gpu, calib)
        lower.check_precision(self.precision, target.gpu, config, clock)
        wanted = parse_io(config.io)
        if self.make_engine:
            compile.check_search(config, target.backend)
        others = manifest.other_files(config) if self.make_engine else ()
        self._cache = stages.engine_cache(config, clock, self.make_engine)
        with clock.stage("load"):
            loaded = load(path)
        pipeline_sparse.check_types(config, self.precision, loaded.model)
        given = given_ranges(config, self.precision, loaded.model, clock)
        read = {**files_read(str(path), config), **weight_files(loaded.model)}
        check_outputs(_named(outputs), read)
        samples, check, source = self._samples(loaded, calib, eval_samples)
        network_io.check(loaded.model, wanted, samples, check)
        measured = self._metric(metric, loaded, check)
        profiles = self._profiles(loaded, samples)
        parts = self._cut(mended(loaded, target.backend.name, clock), target, profiles, places)
        if parts.host is not None:
            outputs["host"] = pipeline_host.host_path(_main(outputs), target.backend)
        profiles = parts.profiles(profiles)
        judged = GuardTarget(target.backend, target.gpu, _optimum(profiles))
        rewrite = partial(self._rewrite, target=target, profiles=profiles)
        own = own_qdq(parts.artifact, rewrite, judged, self.precision, config, clock)
        rewritten = own.rewritten
        plain = stages.Verification(
            loaded.model, rewritten.artifact.model, check, source, measured, config.compare_tensors, parts.host
        )
        sparse = self._sparse(rewritten.artifact, judged, samples, plain)
        if self._is_default_budget and config.precision != AUTO and not sparse.is_pruned:
            # It is the budget of --sparse: other precisions are gated only when asked.
            self.config = config = dataclasses.replace(config, max_accuracy_drop=None)
            self._is_default_budget = False
        lowering = self._lowering(judged, samples, profiles, given, own, plain)
        made = self._made(sparse.artifact, lowering, plain, profiles, target)
        for failure in made.failures if config.allow_accuracy_loss else ():
            clock.warn("gate", failure)
        report = self._report(loaded, target, own, parts, made, outputs)
        sparsity = pipeline_sparse.as_made(sparse.record, self.precision, made.lowered.quantized, made.engine)
        report = dataclasses.replace(report, sparsity=sparsity)
        host = None if parts.host is None else parts.host.model
        results = pipeline_write.Results(report, made.engine, made.lowered, host, (samples, check), others)
        with clock.stage("write"):
            pipeline_write.write(results, places, config, signer)
        stages.trim_cache(config, clock)
        return report

    def _made(
        self,
        artifact: ModelArtifact,
        lowering: lower.Lowering | None,
        plain: stages.Verification,
        profiles: tuple[Profile, ...],
        target: Target,
    ) -> _Made:
        """The model lowered, verified and built; where the compiler cannot build an 8-bit node, without it."""
        config, clock, make = self.config, self.clock, self.make_engine
        lowered = lower.Lowered(artifact, None, PrecisionRecord("as-is"))
        if lowering is not None:
            lowered = lower.lower(artifact, lowering, clock)
        border = network_io.change(lowered, profiles, parse_io(config.io), plain.reference, plain.host)
        job = dataclasses.replace(plain, optimized=border.compared, feeds=border.feeds)
        accuracy = stages.verify(job, clock)
        failures = missed(lowered.search) + gate(accuracy, config, is_default=self._is_default_budget)
        engine = None
        if make and (not failures or config.allow_accuracy_loss):
            try:
                engine = compile.compile_engine(
                    border.lowered.artifact,
                    stages.Compilation(
                        target.backend, target.gpu, border.profiles, self.precision == "tf32", self._cache
                    ),
                    pipeline_sparse.with_flag(config, target.backend),
                    clock,
                )
            except EngineBuildError as error:
                blocked = {} if lowering is None else lower.blamed(lowered, error)
                is_new = config.keep_all_int8 and lowered.quantized and lowering is not None and not lowering.failed
                if lowering is None or not (blocked or is_new):
                    raise
                for node, reason in blocked.items():
                    clock.warn("build engine", f"{node} goes back to 16-bit: {reason}")
                again = dataclasses.replace(
                    lowering, blocked={**lowering.blocked, **blocked}, failed=lowering.failed or not blocked
                )
                return self._made(artifact, again, plain, profiles, target)
            accuracy = stages.verify_engine(accuracy, job, engine, target.backend, clock)
            failures = missed(lowered.search) + gate(accuracy, config, is_default=self._is_default_budget)
        return _Made(border.lowered, border, accuracy, engine, failures)

    def _report(
        self,
        loaded: ModelArtifact,
        target: Target,
        own: OwnQdq,
        parts: pipeline_host.Cut,
        made: _Made,
        outputs: dict[str, Path],
    ) -> BuildReport:
        lowered, clock, rewritten = made.lowered, self.clock, own.rewritten
        written = not made.failures or self.config.allow_accuracy_loss
        profiles = made.border.profiles
        analysis = self._predicted(lowered, made.engine, profiles, target)
        return BuildReport(
            model=loaded.to_json_dict(),
            gpu=self._describe_gpu(target),
            steps=lowered.artifact.steps,
            calibration=lowered.calibration,
            precision=self._achieved(lowered, made.engine, profiles, analysis),
            accuracy=made.accuracy,
            judge=rewritten.judge if lowered.judge == "none" else lowered.judge,
            rewriting=RewritingRecord(rewritten.before, rewritten.after),
            warnings=tuple(clock.warnings),
            engine=_engine_record(made.engine, outputs["engine"] if written and made.engine else None),
            config=dataclasses.asdict(self.config),
            environment=environment(),
            seconds={name: round(value, 4) for name, value in clock.seconds.items()},
            gate_failures=made.failures,
            analysis=analysis,
            host=pipeline_host.at_path(parts.record, outputs.get("host") if written else None),
            network_io=made.border.records,
            guard=(*own.guard, *lowered.guard),
            sixteen_bit=own.sixteen_bit or lowered.sixteen_bit,
            search=lowered.search,
        )

    def _target(self) -> Target:
        """The GPU asked for, the one present, or the default; and the compiler for it."""
        present = present_gpu()
        gpu = choose_gpu(self.config.gpu, gpu_table(self.config.gpus), present)
        if self.make_engine:
            return Target(choose_backend(self.config.backend, gpu, present), gpu)
        if self.config.backend == "auto":
            return Target(TENSORRT_RTX if gpu is None or gpu.compute_capability in RTX_TARGETS else TENSORRT, gpu)
        return Target(TENSORRT if self.config.backend == TENSORRT.name else TENSORRT_RTX, gpu)

    def _outputs(self, path: Path, target: Target) -> dict[str, Path]:
        """Every file this run writes, by what it is."""
        config = self.config
        files: dict[str, str | Path | None] = {"report": config.report, "layers": config.export_layer_info}
        if self.make_engine:
            engine = Path(config.output or path.with_name(path.stem + target.backend.suffix))
            files.update(engine=engine, manifest=manifest_path(engine), signature=signature_path(engine))
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

    def _metric(self, given: Any, model: ModelArtifact, check: Samples) -> Metric | None:
        """The metric, with what the model has in FP32."""
        if given is None:
            return None
        if callable(given):
            metric = python_metric(given)
        else:
            has_labels = check.labels is not None
            metric = load_metric(given, has_labels=has_labels, max_drop=self.config.max_accuracy_drop)
        return stages.with_baseline(metric, model.model, check, self.clock)

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

    def _rewrite(self, loaded: ModelArtifact, target: Target, profiles: tuple[Profile, ...]) -> driver.Rewritten:
        with self.clock.stage("rewrite"):
            return rewrite(
                loaded,
                target.backend,
                target.gpu,
                self._sixteen_bit(),
                _optimum(profiles),
                self.config,
                self.clock.listen,
            )

    def _sixteen_bit(self) -> str | None:
        """The precision recipes are judged in: FP16 where 8-bit regions must win against the best FP16 engine."""
        guarded = self.precision in QUANTIZED_TYPES and not self.config.keep_all_int8
        return "fp16" if guarded else self.precision

    def _cut(
        self, loaded: ModelArtifact, target: Target, profiles: tuple[Profile, ...], outputs: dict[str, Path]
    ) -> pipeline_host.Cut:
        """The model without what its compiler refuses; where something is cut off, its file joins ``outputs``."""
        with self.clock.stage("cut"):
            parts = pipeline_host.cut(
                loaded, target.backend, _optimum(profiles), self.clock, plugins=bool(self.config.plugins)
            )
        if parts.host is not None:
            path = pipeline_host.host_path(_main(outputs), target.backend)
            inputs = {**files_read(str(loaded.path), self.config), **weight_files(loaded.model), **_named(outputs)}
            check_outputs({"the part of the model for the host": path}, inputs)
            outputs["host"] = path
        return parts

    def _sparse(
        self, artifact: ModelArtifact, judged: GuardTarget, samples: Samples, plain: stages.Verification
    ) -> pipeline_sparse.Sparsified:
        """The model with what gains by it pruned, where that was asked for."""
        if not pipeline_sparse.is_asked(self.config):
            return pipeline_sparse.Sparsified(artifact, None)
        job = pipeline_sparse.SparseJob(judged, self.precision, samples, plain, self.config, self._is_default_budget)
        return pipeline_sparse.sparsify(artifact, job, self.clock)

    def _lowering(
        self,
        judged: GuardTarget,
        samples: Samples,
        profiles: tuple[Profile, ...],
        given: Given | None,
        own: OwnQdq,
        plain: stages.Verification,
    ) -> lower.Lowering | None:
        """What the model is lowered to; None where it keeps the types it has."""
        if self.precision is None:
            return None
        largest = {name: top for profile in profiles for name, (_, _, top) in profile.shapes.items()}
        gauge = search.gauge_for(plain, self.config, is_default=self._is_default_budget)
        return lower.Lowering(self.precision, judged, samples, self.config, largest, given, own.ranges, gauge)

    def _achieved(
        self,
        lowered: lower.Lowered,
        engine: EngineArtifact | None,
        profiles: tuple[Profile, ...],
        analysis: EngineAnalysis | None,
    ) -> PrecisionRecord:
        """The precision record, with what the engine's layers say when there is an engine."""
        if engine is None:
            return lowered.record
        flop = stages.flop_of(lowered.artifact.model, _optimum(profiles))
        achieved = achieved_precision(engine.record.layers, flop, analysis.layers if analysis else ())
        return dataclasses.replace(lowered.record, achieved=achieved)

    def _predicted(
        self,
        lowered: lower.Lowered,
        engine: EngineArtifact | None,
        profiles: tuple[Profile, ...],
        target: Target,
    ) -> EngineAnalysis | None:
        """The engine's predicted time; None without an engine, and for a target that is not one chip."""
        if engine is None or target.gpu is None:
            return None
        tf32 = self.precision == "tf32" and supports(target.gpu, "tf32")
        shapes = _optimum(profiles)
        return stages.predict_engine(lowered.artifact.model, engine, target.gpu, shapes, tf32, self.clock)

    def _describe_gpu(self, target: Target) -> dict[str, Any]:
        if target.gpu is None:
            return {"name": PORTABLE, "compute_capability": "8.0 and later"}
        return {"name": target.gpu.name, "compute_capability": target.gpu.compute_capability}


def _main(outputs: dict[str, Path]) -> Path:
    """The engine, or without one the optimized model."""
    return outputs["engine"] if "engine" in outputs else outputs["onnx"]


def _named(outputs: dict[str, Path]) -> dict[str, Path]:
    """The outputs by what messages call them."""
    return {f"the output {file.name} ({kind})": file for kind, file in outputs.items()}


def _optimum(profiles: tuple[Profile, ...]) -> dict[str, tuple[int, ...]]:
    """The input shapes of the first profile's optimum."""
    return {name: best for name, (_, best, _) in profiles[0].shapes.items()} if profiles else {}


def _engine_record(engine: EngineArtifact | None, path: Path | None) -> EngineRecord | None:
    if engine is None:
        return None
    if path is None:
        return engine.record
    return dataclasses.replace(engine.record, path=str(path), manifest=str(manifest_path(path)))
