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
from dataclasses import dataclass

import numpy as np

from trtopt.sparsity.layers import GROUP, KEPT, best_mask

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

_STEPS = 20
"""Of the fit at the end: 50 lower the error at the outputs of a MiniLM by 0.03 dB, and take half as long again as all
else."""
_CONVERGED = 1e-3
"""The fit ends where the gradient, in the norm of its preconditioner, is this share of the first one."""

_GONE = tuple(list(pair) for pair in itertools.combinations(range(GROUP), GROUP - KEPT))
"""The six choices: which two of the four become zero."""
_GONE_ROWS = list(itertools.chain.from_iterable(_GONE))


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
        grams = [(part, _gram(pruned[:, part])) for part in _blocks(exact.shape[1])]
        self._blocks = [(part, gram, _Choices.of(gram)) for part, gram in grams]

    def prune(self, weight: np.ndarray, begin: np.ndarray | None = None) -> np.ndarray:
        """A 2:4 weight in place of a dense one.

        Args:
            weight: The dense weight, float32 ``[K, N]``.
            begin: A 2:4 weight that was fitted to similar rows, to begin with; None for the magnitude mask.
        """
        error = (self._pruned - self._exact) @ weight
        found = np.empty_like(weight)
        before = slice(0)
        for part, gram, choices in self._blocks:
            error += self._pruned[:, before] @ (found[before] - weight[before])
            dense = weight[part]
            target = dense - np.linalg.solve(gram, self._pruned[:, part].T @ error)
            values = dense * best_mask(np.abs(dense), 0) if begin is None else begin[part]
            for _ in range(_SWEEPS if begin is None else _MORE_SWEEPS):
                values = _sweep(gram, choices, target, values)
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


@dataclass(frozen=True)
class _Choices:
    """What the six choices of every group of four do, for a weight of any width.

    Attributes:
        inverse: The inverse of the metric of the four, float32 ``[K / 4, 4, 4]``.
        pull: What takes two away, times the best four: float32 ``[K / 4, 12, 4]``, two rows for each choice.
        result: What is left, times the best four: float32 ``[K / 4, 24, 4]``, four rows for each choice.
    """

    inverse: np.ndarray
    pull: np.ndarray
    result: np.ndarray

    @classmethod
    def of(cls, gram: np.ndarray) -> _Choices:
        """The choices in a metric ``[K, K]``."""
        groups = len(gram) // GROUP
        at = np.arange(len(gram)).reshape(groups, GROUP)
        inverse = np.linalg.inv(gram[at[:, :, None], at[:, None, :]].astype(np.float64))
        pull = np.zeros((groups, len(_GONE), GROUP - KEPT, GROUP))
        result = np.empty((groups, len(_GONE), GROUP, GROUP))
        for index, gone in enumerate(_GONE):
            pull[:, index, :, gone] = np.linalg.inv(inverse[:, gone][:, :, gone]).swapaxes(0, 1)
            result[:, index] = np.eye(GROUP) - inverse[:, :, gone] @ pull[:, index]
            result[:, index, gone] = 0
        narrow = (array.astype(np.float32) for array in (pull, result))
        return cls(inverse.astype(np.float32), *(array.reshape(groups, -1, GROUP) for array in narrow))

    def best_two(self, group: int, best: np.ndarray) -> np.ndarray:
        """Of four weights ``[4, N]`` that are best together, the two that do best without the others.

        Returns:
            float32 ``[4, N]``, with at least two zeros in each column.
        """
        price = (self.pull[group] @ best) * best[_GONE_ROWS]
        chosen = np.argmin(price[::2] + price[1::2], axis=0)
        results = (self.result[group] @ best).reshape(len(_GONE), GROUP, -1)
        picked: np.ndarray = np.take_along_axis(results, chosen[None, None], axis=0)[0]
        return picked


def _sweep(gram: np.ndarray, choices: _Choices, target: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Choose the two that stay, and their values, of each four in turn, all other weights as they are.

    Args:
        gram: The metric, ``[K, K]``.
        choices: Its choices.
        target: The weight without a pattern, ``[K, N]``.
        values: The weight to begin with.
    """
    gradient = gram @ (values - target)
    result = np.empty_like(values)
    for start in range(0, len(values), _TILE):
        tile = slice(start, min(start + _TILE, len(values)))
        slope, now, square = gradient[tile], values[tile].copy(), gram[tile, tile]
        for at in range(0, len(now), GROUP):
            four, group = slice(at, at + GROUP), (start + at) // GROUP
            chosen = choices.best_two(group, now[four] - choices.inverse[group] @ slope[four])
            slope[at:] += square[at:, four] @ (chosen - now[four])
            now[four] = chosen
        gradient[tile.stop :] += gram[tile.stop :, tile] @ (now - values[tile])
        result[tile] = now
    return result


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
