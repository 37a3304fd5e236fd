"""2:4 sparsity in a build: the layers that gain by it are pruned, fitted to samples, and given back for accuracy."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
from onnx_ir.passes import common as passes

from trtopt.config import AccuracyBudget, BuildConfig
from trtopt.engine.achieved import sparse_kernels
from trtopt.engine.backend import TENSORRT
from trtopt.engine.build import EngineArtifact
from trtopt.graph import cost
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.shapes import infer_shapes, static_shapes
from trtopt.judge.model import types_in
from trtopt.judge.target import Target
from trtopt.pipeline.gauge import Gauge
from trtopt.pipeline.output_error import OutputError
from trtopt.pipeline.sparse_record import record_of
from trtopt.pipeline.sparse_search import SparseOracle, budget_record, saved
from trtopt.pipeline.verify import Verification
from trtopt.precision.fp16.to_fp32 import widen
from trtopt.precision.observe.samples import Samples
from trtopt.precision.search.result import Found
from trtopt.precision.search.search import search_budget
from trtopt.report.schema.analysis import Sparsity
from trtopt.report.schema.decisions import SparsityRecord
from trtopt.report.schema.steps import Refusal, StepRecord
from trtopt.report.text.format import count
from trtopt.roofline.node_work import GraphTypes
from trtopt.roofline.onnx_layers import layers_of_graph
from trtopt.sparsity.eligibility import eligibility
from trtopt.sparsity.layers import Candidate, Candidates, by_magnitude, candidates
from trtopt.sparsity.prune import Pruned, prune
from trtopt.support.clock import Clock
from trtopt.support.precision import Precision

_STAGE = "SPARSITY"


@dataclass(frozen=True)
class SparseJob:
    """What is pruned for.

    Attributes:
        target: The backend and the GPU, and the shapes that gains are predicted at.
        precision: The precision asked for; None for the types the model has.
        samples: Calibration samples; synthetic ones are not fitted to.
        plain: The verification of the model as it is.
        config: The options.
        budget: The accuracy that may be lost.
    """

    target: Target
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

    Args:
        record: What was pruned; None where nobody asked.
        precision: The precision asked for, which gains were predicted in.
        quantized: The 8-bit nodes of the result.
        engine: The engine: its layers that run a sparse kernel, where it names its tactics; None without one.
    """
    if record is None:
        return None
    wide = [item for item in record.layers if item.sparse and not set(item.nodes).issubset(quantized)]
    if wide and precision is not None and precision.is_quantized:
        text = f"Gains are predicted in {precision.upper()}; {count(len(wide), 'pruned layer')} did not become that."
        record = replace(record, note=f"{record.note} {text}")
    return record if engine is None else replace(record, sparse_kernels=sparse_kernels(engine.record.layers))


def sparsify(artifact: ModelArtifact, job: SparseJob, clock: Clock) -> Sparsified:
    """Prune the layers of a model that gain by it to 2:4.

    Args:
        artifact: The model, cleaned.
        job: What for.
        clock: Told of progress and warnings.

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
        self._model = lift(infer_shapes(widen(artifact.model))).model
        self._judge = OutputError(self._model, job.samples)

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

    def _verdict(self, found: Candidates) -> Sparsity | None:
        """What pays; None for a target that is not one GPU."""
        gpu, shapes = self._job.target.gpu, static_shapes(self._model, self._job.target.shapes)
        if gpu is None:
            return None
        layers = layers_of_graph(self._model, shapes, _math(self._model, self._job.precision))
        return eligibility(found, layers, gpu, self._job.target.backend.name)

    def _flop(self) -> Mapping[str, int]:
        return cost.flop_by_node(self._model, static_shapes(self._model, self._job.target.shapes))

    def _unchanged(self, found: Candidates, verdict: Sparsity | None, chosen: Sequence[Candidate]) -> Sparsified:
        kept = Pruned(self._model, tuple(by_magnitude(self._model, item) for item in chosen))
        what = "no further weight is pruned" if chosen else "weights stay dense: no layer gains by 2:4"
        backend = self._job.target.backend.name
        if backend == "tensorrt-rtx" and not self._job.config.sparse_all:
            what = "weights stay dense: TensorRT for RTX ignores the pattern, the predicted gain is 0"
        self._clock.warn("sparsity", what if chosen else f"{what} (--sparse-all prunes them anyway)")
        return self._result(self._artifact.model, record_of(backend, found, verdict, kept, kept))

    def _pruned(self, model: ir.Model, layers: Sequence[Candidate]) -> Pruned:
        samples = self._job.samples if self._job.is_real else None
        return prune(model, layers, samples, self._judge.of_model, on_event=self._clock.listen)

    def _final(self, oracle: SparseOracle, layers: Sequence[Candidate], everything: Pruned, search: Found) -> Pruned:
        """The layers that were chosen, fitted to what they read now that others are dense again."""
        if search.mix == oracle.everything:
            return everything
        chosen = search.mix.types
        some = Pruned(
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


def _chosen(found: Candidates, verdict: Sparsity | None, config: BuildConfig) -> tuple[Candidate, ...]:
    """The weights to prune, and those that are 2:4 as they are."""
    eligible = {row.weight for row in verdict.layers if row.eligible} if verdict is not None else set()
    return tuple(item for item in found.layers if config.sparse_all or item.sparse or item.weight in eligible)
