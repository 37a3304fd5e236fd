"""Q/DQ that a model came with: mended, and judged against the same model without."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from trtopt.config import BuildConfig
from trtopt.errors import TrtoptError
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.shapes import at_shapes
from trtopt.judge.gain import LEAST_GAIN
from trtopt.judge.protocol import OpenJudge
from trtopt.judge.target import BuildTarget
from trtopt.precision.fp16.network_io import parse_io
from trtopt.precision.qdq.existing import canonicalize_qdq, existing_nodes, existing_ranges, existing_types, without_qdq
from trtopt.report.schema.decisions import GuardRecord
from trtopt.report.schema.steps import Cost, StepRecord
from trtopt.rewrite.driver import Rewritten
from trtopt.support.clock import Clock
from trtopt.support.precision import Precision

OWN = "Q/DQ of the model"
"""The region of a model's own Q/DQ in reports."""

OUT = "existing-qdq-out"
"""Name of the step that takes it out."""


def canonicalized(artifact: ModelArtifact, backend: str, clock: Clock) -> ModelArtifact:
    """The model with its own Q/DQ mended (:mod:`trtopt.precision.qdq.existing`); itself when it holds none.

    Raises:
        InvalidModelError: It is quantized in a way that cannot be kept.
    """
    with clock.stage("mend Q/DQ"):
        found = canonicalize_qdq(artifact.model, backend)
    if found is None:
        return artifact
    for text in found.warnings:
        clock.warn("mend Q/DQ", f"{text}. Quantize symmetrically (INT8, zero point 0) to lose nothing")
    return artifact.with_step(found.model, found.step)


@dataclass(frozen=True)
class OwnQdq:
    """A model after its recipes, and what its own Q/DQ was found to be worth.

    Attributes:
        rewritten: The form to go on with: with its Q/DQ, or without.
        ranges: Where that was taken out, the largest magnitude of each activation that it quantized to INT8, by name.
        guard: The verdict on it; empty where there is none, or nobody can judge it.
        sixteen_bit: What the model costs in FP16 without it; None where it was not judged, or in another type.
    """

    rewritten: Rewritten
    ranges: Mapping[str, float] = field(default_factory=dict)
    guard: tuple[GuardRecord, ...] = ()
    sixteen_bit: Cost | None = None


def own_qdq(
    artifact: ModelArtifact,
    rewrite: Callable[[ModelArtifact], Rewritten],
    target: BuildTarget,
    precision: Precision | None,
    config: BuildConfig,
    clock: Clock,
    open_judge: OpenJudge,
) -> OwnQdq:
    """Apply the recipes, and judge a model's own Q/DQ, mended, against the same model without.

    Where 8-bit has to pay (``--int8``, ``--fp8``, ``--auto``), Q/DQ that makes the model slower is taken out: its
    activations keep their ranges, and what pays of them becomes 8-bit again. Elsewhere it stays, with a warning.

    Args:
        artifact: The model before its recipes, its Q/DQ mended.
        rewrite: Applies the recipes.
        target: For whom it is judged.
        precision: The precision of the build; None for the types the model has.
        config: The options.
        clock: Told what does not pay.
        open_judge: Opens the target's judge.

    Raises:
        TrtoptError: As ``rewrite``.
    """
    kept = rewrite(artifact)
    nodes = existing_nodes(artifact.model)
    if not nodes:
        return OwnQdq(kept)
    plain = rewrite(replace(artifact, model=without_qdq(artifact.model)))
    eight_bit = precision is not None and precision.is_quantized
    try:
        judged_in = Precision.FP16 if eight_bit else precision
        with (
            clock.stage("judge Q/DQ"),
            open_judge(judged_in, io=parse_io(config.io)) as judge,
        ):
            before, after = (
                judge.price(at_shapes(form.artifact.model, target.shapes), inner=False).total for form in (plain, kept)
            )
    except TrtoptError as error:
        clock.warn("judge Q/DQ", f"the model's own Q/DQ stays as it is, since nobody can judge it: {error.what}")
        return OwnQdq(kept)
    sixteen_bit = before if precision is not None and precision.base == Precision.FP16 else None
    found = f"{after.predicted_us:.1f} us predicted with it, {before.predicted_us:.1f} us without"
    if eight_bit and not config.keep_all_int8 and after.predicted_us > before.predicted_us:
        text = f"the model's own Q/DQ makes it slower and is taken out: {found}"
        clock.warn("judge Q/DQ", f"{text}. What pays becomes 8-bit again; --keep-all-int8 keeps all of it")
        step = StepRecord(OUT, "PRECISION", len(nodes), 0.0, details=(text,))
        out = replace(plain, artifact=plain.artifact.with_step(plain.artifact.model, step))
        return OwnQdq(out, existing_ranges(artifact.model), sixteen_bit=sixteen_bit)
    if after.predicted_us > before.predicted_us * (1 + LEAST_GAIN):
        remedy = "--int8 without --keep-all-int8" if eight_bit else "--int8"
        clock.warn("judge Q/DQ", f"the model's own Q/DQ makes it slower: {found}. {remedy} keeps what pays of it only")
    return OwnQdq(kept, guard=(_verdict(artifact.model, nodes, before, after),), sixteen_bit=sixteen_bit)


def _verdict(model: ir.Model, nodes: Collection[str], before: Cost, after: Cost) -> GuardRecord:
    """The record of Q/DQ that stays."""
    return GuardRecord(
        region=OWN,
        nodes=tuple(str(node.name) for node in model.graph if node.name in nodes),
        kept=True,
        dtype="+".join(sorted(existing_types(model))),
        reason="the model's own Q/DQ, judged as one on the whole network",
        before_us=before.predicted_us,
        after_us=after.predicted_us,
        kernels=(before.kernels, after.kernels),
        bytes=(before.bytes, after.bytes),
    )
