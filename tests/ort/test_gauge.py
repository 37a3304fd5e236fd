"""What a search is told of a point: on few samples where these settle it, and whether it holds with room to spare."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from trtopt.accuracy import reference
from trtopt.config.budget import AccuracyBudget, Floor
from trtopt.graph.artifact import InputSpec
from trtopt.pipeline import verify as verification
from trtopt.pipeline.gauge import Gauge
from trtopt.pipeline.verify import Verification
from trtopt.precision.observe.samples import open_samples
from trtopt.precision.observe.stream import FEW_ROWS, SomeFirst, SomeSamples
from trtopt.support.ort_session import Feeds, OrtSession

ROWS = 64
SCORES = np.eye(10, dtype=np.float32)[np.arange(ROWS) % 10] + np.arange(ROWS, dtype=np.float32)[:, None] / ROWS
"""The largest score of each row is 1 above all others; no two rows are equal."""


def network(added: float, scores: bool = True) -> ir.Model:
    """Scores as they come, of a product, the first larger by ``added``; else hidden states."""
    row = ", ".join(str(value) for value in [added] + [0.0] * 9)
    one = ", ".join(str(float(value)) for value in np.eye(10).reshape(-1))
    constants = f"float[10] b = {{{row}}}, float[10,10] e = {{{one}}}"
    body = "s = MatMul(x, e) y = Add(s, b)" if scores else "y = Add(x, b)"
    text = f"g (float[N,10] x) => (float[N,10] y) <{constants}> {{ {body} }}"
    return ir.from_onnx_text('<ir_version: 9, opset_import: ["" : 19]>\n' + text)


def gauge(budget: AccuracyBudget, scores: bool = True) -> Gauge:
    samples = open_samples({"x": SCORES}, [InputSpec("x", np.dtype(np.float32), ("N", 10))])
    reference = network(0.0, scores)
    return Gauge(Verification(reference, reference, samples, "eval", None, tensors=False, floor=budget.floor), budget)


def test_of_hidden_states_the_cosine_is_held_and_no_answers() -> None:
    """The first element becomes the largest of nine rows in ten; the cosine is 0.78."""
    found = {}
    for scores in (True, False):
        judge = gauge(AccuracyBudget(0.3), scores)
        found[scores] = judge.evaluate(network(1.2, scores)).drop
        assert (judge.budget().aim is not None) == scores
    assert found[True] > 0.3 > found[False] > 0


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every run of a network."""
    found: list[int] = []

    class Counted(OrtSession):
        def run(self, feeds: Feeds) -> list[np.ndarray]:
            found.append(len(feeds["x"]))
            return super().run(feeds)

    for module in (verification, reference):
        monkeypatch.setattr(module, "OrtSession", Counted)
    return found


@pytest.mark.parametrize("added", [5.0, 0.0])
def test_a_few_samples_settle_what_is_hopeless_and_what_is_exact(runs: list[int], added: float) -> None:
    """An answer in ten differs too often: of the 64 samples one may not differ where 1 % is allowed. The reference, run
    on all of them, says which come first."""
    judge = gauge(AccuracyBudget(0.01))
    found = judge.evaluate(network(added))
    assert found.is_partial and judge.budget().holds(found) == (added == 0)
    assert sum(runs) == ROWS + (FEW_ROWS if added == 0 else FEW_ROWS // 2)


def test_samples_whose_best_scores_are_near_each_other_come_first(runs: list[int]) -> None:
    """Two of the last rows change their answer, where 98 % have to agree: eight rows say so, and no other is taken to
    differ."""
    rows = SCORES.copy()
    for row in (51, 63):
        rows[row, 0] = rows[row].max() - 0.05
    samples = open_samples({"x": rows}, [InputSpec("x", np.dtype(np.float32), ("N", 10))])
    budget = AccuracyBudget(floor=Floor(0.98, 20.0))
    judge = Gauge(
        Verification(network(0.0), network(0.0), samples, "eval", None, tensors=False, floor=budget.floor), budget
    )
    found = judge.evaluate(network(0.1))
    assert found.is_partial and not judge.budget().holds(found)
    assert found.disagreement == found.drop == 2 / ROWS and sum(runs) == ROWS + FEW_ROWS // 2


@pytest.mark.parametrize("wrong", [slice(0, FEW_ROWS), slice(0, 0)])
def test_the_floor_of_values_is_measured_on_all_samples(wrong: slice, runs: list[int]) -> None:
    """Of the first rows every value is off by a tenth of itself, and of all rows by a thousandth of the signal."""
    rows = SCORES.copy()
    rows[wrong] *= 2
    text = "g (float[N,10] x) => (float[N,10] y) <float m = {3.0}> { y = Min(x, m) }"
    capped = ir.from_onnx_text('<ir_version: 9, opset_import: ["" : 19]>\n' + text)
    samples = open_samples({"x": rows}, [InputSpec("x", np.dtype(np.float32), ("N", 10))])
    job = Verification(network(0.0, scores=False), capped, samples, "eval", None, tensors=False)
    judge = Gauge(job, AccuracyBudget(floor=Floor(0.98, 20.0)))
    judge.keeps_floor(capped)
    assert sum(runs) == 2 * ROWS and judge.known(capped) is not None


def test_the_first_samples_of_some_are_read_once(runs: list[int]) -> None:
    rows = np.arange(12, dtype=np.float32)[:, None]
    whole = open_samples({"x": rows}, [InputSpec("x", np.dtype(np.float32), (1, 1))])
    some = SomeFirst(whole, (7, 2))
    order = [float(sample["x"][0, 0]) for sample, _ in some.with_rows()]
    assert order == [7.0, 2.0, *(float(i) for i in range(12) if i not in (7, 2))] and some.count == 12
    assert [float(sample["x"][0, 0]) for sample in some] == order and not runs
    assert list(SomeSamples(whole, 4).indices) == [0, 3, 6, 9]


def test_answers_that_are_far_from_each_other_are_not_run(runs: list[int]) -> None:
    """One answer of the few differs, of the others none can: it is one of 64, where 98 % have to agree."""
    rows = SCORES.copy()
    rows[63, 0] = rows[63].max() - 0.05
    samples = open_samples({"x": rows}, [InputSpec("x", np.dtype(np.float32), ("N", 10))])
    budget = AccuracyBudget(floor=Floor(0.98, 20.0))
    job = Verification(network(0.0), network(0.0), samples, "eval", None, tensors=False, floor=budget.floor)
    judge = Gauge(job, budget)
    found = judge.evaluate(network(0.1))
    assert found.is_partial and judge.budget().holds(found)
    assert found.disagreement == found.drop == 1 / ROWS and sum(runs) == ROWS + FEW_ROWS


def test_what_is_in_doubt_runs_on_all_samples_and_is_known_then(runs: list[int]) -> None:
    judge, near = gauge(AccuracyBudget(0.01)), network(0.9)
    found = judge.evaluate(near)
    assert not found.is_partial and judge.budget().holds(found) and sum(runs) == 2 * ROWS
    assert judge.known(near) is not None and judge.evaluate(near) == found and sum(runs) == 2 * ROWS


@pytest.mark.parametrize(("added", "holds"), [(0.02, True), (0.1, False), (2.0, False)])
def test_it_holds_clearly_where_ten_times_the_noise_would_hold(added: float, holds: bool) -> None:
    """The signal to noise is 40 dB, 27 dB and 1 dB."""
    judge = gauge(AccuracyBudget(floor=Floor(0.98, 20.0)), scores=False)
    assert judge.holds_clearly(network(added, scores=False)) == holds


def test_both_checks_of_a_clear_margin_share_their_runs(runs: list[int]) -> None:
    judge, near = gauge(AccuracyBudget(floor=Floor(0.98, 20.0)), scores=False), network(0.02, scores=False)
    assert judge.holds_clearly(near) and sum(runs) == 2 * ROWS
    assert judge.measure(near).samples == ROWS and sum(runs) == 2 * ROWS


@pytest.mark.parametrize(("wrong", "holds"), [(slice(1, None, 4), False), (slice(1, 2), False), (slice(0, 0), True)])
def test_it_does_not_hold_clearly_where_samples_beyond_the_few_are_wrong(wrong: slice, holds: bool) -> None:
    """Of 64 rows the few are every fourth; of others the two largest scores are capped to one. A single answer that
    differs is within 2 %, and more than half of that."""
    rows = SCORES.copy()
    rows[wrong] = [2.6, 3.0] + [0.0] * 8
    text = "g (float[N,10] x) => (float[N,10] y) <float m = {2.5}> { y = Min(x, m) }"
    capped = ir.from_onnx_text('<ir_version: 9, opset_import: ["" : 19]>\n' + text)
    samples = open_samples({"x": rows}, [InputSpec("x", np.dtype(np.float32), ("N", 10))])
    job = Verification(network(0.0), capped, samples, "eval", None, tensors=False)
    assert Gauge(job, AccuracyBudget(0.02)).holds_clearly(capped) == holds
