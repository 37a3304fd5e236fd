"""How inferences are timed, what is reported and exported of them, and what they are given."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trtopt.analysis.profile import timing_options
from trtopt.config import ProfileConfig
from trtopt.errors import UsageError
from trtopt.graph.artifact import InputSpec
from trtopt.precision.observe.polygraphy import write_inputs
from trtopt.profiling.export import profile_json, times_json
from trtopt.profiling.ingest import ingest
from trtopt.profiling.inputs import feeds_of
from trtopt.profiling.measured import RunLimits, RunTimes, until_stable
from trtopt.profiling.timing import DEFAULT_TIMING, InferenceTiming, percentile


def test_a_percentile_is_the_one_that_trtexec_takes() -> None:
    values = np.arange(100.0)[::-1]
    assert [percentile(values, percent) for percent in (0, 50, 90, 95, 99, 100)] == [0.0, 49.0, 89.0, 94.0, 99.0, 99.0]
    assert percentile(np.array([7.0]), 99) == 7.0


def test_the_options_of_trtexec_mean_what_they_mean_there() -> None:
    assert timing_options(ProfileConfig()) == DEFAULT_TIMING and not DEFAULT_TIMING.limits.fixed
    found = timing_options(ProfileConfig(warmup=500, iterations=100))
    assert (found.limits.warm_up_seconds, found.limits.min_runs, found.limits.min_seconds) == (0.5, 100, 3.0)
    found = timing_options(ProfileConfig(duration=7, inf_streams=2, data_transfers=True, no_cuda_graph=True))
    assert found.limits.fixed and (found.limits.min_runs, found.limits.min_seconds) == (10, 7.0)
    assert (found.streams, found.transfers, found.graph) == (2, True, False)


def test_a_fixed_number_of_runs_all_count_and_last_as_long_as_was_asked_for() -> None:
    numbers, clock = itertools.count(1), itertools.count()
    limits = RunLimits(warm_up_runs=2, warm_up_seconds=0.0, min_runs=5, min_seconds=9.0, fixed=True)
    found = until_stable(lambda: float(next(numbers)), limits, lambda: float(next(clock)))
    assert found.us[0] == 3.0 and len(found.us) >= 5 and not found.stable  # none of the first is left out
    at_once = replace(limits, min_seconds=0.0)
    assert len(until_stable(lambda: 1.0, at_once).us) == 5


RUNS = [[("conv", 30.0), ("copy", 10.0)], [("conv", 50.0), ("copy", 10.0)], [("conv", 31.0), ("copy", 10.0)]]
LAYERS = '{"Layers": ["conv", "copy"], "Bindings": []}'


def test_what_is_exported_can_be_read_again(tmp_path: Path) -> None:
    us = np.array([40.0, 41.0, 90.0])
    ends = np.cumsum(us) / 1e3
    trace = np.stack([ends, ends + 0.004, *[ends - us / 1e3] * 3, *[ends] * 3], axis=1)
    timing = InferenceTiming(RunTimes(tuple(us), stable=True), trace)
    for name, text in (("l", LAYERS), ("p", profile_json(RUNS)), ("t", times_json(timing))):
        (tmp_path / name).write_text(text)
    found = ingest(tmp_path / "l", tmp_path / "p", tmp_path / "t")
    assert (found.end_to_end_us, found.host_us) == (pytest.approx(41.0), pytest.approx(4.0))
    assert [layer.measured_us for layer in found.layers] == [pytest.approx(37.0), pytest.approx(10.0)]


INPUTS = (InputSpec("image", np.dtype(np.float32), ("?", 2)), InputSpec("a:b", np.dtype(np.int32), (2,)))
IDS = np.array([5, 7], np.int32)


def inputs_of(files: str, shapes: dict[str, tuple[int, ...]] | None = None) -> dict[str, np.ndarray]:
    return dict(feeds_of(INPUTS, shapes or {}, {"image": (4, 2)}.__getitem__, files))


def test_inputs_are_read_from_the_files_that_trtexec_reads(tmp_path: Path) -> None:
    image = np.arange(8, dtype=np.float32).reshape(4, 2)
    (tmp_path / "image.bin").write_bytes(image.tobytes())
    (tmp_path / "ids.bin").write_bytes(IDS.tobytes())
    found = inputs_of(f"image:{tmp_path}/image.bin,'a:b':{tmp_path}/ids.bin")
    np.testing.assert_array_equal(found["image"], image)
    np.testing.assert_array_equal(found["a:b"], IDS)


def test_arrays_bring_their_shape_and_what_is_left_out_is_random(tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", image=np.ones((3, 2)), __labels__=np.arange(3))
    found = inputs_of(str(tmp_path / "in.npz"))
    assert found["image"].shape == (3, 2) and found["image"].dtype == np.float32 and found["a:b"].shape == (2,)
    np.save(tmp_path / "ids.npy", IDS.astype(np.int64))
    np.testing.assert_array_equal(inputs_of(f"a:b:{tmp_path}/ids.npy")["a:b"], IDS)


_SCRIPT = """
import numpy
def load_data():
    yield {"image": numpy.full((3, 2), 2.0, "float32"), "a:b": numpy.array([5, 7])}
    raise RuntimeError("the first is enough")
"""


@pytest.mark.parametrize("source", ["saved.json", "iterations", "arrays", "loader.py", "loader.py:load_data"])
def test_inputs_are_read_from_what_polygraphy_saves_and_loads(tmp_path: Path, source: str) -> None:
    """The first inference of several, whole: batches are not cut to rows."""
    feeds = [{"image": np.full((3, 2), value, np.float32), "a:b": IDS} for value in (2.0, 3.0)]
    write_inputs(tmp_path / "saved.json", feeds)
    for folder in ("iterations", "arrays"):
        (tmp_path / folder).mkdir()
    for index, feed in enumerate(feeds):
        write_inputs(tmp_path / "iterations" / f"{index}.json", [feed])
        np.savez(tmp_path / "arrays" / f"{index}.npz", **feed)
    (tmp_path / "loader.py").write_text(_SCRIPT)
    found = inputs_of(f"{tmp_path}/{source}")
    np.testing.assert_array_equal(found["image"], feeds[0]["image"])
    np.testing.assert_array_equal(found["a:b"], IDS)
    assert found["a:b"].dtype == np.int32


def test_what_polygraphy_left_out_is_random(tmp_path: Path) -> None:
    write_inputs(tmp_path / "in.json", [{"image": np.ones((3, 2), np.float32)}])
    found = inputs_of(str(tmp_path / "in.json"))
    assert found["image"].shape == (3, 2) and found["a:b"].shape == (2,)


@pytest.mark.parametrize(
    ("files", "shapes", "words"),
    [
        ("{}/none.json", {}, "no feed"),
        ("{}/other.json", {}, "no input 'other'"),
        ("{}/missing.py", {}, "does not exist"),
        ("{}", {}, "An .npy holds one array"),
        ("image", {}, "names no input"),
        ("other:{}/seven.bin", {}, "no input 'other'"),
        ("image:{}/missing.bin", {}, "missing.bin"),
        ("image:{}/seven.bin", {}, "less than the 32 bytes"),
        ("image:{}/seven.bin", {"image": (3, 2)}, "more than the 24 bytes"),
        ("image:{}/three.npy", {}, "image"),
        ("a:b:{}/half.npy", {}, "are float32, the input is int32"),
        ("image:{}/pair.npy", {"image": (3, 2)}, "--shapes says"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    tmp_path: Path, files: str, shapes: dict[str, tuple[int, ...]], words: str
) -> None:
    (tmp_path / "seven.bin").write_bytes(np.zeros(7, np.float32).tobytes())
    np.save(tmp_path / "three.npy", np.zeros((1, 3), np.float32))
    np.save(tmp_path / "half.npy", np.zeros(2, np.float32))
    np.save(tmp_path / "pair.npy", np.zeros((1, 2), np.float32))
    write_inputs(tmp_path / "none.json", [])
    write_inputs(tmp_path / "other.json", [{"other": IDS}])
    with pytest.raises(UsageError) as caught:
        inputs_of(files.format(tmp_path), shapes)
    assert words in str(caught.value)


SHAPED = (InputSpec("x", np.dtype(np.float32), ("?", 8)), InputSpec("s", np.dtype(np.int64), (2,)))


def shaped(shapes: dict[str, tuple[int, ...]], files: str | None = None) -> tuple[tuple[int, ...], list[int]]:
    """The shape of x and the values of the shape tensor s, whose engine is tuned for 4 rows."""
    found = feeds_of(SHAPED, shapes, {"x": (4, 8)}.__getitem__, files, {"s": (4, 8)})
    return found["x"].shape, found["s"].tolist()


def test_values_of_a_shape_tensor_are_its_optimum_or_what_is_asked_for_or_in_a_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", x=np.ones((3, 8), np.float32), s=np.array([6, 4]))
    assert shaped({}) == ((4, 8), [4, 8])
    assert shaped({"x": (2, 8), "s": (8, 2)}) == ((2, 8), [8, 2])
    assert shaped({}, str(tmp_path / "in.npz")) == ((3, 8), [6, 4])
    with pytest.raises(UsageError, match="values of s are in --shapes and in a file"):
        shaped({"s": (6, 4)}, str(tmp_path / "in.npz"))
