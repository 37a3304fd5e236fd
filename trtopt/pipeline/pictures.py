"""What is done to pictures where nobody said so: the way in which a network agrees best with their labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from trtopt.accuracy.metric import load_metric
from trtopt.config.base import METRICS
from trtopt.errors import UsageError
from trtopt.images.preprocess import Preprocess
from trtopt.precision.fp16.to_fp32 import to_fp32
from trtopt.precision.observe.pictures import PictureSamples
from trtopt.precision.observe.stream import Samples
from trtopt.support.clock import Clock
from trtopt.support.ort_session import OrtSession

_FIRST, _THEN = 48, 256
"""Pictures that every way is tried on, and then the best of them."""

_BEST = 3

_COLORS: tuple[dict[str, Any], ...] = (
    {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)},
    {},
    {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)},
    {"scale": 1.0},
    # Caffe's networks, and those that came from them: the mean of ImageNet, from 0 to 255
    {"scale": 1.0, "mean": (123.0, 117.0, 104.0)},
)
_GRAYS: tuple[dict[str, Any], ...] = (
    {"mean": (0.0,), "std": (1.0,)},
    {"scale": 1.0, "mean": (0.0,), "std": (1.0,)},
    {"mean": (0.5,), "std": (0.5,)},
    # of the digits of MNIST, as PyTorch's examples normalize them
    {"mean": (0.1307,), "std": (0.3081,)},
)


def with_preprocess(samples: Samples, metric: Any, boxes: str | None, model: ir.Model, clock: Clock) -> Samples:
    """Samples of pictures as the network most likely takes them, with a warning that says what was assumed of them.

    Where nobody said it, the usual ways to prepare a picture are compared by the metric, where that is one of labels.

    Args:
        samples: Of pictures or of anything else.
        metric: The value of ``--metric``, or a Python caller's function; None for none.
        boxes: The value of ``--boxes``.
        model: The network as loaded.
        clock: Takes warnings.

    Raises:
        UsageError: The metric is unknown, or a picture cannot be decoded.
    """
    if not isinstance(samples, PictureSamples):
        return samples
    for note in samples.notes:
        clock.warn("samples", note)
    if not samples.is_guessed:
        return samples
    reason = "guessed from the shape of the input"
    if isinstance(metric, str) and metric in METRICS and samples.labels is not None:
        with clock.stage("compare preprocessing"), OrtSession(to_fp32(model)) as session:
            how, reason = _Trials(samples, metric, boxes, session).best()
        samples = samples.otherwise(how)
    clock.warn("samples", f"pictures are prepared by --preprocess {samples.how.describe()}: {reason}")
    return samples


class _Trials:
    """The metric of the FP32 model by how pictures are prepared."""

    def __init__(self, found: PictureSamples, metric: str, boxes: str | None, session: OrtSession) -> None:
        self._found, self._metric, self._boxes, self._session = found, metric, boxes, session

    def best(self) -> tuple[Preprocess, str]:
        """The way whose metric is best, the guess where it is as good, and why in words."""
        first = {how: self._measure(how, _FIRST) for how in _values(self._found.how)}
        leading = sorted(first, key=lambda how: -first[how])[:_BEST]
        then = {how: self._measure(how, _THEN) for way in leading for how in _places(way)}
        how = max(then, key=lambda way: then[way])
        if then[how] <= 0:
            return (
                self._found.how,
                "guessed from the shape of the input; the labels fit none of the usual ways: give --preprocess",
            )
        tried = len(first.keys() | then.keys())
        return how, f"of {tried} usual ways the labels agree best with it ({self._metric} {then[how]:.3f})"

    def _measure(self, how: Preprocess, most: int) -> float:
        samples = self._found.otherwise(how, -(-(self._found.count or most) // most))
        metric = load_metric(self._metric, has_labels=True, boxes=self._boxes)
        try:
            return metric.on_reference(self._session, samples, samples.labels).baseline or 0.0
        except UsageError:
            # What is wrong with all of them, the metric says when it is measured on the one that is chosen.
            return 0.0


def _values(guess: Preprocess) -> Iterator[Preprocess]:
    """The guess, and other ranges and orders of the channels; of bytes the other order."""
    yield guess
    if guess.dtype == "uint8":
        if guess.channels == 3:
            yield replace(guess, color="bgr")
        return
    plain = replace(guess, scale=255.0, mean=(0.0,) * guess.channels, std=(1.0,) * guess.channels)
    for values in _COLORS if guess.channels == 3 else _GRAYS:
        one = replace(plain, **values)
        if one != guess:
            yield one
        if guess.channels == 3:
            yield replace(one, color="bgr", mean=one.mean[::-1], std=one.std[::-1])


def _places(how: Preprocess) -> Iterator[Preprocess]:
    """A way, and the other way to give a detector's picture its size. Classifiers were trained on parts of pictures of
    many sizes and proportions: whether they get the middle or all of it, labels do not tell."""
    yield how
    if how.letterbox:
        yield replace(how, letterbox=False, resize=how.size, fill=0)
