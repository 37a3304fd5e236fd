"""An engine's own run is measured by the user's metric too. ONNX Runtime stands in for the engine: no GPU is here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from trtopt.accuracy import reference
from trtopt.accuracy.metric import Run, gate, load_metric, python_metric
from trtopt.config.budget import AccuracyBudget
from trtopt.engine.backend import TENSORRT_RTX, RuntimeOptions
from trtopt.engine.profiles import Profiles
from trtopt.errors import TargetError, TrtoptError, UsageError
from trtopt.events import ignore
from trtopt.graph.artifact import InputSpec
from trtopt.pipeline import verify as verification
from trtopt.pipeline.gauge import Gauge
from trtopt.precision.observe.samples import open_samples
from trtopt.report.schema.build import AccuracyRecord
from trtopt.support.clock import Clock
from trtopt.support.ort_session import Feeds, OrtSession

HEAD = '<ir_version: 9, opset_import: ["" : 19]>\n'
PLAIN = HEAD + (
    "g (float[N,3] x) => (float[N,3] y) <float[3,3] e = {1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0}> "
    "{ y = MatMul(x, e) }"
)
NEGATED = HEAD + "g (float[N,3] x) => (float[N,3] y) { y = Neg(x) }"
SCORES = np.array([[0.1, 0.9, 0.0], [0.0, 0.3, 0.4], [0.8, 0.0, 0.1], [0.1, 0.2, 0.7]], np.float32)
LABELS = np.array([1, 2, 0, 2])


class Engine(OrtSession):
    """What ONNX Runtime makes of another graph than the one that was verified, for batches of one."""

    profiles: Profiles = {}  # noqa: RUF012

    def __init__(self, data: bytes, backend: object, options: RuntimeOptions) -> None:
        super().__init__(ir.from_onnx_text(data.decode()))

    def run(self, feeds: Feeds) -> list[np.ndarray]:
        if len(feeds["x"]) != 1:
            raise UsageError(
                "The shape is outside of the engine's profile", where="x", remedy="build with wider shapes"
            )
        return super().run(feeds)


def verified(
    monkeypatch: pytest.MonkeyPatch, metric: object, clock: Clock, engine: type[Engine] = Engine
) -> AccuracyRecord:
    """The record of a graph that equals the model, and of an engine that negates."""
    monkeypatch.setattr(verification, "EngineSession", engine)
    monkeypatch.setattr(verification, "can_run", lambda backend, data: True)
    model = ir.from_onnx_text(PLAIN)
    samples = open_samples({"x": SCORES, "__labels__": LABELS}, [InputSpec("x", np.dtype(np.float32), ("N", 3))])
    chosen = load_metric(metric, has_labels=True) if isinstance(metric, str) else python_metric(metric)  # type: ignore[arg-type]
    measured = verification.with_baseline(chosen, model, samples, clock)
    job = verification.Verification(model, model, samples, "eval", measured, tensors=False)
    return verification.verify_engine(
        verification.verify(job, clock), job, NEGATED.encode(), TENSORRT_RTX, RuntimeOptions(), clock
    )


@pytest.mark.parametrize("metric", ["top1", "agreement"])
def test_the_metric_is_measured_on_the_engine_and_gated(monkeypatch: pytest.MonkeyPatch, metric: str) -> None:
    clock = Clock(ignore)
    record = verified(monkeypatch, metric, clock)
    assert record.metric is not None and record.metric.drop == 0.0
    assert record.engine_metric is not None and record.engine_metric.optimized == 0.0
    (failure,) = gate(record, AccuracyBudget(0.01))
    assert failure.startswith(f"metric {metric} of the engine: 0 against 1") and not clock.warnings


def test_a_users_function_runs_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def total(run: Run) -> float:
        return float(sum(run({"x": row[None]})[0].sum() for row in SCORES))

    record = verified(monkeypatch, total, Clock(ignore))
    assert record.metric is not None and record.engine_metric is not None
    assert record.engine_metric.optimized == pytest.approx(-record.metric.optimized)


def test_a_metric_that_the_engine_cannot_run_leaves_the_drop_to_its_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(run: Run) -> float:
        return float(run({"x": SCORES})[0].sum())

    clock = Clock(ignore)
    record = verified(monkeypatch, whole, clock)
    assert record.metric is not None and record.engine_metric is None and record.verified == "engine"
    (failure,) = gate(record, AccuracyBudget(0.01))
    assert failure.startswith("engine output y: 1 - top-1 agreement = 1")
    (warning,) = clock.warnings
    assert "cannot be measured on the engine" in warning and "outside of the engine's profile" in warning
    assert record.product_metric is record.metric, "the graph's is what there is"


@pytest.mark.parametrize(
    ("raised", "is_at_once"),
    [
        (UsageError("outside of what the engine was built for", where="x", remedy="widen"), False),
        (TargetError("out of memory", where="here", remedy="free some"), True),
    ],
)
def test_an_engine_that_cannot_be_run_on_the_samples_is_delivered_unverified(
    raised: TrtoptError, is_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(Engine):
        def __init__(self, data: bytes, backend: object, options: RuntimeOptions) -> None:
            if is_at_once:
                raise raised
            super().__init__(data, backend, options)

        def run(self, feeds: Feeds) -> list[np.ndarray]:
            raise raised

    clock = Clock(ignore)
    record = verified(monkeypatch, "top1", clock, Refusing)
    assert record.verified == "onnx-only" and record.engine is None and not gate(record, AccuracyBudget(0.01))
    (warning,) = clock.warnings
    assert f"not verified: {raised.what}" in warning


def test_a_metric_that_fails_on_the_engine_ends_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does on the graph: nothing may hide that the engine gives what the metric cannot take."""

    def root(run: Run) -> float:
        total = float(run({"x": SCORES[:1]})[0].sum())
        return float("nan") if total < 0 else total

    with pytest.raises(UsageError, match="nan"):
        verified(monkeypatch, root, Clock(ignore))


def test_forms_of_one_verification_share_one_run_of_the_fp32_model(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []

    class Counted(OrtSession):
        def run(self, feeds: Feeds) -> list[np.ndarray]:
            runs.append("")
            return super().run(feeds)

    model, negated = ir.from_onnx_text(PLAIN), ir.from_onnx_text(NEGATED)
    samples = open_samples({"x": SCORES}, [InputSpec("x", np.dtype(np.float32), ("N", 3))])
    job = verification.Verification(model, model, samples, "eval", None, tensors=False)
    for module in (verification, reference):
        monkeypatch.setattr(module, "OrtSession", Counted)
    first = verification.verify(job, Clock(ignore))
    assert len(runs) == 2 * len(SCORES) and first.outputs["y"].max_abs == 0
    second = verification.verify(replace(job, optimized=negated), Clock(ignore))
    assert len(runs) == 3 * len(SCORES) and second.outputs["y"].max_abs > 0
    with Gauge(job, AccuracyBudget(0.01)) as gauge:
        assert gauge.measure(negated).outputs == second.outputs
    assert len(runs) == 4 * len(SCORES)
