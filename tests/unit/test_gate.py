"""The gate says in words what failed, and never passes a NaN."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from trtopt.accuracy.metric import gate
from trtopt.config import AccuracyBudget
from trtopt.report.schema.build import AccuracyRecord, MetricRecord, OutputAccuracy

CLASSES = OutputAccuracy(sqnr_db=38.0, cosine=0.9999, max_abs=0.1, top1_agreement=0.97)
VALUES = OutputAccuracy(sqnr_db=38.0, cosine=0.96, max_abs=0.1, top1_agreement=None)
BROKEN = OutputAccuracy(sqnr_db=math.nan, cosine=math.nan, max_abs=math.inf, top1_agreement=0.5, nonfinite=3)


def record(**outputs: OutputAccuracy) -> AccuracyRecord:
    return AccuracyRecord(samples=10, source="eval", verified="onnx-only", outputs=outputs)


def test_without_options_only_nonfinite_outputs_fail() -> None:
    assert gate(record(y=VALUES), AccuracyBudget()) == ()
    (failure,) = gate(record(y=VALUES, z=BROKEN), AccuracyBudget())
    assert failure == "output z: 3 values are NaN or infinite where the reference is finite"


def test_the_engines_own_outputs_pass_the_same_gates() -> None:
    both = replace(record(y=VALUES), engine={"y": BROKEN})
    assert [text.split(":")[0] for text in gate(both, AccuracyBudget())] == ["engine output y"]


@pytest.mark.parametrize(
    ("limit", "accuracy", "failure"),
    [
        (0.05, CLASSES, None),
        (0.02, CLASSES, "output y: 1 - top-1 agreement = 0.03, more than the 0.02 of --max-accuracy-drop"),
        (0.05, VALUES, None),
        (0.03, VALUES, "output y: 1 - cosine = 0.04, more than the 0.03 of --max-accuracy-drop"),
    ],
)
def test_a_drop_without_a_metric_is_of_agreement_or_of_cosine(
    limit: float, accuracy: OutputAccuracy, failure: str | None
) -> None:
    assert gate(record(y=accuracy), AccuracyBudget(limit)) == ((failure,) if failure else ())


def test_a_drop_with_a_metric_is_of_the_metric_alone() -> None:
    measured = replace(record(y=VALUES), metric=MetricRecord("top1", 0.91, 0.90, 0.01))
    assert gate(measured, AccuracyBudget(0.02)) == ()
    (failure,) = gate(measured, AccuracyBudget(0.005))
    assert failure == "metric top1: 0.9 against 0.91, a drop of 0.01, more than the 0.005 of --max-accuracy-drop"


def test_a_metric_of_the_emulated_graph_does_not_excuse_the_engines_own_outputs() -> None:
    """Where the metric could not be measured on the engine, its outputs are judged as they are without a metric."""
    poor = OutputAccuracy(sqnr_db=2.0, cosine=0.3, max_abs=9.0, top1_agreement=0.01)
    measured = replace(record(y=CLASSES), engine={"y": poor}, metric=MetricRecord("top1", 0.91, 0.91, 0.0))
    (failure,) = gate(measured, AccuracyBudget(0.01))
    assert failure == "engine output y: 1 - top-1 agreement = 0.99, more than the 0.01 of --max-accuracy-drop"


def test_the_metric_of_the_engine_is_gated_like_that_of_the_emulated_graph() -> None:
    poor = MetricRecord("top1", 0.91, 0.11, 0.8)
    both = replace(record(y=CLASSES), engine={"y": CLASSES}, metric=MetricRecord("top1", 0.91, 0.91, 0.0))
    assert gate(replace(both, engine_metric=both.metric), AccuracyBudget(0.01)) == ()
    (failure,) = gate(replace(both, engine_metric=poor), AccuracyBudget(0.01))
    assert failure == (
        "metric top1 of the engine: 0.11 against 0.91, a drop of 0.8, more than the 0.01 of --max-accuracy-drop"
    )


def test_a_limit_that_nobody_gave_is_called_the_default() -> None:
    measured = replace(record(y=VALUES), metric=MetricRecord("top1", 0.91, 0.90, 0.01))
    for found in (measured, record(y=VALUES)):
        (failure,) = gate(found, AccuracyBudget(0.005, source="default"))
        assert failure.endswith("more than the 0.005 of --max-accuracy-drop, its default here")


def test_a_drop_that_is_the_budget_but_for_rounding_passes() -> None:
    """0.9 - 0.895 is 0.005 and a little more."""
    measured = replace(record(y=VALUES), metric=MetricRecord("top1", 0.9, 0.895, 0.9 - 0.895))
    assert measured.metric is not None and measured.metric.drop > 0.005
    assert gate(measured, AccuracyBudget(0.005)) == ()


def test_a_metric_that_is_not_a_number_fails() -> None:
    measured = replace(record(y=VALUES), metric=MetricRecord("m.py:f", 0.9, math.nan, math.nan))
    assert len(gate(measured, AccuracyBudget(0.5))) == 1


def test_min_sqnr_names_each_output_below_it() -> None:
    exact = OutputAccuracy(sqnr_db=math.inf, cosine=1.0, max_abs=0.0, top1_agreement=1.0)
    failures = gate(record(a=CLASSES, b=exact, c=VALUES), AccuracyBudget(sqnr_db=40))
    assert failures == (
        "output a: SQNR 38.0 dB, less than the 40 dB of --min-sqnr-db",
        "output c: SQNR 38.0 dB, less than the 40 dB of --min-sqnr-db",
    )
