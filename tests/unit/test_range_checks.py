"""Calibration ranges that cannot be right are warned of by name; those of ordinary data are not."""

from __future__ import annotations

import numpy as np
import pytest

from trtopt.precision.observe.ranges import LARGEST_SANE, LARGEST_TAIL, SMALLEST_SANE, range_warnings
from trtopt.precision.observe.statistics import StatsBuilder, TensorStats

RNG = np.random.default_rng(0)
NORMAL = RNG.standard_normal(1 << 15).astype(np.float32)


def stats(array: np.ndarray, histogram: bool = True) -> TensorStats:
    builder = StatsBuilder(histogram)
    builder.update(np.asarray(array, np.float32))
    return builder.finish()


def with_outlier(ratio: float) -> np.ndarray:
    array = np.clip(np.abs(NORMAL), 0.5, 1.0)
    array[7] = ratio
    return array


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros(4096), "0 in every sample"),
        (np.full(4096, 0.5), "the same number in every element"),
        (NORMAL * LARGEST_SANE, "fill values"),
        (NORMAL * SMALLEST_SANE / 10, "normalised twice"),
        (with_outlier(2 * LARGEST_TAIL), "far beyond the others"),
    ],
)
def test_an_absurd_range_is_warned_of_with_its_name(array: np.ndarray, said: str) -> None:
    for known, inputs in (({"t": stats(array)}, ()), ({"t": stats(array)}, ("t",))):
        warnings = range_warnings(known, inputs)
        assert len(warnings) == 1 and said in warnings[0] and "t" in warnings[0].split(":")[0]


@pytest.mark.parametrize(
    "array",
    [
        NORMAL,
        np.maximum(NORMAL, 0),
        RNG.uniform(0, 255, 4096),
        NORMAL * 32768 / 8,
        RNG.laplace(size=1 << 16),
        np.exp(NORMAL),
        NORMAL**3,
        np.where(RNG.random(1 << 15) < 0.999, 0, NORMAL),
        with_outlier(LARGEST_TAIL / 2),
        np.full(8, 16000),
        np.full(4096, np.nan),
    ],
)
def test_ordinary_data_is_not(array: np.ndarray) -> None:
    assert range_warnings({"t": stats(array)}, ("t",)) == []


def test_a_tensor_that_int8_does_not_read_may_be_constant_or_huge() -> None:
    known = {"mask": stats(np.full(4096, -3.4e38), histogram=False), "zeros": stats(np.zeros(4096), histogram=False)}
    assert range_warnings(known) == []
    assert "input mask (up to 3.4e+38)" not in range_warnings(known, ("zeros",))[0]
    assert range_warnings(known, ("zeros",))[0].startswith("input zeros: 0 in every sample")


def test_one_line_per_kind_names_the_first_tensors() -> None:
    warnings = range_warnings({f"t{number}": stats(np.zeros(512)) for number in range(9)})
    assert len(warnings) == 1
    assert warnings[0].startswith("t0, t1, t2, t3, t4 and 4 more: 0 in every sample")
