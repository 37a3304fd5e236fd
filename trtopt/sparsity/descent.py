"""The weights of one layer pruned to 2:4 such that those that stay make up for those that go.

The output of a layer is ``X W`` with rows of inputs ``X [rows, K]`` and the weight ``W [K, N]``. Wanted is a 2:4 weight
``Q`` that minimises ``|X' Q - X W|^2``, where ``X'`` is what the layer reads in the pruned network. With the damped
Gram matrix ``H = X'^T X' + damping`` that is the distance of ``Q`` from ``T`` in the metric of ``H``, where ``T = W +
H^-1 X'^T (X - X') W`` makes up for the errors of the layers before it as far as a weight can (GPTAQ, Li et al. 2025).

It is found by descent over the groups of four, beginning with the weight pruned by magnitude. Of each four in turn, the
two that stay are chosen anew from the six choices, each priced with the best values that its two can take: the Optimal
Brain Surgeon (Hassibi and Stork 1993) of four weights, exactly. SparseGPT (Frantar and Alistarh 2023) goes over the
weights once, when what stands behind is not pruned yet, and prices each weight by itself; here every sweep after the
first sees all other groups as they are, and no inverse is taken. At the end the choices are fixed and the weights that
stay are fitted together: least squares for each output channel, solved for all channels at once by conjugate gradients.
"""

from __future__ import annotations

import itertools

import numpy as np

from trtopt.sparsity.pattern import GROUP, KEPT, best_mask

BLOCK_DEPTH = 2048
"""Inputs of a layer that are solved together. A layer with more is pruned in blocks, each of which makes up for the
error of those before it: the Gram matrix of K inputs takes K^2 numbers, and a sweep about 3 K^2 flop for each output
channel."""

DAMPING = 0.1
"""Share of the mean of the diagonal of ``X'^T X'`` that is added to it, as in Model Optimizer's SparseGPT: rows are
few, and what fits them too well does not serve others."""

_SWEEPS = 8
"""The last of them lowers the error of random weights with correlated inputs by less than 0.5 %."""

_MORE_SWEEPS = 2
"""Of a weight that was fitted to most of the rows already."""

_TILE = 64
"""Inputs whose gradient is kept current during a sweep; that of the others is brought up to date once per tile."""

_STEPS = 50
_CONVERGED = 1e-3
"""The fit ends where the gradient, in the norm of its preconditioner, is this share of the first one."""

_GONE = tuple(list(pair) for pair in itertools.combinations(range(GROUP), GROUP - KEPT))
"""The six choices: which two of the four become zero."""


class Inputs:
    """What layers read, for the choice of their weights; layers that read the same share it.

    Args:
        exact: Rows in the dense network, float32 ``[rows, K]``; K is a multiple of 4, and each four consecutive ones
            are a group of the pattern.
        pruned: The same rows in the pruned network.

    Raises:
        numpy.linalg.LinAlgError: The rows are not finite, or their squares are not.
    """

    def __init__(self, exact: np.ndarray, pruned: np.ndarray) -> None:
        if not np.isfinite(exact).all():
            raise np.linalg.LinAlgError("the inputs of the dense network are not finite")
        self._exact, self._pruned = exact, pruned
        self._blocks = [(part, _gram(pruned[:, part])) for part in _blocks(exact.shape[1])]

    def prune(self, weight: np.ndarray, begin: np.ndarray | None = None) -> np.ndarray:
        """A 2:4 weight in place of a dense one.

        Args:
            weight: The dense weight, float32 ``[K, N]``.
            begin: A 2:4 weight that was fitted to similar rows, to begin with; None for the magnitude mask.
        """
        error = (self._pruned - self._exact) @ weight
        found = np.empty_like(weight)
        before = slice(0)
        for part, gram in self._blocks:
            error += self._pruned[:, before] @ (found[before] - weight[before])
            dense = weight[part]
            target = dense - np.linalg.solve(gram, self._pruned[:, part].T @ error)
            values = dense * best_mask(np.abs(dense), 0) if begin is None else begin[part]
            for _ in range(_SWEEPS if begin is None else _MORE_SWEEPS):
                values = _sweep(gram, target, values)
            found[part], before = _refit(gram, target, values), part
        return found


def _blocks(depth: int) -> list[slice]:
    """The inputs of a layer in blocks of about equal size, whole groups of four."""
    count = -(-depth // BLOCK_DEPTH)
    ends = [index * (depth // GROUP) // count * GROUP for index in range(count + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


def _gram(inputs: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        gram: np.ndarray = inputs.T @ inputs
    diagonal = np.diagonal(gram)
    if not np.isfinite(diagonal).all():
        raise np.linalg.LinAlgError("the inputs are not finite, or too large for their squares")
    gram[np.diag_indices_from(gram)] += DAMPING * max(float(diagonal.mean()), 1e-20)
    return gram


def _sweep(gram: np.ndarray, target: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Choose the two that stay, and their values, of each four in turn, all other weights as they are.

    Args:
        gram: The metric, ``[K, K]``.
        target: The weight without a pattern, ``[K, N]``.
        values: The weight to begin with.
    """
    gradient = gram @ (values - target)
    result = np.empty_like(values)
    for start in range(0, len(values), _TILE):
        tile = slice(start, min(start + _TILE, len(values)))
        slope, now, square = gradient[tile], values[tile].copy(), gram[tile, tile]
        for at in range(0, len(now), GROUP):
            four = slice(at, at + GROUP)
            corner = square[four, four]
            chosen = _best_two(corner, now[four] - np.linalg.solve(corner, slope[four]))
            slope += square[:, four] @ (chosen - now[four])
            now[four] = chosen
        gradient[tile.stop :] += gram[tile.stop :, tile] @ (now - values[tile])
        result[tile] = now
    return result


def _best_two(gram: np.ndarray, best: np.ndarray) -> np.ndarray:
    """Of four weights ``[4, N]`` that are best together, the two that do best without the others.

    Args:
        gram: The metric of the four, ``[4, 4]``.
        best: The weights without a pattern.

    Returns:
        float32 ``[4, N]``, with at least two zeros in each column.
    """
    inverse = np.linalg.inv(gram)
    prices, results = [], []
    for gone in _GONE:
        # What it costs to take ``gone`` away with the others at their best, and what that makes of them.
        pull = np.linalg.solve(inverse[np.ix_(gone, gone)], best[gone])
        prices.append(np.sum(best[gone] * pull, axis=0))
        result = best - inverse[:, gone] @ pull
        result[gone] = 0
        results.append(result)
    chosen = np.argmin(prices, axis=0)
    picked: np.ndarray = np.take_along_axis(np.stack(results), chosen[None, None], axis=0)[0]
    return picked


def _refit(gram: np.ndarray, target: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The weights of ``values`` that are not zero, fitted to the target together.

    Conjugate gradients preconditioned by the diagonal, over the weights that stay.
    """
    stays, diagonal = values != 0, np.diagonal(gram)[:, None]
    residual = np.where(stays, gram @ (target - values), 0)
    direction = residual / diagonal
    power = np.sum(residual * direction, axis=0)
    enough = np.square(_CONVERGED) * power
    for _ in range(_STEPS):
        if (power <= enough).all():
            break
        change = np.where(stays, gram @ direction, 0)
        step = _ratio(power, np.sum(direction * change, axis=0))
        values = values + step * direction
        residual -= step * change
        scaled = residual / diagonal
        before, power = power, np.sum(residual * scaled, axis=0)
        direction = scaled + _ratio(power, before) * direction
    return values


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    result: np.ndarray = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
    return result
