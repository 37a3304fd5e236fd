"""Repeating a run until its median stands still."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest

from trtopt.profiling.measured import RunLimits, RunTimes, spread, timed, until_stable

AT_ONCE = RunLimits(warm_up_runs=0, warm_up_seconds=0.0, min_seconds=0.0, max_runs=200, max_seconds=1e9)


class Clock:
    """Seconds that pass only by the runs."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def play(self, microseconds: Iterable[float]) -> Callable[[], float]:
        left = iter(microseconds)

        def run() -> float:
            took = next(left)
            self.now += took * 1e-6
            return took

        return run


def settle(microseconds: Iterable[float], limits: RunLimits = AT_ONCE) -> RunTimes:
    clock = Clock()
    return until_stable(clock.play(microseconds), limits, clock)


def test_equal_times_are_stable_at_the_first_look() -> None:
    found = settle(itertools.repeat(100.0))
    assert found == RunTimes((100.0,) * 12, stable=True)  # 16 runs, the first quarter left out
    assert (found.median_us, found.spread_us) == (100.0, 0.0)


def test_noise_ends_stable_near_its_median() -> None:
    rng = np.random.default_rng(0)
    found = settle(rng.normal(100.0, 5.0, 200).tolist())
    assert found.stable
    assert found.median_us == pytest.approx(100.0, rel=0.03)
    assert found.spread_us == pytest.approx(0.6745 * 5.0, rel=0.4)  # of a normal distribution


def test_a_drift_is_not_stable() -> None:
    found = settle([100.0 * 1.01**run for run in range(200)])
    assert not found.stable
    assert len(found.us) == 150


def test_what_settles_is_waited_for_and_left_out() -> None:
    found = settle([300.0 - 10.0 * run for run in range(20)] + [100.0] * 180)
    assert found.stable
    assert found.median_us == 100.0
    assert max(found.us) < 300.0


def test_long_stretches_of_two_times_are_not_stable() -> None:
    assert not settle(([100.0] * 50 + [200.0] * 50) * 2, replace(AT_ONCE, min_runs=60)).stable


def test_alternating_times_are_stable_and_their_spread_says_so() -> None:
    found = settle(itertools.cycle([100.0, 200.0]))
    assert found.stable
    assert (found.median_us, found.spread_us) == (150.0, 50.0)


def test_one_outlier_changes_nothing() -> None:
    times = [100.0] * 200
    times[7] = 1e6
    found = settle(times)
    assert found.stable and len(found.us) == 12
    assert (found.median_us, found.spread_us) == (100.0, 0.0)


def test_times_of_zero_are_stable() -> None:
    assert settle(itertools.repeat(0.0)) == RunTimes((0.0,) * 12, stable=True)


def test_the_largest_number_of_runs_is_kept() -> None:
    limits = RunLimits(warm_up_runs=3, warm_up_seconds=0.0, min_seconds=0.0, max_runs=40)
    growing = itertools.count(1.0)
    found = until_stable(lambda: next(growing), limits, lambda: 0.0)
    assert not found.stable
    assert found.us == tuple(float(run) for run in range(3 + 10 + 1, 3 + 40 + 1))


def test_the_time_limit_ends_it_after_the_run_that_crosses_it() -> None:
    found = settle([1e6] * 10, replace(AT_ONCE, max_seconds=3.5))
    assert not found.stable
    assert found.us == (1e6,) * 3  # 4 runs of a second, the first left out


def test_one_run_is_made_whatever_the_limits() -> None:
    found = settle([1e6, 2e6], replace(AT_ONCE, max_seconds=0.0))
    assert found == RunTimes((1e6,), stable=False)


def test_short_runs_are_made_for_a_while_at_least() -> None:
    limits = RunLimits(warm_up_runs=0, warm_up_seconds=0.0, min_seconds=0.05)
    found = settle(itertools.repeat(100.0), limits)
    assert found.stable
    assert 500 <= len(found.us) / 0.75 <= 500 * 1.25 + 1  # 0.05 s of 100 us, and the way to the next look


def test_runs_too_short_for_that_are_judged_when_there_are_enough() -> None:
    limits = RunLimits(warm_up_runs=0, warm_up_seconds=0.0, min_seconds=1.0, max_runs=100)
    assert settle(itertools.repeat(100.0), limits) == RunTimes((100.0,) * 75, stable=True)


def test_few_equal_runs_are_not_yet_stable() -> None:
    assert settle([1e6] * 10, replace(AT_ONCE, max_seconds=8.0)) == RunTimes((1e6,) * 6, stable=False)


def test_the_warm_up_is_not_counted() -> None:
    limits = RunLimits(warm_up_runs=5, warm_up_seconds=0.0, min_runs=4, min_seconds=0.0)
    assert settle([900.0] * 5 + [100.0] * 4, limits) == RunTimes((100.0,) * 3, stable=True)


def test_the_warm_up_lasts_as_long_as_asked_for() -> None:
    limits = RunLimits(warm_up_runs=1, warm_up_seconds=0.01, min_runs=4, min_seconds=0.0)
    assert settle([1000.0] * 10 + [100.0] * 4, limits).median_us == 100.0


def test_a_slow_warm_up_ends_with_the_time_limit() -> None:
    limits = RunLimits(warm_up_runs=5, warm_up_seconds=0.0, max_seconds=1.0)
    assert settle([2e6, 3e6], limits) == RunTimes((3e6,), stable=False)


def test_a_call_is_timed_by_the_given_clock() -> None:
    clock = Clock()
    assert timed(clock.play([250.0]), clock)() == pytest.approx(250.0, rel=1e-9)


def test_the_spread_is_the_median_absolute_deviation() -> None:
    assert spread([1.0, 1.0, 2.0, 2.0, 4.0, 6.0, 9.0]) == 1.0  # deviations from 2: 1 1 0 0 2 4 7
    assert spread([5.0]) == 0.0
