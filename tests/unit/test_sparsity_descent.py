"""One layer pruned such that the weights that stay make up for those that go."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from trtopt.sparsity import prune
from trtopt.sparsity.layers import best_mask, is_sparse
from trtopt.sparsity.prune import DAMPING, Inputs


def correlated(rows: int, depth: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((rows, depth // 2)) @ rng.standard_normal((depth // 2, depth)) / depth**0.5
    noisy: np.ndarray = mixed + 0.3 * rng.standard_normal((rows, depth))
    return noisy.astype(np.float32)


def weight_of(depth: int, channels: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal((depth, channels)).astype(np.float32)


def error(inputs: np.ndarray, pruned: np.ndarray, target: np.ndarray) -> float:
    return float(np.square(inputs @ pruned - target).sum() / np.square(target).sum())


def damped(inputs: np.ndarray) -> np.ndarray:
    gram = inputs.astype(np.float64).T @ inputs
    result: np.ndarray = gram + DAMPING * np.diagonal(gram).mean() * np.eye(len(gram))
    return result


def test_of_eight_inputs_the_result_is_near_the_best_of_all_choices() -> None:
    inputs, weight = correlated(200, 8), weight_of(8, 12)
    found, gram = Inputs(inputs, inputs).prune(weight), damped(inputs)

    def distance(values: np.ndarray, target: np.ndarray) -> float:
        return float((values - target) @ gram @ (values - target))

    total = best = 0.0
    for channel, target in enumerate(weight.T.astype(np.float64)):
        options = []
        for pairs in itertools.product(itertools.combinations(range(4), 2), itertools.combinations(range(4, 8), 2)):
            stays = [index for pair in pairs for index in pair]
            values = np.zeros(8)
            values[stays] = np.linalg.solve(gram[np.ix_(stays, stays)], (gram @ target)[stays])
            options.append(distance(values, target))
        best += min(options)
        total += distance(found[:, channel].astype(np.float64), target)
    assert is_sparse(found, 0)
    assert best <= total * (1 + 1e-5)
    assert total <= 1.1 * best


def test_weights_that_stay_are_the_least_squares_solution() -> None:
    inputs, weight = correlated(300, 64), weight_of(64, 16)
    found, gram = Inputs(inputs, inputs).prune(weight), damped(inputs)
    for values, target in zip(found.T, weight.T.astype(np.float64), strict=True):
        stays = np.flatnonzero(values)
        exact = np.linalg.solve(gram[np.ix_(stays, stays)], (gram @ target)[stays])
        np.testing.assert_allclose(values[stays], exact, atol=5e-3)


def test_the_error_is_less_than_half_of_that_of_magnitude() -> None:
    inputs, weight = correlated(2000, 128), weight_of(128, 64)
    other = correlated(2000, 128)[:500]
    found = Inputs(inputs, inputs).prune(weight)
    plain = weight * best_mask(np.abs(weight), 0)
    assert error(other, found, other @ weight) < 0.5 * error(other, plain, other @ weight)


def test_errors_of_the_layers_before_are_made_up_for() -> None:
    exact, weight = correlated(2000, 64), weight_of(64, 32)
    noisy = exact * np.float32(0.8)
    kept, blind = Inputs(exact, noisy).prune(weight), Inputs(noisy, noisy).prune(weight)
    target = exact @ weight
    assert error(noisy, kept, target) < 0.8 * error(noisy, blind, target)


def test_a_deep_layer_is_pruned_in_blocks_that_make_up_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, weight = correlated(2000, 100), weight_of(100, 32)
    whole = error(inputs, Inputs(inputs, inputs).prune(weight), inputs @ weight)
    monkeypatch.setattr(prune, "BLOCK_DEPTH", 48)
    found = Inputs(inputs, inputs).prune(weight)
    assert is_sparse(found, 0)
    plain = error(inputs, weight * best_mask(np.abs(weight), 0), inputs @ weight)
    assert whole <= error(inputs, found, inputs @ weight) < 0.7 * plain


def test_inputs_that_are_always_zero_do_no_harm() -> None:
    inputs = correlated(100, 16)
    inputs[:, 3:9] = 0
    for rows in (inputs, np.zeros_like(inputs)):
        found = Inputs(rows, rows).prune(weight_of(16, 4))
        assert np.isfinite(found).all() and is_sparse(found, 0)


@pytest.mark.parametrize("number", [np.nan, np.inf, 1e30])
def test_inputs_whose_squares_are_not_finite_are_refused(number: float) -> None:
    inputs = correlated(100, 16)
    bad = inputs.copy()
    bad[3, 3] = number
    with pytest.raises(np.linalg.LinAlgError):
        Inputs(inputs, bad)
    if not np.isfinite(number):
        with pytest.raises(np.linalg.LinAlgError):
            Inputs(bad, inputs)
