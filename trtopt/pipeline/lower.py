"""Precision written into a model: observe, choose what becomes 8-bit, decide what stays FP32, rewrite."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from trtopt.config import BuildConfig
from trtopt.errors import EngineBuildError
from trtopt.graph import cost
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.shapes import static_shapes
from trtopt.judge.protocol import OpenJudge
from trtopt.judge.target import BuildTarget
from trtopt.pipeline.calibrate import Observer
from trtopt.pipeline.gauge import Gauge
from trtopt.pipeline.guard import (
    form_price,
    guard_of,
    guard_record,
    kept_records,
    searched_records,
    with_blocked,
    without_results,
)
from trtopt.pipeline.improve import improve
from trtopt.pipeline.product import Lowered
from trtopt.pipeline.put_back import PutBack, warn_of_fp32
from trtopt.pipeline.search import RegionOracle, search, settled
from trtopt.precision.decide import decide, int8_flop_share, plan_for, wanted_tensors, with_bfloat
from trtopt.precision.fp16.network_io import parse_io
from trtopt.precision.fp16.rescale import RESCALE, rescaled
from trtopt.precision.fp16.states import fp32_outputs
from trtopt.precision.fp16.to_fp32 import to_fp32
from trtopt.precision.observe.ranges import ValueRanges, range_warnings
from trtopt.precision.observe.statistics import TensorStats
from trtopt.precision.observe.stream import Samples
from trtopt.precision.observe.trt_cache import ImportedCache, imports
from trtopt.precision.plan import FP16, PrecisionPlan, QuantizedOp
from trtopt.precision.regions import Candidates, Problem, find_candidates, without
from trtopt.precision.write import apply_plan
from trtopt.report.schema.build import KeptNode, PrecisionRecord
from trtopt.report.schema.decisions import GuardRecord, SearchRecord
from trtopt.report.schema.steps import Cost, Refusal, StepRecord
from trtopt.report.text.format import count
from trtopt.support.clock import Clock
from trtopt.support.precision import Precision


def blamed(lowered: Lowered, error: EngineBuildError) -> dict[str, str]:
    """The 8-bit nodes that the compiler's message names, or whose quantized tensor it names, with the reason."""
    text = f"{error.what}\n{error.where}"  # the remedy speaks of inputs and nodes, which may be names here
    reason = f"the compiler cannot build it in 8-bit: {error.what}"
    names = {node: (node, tensor) for node, tensor in lowered.quantized.items()}
    return {node: reason for node, given in names.items() if any(_is_named(name, text) for name in given)}


def _is_named(name: str, text: str) -> bool:
    """Whether a message names it; a number is more likely to be a size or a code."""
    return not name.isdigit() and re.search(rf"(?<![\w./]){re.escape(name)}(?![\w./])", text) is not None


@dataclass(frozen=True)
class Lowering:
    """What a model is lowered to, and from what.

    Attributes:
        precision: The precision asked for.
        target: The backend and the GPU, and the shapes at which regions are judged.
        samples: Calibration samples.
        config: Calibration method, caches, guard.
        open_judge: Opens the target's judge.
        given: INT8 ranges of a calibration cache of TensorRT, if any.
        own: INT8 ranges of the model's own Q/DQ, where that was taken out: largest magnitude by tensor name.
        gauge: The accuracy budget to choose regions by; None to take all that pay. Of 16 bits, which need none: what
            measures graphs as the product is verified, where a few samples may be enough.
        blocked: Nodes that the compiler could not build in 8-bit, with the reason.
        failed: Whether the compiler could not build the engine and did not say why: regions are built one by one.
        saved: Whether the model is written for others too: BF16 is then only where it was asked for.
    """

    precision: Precision
    target: BuildTarget
    samples: Samples
    config: BuildConfig
    open_judge: OpenJudge
    given: ImportedCache | None = None
    own: Mapping[str, float] = field(default_factory=dict)
    gauge: Gauge | None = None
    blocked: Mapping[str, str] = field(default_factory=dict)
    failed: bool = False
    saved: bool = False


def lower(artifact: ModelArtifact, job: Lowering, clock: Clock) -> Lowered:
    """Observe, choose, decide, rewrite the cleaned model ``artifact``.

    Raises:
        UsageError: A sample is bad.
        InvalidModelError: ONNX Runtime cannot run the model.
        MissingDependencyError: ONNX Runtime or the judge's compiler is not installed.
    """
    base = to_fp32(artifact.model)
    observer = Observer(artifact, job.precision, job.target.backend.name, job.samples, job.config, clock)
    shapes = static_shapes(base, job.target.largest)
    is_quantized = job.precision.is_quantized
    calibration = observer.observe(base) if is_quantized else observer.observe_by_need(base, shapes)
    if calibration is not None:
        observer.warn_synthetic()
    stats = calibration.table.stats if calibration is not None else {}
    if job.samples.source == "user":
        for text in range_warnings(stats, [str(value.name) for value in base.graph.inputs]):
            clock.warn("calibrate", f"calibration samples: {text}")
    ends = fp32_outputs(artifact.model, parse_io(job.config.io))
    put_back = PutBack(job.samples, job.target, job.config, job.open_judge, clock)
    if is_quantized:
        problem = Problem(base, job.target.backend.name, stats, shapes, job.config.calib_method, FP16, ends=ends)
        moved = _Moved(base, plan_for(problem, job.precision), stats)
        if not (job.given or job.own):  # these ranges are of the values as they were
            moved = _rescaled(base, moved.plan, stats, shapes, job, ends)
        base, stats = moved.base, moved.stats
        problem = replace(problem, model=base, stats=stats, takes_bfloat=job.target.takes_bfloat and not job.saved)
        mended = put_back.mend(problem.model, _of_16_bits(problem, job, clock))
        problem = replace(problem, fallbacks=mended.fallbacks)
        wanted = wanted_tensors(base, job.precision, job.target.backend.name).histogram
        taken = imports(base, job.given, wanted, job.samples, job.own)
        problem = replace(problem, imported=taken.amax, unknown=taken.unknown)
        chosen = _choose(problem, observer, job)
        chosen = replace(chosen, steps=(*moved.steps, *mended.steps, *taken.steps, *chosen.steps))
    else:
        plan = decide(base, job.precision, job.target.backend.name, stats, shapes, job.config.calib_method, ends)
        moved = _rescaled(base, plan, stats, shapes, job, ends)
        base, plan, stats = moved.base, moved.plan, moved.stats
        if job.target.takes_bfloat:
            plan = _bfloat(plan, with_bfloat(base, plan, ValueRanges(stats, shapes)), job, clock)
        mended = put_back.mend(base, plan, *(() if job.gauge is None else (job.gauge.is_clear,)))
        chosen = _Chosen(base, mended.plan, (*moved.steps, *mended.steps))
    flop = cost.flop_by_node(base, shapes)
    warn_of_fp32(chosen.plan, flop, clock)
    start = time.perf_counter()
    with clock.stage("rewrite precision"):
        model = apply_plan(chosen.base, chosen.plan)
    for step in (*chosen.steps, _step(model, chosen.plan, time.perf_counter() - start)):
        artifact = artifact.with_step(model, step)
    return Lowered(
        artifact,
        observer.record(calibration),
        _record(chosen, flop),
        guard=chosen.guard,
        sixteen_bit=chosen.sixteen_bit,
        judged=chosen.judged,
        search=chosen.search,
        judge=chosen.judge,
        quantized={op.node: op.activation for op in chosen.plan.quantized},
    )


def without_refused(
    lowering: Lowering | None, lowered: Lowered, error: EngineBuildError, clock: Clock
) -> Lowering | None:
    """What is lowered to next without the 8-bit nodes that the compiler refused; None where nothing is left to try."""
    if lowering is None:
        return None
    blocked = blamed(lowered, error)
    is_new = lowering.config.keep_all_int8 and bool(lowered.quantized) and not lowering.failed
    if not (blocked or is_new):
        return None
    for node, reason in blocked.items():
        clock.warn("build engine", f"{node} goes back to 16-bit: {reason}")
    return replace(lowering, blocked={**lowering.blocked, **blocked}, failed=lowering.failed or not blocked)


_WORTH_MOVING = 0.95
"""Share of the flop in FP32 that may be left for values to be moved."""


@dataclass(frozen=True)
class _Moved:
    """An FP32 form of the model, its plan and its statistics, and how they came about."""

    base: ir.Model
    plan: PrecisionPlan
    stats: Mapping[str, TensorStats]
    steps: tuple[StepRecord, ...] = ()


def _rescaled(
    base: ir.Model,
    plan: PrecisionPlan,
    stats: Mapping[str, TensorStats],
    shapes: Mapping[str, tuple[int, ...]],
    job: Lowering,
    ends: Collection[str],
) -> _Moved:
    """With values moved into the range of FP16, where fewer nodes and less flop stay FP32 then; as given where not.

    Values that are to be compared stay as they are, and all others with them.
    """
    began = time.perf_counter()
    given = _Moved(base, plan, stats)
    if plan.narrow is not FP16 or job.config.compare_tensors:
        return given
    found = rescaled(base, stats, shapes, FP16)
    if found is None:
        return given
    name, method = job.target.backend.name, job.config.calib_method
    precision = Precision.FP16 if job.precision.is_quantized else job.precision
    again = decide(found.model, precision, name, found.stats, shapes, method, ends)
    flop = cost.flop_by_node(base, shapes)
    kept, left = ((sum(flop.get(name, 0) for name in wide), len(wide)) for wide in (plan.wide, again.wide))
    if left[0] > kept[0] * _WORTH_MOVING or left[1] >= kept[1]:
        return given
    text = f"{len(found.values)} values times powers of two: {len(plan.wide)} -> {len(again.wide)} nodes in FP32"
    step = StepRecord(RESCALE, "PRECISION", len(found.values), time.perf_counter() - began, details=(text,))
    return _Moved(found.model, again, found.stats, (step,))


def _of_16_bits(problem: Problem, job: Lowering, clock: Clock) -> PrecisionPlan:
    """The plan without 8-bit nodes."""
    plan = plan_for(problem, job.precision)
    if job.target.takes_bfloat and job.saved:
        _bfloat(plan, plan_for(replace(problem, takes_bfloat=True), job.precision), job, clock)
    return plan


def _bfloat(plan: PrecisionPlan, with_bf16: PrecisionPlan, job: Lowering, clock: Clock) -> PrecisionPlan:
    """The plan with BF16 products, which are as fast as FP16 where the target has them; without, for a saved model."""
    if not job.saved or not with_bf16.bfloat:
        return with_bf16
    nodes = ", ".join(list(with_bf16.bfloat)[:3]) + (", ..." if len(with_bf16.bfloat) > 3 else "")
    stay = "stays" if len(with_bf16.bfloat) == 1 else "stay"
    text = f"{count(len(with_bf16.bfloat), 'product')} {stay} FP32, though BF16 would hold what FP16 does not ({nodes})"
    clock.warn("precision", f"{text}: the saved model is to run in ONNX Runtime, which has no BF16 products on CPUs")
    return plan


@dataclass(frozen=True)
class _Chosen:
    """A plan, the FP32 form of the model it is for, and how it came about."""

    base: ir.Model
    plan: PrecisionPlan
    steps: tuple[StepRecord, ...] = ()
    guard: tuple[GuardRecord, ...] = ()
    sixteen_bit: Cost | None = None
    judged: Cost | None = None
    search: SearchRecord | None = None
    judge: str = "none"


def _choose(problem: Problem, observer: Observer, job: Lowering) -> _Chosen:
    """The plan with the 8-bit regions that pay, or with all of them."""
    every = find_candidates(problem, job.target.quantized_types(job.precision))
    candidates, blocked = without(every, job.blocked), job.blocked
    searches = job.gauge is not None and job.precision == Precision.AUTO  # over 16-bit types at least
    if job.config.keep_all_int8 or not (candidates.regions or searches):
        if job.failed:
            blocked = {**blocked, **_culprits(problem, candidates, observer, job)}
            candidates = without(every, blocked)
        plan = plan_for(problem, job.precision, tuple(candidates.all.values()), candidates.refused)
        improved = improve(problem, plan, observer)
        records = with_blocked(kept_records(candidates), every, blocked)
        return _Chosen(improved.problem.model, improved.plan, improved.steps, records)
    with guard_of(problem, candidates, job.target, observer, job.open_judge) as guard:
        with observer.clock.stage("guard"):
            guarded = guard.choose()
        if not _keeps_budget(guarded.choice, problem, job):
            guarded = without_results(guarded, guard)
        records = with_blocked([guard_record(verdict) for verdict in guarded.verdicts], every, blocked)
        refused = candidates.refused + _taken_back(candidates, guarded.choice, records)
        plan = plan_for(problem, job.precision, tuple(guarded.choice.values()), refused)
        holds = None if job.gauge is None else job.gauge.holds_clearly
        improved = improve(problem, plan, observer, form_price(guard, job.target), holds)
        chosen = _Chosen(improved.problem.model, improved.plan, improved.steps, records, guarded.before)
        chosen = replace(chosen, judge=guard.judge.name, judged=guarded.after)
        if job.gauge is None or not (guarded.choice or job.precision == Precision.AUTO):
            return chosen
        flop = cost.flop_by_node(problem.model, problem.shapes)
        with observer.clock.stage("search"), job.gauge as gauge:
            if gauge.is_floor and gauge.keeps_floor(apply_plan(chosen.base, chosen.plan)):
                return chosen
            oracle = RegionOracle(improved, guard, guarded, gauge, observer)
            bfloat = job.target.takes_bfloat and not job.saved
            best = search(oracle, gauge, flop, observer, job.target, takes_bfloat=bfloat)
            if gauge.is_advice and not best.reached:  # 16 bits do not keep it either
                return chosen
            final = settled(best, oracle, problem, gauge, observer)
        records = searched_records(records, final.record)
        kept = {op.node: op for op in final.plan.quantized}
        plan = replace(final.plan, refused=candidates.refused + _taken_back(candidates, kept, records))
        steps = (*chosen.steps, *final.steps)
        chosen = replace(chosen, base=final.problem.model, plan=plan, steps=steps, guard=records, search=final.record)
        return replace(chosen, judged=None)


def _keeps_budget(choice: Mapping[str, QuantizedOp], problem: Problem, job: Lowering) -> bool:
    """Whether what pays holds the budget where products of it write 8 bits, which a search takes back with their
    regions only; true where none does, or nothing has to be held."""
    if job.gauge is None or not any(op.writes for op in choice.values()):
        return True
    plan = plan_for(problem, job.precision, tuple(choice.values()))
    with job.gauge as gauge:
        return gauge.budget().holds(gauge.evaluate(apply_plan(problem.model, plan)))


def _culprits(problem: Problem, candidates: Candidates, observer: Observer, job: Lowering) -> dict[str, str]:
    """The nodes that the compiler cannot build in 8-bit, with the reason; warned of."""
    with observer.clock.stage("guard"), guard_of(problem, candidates, job.target, observer, job.open_judge) as guard:
        found = guard.culprits(candidates.all)
    for node, reason in found.items():
        observer.clock.warn("build engine", f"{node} goes back to 16-bit: {reason}")
    return found


def _taken_back(
    candidates: Candidates, choice: Mapping[str, QuantizedOp], records: tuple[GuardRecord, ...]
) -> tuple[Refusal, ...]:
    reasons = {node: record.reason for record in records for node in record.nodes}
    return tuple(Refusal(node, reasons.get(node, "")) for node in candidates.ops if node not in choice)


def _step(model: ir.Model, plan: PrecisionPlan, seconds: float) -> StepRecord:
    eight = plan.requested.is_quantized
    changes = len(plan.quantized) if eight else sum(1 for _ in model.graph) - len(plan.wide)
    return StepRecord(f"precision-{plan.requested}", "PRECISION", changes, seconds, plan.refused)


def _record(chosen: _Chosen, flop: Mapping[str, int]) -> PrecisionRecord:
    plan = chosen.plan
    return PrecisionRecord(
        requested=plan.requested,
        int8_flop_share=int8_flop_share(chosen.base, plan, flop) if plan.requested.is_quantized else None,
        kept=tuple(
            KeptNode(node, dtype, reason)
            for dtype, nodes in ((Precision.FP32, plan.wide), (Precision.BF16, plan.bfloat))
            for node, reason in nodes.items()
        ),
    )
