"""What ships is held against plain: never slower by its judge, unless accuracy demands it and the report says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import onnx_ir as ir

from trtopt.accuracy.metric import drop_of
from trtopt.accuracy.scores import held_by
from trtopt.config import DEFAULT_FLOOR
from trtopt.engine.request import ShapeProfile
from trtopt.errors import EngineBuildError
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.shapes import at_shapes
from trtopt.judge.judges import written
from trtopt.judge.protocol import LEAST_GAIN
from trtopt.judge.target import BuildTarget
from trtopt.pipeline.guard import KEEP_ALL, OwnQdq
from trtopt.pipeline.network_io import FinalModel
from trtopt.pipeline.plain import has_one_shape, plain, with_only_shape
from trtopt.pipeline.pricing import Compiled, Pricer
from trtopt.pipeline.product import Built
from trtopt.precision.fp16.cast_to_half import why_fp32
from trtopt.precision.fp16.hazards import shows_on_a_cpu
from trtopt.precision.fp16.heads import score_nodes
from trtopt.precision.fp16.repair import smallest_sqnr_db
from trtopt.precision.fp16.rescale import RESCALE
from trtopt.precision.fp16.to_fp32 import to_fp32
from trtopt.precision.observe.samples import SYNTHETIC
from trtopt.precision.plan import BF16, FP16
from trtopt.report.schema.build import AccuracyRecord, KeptNode
from trtopt.report.schema.decisions import SearchRecord
from trtopt.report.schema.shipped import AccuracyCost, DynamicCost, PlainCost
from trtopt.report.schema.steps import Cost, StepRecord
from trtopt.report.text.format import count
from trtopt.rewrite import registry
from trtopt.support.clock import Clock
from trtopt.support.precision import Precision

SLOWER = 1.001
"""Above this ratio what ships is slower than plain; below it are roundings of the prediction."""

LEAST_DB = DEFAULT_FLOOR.sqnr_db or 0.0
"""What outputs in 8 bits keep on real data."""

_APART = 1e-9
"""Share by which what was judged before and what ships may differ without a word."""

_BETTER_NUMBERS = ("equalize", "smooth", "round-weights")
"""Steps behind the judgement of 8-bit regions that may add nodes."""

STEP = "held-against-plain"

NOT_FASTER = "not faster, with what accuracy demands"

WITHOUT_8_BIT = "without 8-bit"
"""What the trial of the 16-bit form is."""

TOGETHER = 6
"""At most so many recipes are left out one by one; more are left out together."""


@dataclass(frozen=True)
class Network:
    """The part of a network that an engine computes, before its recipes, and what it is to run in.

    Attributes:
        profiles: Those of the engine.
        as_shipped: Gives a model the inputs and outputs asked for.
    """

    model: ir.Model
    precision: Precision | None
    target: BuildTarget
    as_shipped: Callable[[ir.Model], FinalModel]

    @property
    def profiles(self) -> tuple[ShapeProfile, ...]:
        return self.target.profiles

    def plain(self) -> ir.Model:
        """Its plain form, with the inputs and outputs it has now."""
        return plain(self.model, self.precision, self.profiles)


class Baseline:
    """The price of plain, found beside the other work of a run.

    Args:
        pricer: Prices; None where nobody can.
    """

    def __init__(self, network: Network, pricer: Pricer | None) -> None:
        self.network, self._pricer = network, pricer
        self._started: dict[str, Future[Cost]] = {}
        self._found: dict[str, Cost | None] = {}
        self._fixed: tuple[ir.Model, Future[Cost]] | None = None
        self._shipping: tuple[ir.Model, Future[Cost]] | None = None

    def start(self) -> None:
        """Begin to price it, on a clone: others work on the network meanwhile."""
        if self._pricer is None or self._started:
            return
        network, precision = replace(self.network, model=self.network.model.clone()), self.network.precision
        form = "as-is" if precision is None else str(precision if precision.is_wide else precision.base)
        self._started[form] = self._pricer.start(lambda: self._final(network.plain()))
        for dtype in () if precision is None else network.target.quantized_types(precision):
            self._started[str(dtype)] = self._pricer.start(partial(self._quantized, network, dtype))

    def _quantized(self, network: Network, dtype: Precision) -> Compiled:
        """Q/DQ on every supported operator."""
        fixed = with_only_shape(network.model, network.profiles)
        shapes = {} if fixed is not network.model else network.target.shapes
        return self._final(written(fixed, dtype, shapes, network.target.backend))

    def _final(self, model: ir.Model) -> Compiled:
        final = self.network.as_shipped(model)
        return final.artifact.model, final.profiles

    def costs(self) -> dict[str, Cost]:
        """The price of each plain form, the 16-bit one first; without those that nobody can price."""
        if self._pricer is None:
            return {}
        self.start()
        for form, future in self._started.items():
            if form not in self._found:
                self._found[form] = self._pricer.result(future, f"plain {form.upper()}")
        return {form: cost for form, cost in self._found.items() if cost is not None}

    def price(self, model: ir.Model) -> Cost | None:
        """What another form of the network costs, as it would ship."""
        pricer = self._pricer
        return None if pricer is None else pricer.result(pricer.start(lambda: self._final(model)), "what ships")

    def start_final(self, final: FinalModel) -> None:
        """Begin to price a model with its final inputs and outputs."""
        asked = final.artifact.model, final.profiles
        if self._pricer is not None and (self._shipping is None or self._shipping[0] is not asked[0]):
            self._shipping = asked[0], self._pricer.start(lambda: asked)

    def price_final(self, final: FinalModel, *, refusals: bool = False) -> Cost | None:
        """What such a model costs; ``refusals`` as for :meth:`Pricer.result`."""
        self.start_final(final)
        if self._pricer is None or self._shipping is None:
            return None
        return self._pricer.result(self._shipping[1], "what ships", refusals=refusals)

    def start_fixed(self, final: FinalModel) -> None:
        """Begin to price a model of a range of shapes at its optimum."""
        pricer, profiles = self._pricer, final.profiles
        if pricer is None or not profiles or has_one_shape(profiles):
            return
        model = final.artifact.model
        if self._fixed is None or self._fixed[0] is not model:
            best = {name: shape for name, (_, shape, _) in profiles[0].shapes.items()}
            self._fixed = model, pricer.start(lambda: (at_shapes(model, best), ()))

    def fixed_cost(self, final: FinalModel) -> Cost | None:
        """What a model costs fixed at its optimum; None without a range, or where nobody can say."""
        self.start_fixed(final)
        if self._pricer is None or self._fixed is None or self._fixed[0] is not final.artifact.model:
            return None
        return self._pricer.result(self._fixed[1], "the network at one shape")


def plain_cost(costs: dict[str, Cost], refused: Iterable[str] = ()) -> PlainCost | None:
    """The fastest plain form, without those ``refused`` because they are less accurate."""
    left = plain_forms({form: cost for form, cost in costs.items() if form not in refused})
    return min(left, key=lambda cost: cost.predicted_us, default=None)


def plain_forms(costs: dict[str, Cost]) -> tuple[PlainCost, ...]:
    """Each plain form with its price."""
    return tuple(
        PlainCost(cost.kernels, cost.syncs, cost.bytes, cost.predicted_us, form) for form, cost in costs.items()
    )


Accepts = Callable[[Built], str]
"""Why the accuracy of a product does not let it ship; empty where it does."""


def gates_of(built: Built) -> str:
    """The gates that failed, in one line."""
    return "; ".join(built.failures)


def no_new_failure(first: Built) -> Accepts:
    """Whether the gates pass, or fail for ``first`` too, whose loss is allowed then."""
    return lambda built: "" if first.failures else gates_of(built)


@dataclass(frozen=True)
class Trial:
    """Another way to make the product.

    Attributes:
        what: What it does, as reports say it.
        make: Makes it where it costs less than the microseconds given; else None.
        accepts: Whether its accuracy lets it ship in place of the first.
        barred: Why it is not made at all; empty where it is.
        enough_us: Microseconds that are few enough whatever plain takes; infinite where plain is to be reached.
        form: The 8-bit plain form that it is, which is none where its accuracy is refused; empty for others.
    """

    what: str
    make: Callable[[float], Built | None]
    accepts: Accepts
    barred: str = ""
    form: str = ""
    enough_us: float = math.inf


@dataclass(frozen=True)
class Settled:
    """What ships, plain beside it, and what was tried: why each was not taken, by what it does."""

    built: Built
    plain: PlainCost | None
    refused: dict[str, str] = field(default_factory=dict)


def hold(
    first: Built, costs: dict[str, Cost], trials: Iterator[Trial], clock: Clock, doubts: Iterator[Trial]
) -> Settled:
    """The first product, or where plain is faster one that is not slower, or the fastest of those accurate enough.

    Args:
        first: The product as the stages made it.
        costs: Of the plain forms; empty where nothing is held.
        trials: Cheaper forms, those that cost least to make first; read only where they are needed.
        doubts: Forms without what no longer holds on the first as it ships, tried whatever plain costs.
    """
    refused: dict[str, str] = {}
    less_accurate: list[str] = []
    best, taken = first, list[str]()
    while True:
        target = plain_cost(costs, less_accurate)
        least = math.inf if target is None else target.predicted_us
        trial = next(doubts, None) if costs else None
        if trial is None and best.microseconds > least * SLOWER:
            trial = next(trials, None)
        if trial is None:
            break
        least = min(trial.enough_us, least)
        if trial.barred:
            refused[trial.what] = trial.barred
            if trial.form:
                less_accurate.append(trial.form)
            continue
        try:
            found = trial.make(max(least * SLOWER, best.microseconds * (1 - LEAST_GAIN)))
        except EngineBuildError as error:
            refused[trial.what] = error.what
            continue
        reason = NOT_FASTER if found is None else trial.accepts(found)
        if found is None or reason:
            refused[trial.what] = reason
            if trial.form:
                less_accurate.append(trial.form)
            continue
        beside = "" if target is None else f", plain {target.predicted_us:.1f}"
        taken.append(f"{trial.what}: {best.microseconds:.1f} -> {found.microseconds:.1f} us{beside}")
        best = found
    if taken or refused:
        details = (*taken, *(f"{what}: not taken: {why}" for what, why in refused.items()))
        step = StepRecord(STEP, "SHIP", len(taken), 0.0, details=details)
        artifact = best.final.artifact.with_step(best.final.artifact.model, step)
        best = replace(best, final=replace(best.final, artifact=artifact))
    for text in taken:
        clock.warn(STEP, f"what would have shipped is slower, and is not taken: {text} us")
    return Settled(best, plain_cost(costs, less_accurate), refused)


def recipes_of(own: OwnQdq, before: ModelArtifact) -> tuple[str, ...]:
    """The recipes that changed a model, whose steps ``before`` them are known."""
    known = {recipe.name for recipe in registry.select("all")}
    steps = own.rewritten.artifact.steps[len(before.steps) :]
    return tuple(step.name for step in steps if step.changes and step.name in known)


def doubted(first: Built, used: Sequence[str]) -> list[str]:
    """The recipes, of those ``used``, that may no longer pay beside what stays FP32 on the first product: they were
    judged to gain less than the network has lost since."""
    after, now, wide = first.own.rewritten.after, first.lowered.sixteen_bit or first.cost, first.lowered.record.kept
    if after is None or now is None or not wide or (first.lowered.quantized and first.lowered.sixteen_bit is None):
        return []
    lost_us, found = now.predicted_us - after.predicted_us, list[str]()
    for step in first.own.rewritten.artifact.steps if lost_us > after.predicted_us * (SLOWER - 1) else ():
        gains = [
            (place.before.predicted_us - place.after.predicted_us) * len(place.nodes)
            for place in step.regions
            if place.kept and place.before is not None and place.after is not None
        ]
        if step.name in used and gains and sum(gains) < lost_us:
            found.append(step.name)
    return found


def without_culprit(
    make: Callable[[str], Built], recipes: str, used: Sequence[str], refused: EngineBuildError
) -> Built:
    """The product without a recipe with which nothing builds.

    A recipe is judged in a network without the casts that accuracy asks for later; there are networks that the compiler
    builds with either and not with both. Where one builds without any, recipes are left out one by one, the last first.

    Args:
        make: Makes the product with some recipes.
        recipes: Those asked for.
        used: Those that changed the network.
        refused: What the compiler said; raised again where no recipe is to blame.
    """
    try:
        bare = make("none")
    except EngineBuildError:
        raise refused from None
    for out in used[::-1][:TOGETHER] if len(registry.select(recipes)) > 1 else ():
        with suppress(EngineBuildError):
            return make(but(recipes, out))
    return bare


def but(recipes: str, *out: str) -> str:
    """The recipes that ``recipes`` selects without some, as an option."""
    return ",".join(recipe.name for recipe in registry.select(recipes) if recipe.name not in out) or "none"


def as_asked(built: Built, first: Built, why: str) -> Built:
    """A product of another way, with what the first way found out: the precision asked for, and its regions."""
    lowered, before = built.lowered, first.lowered
    quantized = set(lowered.quantized)
    if lowered.guard:
        is_given = any(item.reason == KEEP_ALL for item in before.guard)
        kept_all = () if is_given else tuple(item for item in lowered.guard if item.reason == KEEP_ALL)
        guard = tuple(replace(item, reason=why) if item in kept_all else item for item in lowered.guard)
    else:
        guard = tuple(
            item if set(item.nodes) & quantized else replace(item, kept=False, dtype="", reason=f"taken back: {why}")
            for item in before.guard
        )
    record = replace(lowered.record, requested=before.record.requested)
    if before.record.int8_flop_share is not None and record.int8_flop_share is None:
        record = replace(record, int8_flop_share=0.0)
    sixteen = lowered.sixteen_bit or before.sixteen_bit
    if not quantized and sixteen is not None:
        sixteen = built.cost  # what ships has nothing in 8-bit
    kept = replace(
        lowered,
        record=record,
        guard=guard,
        calibration=lowered.calibration or before.calibration,
        sixteen_bit=sixteen,
        judge=before.judge,
    )
    return replace(built, lowered=kept)


def why_barred(first: Built, precision: Precision) -> str:
    """The hazards by ranges that forbid the plain cast, in words: a CPU does not see what overflows inside a kernel."""
    moved = next((step for step in first.lowered.artifact.steps if step.name == RESCALE), None)
    if moved is not None:
        return (
            f"{count(moved.changes, 'value')} may not be {precision.base.upper()} but for powers of two in the weights"
        )
    found = hazards(first, precision)
    if not found:
        return ""
    narrow = precision.base.upper()
    return f"{count(len(found), 'node')} may not be {narrow}: {found[0].node}: {found[0].reason}"


def bound_of(precision: Precision, least_db: float | None) -> float:
    """What the outputs of a 16-bit network keep, in dB: ``least_db``, or the default of its type."""
    return smallest_sqnr_db(BF16 if precision.base == Precision.BF16 else FP16) if least_db is None else least_db


def within_bound(precision: Precision, least_db: float | None) -> Accepts:
    """Whether the gates pass, and the outputs keep the bound of a 16-bit type."""
    bound = bound_of(precision, least_db)

    def why_not(built: Built) -> str:
        low = [f"{text}, less than {bound:g}" for text in _below(built.accuracy, bound).values()]
        return "; ".join([*built.failures, *low])

    return why_not


def _below(found: AccuracyRecord, bound: float) -> dict[str, str]:
    """The outputs that keep fewer dB, by name, in words."""
    return {
        name: f"{name} keeps {item.sqnr_db:.1f} dB"
        for name, item in found.outputs.items()
        if name not in found.host_outputs and not item.sqnr_db >= bound
    }


def warn_of_noise(built: Built, reference: ir.Model, precision: Precision | None, clock: Clock) -> None:
    """Say it where an output of a 16-bit network is verified below the bound that its nodes were chosen to keep, on
    fewer samples, or one in 8 bits on random data below the floor that real data has; of what is behind a selection
    nothing is said, and failed gates speak for themselves."""
    if precision is None or precision.is_wide or built.failures:
        return
    is_random = precision.is_quantized and built.accuracy.source == SYNTHETIC
    if precision.is_quantized and not is_random:
        return
    bound = LEAST_DB if is_random else bound_of(precision, None)
    low = _below(built.accuracy, bound)
    low = {name: low[name] for name, holds in held_by(reference, low).items() if holds != "selection"}
    if low and is_random:
        remedy = f"give samples with --calib, or --min-sqnr-db {bound:g}, which takes regions back"
        clock.warn("verify", f"{'; '.join(low.values())} on random data, less than the floor of {bound:g}; {remedy}")
    elif low:
        counted = (
            f"on {count(built.accuracy.samples, 'sample')}, less than the {bound:g} that {precision.upper()} keeps"
        )
        remedy = f"--min-sqnr-db {bound:g} makes it a gate, a higher one keeps more nodes in FP32"
        clock.warn("verify", f"{'; '.join(low.values())} {counted} on those it was decided on; {remedy}")


def all_regions_miss(found: SearchRecord | None, dtype: Precision) -> str:
    """Why Q/DQ on every operator need not be tried: a search found the regions that pay, which are fewer, to lose more
    than the budget, and a point that holds it; empty where it did not."""
    if found is None or not found.reached:
        return ""
    starts = (step for step in found.steps if step.action in ("start", "alternative") and step.name == dtype)
    if all(step.within_budget for step in starts):
        return ""
    return f"{dtype.upper()} on the regions that pay, which are fewer, loses more than the budget"


def as_accurate(first: Built) -> Accepts:
    """Whether the gates pass, and no output loses more than in ``first``."""

    def why_not(built: Built) -> str:
        if built.failures:
            return gates_of(built)
        for name, item in built.accuracy.outputs.items():
            before = first.accuracy.outputs.get(name)
            if before is not None and not drop_of(item)[1] <= drop_of(before)[1]:
                return f"{name} keeps {item.sqnr_db:.1f} dB, and {before.sqnr_db:.1f} in what ships"
        return ""

    return why_not


def hazards(built: Built, precision: Precision) -> tuple[KeptNode, ...]:
    """The nodes kept in a wider type for what no CPU shows: not for small numbers, not those whose rounding was
    measured, those that have no narrow form, and scores, which FP32 spares ties."""
    base = to_fp32(built.own.rewritten.artifact.model)
    narrow = BF16 if precision.base == Precision.BF16 else FP16
    measured = {item.node for step in built.lowered.artifact.steps if step.name == "put-back" for item in step.refusals}
    nodes = {str(node.name): node for node in base.graph}
    scores = score_nodes(base, ())
    return tuple(
        item
        for item in built.lowered.record.kept
        if item.node not in measured
        and item.reason != scores.get(item.node)
        and not item.reason.startswith("ranks or compares")
        and not shows_on_a_cpu(item.reason)
        and (item.node not in nodes or why_fp32(nodes[item.node], narrow) is None)
    )


def accuracy_cost(settled: Settled, precision: Precision | None, clock: Clock) -> AccuracyCost | None:
    """What accuracy costs above plain; None where it costs nothing, and a warning where something else does."""
    built, target = settled.built, settled.plain
    if target is None or built.cost is None or built.microseconds <= target.predicted_us * SLOWER:
        return None
    above = built.microseconds - target.predicted_us
    share = f"{above:.1f} us ({above / target.predicted_us:.1%}) above plain {target.form.upper()}"
    why = settled.refused.get(PLAIN, "")
    if precision is None or why in ("", NOT_FASTER):
        clock.warn(STEP, f"what ships is predicted {share}: what was asked for costs it")
        return None
    kept = built.lowered.record.kept
    nodes = tuple(item.node for item in kept)
    remedies = []
    if hazards(built, precision):
        remedies.append("samples with smaller values, or --bf16 where its precision is enough")
    if not remedies or any(step.name == "put-back" for step in built.lowered.artifact.steps):
        remedies.append("a lower --min-sqnr-db, or a --metric with --max-accuracy-drop that allows it")
    remedy = "; ".join(remedies)
    clock.warn(
        STEP,
        f"accuracy costs {share}, at {count(len(nodes), 'node')} in a wider type: {why}; what changes it: {remedy}",
    )
    return AccuracyCost(above, nodes, why, remedy)


PLAIN = "the plain cast"
"""What the last trial is."""


def dynamic_cost(built: Built, baseline: Baseline) -> DynamicCost | None:
    """What ranges of shapes cost at the first profile's optimum; None without one, or where nobody can say."""
    profiles, fixed = built.final.profiles, baseline.fixed_cost(built.final)
    if fixed is None or built.cost is None:
        return None
    ends = {name: [end for profile in profiles for end in profile.shapes[name]] for name in profiles[0].shapes}
    limits = {name: [tuple(map(pick, zip(*every, strict=True))) for pick in (min, max)] for name, every in ends.items()}
    ranges = ", ".join(f"{name} {_by(low)} .. {_by(high)}" for name, (low, high) in limits.items() if low != high)
    best = ",".join(f"{name}:{_by(best)}" for name, (_, best, _) in profiles[0].shapes.items())
    return DynamicCost(
        fixed,
        built.cost.kernels - fixed.kernels,
        built.cost.syncs - fixed.syncs,
        built.cost.predicted_us / fixed.predicted_us - 1 if fixed.predicted_us else 0.0,
        ranges,
        f"--opt-shapes {best}",
    )


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def judged_apart(built: Built, *, sparse: bool) -> str:
    """In one line, how what ships differs from what was judged last before, and why where that is known; empty where it
    does not."""
    lowered, after, profiles = built.lowered, built.own.rewritten.after, built.final.profiles
    judged_us, stage = 0.0 if after is None else after.predicted_us, "after its recipes"
    if lowered.judged is not None:
        judged_us, stage = lowered.judged.predicted_us, "with its 8-bit regions"
    elif lowered.search is not None:
        judged_us, stage = lowered.search.predicted_us, "with the regions within its accuracy budget"
    if built.cost is None or not 0 < judged_us < math.inf:
        return ""
    share = built.cost.predicted_us / judged_us - 1
    if abs(share) <= _APART:
        return ""
    reasons = []
    if len(profiles) > 1 or any(profile.values for profile in profiles):
        reasons.append(f"its {count(len(profiles), 'profile')}, of which the first was judged at its optimum")
    if lowered.record.kept:
        reasons.append(f"{count(len(lowered.record.kept), 'node')} in a wider type")
    if sparse:
        reasons.append("pruning")
    if lowered.weights is not None and lowered.weights.nodes:
        reasons.append(f"weights in {lowered.weights.format}")
    better = [step.name for step in lowered.artifact.steps if step.name in _BETTER_NUMBERS and step.changes]
    if better and lowered.quantized:
        reasons.append(f"better 8-bit numbers ({', '.join(better)})")
    if lowered.quantized and lowered.judged is None and lowered.search is None:
        reasons.append(f"{count(len(lowered.quantized), '8-bit node')} that nobody judged")
    if not built.final.records and len(built.final.artifact.model.graph) > len(lowered.artifact.model.graph):
        reasons.append("its own FP8 in the form that ONNX Runtime takes")
    why = " and ".join(reasons) or "not known"
    us = built.cost.predicted_us
    return f"judged {judged_us:.2f} us {stage}, ships {us:.2f} us ({share:+.2%}); between them: {why}"
