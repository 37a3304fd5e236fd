"""Which layers stay pruned within an accuracy budget, and the curve of gain against accuracy."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from trtopt.accuracy.segments import SegmentedModel
from trtopt.accuracy.sensitivity import sensitivity
from trtopt.events import OnEvent
from trtopt.pipeline.gauge import Gauge, accuracy_drop
from trtopt.pipeline.sparse_record import gains_of
from trtopt.precision.observe.samples import Samples
from trtopt.precision.search.result import Found
from trtopt.precision.search.space import Evaluation, Form, Mix, Option, SearchRegion, Space
from trtopt.report.schema.analysis import Sparsity
from trtopt.report.schema.decisions import CurvePoint, SparsityBudget
from trtopt.sparsity.layers import Candidate, with_pruned
from trtopt.sparsity.prune import Pruned
from trtopt.support.precision import Precision

_FORM: Form = "2:4"
_CURVE = (0.25, 0.5, 0.75)
"""Shares of the layers at which the curve is measured, besides none and all."""


class SparseOracle:
    """Answers the search about which layers are pruned, with the weights that were found with all of them pruned.

    A layer goes by the name of the first node that reads its weight.

    Args:
        dense: The model.
        found: Its pruned weights.
        saved: What the search weighs error against, by layer (:func:`saved`).
        verdict: The predicted gains; None where nobody predicts.
        gauge: Measures accuracy; open.
        samples: Layers are ranked on them.
        on_event: Told of progress.
    """

    def __init__(
        self,
        dense: ir.Model,
        found: Pruned,
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
        self.space = Space(tuple(SearchRegion(name, (Option(_FORM, saved[name]),)) for name in self._layers))
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


def saved(layers: Sequence[Candidate], verdict: Sparsity | None, flop: Mapping[str, int]) -> dict[str, float]:
    """What the search weighs error against, by layer: predicted microseconds where all layers gain some; with
    ``--sparse-all``, where most gain none, millions of the flop that the pattern leaves out.

    Args:
        layers: The layers to prune.
        verdict: The predicted gains; None where nobody predicts.
        flop: By node.
    """
    gains = gains_of(verdict)
    if all(gains.get(item.nodes[0], 0.0) > 0 for item in layers if not item.sparse):
        return {item.nodes[0]: gains.get(item.nodes[0], 0.0) for item in layers}
    return {item.nodes[0]: 5e-7 * max(sum(flop.get(name, 0) for name in item.nodes), 1) for item in layers}


def budget_record(search: Found, oracle: SparseOracle) -> SparsityBudget:
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
