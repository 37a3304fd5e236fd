"""A model pruned to 2:4, with its accuracy recovered from samples without labels.

What is found layer by layer is kept only where the error at the network's outputs falls against plain magnitude
pruning, on samples that the search has not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from trtopt.events import OnEvent, ignore
from trtopt.precision.observe.feeds import Sample
from trtopt.precision.ptq.refine import SMALLEST_SAMPLES, Trial, split_samples
from trtopt.sparsity.layers import Candidate, PrunedWeight, by_magnitude, with_pruned
from trtopt.sparsity.recover import recover

ErrorOf = Callable[[ir.Model, Sequence[Sample]], float]
"""The error at a model's outputs on the given samples: noise over signal, the worst output's."""

LARGEST_SAMPLES = 512
"""Samples that layers are fitted to, where memory allows (``layer_walk.HELD_BYTES``)."""


@dataclass(frozen=True)
class Pruned:
    """The result of :func:`prune`.

    Attributes:
        model: A clone with all ``layers`` written (:func:`trtopt.sparsity.layers.write` writes some of them).
        layers: What became of each weight.
        trials: The error at the outputs of what was tried; empty where nothing could be.
        reason: Why nothing was recovered; empty where something was.
    """

    model: ir.Model
    layers: tuple[PrunedWeight, ...]
    trials: tuple[Trial, ...] = ()
    reason: str = ""


def prune(
    model: ir.Model,
    layers: Sequence[Candidate],
    samples: Iterable[Sample] | None,
    error_of: ErrorOf,
    *,
    seed: int = 0,
    on_event: OnEvent = ignore,
) -> Pruned:
    """Prune weights to 2:4; with samples, fit the weights that stay.

    Deterministic for a seed. Weights that are 2:4 are left as they are.

    Args:
        model: The widened model that the layers were found in; not changed.
        layers: What to prune.
        samples: Calibration samples, read once; a bounded number spread evenly over them is held. None prunes by
            magnitude.
        error_of: Measures a pruned model on samples of its second argument. Called at most twice.
        seed: Which positions of the layers' inputs are looked at.
        on_event: Progress of the task ``prune``.

    Raises:
        InvalidModelError: ONNX Runtime cannot run a part of the model.
    """
    plain = tuple(by_magnitude(model, layer) for layer in layers)
    simple = with_pruned(model, plain)
    if all(layer.sparse for layer in layers):
        return Pruned(simple, plain, reason="no weight is left to prune")
    searched, judged = split_samples(model, () if samples is None else samples, LARGEST_SAMPLES)
    if not judged:
        return Pruned(simple, plain, reason=f"fewer than {SMALLEST_SAMPLES} samples")
    found = tuple(recover(model, layers, searched, seed, on_event))
    fitted = with_pruned(model, found)
    trials = (Trial("magnitude", error_of(simple, judged)), Trial("recovered", error_of(fitted, judged)))
    if not trials[1].error < trials[0].error:
        return Pruned(simple, plain, trials, "magnitude is better at the outputs, on samples kept from the fit")
    return Pruned(fitted, found, trials)
