"""The error of a plan at the network's outputs, measured on a few samples: what improvements are kept by."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from trtopt.accuracy.compare import Accumulator, is_class_like
from trtopt.accuracy.emulation import fp32_emulation
from trtopt.precision.observe.samples import Samples
from trtopt.precision.plan import PrecisionPlan
from trtopt.precision.write import apply_plan
from trtopt.support.ort_session import Feeds, OrtSession

JUDGED_SAMPLES = 32
"""Samples that errors are compared on: the noise of quantization is a sum over all elements, and steady."""

_HELD_OUT = 4
_MOST_BYTES = 1 << 28
"""Of samples that are held, and of reference outputs."""

_T = TypeVar("_T")


def fitted(samples: Iterable[Feeds]) -> Iterator[Feeds]:
    """All samples but every fourth."""
    return (feeds for index, feeds in enumerate(samples) if index % _HELD_OUT)


class OutputError:
    """Compares plans with the FP32 outputs of one model.

    Args:
        reference: The widened model.
        samples: Its samples; the first :data:`JUDGED_SAMPLES` are used where a caller brings none.
    """

    def __init__(self, reference: ir.Model, samples: Samples) -> None:
        self._reference = reference
        self._own = list(_bounded(itertools.islice(samples, JUDGED_SAMPLES), lambda feeds: feeds.values()))
        self._known: dict[int, list[list[np.ndarray]]] = {}

    def of(self, base: ir.Model, plan: PrecisionPlan, samples: Sequence[Feeds] | None = None) -> float:
        """Noise power over signal power of the worst output; infinite where an output is not finite.

        Args:
            base: The FP32 form of the model that ``plan`` is for.
            plan: The plan.
            samples: Other samples than the judge's own; the same object each time, for the reference to be run once.

        Raises:
            InvalidModelError: ONNX Runtime cannot run the model.
        """
        return self.of_model(fp32_emulation(apply_plan(base, plan)), samples)

    def of_model(self, model: ir.Model, samples: Sequence[Feeds] | None = None) -> float:
        """The same for an FP32 model.

        Args:
            model: It has the inputs and outputs of the reference.
            samples: As above.

        Raises:
            InvalidModelError: ONNX Runtime cannot run the model.
        """
        chosen = self._own if samples is None else samples
        expected = self._expected(chosen)
        sums: list[Accumulator] = [Accumulator() for _ in self._reference.graph.outputs]
        with OrtSession(model, keep_qdq=True) as session:
            for feeds, reference in zip(chosen, expected, strict=False):
                for total, exact, output in zip(sums, reference, session.run(feeds), strict=True):
                    total.update(*_centred(exact, output))
        return max((_noise(total) for total in sums), default=0.0)

    def _expected(self, samples: Sequence[Feeds]) -> list[list[np.ndarray]]:
        """The reference's outputs, as many as memory allows."""
        if id(samples) not in self._known:
            with OrtSession(self._reference) as session:
                self._known[id(samples)] = list(_bounded((session.run(feeds) for feeds in samples), iter))
        return self._known[id(samples)]


def decibels(error: float) -> float:
    """Signal to noise in dB."""
    return -10 * math.log10(error) if 0 < error < math.inf else math.copysign(math.inf, 0.5 - error)


def _bounded(items: Iterable[_T], arrays: Callable[[_T], Iterable[np.ndarray]]) -> Iterator[_T]:
    held = 0
    for item in items:
        yield item
        held += sum(array.nbytes for array in arrays(item))
        if held > _MOST_BYTES:
            return


def _centred(reference: np.ndarray, output: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scores of classes without the mean over the classes, which neither their order nor a softmax sees."""
    if not is_class_like(reference) or reference.shape != output.shape:
        return reference, output
    classes = max(axis for axis, size in enumerate(reference.shape) if axis and size != 1)
    return _without_mean(reference, classes), _without_mean(output, classes)


def _without_mean(array: np.ndarray, axis: int) -> np.ndarray:
    exact = array.astype(np.float64)
    left: np.ndarray = exact - np.where(np.isfinite(exact), exact, 0.0).mean(axis=axis, keepdims=True)
    return left


def _noise(total: Accumulator) -> float:
    if total.nonfinite or total.differs:
        return math.inf
    return total.noise / total.signal if total.signal else 0.0
