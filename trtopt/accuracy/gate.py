"""Gates: what must hold for the optimized model to pass, and what failed, in words."""

from __future__ import annotations

from trtopt.config.budget import AccuracyBudget
from trtopt.report.schema.build import AccuracyRecord, OutputAccuracy


def gate(record: AccuracyRecord, budget: AccuracyBudget) -> tuple[str, ...]:
    """The gates that failed, one sentence each; the caller decides between an error and a warning.

    Always: no output is NaN or infinite where the reference is finite. ``--min-sqnr-db X``: each output's SQNR is at
    least X. ``--max-accuracy-drop X``: with a metric, baseline - optimized <= X; without one, X bounds 1 - top-1
    agreement of each output that has one, else 1 - cosine. An engine that ran passes the same gates: its own metric,
    or its outputs where the metric could not be measured on it. Outputs that the host computes pass the first gate and
    the metric's; for the others the tensors it computes them from stand in, since a rounding may change which boxes
    are chosen, and their order.

    Args:
        record: The verification.
        budget: What those options say.
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
                failures += _output_failures(where, accuracy, budget, metric is not None)
    for suffix, metric in (("", record.metric), (" of the engine", record.engine_metric)):
        if metric is not None and not budget.allows(metric.drop):
            failures.append(
                f"metric {metric.name}{suffix}: {metric.optimized:.4g} against {metric.baseline:.4g}, a drop of "
                f"{metric.drop:.4g}, more than the {budget.words()}"
            )
    return tuple(failures)


def _output_failures(where: str, accuracy: OutputAccuracy, budget: AccuracyBudget, has_metric: bool) -> list[str]:
    failures = []
    if not budget.allows_sqnr(accuracy.sqnr_db):
        failures.append(
            f"{where}: SQNR {accuracy.sqnr_db:.1f} dB, less than the {budget.sqnr_db:g} dB of --min-sqnr-db"
        )
    measure, drop = drop_of(accuracy)
    if not has_metric and not budget.allows(drop):
        failures.append(f"{where}: 1 - {measure} = {drop:.4g}, more than the {budget.words()}")
    return failures


def drop_of(accuracy: OutputAccuracy) -> tuple[str, float]:
    """What bounds the drop of an output without a metric, and its value: 1 - agreement, or 1 - cosine."""
    if accuracy.top1_agreement is not None:
        return "top-1 agreement", 1.0 - accuracy.top1_agreement
    return "cosine", 1.0 - accuracy.cosine
