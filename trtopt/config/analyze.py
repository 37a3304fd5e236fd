"""The options of ``trtopt analyze``."""

from __future__ import annotations

from dataclasses import dataclass

from trtopt.config.base import FILES, PRECISION, REPORT_HELP, TARGET, Config, ShapeMap, flag, option_field
from trtopt.errors import UsageError
from trtopt.support.precision import PRECISIONS, Precision


@dataclass(frozen=True)
class AnalyzeConfig(Config):
    """The options of ``trtopt analyze``.

    ``precision=None`` means FP16, or the types the model has where it already carries 16-bit types or Q/DQ. Batch sizes
    may be given as text, as on the command line, or as integers.

    Raises:
        UsageError: As of :class:`BuildConfig`.
    """

    precision: Precision | None = option_field(
        None, "precision to predict (default: fp16, or the model's own 16-bit and INT8)", PRECISION, choices=PRECISIONS
    )
    shapes: tuple[ShapeMap, ...] = option_field(
        (),
        "input shapes, name:1x3x224x224,other:1x77 (default: 8 on a dynamic first axis)",
        TARGET,
        aliases=("--opt-shapes", "--optShapes"),
        metavar="S",
        repeatable=True,
    )
    compile: bool = option_field(
        False, "compile with TensorRT for RTX and predict the layers of the engine too", TARGET
    )
    sparse: bool = option_field(
        False, "say for each layer whether 2:4 structured sparsity pays, and which weights are 2:4 already", TARGET
    )
    batch_sweep: tuple[int, ...] = option_field(
        (),
        "batch sizes to predict: 1,2,4 or 1..256 (a range: its ends, and four sizes per doubling)",
        TARGET,
        metavar="LIST",
    )
    latency_budget_ms: float | None = option_field(
        None,
        "name the batch of the sweep with the highest throughput within MS milliseconds",
        TARGET,
        aliases=("--latency-budget",),
        metavar="MS",
    )
    report: str | None = option_field(None, REPORT_HELP, FILES, metavar="FILE", path="output")
    html: str | None = option_field(None, "write the report as one HTML file", FILES, metavar="FILE", path="output")

    def __post_init__(self) -> None:
        super().__post_init__()
        where = flag("latency_budget_ms")
        if self.latency_budget_ms is not None and self.latency_budget_ms <= 0:
            raise UsageError("The latency budget is not positive", where=where, remedy="give milliseconds above 0")
        if self.latency_budget_ms is not None and not self.batch_sweep:
            what = "A latency budget needs batch sizes to choose from"
            raise UsageError(what, where=where, remedy="add --batch-sweep 1..256")
