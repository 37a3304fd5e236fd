"""What the judge of a backend decides in a build: recipes, the model's own Q/DQ, and which regions become 8-bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import onnx_ir as ir

from trtopt.config import BuildConfig
from trtopt.engine.backend import TENSORRT_RTX
from trtopt.errors import TrtoptError
from trtopt.events import OnEvent
from trtopt.graph.artifact import ModelArtifact
from trtopt.judge.form import judged_form
from trtopt.judge.protocol import LEAST_GAIN, Judge, OpenJudge, PriceFile
from trtopt.judge.selection import Choice, Guard, Guarded, RegionVerdict
from trtopt.judge.target import BuildTarget, nearest_target
from trtopt.pipeline.calibrate import Observer
from trtopt.precision.fp16.network_io import parse_io
from trtopt.precision.plan import PrecisionPlan
from trtopt.precision.qdq.canonicalize import existing_nodes
from trtopt.precision.qdq.existing import canonicalize_qdq, existing_ranges, existing_types, without_qdq
from trtopt.precision.qdq.wide_weights import with_wide_weights
from trtopt.precision.regions import Candidates, Problem
from trtopt.report.schema.decisions import GuardRecord, SearchRecord
from trtopt.report.schema.steps import Cost, StepRecord
from trtopt.rewrite import driver
from trtopt.rewrite.driver import Rewritten
from trtopt.rewrite.protocol import Target
from trtopt.rewrite.sweeps import Verdict
from trtopt.support.clock import Clock
from trtopt.support.precision import Precision


def rewrite(
    artifact: ModelArtifact,
    target: BuildTarget,
    precision: Precision | None,
    config: BuildConfig,
    open_judge: OpenJudge,
    verdicts: dict[str, Verdict],
    on_event: OnEvent,
) -> driver.Rewritten:
    """Apply the recipes of ``config``, judged for a target at its shapes; ``precision`` None keeps the types of the
    model. ``verdicts`` on places are remembered from one call to the next.

    Raises:
        MissingDependencyError: TensorRT for RTX has to judge and is not installed.
        UsageError: An unknown recipe, or wrong shapes.
        RecipeError: A recipe or a pack failed, with ``strict_recipes``.
    """
    gpu = target.gpu
    lowered_for = nearest_target(gpu) if gpu is not None and target.backend == TENSORRT_RTX else gpu
    capability = lowered_for.compute_capability if lowered_for is not None else None
    run = partial(
        driver.run,
        artifact,
        recipes=config.recipes,
        strict=config.strict_recipes,
        target=Target(target.backend.name, precision, capability),
        on_event=on_event,
    )
    if config.recipes == "none":
        return run()
    with open_judge(precision, io=parse_io(config.io)) as judge:
        return run(judging=driver.Judging(judge, target.profiles, verdicts))


OWN = "Q/DQ of the model"
"""The region of a model's own Q/DQ in reports."""

STORED = "weights of the model"
"""The region of the narrow weights that it brings along."""

OUT = "existing-qdq-out"
"""Name of the step that takes it out."""


def canonicalized(artifact: ModelArtifact, backend: str, clock: Clock) -> ModelArtifact:
    """The model with its own Q/DQ mended (:mod:`trtopt.precision.qdq.existing`); itself when it holds none.

    Raises:
        InvalidModelError: It is quantized in a way that cannot be kept.
    """
    with clock.stage("mend Q/DQ"):
        found = canonicalize_qdq(artifact.model, backend)
    if found is None:
        return artifact
    for text in found.warnings:
        clock.warn("mend Q/DQ", f"{text}. Quantize symmetrically (INT8, zero point 0) to lose nothing")
    return artifact.with_step(found.model, found.step)


@dataclass(frozen=True)
class OwnQdq:
    """A model after its recipes, and what its own Q/DQ was found to be worth.

    Attributes:
        rewritten: The form to go on with: with its Q/DQ, or without.
        ranges: Where that was taken out, the largest magnitude of each activation that it quantized to INT8, by name.
        guard: The verdict on it; empty where there is none, or nobody can judge it.
        sixteen_bit: What the model costs in FP16 without it; None where it was not judged, or in another type.
    """

    rewritten: Rewritten
    ranges: Mapping[str, float] = field(default_factory=dict)
    guard: tuple[GuardRecord, ...] = ()
    sixteen_bit: Cost | None = None


def own_qdq(
    artifact: ModelArtifact,
    rewrite: Callable[[ModelArtifact], Rewritten],
    target: BuildTarget,
    precision: Precision | None,
    config: BuildConfig,
    clock: Clock,
    open_judge: OpenJudge,
) -> OwnQdq:
    """Apply the recipes (``rewrite``), and judge a model's own Q/DQ, mended, against the same model without.

    Where 8-bit has to pay (``--int8``, ``--fp8``, ``--auto``), Q/DQ that makes the model slower is taken out: its
    activations keep their ranges, and what pays of them becomes 8-bit again. Elsewhere it stays, with a warning.
    """
    kept = rewrite(artifact)
    nodes = existing_nodes(artifact.model)
    other, stored = (without_qdq(artifact.model), ()) if nodes else with_wide_weights(artifact.model)
    if not nodes and not stored:
        return OwnQdq(kept)
    plain = rewrite(replace(artifact, model=other))
    eight_bit = precision is not None and precision.is_quantized
    try:
        judged_in = Precision.FP16 if eight_bit else precision
        with (
            clock.stage("judge Q/DQ"),
            open_judge(judged_in, io=parse_io(config.io)) as judge,
        ):
            before, after = (
                judge.price(judged_form(form.artifact.model, target.profiles), inner=False).total
                for form in (plain, kept)
            )
    except TrtoptError as error:
        clock.warn("judge Q/DQ", f"the model's own Q/DQ stays as it is, since nobody can judge it: {error.what}")
        return OwnQdq(kept)
    if stored:
        return OwnQdq(kept, guard=(_stored_verdict(stored, before, after, clock),))
    sixteen_bit = before if precision is not None and precision.base == Precision.FP16 else None
    found = f"{after.predicted_us:.1f} us predicted with it, {before.predicted_us:.1f} us without"
    if eight_bit and not config.keep_all_int8 and after.predicted_us > before.predicted_us:
        text = f"the model's own Q/DQ makes it slower and is taken out: {found}"
        clock.warn("judge Q/DQ", f"{text}. What pays becomes 8-bit again; --keep-all-int8 keeps all of it")
        step = StepRecord(OUT, "PRECISION", len(nodes), 0.0, details=(text,))
        out = replace(plain, artifact=plain.artifact.with_step(plain.artifact.model, step))
        return OwnQdq(out, existing_ranges(artifact.model), sixteen_bit=sixteen_bit)
    if after.predicted_us > before.predicted_us * (1 + LEAST_GAIN):
        remedy = "--int8 without --keep-all-int8" if eight_bit else "--int8"
        clock.warn("judge Q/DQ", f"the model's own Q/DQ makes it slower: {found}. {remedy} keeps what pays of it only")
    return OwnQdq(kept, guard=(_verdict(artifact.model, nodes, before, after),), sixteen_bit=sixteen_bit)


def _stored_verdict(nodes: tuple[str, ...], before: Cost, after: Cost, clock: Clock) -> GuardRecord:
    """The record of narrow weights that a model brings along: they stay, with a warning where wide ones are faster."""
    if after.predicted_us > before.predicted_us * (1 + LEAST_GAIN):
        clock.warn(
            "judge Q/DQ",
            f"the model's narrow weights make it slower: {after.predicted_us:.1f} us predicted with them, "
            f"{before.predicted_us:.1f} us with wide ones. --weights, given the model before it was quantized, keeps "
            "those that pay",
        )
    reason = "the model's own, judged as one on the whole network"
    return GuardRecord(STORED, nodes, True, "narrow weights", reason, before.predicted_us, after.predicted_us)


def _verdict(model: ir.Model, nodes: Collection[str], before: Cost, after: Cost) -> GuardRecord:
    """The record of Q/DQ that stays."""
    return GuardRecord(
        region=OWN,
        nodes=tuple(str(node.name) for node in model.graph if node.name in nodes),
        kept=True,
        dtype="+".join(sorted(existing_types(model))),
        reason="the model's own Q/DQ, judged as one on the whole network",
        before_us=before.predicted_us,
        after_us=after.predicted_us,
        kernels=(before.kernels, after.kernels),
        bytes=(before.bytes, after.bytes),
    )


def price_file(judge: Judge, form: ir.Model, target: BuildTarget, config: BuildConfig, listen: OnEvent) -> PriceFile:
    """What runs with this judge know of plans for ``form``; where ``--io`` names inputs and outputs, names count."""
    ends = [str(value.name) for value in (*form.graph.inputs, *form.graph.outputs)] if config.io else []
    return PriceFile((judge.name, repr(target.gpu), repr((config.io, ends))), config.cache_dir, listen, config.plugins)


@contextmanager
def guard_of(
    problem: Problem, candidates: Candidates, target: BuildTarget, observer: Observer, open_judge: OpenJudge
) -> Iterator[Guard]:
    """The guard of one model, while its judge is there.

    Raises:
        MissingDependencyError: TensorRT for RTX has to judge and is not installed.
        UsageError: A plugin library cannot be read.
    """
    config, listen = observer.config, observer.clock.listen
    form, io = judged_form(problem.model, target.profiles), parse_io(config.io)
    with open_judge(None, io=io, prices=None) as judge:
        file = price_file(judge, form, target, config, listen)
        memory_gbs = math.inf if target.gpu is None else target.gpu.bandwidth_gbs
        with closing(Guard(problem, candidates, form, judge, listen, file, memory_gbs)) as guard:
            yield guard


def without_results(guarded: Guarded, guard: Guard) -> Guarded:
    """The same choice where no product writes 8 bits."""

    def wider(choice: Choice) -> Choice:
        return {node: replace(op, writes=False) for node, op in choice.items()}

    def of(verdict: RegionVerdict) -> RegionVerdict:
        return replace(verdict, kept=wider(verdict.kept), options=tuple(map(of, verdict.options)))

    choice = wider(guarded.choice)
    return Guarded(choice, tuple(map(of, guarded.verdicts)), guarded.before, guard.whole(choice))


def form_price(guard: Guard, target: BuildTarget) -> Callable[[Problem, PrecisionPlan], float]:
    """Prices FP32 forms of the guard's model in microseconds; infinite where nobody can say."""

    def price(problem: Problem, plan: PrecisionPlan) -> float:
        found = guard.price_of(judged_form(problem.model, target.profiles), plan)
        return math.inf if found is None else found.predicted_us

    return price


KEEP_ALL = "--keep-all-int8"
"""Why regions are kept that nobody judged."""


def kept_records(candidates: Candidates) -> tuple[GuardRecord, ...]:
    """Every region kept, unjudged."""
    return tuple(
        GuardRecord(
            region=region.name,
            nodes=region.nodes,
            kept=True,
            dtype=candidates.all[region.nodes[0]].dtype,
            reason=KEEP_ALL,
        )
        for region in candidates.regions
    )


def with_blocked(
    records: Sequence[GuardRecord], candidates: Candidates, blocked: Mapping[str, str]
) -> tuple[GuardRecord, ...]:
    """The verdicts on the regions that are left, and one for each region that the compiler could not build.

    ``candidates`` are what might have become 8-bit before ``blocked`` nodes, with their reasons, were taken out.
    """
    judged = {record.region: record for record in records}
    found = (
        judged.get(item.name)
        or GuardRecord(region=item.name, nodes=item.nodes, kept=False, reason=blocked.get(item.nodes[0], ""))
        for item in candidates.regions
    )
    return tuple(found)


def searched_records(records: Sequence[GuardRecord], found: SearchRecord) -> tuple[GuardRecord, ...]:
    """The verdicts, with what the accuracy budget took back, or the search found to pay after all."""
    bound = "budget of --min-sqnr-db" if found.min_sqnr_db is not None else "floor"
    bound = f"budget of {found.budget:g} ({found.metric})" if found.budget < math.inf else bound
    taken_back = f"taken back for the accuracy {bound}"
    result = []
    for record in records:
        dtype = found.types.get(record.region, "")
        reason = record.reason
        if record.kept != bool(dtype):
            reason = "" if dtype else taken_back
        result.append(replace(record, kept=bool(dtype), dtype=dtype, reason=reason))
    return tuple(result)


def guard_record(verdict: RegionVerdict) -> GuardRecord:
    """A verdict, for the report."""
    dtypes = sorted({op.dtype for op in verdict.kept.values()})
    some = 0 < len(verdict.kept) < len(verdict.region.nodes)
    return GuardRecord(
        region=verdict.region.name,
        nodes=verdict.region.nodes,
        kept=bool(verdict.kept),
        dtype="+".join(dtypes),
        reason=f"only {', '.join(verdict.kept)}" if some else verdict.reason,
        before_us=verdict.before.predicted_us if verdict.before else None,
        after_us=verdict.after.predicted_us if verdict.after else None,
        kernels=_change(verdict, "kernels"),
        bytes=_change(verdict, "bytes"),
    )


def _change(verdict: RegionVerdict, name: str) -> tuple[int, int] | None:
    if verdict.before is None or verdict.after is None:
        return None
    return int(getattr(verdict.before, name)), int(getattr(verdict.after, name))
