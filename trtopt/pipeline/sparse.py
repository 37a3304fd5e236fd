"""2:4 sparsity in a build: the layers that gain by it are pruned, fitted to samples, and given back for accuracy."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
from onnx_ir.passes import common as passes

from trtopt.config import BuildConfig
from trtopt.engine.achieved import sparse_kernels
from trtopt.engine.backend import TENSORRT, Backend
from trtopt.engine.build import EngineArtifact
from trtopt.errors import TargetError, UsageError
from trtopt.graph import cost
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.shapes import infer_shapes, static_shapes
from trtopt.hardware.spec import GpuSpec
from trtopt.pipeline.guard import GuardTarget
from trtopt.pipeline.output_error import OutputError
from trtopt.pipeline.search import Gauge
from trtopt.pipeline.sparse_record import record_of
from trtopt.pipeline.sparse_search import SparseOracle, budget_record, saved
from trtopt.pipeline.stages import Verification
from trtopt.precision.decide import QUANTIZED_TYPES, placed_nodes
from trtopt.precision.fp16.to_fp32 import widen
from trtopt.precision.observe.samples import Samples
from trtopt.precision.plan import QuantizedType
from trtopt.precision.search.result import Found
from trtopt.precision.search.search import search_budget
from trtopt.report.schema.analysis import Sparsity
from trtopt.report.schema.build import Refusal, StepRecord
from trtopt.report.schema.sparsity import SparsityRecord
from trtopt.report.text.numbers import count
from trtopt.roofline.node_work import Precision
from trtopt.roofline.onnx_layers import layers_of_graph
from trtopt.roofline.work import MathType
from trtopt.sparsity.eligibility import eligibility
from trtopt.sparsity.layers import Candidate, Candidates, by_magnitude, candidates
from trtopt.sparsity.prune import Pruned, prune
from trtopt.support.clock import Clock

_STAGE = "SPARSITY"
_BASES: dict[str | None, MathType] = {None: "fp32", "fp32": "fp32", "tf32": "tf32", "bf16": "bf16"}


@dataclass(frozen=True)
class SparseJob:
    """What is pruned for.

    Attributes:
        target: The backend and the GPU, and the shapes that gains are predicted at.
        precision: The precision asked for; None for the types the model has.
        samples: Calibration samples; synthetic ones are not fitted to.
        plain: The verification of the model as it is.
        config: The options.
        is_default_budget: Whether nobody gave the accuracy budget that they have.
    """

    target: GuardTarget
    precision: str | None
    samples: Samples
    plain: Verification
    config: BuildConfig
    is_default_budget: bool

    @property
    def is_real(self) -> bool:
        """Whether there are samples to fit weights to."""
        return self.samples.source != "synthetic"

    @property
    def has_budget(self) -> bool:
        """Whether layers are given back until a budget holds."""
        return self.config.max_accuracy_drop is not None or self.config.min_sqnr_db is not None

    def gauge(self) -> Gauge:
        """Measures accuracy; half of the budget is left to 8-bit where that is asked for too."""
        config, drop = self.config, self.config.max_accuracy_drop
        if drop is not None and self.precision in QUANTIZED_TYPES:
            config = replace(config, max_accuracy_drop=drop / 2)
        return Gauge(self.plain, config, is_default=self.is_default_budget)


@dataclass(frozen=True)
class Sparsified:
    """A pruned model, and what was done; the model that was given where nothing was, and None where nobody asked."""

    artifact: ModelArtifact
    record: SparsityRecord | None

    @property
    def is_pruned(self) -> bool:
        """Whether a weight was made 2:4."""
        return self.record is not None and self.record.pruned > 0


def is_asked(config: BuildConfig) -> bool:
    """Whether layers are to be pruned."""
    return config.sparse or config.sparse_all


def check_sparse(config: BuildConfig, backend: Backend, gpu: GpuSpec | None, calib: object) -> None:
    """Refuse what ``--sparse`` cannot do, before any work.

    Args:
        config: The options.
        backend: The compiler.
        gpu: The GPU; None for every one from Ampere on.
        calib: The calibration samples, None where none were given.

    Raises:
        UsageError: There are no samples, and weights would be pruned.
        TargetError: No GPU is named to predict the gain for.
    """
    if not is_asked(config):
        return
    if gpu is None and not config.sparse_all:
        raise TargetError(
            "The gain of sparse kernels cannot be predicted for every GPU at once",
            where="--gpu portable",
            remedy="name a GPU with --gpu, or prune whatever the gain with --sparse-all",
        )
    if calib is None and (config.sparse_all or backend == TENSORRT):
        raise UsageError(
            "Half of the weights would be taken out without a sample to fit the others to",
            where="--sparse-all" if config.sparse_all else "--sparse",
            remedy="give samples with --calib; --calib synthetic prunes by magnitude alone, which costs accuracy",
        )


def check_types(config: BuildConfig, precision: str | None, model: ir.Model) -> None:
    """Refuse to prune a model that is to keep types other than FP32: pruning and its predictions would be in FP32.

    Args:
        config: The options.
        precision: The precision asked for; None for the types the model has.
        model: The model as loaded.

    Raises:
        UsageError: It holds FP16, BF16 or FP64, and nobody says what it is to run in.
        InvalidModelError: The bits of such a type are reinterpreted (:func:`trtopt.precision.fp16.to_fp32.widen`).
    """
    if is_asked(config) and precision is None and widen(model) is not model:
        raise UsageError(
            "Weights are pruned in FP32, and the model holds other floating types",
            where="--sparse-all" if config.sparse_all else "--sparse",
            remedy="say what the result is to run in, with --fp16 for one",
        )


def with_flag(config: BuildConfig, backend: Backend) -> BuildConfig:
    """The options with the builder told to look for sparse kernels, where it can and nobody has said otherwise."""
    if (
        not is_asked(config)
        or backend != TENSORRT
        or any(item.lower().startswith("sparsity") for item in config.builder)
    ):
        return config
    return replace(config, builder=(*config.builder, "sparsity=true"))


def as_made(
    record: SparsityRecord | None, precision: str | None, quantized: Collection[str], engine: EngineArtifact | None
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
    if wide and precision in QUANTIZED_TYPES:
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
            if job.has_budget:
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


def _math(model: ir.Model, precision: str | None) -> Precision:
    """The types that gains are predicted in: those asked for; FP32 where none are."""
    if precision in ("int8", "fp8"):
        dtype: QuantizedType = "fp8" if precision == "fp8" else "int8"
        return Precision("fp16", placed_nodes(model, TENSORRT.name, dtype), dtype)
    return Precision(_BASES.get(precision, "fp16"))


def _chosen(found: Candidates, verdict: Sparsity | None, config: BuildConfig) -> tuple[Candidate, ...]:
    """The weights to prune, and those that are 2:4 as they are."""
    eligible = {row.weight for row in verdict.layers if row.eligible} if verdict is not None else set()
    return tuple(item for item in found.layers if config.sparse_all or item.sparse or item.weight in eligible)
