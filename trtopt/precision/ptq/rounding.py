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

from trtopt.precision.observe.ranges import LEVELS

BLOCK_DEPTH = 1024
"""Inputs of a layer that are factorised together. A layer with more is rounded in blocks, each of which makes up for
the error of those before it: the factor of K inputs takes K^2 numbers and K^3 / 3 multiplications, and large layers are
deep (4608 in the last stage of a ResNet-50)."""

DAMPING = 0.01
"""Share of the mean of the diagonal of ``X'^T X'`` that is added to it, as in GPTQ: rows are few, and weights of
inputs that were never seen must not run away."""

_LEAF = 64
"""Inputs that LAPACK factorises at once; more are halved, so that products of matrices do most of the work."""

_ONE_BY_ONE = 8
"""Inputs that are rounded one by one; more are halved."""


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
        with np.errstate(over="ignore", invalid="ignore"):  # it raises below
            gram = inputs.T @ inputs
        diagonal = np.diagonal(gram).copy()
        if not np.isfinite(diagonal).all():
            raise np.linalg.LinAlgError("the inputs are not finite, or too large for their squares")
        # The strongest inputs are rounded first, that is, stand last: the others can make up for their errors.
        self._order = np.argsort(diagonal, kind="stable")
        gram = gram[np.ix_(self._order, self._order)]
        gram[np.diag_indices_from(gram)] += DAMPING * max(float(diagonal.mean()), 1e-20)
        upper, self._inverse = _factorised(gram)
        self._unit = upper / np.diagonal(upper)[:, None]

    def correction(self, error: np.ndarray) -> np.ndarray:
        """What to add to the weight ``[K, N]`` to make up for an error of the outputs ``[rows, N]``; float32."""
        pull = (self._inputs.T @ error)[self._order]
        result: np.ndarray = np.empty_like(pull)
        result[self._order] = -(self._inverse @ (self._inverse.T @ pull))
        return result

    def round(self, target: np.ndarray, free: np.ndarray) -> np.ndarray:
        """Levels for a target: int8 ``[K, N]``, within -127..127.

        Args:
            target: In units of the weight's scale, ``[K, N]``.
            free: bool ``[K, N]``: False where the level is to be 0.
        """
        left = target[self._order]
        levels = left.copy()
        _round(self._unit, levels, left, free[self._order])
        result = np.empty(target.shape, np.int8)
        result[self._order] = levels
        return result


def _factorised(gram: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``R``, upper triangular, with ``R^T R = gram``, and its inverse."""
    if len(gram) <= _LEAF:
        root = np.linalg.cholesky(gram).T
        return root, np.triu(np.linalg.inv(root))
    first, last = slice(len(gram) // 2), slice(len(gram) // 2, None)
    upper, inverse = np.zeros_like(gram), np.zeros_like(gram)
    upper[first, first], inverse[first, first] = _factorised(gram[first, first])
    upper[first, last] = beside = inverse[first, first].T @ gram[first, last]
    upper[last, last], inverse[last, last] = _factorised(gram[last, last] - beside.T @ beside)
    inverse[first, last] = -inverse[first, first] @ (beside @ inverse[last, last])
    return upper, inverse


def _round(unit: np.ndarray, best: np.ndarray, left: np.ndarray, free: np.ndarray) -> None:
    """Round in place, the last first; each makes up for what those behind it left.

    Args:
        unit: ``R`` with its rows divided by their diagonal elements.
        best: What the levels were to be, ``[K, N]``, and how far those behind shifted that; becomes the levels.
        left: What the levels were to be; becomes what is left of it.
        free: Where a level need not be 0.
    """
    size = len(unit)
    if size > _ONE_BY_ONE:
        first, last = slice(size // 2), slice(size // 2, None)
        _round(unit[last, last], best[last], left[last], free[last])
        best[first] += unit[first, last] @ left[last]
        _round(unit[first, first], best[first], left[first], free[first])
        return
    for row in reversed(range(size)):
        best[row] += unit[row, row + 1 :] @ left[row + 1 :]
        best[row] *= free[row]
        np.rint(best[row], out=best[row])
        np.clip(best[row], -LEVELS, LEVELS, out=best[row])
        left[row] -= best[row]


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
