"""How detectors write their boxes, as ``--boxes`` says it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from trtopt.errors import UsageError
from trtopt.support.words import did_you_mean

Head = Literal["nms", "yolov5", "yolov7", "yolov8", "yolov10", "yolox", "ssd", "detr", "rtdetr", "fastestdet"]
Corners = Literal["xyxy", "cxcywh", "yxyx"]
Unit = Literal["pixels", "shares"]
Classes = Literal["index", "id", "one"]


@dataclass(frozen=True)
class BoxForm:
    """How the outputs of a detector hold boxes.

    Attributes:
        head: ``nms``: boxes ``[batch, boxes, 4]``, scores ``[batch, classes, boxes]`` and what NonMaxSuppression
            selected of them, whole numbers ``[found, 3]`` of picture, class and box. ``yolov5``:
            ``[batch, boxes, 5 + classes]`` of a box, whether it holds an object, and a score for each class; ``yolox``
            likewise, its boxes relative to the cells of the strides 8, 16 and 32. ``yolov7``: rows ``[found, 7]`` of
            picture, box, class and score. ``yolov8`` (also 9, 11): ``[batch, 4 + classes, boxes]``. ``yolov10``:
            ``[batch, boxes, 6]`` of a box, its score and its class. ``ssd``: boxes ``[batch, boxes, 4]``, and scores
            and classes ``[batch, boxes]``, or without a batch; or the score as fifth column of the boxes. ``detr``:
            boxes and a softmax over the classes and none, in outputs of their own; ``rtdetr``: boxes and a sigmoid for
            each class, in two outputs or in one. ``fastestdet``: ``[batch, 5 + classes, height, width]`` of a cell
            each.
        corners: Of a box: left, upper, right and lower edge; or middle, width and height.
        unit: Pixels of the network's input, or shares of it.
        classes: What the classes are: indices of the labels, ids of COCO's categories, or indices counted from 1.
        conf: The least score of a box.
        iou: Boxes of one class that overlap by more are the same object; None where the network took them out.
        count: Of ``yolov5``, ``yolov8`` and ``yolox``: how many classes have scores; what is behind them are masks or
            keypoints. None where nothing is.
    """

    head: Head
    corners: Corners
    unit: Unit = "pixels"
    classes: Classes = "index"
    conf: float = 0.001
    iou: float | None = None
    count: int | None = None

    def describe(self) -> str:
        """The form in one line, as ``--boxes`` takes it."""
        iou = "none" if self.iou is None else f"{self.iou:g}"
        text = (
            f"{self.head},corners={self.corners},unit={self.unit},classes={self.classes},conf={self.conf:g},iou={iou}"
        )
        return text if self.count is None else f"{text},count={self.count}"


OVERLAP = 0.65
"""Ultralytics and YOLOX evaluate with 0.6 to 0.7."""

FORMS: Mapping[str, BoxForm] = {
    "nms": BoxForm("nms", "xyxy"),
    "yolov5": BoxForm("yolov5", "cxcywh", iou=OVERLAP),
    "yolov7": BoxForm("yolov7", "xyxy"),
    "yolov8": BoxForm("yolov8", "cxcywh", iou=OVERLAP),
    "yolov10": BoxForm("yolov10", "xyxy"),
    "yolox": BoxForm("yolox", "cxcywh", iou=OVERLAP),
    "ssd": BoxForm("ssd", "xyxy"),
    "detr": BoxForm("detr", "cxcywh", "shares"),
    "rtdetr": BoxForm("rtdetr", "cxcywh", "shares"),
    # Its own evaluation (github.com/dog-qiuqiu/FastestDet, utils/evaluation.py) has such thresholds.
    "fastestdet": BoxForm("fastestdet", "cxcywh", "shares", conf=0.01, iou=0.45),
}


COUNTED: Mapping[str, int] = {"yolov5": 5, "yolov8": 4, "yolox": 5}
"""Values before the scores of the classes, of heads behind whose scores masks or keypoints may stand."""


def parse_boxes(text: str) -> BoxForm:
    """Read ``--boxes``: a head, and what differs from its stock form, such as ``yolov5,unit=shares,iou=0.5``.

    Raises:
        UsageError: The text has another form.
    """
    head, *keys = (word.strip() for word in text.split(","))
    choices: dict[str, tuple[str, ...]] = {
        "corners": get_args(Corners),
        "unit": get_args(Unit),
        "classes": get_args(Classes),
    }
    if head not in FORMS:
        raise _wrong(f"{head!r} is no form of boxes", did_you_mean(head, FORMS))
    form = FORMS[head]
    for part in keys:
        key, _, value = (word.strip() for word in part.partition("="))
        if value in choices.get(key, ()):
            form = replace(form, **{key: value})  # type: ignore[arg-type]
        elif key == "iou" and value == "none":
            form = replace(form, iou=None)
        elif key in ("conf", "iou") and (number := _share(value)) is not None:
            form = replace(form, **{key: number})  # type: ignore[arg-type]
        elif key == "count" and head in COUNTED and re.fullmatch("[1-9][0-9]{0,4}", value):
            form = replace(form, count=int(value))
        else:
            share = ("a number from 0 to 1",)
            known = {**choices, "conf": share, "iou": (*share, "none")}
            known |= {"count": ("a whole number from 1 to 99999",)} if head in COUNTED else {}
            near = f"{key} is {' or '.join(known[key])};" if key in known else did_you_mean(key, known)
            raise _wrong(f"{part!r} is no part of a form of boxes", near)
    return form


def _share(word: str) -> float | None:
    try:
        number = float(word)
    except ValueError:
        return None
    return number if 0 <= number <= 1 else None


def _wrong(what: str, near: str) -> UsageError:
    keys = "corners=, unit=, classes=, count=, conf= and iou= (docs/detectors.md)"
    remedy = f"write one of {', '.join(FORMS)}; behind it {keys}"
    return UsageError(f"--boxes: {what}", where="--boxes", remedy=f"{near} {remedy}".strip())
