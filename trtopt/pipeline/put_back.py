"""What stays FP32 in a 16-bit network: enough for its outputs, at the least price, and never unsaid."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import onnx_ir as ir

from trtopt.config import BuildConfig
from trtopt.errors import TrtoptError
from trtopt.judge.form import judged_form
from trtopt.judge.protocol import OpenJudge, Prices, Question
from trtopt.judge.selection import subgraph_key, subgraph_of
from trtopt.judge.target import BuildTarget
from trtopt.pipeline.guard import price_file
from trtopt.pipeline.improve import repaired
from trtopt.precision.fp16.borders import grown
from trtopt.precision.fp16.network_io import parse_io
from trtopt.precision.fp16.repair import Damage, Repaired
from trtopt.precision.observe.stream import Samples
from trtopt.precision.plan import PrecisionPlan
from trtopt.precision.write import apply_plan
from trtopt.report.schema.steps import Refusal, StepRecord
from trtopt.support.clock import Clock

_STAGE = "check precision"

LARGEST_SHARE = 0.2
"""Share of the flop that may stay FP32 without a warning."""

_CHEAPER = 0.999
"""A plan this much cheaper is cheaper; above it are roundings of the prediction."""


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
        chosen, text = self._cheapest(base, options)
        fallbacks = {name: reason for name, reason in chosen.wide.items() if name not in plan.wide}
        if not fallbacks:
            return Mended(chosen, fallbacks)
        details = [text] if text else []
        if found.fallbacks:
            enough = f"{found.after.sqnr_db:.1f} dB with the {len(found.fallbacks)} nodes in FP32 that are needed"
            details.insert(0, f"output SQNR {found.before.sqnr_db:.1f} -> {enough}")
        refusals = tuple(Refusal(node, reason) for node, reason in fallbacks.items())
        step = StepRecord("put-back", "PRECISION", len(refusals), 0.0, refusals, tuple(details))
        return Mended(chosen, fallbacks, (step,))

    def _cheapest(self, base: ir.Model, options: Sequence[PrecisionPlan]) -> tuple[PrecisionPlan, str]:
        """The cheapest of a few plans, all of them good enough, and what it gains over the first; that where nobody
        can say."""
        if len(options) < 2:
            return options[0], ""
        try:
            with self.clock.stage("price FP32"), self._prices(base) as price:
                costs = [price(option) for option in options]
        except TrtoptError as error:
            self.clock.warn(
                "price FP32", f"what stays FP32 is not priced, and is the least that is needed: {error.what}"
            )
            return options[0], ""
        best = min(range(len(options)), key=lambda index: (costs[index], len(options[index].wide)))
        if not costs[best] < costs[0] * _CHEAPER:
            return options[0], ""
        more = len(options[best].wide) - len(options[0].wide)
        return options[best], f"{more:+} nodes in FP32 save Casts: {costs[0]:.1f} -> {costs[best]:.1f} us predicted"

    @contextmanager
    def _prices(self, base: ir.Model) -> Iterator[Callable[[PrecisionPlan], float]]:
        """Microseconds of the whole network with a plan written; infinite where it cannot be built."""
        config, target = self.config, self.target
        form = judged_form(base, target.profiles)
        whole = subgraph_of(form)
        with self.open_judge(None, io=parse_io(config.io), prices=None) as judge:
            prices = Prices(judge, price_file(judge, form, target, config, self.clock.listen))

            def price(plan: PrecisionPlan) -> float:
                plan = replace(plan, quantized=(), rounded={}, bias={})
                key = subgraph_key(whole, plan)
                question = Question(key, whole.names, lambda: apply_plan(form, plan), inner=False)
                try:
                    return prices.answer(question).total.predicted_us
                except TrtoptError:
                    return math.inf

            yield price


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
