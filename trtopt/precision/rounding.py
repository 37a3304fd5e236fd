"""INT8 weights that are rounded together, so that the errors of one make up for those of the others.

The output of a layer is ``X W`` with rows of inputs ``X [rows, K]`` and the weight ``W [K, N]``. Rounding each weight
to its nearest level is best for each alone, and poor for their sum. Wanted are levels ``Q`` that minimise
``|X' Q - X W|^2``, where ``X'`` is what the layer will really read: the quantized input, with the noise of the layers
before it.

That is a search for the nearest point of a lattice, per output channel. With ``X'^T X' = R^T R`` (Cholesky, R upper
triangular) the squared distance is a sum over k whose k-th term depends on the weights k, ..., K only: so the last one
is rounded first, and each further one such that its term is as small as it can be. This is Babai's nearest plane
algorithm (Babai 1986), and what GPTQ computes (Frantar et al. 2023, after Optimal Brain Surgeon), without the inverse
that GPTQ takes. The search aims not at ``W`` but at ``W + (X'^T X')^-1 X'^T (X - X') W``, which makes up for as much of
the noise that the layer reads as a weight can (as GPTAQ, Li et al. 2025).

AdaRound (Nagel et al. 2020) solves the same least squares per layer by gradient descent over a soft choice of up or
down: thousands of iterations per layer, for which it needs an automatic differentiation package. The search here is
direct (one factorisation per layer), deterministic, not bound to the two nearest levels, and needs numpy only.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from trtopt.precision.ranges import LEVELS

BLOCK_DEPTH = 1024
"""Inputs of a layer that are factorised together. A layer with more is rounded in blocks, each of which makes up for
the error of those before it: the factor of K inputs takes K^2 numbers and K^3 / 3 multiplications, and large layers are
deep (4608 in the last stage of a ResNet-50)."""

DAMPING = 0.01
"""Share of the mean of the diagonal of ``X'^T X'`` that is added to it, as in GPTQ: rows are few, and weights of
inputs that were never seen must not run away."""

_SOLVE_TILE = 128
_ROUND_TILE = 32


@dataclass(frozen=True)
class Rows:
    """Sampled rows of one group of a layer.

    Attributes:
        exact: float32 ``[rows, K]``, as the FP32 network computes them.
        quantized: float32 ``[rows, K]``, as the quantized network's layer reads them, quantized and dequantized.
    """

    exact: np.ndarray
    quantized: np.ndarray


def blocks(depth: int) -> list[slice]:
    """The inputs of a layer in blocks of equal size, at most :data:`BLOCK_DEPTH` each."""
    count = -(-depth // BLOCK_DEPTH)
    ends = [index * depth // count for index in range(count + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


class Factor:
    """The factor ``R`` of a block of inputs: ``R^T R = X'^T X' + damping``; for all layers that read them.

    Means are not taken out, though a bias could make up for them: the error grows with the inputs, and is nothing where
    they are zero.

    Args:
        inputs: ``X'``, float32 ``[rows, K]``.

    Raises:
        numpy.linalg.LinAlgError: The rows are not finite, or their squares are not.
    """

    def __init__(self, inputs: np.ndarray) -> None:
        self._inputs = inputs
        gram = inputs.T @ inputs
        diagonal = np.diagonal(gram).copy()
        if not np.isfinite(diagonal).all():
            raise np.linalg.LinAlgError("the inputs are not finite, or too large for their squares")
        # The strongest inputs are rounded first, that is, stand last: the others can make up for their errors.
        self._order = np.argsort(diagonal, kind="stable")
        gram = gram[np.ix_(self._order, self._order)]
        gram[np.diag_indices_from(gram)] += DAMPING * max(float(diagonal.mean()), 1e-20)
        self._upper = np.ascontiguousarray(np.linalg.cholesky(gram).T)

    def correction(self, error: np.ndarray) -> np.ndarray:
        """What to add to the weight ``[K, N]`` to make up for an error of the outputs ``[rows, N]``; float32."""
        pull = (self._inputs.T @ error)[self._order]
        result: np.ndarray = np.empty_like(pull)
        result[self._order] = -_solve(self._upper, pull)
        return result

    def round(self, target: np.ndarray) -> np.ndarray:
        """Levels for a target in units of the weight's scale: int8 ``[K, N]``, within -127..127."""
        upper, wanted = self._upper, target[self._order]
        size = len(upper)
        left = np.zeros_like(wanted)
        levels = np.empty(wanted.shape, np.int8)
        diagonal = np.diagonal(upper)[:, None]
        for end in range(size, 0, -_ROUND_TILE):
            start = max(end - _ROUND_TILE, 0)
            shift = (upper[start:end, end:] @ left[end:]) / diagonal[start:end]
            beside = upper[start:end, start:end] / diagonal[start:end]
            for index in range(end - start - 1, -1, -1):
                row = start + index
                best = wanted[row] + shift[index] + beside[index, index + 1 :] @ left[row + 1 : end]
                chosen = np.clip(np.rint(best), -LEVELS, LEVELS)
                levels[row] = chosen
                left[row] = wanted[row] - chosen
        result = np.empty_like(levels)
        result[self._order] = levels
        return result


def _solve(upper: np.ndarray, right: np.ndarray) -> np.ndarray:
    """``x`` with ``upper^T upper x = right``, block by block."""
    size = len(upper)
    result = right.copy()
    starts = range(0, size, _SOLVE_TILE)
    inverses = [np.linalg.inv(upper[at : at + _SOLVE_TILE, at : at + _SOLVE_TILE]) for at in starts]
    for start, inverse in zip(starts, inverses, strict=True):
        end = start + len(inverse)
        result[start:end] -= upper[:start, start:end].T @ result[:start]
        result[start:end] = inverse.T @ result[start:end]
    for start, inverse in zip(reversed(starts), reversed(inverses), strict=True):
        end = start + len(inverse)
        result[start:end] -= upper[start:end, end:] @ result[end:]
        result[start:end] = inverse @ result[start:end]
    return result


def best_share(error: np.ndarray, effect: np.ndarray) -> float:
    """How much of a correction to apply, 0..1: what gives the least error on rows that it was not made from.

    A correction fits the noise of the rows it is made from too, the more so the fewer they are; the error is a
    parabola in its share.

    Args:
        error: The error of the layer's outputs without the correction, ``[rows, N]``.
        effect: What the correction changes in them.
    """
    power = float(np.vdot(effect, effect))
    return min(max(-float(np.vdot(effect, error)) / power, 0.0), 1.0) if power > 0 else 0.0
