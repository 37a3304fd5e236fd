"""What stays FP32 in a 16-bit network: enough for its outputs, at the least price, and never unsaid."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import onnx_ir as ir

from trtopt.config import BuildConfig
from trtopt.errors import TrtoptError
from trtopt.judge.form import judged_form
from trtopt.judge.protocol import LEAST_GAIN, OpenJudge, Priced, Prices, Question
from trtopt.judge.selection import subgraph_key, subgraph_of
from trtopt.judge.target import BuildTarget
from trtopt.pipeline.guard import price_file
from trtopt.pipeline.plan_runner import repaired
from trtopt.precision.fp16.borders import grown
from trtopt.precision.fp16.network_io import parse_io
from trtopt.precision.fp16.repair import Damage, Repaired, alone, widened
from trtopt.precision.observe.stream import Samples
from trtopt.precision.plan import WEIGHTED, PrecisionPlan
from trtopt.precision.write import apply_plan
from trtopt.report.schema.steps import Cost, Refusal, StepRecord
from trtopt.report.text.format import count
from trtopt.support.clock import Clock
from trtopt.support.halving import fewest

_STAGE = "check precision"

LARGEST_SHARE = 0.2
"""Share of the flop that may stay FP32 without a warning."""

_CHEAPER = 0.999
"""A plan this much cheaper is cheaper; above it are roundings of the prediction."""


_MOST_KERNELS = 48
"""Kernels with nodes in FP32 that are looked into, each by a run on a few samples."""

_Price = Callable[[PrecisionPlan], Priced]


@dataclass(frozen=True)
class Mended:
    """A plan whose 16-bit part is good enough, the nodes it has in FP32 beyond the plan given, and the steps."""

    plan: PrecisionPlan
    fallbacks: Mapping[str, str]
    steps: tuple[StepRecord, ...] = ()


@dataclass(frozen=True)
class PutBack:
    """Runs plans on samples, puts nodes back to FP32, and asks the target's judge where the Casts cost least."""

    samples: Samples
    target: BuildTarget
    config: BuildConfig
    open_judge: OpenJudge
    clock: Clock

    def mend(
        self, base: ir.Model, plan: PrecisionPlan, is_clear: Callable[[ir.Model], bool] = lambda _: False
    ) -> Mended:
        """``plan`` with more nodes in FP32: as many as the outputs need, and where that is cheaper whole patterns.

        ``is_clear`` says of an optimized graph that its outputs need none, as verification finds them.

        Raises:
            InvalidModelError: ONNX Runtime cannot run the model.
        """
        least = None if plan.requested.is_quantized else self.config.min_sqnr_db
        if is_clear(apply_plan(base, plan)):
            found = Repaired(plan, Damage(0.0), Damage(0.0))
        else:
            with self.clock.stage(_STAGE):
                found = repaired(base, plan, self.samples, min_sqnr_db=least, on_event=self.clock.listen)
        if not found.after.is_allowed:
            narrow = plan.narrow.name.upper() if plan.narrow is not None else "FP32"
            left = f"{narrow} leaves output {found.after.output} {found.after.sqnr_db:.1f} dB"
            self.clock.warn(_STAGE, f"{left}, and nodes in FP32 do not help")
        options = [
            form
            for item in (found.plan, *found.others)
            for form in (item, *grown(base, item, item.wide.keys() - plan.wide.keys()))
        ]
        chosen, details = self._cheapest(base, plan, found, options)
        fallbacks = {name: reason for name, reason in chosen.wide.items() if name not in plan.wide}
        if not fallbacks:
            return Mended(chosen, fallbacks)
        if found.fallbacks:
            enough = f"{found.after.sqnr_db:.1f} dB with {count(len(found.fallbacks), 'node')} in FP32"
            details.insert(0, f"output SQNR {found.before.sqnr_db:.1f} -> {enough}")
        refusals = tuple(Refusal(node, reason) for node, reason in fallbacks.items())
        step = StepRecord("put-back", "PRECISION", len(refusals), 0.0, refusals, tuple(details))
        return Mended(chosen, fallbacks, (step,))

    def _cheapest(
        self, base: ir.Model, plan: PrecisionPlan, found: Repaired, options: Sequence[PrecisionPlan]
    ) -> tuple[PrecisionPlan, list[str]]:
        """The cheapest of a few plans, all of them good enough, with the nodes in FP32 given back that it is good
        enough without, and what that gains, in words; the first where nobody can say."""
        if len(options) < 2 and not found.fallbacks:
            return options[0], []
        try:
            with self.clock.stage("price FP32"), self._prices(base) as price:
                costs = [_us(price(option)) for option in options]
                best = min(range(len(options)), key=lambda index: (costs[index], len(options[index].wide)))
                chosen, details = options[0], []
                if costs[best] < costs[0] * _CHEAPER:
                    chosen, more = options[best], len(options[best].wide) - len(options[0].wide)
                    details = [f"{more:+} nodes in FP32 save Casts: {costs[0]:.1f} -> {costs[best]:.1f} us predicted"]
                less = _given_back(base, plan, chosen, found, price)
                before, after = _us(price(chosen)), _us(price(less))
        except TrtoptError as error:
            self.clock.warn(
                "price FP32", f"what stays FP32 is not priced, and is the least that is needed: {error.what}"
            )
            return options[0], []
        if not after < before * _CHEAPER:
            return chosen, details
        gone = count(len(chosen.wide) - len(less.wide), "node")
        return less, [*details, f"without {gone} that cost most: {before:.1f} -> {after:.1f} us predicted"]

    @contextmanager
    def _prices(self, base: ir.Model) -> Iterator[_Price]:
        """What the whole network costs with a plan written; forever where it cannot be built."""
        config, target = self.config, self.target
        form = judged_form(base, target.profiles)
        whole = subgraph_of(form)
        with self.open_judge(None, io=parse_io(config.io), prices=None) as judge:
            prices = Prices(judge, price_file(judge, form, target, config, self.clock.listen))

            def price(plan: PrecisionPlan) -> Priced:
                plan = replace(plan, quantized=(), rounded={}, bias={})
                key = subgraph_key(whole, plan)
                question = Question(key, whole.names, lambda: apply_plan(form, plan), inner=False)
                try:
                    return prices.answer(question)
                except TrtoptError:
                    return Priced(Cost(0, 0, 0, math.inf), ())

            yield price


def _given_back(
    base: ir.Model, plan: PrecisionPlan, chosen: PrecisionPlan, found: Repaired, price: _Price
) -> PrecisionPlan:
    """A plan with as many of its nodes in FP32 back in 16 bits as the outputs bear: kernel by kernel, or its products
    where these alone can be borne, those first that make the least noise for the time they cost.

    Args:
        base: The widened model.
        plan: What was to be repaired, whose own nodes in FP32 stay.
        chosen: The plan that is good enough.
        found: The repair that it comes from.
        price: Says what plans cost.
    """
    if found.few is None or found.all is None or not found.fallbacks or not found.after.is_allowed:
        return chosen
    is_enough, narrow, wide = found.all, price(plan), price(chosen)
    if not _us(narrow) * (1 + LEAST_GAIN) < _us(wide) < math.inf:
        return chosen
    back = chosen.wide.keys() - plan.wide.keys()
    products = back & {str(node.name) for node in base.graph if node.op_type in WEIGHTED}
    gains = {
        nodes: wide.share(nodes).predicted_us - narrow.share(nodes).predicted_us
        for nodes in _together(back, (wide, narrow))
    }
    dear = sorted((nodes for nodes in gains if gains[nodes] > _us(wide) * (1 - _CHEAPER)), key=lambda n: -gains[n])
    noise_of, noise_by_us = alone(base, plan, found.few), dict[frozenset[str], float]()
    for nodes in dear[:_MOST_KERNELS]:
        for part in (nodes, nodes & products):
            damage = noise_of(part)
            if part and damage.is_allowed:
                noise_by_us[part] = damage.excess / gains[nodes]
                break
    order = sorted(noise_by_us, key=lambda part: noise_by_us[part])

    def without(count: int) -> PrecisionPlan:
        left = back.difference(*order[:count])
        return widened(base, plan, {name: chosen.wide[name] for name in chosen.wide if name in left})

    kept = fewest(len(order) + 1, lambda count: is_enough(without(len(order) + 1 - count)).is_allowed)
    return without(len(order) + 1 - kept)


def _together(nodes: Collection[str], prices: Sequence[Priced]) -> list[frozenset[str]]:
    """Nodes in groups that share no kernel with each other."""
    groups = {name: frozenset([name]) for name in sorted(nodes)}
    for names, _, _ in (kernel for priced in prices for kernel in priced.kernels):
        joined = frozenset[str]().union(*(groups[name] for name in names if name in groups))
        groups.update(dict.fromkeys(joined, joined))
    return list(dict.fromkeys(groups.values()))


def _us(priced: Priced) -> float:
    return priced.total.predicted_us


def warn_of_fp32(plan: PrecisionPlan, flop: Mapping[str, int], clock: Clock) -> None:
    """Say it where more than a part of a 16-bit network stays FP32, and for which reasons."""
    total = sum(flop.values())
    if plan.narrow is None or not total:
        return
    kept: dict[str, int] = defaultdict(int)
    for node, reason in plan.wide.items():
        kept[reason] += flop.get(node, 0)
    share = sum(kept.values()) / total
    if share <= LARGEST_SHARE:
        return
    reason = max(kept, key=lambda text: kept[text])
    asked = plan.narrow.name.upper()
    text = f"{asked} was asked for and {share:.0%} of the flop stay FP32 ({len(plan.wide)} nodes)"
    clock.warn(_STAGE, f"{text}; {kept[reason] / total:.0%} because: {reason}")
