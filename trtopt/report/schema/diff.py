"""The records of the JSON contract ``trtopt.diff/1``: what two compilers made of one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trtopt.config.budget import ROUNDING
from trtopt.report.schema.layers import NodeName
from trtopt.report.schema.shown import Shown
from trtopt.report.schema.sweep import Failure

SCHEMA = "trtopt.diff/1"


@dataclass(frozen=True)
class DiffSide:
    """What one compiler made of the model.

    Attributes:
        name: What the user called it: ``tensorrt-rtx==1.6``, ``installed``, or the file of a report.
        compiler: Backend and version; empty where nothing was built and the version is not known.
        kernels: Kernels of the engine.
        bytes: Bytes of activations and constants that they move; of activations where a side does not list constants.
        predicted_us: Their predicted time, microseconds; None where no layers are known.
        host_nodes: Nodes at the model's end that the compiler refuses and the host runs.
        failure: Why there is no engine; None where there is one.
    """

    name: str
    compiler: str = ""
    kernels: int | None = None
    bytes: int | None = None
    predicted_us: float | None = None
    host_nodes: tuple[str, ...] = ()
    failure: Failure | None = None


@dataclass(frozen=True)
class RegionDiff:
    """What became of the kernels that compute some ONNX nodes; every pair is (before, after).

    Attributes:
        nodes: The nodes, those of the model before casts; the kernels' names where they name none.
        kernels: The nodes of each kernel.
        parted: Nodes that shared a kernel with others of these, and do not any more.
        joined: Nodes that share a kernel with others of these now.
        copies: How many of the kernels compute nothing: copies, padding, casts.
        dtypes: The types of their arithmetic, each once.
        bytes: What they move, counted likewise.
        us: Their predicted time, microseconds.
    """

    nodes: tuple[str, ...]
    kernels: tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]
    parted: tuple[str, ...]
    joined: tuple[str, ...]
    copies: tuple[int, int]
    dtypes: tuple[tuple[str, ...], tuple[str, ...]]
    bytes: tuple[int, int]
    us: tuple[float, float]


@dataclass(frozen=True, repr=False)
class DiffReport(Shown):
    """Two compilers, one model.

    Attributes:
        model: ``path`` and ``sha256``.
        gpu: The GPU the times are predicted for.
        precision: What was asked for.
        before: The first compiler.
        after: The second.
        changes: Every region that differs, the one that became slower by most first.
        max_slowdown: How much slower, as a share, the second may be; None for any.
        notes: What else differs and may explain it.
        names: The modules of the nodes, by the nodes' names.
    """

    VIEW = "report.text.diff:view"
    ROWS = "changes"

    model: dict[str, str]
    gpu: str
    precision: str
    before: DiffSide
    after: DiffSide
    changes: tuple[RegionDiff, ...] = ()
    max_slowdown: float | None = None
    notes: tuple[str, ...] = ()
    names: Mapping[str, NodeName] = field(default_factory=dict)
    schema: str = SCHEMA

    @property
    def slowdown(self) -> float | None:
        """The growth of the predicted time, as a share: 0.1 is 10 % slower; None where a time is not known."""
        old, new = self.before.predicted_us, self.after.predicted_us
        return None if not old or new is None else new / old - 1

    @property
    def is_failed(self) -> bool:
        """Whether the second is slower than may be, or refuses what the first builds."""
        if self.max_slowdown is None:
            return False
        worse = self.slowdown is not None and self.slowdown > self.max_slowdown + ROUNDING
        return worse or (self.after.failure is not None and self.before.failure is None)

    def to_json_dict(self) -> dict[str, Any]:
        own = {"schema": self.schema, "passed": not self.is_failed, "slowdown": self.slowdown}
        return {**own, **super().to_json_dict()}
