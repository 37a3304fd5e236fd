"""Metrics: labels, the user's own function, and clear refusals."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

import trtopt
from trtopt.accuracy.compare import compare
from trtopt.accuracy.metric import Run, load_metric, python_metric
from trtopt.errors import UsageError
from trtopt.report.schema.build import MetricRecord
from trtopt.support.ort_session import OrtSession

HEAD = '<ir_version: 9, opset_import: ["" : 19]>\n'
PLAIN = "g (float[N,3] x) => (float[N,3] y) { y = Identity(x) }"
ROUNDED = "g (float[N,3] x) => (float[N,3] y) { y = Round(x) }"
SCORES = np.array([[0.1, 0.9, 0.0], [0.0, 0.3, 0.4], [0.8, 0.0, 0.1], [0.1, 0.2, 0.7]], np.float32)
LABELS = np.array([1, 2, 0, 0])


def measure(text: str, labels: np.ndarray | None = None) -> MetricRecord:
    metric = load_metric(text, has_labels=labels is not None)
    samples = [{"x": SCORES[:1]}, {"x": SCORES[1:]}]
    with OrtSession(ir.from_onnx_text(HEAD + PLAIN)) as before, OrtSession(ir.from_onnx_text(HEAD + ROUNDED)) as after:
        metric = metric.on_reference(before, samples, labels)
        return metric.measure(after, samples, labels, compare(before, after, samples))


def test_top1_is_the_share_of_labels_that_score_highest() -> None:
    assert measure("top1", LABELS) == MetricRecord("top1", 0.75, 0.5, 0.25)


def test_agreement_is_1_for_the_baseline() -> None:
    assert measure("agreement") == MetricRecord("agreement", 1.0, 0.75, 0.25)


def test_sqnr_is_infinite_for_the_baseline() -> None:
    record = measure("sqnr")
    noise = ((SCORES - np.rint(SCORES)) ** 2).sum()
    assert record.baseline == math.inf
    assert record.optimized == pytest.approx(10 * math.log10((SCORES**2).sum() / noise), abs=1e-4)


def test_a_users_function_gets_run_and_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("import numpy as np\nX = np.eye(3, dtype=np.float32) * 0.4\n")
    script = tmp_path / "metric.py"
    script.write_text("import neighbour\ndef total(run):\n    return run({'x': neighbour.X})[0].sum()\n")
    record = measure(f"{script}:total")
    assert record.baseline == pytest.approx(1.2) and record.optimized == 0.0
    assert record.name == f"{script}:total"


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("def f(run):\n    return 'high'", "f", "returned 'high'"),
        ("def f(run):\n    return float('nan')", "f", "returned nan"),
        ("def f(run):\n    raise KeyError('label')", "f", "the function failed: KeyError"),
        ("def f(run):\n    return 1.0", "g", "no function 'g'"),
        ("f = 3", "f", "not a function"),
        ("import nowhere_to_be_found", "f", "running the file failed: ModuleNotFoundError"),
        ("def f(run:", "f", "running the file failed: SyntaxError"),
    ],
)
def test_what_is_wrong_with_a_users_function_is_said(tmp_path: Path, source: str, name: str, message: str) -> None:
    script = tmp_path / "metric.py"
    script.write_text(source)
    with pytest.raises(UsageError, match=message) as caught:
        measure(f"{script}:{name}")
    assert caught.value.exit_code == 2 and caught.value.remedy


def test_the_line_that_failed_is_named(tmp_path: Path) -> None:
    script = tmp_path / "metric.py"
    script.write_text("def f(run):\n    x = 1\n    return x / 0\n")
    with pytest.raises(UsageError) as caught:
        measure(f"{script}:f")
    assert caught.value.where == f"{script}:3"


def test_unknown_and_impossible_metrics_are_refused_before_any_work() -> None:
    with pytest.raises(UsageError, match="does not exist"):
        load_metric("missing.py:f", has_labels=False)
    with pytest.raises(UsageError, match="unknown metric 'top7'"):
        load_metric("top7", has_labels=True)
    with pytest.raises(UsageError, match="needs labels"):
        load_metric("top1", has_labels=False)
    with pytest.raises(UsageError, match="infinite"):
        load_metric("sqnr", has_labels=False, max_drop=0.01)


@pytest.mark.parametrize("count", [3, 5])
def test_labels_that_do_not_fit_the_samples_are_refused(count: int) -> None:
    with pytest.raises(UsageError, match=f"{count} labels"):
        measure("top1", np.zeros(count, np.int64))


def test_a_model_without_scores_has_no_top1() -> None:
    text = HEAD + "g (float[N,3] x) => (float[N] y) <int64[1] a = {1}> { y = ReduceSum <keepdims = 0> (x, a) }"
    with OrtSession(ir.from_onnx_text(text)) as session:
        samples = [{"x": SCORES}]
        with pytest.raises(UsageError, match="no output holds scores"):
            load_metric("top1", has_labels=True).on_reference(session, samples, LABELS)
        with pytest.raises(UsageError, match="no output holds scores"):
            load_metric("agreement", has_labels=True).on_reference(session, samples, LABELS)


@pytest.mark.parametrize("labels", [[1, 2, 0, 3], [1, 2, 0, -1]])
def test_labels_that_no_output_can_have_are_refused(labels: list[int]) -> None:
    with pytest.raises(UsageError, match="there are 3 classes"):
        measure("top1", np.array(labels))


def test_a_python_function_is_named_after_its_place() -> None:
    def best(run: Run) -> float:
        return float(run({"x": SCORES})[0].max())

    metric = python_metric(best)
    assert metric.name == f"{__file__}:{best.__qualname__}"
    with OrtSession(ir.from_onnx_text(HEAD + PLAIN)) as session:
        found = metric.on_reference(session, [], None)
    assert found.baseline == pytest.approx(0.9) and found.answers == len(SCORES)


def test_a_metric_that_is_nothing_in_fp32_is_said_to_be(tmp_path: Path) -> None:
    """No drop can fail where there is nothing to drop."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[1, 4] x) => (float[1, 4] y) { y = Relu(x) }'
    )
    samples = np.random.default_rng(0).random((8, 4), np.float32)
    warned = {}
    for labels in (samples.argmin(axis=1), samples.argmax(axis=1)):
        path = tmp_path / "s.npz"
        np.savez(path, x=samples, __labels__=labels)
        report = trtopt.optimize(
            model, calib=path, metric="top1", output=tmp_path / "o.onnx", recipes="none", max_accuracy_drop=0.01
        )
        assert report.accuracy is not None and report.accuracy.metric is not None
        warned[report.accuracy.metric.baseline] = [text for text in report.warnings if "top1 is 0 in FP32" in text]
    assert len(warned[0.0]) == 1 and not warned[1.0]


@pytest.mark.parametrize(("shift", "side"), [(-1, "higher"), (1, "lower")])
def test_labels_that_are_counted_otherwise_are_said_to_be(shift: int, side: str, tmp_path: Path) -> None:
    """As for a network of TensorFlow, whose class 0 is nothing; labels that are wrong in other ways are not."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[1, 9] x) => (float[1, 9] y) { y = Relu(x) }'
    )
    samples = np.random.default_rng(0).random((40, 9), np.float32)
    samples[:, 1:8] += 1
    right = samples.argmax(axis=1)
    for labels, expected in ((right + shift, [f"if every label were one {side}"]), ((right + 3) % 9, [])):
        np.savez(tmp_path / "s.npz", x=samples, __labels__=labels)
        path = tmp_path / "o.onnx"
        report = trtopt.optimize(model, calib=tmp_path / "s.npz", metric="top1", output=path, recipes="none")
        assert [text in "".join(report.warnings) for text in expected] == [True] * len(expected)
        assert expected or not any("every label" in text for text in report.warnings)
