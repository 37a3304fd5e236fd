"""Weights alone in four or eight bits in a build: where their bytes pay, with numbers fitted to samples, within the
accuracy budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from trtopt.accuracy.compare import decibels
from trtopt.accuracy.segments import SegmentedModel
from trtopt.accuracy.sensitivity import sensitivity
from trtopt.config import BuildConfig
from trtopt.events import OnEvent
from trtopt.judge.protocol import LEAST_GAIN
from trtopt.pipeline.gauge import Gauge, accuracy_drop
from trtopt.pipeline.improve import SMALLEST_SAMPLES, OutputErrorMeter, fitted, judged
from trtopt.pipeline.product import Lowered
from trtopt.precision.fp16.to_fp32 import to_fp32
from trtopt.precision.observe.stream import Samples, entries
from trtopt.precision.ptq.layer_walk import samples_held
from trtopt.precision.ptq.refine import shapes_at, spread_samples
from trtopt.precision.search.search import search_budget
from trtopt.precision.search.space import Evaluation, Form, Mix, RegionOption, SearchRegion, Space
from trtopt.precision.weights.fit import fitted as fitted_weights
from trtopt.precision.weights.fit import plain
from trtopt.precision.weights.formats import FORMATS, StoredWeight
from trtopt.precision.weights.tied import untied
from trtopt.precision.weights.write import Product, exact_weight, products_of, with_stored
from trtopt.report.schema.decisions import GuardRecord, WeightsRecord
from trtopt.report.schema.steps import Cost, Refusal, StepRecord
from trtopt.report.text.format import count
from trtopt.support.clock import Clock
from trtopt.support.precision import Precision

_FORM: Form = "weights"
_SAMPLES = 256
"""Samples that weights are fitted to, where memory allows: of MiniLM's short sentences 64 give fewer rows than a layer
has inputs, and 3 dB less at the outputs than 192."""
_TRIALS = 12
"""Kinds of weights that are tried without, each for a price of the whole network."""
_CLEARLY = 0.001
"""Share of the network's time that leaving a kind out has to win: less is rounding of the prediction."""

Price = Callable[[ir.Model], "Cost | None"]
"""What a model costs as it would ship; None where nobody can say."""


@dataclass(frozen=True)
class WeightsJob:
    """What weights are stored for.

    Attributes:
        config: ``weights`` names the format.
        samples: Calibration samples; synthetic ones are not fitted to.
        gauge: The accuracy budget; None for none.
        price: Says what pays.
    """

    config: BuildConfig
    samples: Samples
    gauge: Gauge | None
    price: Price


def store_weights(lowered: Lowered, job: WeightsJob, clock: Clock) -> Lowered:
    """The model with the weights of its 16-bit (or FP32) products stored in a narrow format, where that pays.

    Raises:
        InvalidModelError: ONNX Runtime cannot run the model.
    """
    if job.config.weights is None:
        return lowered
    with clock.stage("weights"):
        return _Storing(lowered, job, clock).run()


class _Storing:
    def __init__(self, lowered: Lowered, job: WeightsJob, clock: Clock) -> None:
        self._lowered, self._job, self._clock = lowered, job, clock
        self._began = time.perf_counter()
        self._kind = FORMATS[str(job.config.weights)]
        wanted = int(job.config.weight_block or 0)
        self._block = wanted if wanted in self._kind.blocks else next(iter(self._kind.blocks), 0)
        self._model = untied(lowered.artifact.model)
        self._details: list[str] = []

    def run(self) -> Lowered:
        found = products_of(self._model, self._kind, self._block)
        exact = {item.weight: exact_weight(self._model, item) for item in found.found}
        nearest = plain(exact, found.found, self._kind, self._block)
        kept, guard = self._paying(found.found, nearest)
        if not kept:
            self._clock.warn("weights", f"no weight is stored in {self._kind.name}: {self._why_none(found.found)}")
            return self._result(kept, {}, guard, found.refused)
        stored = self._better(kept, nearest)
        if self._job.gauge is not None:
            kept = self._within_budget(kept, stored, self._job.gauge)
            guard = tuple(_given_back(item, kept) for item in guard)
        return self._result(kept, stored, guard, found.refused)

    def _why_none(self, found: Sequence[Product]) -> str:
        if not found:
            return "the model has no matrix product that could read it"
        return "the network is not faster with it (--keep-all-weights stores all the same)"

    def _result(
        self,
        kept: Sequence[Product],
        stored: Mapping[str, StoredWeight],
        guard: tuple[GuardRecord, ...],
        refused: tuple[Refusal, ...],
    ) -> Lowered:
        weights = {item.weight: stored[item.weight] for item in kept}
        model = with_stored(untied(self._lowered.artifact.model, weights), weights, kept)
        record = WeightsRecord(
            self._kind.name,
            self._block,
            tuple(name for item in kept for name in item.nodes),
            sum(item.bytes for item in kept),
            sum(weights[item.weight].bytes(item.floating) for item in kept),
        )
        name, seconds = f"weights-{self._kind.name}", time.perf_counter() - self._began
        step = StepRecord(name, "PRECISION", len(record.nodes), seconds, refused, tuple(self._details))
        lowered = self._lowered
        return replace(
            lowered,
            artifact=lowered.artifact.with_step(model, step),
            guard=(*lowered.guard, *guard),
            weights=record,
            judged=None if kept else lowered.judged,
        )

    def _paying(
        self, found: Sequence[Product], nearest: Mapping[str, StoredWeight]
    ) -> tuple[tuple[Product, ...], tuple[GuardRecord, ...]]:
        """The weights without which the whole network is not faster, and the verdict on each kind of them.

        A kind is all weights of one shape behind one operator. The network is priced with all of them, then without
        each in turn, those that save the fewest bytes first.
        """
        kinds: dict[str, list[Product]] = {}
        for item in found:
            kinds.setdefault(item.kind, []).append(item)

        def price(items: Sequence[Product]) -> float | None:
            cost = self._job.price(with_stored(self._model, nearest, items) if items else self._model)
            return None if cost is None else cost.predicted_us

        left, records = list(found), dict[str, GuardRecord]()
        if not found or self._job.config.keep_all_weights:
            return tuple(found), tuple(self._verdict(kind, items, True) for kind, items in kinds.items())
        before, best = price(()), price(found)
        if before is None or best is None:
            self._clock.warn("weights", "nobody can say where it pays, so that every weight is stored narrow")
            return tuple(found), tuple(self._verdict(kind, items, True) for kind, items in kinds.items())
        self._details.append(f"the network with all of them: {before:.1f} -> {best:.1f} us")
        order = sorted(kinds, key=lambda kind: sum(item.bytes for item in kinds[kind]))
        for kind in order[:_TRIALS] if len(order) > 1 else ():
            without = [item for item in left if item.kind != kind]
            other = price(without)
            if other is None:
                continue
            kept = other >= best * (1 - _CLEARLY)
            records[kind] = self._verdict(kind, kinds[kind], kept, other, best)
            if not kept:
                left, best = without, other
        if best > before * (1 - LEAST_GAIN / 10):
            left = []
            for kind, items in kinds.items():
                records[kind] = self._verdict(kind, items, False, before, best)
        for kind, items in kinds.items():
            records.setdefault(kind, self._verdict(kind, items, True, before, best))
        return tuple(left), tuple(records[kind] for kind in kinds)

    def _verdict(
        self,
        kind: str,
        items: Sequence[Product],
        kept: bool,
        before: float | None = None,
        after: float | None = None,
    ) -> GuardRecord:
        """What became of a kind; the times are those of the whole network without it and with it."""
        nodes = tuple(name for item in items for name in item.nodes)
        reason = "" if kept else "the whole network is not faster with it"
        dtype = f"{self._kind.name} weights" if kept else ""
        return GuardRecord(f"weights {kind}", nodes, kept, dtype, reason, before, after)

    def _better(self, kept: Sequence[Product], nearest: dict[str, StoredWeight]) -> dict[str, StoredWeight]:
        """Numbers fitted to samples, where the error at the outputs is smaller with them, on samples kept from the
        fit."""
        samples = self._job.samples
        if samples.source != "user":
            self._clock.warn("weights", "no samples to fit the weights to: each is stored as the number nearest to it")
            return nearest
        base = to_fp32(self._model)
        first = next(iter(samples))
        if (samples.count or SMALLEST_SAMPLES) * entries(first) < SMALLEST_SAMPLES:
            text = f"fewer than {SMALLEST_SAMPLES} samples: each weight is stored as the number nearest to it"
            self._clock.warn("weights", text)
            return nearest
        most = samples_held(base, shapes_at(base, first), -(-_SAMPLES // entries(first)))
        held = spread_samples(fitted(samples), most)
        if len(held) < 2:
            return nearest
        listen = self._clock.listen
        better = fitted_weights(base, kept, self._kind, self._block, held, on_event=listen)
        meter = OutputErrorMeter(base, judged(samples))
        errors = [meter.of_model(with_stored(base, numbers, kept)) for numbers in (nearest, better)]
        names = ("the nearest numbers", f"fitted to {len(held) * entries(first)} samples")
        self._details += [f"{name}: {decibels(e):.1f} dB at the outputs" for name, e in zip(names, errors, strict=True)]
        return better if errors[1] < errors[0] else nearest

    def _within_budget(
        self, kept: Sequence[Product], stored: Mapping[str, StoredWeight], gauge: Gauge
    ) -> tuple[Product, ...]:
        """The weights that the accuracy budget bears: those with the largest error per byte saved go back."""
        with gauge:
            oracle = _Oracle(self._model, kept, stored, gauge, self._job.samples, self._clock.listen)
            found = search_budget(oracle.space, gauge.budget(), oracle, on_event=self._clock.listen)
        chosen = found.mix.types
        if len(chosen) < len(kept):
            text = f"{len(kept) - len(chosen)} of {count(len(kept), 'weight')} go back for the accuracy budget"
            self._details.append(text)
            self._clock.warn("weights", text)
        return tuple(item for item in kept if item.nodes[0] in chosen)


def _given_back(record: GuardRecord, kept: Sequence[Product]) -> GuardRecord:
    """The verdict on a kind, some of which the budget may not bear."""
    names = {name for item in kept for name in item.nodes}
    if not record.kept or names.issuperset(record.nodes):
        return record
    left = [name for name in record.nodes if name in names]
    text = "taken back for the accuracy budget"
    reason = f"only {', '.join(left)}: the others are {text}" if left else text
    return replace(record, kept=bool(left), dtype=record.dtype if left else "", reason=reason)


class _Oracle:
    """Answers the search about which weights are stored narrow. A weight goes by the first node that reads it; what it
    saves is counted in MB."""

    def __init__(
        self,
        model: ir.Model,
        products: Sequence[Product],
        stored: Mapping[str, StoredWeight],
        gauge: Gauge,
        samples: Samples,
        on_event: OnEvent,
    ) -> None:
        self._model, self._base = model, to_fp32(model)
        self._stored, self._gauge, self._samples, self._on_event = stored, gauge, samples, on_event
        self._products = {item.nodes[0]: item for item in products}
        saved = {
            name: (item.bytes - stored[item.weight].bytes(item.floating)) / 1e6 for name, item in self._products.items()
        }
        options = {name: (RegionOption(_FORM, max(mb, 1e-6)),) for name, mb in saved.items()}
        self.space = Space(tuple(SearchRegion(name, own) for name, own in options.items()))
        self._all = self.space.fastest(Precision.FP16)
        self._known: dict[Mix, Evaluation] = {}

    def _written(self, model: ir.Model, mix: Mix) -> ir.Model:
        return with_stored(model, self._stored, [self._products[name] for name in mix.types])

    def evaluate(self, mix: Mix) -> Evaluation:
        """See :class:`~trtopt.precision.search.space.Oracle`."""
        if mix not in self._known:
            self._known[mix] = accuracy_drop(self._gauge.measure(self._written(self._model, mix)))
        return self._known[mix]

    confirm = evaluate

    def time_us(self, mix: Mix) -> float:
        """See :class:`~trtopt.precision.search.space.Oracle`: the MB that are not saved."""
        return self.space.saved_us(self._all) - self.space.saved_us(mix)

    def rank(self, mix: Mix) -> Mapping[str, float]:
        """See :class:`~trtopt.precision.search.space.Oracle`."""
        regions = {name: list(self._products[name].nodes) for name in mix.types}
        nodes = [name for group in regions.values() for name in group]
        with SegmentedModel(self._base, self._written(self._base, mix), nodes) as model:
            found = sensitivity(model, regions, self._samples, always=nodes, on_event=self._on_event)
        return {name: max(-item.change, 0.0) for name, item in found.regions.items()}
