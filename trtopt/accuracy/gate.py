"""Gates: what must hold for the optimized model to pass, and what failed, in words."""

from __future__ import annotations

from trtopt.config import BuildConfig
from trtopt.report.schema.build import AccuracyRecord, OutputAccuracy

_ROUNDING = 1e-9
"""Of a difference of two shares: 0.9 - 0.895 is a little more than 0.005. The search within a budget allows as much."""


def gate(record: AccuracyRecord, config: BuildConfig, *, is_default: bool = False) -> tuple[str, ...]:
    """The gates that failed, one sentence each; the caller decides between an error and a warning.

    Always: no output is NaN or infinite where the reference is finite. ``--min-sqnr-db X``: each output's SQNR is at
    least X. ``--max-accuracy-drop X``: with a metric, baseline - optimized <= X; without one, X bounds 1 - top-1
    agreement of each output that has one, else 1 - cosine. An engine that ran passes the same gates: its own metric,
    or its outputs where the metric could not be measured on it. Outputs that the host computes pass the first gate and
    the metric's; for the others the tensors it computes them from stand in, since a rounding may change which boxes
    are chosen, and their order.

    Args:
        record: The verification.
        config: Its ``max_accuracy_drop`` and ``min_sqnr_db``.
        is_default: Whether nobody gave ``max_accuracy_drop``: the message says so.
    """
    sources = [("output", record.outputs, record.metric)]
    if record.engine is not None:
        sources.append(("engine output", record.engine, record.engine_metric))
    failures: list[str] = []
    for kind, outputs, metric in sources:
        for name, accuracy in outputs.items():
            where = f"{kind} {name}"
            if accuracy.nonfinite:
                failures.append(
                    f"{where}: {accuracy.nonfinite} values are NaN or infinite where the FP32 reference is finite"
                )
            elif name not in record.host_outputs:
                failures += _output_failures(where, accuracy, config, metric is not None, is_default)
    drop, default = config.max_accuracy_drop, ", its default here" if is_default else ""
    for suffix, metric in (("", record.metric), (" of the engine", record.engine_metric)):
        if drop is not None and metric is not None and not metric.drop <= drop + _ROUNDING:
            failures.append(
                f"metric {metric.name}{suffix}: {metric.optimized:.4g} against {metric.baseline:.4g}, a drop of "
                f"{metric.drop:.4g}, more than the {drop:g} of --max-accuracy-drop{default}"
            )
    return tuple(failures)


def _output_failures(
    where: str, accuracy: OutputAccuracy, config: BuildConfig, has_metric: bool, is_default: bool
) -> list[str]:
    failures = []
    if config.min_sqnr_db is not None and not accuracy.sqnr_db >= config.min_sqnr_db:
        failures.append(
            f"{where}: SQNR {accuracy.sqnr_db:.1f} dB, less than the {config.min_sqnr_db:g} dB of --min-sqnr-db"
        )
    if config.max_accuracy_drop is not None and not has_metric:
        measure, drop = drop_of(accuracy)
        if not drop <= config.max_accuracy_drop + _ROUNDING:
            failures.append(
                f"{where}: 1 - {measure} = {drop:.4g}, more than the {config.max_accuracy_drop:g} of "
                f"--max-accuracy-drop{', its default here' if is_default else ''}"
            )
    return failures


def drop_of(accuracy: OutputAccuracy) -> tuple[str, float]:
    """What bounds the drop of an output without a metric, and its value: 1 - agreement, or 1 - cosine."""
    if accuracy.top1_agreement is not None:
        return "top-1 agreement", 1.0 - accuracy.top1_agreement
    return "cosine", 1.0 - accuracy.cosine
