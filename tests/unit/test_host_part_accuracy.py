"""What is said of outputs that the host makes of what the engine passes."""

from __future__ import annotations

import numpy as np
import pytest

from trtopt.accuracy.compare import compare
from trtopt.accuracy.metric import gate
from trtopt.config import AccuracyBudget
from trtopt.errors import InvalidModelError
from trtopt.report.schema.build import AccuracyRecord, OutputAccuracy
from trtopt.support.ort_session import Feeds


class Fixed:
    """A runner that gives one array per call."""

    def __init__(self, *arrays: np.ndarray) -> None:
        self.output_names: tuple[str, ...] = ("boxes",)
        self._arrays = iter(arrays)

    def run(self, feeds: Feeds) -> list[np.ndarray]:
        return [next(self._arrays)]


def test_another_number_of_boxes_is_counted_and_not_compared() -> None:
    full, less = np.ones((3, 4), np.float32), np.ones((2, 4), np.float32)
    found = compare(Fixed(full, full), Fixed(full, less), [{}, {}], varying=["boxes"])["boxes"]
    assert found.shapes_differ == 1 and np.isnan(found.sqnr_db) and found.top1_agreement is None
    with pytest.raises(InvalidModelError, match="fault of a rewrite"):
        compare(Fixed(full), Fixed(less), [{}])


def test_gates_judge_the_tensors_between_in_place_of_what_the_host_makes_of_them() -> None:
    differ = OutputAccuracy(float("nan"), float("nan"), float("nan"), None, shapes_differ=2)
    record = AccuracyRecord(
        4, "eval", "onnx-only", {"boxes": differ, "scores": OutputAccuracy(30, 1, 0, None)}, host_outputs=("boxes",)
    )
    assert gate(record, AccuracyBudget(0.1, 20)) == ()
    (failure,) = gate(record, AccuracyBudget(sqnr_db=40))
    assert "output scores" in failure
