"""The records of the JSON contract ``trtopt.check/1``: a report gated against thresholds and a baseline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trtopt.errors import GateError
from trtopt.report.schema.layers import NodeName
from trtopt.report.schema.shown import Shown

SCHEMA = "trtopt.check/1"

Verdict = Literal["passed", "failed", "not judged"]
Bound = Literal["at most", "at least"]
Unit = Literal["us", "bytes", "kernels", "share", "dB", "metric"]


@dataclass(frozen=True)
class LayerChange:
    """What became of the kernels that compute some nodes.

    Attributes:
        nodes: The ONNX nodes, those of the model before casts and Q/DQ; the kernels' names where they name none.
        kernels: Their number in the baseline and now.
        dtypes: The types of their arithmetic, in the baseline and now, each once.
        us: Their time, microseconds; None where it is not known.
    """

    nodes: tuple[str, ...]
    kernels: tuple[int, int]
    dtypes: tuple[tuple[str, ...], tuple[str, ...]]
    us: tuple[float | None, float | None]


@dataclass(frozen=True)
class Gate:
    """One gate.

    Attributes:
        name: A stable name: ``build``, ``finite``, ``calibration``, ``accuracy``, ``accuracy-fp32``, ``latency``,
            ``share``, ``bytes`` or ``kernels``; with ``:`` and the output or the type where there are several.
        title: What is judged, in words.
        verdict: ``not judged`` where a figure is missing and nobody asked for the gate.
        unit: Of the figures; shares are 0..1.
        before: The figure it is compared with: of the baseline, or of FP32; None where there is none.
        after: The figure of the report.
        bound: How ``limit`` bounds ``after``; None for a gate without figures.
        limit: The bound.
        is_default: Whether nobody gave the threshold.
        reason: Why it failed or was not judged; empty when it passed.
        layers: Where to look: the layers that account for it, the most telling first.
    """

    name: str
    title: str
    verdict: Verdict
    unit: Unit | None = None
    before: float | None = None
    after: float | None = None
    bound: Bound | None = None
    limit: float | None = None
    is_default: bool = False
    reason: str = ""
    layers: tuple[LayerChange, ...] = ()


@dataclass(frozen=True)
class Checked:
    """What a report is of.

    Attributes:
        report: Its file.
        schema: Its kind.
        model: The model's file, or the engine's for a profile; empty where it is not known.
        sha256: The model's hash; empty where it is not known.
        gpu: The GPU's name.
        backend: Compiler and version; empty where nothing was compiled.
        precision: What was asked for; empty where it is not known.
    """

    report: str
    schema: str
    model: str
    sha256: str
    gpu: str
    backend: str
    precision: str


@dataclass(frozen=True, repr=False)
class CheckReport(Shown):
    """A report against its thresholds.

    Attributes:
        subject: What was checked.
        baseline: What it was compared with; None without a baseline.
        gates: All gates, in a fixed order.
        notes: What differs from the baseline and may explain a difference, and what else the reader should know.
        names: The modules of the report's nodes, by the nodes' names.
    """

    VIEW = "report.text.check:view"
    ROWS = "gates"

    subject: Checked
    baseline: Checked | None
    gates: tuple[Gate, ...]
    notes: tuple[str, ...] = ()
    names: dict[str, NodeName] = field(default_factory=dict)
    schema: str = SCHEMA

    @property
    def failed(self) -> tuple[Gate, ...]:
        """The gates that failed."""
        return tuple(gate for gate in self.gates if gate.verdict == "failed")

    def raise_for_gate(self) -> None:
        """Raise :class:`GateError` where a gate failed."""
        if self.failed:
            raise GateError(
                "A gate failed: " + "; ".join(gate.name for gate in self.failed),
                where=self.subject.report,
                remedy="print(report) shows values and thresholds",
            )

    def to_json_dict(self) -> dict[str, Any]:
        return {"schema": self.schema, "passed": not self.failed, **super().to_json_dict()}
