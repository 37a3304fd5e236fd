"""Sensitivity: what segments compute, and what errors are against one session per region."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np
import onnx_ir as ir
import pytest
from sensitivity_nets import NODES, REGIONS, SAMPLES, base_model, quantized

from trtopt.accuracy.compare import Accumulator, compare
from trtopt.accuracy.segments import SegmentedModel
from trtopt.accuracy.sensitivity import Sampling, growth, sensitivity
from trtopt.errors import InvalidModelError
from trtopt.events import Event
from trtopt.report.schema.build import OutputAccuracy
from trtopt.support.ort_session import OrtSession
from trtopt.support.precision import Precision

BASE = base_model()
QUANTIZED = quantized(BASE)


def exactly(nodes: Collection[str], dtype: Precision = Precision.INT8) -> dict[str, OutputAccuracy]:
    """The outputs' errors with these nodes in 8 bits, by a session of the whole model."""
    with OrtSession(BASE) as before, OrtSession(quantized(BASE, nodes, dtype), keep_qdq=True) as after:
        return compare(before, after, SAMPLES)


@pytest.mark.parametrize("segments", [1, 2, 4])
@pytest.mark.parametrize("nodes", [(), ("conv1",), ("conv2", "conv3"), ("conv3",), ("conv4", "head"), NODES])
def test_a_segmented_model_computes_what_the_whole_does(segments: int, nodes: tuple[str, ...]) -> None:
    with (
        OrtSession(quantized(BASE, nodes), keep_qdq=True) as whole,
        SegmentedModel(BASE, QUANTIZED, NODES, segments=segments) as model,
    ):
        assert model.output_names == whole.output_names
        plain = model.run(SAMPLES[0])
        for earlier in (None, plain, model.run(SAMPLES[0], NODES, plain)):
            found = model.outputs(model.run(SAMPLES[0], nodes, earlier))
            for value, expected in zip(found, whole.run(SAMPLES[0]), strict=True):
                np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)


def test_only_what_depends_on_the_difference_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    original = OrtSession.run

    def counted(self: OrtSession, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        runs.append(1)
        return original(self, feeds)

    monkeypatch.setattr(OrtSession, "run", counted)
    with SegmentedModel(BASE, QUANTIZED, NODES, segments=4) as model:
        plain = model.run(SAMPLES[0])
        parts = len(runs)
        assert parts == 4
        runs.clear()
        model.run(SAMPLES[0], ("head",), plain)
        assert len(runs) == 1
        runs.clear()
        model.run(SAMPLES[0], (), plain)
        assert not runs


def test_a_node_without_an_8_bit_form_is_refused() -> None:
    with pytest.raises(ValueError, match="scale"):
        SegmentedModel(BASE, QUANTIZED, ["scale"])


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_errors_are_those_of_a_session_per_region(dtype: Precision) -> None:
    with SegmentedModel(BASE, quantized(BASE, dtype=dtype), NODES) as model:
        found = sensitivity(model, REGIONS, SAMPLES, sampling=Sampling(len(SAMPLES)))
    assert list(found.regions) == list(REGIONS)
    assert found.samples == len(SAMPLES)
    for name, nodes in {**REGIONS, "": NODES}.items():
        region = found.regions[name] if name else found.together
        assert region.samples == len(SAMPLES)
        for output, expected in exactly(nodes, dtype).items():
            error = region.outputs[output]
            assert error.sqnr_db == pytest.approx(expected.sqnr_db, abs=0.05)
            assert error.change == error.noise_to_signal
            assert error.standard_error_db == 0
            if expected.top1_agreement is not None:
                assert 1 - error.disagreement == pytest.approx(expected.top1_agreement)


def test_the_worst_output_gives_the_error_and_untouched_outputs_have_none() -> None:
    with SegmentedModel(BASE, QUANTIZED, NODES) as model:
        found = sensitivity(model, REGIONS, SAMPLES).regions["f"]
    assert found.worst == "scores"
    assert found.error == found.outputs["scores"].noise_to_signal > 0
    assert found.outputs["r2"].noise_to_signal == 0
    assert math.isinf(found.outputs["r2"].sqnr_db)


def test_with_nodes_always_in_8_bits_a_region_is_taken_back_or_added() -> None:
    always = ("conv1", "conv2", "conv3")
    with SegmentedModel(BASE, QUANTIZED, NODES) as model:
        found = sensitivity(model, REGIONS, SAMPLES, always=always, sampling=Sampling(len(SAMPLES)))
    before = _noise(exactly(always)["scores"])
    for name, nodes in REGIONS.items():
        region = found.regions[name]
        after = _noise(exactly(set(always) ^ set(nodes))["scores"])
        assert region.outputs["scores"].noise_to_signal == pytest.approx(after, rel=0.02)
        assert region.outputs["scores"].change == pytest.approx(after - before, rel=0.05, abs=0.02 * before)
    assert found.regions["x"].change < 0 < found.regions["f"].change


def test_each_sample_is_used_equally_often_and_no_region_sees_one_twice() -> None:
    seen: list[tuple[int, frozenset[str]]] = []

    class Spy(SegmentedModel):
        def run(self, feeds, exchanged=(), earlier=None):  # type: ignore[no-untyped-def]
            if exchanged:
                seen.append((next(i for i, item in enumerate(SAMPLES) if item is feeds), frozenset(exchanged)))
            return super().run(feeds, exchanged, earlier)

    with Spy(BASE, QUANTIZED, NODES) as model:
        sensitivity(model, REGIONS, SAMPLES, sampling=Sampling(4))
    single = [item for item in seen if item[1] != frozenset(NODES)]
    assert len(single) == len(set(single)) == 4 * len(REGIONS)
    assert {sum(index == which for index, _ in single) for which in range(len(SAMPLES))} == {2}


def test_figures_do_not_depend_on_the_threads_and_follow_the_seed() -> None:
    with SegmentedModel(BASE, QUANTIZED, NODES) as model:
        first, again, other = (sensitivity(model, REGIONS, SAMPLES, sampling=Sampling(3, seed)) for seed in (1, 1, 2))
    assert first == again
    assert first.regions != other.regions


def test_the_standard_error_is_that_of_the_estimate() -> None:
    with SegmentedModel(BASE, QUANTIZED, NODES) as model:
        exact = sensitivity(model, REGIONS, SAMPLES, sampling=Sampling(len(SAMPLES))).regions
        estimates = [sensitivity(model, REGIONS, SAMPLES, sampling=Sampling(3, seed)).regions for seed in range(40)]
    for name in REGIONS:
        truth = exact[name].outputs["scores"].sqnr_db
        found = [item[name].outputs["scores"] for item in estimates]
        spread = math.sqrt(sum((item.sqnr_db - truth) ** 2 for item in found) / len(found))
        said = math.sqrt(sum((item.standard_error_db or 0) ** 2 for item in found) / len(found))
        assert spread / 2 < said < 2 * spread


def test_an_output_that_is_not_finite_is_an_infinite_error() -> None:
    broken = base_model()
    broken.graph.initializers["w5"].const_value = ir.tensor(np.full((16, 10), 3e38, np.float32), name="w5")
    with SegmentedModel(BASE, broken, ["head"]) as model:
        found = sensitivity(model, {"f": ("head",)}, SAMPLES).regions["f"]
    assert found.error == math.inf
    assert found.outputs["scores"].sqnr_db == -math.inf


def test_progress_is_told_run_by_run() -> None:
    events: list[Event] = []
    with SegmentedModel(BASE, QUANTIZED, NODES) as model:
        sensitivity(model, REGIONS, SAMPLES, sampling=Sampling(2), on_event=events.append)
    assert [event.kind for event in (events[0], events[-1])] == ["start", "end"]
    assert events[0].total == sum(event.kind == "advance" for event in events) == 2 * len(REGIONS) + len(SAMPLES)


def test_a_sample_that_the_model_refuses_ends_it_with_the_runtime_s_words() -> None:
    with SegmentedModel(BASE, QUANTIZED, NODES) as model, pytest.raises(InvalidModelError, match="fails on an input"):
        sensitivity(model, REGIONS, [*SAMPLES, {"x": np.zeros((1, 4, 8, 8), np.float32)}])


def test_growth_is_the_error_of_what_each_region_reads_and_gives() -> None:
    steps = growth(BASE, QUANTIZED, REGIONS, SAMPLES, most_samples=len(SAMPLES))
    assert [step.node for step in steps] == ["conv1", "conv2", "conv4", "head"]
    assert math.isinf(steps[0].input_sqnr_db)
    names = ["r1", "c2", "r2", "c4", "f", "scores"]
    sums = {name: Accumulator() for name in names}
    with OrtSession(BASE, names) as before, OrtSession(QUANTIZED, names, keep_qdq=True) as after:
        for feeds in SAMPLES:
            for name, one, two in zip(names, before.run(feeds), after.run(feeds), strict=True):
                sums[name].update(one, two)
    for step, reads, gives in zip(steps[1:], names[::2], names[1::2], strict=True):
        assert step.input_sqnr_db == pytest.approx(sums[reads].result().sqnr_db, abs=1e-3)
        assert step.output_sqnr_db == pytest.approx(sums[gives].result().sqnr_db, abs=1e-3)
        assert step.added == pytest.approx(_noise(sums[gives].result()) - _noise(sums[reads].result()))


def _noise(item: OutputAccuracy) -> float:
    return float(10 ** (-item.sqnr_db / 10))
