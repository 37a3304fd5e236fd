"""The records of the JSON contract ``trtopt.comparison/1``: two profiles of one network. Times are microseconds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from trtopt.report.schema.plain import plain

SCHEMA = "trtopt.comparison/1"

Change = Literal["same", "fused", "split", "regrouped", "appeared", "vanished"]
"""What became of the layers that hold some nodes: as many as before; fewer; more; as many of other nodes; none before;
none after."""

Alignment = Literal["nodes", "name", "shape", "none"]
"""By what layers of both sides were found to belong together."""


@dataclass(frozen=True)
class Side:
    """The layers of one profile that hold some nodes.

    Attributes:
        layers: Their names.
        precisions: The types of their arithmetic, each once.
        tactics: Their kernels' names, where they are told.
        measured_us: Their time.
    """

    layers: tuple[str, ...]
    precisions: tuple[str, ...]
    tactics: tuple[str, ...]
    measured_us: float


@dataclass(frozen=True)
class ComparedRegion:
    """The layers of both profiles that hold the same nodes, and share none with others.

    Attributes:
        nodes: The ONNX nodes; the layers' names where they hold none.
        before: Of the profile compared against.
        after: Of the other.
        change: What became of the layers.
        gain_us: ``before.measured_us - after.measured_us``: above 0 where it became faster.
        aligned: By what they were found to belong together.
    """

    nodes: tuple[str, ...]
    before: Side
    after: Side
    change: Change
    gain_us: float
    aligned: Alignment

    @property
    def changed_precision(self) -> bool:
        """Whether the arithmetic has other types."""
        return self.before.precisions != self.after.precisions and bool(self.before.layers and self.after.layers)


@dataclass(frozen=True)
class Profiled:
    """What was profiled on one side.

    Attributes:
        report: The report's file.
        device: The GPU or the CPU.
        origin: Who measured, and with which version.
        layers: How many take time.
        measured_us: Sum of the layers.
        end_to_end_us: One inference; None where it is not known.
    """

    report: str
    device: str
    origin: str
    layers: int
    measured_us: float
    end_to_end_us: float | None


@dataclass(frozen=True)
class Comparison:
    """Two profiles of one network.

    Attributes:
        before: The one compared against.
        after: The other.
        regions: What became of the layers, the largest difference of time first.
        warnings: What limits the comparison: other devices, other ways of timing, layers without nodes.
    """

    before: Profiled
    after: Profiled
    regions: tuple[ComparedRegion, ...]
    warnings: tuple[str, ...] = ()
    schema: str = SCHEMA

    def to_json_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        found = plain(dataclasses.asdict(self))
        return {"schema": found.pop("schema"), **found}
