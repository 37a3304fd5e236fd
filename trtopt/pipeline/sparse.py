"""2:4 sparsity in a build: the layers that gain by it are pruned, fitted to samples, and given back for accuracy."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
from onnx_ir.passes import common as passes

from trtopt.accuracy.compare import decibels
from trtopt.accuracy.segments import SegmentedModel
from trtopt.accuracy.sensitivity import sensitivity
from trtopt.config import AccuracyBudget, BuildConfig
from trtopt.engine.achieved import sparse_kernels
from trtopt.engine.backend import TENSORRT
from trtopt.engine.build import EngineArtifact
from trtopt.events import OnEvent
from trtopt.graph import cost
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.shapes import infer_shapes, static_shapes
from trtopt.judge.judges import types_in
from trtopt.judge.target import BuildTarget
from trtopt.pipeline.gauge import Gauge, accuracy_drop
from trtopt.pipeline.improve import OutputErrorMeter
from trtopt.pipeline.verify import Verification
from trtopt.precision.fp16.to_fp32 import to_fp32
from trtopt.precision.observe.stream import Samples
from trtopt.precision.search.search import SearchResult, search_budget
from trtopt.precision.search.space import Evaluation, Form, Mix, RegionOption, SearchRegion, Space
from trtopt.report.schema.analysis import Sparsity
from trtopt.report.schema.decisions import CurvePoint, PrunedLayer, SparsityBudget, SparsityRecord
from trtopt.report.schema.steps import Refusal, StepRecord
from trtopt.report.text.format import count
from trtopt.roofline.node_work import GraphTypes
from trtopt.roofline.onnx_layers import layers_of_graph
from trtopt.sparsity.eligibility import eligibility
from trtopt.sparsity.layers import (
    PrunedWeight,
    SparseCandidate,
    SparseCandidates,
    by_magnitude,
    candidates,
    with_pruned,
)
from trtopt.sparsity.prune import PrunedModel, prune
from trtopt.support.clock import Clock
from trtopt.support.precision import Precision

_STAGE = "SPARSITY"
_FORM: Form = "2:4"
_CURVE = (0.25, 0.5, 0.75)
"""Shares of the layers at which the curve is measured, besides none and all."""


@dataclass(frozen=True)
class SparseJob:
    """What is pruned for: ``plain`` verifies the model as it is; synthetic samples are not fitted to."""

    target: BuildTarget
    precision: Precision | None
    samples: Samples
    plain: Verification
    config: BuildConfig
    budget: AccuracyBudget

    @property
    def is_real(self) -> bool:
        """Whether there are samples to fit weights to."""
        return self.samples.source != "synthetic"

    def gauge(self) -> Gauge:
        """Measures accuracy; half of the budget is left to 8-bit where that is asked for too."""
        shares = self.precision is not None and self.precision.is_quantized
        return Gauge(self.plain, self.budget.halved() if shares else self.budget)


@dataclass(frozen=True)
class Sparsified:
    """A pruned model, and what was done; the model that was given where nothing was, and None where nobody asked."""

    artifact: ModelArtifact
    record: SparsityRecord | None

    @property
    def is_pruned(self) -> bool:
        """Whether a weight was made 2:4."""
        return self.record is not None and self.record.pruned > 0


def as_made(
    record: SparsityRecord | None,
    precision: Precision | None,
    quantized: Collection[str],
    engine: EngineArtifact | None,
) -> SparsityRecord | None:
    """The record with what is known once the model is lowered and built.

    Gains were predicted in ``precision``; ``quantized`` are the 8-bit nodes of the result. An engine gives its layers
    that run a sparse kernel, where it names its tactics.
    """
    if record is None:
        return None
    wide = [item for item in record.layers if item.sparse and not set(item.nodes).issubset(quantized)]
    if wide and precision is not None and precision.is_quantized:
        text = f"Gains are predicted in {precision.upper()}; {count(len(wide), 'pruned layer')} did not become that."
        record = replace(record, note=f"{record.note} {text}")
    layers = None if engine is None else engine.record.layers
    return record if layers is None else replace(record, sparse_kernels=sparse_kernels(layers))


def sparsify(artifact: ModelArtifact, job: SparseJob, clock: Clock) -> Sparsified:
    """Prune the layers of a cleaned model that gain by it to 2:4.

    Raises:
        InvalidModelError: ONNX Runtime cannot run the model.
        UsageError: The GPU has no units for the precision; the metric fails.
    """
    with clock.stage("sparsity"):
        return _Sparsifier(artifact, job, clock).run()


class _Sparsifier:
    def __init__(self, artifact: ModelArtifact, job: SparseJob, clock: Clock) -> None:
        self._artifact, self._job, self._clock = artifact, job, clock
        self._began = time.perf_counter()
        lift = passes.LiftConstantsToInitializersPass(lift_all_constants=False, size_limit=0)
        self._model = lift(infer_shapes(to_fp32(artifact.model))).model
        self._judge = OutputErrorMeter(self._model, job.samples)

    def run(self) -> Sparsified:
        job = self._job
        found = candidates(self._model)
        verdict = self._verdict(found)
        chosen = _chosen(found, verdict, job.config)
        if not any(not item.sparse for item in chosen):
            return self._unchanged(found, verdict, chosen)
        everything = self._pruned(self._model, chosen)
        if not job.is_real:
            text = "weights were pruned by magnitude alone, without real samples: how accurate that is nobody knows"
            self._clock.warn("sparsity", text)
            done = record_of(job.target.backend.name, found, verdict, everything, everything)
            return self._result(everything.model, done)
        if not everything.trials:
            self._clock.warn("sparsity", f"weights were pruned by magnitude alone: {everything.reason} to fit them to")
        listen, search = self._clock.listen, None
        with job.gauge() as gauge:
            worth = saved(chosen, verdict, self._flop())
            oracle = SparseOracle(self._model, everything, worth, verdict, gauge, job.samples, listen)
            budget = gauge.budget()
            if job.budget.is_given:
                search = search_budget(oracle.space, budget, oracle, on_event=listen)
            curve = oracle.curve(oracle.everything if search is None else search.mix)
            final = everything if search is None else self._final(oracle, chosen, everything, search)
        done = record_of(job.target.backend.name, found, verdict, final, everything)
        spent = None if search is None else budget_record(search, oracle)
        return self._result(final.model, replace(done, metric=budget.metric, curve=curve, budget=spent))

    def _result(self, model: ir.Model, record: SparsityRecord) -> Sparsified:
        refusals = tuple(Refusal(name, item.reason) for item in record.layers if not item.sparse for name in item.nodes)
        seconds = time.perf_counter() - self._began
        step = StepRecord("prune-2-4", _STAGE, record.pruned, seconds, refusals, record.recovery)
        return Sparsified(self._artifact.with_step(model, step), record)

    def _verdict(self, found: SparseCandidates) -> Sparsity | None:
        """What pays; None for a target that is not one GPU."""
        gpu, shapes = self._job.target.gpu, static_shapes(self._model, self._job.target.shapes)
        if gpu is None:
            return None
        layers = layers_of_graph(self._model, shapes, _math(self._model, self._job.precision))
        return eligibility(found, layers, gpu, self._job.target.backend.name)

    def _flop(self) -> Mapping[str, int]:
        return cost.flop_by_node(self._model, static_shapes(self._model, self._job.target.shapes))

    def _unchanged(
        self, found: SparseCandidates, verdict: Sparsity | None, chosen: Sequence[SparseCandidate]
    ) -> Sparsified:
        kept = PrunedModel(self._model, tuple(by_magnitude(self._model, item) for item in chosen))
        what = "no further weight is pruned" if chosen else "weights stay dense: no layer gains by 2:4"
        backend = self._job.target.backend.name
        if backend == "tensorrt-rtx" and not self._job.config.sparse_all:
            what = "weights stay dense: TensorRT for RTX ignores the pattern, the predicted gain is 0"
        self._clock.warn("sparsity", what if chosen else f"{what} (--sparse-all prunes them anyway)")
        return self._result(self._artifact.model, record_of(backend, found, verdict, kept, kept))

    def _pruned(self, model: ir.Model, layers: Sequence[SparseCandidate]) -> PrunedModel:
        samples = self._job.samples if self._job.is_real else None
        return prune(model, layers, samples, self._judge.of_model, on_event=self._clock.listen)

    def _final(
        self, oracle: SparseOracle, layers: Sequence[SparseCandidate], everything: PrunedModel, search: SearchResult
    ) -> PrunedModel:
        """The layers that were chosen, fitted to what they read now that others are dense again."""
        if search.mix == oracle.everything:
            return everything
        chosen = search.mix.types
        some = PrunedModel(
            oracle.model(search.mix),
            tuple(item for item in everything.layers if item.nodes[0] in chosen or item.method == "was sparse"),
            everything.trials,
            everything.reason,
        )
        if not search.reached or not chosen:
            return some
        again = self._pruned(oracle.dense, [item for item in layers if item.nodes[0] in chosen or item.sparse])
        found = oracle.measure(again.model)
        return again if found.order <= search.evaluation.order else some


def _math(model: ir.Model, precision: Precision | None) -> GraphTypes:
    """The types that gains are predicted in: those asked for; FP16 where a search is to choose them."""
    return types_in(model, Precision.FP16 if precision == Precision.AUTO else precision, TENSORRT.name)


def _chosen(found: SparseCandidates, verdict: Sparsity | None, config: BuildConfig) -> tuple[SparseCandidate, ...]:
    """The weights to prune, and those that are 2:4 as they are."""
    eligible = {row.weight for row in verdict.layers if row.eligible} if verdict is not None else set()
    return tuple(item for item in found.layers if config.sparse_all or item.sparse or item.weight in eligible)


class SparseOracle:
    """Answers the search about which layers are pruned, with the weights that were found with all of them pruned.

    A layer goes by the name of the first node that reads its weight; ``saved`` is what :func:`saved` gives, ``gauge``
    is open, and ``verdict`` is None where nobody predicts gains.
    """

    def __init__(
        self,
        dense: ir.Model,
        found: PrunedModel,
        saved: Mapping[str, float],
        verdict: Sparsity | None,
        gauge: Gauge,
        samples: Samples,
        on_event: OnEvent,
    ) -> None:
        self.dense, self._gauge, self._samples, self._on_event = dense, gauge, samples, on_event
        self._layers = {item.nodes[0]: item for item in found.layers if item.method != "was sparse"}
        self._kept = len(found.layers) - len(self._layers)
        self._gains = gains_of(verdict)
        self._dense_us = (
            None
            if verdict is None
            else verdict.sparse_us + math.fsum(self._gains.get(name, 0.0) for name in self._layers)
        )
        self.space = Space(tuple(SearchRegion(name, (RegionOption(_FORM, saved[name]),)) for name in self._layers))
        self.everything = self.space.fastest(Precision.FP16)
        self._known: dict[Mix, Evaluation] = {}

    def model(self, mix: Mix) -> ir.Model:
        """The dense model with some layers pruned."""
        return with_pruned(self.dense, [self._layers[name] for name in mix.types])

    def evaluate(self, mix: Mix) -> Evaluation:
        """See :class:`~trtopt.precision.search.space.Oracle`."""
        if mix not in self._known:
            self._known[mix] = self.measure(self.model(mix))
        return self._known[mix]

    confirm = evaluate

    def measure(self, model: ir.Model) -> Evaluation:
        """The accuracy of a pruned model."""
        return accuracy_drop(self._gauge.measure(model))

    def time_us(self, mix: Mix) -> float:
        """See :class:`~trtopt.precision.search.space.Oracle`: what :func:`saved` counts, of what can be saved."""
        return self.space.saved_us(self.everything) - self.space.saved_us(mix)

    def rank(self, mix: Mix) -> Mapping[str, float]:
        """See :class:`~trtopt.precision.search.space.Oracle`."""
        regions = {name: list(self._layers[name].nodes) for name in mix.types}
        nodes = [name for group in regions.values() for name in group]
        with SegmentedModel(
            self.dense, _renamed(self.model(mix), [self._layers[name].weight for name in mix.types]), nodes
        ) as model:
            found = sensitivity(model, regions, self._samples, always=nodes, on_event=self._on_event)
        return {name: max(-item.change, 0.0) for name, item in found.regions.items()}

    def predicted_us(self, mix: Mix) -> float | None:
        """Predicted time of the network; None for a target that is not one GPU."""
        return (
            None
            if self._dense_us is None
            else self._dense_us - math.fsum(self._gains.get(name, 0.0) for name in mix.types)
        )

    def curve(self, chosen: Mix) -> tuple[CurvePoint, ...]:
        """Gain against accuracy: no layer, some, all, the least error per microsecond first; and what was tried."""
        moves = self.space.ways_down(
            self.everything, {(name, _FORM): e for name, e in self.rank(self.everything).items()}
        )
        points = [Mix(Precision.FP16), self.everything, chosen]
        points += [self.everything.moved(moves[: round(len(moves) * share)]) for share in _CURVE]
        for mix in points:
            self.evaluate(mix)
        found = sorted(self._known.items(), key=lambda item: (len(item[0].types), item[1].drop))
        return tuple(
            CurvePoint(self._kept + len(mix.types), self.predicted_us(mix), evaluation.drop, mix == chosen)
            for mix, evaluation in found
        )


def _renamed(model: ir.Model, names: Collection[str]) -> ir.Model:
    """The same with other names for some weights: who compares it with the dense model takes equal names for equal."""
    for value in list(model.graph.initializers.values()):
        if value.name in names:
            value.name = f"{value.name}_{_FORM}"
    return model


def saved(layers: Sequence[SparseCandidate], verdict: Sparsity | None, flop: Mapping[str, int]) -> dict[str, float]:
    """What the search weighs error against, by layer: predicted microseconds where all layers gain some; with
    ``--sparse-all``, where most gain none, millions of the flop that the pattern leaves out.
    """
    gains = gains_of(verdict)
    if all(gains.get(item.nodes[0], 0.0) > 0 for item in layers if not item.sparse):
        return {item.nodes[0]: gains.get(item.nodes[0], 0.0) for item in layers}
    return {item.nodes[0]: 5e-7 * max(sum(flop.get(name, 0) for name in item.nodes), 1) for item in layers}


def budget_record(search: SearchResult, oracle: SparseOracle) -> SparsityBudget:
    """How layers were given back."""
    record, chosen = search.record, search.mix.types
    return SparsityBudget(
        record.budget,
        record.aim,
        search.evaluation.drop,
        search.reached,
        tuple(name for name in oracle.everything.types if name not in chosen),
        record.evaluations,
        record.is_default_budget,
    )


def gains_of(verdict: Sparsity | None) -> dict[str, float]:
    """Predicted microseconds that 2:4 saves, by the first node that reads the weight, where it pays."""
    rows = verdict.layers if verdict is not None else ()
    return {row.nodes[0]: row.dense_us - row.sparse_us for row in rows if row.eligible}


def record_of(
    backend: str,
    found: SparseCandidates,
    verdict: Sparsity | None,
    final: PrunedModel,
    everything: PrunedModel,
) -> SparsityRecord:
    """What became of every layer; ``everything`` is what was pruned before layers were given back, ``final`` what
    is."""
    kept, tried = {item.nodes: item for item in final.layers}, {item.nodes for item in everything.layers}
    gains, rows = gains_of(verdict), {} if verdict is None else {row.nodes: row for row in verdict.layers}
    layers = []
    for item in found.layers:
        row, done = rows.get(item.nodes), kept.get(item.nodes)
        reason = "asked for by --sparse-all" if row is None else row.reason
        if done is not None and done.method != "was sparse" and row is not None and not row.eligible:
            reason = f"asked for by --sparse-all; {row.reason}"
        times = (0.0, 0.0) if row is None else (row.dense_us, row.sparse_us if done is not None else row.dense_us)
        if done is None and item.nodes in tried:
            reason = "left dense for the accuracy budget"
        layers.append(_layer(item, done, reason, times))
    for name, reason in found.refused.items():
        row = rows.get((name,))
        dense = 0.0 if row is None else row.dense_us
        layers.append(PrunedLayer((name,), "", False, reason, dense_us=dense, sparse_us=dense))
    return SparsityRecord(
        backend,
        tuple(layers),
        None if verdict is None else verdict.dense_us,
        None if verdict is None else verdict.dense_us - math.fsum(gains.get(nodes[0], 0.0) for nodes in kept),
        "no gain was predicted: the target is not one GPU" if verdict is None else verdict.note,
        (
            *(f"{trial.name}: output SQNR {decibels(trial.error):.2f} dB" for trial in final.trials),
            *((final.reason,) if final.reason else ()),
        ),
    )


def _layer(item: SparseCandidate, done: PrunedWeight | None, reason: str, times: tuple[float, float]) -> PrunedLayer:
    dense_us, sparse_us = times
    if done is None:
        return PrunedLayer(item.nodes, item.weight, False, reason, dense_us=dense_us, sparse_us=sparse_us)
    before, after = (None, None) if done.errors is None else map(decibels, done.errors)
    return PrunedLayer(
        item.nodes,
        item.weight,
        True,
        reason,
        done.method,
        done.kept,
        before,
        after,
        dense_us=dense_us,
        sparse_us=sparse_us,
    )
