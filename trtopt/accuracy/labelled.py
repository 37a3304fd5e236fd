"""Metrics of outputs against labels: classes, numbers, masks and pictures. Those of boxes are in ``detection``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from trtopt.accuracy.compare import Runner, is_class_like, is_float, top1
from trtopt.errors import UsageError
from trtopt.images import placed
from trtopt.images.decode import black_and_white
from trtopt.images.labels import Labels as PictureLabels
from trtopt.support.ort_session import Feeds

LABELS = "__labels__"
Labels = np.ndarray | PictureLabels

Measure = Callable[[Runner, Iterable[Feeds], Labels], float]
"""A metric of what a runner gives on samples, against their labels; higher is better."""

_IGNORED = 255
"""The index of pixels that no class has, as of Pascal VOC's and Cityscapes' masks."""

_MOST_CLASSES = 1 << 12

_FEW, _CLEAR = 256, 0.2
"""Samples that labels counted otherwise are compared with, and the least share of them that has to agree."""


def no_scores(name: str, where: str) -> UsageError:
    """The error of a metric of classes for outputs that hold none."""
    return UsageError(
        f"--metric {name}: no output holds scores of classes",
        where=f"outputs: {where}",
        remedy="give a metric of your own: FILE.py:FUNCTION",
    )


def needs(name: str, what: str, remedy: str) -> UsageError:
    """The error of a metric whose labels are missing or of another kind."""
    return UsageError(f"--metric {name} needs {what}", where=LABELS, remedy=remedy)


def top_1(runner: Runner, samples: Iterable[Feeds], labels: Labels) -> float:
    """Share of predictions that equal the labels."""
    wanted, predicted = _classes("top1", runner, samples, labels, lambda scores: top1(scores).ravel())
    return float((predicted == wanted).mean())


def counted_otherwise(runner: Runner, samples: Iterable[Feeds], labels: np.ndarray) -> str:
    """What is said of class labels that would fit if they were counted from another number; empty of others.

    Networks that came from TensorFlow have a class for nothing before the others. Looked at are the first samples.
    """
    few = itertools.islice(samples, _FEW)
    found = [next(filter(is_class_like, runner.run(feeds)), None) for feeds in few]
    predicted = np.concatenate([top1(scores).ravel() for scores in found if scores is not None] or [np.zeros(0)])
    wanted = labels.ravel()[: len(predicted)]
    if len(predicted) != len(wanted):
        return ""
    shares = {shift: float((predicted == wanted + shift).mean()) for shift in (0, 1, -1)}
    best = max(shares, key=lambda shift: shares[shift])
    if best == 0 or shares[best] < max(_CLEAR, 3 * shares[0]):
        return ""
    side = "higher" if best > 0 else "lower"
    return (
        f"top1 is {shares[0]:.3f} and would be {shares[best]:.3f} if every label were one {side}: count classes as the "
        "network does (of sub-folders by a classes.txt beside them that lists its classes)"
    )


def top_5(runner: Runner, samples: Iterable[Feeds], labels: Labels) -> float:
    """Share of labels that are among the five highest scores."""

    def five(scores: np.ndarray) -> np.ndarray:
        flat = scores.reshape(-1, [dim for dim in scores.shape[1:] if dim != 1][-1])
        return np.argsort(-flat, axis=-1, kind="stable")[:, :5]

    wanted, predicted = _classes("top5", runner, samples, labels, five)
    return float((predicted == wanted[:, None]).any(axis=1).mean())


def class_recall(runner: Runner, samples: Iterable[Feeds], labels: Labels) -> float:
    """Mean over the classes of the share of their samples that are found (macro-averaged recall)."""
    wanted, predicted = _classes("recall", runner, samples, labels, lambda scores: top1(scores).ravel())
    return float(np.mean([(predicted[wanted == label] == label).mean() for label in np.unique(wanted)]))


def _classes(
    name: str,
    runner: Runner,
    samples: Iterable[Feeds],
    labels: Labels,
    predict: Callable[[np.ndarray], np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """The labels as indices, checked, and what ``predict`` makes of the first output that holds scores of classes."""
    if isinstance(labels, PictureLabels):
        raise needs(name, "class labels", "give sub-folders by class, or a .csv with --labels")
    wanted = np.asarray(labels).ravel()
    if wanted.dtype.kind not in "biu" and not (wanted.dtype.kind == "f" and np.array_equal(wanted, np.floor(wanted))):
        raise UsageError(
            f"--metric {name}: the labels are no class indices: {wanted.dtype}, such as {wanted[0]!s:.20}",
            where=LABELS,
            remedy="give one label per sample, as class indices",
        )
    found, classes = [], 0
    for feeds in samples:
        outputs = runner.run(feeds)
        scores = next((output for output in outputs if is_class_like(output)), None)
        if scores is None:
            raise no_scores(name, ", ".join(str(list(output.shape)) for output in outputs))
        classes = int([dim for dim in scores.shape[1:] if dim != 1][-1])
        found.append(predict(scores))
    predicted = np.concatenate(found)
    if len(predicted) != wanted.size:
        raise UsageError(
            f"--metric {name}: {wanted.size} labels for {len(predicted)} predictions",
            where=LABELS,
            remedy="give one label per sample, as class indices",
        )
    low, high = wanted.min(), wanted.max()
    if high > classes - 1 or low < 0:
        raise UsageError(
            f"--metric {name}: the labels go from {low:g} to {high:g}, and there are {classes} classes",
            where=LABELS,
            remedy="class indices start at 0; give the ones the model's outputs stand for; of sub-folders with other "
            "numbers in a classes.txt beside them, in order",
        )
    return wanted, predicted


def spearman(runner: Runner, samples: Iterable[Feeds], labels: Labels) -> float:
    """Spearman's rank correlation of the first output, a number for each sample, with the labels; 0 where all answers
    are equal."""
    if isinstance(labels, PictureLabels) or labels.dtype.kind not in "biuf":
        raise needs("spearman", "a number for each sample", f"save them in the .npz under {LABELS}, or in a .csv")
    found = [runner.run(feeds)[0] for feeds in samples]
    answers, wanted = np.concatenate([np.ravel(output) for output in found]).astype(np.float64), labels.ravel()
    if answers.size != wanted.size:
        shape = list(found[0].shape)
        raise needs("spearman", f"one number for each label, and the first output is {shape}", "give FILE.py:FUNCTION")
    if not np.isfinite(answers).all() or np.ptp(answers) == 0 or np.ptp(wanted) == 0:
        return 0.0
    return float(np.corrcoef(_ranks(answers), _ranks(wanted))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks, the mean of them where values are equal."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[inverse])


def mean_iou(runner: Runner, samples: Iterable[Feeds], labels: Labels) -> float:
    """Mean over the classes of intersection over union of the pixels of all samples; 255 is left out.

    The first output holds scores ``[batch, classes, height, width]``, which are interpolated to the labels' size, or
    integers ``[batch, height, width]``. Scores of one class are those of 1 against 0, from 0.5 on where all are from 0
    to 1, from 0 on else; their masks may be black and white. Classes that neither labels nor answers have do not count.
    """
    table = np.zeros((0, 0), np.int64)
    for output, index in _rows(runner, samples):
        is_binary = output.ndim == 3 and output.shape[0] == 1 and is_float(output)
        if is_binary:
            least = 0.5 if output.min(initial=0) >= 0 and output.max(initial=0) <= 1 else 0.0
            output = np.concatenate([np.full_like(output, least), output])
        if output.ndim == 3 and output.shape[0] > 1 and is_float(output):
            classes, size = output.shape[0], output.shape[1:]
        elif not is_float(output) and output.ndim in (2, 3):
            output, size = output.reshape(output.shape[-2:]), output.shape[-2:]
            classes = 0
        else:
            shape = [1, *output.shape]
            raise needs("miou", f"scores [batch, classes, height, width], and the output is {shape}", "see FILE.py")
        wanted = _picture(labels, index, size, "miou", is_binary=is_binary)
        answer = _at_size(output, wanted.shape).argmax(0) if classes else output
        if wanted.shape != answer.shape or wanted.dtype.kind not in "biu":
            raise needs("miou", f"masks of {list(answer.shape)} with a class for each pixel", "see docs/pictures.md")
        counted = (wanted != _IGNORED) & (wanted >= 0)
        pairs, answers = wanted[counted].astype(np.int64), answer[counted].astype(np.int64)
        most = int(max(classes, pairs.max(initial=0) + 1, answers.max(initial=0) + 1, len(table)))
        if most > _MOST_CLASSES or answers.min(initial=0) < 0:
            raise needs("miou", f"masks of fewer than {_MOST_CLASSES} classes", "give PNGs of indices")
        if most > len(table):
            table = np.pad(table, (0, most - len(table)))
        table += np.bincount(pairs * most + answers, minlength=most * most).reshape(most, most)
    union = table.sum(0) + table.sum(1) - np.diag(table)
    return float(np.mean(np.diag(table)[union > 0] / union[union > 0])) if union.any() else 0.0


def _at_size(scores: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Scores ``[classes, height, width]`` at another size, by bilinear interpolation between the pixels' middles."""
    for axis, want in ((1, size[0]), (2, size[1])):
        has = scores.shape[axis]
        if has != want:
            at = np.clip((np.arange(want) + 0.5) * has / want - 0.5, 0, has - 1)
            low = np.floor(at).astype(int)
            share = (at - low).astype(np.float32).reshape((-1, 1) if axis == 1 else (-1,))
            first, second = np.take(scores, low, axis), np.take(scores, np.minimum(low + 1, has - 1), axis)
            scores = first + (second - first) * share
    return scores


def psnr(runner: Runner, samples: Iterable[Feeds], labels: Labels) -> float:
    """Peak signal-to-noise ratio in dB of the first output, a picture, against the one wanted; mean over the samples.

    ``10 log10(peak^2 / mean squared error)``, at most 100 for a picture; the peak is what a white pixel has.
    """
    found = []
    for output, index in _rows(runner, samples):
        wanted = _picture(labels, index, output.shape[1:] if output.shape[0] in (1, 3) else output.shape[:2], "psnr")
        if wanted.shape != output.shape:
            shapes = f"{list(output.shape)}, and the label {list(wanted.shape)}"
            raise needs("psnr", f"pictures as large as the output: it is {shapes}", "give targets with --labels")
        low, high = _range(labels, wanted)
        error = (np.clip(output.astype(np.float64), low, high) - wanted) / (high - low)
        found.append(10 * math.log10(1 / max(float(np.mean(error**2)), 1e-10)))
    return float(np.mean(found))


def _range(labels: Labels, wanted: np.ndarray) -> tuple[Any, Any]:
    """What black and white pixels have: of pictures what was done to them says; else 0, and 1 or 255."""
    if not isinstance(labels, PictureLabels) or labels.how is None:
        return 0.0, 255.0 if wanted.dtype.kind in "iu" or wanted.max() > 2 else 1.0
    multiplier, offset = labels.how.affine()
    shape = (-1, 1, 1) if labels.how.layout == "nchw" else (-1,)
    return offset.reshape(shape), (255 * multiplier + offset).reshape(shape)


def _rows(runner: Runner, samples: Iterable[Feeds]) -> Iterator[tuple[np.ndarray, int]]:
    """The first output row by row, and the number of the row."""
    index = 0
    for feeds in samples:
        for row in runner.run(feeds)[0]:
            yield row, index
            index += 1


def _picture(labels: Labels, index: int, size: tuple[int, ...], name: str, *, is_binary: bool = False) -> np.ndarray:
    """The label of a row: a mask, or a target."""
    if isinstance(labels, PictureLabels):
        if labels.kind != "picture":
            raise needs(name, "a picture for each picture", "give the folder of them with --labels")
        if index >= len(labels):
            raise needs(name, "one label per sample", "give as many labels as pictures")
        height, width = size[0], size[1]
        if name == "miou":
            return placed.mask(labels, index, is_binary=is_binary)
        return np.asarray(placed.target(labels, index, (height, width))[0])
    flat = labels.reshape(-1, *labels.shape[2:]) if name == "psnr" and labels.ndim == len(size) + 4 else labels
    if index >= len(flat) or flat.ndim < 3:
        raise needs(name, "a mask or a picture for each sample", f"save them in the .npz under {LABELS}")
    found = np.asarray(flat[index])
    return black_and_white(found) if is_binary else found


MEASURES: Mapping[str, Measure] = {
    "top1": top_1,
    "top5": top_5,
    "recall": class_recall,
    "miou": mean_iou,
    "psnr": psnr,
    "spearman": spearman,
}
