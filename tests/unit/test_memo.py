"""What was found of an array is remembered as long as the array lives."""

from __future__ import annotations

import gc

import numpy as np

from trtopt.support.memo import once_per_array


def test_an_array_is_looked_at_once_for_the_same_arguments_and_again_for_another_array() -> None:
    asked = []

    @once_per_array
    def scaled_sum(array: np.ndarray, factor: float = 1.0) -> float:
        asked.append(factor)
        return float(array.sum()) * factor

    first, second = np.ones(5000), np.full(5000, 2.0)
    assert [scaled_sum(first), scaled_sum(first), scaled_sum(second), scaled_sum(first, 3.0)] == [5e3, 5e3, 1e4, 1.5e4]
    assert asked == [1.0, 1.0, 3.0]


def test_an_array_at_the_address_of_one_that_is_gone_is_another() -> None:
    largest = once_per_array(lambda array: float(array.max()))
    for number in range(20):
        array = np.full(5000, float(number))
        assert largest(array) == number
        del array


def test_what_was_found_does_not_outlive_the_array() -> None:
    kept = once_per_array(lambda array: array * 2)
    array = np.ones(5000)
    found = kept(array)
    assert kept(array) is found
    references = len(gc.get_referrers(found))
    del array
    assert len(gc.get_referrers(found)) < references
