"""Statistics and INT8 ranges on distributions whose answers are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trtopt.precision.observe.ranges import METHODS, RangeTable, choose_amax
from trtopt.precision.observe.ranges import quantization_error as closed_form_error
from trtopt.precision.observe.statistics import StatsBuilder, TensorStats

RNG = np.random.default_rng(0)
GAUSSIAN = RNG.standard_normal(400_000).astype(np.float32)
RELU = np.maximum(GAUSSIAN, 0)
OUTLIER = np.concatenate([GAUSSIAN, [60.0]]).astype(np.float32)
LAPLACE = RNG.laplace(size=400_000).astype(np.float32)
UNIFORM = RNG.uniform(-1, 1, 400_000).astype(np.float32)


def amax(stats: TensorStats, method: str) -> float:
    """The range alone."""
    return choose_amax(stats, method)[0]


def stats_of(*arrays: np.ndarray, histogram: bool = True) -> TensorStats:
    builder = StatsBuilder(histogram)
    for array in arrays:
        builder.update(array)
    return builder.finish()


def int8_error(values: np.ndarray, top: float) -> float:
    """Mean squared error of symmetric INT8, by doing it."""
    step = top / 127
    rounded = np.clip(np.rint(values.astype(np.float64) / step), -127, 127) * step
    return float(np.mean((values - rounded) ** 2))


@pytest.mark.parametrize("histogram", [True, False])
def test_every_element_is_counted(histogram: bool) -> None:
    stats = stats_of(RELU.reshape(4, -1), GAUSSIAN[:99_991], histogram=histogram)
    seen = np.concatenate([RELU, GAUSSIAN[:99_991]])
    assert stats.count == seen.size
    assert (stats.minimum, stats.maximum) == (seen.min(), seen.max())
    assert stats.absmax == np.abs(seen).max()
    if histogram:
        assert stats.counts is not None
        assert stats.zeros == np.count_nonzero(seen == 0)
        assert stats.counts.sum() + stats.zeros == seen.size


@pytest.mark.parametrize("histogram", [True, False])
def test_the_statistics_do_not_depend_on_order_or_batches(histogram: bool) -> None:
    whole = stats_of(OUTLIER, histogram=histogram)
    shuffled = stats_of(*np.array_split(RNG.permutation(OUTLIER), 37), histogram=histogram)
    assert whole == shuffled
    assert whole != stats_of(OUTLIER[:-1], histogram=histogram)


@pytest.mark.parametrize("histogram", [True, False])
def test_nan_and_infinity_are_counted_apart(histogram: bool) -> None:
    stats = stats_of(np.array([1.0, np.nan, -np.inf, -3.0, np.inf, 0.0], np.float32), histogram=histogram)
    assert (stats.count, stats.nonfinite, stats.zeros) == (6, 3, 1 if histogram else None)
    assert (stats.minimum, stats.maximum) == (-3.0, 1.0)
    only = stats_of(np.array([np.nan], np.float32), histogram=histogram)
    assert (only.minimum, only.maximum, only.nonfinite, only.smallest_nonzero) == (0.0, 0.0, 1, 0.0)


def test_negative_zeros_are_zeros() -> None:
    stats = stats_of(np.array([-0.0, 0.0, -0.0, 2.0], np.float32))
    assert (stats.zeros, stats.count, stats.minimum, stats.absmax) == (3, 4, 0.0, 2.0)


@pytest.mark.parametrize("histogram", [True, False])
def test_the_smallest_magnitude_that_is_not_zero_is_kept(histogram: bool) -> None:
    values = np.array([0.0, -0.0, 1e-10, -1e-8, 2.0**-24, 1.0, -7.0, 3e-39], np.float32)
    stats = stats_of(values, histogram=histogram)
    assert stats.zeros == (2 if histogram else None)
    assert stats.smallest_nonzero == pytest.approx(3e-39, rel=1e-2)
    assert stats_of(values[:-1], histogram=histogram).smallest_nonzero == pytest.approx(1e-10, rel=1e-3)


def test_other_float_types_are_counted_as_float32() -> None:
    assert stats_of(GAUSSIAN.astype(np.float64)) == stats_of(GAUSSIAN)
    half = GAUSSIAN.astype(np.float16)
    assert stats_of(half) == stats_of(half.astype(np.float32))


@pytest.mark.parametrize("values", [GAUSSIAN, RELU, OUTLIER, UNIFORM], ids=["gaussian", "relu", "outlier", "uniform"])
@pytest.mark.parametrize("share", [1.3, 1.0, 0.7, 0.2, 0.01])
def test_the_quantization_error_equals_quantizing(values: np.ndarray, share: float) -> None:
    top = float(np.abs(values).max()) * share
    assert closed_form_error(stats_of(values), top) == pytest.approx(int8_error(values, top), rel=0.01)


def test_max_and_percentile_are_those_of_the_absolute_values() -> None:
    stats = stats_of(RELU, -2 * RELU)
    values = np.concatenate([RELU, 2 * RELU])
    assert amax(stats, "max") == values.max()
    assert amax(stats, "percentile") == pytest.approx(np.percentile(values, 99.99), rel=2e-3)


@pytest.mark.parametrize("values", [GAUSSIAN, RELU, UNIFORM, OUTLIER], ids=["gaussian", "relu", "uniform", "outlier"])
def test_mse_is_as_good_as_a_brute_force_search(values: np.ndarray) -> None:
    top = float(np.abs(values).max())
    best = min(int8_error(values, float(candidate)) for candidate in np.geomspace(top / 1000, top, 400))
    assert int8_error(values, amax(stats_of(values), "mse")) <= best * 1.01


def linear_bins_entropy(values: np.ndarray) -> float:
    """TensorRT's published algorithm (Migacz, GTC 2017): 2048 linear bins, 128 levels, zeros left out."""
    counts, edges = np.histogram(np.abs(values), 2048, (0, np.abs(values).max()))
    costs = {}
    for stop in range(128, 2049, 8):
        inside, level = counts[:stop].astype(float), np.arange(stop) * 128 // stop
        filled = np.bincount(level, inside > 0, 128)
        quantized = np.where(inside > 0, (np.bincount(level, inside, 128) / np.maximum(filled, 1))[level], 0)
        reference = inside.copy()
        reference[-1] += counts[stop:].sum()
        p, q = reference / reference.sum(), quantized / quantized.sum()
        costs[edges[stop]] = np.sum(p[p > 0] * np.log(p[p > 0] / np.maximum(q[p > 0], 1e-12)))
    return float(min(costs, key=costs.__getitem__))


def test_entropy_clips_a_heavy_tail_as_the_published_algorithm_does() -> None:
    found = amax(stats_of(LAPLACE), "entropy")
    assert found < 0.9 * np.abs(LAPLACE).max()
    assert found == pytest.approx(linear_bins_entropy(LAPLACE), rel=0.35)


def test_entropy_keeps_a_light_tail() -> None:
    assert amax(stats_of(UNIFORM), "entropy") == pytest.approx(1.0, rel=0.02)
    assert amax(stats_of(GAUSSIAN), "entropy") > 0.8 * np.abs(GAUSSIAN).max()


@pytest.mark.parametrize("method", ["percentile", "entropy", "auto"])
def test_one_outlier_does_not_set_the_range(method: str) -> None:
    assert amax(stats_of(OUTLIER), method) < 60 / 2


@pytest.mark.parametrize("method", METHODS)
def test_ranges_scale_with_the_tensor(method: str) -> None:
    assert amax(stats_of(GAUSSIAN * 1024), method) == pytest.approx(1024 * amax(stats_of(GAUSSIAN), method), rel=1e-6)


def test_auto_takes_the_method_with_the_least_error_and_names_it() -> None:
    for values in (GAUSSIAN, RELU, UNIFORM, OUTLIER):
        stats = stats_of(values)
        chosen, name = choose_amax(stats, "auto")
        errors = {method: closed_form_error(stats, amax(stats, method)) for method in METHODS}
        assert chosen == amax(stats, name)
        assert errors[name] == min(errors.values())


@pytest.mark.parametrize("method", [*METHODS, "auto"])
def test_constants_and_zeros_have_a_range(method: str) -> None:
    assert amax(stats_of(np.zeros(1000, np.float32)), method) == 0.0
    assert closed_form_error(stats_of(np.zeros(10, np.float32)), 1.0) == 0.0
    assert amax(stats_of(np.full(1000, -2.5, np.float32)), method) == pytest.approx(2.5, rel=1e-3)


def test_unknown_methods_and_missing_histograms_are_refused() -> None:
    with pytest.raises(ValueError, match="median"):
        amax(stats_of(GAUSSIAN), "median")
    with pytest.raises(ValueError, match="histogram"):
        amax(stats_of(GAUSSIAN, histogram=False), "max")


def table() -> RangeTable:
    return RangeTable(
        {"a/b": stats_of(GAUSSIAN), "zero": stats_of(np.zeros(3, np.float32)), "r": stats_of(RELU, histogram=False)}
    )


def test_a_table_survives_being_written() -> None:
    again = RangeTable.from_bytes(table().to_bytes())
    assert dict(again.stats) == dict(table().stats)
    assert table().to_bytes() == table().to_bytes()
    assert again.covers({"a/b", "zero"}, {"r"})
    assert not again.covers({"r"}, ())
    assert not again.covers((), {"missing"})


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "text", "version"])
def test_a_damaged_table_is_refused(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(table().to_bytes())
    if damage == "truncate":
        data = data[: len(data) // 2]
    elif damage == "flip":
        data[len(data) // 2] ^= 0xFF
    elif damage == "empty":
        data = bytearray()
    elif damage == "text":
        data = bytearray(b"not a table")
    else:
        monkeypatch.setattr("trtopt.precision.observe.ranges.STATISTICS_VERSION", 999)
    with pytest.raises(ValueError, match=r"version|damaged|table|file|CRC|Bad|zip"):
        RangeTable.from_bytes(bytes(data))


@pytest.mark.parametrize("wrong", [None, "1", [1], True])
@pytest.mark.parametrize("field", ["count", "minimum", "maximum", "nonfinite", "smallest_nonzero"])
def test_a_table_whose_numbers_are_none_is_refused(field: str, wrong: object) -> None:
    stats = {name: replace(item, **{field: wrong}) for name, item in table().stats.items()}
    with pytest.raises(ValueError, match="among the statistics"):
        RangeTable.from_bytes(RangeTable(stats).to_bytes())
