"""The boxes read from the outputs of a detector."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np

from trtopt.accuracy.box_forms import COUNTED, FORMS, OVERLAP, BoxForm, Classes, Corners, Head, Unit
from trtopt.errors import UsageError

MOST_DETECTIONS = 100
"""Of a picture, the highest scores: COCO's ``maxDets``."""

_MOST_CANDIDATES = 3000
"""Of a picture before overlaps are taken out; those of lower scores hardly ever end among the first hundred."""

_STRIDES = (8, 16, 32)
"""Of YOLOX's cells, in pixels (github.com/Megvii-BaseDetection/YOLOX, yolox/models/yolo_head.py)."""

Size = tuple[int, int]
"""Height and width of the network's input, in pixels."""

Raw = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Boxes ``[boxes, 4]`` as the network writes them, scores ``[boxes]`` and classes ``[boxes]`` of one picture."""


def forms_of(outputs: Sequence[np.ndarray], size: Size, count: int = 0) -> Iterator[BoxForm]:
    """The forms that outputs of such shapes may have, the most common first.

    Indices that NonMaxSuppression selected leave no other. Edges and pixels are those of networks that leave overlaps
    to the caller (YOLO-NAS, SSD without its end, YOLO v8 turned), other than RT-DETR.

    Args:
        outputs: Of the network, in graph order.
        size: Height and width of its input, in pixels.
        count: How many classes the labels have.
    """
    every = itertools.product(("cxcywh", "xyxy"), ("pixels", "shares"), ("index", "id", "one"))
    ways: list[tuple[Corners, Unit, Classes]] = list(every)  # type: ignore[arg-type]
    found = {form: parts for form in FORMS.values() if (parts := _parts(form.head, outputs, size)) is not None}
    for form in [form for form in found if form.head == "nms"] or found:
        if count and form.head in COUNTED and _classes_of(form.head, found[form][0]) > count:
            yield replace(form, count=count)
        if form.head in ("fastestdet", "yolox"):
            yield form
            continue
        stock = (form.corners, form.unit)
        for corners, unit, classes in sorted(ways, key=lambda way: (way[2] != "index", way[:2] != stock)):
            iou = OVERLAP if form.head == "rtdetr" and (corners, unit) != stock else form.iou
            yield replace(form, corners=corners, unit=unit, classes=classes, iou=iou)
        if form.head in ("ssd", "nms", "rtdetr"):
            iou = OVERLAP if form.head == "rtdetr" else form.iou
            for unit, classes in itertools.product(get_args(Unit), get_args(Classes)):
                yield replace(form, corners="yxyx", unit=unit, classes=classes, iou=iou)


def _classes_of(head: Head, output: np.ndarray) -> int:
    """How many scores a box has in an output, if all behind the box are."""
    return int(output.shape[1 if head == "yolov8" else 2]) - COUNTED[head]


def read_boxes(form: BoxForm, outputs: Sequence[np.ndarray], size: Size, row: int) -> np.ndarray:
    """The boxes of one picture of a batch.

    Args:
        form: How the outputs hold them.
        outputs: Of the network, in graph order.
        size: Height and width of its input, in pixels.
        row: The picture's place in the batch.

    Returns:
        FP64 ``[boxes, 6]``: left, upper, right and lower edge in pixels of the input, score, class; the highest scores
        first, at most :data:`MOST_DETECTIONS`.

    Raises:
        UsageError: The outputs are not of that form.
    """
    parts = _parts(form.head, outputs, size)
    if parts is None:
        shapes = ", ".join(str(list(output.shape)) for output in outputs)
        raise UsageError(
            f"The outputs are not of the form {form.head}",
            where=f"outputs {shapes}",
            remedy="name the form they have with --boxes, or leave it out to have all tried",
        )
    if form.count is not None:
        last = COUNTED[form.head] + form.count
        parts = [parts[0][:, :last] if form.head == "yolov8" else parts[0][:, :, :last]]
    boxes, scores, classes = _READERS[form.head](parts, row, size)
    kept = np.flatnonzero((scores > form.conf) & np.isfinite(boxes).all(axis=1))
    kept = kept[np.argsort(-scores[kept], kind="stable")[:_MOST_CANDIDATES]]
    found = np.empty((len(kept), 6))
    found[:, :4] = _edges(boxes[kept].astype(np.float64), form.corners)
    if form.unit == "shares":
        found[:, :4] *= (size[1], size[0], size[1], size[0])
    found[:, 4], found[:, 5] = scores[kept], classes[kept]
    return (found if form.iou is None else _apart(found, form.iou))[:MOST_DETECTIONS]


def _edges(boxes: np.ndarray, corners: Corners) -> np.ndarray:
    if corners == "yxyx":
        return boxes[:, [1, 0, 3, 2]]
    if corners == "xyxy":
        return boxes
    half = boxes[:, 2:] / 2
    return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)


def _apart(found: np.ndarray, most: float) -> np.ndarray:
    """The first boxes, sorted by score, without those that overlap one of their class before them by more than
    ``most``: :data:`MOST_DETECTIONS` of them, whatever comes behind."""
    kept: list[int] = []
    sides = np.maximum(found[:, 2:4] - found[:, :2], 0)
    areas, labels, left = sides[:, 0] * sides[:, 1], found[:, 5].copy(), np.arange(len(found))
    while len(left) and len(kept) < MOST_DETECTIONS:
        first, left = left[0], left[1:]
        kept.append(int(first))
        is_covered = labels[left] == labels[first]
        same = left[is_covered]
        low = np.maximum(found[first, :2], found[same, :2])
        inner = np.maximum(np.minimum(found[first, 2:4], found[same, 2:4]) - low, 0)
        shared = inner[:, 0] * inner[:, 1]
        is_covered[is_covered] = ~(shared <= most * (areas[first] + areas[same] - shared))
        left = left[~is_covered]
    return found[kept]


def _parts(head: Head, outputs: Sequence[np.ndarray], size: Size) -> list[np.ndarray] | None:
    """The outputs that hold the boxes of a head, in its order; None where there are none of its shapes."""
    if head == "nms":
        return _selected(outputs)
    if head in ("ssd", "detr"):
        return _apart_outputs(outputs, with_classes=head == "ssd")
    if head == "rtdetr" and len(outputs) > 1 and (found := _apart_outputs(outputs, with_classes=False)):
        return found
    for output in outputs:
        rank, shape = output.ndim, output.shape
        if head == "fastestdet":
            if rank == 4 and shape[1] > 5:
                return [output]
        elif head == "yolov7":
            if rank == 2 and shape[1] == 7:
                return [output]
        elif rank == 3:
            is_wide = shape[1] < shape[2]
            is_tall = shape[2] > 5 and not is_wide
            fits = {
                "yolov5": is_tall,
                "yolov8": shape[1] > 4 and is_wide,
                "yolov10": shape[2] == 6,
                "yolox": is_tall and shape[1] == len(_cells(size)),
                "rtdetr": shape[2] > 4 and not is_wide,
            }
            if fits[head]:
                return [output]
    return None


def _selected(outputs: Sequence[np.ndarray]) -> list[np.ndarray] | None:
    """Boxes, scores and the indices that NonMaxSuppression selected."""
    indices = next((item for item in outputs if item.dtype.kind in "iu" and item.shape[-1:] == (3,)), None)
    rest = [output for output in outputs if output.ndim == 3 and output.dtype.kind == "f"]
    boxes = next((output for output in rest if output.shape[-1] == 4), None)
    if indices is None or boxes is None:
        return None
    wanted = (boxes.shape[0], boxes.shape[1])
    scores = next((item for item in rest if item is not boxes and (item.shape[0], item.shape[2]) == wanted), None)
    return None if scores is None else [boxes, scores, indices.reshape(-1, 3)]


def _apart_outputs(outputs: Sequence[np.ndarray], *, with_classes: bool) -> list[np.ndarray] | None:
    """Boxes, scores, and with them classes of outputs of their own, each with a batch as first axis."""
    sides = (4, 5) if with_classes else (4,)
    holding = [output for output in outputs if output.ndim in (2, 3) and output.shape[-1] in sides]
    if not holding:
        return None
    boxes = max(holding, key=lambda output: output.ndim)
    places = boxes.shape[:-1]
    rest = [output for output in outputs if output is not boxes]
    if not with_classes:
        turned = [item.swapaxes(1, 2) for item in rest if item.ndim == 3]  # [batch, classes, boxes] of PP-YOLOE
        scores = next((item for item in [*rest, *turned] if item.shape[:-1] == places and item.shape[-1] > 0), None)
        return [boxes, scores] if scores is not None and len(places) == 2 else None
    flat = [item for item in rest if item.shape == places]
    if boxes.shape[-1] == 5:
        boxes, flat = boxes[..., :4], [boxes[..., 4], *flat]
    # Of floats, scores are no whole numbers; of whole ones, classes are below the places of anchors (TensorFlow's).
    floats = sorted((item for item in flat if item.dtype.kind == "f"), key=_as_scores)
    classes = [item for item in flat if item.dtype.kind in "iu"] or floats[1:]
    if not classes or not floats:
        return None
    parts = [boxes, floats[0], classes[0]]
    return parts if len(places) == 2 else [item[None] for item in parts]


def _as_scores(values: np.ndarray) -> tuple[bool, float]:
    return bool((values == np.floor(values)).all()), float(np.abs(values).max(initial=0))


@functools.cache
def _cells(size: Size) -> np.ndarray:
    """Column, row and stride of each of YOLOX's cells, FP32 ``[cells, 3]``, for an input of ``size``."""
    found = []
    for stride in _STRIDES:
        rows, columns = np.mgrid[: size[0] // stride, : size[1] // stride]
        found.append(np.stack([columns.ravel(), rows.ravel(), np.full(rows.size, stride)], axis=1))
    return np.concatenate(found).astype(np.float32)


def _each_class(boxes: np.ndarray, scores: np.ndarray) -> Raw:
    """A box for each of its classes, of which the highest scores are kept: ``[boxes, classes]`` scores."""
    most = min(scores.size, _MOST_CANDIDATES)
    best = np.argpartition(-scores, most - 1, axis=None)[:most] if most else np.zeros(0, int)
    place, label = np.unravel_index(np.sort(best), scores.shape)
    return boxes[place], scores[place, label], label


def _nms(parts: list[np.ndarray], row: int, _: Size) -> Raw:
    boxes, scores, indices = parts
    most = (scores.shape[0], scores.shape[1], boxes.shape[1])
    kept = indices[((indices >= 0) & (indices < most)).all(axis=1) & (indices[:, 0] == row)]
    label, place = kept[:, 1], kept[:, 2]
    return boxes[row, place], scores[row, label, place].astype(np.float32), label


def _yolov5(parts: list[np.ndarray], row: int, _: Size) -> Raw:
    found = parts[0][row].astype(np.float32)
    return _each_class(found[:, :4], found[:, 4:5] * found[:, 5:])


def _yolov7(parts: list[np.ndarray], row: int, _: Size) -> Raw:
    found = parts[0][parts[0][:, 0] == row].astype(np.float32)
    return found[:, 1:5], found[:, 6], found[:, 5]


def _yolox(parts: list[np.ndarray], row: int, size: Size) -> Raw:
    found, cells = parts[0][row].astype(np.float32), _cells(size)
    found[:, :2] = (found[:, :2] + cells[:, :2]) * cells[:, 2:]
    found[:, 2:4] = np.exp(np.minimum(found[:, 2:4], 60)) * cells[:, 2:]
    return _each_class(found[:, :4], found[:, 4:5] * found[:, 5:])


def _yolov8(parts: list[np.ndarray], row: int, _: Size) -> Raw:
    found = parts[0][row].astype(np.float32)
    return _each_class(found[:4].T, found[4:].T)


def _yolov10(parts: list[np.ndarray], row: int, _: Size) -> Raw:
    found = parts[0][row].astype(np.float32)
    return found[:, :4], found[:, 4], found[:, 5]


def _ssd(parts: list[np.ndarray], row: int, _: Size) -> Raw:
    boxes, scores, classes = (part[row] for part in parts)
    return boxes, scores.astype(np.float32), classes


def _detr(parts: list[np.ndarray], row: int, _: Size) -> Raw:
    logits = np.nan_to_num(parts[1][row].astype(np.float64))
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return _each_class(parts[0][row], (powers / powers.sum(axis=-1, keepdims=True))[:, :-1])


def _rtdetr(parts: list[np.ndarray], row: int, _: Size) -> Raw:
    boxes, scores = (parts[0][row], parts[1][row]) if len(parts) == 2 else (parts[0][row][:, :4], parts[0][row][:, 4:])
    scores = np.nan_to_num(scores.astype(np.float64))
    if scores.min(initial=0) < 0 or scores.max(initial=0) > 1:
        scores = 1 / (1 + np.exp(-np.clip(scores, -60, 60)))
    return _each_class(boxes, scores)


def _fastestdet(parts: list[np.ndarray], row: int, _: Size) -> Raw:
    """Its own decoding: the middle is off its cell by a tanh, the sides are sigmoids, and the score is
    ``object^0.6 class^0.4`` (github.com/dog-qiuqiu/FastestDet, utils/tool.py, ``handle_preds``)."""
    found = parts[0][row].astype(np.float64)
    high, wide = found.shape[1:]
    y, x = np.mgrid[:high, :wide]
    sides = 1 / (1 + np.exp(-np.clip(found[3:5], -60, 60)))
    boxes = np.stack([(x + np.tanh(found[1])) / wide, (y + np.tanh(found[2])) / high, *sides], axis=-1)
    best = found[5:].argmax(0)
    scores = np.clip(found[0], 0, 1) ** 0.6 * np.clip(found[5:].max(0), 0, 1) ** 0.4
    return boxes.reshape(-1, 4), scores.ravel(), best.ravel()


_READERS: Mapping[str, Callable[[list[np.ndarray], int, Size], Raw]] = {
    "nms": _nms,
    "yolov5": _yolov5,
    "yolov7": _yolov7,
    "yolov8": _yolov8,
    "yolov10": _yolov10,
    "yolox": _yolox,
    "ssd": _ssd,
    "detr": _detr,
    "rtdetr": _rtdetr,
    "fastestdet": _fastestdet,
}
