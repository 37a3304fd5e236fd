"""What a run makes of a model, on the way to the engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from trtopt.engine.build import EngineArtifact
from trtopt.graph.artifact import ModelArtifact
from trtopt.pipeline.guard import OwnQdq
from trtopt.pipeline.network_io import FinalModel
from trtopt.report.schema.build import AccuracyRecord, CalibrationRecord, PrecisionRecord
from trtopt.report.schema.decisions import GuardRecord, SearchRecord, WeightsRecord
from trtopt.report.schema.steps import Cost


@dataclass(frozen=True)
class Lowered:
    """A model with its precision written into the graph.

    Attributes:
        artifact: The optimized model.
        calibration: What was observed; None when the precision needs no ranges.
        record: The precision part of the report, not yet knowing what the engine achieves.
        guard: The regions that could be 8-bit.
        sixteen_bit: What the model costs with all of them in 16-bit; None where nobody judged.
        judged: What it costs with those that pay; None where nobody judged.
        search: The search within an accuracy budget, where there was one.
        judge: Who judged regions; ``none`` where nobody did.
        quantized: The 8-bit nodes, with the tensor that each reads.
        weights: The weights that are stored narrow; None where nobody asked.
    """

    artifact: ModelArtifact
    calibration: CalibrationRecord | None
    record: PrecisionRecord
    guard: tuple[GuardRecord, ...] = ()
    sixteen_bit: Cost | None = None
    judged: Cost | None = None
    search: SearchRecord | None = None
    judge: str = "none"
    quantized: Mapping[str, str] = field(default_factory=dict)
    weights: WeightsRecord | None = None


@dataclass(frozen=True)
class Built:
    """What came of a cleaned model, with the gates that failed; no engine where none was asked for, or a gate failed.

    Attributes:
        own: The model after its recipes.
        cost: What the engine costs, or without one the model as its judge compiles it; None where nobody can say.
    """

    own: OwnQdq
    lowered: Lowered
    final: FinalModel
    accuracy: AccuracyRecord
    engine: EngineArtifact | None
    failures: tuple[str, ...]
    cost: Cost | None = None

    @property
    def microseconds(self) -> float:
        """Its predicted time; infinite where nobody can say."""
        return math.inf if self.cost is None else self.cost.predicted_us

    @property
    def without_us(self) -> float:
        """What it costs without the 8-bit that was written into it, as judged; infinite where none was, or nobody can
        say."""
        judged = self.lowered.sixteen_bit
        return judged.predicted_us if judged is not None and self.lowered.quantized else math.inf
