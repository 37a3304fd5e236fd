"""The fastest choice of 8-bit regions within an accuracy budget: what the search asks, answered by real runs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import onnx_ir as ir

from trtopt.accuracy.compare import Remembered, is_class_like
from trtopt.accuracy.gate import drop_of
from trtopt.accuracy.segments import SegmentedModel
from trtopt.accuracy.sensitivity import sensitivity
from trtopt.config import BuildConfig
from trtopt.events import ignore
from trtopt.graph import cost
from trtopt.judge.selection import Guard, Guarded, Verdict
from trtopt.pipeline.calibrate import Observer
from trtopt.pipeline.guard import GuardTarget
from trtopt.pipeline.improve import Improved
from trtopt.pipeline.stages import Verification, verify
from trtopt.precision.decide import QUANTIZED_TYPES, plan_for
from trtopt.precision.fp16.to_fp32 import widen
from trtopt.precision.plan import BF16, PrecisionPlan, QuantizedOp, QuantizedType
from trtopt.precision.qdq.existing import existing_nodes
from trtopt.precision.regions import find_candidates
from trtopt.precision.search.checkpoint import Journal
from trtopt.precision.search.result import Found
from trtopt.precision.search.search import search_auto, search_budget
from trtopt.precision.search.space import (
    Budget,
    Evaluation,
    Form,
    Mix,
    NarrowName,
    Option,
    SearchRegion,
    Space,
    aim_for,
)
from trtopt.precision.write import apply_plan
from trtopt.report.schema.build import AccuracyRecord
from trtopt.report.schema.search import SearchRecord
from trtopt.report.text.search import miss_text
from trtopt.support.clock import Clock
from trtopt.support.ort_session import OrtSession


class Gauge:
    """Measures the accuracy of a graph as verification does, and says what it must hold.

    Args:
        job: The verification; its optimized graph is exchanged.
        config: The budget.
        is_default: Whether nobody gave the budget.
    """

    def __init__(self, job: Verification, config: BuildConfig, *, is_default: bool = False) -> None:
        self._job = replace(job, tensors=False)
        self._config, self._is_default = config, is_default
        self._session: OrtSession | None = None
        self._known: Remembered | None = None

    def __enter__(self) -> Gauge:
        """Load the reference, which is run once for all comparisons."""
        self._session = OrtSession(widen(self._job.reference), self._job.watched)
        self._known = Remembered(self._session)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            self._session.close()
        self._session = self._known = None

    @property
    def _reference(self) -> Remembered:
        if self._known is None:
            raise ValueError("the gauge is not open")
        return self._known

    @property
    def identity(self) -> tuple[str, ...] | None:
        """What answers depend on: the samples, the metric and its script, what it says of the FP32 model.

        None where that cannot be told in another run.
        """
        metric = self._job.metric
        if metric is None:
            return (self._job.samples.sha256,)
        if metric.from_python:
            return None
        script = Path(metric.name.rpartition(":")[0])
        content = script.read_bytes() if script.is_file() else b""
        return self._job.samples.sha256, metric.name, hashlib.sha256(content).hexdigest(), repr(metric.baseline)

    def measure(self, model: ir.Model) -> AccuracyRecord:
        """The accuracy of an optimized graph.

        Raises:
            UsageError: The metric's function fails, or gives no finite number.
        """
        return verify(replace(self._job, optimized=model), Clock(ignore), self._reference)

    def budget(self) -> Budget:
        """What a point has to hold; the search aims lower by what chance may cost on samples it has not seen."""
        config, metric = self._config, self._job.metric
        drop = math.inf if config.max_accuracy_drop is None else config.max_accuracy_drop
        error = math.inf if config.min_sqnr_db is None else 10 ** (-config.min_sqnr_db / 10)
        name = metric.name if metric is not None else "1 - top-1 agreement, else 1 - cosine"
        aim = aim_for(drop, self._answers()) if drop < 1 and self._is_share() else None
        return Budget(drop, name, error, self._is_default, aim)

    def _is_share(self) -> bool:
        """Whether the drop is a share of answers (a user's metric is taken for one); a cosine is not."""
        if self._job.metric is not None:
            return True
        first = next(iter(self._job.samples))
        return any(is_class_like(array) for array in self._reference.run(first))

    def _answers(self) -> int:
        """How many answers the metric counts: the entries of the samples it runs."""
        metric = self._job.metric
        if metric is not None and metric.function is not None:
            return metric.answers
        return sum(
            max((len(array) for array in feeds.values() if array.ndim), default=1) for feeds in self._job.samples
        )


def gauge_for(job: Verification, config: BuildConfig, *, is_default: bool = False) -> Gauge | None:
    """The gauge of a build that has a budget and 8-bit regions to choose; None for others."""
    chooses = config.precision in QUANTIZED_TYPES and not config.keep_all_int8
    if not chooses or (config.max_accuracy_drop is None and config.min_sqnr_db is None):
        return None
    return Gauge(job, config, is_default=is_default)


def missed(found: SearchRecord | None) -> tuple[str, ...]:
    """The gate's sentence where a search did not reach the budget."""
    return () if found is None or found.reached else (miss_text(found),)


def accuracy_drop(record: AccuracyRecord) -> Evaluation:
    """What the budget bounds, as gates do: the metric's drop, else 1 - agreement or 1 - cosine of the worst output."""
    judged = [found for name, found in record.outputs.items() if name not in record.host_outputs]
    broken = any(found.nonfinite for found in record.outputs.values())
    error = _largest(10 ** (-found.sqnr_db / 10) for found in judged)
    if record.metric is not None:
        drop = 0.0 if record.metric.name == "sqnr" else record.metric.drop
    else:
        drop = _largest(drop_of(found)[1] for found in judged)
    return Evaluation(math.inf if broken else drop, error)


def _largest(values: Iterable[float]) -> float:
    """The largest; infinite where one cannot be said, as of an output whose size differs."""
    return max((math.inf if math.isnan(value) else value for value in values), default=0.0)


class RegionOracle:
    """Answers the search about mixes of regions, by running and pricing them.

    Args:
        improved: The FP32 form that plans are for, and the plan of what pays.
        guard: Prices the whole network, while its judge is there.
        guarded: Its verdicts.
        gauge: Measures accuracy.
        observer: Samples and progress.
    """

    def __init__(self, improved: Improved, guard: Guard, guarded: Guarded, gauge: Gauge, observer: Observer) -> None:
        self._improved, self._guard, self._gauge, self._observer = improved, guard, gauge, observer
        chosen = (verdict for verdict in guarded.verdicts if verdict.options or verdict.kept)
        self._verdicts = {verdict.region.name: verdict for verdict in chosen}
        self._options = {name: _best_of_types(verdict) for name, verdict in self._verdicts.items()}
        options = [verdict for forms in self._options.values() for verdict in forms.values()]
        dtypes = dict.fromkeys(op.dtype for verdict in options for op in verdict.kept.values())
        self._forms = find_candidates(improved.problem, tuple(dtypes)).ops

    @property
    def identity(self) -> str:
        """What the answers depend on besides the regions: the judge, the ranges, the improved numbers."""
        plan, digest = self._improved.plan, hashlib.sha256(self._guard.judge.name.encode())
        steps = [(step.name, step.changes) for step in self._improved.steps]
        digest.update(repr((plan.wide, plan.quantized, steps, sorted(self._forms.items()))).encode())
        for values in (plan.rounded, plan.bias):
            for node in sorted(values):
                digest.update(f"{node} ".encode() + values[node].tobytes())
        return digest.hexdigest()

    @property
    def has_own_qdq(self) -> bool:
        """Whether the model came with Q/DQ that is in every mix."""
        return bool(existing_nodes(self._improved.problem.model))

    def space(self, flop: Mapping[str, int]) -> Space:
        """The regions that pay, with the types that do."""
        eligible = sum(
            flop.get(str(node.name), 0)
            for node in self._improved.problem.model.graph
            if cost.is_eligible_for_int8(node)
        )
        return Space(
            tuple(
                SearchRegion(
                    name,
                    tuple(Option(dtype, option.saved_us) for dtype, option in self._options[name].items()),
                    sum(flop.get(node, 0) for node in verdict.region.nodes),
                )
                for name, verdict in self._verdicts.items()
            ),
            eligible,
            {name: _dtype_of(verdict) for name, verdict in self._verdicts.items() if verdict.kept},
        )

    def ops(self, mix: Mix) -> tuple[QuantizedOp, ...]:
        """The 8-bit nodes of a mix."""
        best = {op.node: op for op in self._improved.plan.quantized}
        found = [
            self._form(op, best.get(op.node))
            for name, dtype in mix.quantized
            for op in self._options[name][dtype].kept.values()
        ]
        return tuple(op for op in found if op is not None)

    def _form(self, op: QuantizedOp, best: QuantizedOp | None) -> QuantizedOp | None:
        if best is not None and best.dtype == op.dtype:
            return best
        forms = [replace(form, skips=op.skips) for form in self._forms.get(op.node, ()) if form.dtype == op.dtype]
        return next((form for form in forms if form.weight_axis == op.weight_axis), next(iter(forms), None))

    def plan(self, mix: Mix) -> PrecisionPlan:
        """The plan of a mix, with the improved numbers of its nodes."""
        known, problem = self._improved.plan, self._improved.problem
        if mix.narrow == "bf16":
            problem = replace(problem, narrow=BF16)
        plan = plan_for(problem, known.requested, self.ops(mix), known.refused)
        # Their values are in units of scales that the 16-bit type rounded, or FP32 did not.
        same = {
            op.node
            for op in plan.quantized
            if op in known.quantized and mix.narrow == "fp16" and (op.node in plan.wide) == (op.node in known.wide)
        }
        return replace(
            plan,
            rounded={node: values for node, values in known.rounded.items() if node in same},
            bias={node: values for node, values in known.bias.items() if node in same},
        )

    def evaluate(self, mix: Mix) -> Evaluation:
        """See :class:`~trtopt.precision.search.space.Oracle`."""
        model = apply_plan(self._improved.problem.model, self.plan(mix))
        return accuracy_drop(self._gauge.measure(model))

    def time_us(self, mix: Mix) -> float:
        """See :class:`~trtopt.precision.search.space.Oracle`."""
        found = self._guard.whole({op.node: op for op in self.ops(mix)}, BF16 if mix.narrow == "bf16" else None)
        return math.inf if found is None else found.predicted_us

    def rank(self, mix: Mix) -> Mapping[str, float]:
        """See :class:`~trtopt.precision.search.space.Oracle`: how much the error falls when a region is taken back."""
        base, plan = self._improved.problem.model, self.plan(mix)
        skips = {op.node: op.skips for op in plan.quantized}
        regions = {
            name: [item for node in self._nodes(name, dtype) for item in (node, *skips.get(node, ()))]
            for name, dtype in mix.quantized
        }
        nodes = [node for group in regions.values() for node in group]
        exact = replace(plan, narrow=None, wide={}, bfloat={}, fused_quantizers=False, rounded={})
        with SegmentedModel(base, apply_plan(base, exact), nodes) as model:
            found = sensitivity(
                model, regions, self._observer.samples, always=nodes, on_event=self._observer.clock.listen
            )
        return {name: max(-item.change, 0.0) for name, item in found.regions.items()}

    def _nodes(self, name: str, dtype: Form) -> list[str]:
        return list(self._options[name][dtype].kept)


def _best_of_types(verdict: Verdict) -> dict[Form, Verdict]:
    """The form of each type that saves most; of the type that the guard chose, its choice."""
    found: dict[Form, Verdict] = {}
    for option in sorted(verdict.options, key=lambda item: item.saved_us):
        found[_dtype_of(option)] = option
    return {**found, _dtype_of(verdict): verdict} if verdict.kept else found


def _dtype_of(verdict: Verdict) -> QuantizedType:
    return next(op.dtype for op in verdict.kept.values())


def search(
    oracle: RegionOracle, gauge: Gauge, flop: Mapping[str, int], observer: Observer, target: GuardTarget
) -> Found:
    """The fastest mix within the budget; resumed from where a killed run was, but with a Python caller's metric.

    Args:
        oracle: Answers.
        gauge: The budget.
        flop: By node.
        observer: Options, samples and progress.
        target: For whom prices are.

    Raises:
        UsageError: The metric fails, or the journal cannot be written where it was asked for.
    """
    config, listen = observer.config, observer.clock.listen
    space = oracle.space(flop)
    identity, journal = gauge.identity, None
    if identity is not None:
        keys = (*identity, observer.identity, oracle.identity, target.name, repr(target.shapes), repr(space))
        folder = Path(config.cache_dir) if config.cache_dir else None
        journal = Journal(oracle, [hashlib.sha256(key.encode()).hexdigest() for key in keys], folder, listen)
    asked = journal or oracle
    narrows: Sequence[NarrowName] = ("fp16", "bf16") if target.takes_bfloat else ("fp16",)
    if observer.precision == "auto":
        found = search_auto(space, gauge.budget(), asked, narrows=narrows, on_event=listen)
    else:
        found = search_budget(space, gauge.budget(), asked, on_event=listen)
    record = replace(found.record, resumed=journal.reused if journal else 0, own_qdq=oracle.has_own_qdq)
    return replace(found, record=record)
