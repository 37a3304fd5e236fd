"""What is decided about a measurement on a GPU, without one."""

from __future__ import annotations

import dataclasses
import itertools
from decimal import Decimal

import numpy as np
import pytest

from trtopt.errors import EngineBuildError, UsageError
from trtopt.graph.artifact import InputSpec
from trtopt.hardware.clocks import Clocks
from trtopt.profiling.engine_layers import LayerTime
from trtopt.profiling.gpu import (
    accuracy_of,
    conditions,
    inspected,
    layer_times,
    named_inputs,
    profiled_runs,
    warnings_of,
)
from trtopt.profiling.inputs import feeds_of
from trtopt.profiling.measured import RunLimits, RunTimes
from trtopt.profiling.timing import InferenceTiming
from trtopt.report.schema.manifest import EngineTensor
from trtopt.support.ort_session import Feeds


def time(name: str, *figures: float) -> LayerTime:
    return LayerTime(name, *map(Decimal, figures))


def test_layers_of_one_name_are_told_apart_in_the_order_they_run() -> None:
    runs = [[("conv", 3.0), ("copy", 1.0), ("copy", 2.0)], [("conv", 5.0), ("copy", 1.5), ("copy", 2.5)]]
    assert layer_times(runs) == [
        time("conv", 4.0, 4.0, 1.0),
        time("copy", 1.25, 1.25, 0.25),
        time("copy", 2.25, 2.25, 0.25),
    ]


def test_a_layer_that_a_run_leaves_out_took_no_time_in_it() -> None:
    runs = [[("a", 1.0)], [("a", 2.0), ("b", 4.0)], [("b", 5.0)]]
    assert layer_times(runs) == [time("a", 1.0, 1.0, 1.0), time("b", 3.0, 4.0, 1.0)]


def test_runs_are_kept_from_where_their_sum_stands_still() -> None:
    slow = itertools.chain((10.0 - run for run in range(8)), itertools.repeat(2.0))
    limits = RunLimits(warm_up_runs=0, warm_up_seconds=0.0, min_seconds=0.0)
    runs, stable = profiled_runs(lambda: [("a", next(slow)), ("b", 1.0)], limits)
    assert stable
    assert sum(us for _, us in runs[-1]) == 3.0
    assert runs[0][0][1] < 10.0  # the first quarter is left out


def test_runs_that_drift_are_kept_and_said_to_drift() -> None:
    growing = itertools.count(1.0)
    limits = RunLimits(warm_up_runs=2, warm_up_seconds=0.0, min_seconds=0.0, max_runs=20)
    runs, stable = profiled_runs(lambda: [("a", next(growing))], limits)
    assert not stable
    assert [us for run in runs for _, us in run] == [float(us) for us in range(2 + 5 + 1, 2 + 20 + 1)]


def timing(device_us: float, host_us: float, *, stable: bool = True) -> InferenceTiming:
    host, end = host_us / 1e3, device_us / 1e3
    return InferenceTiming(RunTimes((device_us,) * 3, stable), np.array([[0, host, 0, 0, 0, end, end, end]] * 3))


LOAD = Clocks(1740.0, 1215.0, 1980.0, 2619.0, 61.0, 412.5, 700.0, ("software power cap", "sync boost"))
IDLE = Clocks(345.0, 1215.0, 1980.0, 2619.0, 40.0, None, 700.0, ())


def test_the_conditions_tell_both_ways_of_launching_and_the_clocks() -> None:
    found = conditions(timing(30.0, 80.0), timing(25.0, 4.0), {"": LOAD, "_before": IDLE})
    assert found["end_to_end"] == "cuda_graph"
    assert (found["stream_device_us"], found["stream_host_us"]) == (30.0, 80.0)
    assert (found["cuda_graph_device_us"], found["cuda_graph_host_us"]) == (25.0, 4.0)
    assert (found["cuda_graph_device_p99_us"], found["cuda_graph_inferences"]) == (25.0, 3)
    assert (found["sm_clock_mhz"], found["power_limit_w"], found["temperature_c"]) == (1740.0, 700.0, 61.0)
    assert found["clocks_held_by"] == "software power cap, sync boost"
    assert (found["sm_clock_mhz_before"], found["clocks_held_by_before"]) == (345.0, "none")
    assert found.keys().isdisjoint({"power_w_before", "max_sm_clock_mhz_before", "clocks_unknown"})


def test_without_a_graph_the_conditions_say_so() -> None:
    found = conditions(timing(30.0, 80.0), None, {"": Clocks(clocks_unknown="no answer")})
    assert found["end_to_end"] == "stream"
    assert [key for key in found if key.startswith("cuda_graph")] == []
    assert "sm_clock_mhz" not in found and found["clocks_unknown"] == "no answer"


def test_a_good_run_has_no_warnings() -> None:
    assert warnings_of(timing(30.0, 80.0), timing(25.0, 4.0), "", layers_stable=True, load=LOAD) == []


@pytest.mark.parametrize(
    ("stream", "graph", "refusal", "layers_stable", "load", "said"),
    [
        (timing(30.0, 80.0, stable=False), timing(25.0, 4.0), "", True, LOAD, ["(stream) did not settle", "3 samples"]),
        (timing(30.0, 80.0), timing(25.0, 4.0, stable=False), "", True, LOAD, ["(cuda_graph) did not settle"]),
        (timing(30.0, 8.0), None, "CUDA failed", True, LOAD, ["no CUDA graph", "CUDA failed"]),
        (timing(30.0, 4.0), timing(25.0, 24.0), "", True, LOAD, ["the host needs about as long"]),
        (timing(30.0, 80.0), timing(25.0, 4.0), "", False, LOAD, ["layers did not settle"]),
        (timing(30.0, 80.0), timing(25.0, 4.0), "", True, Clocks(clocks_unknown="no answer"), ["clocks", "no answer"]),
    ],
)
def test_each_weakness_of_a_run_is_a_warning(
    stream: InferenceTiming,
    graph: InferenceTiming | None,
    refusal: str,
    layers_stable: bool,
    load: Clocks,
    said: list[str],
) -> None:
    (warning,) = warnings_of(stream, graph, refusal, layers_stable=layers_stable, load=load)
    assert [part for part in said if part not in warning] == []


def test_the_inspectors_entries_are_taken_from_its_json() -> None:
    assert inspected('{"Layers": ["a", {"Name": "b"}], "Bindings": []}') == ["a", {"Name": "b"}]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"Layers": null}', '{"Layers": {"a": 1}}'])
def test_an_answer_without_layers_is_an_error_that_shows_it(text: str) -> None:
    with pytest.raises(EngineBuildError, match="not understood") as caught:
        inspected(text)
    assert caught.value.where == text


INPUTS = (
    InputSpec("image", np.dtype(np.float16), ("?", 3, 8, 8)),
    InputSpec("ids", np.dtype(np.int32), (2, 4)),
)
OPTIMUM = {"image": (4, 3, 8, 8)}


def test_inputs_are_random_and_dynamic_ones_at_the_optimum() -> None:
    feeds = feeds_of(INPUTS, {}, OPTIMUM.__getitem__)
    assert {name: (array.shape, array.dtype.name) for name, array in feeds.items()} == {
        "image": ((4, 3, 8, 8), "float16"),
        "ids": ((2, 4), "int32"),
    }
    assert np.ptp(feeds["image"]) > 1.0


def test_a_shape_that_is_asked_for_is_taken() -> None:
    assert feeds_of(INPUTS, {"image": (7, 3, 8, 8)}, OPTIMUM.__getitem__)["image"].shape == (7, 3, 8, 8)


def test_dimensions_of_one_name_have_one_size() -> None:
    ids, mask, types = (InputSpec(name, np.dtype(np.int64), ("N", "L")) for name in ("ids", "mask", "types"))
    unnamed = [dataclasses.replace(item, shape=("?", "?")) for item in (ids, mask, types)]
    tensors = [EngineTensor(item.name, "int64", item.shape) for item in (ids, mask, types)]
    assert named_inputs(unnamed, tensors) == [ids, mask, types] and named_inputs(unnamed, ()) == unnamed
    feeds = feeds_of((ids, mask, types), {"mask": (2, 5)}, {"ids": (8, 64), "types": (8, 64)}.__getitem__)
    assert {array.shape for array in feeds.values()} == {(2, 5)}
    alone = InputSpec("alone", np.dtype(np.float32), ("?", "L"))
    assert feeds_of((mask, alone), {"mask": (2, 5)}, {"alone": (8, 64)}.__getitem__)["alone"].shape == (8, 5)


@pytest.mark.parametrize("shapes", [{"other": (1,)}, {"image": (1, 4, 8, 8)}, {"ids": (3, 4)}, {"image": (1, 3, 8)}])
def test_a_shape_that_does_not_fit_is_a_usage_error(shapes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(UsageError, match="|".join(shapes)):
        feeds_of(INPUTS, shapes, OPTIMUM.__getitem__)


class Doubled:
    """A reference of two outputs: twice the input, and its sum."""

    output_names: tuple[str, ...] = ("twice", "total")

    def run(self, feeds: Feeds) -> list[np.ndarray]:
        return [2.0 * np.asarray(feeds["x"]), np.sum(feeds["x"], keepdims=True)]


def test_outputs_are_compared_with_the_references_by_name() -> None:
    feeds = {"x": np.arange(1.0, 5.0, dtype=np.float32).reshape(1, 4)}
    outputs = {"extra": np.zeros(1), "twice": 2.0 * feeds["x"] + np.float32(0.01)}
    found = accuracy_of(Doubled(), feeds, outputs)
    assert list(found) == ["twice"]
    assert found["twice"].max_abs == pytest.approx(0.01, rel=1e-4)
    assert found["twice"].sqnr_db == pytest.approx(10 * np.log10(120 / (4 * 0.01**2)), rel=1e-4)
