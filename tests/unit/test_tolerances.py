"""``--atol`` and ``--rtol``: what they say, and that they judge as Polygraphy does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from trtopt.accuracy.compare import compare, sums_of
from trtopt.accuracy.metric import gate
from trtopt.config import AccuracyBudget, BuildConfig, Tolerances
from trtopt.errors import UsageError
from trtopt.report.schema.build import AccuracyRecord, OutputAccuracy
from trtopt.support.ort_session import Feeds


class Fixed:
    """A network that gives one output of another array for each sample."""

    output_names = ("y",)

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._arrays = arrays

    def run(self, feeds: Feeds) -> list[np.ndarray]:
        return [self._arrays[int(feeds["index"])]]


def judged(references: Sequence[np.ndarray], outputs: Sequence[np.ndarray], tolerances: Tolerances) -> OutputAccuracy:
    feeds = [{"index": np.array(index)} for index in range(len(references))]
    return compare(Fixed(references), Fixed(outputs), feeds, varying=["y"], sums=sums_of(tolerances))["y"]


def failures(accuracy: OutputAccuracy) -> tuple[str, ...]:
    return gate(AccuracyRecord(1, "eval", "onnx-only", {"y": accuracy}), AccuracyBudget())


def test_a_tolerance_is_of_all_outputs_or_of_one() -> None:
    found = Tolerances.parsed(("1e-3", "a:0:2"), ("b:0.5",))
    assert found.of("a:0") == (2.0, 1e-5) and found.of("b") == (1e-3, 0.5) and found.of("c") == (1e-3, 1e-5)


@pytest.mark.parametrize("text", ["", "y:", "x", "y:nan", "-1", "y:inf"])
def test_what_is_no_tolerance_is_refused_at_once(text: str) -> None:
    with pytest.raises(UsageError):
        BuildConfig(atol=("1", text))


def test_a_tolerance_of_no_output_is_refused() -> None:
    with pytest.raises(UsageError, match="'z'") as caught:
        Tolerances.parsed(("z:1",), ()).check(["x", "y"])
    assert "x, y" in caught.value.remedy


def test_a_value_fails_beyond_both_tolerances_only() -> None:
    reference = np.array([[1.0, 100.0, 0.0, 1.0]], np.float32)
    output = np.array([[1.005, 100.5, 0.02, 1.2]], np.float32)  # within both, relative, neither, neither
    found = judged([reference], [output], Tolerances.parsed(("0.01",), ("0.01",)))
    assert found.tolerance is not None and (found.tolerance.beyond, found.tolerance.values) == (2, 4)
    assert "2 of 4 values" in failures(found)[0]
    assert not failures(judged([reference], [output], Tolerances.parsed(("0.6",), ())))


def test_values_are_counted_over_all_samples_and_shapes() -> None:
    references = [np.zeros((1, 3), np.float32)] * 3
    outputs = [np.zeros((1, 3), np.float32), np.full((1, 3), 1.0, np.float32), np.zeros((1, 2), np.float32)]
    found = judged(references, outputs, Tolerances.parsed(("0.5",), ()))
    assert found.tolerance is not None and (found.tolerance.beyond, found.tolerance.values) == (6, 9)


def test_a_value_that_is_not_finite_is_beyond_every_tolerance() -> None:
    reference = np.ones((1, 3), np.float32)
    found = judged([reference], [np.array([[1, np.nan, np.inf]], np.float32)], Tolerances.parsed(("1e9",), ("1e9",)))
    assert found.tolerance is not None and found.tolerance.beyond == 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", [np.float32, np.float16, np.int32, np.bool_])
def test_tolerances_judge_as_polygraphy_does(kind: type) -> None:
    comparator = pytest.importorskip("polygraphy.comparator", reason="Polygraphy is not installed")
    simple = getattr(comparator, "SimpleCompareFunc", None) or comparator.CompareFunc.simple  # before 0.53

    rng = np.random.default_rng(0)
    verdicts = set()
    for _ in range(100):
        reference = rng.integers(-3, 4, (1, 5)).astype(kind)
        noise = rng.standard_normal(5) * 10 ** rng.uniform(-4, 1)
        output = (reference + noise).astype(kind)
        atol, rtol = 10 ** rng.uniform(-3, 1, 2)
        results = (comparator.IterationResult({"y": array}) for array in (output, reference))
        match = bool(simple(atol=atol, rtol=rtol)(*results)["y"])
        own = not failures(judged([reference], [output], Tolerances.parsed((repr(float(atol)),), (repr(float(rtol)),))))
        assert own == match, (reference, output, atol, rtol)
        verdicts.add(own)
    assert len(verdicts) == 2
