"""The records of the JSON contract ``trtopt.sensitivity/1``. Field names are part of the contract.

An error is a noise-to-signal ratio: the power of the difference to FP32 over the power of the FP32 tensor, both summed
over all elements and samples; SQNR is ``-10 log10`` of it, in dB.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtopt.report.schema.build import CalibrationRecord
from trtopt.report.schema.layers import NodeName
from trtopt.report.schema.shown import Shown
from trtopt.report.schema.steps import Refusal

SCHEMA = "trtopt.sensitivity/1"


@dataclass(frozen=True)
class OutputError:
    """The error of one output of the network.

    Attributes:
        noise_to_signal: Power of the error over power of the FP32 output; infinite where an element is not finite, or
            the shape differs.
        sqnr_db: The same in dB; infinite without any error.
        standard_error_db: Standard error of ``sqnr_db`` as an estimate for all samples, from its spread over those it
            was measured on; 0 where that was all of them, None where it was one.
        disagreement: Share of positions with another best class; None where the output holds no scores of classes.
        change: ``noise_to_signal`` less that of the same samples without the change that is measured.
    """

    noise_to_signal: float
    sqnr_db: float
    standard_error_db: float | None
    disagreement: float | None
    change: float


@dataclass(frozen=True)
class RegionError:
    """What quantizing one region, and nothing else, does to the outputs.

    Attributes:
        region: The tensor that the region's nodes read.
        nodes: Their names, in graph order.
        outputs: The error of each output, by name.
        samples: Samples it was measured on.
        flop_share: Share of the network's arithmetic; None where that was not asked.
    """

    region: str
    nodes: tuple[str, ...]
    outputs: Mapping[str, OutputError]
    samples: int
    flop_share: float | None = None

    @property
    def worst(self) -> str:
        """The output with the largest error."""
        return max(self.outputs, key=lambda name: _order(self.outputs[name].noise_to_signal))

    @property
    def error(self) -> float:
        """The noise-to-signal ratio of the worst output."""
        return self.outputs[self.worst].noise_to_signal

    @property
    def change(self) -> float:
        """The largest change of an output's noise-to-signal ratio, by size."""
        return max((item.change for item in self.outputs.values()), key=lambda value: _order(abs(value)))


def _order(value: float) -> float:
    return math.inf if math.isnan(value) else value


def noise_shares(regions: Sequence[RegionError]) -> list[float]:
    """Each region's share of the sum of the errors of all: errors of different regions add up in power."""
    errors = [region.error for region in regions]
    total = sum(errors)
    if math.isfinite(total):
        return [error / total if total else 0.0 for error in errors]
    broken = sum(not math.isfinite(error) for error in errors)
    return [0.0 if math.isfinite(error) else 1 / broken for error in errors]


@dataclass(frozen=True)
class GrowthStep:
    """The error inside the network when all regions are quantized.

    Attributes:
        region: The tensor that the region's nodes read.
        node: One of its nodes.
        input_sqnr_db: SQNR of what it reads, before it is quantized: what came in.
        output_sqnr_db: SQNR of what it gives.
        added: Noise-to-signal ratio of its output less that of what it reads; negative where the node averages errors
            out.
    """

    region: str
    node: str
    input_sqnr_db: float
    output_sqnr_db: float
    added: float


@dataclass(frozen=True, repr=False)
class Sensitivity(Shown):
    """What ``trtopt sensitivity`` found.

    Attributes:
        model: The model, as in the other reports.
        precision: ``int8`` or ``fp8``.
        backend: Whose placement rules chose the regions.
        samples: Samples that errors were measured on, each region on some of them in turn.
        regions: The regions, the worst first.
        together: The errors with all regions quantized; ``region`` is empty.
        growth: In graph order.
        refused: Products that are in no region, with the reason.
        calibration: Where the ranges come from.
        calib: The samples by their name, as ``--calib`` had it; empty where they have none.
        cached: The errors were found in the cache.
        seconds: Wall time by stage.
        warnings: What was warned of.
        names: The modules of nodes, by the nodes' names.
    """

    VIEW = "report.text.sensitivity:view"
    ROWS = "regions"

    model: dict[str, Any]
    precision: str
    backend: str
    samples: int
    regions: tuple[RegionError, ...]
    together: RegionError
    growth: tuple[GrowthStep, ...]
    refused: tuple[Refusal, ...] = ()
    calibration: CalibrationRecord | None = None
    calib: str = ""
    cached: bool = False
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    names: Mapping[str, NodeName] = dataclasses.field(default_factory=dict)
    schema: str = SCHEMA

    def to_json_dict(self) -> dict[str, Any]:
        found = super().to_json_dict()
        for item, region in zip((*found["regions"], found["together"]), (*self.regions, self.together), strict=True):
            item["worst"] = region.worst
        return found
