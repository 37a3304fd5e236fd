"""Boxes read from the outputs of every kind of detector, the form found by the labels, and COCO's figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pycocotools", reason="metrics of boxes are computed by it: pip install 'trtopt[images]'")

from trtopt.accuracy import detection
from trtopt.accuracy.box_forms import BoxForm, parse_boxes
from trtopt.accuracy.boxes import read_boxes
from trtopt.accuracy.detection import Detection, coco, fitted
from trtopt.errors import UsageError
from trtopt.images.labels import Labels
from trtopt.images.preprocess import Preprocess

SIZE, CLASSES, BOXES = 64, 6, 100
IDS = (1, 2, 3, 5, 7, 13)
RNG = np.random.default_rng(0)
FEEDS = {"x": np.zeros((2, 3, SIZE, SIZE), np.float32)}


@dataclass
class Fixed:
    """A network that gives the same outputs whatever it is fed."""

    outputs: list[np.ndarray]
    output_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.output_names = tuple(f"output{index}" for index in range(len(self.outputs)))

    def run(self, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        return self.outputs


def truth() -> np.ndarray:
    """[2 pictures, 5 boxes, 5] of class and edges in whole pixels; some overlap, none is the other."""
    rng = np.random.default_rng(1)
    low = rng.integers(0, 40, (2, 5, 2))
    high = low + rng.integers(4, 24, (2, 5, 2))
    label = rng.integers(0, CLASSES, (2, 5, 1))
    label[:, 0], label[:, 1] = 5, 0
    return np.concatenate([label, low, high], axis=-1).astype(np.float64)


TRUTH = truth()


def middle(boxes: np.ndarray) -> np.ndarray:
    return np.concatenate([(boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]], axis=-1)


def scored(fill: float, on: float, classes: int = CLASSES) -> np.ndarray:
    """[2, 100, classes] with the first five of the right class."""
    found = np.full((2, BOXES, classes), float(fill))
    for row, column in np.ndindex(2, 5):
        found[row, column, int(TRUTH[row, column, 0])] = on - column / 100
    return found


def placed(boxes: np.ndarray) -> np.ndarray:
    """[2, 100, 4]: the boxes, and others that no score is for."""
    return np.concatenate([boxes, np.tile(boxes[:, :1] * 0.9, (1, BOXES - 5, 1))], axis=1)


def yolov5() -> list[np.ndarray]:
    anywhere = np.full((2, BOXES, 1), 0.0)
    anywhere[:, :5] = 0.9
    return [np.concatenate([placed(middle(TRUTH[..., 1:])), anywhere, scored(0.01, 0.9)], axis=-1)]


def yolov8() -> list[np.ndarray]:
    return [np.concatenate([placed(middle(TRUTH[..., 1:])), scored(0, 0.9)], axis=-1).transpose(0, 2, 1)]


def yolov10() -> list[np.ndarray]:
    rows = np.zeros((2, 30, 6))
    rows[:, :5] = np.concatenate([TRUTH[..., 1:], np.full((2, 5, 1), 0.9), TRUTH[..., :1]], axis=-1)
    return [rows]


def ssd() -> list[np.ndarray]:
    label = np.array(IDS)[TRUTH[..., 0].astype(int)]
    return [TRUTH[..., 1:] / SIZE, label.astype(np.int64), np.full((2, 5), 0.8, np.float32)]


def ssd_yxyx() -> list[np.ndarray]:
    boxes = TRUTH[..., [2, 1, 4, 3]] / SIZE
    return [boxes, (TRUTH[..., 0] + 1).astype(np.float32), np.full((2, 5), 0.8, np.float32), np.array([5.0, 5.0])]


def ssd_of_tensorflow() -> list[np.ndarray]:
    """In the order of their names: places of the anchors, boxes, classes, scores, the number of detections."""
    anchors = np.arange(10, dtype=np.float32).reshape(2, 5) + 100
    boxes, classes, scores, count = ssd_yxyx()
    return [anchors, boxes, classes, scores, count]


def scores_as_fifth() -> list[np.ndarray]:
    return [np.concatenate([TRUTH[..., 1:], np.full((2, 5, 1), 0.8)], axis=-1), TRUTH[..., 0].astype(np.int64)]


def one_class_as_floats() -> list[np.ndarray]:
    """Scores above the classes, which are all 0."""
    return [TRUTH[..., 1:], np.full((2, 5), 0.8, np.float32), np.zeros((2, 5), np.float32)]


def yolov7() -> list[np.ndarray]:
    picture = np.repeat([[[0.0]], [[1.0]]], 5, axis=1)
    rows = np.concatenate([picture, TRUTH[..., 1:], TRUTH[..., :1], np.full((2, 5, 1), 0.9)], axis=-1)
    return [rows.reshape(10, 7)]


def nms() -> list[np.ndarray]:
    """As YOLOv3 of the ONNX model zoo: the indices select the boxes of the pictures among others of high scores."""
    chosen = [(row, int(label), place) for row in range(2) for place, label in enumerate(TRUTH[row, :, 0])]
    boxes = placed(TRUTH[..., [2, 1, 4, 3]])
    return [boxes, scored(0.95, 0.9).transpose(0, 2, 1), np.array([*chosen, (-1, -1, -1)], np.int32)[None]]


def yolox() -> list[np.ndarray]:
    """84 cells for 64 x 64 pixels; boxes of cells 1 (stride 8), 70 (stride 16) and 80 (stride 32), and two more."""
    found, cells = np.zeros((2, 84, 5 + CLASSES)), np.array([1, 70, 80, 8, 83])
    columns, rows, strides = (np.array(each) for each in ([1, 2, 0, 0, 1], [0, 1, 0, 1, 1], [8, 16, 32, 8, 32]))
    boxes = middle(TRUTH[..., 1:])
    found[:, cells, 0] = boxes[..., 0] / strides - columns
    found[:, cells, 1] = boxes[..., 1] / strides - rows
    found[:, cells, 2:4] = np.log(boxes[..., 2:] / strides[:, None])
    found[:, cells, 4] = 0.9
    for row, column in np.ndindex(2, 5):
        found[row, cells[column], 5 + int(TRUTH[row, column, 0])] = 0.9
    return [found]


def yolo_nas() -> list[np.ndarray]:
    """Boxes twice: overlaps are left to the caller."""
    boxes, scores = placed(TRUTH[..., 1:]), scored(0, 0.9)
    boxes[:, 5:10], scores[:, 5:10] = boxes[:, :5], scores[:, :5] * 0.999
    return [boxes, scores]


def raw_of_tensorflow() -> list[np.ndarray]:
    boxes, scores = yolo_nas()
    return [scores, boxes[..., [1, 0, 3, 2]] / SIZE]


def pp_yoloe() -> list[np.ndarray]:
    boxes, scores = yolo_nas()
    return [boxes, scores.transpose(0, 2, 1)]


def ssd_without_its_end() -> list[np.ndarray]:
    """The class of nothing is the first."""
    nothing = np.concatenate([np.full((2, BOXES, 1), 0.97), scored(0, 0.9)], axis=-1)
    return [nothing, placed(TRUTH[..., 1:]) / SIZE]


def yolov8_turned() -> list[np.ndarray]:
    """Boxes and classes as rows, and twice."""
    boxes, scores = yolo_nas()
    return [np.concatenate([middle(boxes), scores], axis=-1)]


def detr() -> list[np.ndarray]:
    logits = scored(-9, 9, CLASSES + 1)
    logits[:, 5:, -1] = 9
    return [logits, placed(middle(TRUTH[..., 1:])) / SIZE]


def rtdetr() -> list[np.ndarray]:
    return [placed(middle(TRUTH[..., 1:])) / SIZE, scored(-9, 3)]


def rtdetr_joined() -> list[np.ndarray]:
    return [np.concatenate([placed(middle(TRUTH[..., 1:])) / SIZE, scored(0.0001, 0.9)], axis=-1)]


def of_picture(label: np.ndarray) -> Labels:
    shares = np.zeros((5, 6), np.float32)
    shares[:, 0], shares[:, 1:5] = label[:, 0], label[:, 1:] / SIZE
    return Labels("boxes", (Path("a"),), [shares], "here", ids=IDS)


@pytest.fixture
def labels(monkeypatch: pytest.MonkeyPatch) -> Labels:
    monkeypatch.setattr("trtopt.images.placed.picture_size", lambda path: (SIZE, SIZE))
    one, other = (of_picture(rows) for rows in TRUTH)
    values = [np.asarray(one.values[0]), np.asarray(other.values[0])]
    return Labels("boxes", (Path("a"), Path("b")), values, "here", ids=IDS, how=Preprocess((SIZE, SIZE)))


@pytest.mark.parametrize(
    ("make", "head", "corners", "unit", "classes"),
    [
        (yolov5, "yolov5", "cxcywh", "pixels", "index"),
        (yolov8, "yolov8", "cxcywh", "pixels", "index"),
        (yolov10, "yolov10", "xyxy", "pixels", "index"),
        (yolov7, "yolov7", "xyxy", "pixels", "index"),
        (nms, "nms", "yxyx", "pixels", "index"),
        (yolox, "yolox", "cxcywh", "pixels", "index"),
        (yolo_nas, "rtdetr", "xyxy", "pixels", "index"),
        (raw_of_tensorflow, "rtdetr", "yxyx", "shares", "index"),
        (pp_yoloe, "rtdetr", "xyxy", "pixels", "index"),
        (yolov8_turned, "rtdetr", "cxcywh", "pixels", "index"),
        (ssd_without_its_end, "rtdetr", "xyxy", "shares", "one"),
        (scores_as_fifth, "ssd", "xyxy", "pixels", "index"),
        (ssd_of_tensorflow, "ssd", "yxyx", "shares", "one"),
        (ssd, "ssd", "xyxy", "shares", "id"),
        (ssd_yxyx, "ssd", "yxyx", "shares", "one"),
        (detr, "detr", "cxcywh", "shares", "index"),
        (rtdetr, "rtdetr", "cxcywh", "shares", "index"),
        (rtdetr_joined, "rtdetr", "cxcywh", "shares", "index"),
    ],
)
def test_the_form_is_the_one_whose_boxes_agree_with_the_labels(
    labels: Labels, make: Callable[[], list[np.ndarray]], head: str, corners: str, unit: str, classes: str
) -> None:
    network = Fixed(make())
    measure, note = fitted("map50", None, network, [FEEDS], labels)
    form = measure.form
    assert (form.head, form.corners, form.unit, form.classes) == (head, corners, unit, classes), note
    assert form.describe() in note
    assert measure(network, [FEEDS], labels) == pytest.approx(1.0)
    said, silence = fitted("map50", form.describe(), network, [FEEDS], labels)
    assert said.form == form and silence == ""


@pytest.mark.parametrize("make", [yolov5, ssd, yolov8_turned])
def test_forms_are_told_apart_where_the_first_pictures_show_nothing(
    labels: Labels, make: Callable[[], list[np.ndarray]]
) -> None:
    """Every form is as good on eight pictures without a box; those behind them tell."""
    first, nothing = fitted("map50", None, Fixed(make()), [FEEDS], labels)[0], np.zeros((0, 6), np.float32)
    values: list[np.ndarray] = [nothing] * 10 + [np.asarray(value) for value in labels.values]
    later = replace(labels, files=labels.files * 6, values=values)
    measure, note = fitted("map50", None, Fixed(make()), [FEEDS] * 6, later)
    assert measure.form == first.form and "on 12 labelled pictures" in note


def test_rows_of_labels_that_are_filled_up_are_no_boxes() -> None:
    padded = np.concatenate([TRUTH, np.full((2, 3, 5), np.nan)], axis=1)
    measure, _ = fitted("map50", None, Fixed(yolov8()), [FEEDS], padded)
    assert measure(Fixed(yolov8()), [FEEDS], padded) == pytest.approx(1.0)


def with_more(head: str, more: np.ndarray) -> Fixed:
    """A YOLO whose boxes have 32 values more behind their scores, such as of a mask."""
    (output,) = yolov8() if head == "yolov8" else yolov5()
    rows = more if head == "yolov5" else more.transpose(0, 2, 1)
    return Fixed([np.concatenate([output, rows], axis=2 if head == "yolov5" else 1)])


@pytest.mark.parametrize("head", ["yolov8", "yolov5"])
def test_masks_and_keypoints_behind_the_scores_are_none_of_them(labels: Labels, head: str) -> None:
    """As of YOLO v8's and v5's networks for segmentation and poses: the labels name the classes."""
    network = with_more(head, np.random.default_rng(0).normal(0, 9, (2, BOXES, 32)))
    named = replace(labels, classes=("a", "b", "c", "d", "e", "f"))
    measure, note = fitted("map50", None, network, [FEEDS], named)
    assert measure.form.head == head and measure.form.count == CLASSES and "count=6" in note
    assert measure(network, [FEEDS], named) == pytest.approx(1.0)
    assert fitted("map50", f"{head},count=6", network, [FEEDS], named)[0].form == measure.form


def test_labels_without_names_have_the_classes_that_occur_where_that_is_better(labels: Labels) -> None:
    masks = with_more("yolov8", np.random.default_rng(0).normal(0, 9, (2, BOXES, 32)))
    measure, _ = fitted("map50", None, masks, [FEEDS], labels)
    assert measure.form.count == CLASSES and measure(masks, [FEEDS], labels) == pytest.approx(1.0)
    others = with_more("yolov8", np.full((2, BOXES, 32), 0.002))
    assert fitted("map50", None, others, [FEEDS], labels)[0].form.count is None


def test_classes_of_floats_are_told_from_scores() -> None:
    found = read_boxes(parse_boxes("ssd"), one_class_as_floats(), (SIZE, SIZE), 0)
    np.testing.assert_allclose(found[:, 4:], [[0.8, 0]] * 5, rtol=1e-6)


def test_a_picture_without_rows_or_indices_has_no_box() -> None:
    assert len(read_boxes(parse_boxes("yolov7"), [np.zeros((0, 7), np.float32)], (SIZE, SIZE), 0)) == 0
    boxes, scores, _ = nms()
    assert len(read_boxes(parse_boxes("nms"), [boxes, scores, np.zeros((0, 3), np.int64)], (SIZE, SIZE), 1)) == 0
    assert len(read_boxes(parse_boxes("nms"), [boxes, scores, np.array([[0, 99, 0]])], (SIZE, SIZE), 0)) == 0


def test_boxes_may_come_with_arrays_of_labels() -> None:
    rows = np.full((2, 7, 5), -1.0)
    rows[:, :5] = TRUTH
    measure, _ = fitted("map", None, Fixed(yolov8()), [FEEDS], rows)
    assert measure(Fixed(yolov8()), [FEEDS], rows) == pytest.approx(1.0)


def test_overlapping_boxes_of_one_class_are_one_object() -> None:
    rows = np.zeros((1, 3, 7))
    rows[0] = [[10, 10, 8, 8, 1, 0.9, 0], [10, 10, 8, 7, 1, 0.8, 0], [10, 10, 8, 8, 1, 0, 0.7]]
    found = read_boxes(parse_boxes("yolov5"), [np.concatenate([rows, np.zeros((1, 9, 7))], axis=1)], (64, 64), 0)
    np.testing.assert_allclose(found[:, 4:], [[0.9, 0], [0.7, 1]], rtol=1e-6)
    assert len(read_boxes(parse_boxes("yolov5,iou=none"), [rows.repeat(4, axis=1)], (64, 64), 0)) == 12


def test_of_many_boxes_the_first_hundred_are_those_that_suppression_by_class_keeps() -> None:
    """Against suppression as its definition says it, one box at a time: every score is above the least."""
    rng = np.random.default_rng(4)
    low, scores = rng.random((400, 2)) * 40, rng.random((400, 3))
    boxes = np.concatenate([low, low + 4 + rng.random((400, 2)) * 12], axis=1)
    form = replace(parse_boxes("yolov8,corners=xyxy"), iou=0.4)
    (found,) = [read_boxes(form, [np.concatenate([boxes, scores], axis=1).T[None]], (SIZE, SIZE), 0)]
    kept: list[tuple[int, int]] = []
    for place in np.argsort(-scores, axis=None)[: 400 * 3]:
        box, label = divmod(int(place), 3)
        others = [boxes[other] for other, same in kept if same == label]
        if all(_overlap(boxes[box], other) <= 0.4 for other in others):
            kept.append((box, label))
    expected = np.array([[*boxes[box], scores[box, label], label] for box, label in kept[:100]])
    assert len(expected) == 100
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def _overlap(one: np.ndarray, other: np.ndarray) -> float:
    sides = np.maximum(np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2]), 0)
    return float(sides.prod() / ((one[2:] - one[:2]).prod() + (other[2:] - other[:2]).prod() - sides.prod()))


def test_the_figures_are_coco_s() -> None:
    """By hand: two boxes to find; the best answer is right, the second wrong, the third right, so that precision is 1
    up to a recall of 0.5 and 2/3 up to 1 at the 101 points of COCO."""
    wanted = [np.array([[0, 0, 0, 10, 10, 0], [0, 20, 20, 30, 30, 0]], float)]
    found = [np.array([[0, 0, 10, 10, 0.9, 0], [40, 40, 50, 50, 0.8, 0], [20, 20, 30, 30, 0.7, 0]], float)]
    assert coco("map50", found, wanted) == pytest.approx((51 + 50 * 2 / 3) / 101)
    assert coco("recall", found, wanted) == 1.0
    near = [np.array([[0, 0, 10, 7.2, 0.9, 0]], float)]
    assert coco("map", near, [wanted[0][:1]]) == pytest.approx(0.5)  # an overlap of 0.72: five thresholds of ten


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_met_only_where_coco_s_figure_is_zero(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = np.random.default_rng(seed)

    def boxes(count: int) -> np.ndarray:
        low = rng.integers(0, 12, (count, 2))
        return np.concatenate([low, low + rng.integers(0, 5, (count, 2))], axis=1)

    found, wanted = [], []
    for _ in range(2):
        count, labelled = rng.integers(0, 4, 2)
        found.append(np.concatenate([boxes(count), rng.random((count, 1)), rng.integers(0, 2, (count, 1))], axis=1))
        classes, crowds = rng.integers(0, 2, (labelled, 1)), rng.random((labelled, 1)) < 0.3
        wanted.append(np.concatenate([classes, boxes(labelled), crowds], axis=1))
    figures = {name: coco(name, found, wanted) for name in ("map", "map50", "recall")}
    monkeypatch.setattr(detection, "_one_is_met", lambda *picture: True)
    assert figures == {name: coco(name, found, wanted) for name in figures}


def test_a_crowd_takes_any_number_of_boxes_and_counts_for_none() -> None:
    wanted = [np.array([[0, 0, 0, 10, 10, 0], [0, 20, 20, 60, 60, 1]], float)]
    found = [np.array([[21, 21, 30, 30, 0.95, 0], [31, 31, 40, 40, 0.9, 0], [0, 0, 10, 10, 0.8, 0]], float)]
    assert coco("map50", found, wanted) == pytest.approx(1.0)


@pytest.mark.parametrize("shape", [(3, SIZE, SIZE), (SIZE, SIZE, 3)])
def test_pictures_may_come_without_a_batch(shape: tuple[int, ...]) -> None:
    (picture, _), network = truth(), Fixed([part[0] for part in ssd()])
    feeds = [{"tokens": np.zeros((2, 5)), "x": np.zeros(shape, np.float32)}]
    classes = np.array(IDS)[picture[:, :1].astype(int)]
    measure, _ = fitted("map50", None, network, feeds, np.concatenate([classes, picture[:, 1:]], axis=1)[None])
    assert (measure.form.head, measure.form.unit) == ("ssd", "shares")
    assert measure.form.classes in ("index", "id")


def test_pictures_without_boxes_and_without_answers_are_counted() -> None:
    nothing = np.zeros((0, 6))
    assert coco("map50", [nothing, nothing], [nothing, nothing]) == 0.0
    wanted = [np.array([[2, 0, 0, 10, 10, 0]], float), nothing]
    assert coco("map50", [nothing, nothing], wanted) == 0.0
    wrong_first = [np.array([[0, 0, 10, 10, 0.5, 2]], float), np.array([[0, 0, 10, 10, 0.9, 2]], float)]
    assert coco("map50", wrong_first, wanted) == pytest.approx(0.5)


def test_outputs_that_hold_no_boxes_are_refused(labels: Labels) -> None:
    with pytest.raises(UsageError, match="no form of boxes that is known"):
        fitted("map50", None, Fixed([np.zeros((2, 1000))]), [FEEDS], labels)
    with pytest.raises(UsageError, match="in no form"):
        fitted("map50", None, Fixed([np.zeros((2, BOXES, 11))]), [FEEDS], labels)
    with pytest.raises(UsageError, match="not of the form yolov5"):
        read_boxes(parse_boxes("yolov5"), [np.zeros((2, 1000))], (64, 64), 0)
    with pytest.raises(UsageError, match="needs boxes"):
        fitted("map50", None, Fixed(yolov8()), [FEEDS], np.zeros(2, int))


def test_a_form_that_agrees_by_chance_is_none(labels: Labels) -> None:
    """The ninetieth box is the first that agrees with a label."""
    rows = np.zeros((2, 400, 6))
    rows[..., :4], rows[..., 4], rows[..., 5] = TRUTH[0, 0, 1:] + 200, np.linspace(1, 0.5, 400), TRUTH[0, 0, 0]
    rows[0, 90, :4] = TRUTH[0, 0, 1:]
    with pytest.raises(UsageError, match="in no form"):
        fitted("map50", None, Fixed([rows]), [FEEDS], labels)


def test_numbers_that_are_not_finite_are_no_boxes() -> None:
    broken = [np.full((1, BOXES, 11), np.nan)]
    assert len(read_boxes(parse_boxes("yolov5"), broken, (64, 64), 0)) == 0
    for make in (detr, rtdetr, yolov8):
        outputs = [np.where(output > 0, np.inf, output) for output in make()]
        read_boxes(parse_boxes(make.__name__), outputs, (64, 64), 0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "yolo",
        "yolov8,iou=2",
        "yolov8,unit=metres",
        "yolov8,conf",
        "yolov8,size=3",
        "ssd,count=3",
        "yolov8,count=x",
        "yolov8,count=0",
    ],
)
def test_a_form_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_boxes(text)
    assert caught.value.where == "--boxes" and "yolov5" in caught.value.remedy


@pytest.mark.parametrize(
    ("part", "values"), [("unit=metres", "unit is pixels or shares"), ("iou=2", "from 0 to 1 or none")]
)
def test_a_wrong_value_is_answered_with_those_of_its_key(part: str, values: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_boxes(f"yolov8,{part}")
    assert values in caught.value.remedy and "did you mean" not in caught.value.remedy


def test_a_form_is_read_as_it_is_written() -> None:
    form = BoxForm("ssd", "yxyx", "shares", "one", 0.25, 0.5)
    assert parse_boxes(form.describe()) == form
    assert parse_boxes("yolov8").iou == 0.65 and parse_boxes("yolov10").iou is None


def test_recall_is_the_share_of_boxes_found(labels: Labels) -> None:
    outputs = yolov8()
    outputs[0][0, :, 0] = 0  # one of ten boxes is not found
    measure = Detection("recall", parse_boxes("yolov8"))
    assert 0.8 < measure(Fixed(outputs), [FEEDS], labels) < 1.0
