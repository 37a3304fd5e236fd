"""What a measurement gives, whoever took it: layers with their work and their times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trtopt.report.schema.build import OutputAccuracy
from trtopt.report.schema.layers import LayerInfo
from trtopt.report.schema.profile import ProfileSource
from trtopt.roofline.work import Work


@dataclass(frozen=True)
class MeasuredLayer:
    """A layer and its times, in microseconds of one inference.

    Attributes:
        info: The layer; its name is unique in its list (``NAME #2`` for a second one of that name).
        op: The ONNX operator that does the work, or the compiler's layer type.
        work: What it has to do; None where that is not known, or nothing runs.
        measured_us: Mean; 0 for what runs nothing.
        median_us: Median; None where only the mean is known.
        spread_us: Median absolute deviation of the runs; None where the runs are not known.
        sparse_weights: Whether the engine says that its weights are 2:4; None where it says nothing.
    """

    info: LayerInfo
    op: str
    work: Work | None
    measured_us: float
    median_us: float | None = None
    spread_us: float | None = None
    sparse_weights: bool | None = None


@dataclass(frozen=True)
class Measurement:
    """A measured network.

    Attributes:
        source: Where it comes from.
        layers: In the order they run; none is left out.
        end_to_end_us: Median time of one inference without profiling, on the device; None where it is not known.
        end_to_end_spread_us: Median absolute deviation of that.
        host_us: Median time on the host to enqueue one inference; None where it is not known.
        accuracy: By output, against the FP32 reference in the same run; None where the network did not run here.
        warnings: What the reader should know.
    """

    source: ProfileSource
    layers: tuple[MeasuredLayer, ...]
    end_to_end_us: float | None = None
    end_to_end_spread_us: float | None = None
    host_us: float | None = None
    accuracy: Mapping[str, OutputAccuracy] | None = None
    warnings: tuple[str, ...] = ()
