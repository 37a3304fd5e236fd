"""Metrics of boxes by COCO's definition, and the form of a detector's boxes found by the labels.

pycocotools computes the figures: COCO's definition is its code, crowds, ties and interpolation included, and published
figures are its own. Its loops in Python take 2 ms a picture and class at most; the networks take longer.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trtopt.accuracy.box_forms import BoxForm, parse_boxes
from trtopt.accuracy.boxes import forms_of, read_boxes
from trtopt.accuracy.compare import Runner
from trtopt.accuracy.labelled import LABELS, Labels, needs
from trtopt.errors import UsageError
from trtopt.images import placed
from trtopt.images.labels import Labels as PictureLabels
from trtopt.support._lazy import require
from trtopt.support.ort_session import Feeds

NAMES = ("map50", "map")
"""The metrics of boxes alone; ``recall`` is one of classes, too."""

_FIRST, _TRIED = 8, 64
"""Pictures that every form is tried on, and then the best of them."""

_BEST = 4

_Run = tuple[Sequence[np.ndarray], tuple[int, int], int]
"""Outputs, height and width of the input, and the row of a picture."""

LEAST = 0.01
"""mAP on them below which a form is taken for none: wrong ones agree with a label by chance."""


@dataclass(frozen=True)
class Detection:
    """A metric of boxes.

    Attributes:
        name: ``map50``: mean over the classes of the average precision at an overlap of 0.5; ``map``: the mean of that
            over overlaps from 0.5 to 0.95; ``recall``: mean share of boxes that are found at an overlap of 0.5.
        form: How the outputs hold boxes.
    """

    name: str
    form: BoxForm

    def __call__(self, runner: Runner, samples: Iterable[Feeds], labels: Labels) -> float:
        """The metric of what ``runner`` gives. Raises UsageError: the outputs are not of the form."""
        found: list[np.ndarray] = []
        size = (1, 1)
        for feeds in samples:
            size, rows = _input_of(feeds)
            outputs = runner.run(feeds)
            found += [read_boxes(self.form, outputs, size, row) for row in range(rows)]
        return coco(
            self.name, [_mapped(item, labels, self.form) for item in found], _wanted(self.name, labels, len(found))
        )


def fitted(
    name: str, given: str | None, reference: Runner, samples: Iterable[Feeds], labels: Labels
) -> tuple[Detection, str]:
    """A metric of boxes, and in one line what was found of their form.

    Without ``--boxes`` the form is, of those that the outputs' shapes allow, the one whose boxes agree best with the
    labels on the first pictures. That only as many values are scores as the labels have classes, where these are not
    named, has to be better by :data:`LEAST`.

    Args:
        name: ``map50``, ``map`` or ``recall``.
        given: The value of ``--boxes``; None to find it.
        reference: The FP32 model.
        samples: Of the labels, in their order.
        labels: Boxes.

    Raises:
        UsageError: The labels are no boxes, the outputs have no known form, or none agrees with the labels at all.
    """
    _wanted(name, labels, 0)
    if given is not None:
        return Detection(name, parse_boxes(given)), ""
    runs: list[_Run] = []
    for feeds in samples:
        size, rows = _input_of(feeds)
        outputs = reference.run(feeds)
        runs += [(outputs, size, row) for row in range(rows)]
        if len(runs) >= _TRIED:
            break
    wanted = _wanted(name, labels, len(runs))
    named = len(labels.classes) if isinstance(labels, PictureLabels) else 0
    forms = tuple(forms_of(*runs[0][:2], named or _highest(labels) + 1))
    if len(forms) > _BEST:
        first = _figures(forms, runs[:_FIRST], labels, wanted)
        least = sorted(figure for figure, _ in first)[-_BEST]
        tried = _figures([form for figure, form in first if figure >= least], runs, labels, wanted)
    else:
        tried = _figures(forms, runs, labels, wanted)
    named_outputs = zip(reference.output_names, runs[0][0], strict=True)
    shapes = ", ".join(f"{each} {list(output.shape)}" for each, output in named_outputs)
    if not tried:
        raise UsageError(
            f"--metric {name}: the outputs have no form of boxes that is known",
            where=f"outputs: {shapes}",
            remedy="give a metric of your own: FILE.py:FUNCTION",
        )
    best, form = max(tried, key=lambda item: item[0] - (LEAST if item[1].count and not named else 0))
    if best < LEAST:
        raise UsageError(
            f"--metric {name}: the boxes agree with the labels in no form, mAP {best:.3f} at best"
            f" ({len(forms)} tried on {len(runs)} pictures)",
            where=f"outputs: {shapes}",
            remedy="say the form with --boxes, and what is done to the pictures with --preprocess; boxes that count "
            "from anchors which the model does not hold need a metric of your own: FILE.py:FUNCTION",
        )
    why = "the only one that the outputs allow" if len(forms) == 1 else f"of {len(forms)} forms it agrees best"
    said = f"boxes are read as --boxes {form.describe()}: {why}"
    return Detection(name, form), f"{said} (mAP {best:.3f} on {len(runs)} labelled pictures)"


def _figures(
    forms: Sequence[BoxForm], runs: Sequence[_Run], labels: Labels, wanted: Sequence[np.ndarray]
) -> list[tuple[float, BoxForm]]:
    """``map`` of each form on the pictures of ``runs``, the first of those that ``wanted`` holds the boxes of."""
    read: dict[BoxForm, list[np.ndarray]] = {}
    found = []
    for form in forms:
        whatever = replace(form, classes="index")  # what classes mean decides nothing before _mapped
        if whatever not in read:
            read[whatever] = [read_boxes(whatever, outputs, size, row) for outputs, size, row in runs]
        boxes = [_mapped(item, labels, form) for item in read[whatever]]
        found.append((coco("map", boxes, wanted[: len(runs)]), form))
    return found


def are_boxes(labels: Labels) -> bool:
    """Whether labels are boxes."""
    if isinstance(labels, PictureLabels):
        return labels.kind == "boxes"
    return labels.ndim == 3 and labels.shape[-1] in (5, 6)


def _highest(labels: Labels) -> int:
    """The highest class that any picture has; -1 where none has a box."""
    rows = labels.values if isinstance(labels, PictureLabels) else labels.reshape(-1, *labels.shape[-2:])
    columns = (np.asarray(row)[:, 0] for row in rows)
    return max((int(column[np.isfinite(column)].max(initial=-1)) for column in columns), default=-1)


def _input_of(feeds: Feeds) -> tuple[tuple[int, int], int]:
    """Height and width of the pictures in a sample, and how many there are."""
    array = max(feeds.values(), key=lambda array: (array.ndim == 4, array.ndim == 3))
    if array.ndim not in (3, 4):
        raise needs("map", "a network that takes pictures", "give a metric of your own: FILE.py:FUNCTION")
    shape = array.shape[-3:]
    height, width = shape[:2] if shape[2] in (1, 3) else shape[1:]
    return (height, width), array.shape[0] if array.ndim == 4 else 1


def _wanted(name: str, labels: Labels, count: int) -> list[np.ndarray]:
    """The boxes of the first pictures: class, edges in pixels of the input, crowd."""
    remedy = "give COCO's .json or a folder of YOLO's .txt with --labels"
    if not are_boxes(labels):
        raise needs(name, "boxes", f"{remedy}, or [samples, boxes, 5] of class and edges in pixels under {LABELS}")
    if isinstance(labels, PictureLabels):
        if count > len(labels):
            raise needs(name, f"boxes for {count} pictures, and {len(labels)} have some", "label each picture")
        return [placed.boxes(labels, index) for index in range(count)]
    rows = labels.reshape(-1, *labels.shape[-2:]).astype(np.float64)
    if count > len(rows):
        raise needs(name, f"boxes for {count} pictures, and {len(rows)} have some", remedy)
    return [np.pad(row[row[:, 0] >= 0], ((0, 0), (0, 6 - row.shape[1]))) for row in rows[:count]]


def _mapped(boxes: np.ndarray, labels: Labels, form: BoxForm) -> np.ndarray:
    """Boxes with the classes of the labels."""
    found = boxes.copy()
    if form.classes == "one":
        found[:, 5] -= 1
    elif form.classes == "id" and isinstance(labels, PictureLabels) and labels.ids:
        ids = np.array(labels.ids)
        place = np.searchsorted(ids, found[:, 5]).clip(0, len(ids) - 1)
        found[:, 5] = np.where(ids[place] == found[:, 5], place, -1)
    return found[found[:, 5] >= 0]


def coco(name: str, found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    """COCO's figure for the boxes of pictures.

    Args:
        name: ``map50``, ``map`` or ``recall``, as in :class:`Detection`.
        found: For each picture ``[boxes, 6]``: edges, score, class.
        wanted: For each picture ``[boxes, 6]``: class, edges, crowd.

    Returns:
        From 0 to 1; 0 where there is no label.

    Raises:
        MissingDependencyError: pycocotools is not installed.
    """
    coco_module = require("pycocotools.coco", "images", f"compute {name}")
    eval_module = require("pycocotools.cocoeval", "images", f"compute {name}")
    if not any(_one_is_met(*picture) for picture in zip(found, wanted, strict=True)):
        return 0.0
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
        truth, answers = coco_module.COCO(), coco_module.COCO()
        classes = np.unique(np.concatenate([item[:, 0] for item in wanted])) if wanted else np.zeros(0)
        truth.dataset = _dataset([(item[:, 0], item[:, 1:5], item[:, 5], "iscrowd") for item in wanted], classes)
        answers.dataset = _dataset([(item[:, 5], item[:, :4], item[:, 4], "score") for item in found], classes)
        truth.createIndex()
        answers.createIndex()
        evaluation = eval_module.COCOeval(truth, answers, "bbox")
        evaluation.params.areaRng, evaluation.params.areaRngLbl = [[0, 1e15]], ["all"]
        evaluation.params.maxDets = [100]
        if name != "map":
            evaluation.params.iouThrs = np.array([0.5])
        evaluation.evaluate()
        evaluation.accumulate()
    figures = vars(evaluation)["eval"]["recall" if name == "recall" else "precision"]
    counted = figures[figures > -1]
    return float(counted.mean()) if counted.size else 0.0


def _one_is_met(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether a box may count as found: one of its class overlaps it by half, the least that any figure asks."""
    boxes = found[:, None]
    low = np.maximum(boxes[..., :2], wanted[:, 1:3])
    shared = np.maximum(np.minimum(boxes[..., 2:4], wanted[:, 3:5]) - low, 0).prod(axis=-1)
    sides = np.maximum(boxes[..., 2:4] - boxes[..., :2], 0).prod(axis=-1)
    either = sides + (wanted[:, 3:5] - wanted[:, 1:3]).prod(axis=-1) - shared
    is_counted = (boxes[..., 5] == wanted[:, 0]) & (wanted[:, 5] == 0)
    return bool((is_counted & (shared >= 0.499 * either)).any())  # COCO compares with 0.5, and rounds otherwise


def _dataset(rows: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray, str]], classes: np.ndarray) -> dict[str, Any]:
    """Boxes as pycocotools keeps them."""
    annotations: list[dict[str, Any]] = []
    for picture, (labels, boxes, values, key) in enumerate(rows, start=1):
        for label, (left, upper, right, lower), value in zip(labels, boxes.tolist(), values, strict=True):
            wide, high = max(right - left, 0.0), max(lower - upper, 0.0)
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": picture,
                    "category_id": int(label),
                    "bbox": [left, upper, wide, high],
                    "area": wide * high,
                    "iscrowd": 0,
                    key: int(value) if key == "iscrowd" else float(value),
                }
            )
    return {
        "images": [{"id": picture} for picture in range(1, len(rows) + 1)],
        "categories": [{"id": int(label)} for label in classes],
        "annotations": annotations,
    }
