"""One run of ``trtopt build`` or ``trtopt optimize``: its stages, in order, and its report."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import onnx_ir as ir

from trtopt.accuracy.metric import gate
from trtopt.accuracy.reference import KeptOutputs, Reference
from trtopt.config import BuildConfig
from trtopt.engine.achieved import achieved_precision
from trtopt.engine.backend import TENSORRT_RTX
from trtopt.engine.build import CompilerPool, EngineArtifact
from trtopt.engine.layers import layers_of_profile
from trtopt.engine.limit import limit_of
from trtopt.engine.manifest import manifest_path
from trtopt.engine.run import can_run
from trtopt.engine.sizes import sized
from trtopt.engine.work import layers_of_engine
from trtopt.errors import EngineBuildError, GateError, RecipeError, TrtoptError
from trtopt.graph import cost
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.module_path import names_of
from trtopt.graph.shapes import static_shapes
from trtopt.hardware.spec import supports
from trtopt.judge.judges import judge_for
from trtopt.judge.protocol import AT_ONCE, PriceFile
from trtopt.judge.target import BuildTarget
from trtopt.pipeline import network_io, polygraphy
from trtopt.pipeline.compile import Compilation, as_built, compile_engine, has_flag, trim_cache
from trtopt.pipeline.gauge import gauge_for, weights_gauge, with_saved_metric
from trtopt.pipeline.guard import OwnQdq, canonicalized, own_qdq, rewrite
from trtopt.pipeline.host import Cut, at_path, cut, host_path
from trtopt.pipeline.lower import Lowering, lower, without_refused
from trtopt.pipeline.manifest import Results, write
from trtopt.pipeline.network_io import FinalModel
from trtopt.pipeline.plain import plain
from trtopt.pipeline.pricing import Pricer, cost_of_engine, pricer_for
from trtopt.pipeline.product import Built, Lowered
from trtopt.pipeline.search import missed
from trtopt.pipeline.settings import (
    BuildInputs,
    BuildSettings,
    DataSources,
    Outputs,
    described,
    prunes,
    read_files,
    read_inputs,
    settle,
)
from trtopt.pipeline.shipped import (
    PLAIN,
    SLOWER,
    TOGETHER,
    WITHOUT_8_BIT,
    Accepts,
    Baseline,
    Network,
    Settled,
    Trial,
    accuracy_cost,
    all_regions_miss,
    as_accurate,
    as_asked,
    bound_of,
    but,
    doubted,
    dynamic_cost,
    gates_of,
    hold,
    judged_apart,
    no_new_failure,
    plain_forms,
    recipes_of,
    warn_of_noise,
    why_barred,
    within_bound,
    without_culprit,
)
from trtopt.pipeline.sparse import SparseJob, Sparsified, as_made, sparsify
from trtopt.pipeline.verify import Verification, engine_of, ranked_of, verify, verify_engine
from trtopt.pipeline.weights import WeightsJob, store_weights
from trtopt.report.schema.analysis import EngineAnalysis, totals_of
from trtopt.report.schema.build import BuildReport, EngineRecord, PrecisionRecord
from trtopt.report.schema.decisions import SparsityRecord
from trtopt.report.schema.steps import Cost, RewritingRecord, StepRecord
from trtopt.report.schema.write import environment
from trtopt.rewrite.driver import Rewritten
from trtopt.rewrite.sweeps import Verdict
from trtopt.roofline.layer import predict
from trtopt.support.clock import Clock
from trtopt.support.files import check_outputs
from trtopt.support.ort_session import limit_runs
from trtopt.support.precision import Precision


def run_build(
    path: Path,
    config: BuildConfig,
    sources: DataSources,
    clock: Clock,
    *,
    make_engine: bool,
    target: str | None = None,
) -> BuildReport:
    """Make an engine of a model, or the optimized model alone.

    Args:
        path: The ONNX file.
        config: The options.
        sources: Samples and metric, where they are not those that the options name.
        clock: Times, warnings and progress.
        make_engine: Whether an engine is built.
        target: The code that made the model, ``nets.py:resnet``, where there is some: the report names it.

    Raises:
        TrtoptError: See the subclasses in :mod:`trtopt.errors`.
    """
    limit_runs(config.run_limit)
    settings = settle(path, config, sources.calib, clock, make_engine=make_engine)
    inputs = read_inputs(settings, sources, clock)
    compared = inputs.loaded.model if inputs.metric is None else None
    return _Run(settings.checked_on(inputs.check, compared), inputs, clock, target).run()


@dataclass(frozen=True)
class Way:
    """One way to a product: a model after its recipes, what it is lowered to, and the options of that."""

    own: OwnQdq
    artifact: ModelArtifact
    precision: Precision | None
    config: BuildConfig


class _Run:
    """The stages of a run; what one gives stays for those behind it."""

    def __init__(self, settings: BuildSettings, inputs: BuildInputs, clock: Clock, code: str | None = None) -> None:
        self._made_by = {} if code is None else {"target": code}
        self._settings, self._config, self._inputs, self._clock = settings, settings.config, inputs, clock
        config, target = settings.config, settings.target
        prices = partial(PriceFile, folder=config.cache_dir, on_event=clock.listen, plugins=config.plugins)
        self._owns: dict[tuple[str, bool], OwnQdq] = {}
        self._verdicts: dict[str, Verdict] = {}
        self._pruned: dict[ir.Model, Sparsified] = {}
        self._job: Verification | None = None
        self._compiler = CompilerPool(AT_ONCE)
        judge = partial(judge_for, target.backend, target.gpu, plugins=config.plugins, prices=prices)
        self._open_judge = partial(judge, compiler=self._compiler)

    def run(self) -> BuildReport:
        """All stages; where the engine cannot be built, what is asked for is kept."""
        try:
            with self._compiler:
                return self._stages()
        except EngineBuildError as error:
            if self._settings.kept is not None and self._job is not None:
                self._keep(self._settings.kept, self._job)
                reduce = self._reduce(self._settings.kept, self._job, EngineBuildError.exit_code)
                error.remedy += f"\n  reduce: {reduce}"
            raise

    def _keep(self, folder: Path, job: Verification, engine: EngineArtifact | None = None) -> None:
        """Write what Polygraphy compares; what fails there is a warning beside what the run says itself."""
        backend, product = self._target.backend, None
        if engine is not None and can_run(backend, engine.data):
            product = engine_of(job, engine.data, backend, as_built(self._config, backend))
        try:
            with self._clock.stage("keep"):
                polygraphy.keep(folder, job, product)
        except TrtoptError as error:
            self._clock.warn("keep", f"not all is kept in {folder}: {error.what}")

    def _reduce(self, folder: Path, job: Verification, code: int) -> str:
        left = polygraphy.left_out(self._config)
        if left:
            text = f"`polygraphy debug reduce` checks parts of the model in fixed shapes, without {', '.join(left)}"
            self._clock.warn("reduce", text)
        return polygraphy.reduce_command(folder, job, self._config, make_engine=self._settings.make_engine, code=code)

    def _stages(self) -> BuildReport:
        settings, config, clock = self._settings, self._config, self._clock
        self._parts, self._outputs = self._without_host_part()
        self._target = settings.target.with_profiles(self._parts.profiles(self._inputs.profiles))
        own = self._after_recipes(config)
        self._check = self._job = self._verification(own)
        tf32, options = settings.uses_tf32, settings.builder_config()
        with pricer_for(self._target, tf32, options, self._open_judge, self._compiler, clock) as pricer:
            network = Network(self._parts.artifact.model, settings.precision, self._target, self._shipped_form)
            self._baseline = Baseline(network, pricer)
            return self._written(*self._made(own), pricer)

    def _made(self, own: OwnQdq) -> tuple[Settled, SparsityRecord | None]:
        """The product, pruned where that was asked for, held against plain."""
        config, self._budget = self._config, self._settings.budget_after(self._sparsified(own).is_pruned)
        first = self._first(recipes_of(own, self._parts.artifact))
        is_held = (not first.failures or config.allow_accuracy_loss) and first.cost is not None
        costs = self._baseline.costs() if is_held else {}
        settled = hold(first, costs, self._trials(first), self._clock, self._doubts(first))
        return settled, self._sparsified(settled.built.own).record

    def _sparsified(self, own: OwnQdq) -> Sparsified:
        """A model after its recipes, pruned where that was asked for."""
        artifact, settings, samples = own.rewritten.artifact, self._settings, self._inputs.calibration
        if prunes(self._config) and artifact.model not in self._pruned:
            job = SparseJob(self._target, settings.precision, samples, self._check, self._config, settings.budget)
            self._pruned[artifact.model] = sparsify(artifact, job, self._clock)
        return self._pruned.get(artifact.model, Sparsified(artifact, None))

    def _first(self, used: Sequence[str]) -> Built:
        """The product as the stages make it; where it builds without one of the recipes used only, without that."""
        config, before = self._config, self._parts.artifact

        def make(recipes: str) -> Built:
            options = replace(config, recipes=recipes)
            taken = self._after_recipes(options)
            found = self._build(Way(taken, self._sparsified(taken).artifact, self._settings.precision, options))
            if found is None:
                raise ValueError("a product without a bound is always made")
            return found

        try:
            return make(config.recipes)
        except EngineBuildError as error:
            if not used:
                raise
            found = without_culprit(make, config.recipes, used, error)
            out = ", ".join(name for name in used if name not in recipes_of(found.own, before))
            what = f"the recipe {out}, with which nothing builds: {error.what}"
            if config.strict_recipes:
                raise RecipeError(what, where="build engine", remedy="leave it out with --recipes") from None
            self._clock.warn("build engine", f"without {what}")
            return found

    def _written(self, settled: Settled, pruned: SparsityRecord | None, pricer: Pricer | None) -> BuildReport:
        """The report, with all files written."""
        settings, inputs, config, clock, built = self._settings, self._inputs, self._config, self._clock, settled.built
        for failure in built.failures if config.allow_accuracy_loss else ():
            clock.warn("gate", failure)
        stored = built.lowered.weights
        if not settings.budget.is_given and not (stored is not None and stored.nodes):
            warn_of_noise(built, self._inputs.loaded.model, settings.precision, clock)
        sparsity = as_made(pruned, settings.precision, built.lowered.quantized, built.engine)
        effective = replace(config, max_accuracy_drop=self._budget.drop)
        report = self._held(self._report(built, effective, sparsity), settled, pricer)
        job = replace(self._check, optimized=built.final.compared, feeds=built.final.feeds)
        if settings.kept is not None:
            self._keep(settings.kept, job, built.engine)
            is_failed = built.failures and not config.allow_accuracy_loss
            command = self._reduce(settings.kept, job, GateError.exit_code) if is_failed else ""
            report = replace(report, reduce=command, warnings=tuple(clock.warnings))
        with clock.stage("write"):
            samples, backend = (inputs.calibration, inputs.check), self._target.backend
            part = None if self._parts.host is None else self._parts.host.model
            model, eight_bit = built.final.artifact.model, tuple(built.lowered.quantized)
            results = Results(report, built.engine, model, eight_bit, part, samples, settings.files, backend)
            report = write(results, self._outputs.places, effective, settings.signer)
        trim_cache(config, clock)
        return report

    def _held(self, report: BuildReport, settled: Settled, pricer: Pricer | None) -> BuildReport:
        """The report with what ships beside plain."""
        if pricer is None or settled.built.cost is None:
            return report
        clock = self._clock
        dynamic = dynamic_cost(settled.built, self._baseline)
        return replace(
            report,
            judge=pricer.name if report.judge == "none" else report.judge,
            shipped=settled.built.cost,
            plain=settled.plain,
            plain_forms=() if settled.plain is None else plain_forms(self._baseline.costs()),
            accuracy_cost=accuracy_cost(settled, self._settings.precision, clock),
            dynamic_cost=dynamic,
            judged_apart=judged_apart(settled.built, sparse=report.sparsity is not None),
            warnings=tuple(clock.warnings),
            seconds={name: round(value, 4) for name, value in clock.seconds.items()},
        )

    def _without_host_part(self) -> tuple[Cut, Outputs]:
        """The model without what its compiler refuses; where something is cut off, its file joins the outputs."""
        target, outputs, loaded = self._settings.target, self._settings.outputs, self._inputs.loaded
        artifact = canonicalized(self._inputs.fixed, target.backend.name, self._clock)
        with self._clock.stage("cut"):
            shapes = target.with_profiles(self._inputs.profiles).shapes
            parts = cut(artifact, target.backend, shapes, self._clock, plugins=bool(self._config.plugins))
        if parts.host is None:
            return parts, outputs
        path = host_path(outputs.main, target.backend)
        check_outputs(
            {"the part of the model for the host": outputs.with_host(path).places["host"]},
            {**read_files(self._settings, loaded), **described(outputs.places)},
        )
        return parts, outputs.with_host(path)

    def _after_recipes(self, config: BuildConfig) -> OwnQdq:
        """The model after the recipes of some options; without its own Q/DQ where that does not pay."""
        settings, target, clock = self._settings, self._target, self._clock

        def with_recipes(artifact: ModelArtifact) -> Rewritten:
            with clock.stage("rewrite"):
                judged_in, verdicts = settings.judged_in, self._verdicts
                return rewrite(artifact, target, judged_in, config, self._open_judge, verdicts, clock.listen)

        key = config.recipes, config.keep_all_int8
        if key not in self._owns:
            artifact, precision = self._parts.artifact, settings.precision
            own = own_qdq(artifact, with_recipes, target, precision, config, clock, self._open_judge)
            self._owns[key] = own
        return self._owns[key]

    def _verification(self, own: OwnQdq) -> Verification:
        """How the model after its recipes is compared with the model as loaded."""
        inputs, tensors, precision = self._inputs, self._config.compare_tensors, self._settings.precision
        budget = self._settings.budget
        is_open = inputs.source != "calibration" or inputs.metric is not None or budget.drop is not None
        is_open = is_open or self._config.tolerances is not None
        is_rounded = precision is not None and not precision.is_quantized and budget.floor is None
        bound = bound_of(precision, budget.sqnr_db) if precision is not None and is_rounded and not is_open else None
        loaded, host = inputs.loaded.model, self._parts.host
        names = [str(value.name) for value in loaded.graph.outputs] if host is None else host.watched
        is_bounded = host is None and inputs.recorded is None and budget.floor is not None
        ranked = ranked_of(loaded, own.rewritten.artifact.model, inputs.axes) if is_bounded else ()
        names, given = [*names, *ranked], inputs.source != "synthetic"
        kept = KeptOutputs(loaded, names, self._config.cache_dir, self._clock.listen) if given else None
        return Verification(
            loaded,
            own.rewritten.artifact.model,
            inputs.check,
            inputs.source,
            inputs.metric,
            tensors,
            host,
            inputs.axes,
            floor=budget.floor,
            bound_db=bound,
            tolerances=self._config.tolerances,
            recorded=inputs.recorded,
            fp32=Reference(loaded, None if host is None and not ranked else names, kept),
            ranked=ranked,
            saves=not self._settings.make_engine or self._config.save_onnx is not None,
        )

    def _as_shipped(self, artifact: ModelArtifact) -> FinalModel:
        """A lowered model with the inputs and outputs asked for."""
        fixed = self._inputs.fixed.model
        return network_io.change(artifact, self._target, self._settings.io, fixed, self._check.host)

    def _shipped_form(self, model: ir.Model) -> FinalModel:
        """The same for a model of no history."""
        return self._as_shipped(replace(self._parts.artifact, model=model))

    def _build(self, way: Way, below: float = math.inf, accepts: Accepts | None = None) -> Built | None:
        """The model lowered, verified and built; where the compiler cannot build an 8-bit node, without it.

        None where its price is known beforehand and not ``below`` microseconds; no engine where its accuracy is not
        what ``accepts`` allows.
        """
        settings, target, clock = self._settings, self._target, self._clock
        lowering = self._lowering(way)
        self._baseline.start()
        while True:
            lowered = Lowered(way.artifact, None, PrecisionRecord("as-is"))
            if lowering is not None:
                lowered = lower(way.artifact, lowering, clock)
            lowered = store_weights(lowered, self._weights(way), clock)
            final = self._as_shipped(lowered.artifact)
            cost = self._baseline.price_final(final) if below < math.inf else None
            if below < math.inf and (cost is None or cost.predicted_us >= below):
                return None
            if not settings.make_engine:  # found beside the verification
                self._baseline.start_final(final)
                self._baseline.start_fixed(final)
            job = replace(self._check, optimized=final.compared, feeds=final.feeds)
            gauge = None if lowering is None or job.tensors else lowering.gauge
            known = None if gauge is None else gauge.known(final.compared)
            accuracy = verify(job, clock) if known is None else known
            accuracy = with_saved_metric(accuracy, final.artifact.model, job, clock)
            failures = missed(lowered.search, self._budget) + gate(accuracy, self._budget)
            built = Built(way.own, lowered, final, accuracy, None, failures, cost)
            is_refused = failures and not way.config.allow_accuracy_loss
            try:
                if not settings.make_engine:
                    return replace(built, cost=self._baseline.price_final(final, refusals=below == math.inf))
                if is_refused or (accepts is not None and accepts(built)):
                    return built
                compilation = Compilation(target.with_profiles(final.profiles), settings.uses_tf32, settings.cache)
                self._baseline.start_fixed(final)
                self._job = job
                engine = compile_engine(final.artifact, compilation, settings.builder_config(), clock)
            except EngineBuildError as error:
                lowering = without_refused(lowering, lowered, error, clock)
                if lowering is None:
                    raise
                continue
            if has_flag(self._config.builder, target.backend, "STRIP_PLAN"):
                clock.warn(
                    "verify engine", "an engine without its weights runs when it is refitted: it is not verified"
                )
            else:
                loading = as_built(self._config, target.backend)
                accuracy = verify_engine(accuracy, job, engine.data, target.backend, loading, clock)
            failures = missed(lowered.search, self._budget) + gate(accuracy, self._budget)
            return replace(built, accuracy=accuracy, engine=engine, failures=failures, cost=self._cost(final, engine))

    def _trial(
        self, first: Built, what: str, recipes: str, precision: Precision | None, *, every: bool = False
    ) -> Trial:
        """Another way than that of the first product; ``every``: Q/DQ on every supported operator."""
        config, is_pruned = self._config, self._sparsified(first.own).is_pruned

        def make(below: float) -> Built | None:
            options = replace(config, recipes=recipes, keep_all_int8=every or config.keep_all_int8)
            own = first.own if recipes == config.recipes else self._after_recipes(options)
            found = self._build(Way(own, self._sparsified(own).artifact, precision, options), below, accepts)
            return None if found is None else as_asked(found, first, what)

        accepts = as_accurate(first) if every else no_new_failure(first) if is_pruned else gates_of
        if not every or precision is None:
            return Trial(what, make, accepts)
        return Trial(what, make, accepts, all_regions_miss(first.lowered.search, precision), str(precision))

    def _doubts(self, first: Built) -> Iterator[Trial]:
        """The first product without what does not hold on it as it ships: its 8-bit, where that is slower than its own
        16-bit form was judged, and recipes that cost time beside the nodes that stay FP32."""
        config, asked = self._config, self._settings.precision
        sixteen = None if asked is None else asked.base
        if sixteen != asked and not config.keep_all_int8 and first.microseconds > first.without_us * SLOWER:
            yield replace(self._trial(first, WITHOUT_8_BIT, config.recipes, sixteen), enough_us=first.without_us)
        doubts = doubted(first, recipes_of(first.own, self._parts.artifact))
        wide = {item.node for item in first.lowered.record.kept if item.dtype == Precision.FP32}
        with_all = self._price(config.recipes, sixteen, wide) if doubts else math.inf
        out = [name for name in doubts if self._price(but(config.recipes, name), sixteen, wide) < with_all / SLOWER]
        if out:
            trial = self._trial(first, f"without {', '.join(out)}", but(config.recipes, *out), asked)
            yield replace(trial, enough_us=first.microseconds / SLOWER**2)

    def _price(self, recipes: str, precision: Precision | None, wide: Collection[str] = ()) -> float:
        """Microseconds of the network with some recipes, cast plainly but for ``wide`` nodes, as it ships."""
        model = self._after_recipes(replace(self._config, recipes=recipes)).rewritten.artifact.model
        found = self._baseline.price(plain(model, precision, self._target.profiles, wide=wide))
        return math.inf if found is None else found.predicted_us

    def _trials(self, first: Built) -> Iterator[Trial]:
        """Cheaper forms of the first product, those that cost least to make first: without what recipes or 8-bit add,
        and the plain forms themselves."""
        config, asked, trial = self._config, self._settings.precision, partial(self._trial, first)
        costs, sixteen, types = self._baseline.costs(), asked, tuple[Precision, ...]()
        if asked is not None and asked.is_quantized and not config.keep_all_int8:
            sixteen, types = asked.base, self._target.quantized_types(asked)
        sixteen_us = next(iter(costs.values())).predicted_us if costs else math.inf
        for dtype in types:
            if dtype in costs and costs[dtype].predicted_us < min(sixteen_us, first.microseconds):
                yield trial(f"{dtype.upper()} on every supported operator, and no recipes", "none", dtype, every=True)
        used = recipes_of(first.own, self._parts.artifact)
        out = self._slow_recipes(used, sixteen) if used else ()
        if out:
            yield trial(f"without {', '.join(out)}", but(config.recipes, *out), asked)
        if sixteen != asked and first.microseconds <= first.without_us * SLOWER:
            yield trial(WITHOUT_8_BIT, config.recipes, sixteen)
        if sixteen != asked and out:
            yield trial(f"{WITHOUT_8_BIT} and {', '.join(out)}", but(config.recipes, *out), sixteen)
        if sixteen is not None and not sixteen.is_wide and not sixteen.is_quantized:
            is_pruned = self._sparsified(first.own).is_pruned
            accepts = no_new_failure(first) if is_pruned else within_bound(sixteen, config.min_sqnr_db)
            yield Trial(PLAIN, partial(self._plain, first, sixteen, accepts), accepts, why_barred(first, sixteen))

    def _plain(self, first: Built, precision: Precision, accepts: Accepts, below: float) -> Built | None:
        """The plain cast as a product."""
        own = OwnQdq(Rewritten(self._parts.artifact))
        start, source = time.perf_counter(), self._sparsified(own).artifact
        step = StepRecord("plain", "PRECISION", sum(1 for _ in source.model.graph), time.perf_counter() - start)
        artifact = source.with_step(plain(source.model, precision), step)
        found = self._build(Way(own, artifact, None, self._config), below, accepts)
        return None if found is None else as_asked(found, first, PLAIN)

    def _slow_recipes(self, used: Sequence[str], precision: Precision | None) -> tuple[str, ...]:
        """The recipes without which the network, cast plainly, is faster as it ships, if it is slower than plain with
        them; none where others are to blame."""
        best = next((cost.predicted_us for cost in self._baseline.costs().values()), math.inf)
        recipes = self._config.recipes
        with_all = self._price(recipes, precision)
        if with_all <= best * SLOWER or len(used) > TOGETHER:
            return () if with_all <= best * SLOWER else tuple(used)
        slow = tuple(name for name in used if self._price(but(recipes, name), precision) < with_all)
        return slow if slow and self._price(but(recipes, *slow), precision) <= best * SLOWER else tuple(used)

    def _weights(self, way: Way) -> WeightsJob:
        """What weights of a lowered model are stored for."""
        gauge = weights_gauge(self._check, way.config, self._budget)
        return WeightsJob(way.config, self._inputs.calibration, gauge, self._baseline.price)

    def _lowering(self, way: Way) -> Lowering | None:
        """What a way lowers the model to; None where it keeps its types."""
        if way.precision is None:
            return None
        return Lowering(
            way.precision,
            self._target,
            self._inputs.calibration,
            way.config,
            self._open_judge,
            self._inputs.ranges,
            way.own.ranges,
            gauge_for(self._check, way.config, self._budget, way.precision, self._clock),
            saved=self._check.saves,
        )

    def _cost(self, final: FinalModel, engine: EngineArtifact) -> Cost | None:
        """What an engine costs: by its own kernels where the compiler is the judge."""
        target = self._target.with_profiles(final.profiles)
        if target.backend != TENSORRT_RTX:
            return self._baseline.price_final(final)
        try:
            return cost_of_engine(engine, final.artifact.model, target, tf32=self._settings.uses_tf32)
        except TrtoptError as error:
            self._clock.warn("price", f"what ships cannot be priced: {error.what}")
            return None

    def _report(self, built: Built, effective: BuildConfig, sparsity: SparsityRecord | None) -> BuildReport:
        own, lowered, clock = built.own, built.lowered, self._clock
        is_written = not built.failures or self._config.allow_accuracy_loss
        target = self._settings.target.with_profiles(built.final.profiles)
        capability = "8.0 and later" if target.gpu is None else target.gpu.compute_capability
        analysis = self._predicted(built, target)
        return BuildReport(
            model=self._inputs.loaded.to_json_dict() | self._made_by,
            gpu={"name": target.gpu_name, "compute_capability": capability} | _calibration(target),
            steps=built.final.artifact.steps,
            calibration=lowered.calibration,
            precision=_precision(built, target, analysis),
            accuracy=built.accuracy,
            judge=own.rewritten.judge if lowered.judge == "none" else lowered.judge,
            rewriting=RewritingRecord(own.rewritten.before, own.rewritten.after),
            warnings=tuple(clock.warnings),
            engine=self._engine(built.engine, is_written=is_written),
            config=dataclasses.asdict(effective),
            environment=environment(),
            seconds={name: round(value, 4) for name, value in clock.seconds.items()},
            gate_failures=built.failures,
            analysis=analysis,
            host=at_path(self._parts.record, self._outputs.named.get("host") if is_written else None),
            network_io=built.final.records,
            guard=(*own.guard, *lowered.guard),
            sixteen_bit=own.sixteen_bit or lowered.sixteen_bit,
            search=lowered.search,
            sparsity=sparsity,
            weights=lowered.weights,
            names=names_of(self._inputs.loaded.model, built.final.artifact.model),
            parameters=cost.parameters(self._inputs.loaded.model),
        )

    def _predicted(self, built: Built, target: BuildTarget) -> EngineAnalysis | None:
        """The predicted time of an engine's layers; None where they are not known, and for a target that is not one
        chip."""
        own = None if built.engine is None else built.engine.record.layers
        if built.engine is None or own is None or target.gpu is None:
            return None
        model = built.final.artifact.model
        tf32 = self._settings.uses_tf32 and supports(target.gpu, Precision.TF32)
        with self._clock.stage("predict"):
            shapes = static_shapes(model, target.shapes)
            static = built.engine.sized_layers
            layers = sized(layers_of_profile(own), model, shapes, target.profiles, static) or static
            work = layers_of_engine(layers, model, shapes, tf32=tf32)
            rows, uncosted = predict(work.layers, target.gpu)
            limit = limit_of(layers, work.layers, rows, model, target.gpu)
        return EngineAnalysis(target.gpu.name, rows, totals_of(rows), uncosted, limit)

    def _engine(self, engine: EngineArtifact | None, *, is_written: bool) -> EngineRecord | None:
        if engine is None or not is_written:
            return None if engine is None else engine.record
        path = self._outputs.named["engine"]
        return replace(engine.record, path=str(path), manifest=str(manifest_path(path)))


def _calibration(target: BuildTarget) -> dict[str, object]:
    """The field of the report's GPU that says that its predictions are calibrated, where they are."""
    found = None if target.gpu is None else target.gpu.calibration
    return {} if found is None else {"calibration": dataclasses.asdict(found)}


def _precision(built: Built, target: BuildTarget, analysis: EngineAnalysis | None) -> PrecisionRecord:
    """The precision record, with what the engine's layers say when there is an engine."""
    layers = None if built.engine is None else built.engine.record.layers
    if layers is None:
        return built.lowered.record
    model = built.final.artifact.model
    flop = cost.flop_by_node(model, static_shapes(model, target.shapes))
    achieved = achieved_precision(layers, flop, analysis.layers if analysis else ())
    return replace(built.lowered.record, achieved=achieved)
