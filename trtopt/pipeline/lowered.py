"""What lowering gives the stages behind it, and what improving numbers gives the search."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from trtopt.errors import EngineBuildError
from trtopt.graph.artifact import ModelArtifact
from trtopt.precision.plan import PrecisionPlan
from trtopt.precision.regions import Problem
from trtopt.report.schema.build import CalibrationRecord, PrecisionRecord
from trtopt.report.schema.decisions import GuardRecord, SearchRecord
from trtopt.report.schema.steps import Cost, StepRecord


@dataclass(frozen=True)
class Improved:
    """An improved plan.

    Attributes:
        problem: The FP32 form of the model that it is for, and what is known of that.
        plan: The plan.
        steps: What was tried, and what it did to the error at the outputs.
    """

    problem: Problem
    plan: PrecisionPlan
    steps: tuple[StepRecord, ...] = ()


@dataclass(frozen=True)
class Lowered:
    """A model with its precision written into the graph.

    Attributes:
        artifact: The optimized model.
        calibration: What was observed; None when the precision needs no ranges.
        record: The precision part of the report, not yet knowing what the engine achieves.
        guard: The regions that could be 8-bit.
        sixteen_bit: What the model costs with all of them in 16-bit; None where nobody judged.
        search: The search within an accuracy budget, where there was one.
        judge: Who judged regions; ``none`` where nobody did.
        quantized: The 8-bit nodes, with the tensor that each reads.
    """

    artifact: ModelArtifact
    calibration: CalibrationRecord | None
    record: PrecisionRecord
    guard: tuple[GuardRecord, ...] = ()
    sixteen_bit: Cost | None = None
    search: SearchRecord | None = None
    judge: str = "none"
    quantized: Mapping[str, str] = field(default_factory=dict)


def blamed(lowered: Lowered, error: EngineBuildError) -> dict[str, str]:
    """The 8-bit nodes that the compiler's message names, or whose quantized tensor it names, with the reason."""
    text = f"{error.what}\n{error.where}"  # the remedy speaks of inputs and nodes, which may be names here
    reason = f"the compiler cannot build it in 8-bit: {error.what}"
    names = {node: (node, tensor) for node, tensor in lowered.quantized.items()}
    return {node: reason for node, given in names.items() if any(_is_named(name, text) for name in given)}


def _is_named(name: str, text: str) -> bool:
    """Whether a message names it; a number is more likely to be a size or a code."""
    return not name.isdigit() and re.search(rf"(?<![\w./]){re.escape(name)}(?![\w./])", text) is not None
