"""Metrics of outputs against labels: what they say of answers that are known, and which labels they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from trtopt.accuracy.labelled import MEASURES
from trtopt.accuracy.metric import load_metric
from trtopt.errors import UsageError
from trtopt.images.labels import Labels
from trtopt.images.preprocess import Preprocess


@dataclass
class Echo:
    """A network that gives what it is fed."""

    output_names: tuple[str, ...] = ("y",)

    def run(self, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        return [feeds["x"]]


def measured(name: str, outputs: list[np.ndarray], labels: np.ndarray | Labels) -> float:
    return MEASURES[name](Echo(), [{"x": output} for output in outputs], labels)


def scores(*places: int, classes: int = 10) -> list[np.ndarray]:
    """For each sample scores that put class 0 at a place of the ranking."""
    found = []
    for place in places:
        row = np.arange(classes, 0, -1, dtype=np.float32)
        row[1:] -= np.where(np.arange(1, classes) > place, 1, -1)
        row[0] = classes - place
        found.append(row[None])
    return found


def test_top5_is_the_share_of_labels_among_the_five_highest_scores() -> None:
    outputs, labels = scores(0, 1, 4, 5, 9), np.zeros(5, int)
    assert measured("top1", outputs, labels) == pytest.approx(0.2)
    assert measured("top5", outputs, labels) == pytest.approx(0.6)
    assert measured("top5", [np.concatenate(outputs)], labels) == pytest.approx(0.6)
    assert measured("top5", [np.eye(3, dtype=np.float32)], np.array([0, 1, 1])) == 1.0


def test_recall_counts_each_class_alike() -> None:
    outputs = [np.eye(3, dtype=np.float32)[[0, 0, 0, 0, 1, 2]]]
    labels = np.array([0, 0, 0, 0, 1, 1])
    assert measured("recall", outputs, labels) == pytest.approx((1 + 0.5) / 2)
    assert measured("top1", outputs, labels) == pytest.approx(5 / 6)


def test_spearman_is_the_correlation_of_ranks() -> None:
    answers = [np.array([[value]], np.float32) for value in (1, 2, 3, 10)]
    assert measured("spearman", answers, np.array([0.1, 0.2, 0.3, 9.0])) == pytest.approx(1.0)
    assert measured("spearman", answers, np.array([4.0, 3, 2, 1])) == pytest.approx(-1.0)
    assert measured("spearman", answers, np.array([1.0, 1, 2, 2])) == pytest.approx(0.894427, abs=1e-5)
    assert measured("spearman", [np.ones((4, 1))], np.arange(4.0)) == 0.0
    with pytest.raises(UsageError, match="one number for each label"):
        measured("spearman", [np.ones((4, 2))], np.arange(4.0))


def test_miou_is_the_mean_over_the_classes_that_are_there() -> None:
    wanted = np.array([[[0, 0, 1, 1], [0, 0, 255, 1]]], np.uint8)
    answer = np.array([[[0, 0, 0, 1], [0, 0, 0, 1]]], np.int64)
    # class 0: 4 of 5 pixels; class 1: 2 of 3; the pixel of 255 does not count
    assert measured("miou", [answer], wanted) == pytest.approx((4 / 5 + 2 / 3) / 2)
    logits = np.eye(5, dtype=np.float32)[answer].transpose(0, 3, 1, 2)
    assert measured("miou", [logits], wanted) == pytest.approx((4 / 5 + 2 / 3) / 2)
    assert measured("miou", [logits[..., 1::2]], wanted) == 1.0  # interpolated between two columns
    with pytest.raises(UsageError, match="needs scores"):
        measured("miou", [np.zeros((1, 10), np.float32)], wanted)
    with pytest.raises(UsageError, match="needs masks"):
        measured("miou", [answer], wanted[:, :1])


def test_miou_of_one_class_takes_black_and_white_masks(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="pictures are read by Pillow: pip install 'trtopt[images]'")
    white = np.zeros((4, 6), np.uint8)
    white[:2] = 255
    image.fromarray(white).save(tmp_path / "mask.png")
    labels = Labels("picture", (Path("a"),), [tmp_path / "mask.png"], "here", how=Preprocess((6, 6), letterbox=True))
    share = np.full((1, 1, 6, 6), 0.9, np.float32)  # in a letterbox: a row above, and one below
    share[0, 0, 2:] = 0.2
    assert measured("miou", [share], labels) == pytest.approx((1 / 2 + 2 / 3) / 2)
    logits = np.where(share > 0.5, 3, -3).astype(np.float32)
    assert measured("miou", [logits], labels) == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert measured("miou", [logits[..., 1:5, :]], white[None]) == pytest.approx((1 / 2 + 2 / 3) / 2)
    marked = np.where(white[None] == 255, 1, 255).astype(np.uint8)  # 255 beside a 1: no class
    assert measured("miou", [logits[..., 1:5, :]], marked) == pytest.approx((0 + 1 / 2) / 2)


def test_psnr_is_of_the_range_of_the_pixels() -> None:
    wanted = np.full((2, 3, 4, 4), 0.5)
    assert measured("psnr", [(wanted + 0.1).astype(np.float32)], wanted) == pytest.approx(20.0, abs=1e-3)
    assert measured("psnr", [wanted.astype(np.float32)], wanted) == 100.0
    eight_bit = np.full((2, 3, 4, 4), 128, np.uint8)
    assert measured("psnr", [np.full((2, 3, 4, 4), 153.5, np.float32)], eight_bit) == pytest.approx(20.0, abs=1e-3)
    with pytest.raises(UsageError, match="as large as the output"):
        measured("psnr", [wanted[..., :2]], wanted)


def test_pictures_and_masks_are_read_as_they_are_needed(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="pictures are read by Pillow: pip install 'trtopt[images]'")
    mask = np.zeros((4, 4), np.uint8)
    mask[:2] = 3
    image.fromarray(mask).save(tmp_path / "mask.png")
    image.fromarray(np.full((4, 4, 3), 100, np.uint8)).save(tmp_path / "target.png")
    how = Preprocess((4, 4), resize=(4, 4), mean=(0.5,) * 3, std=(0.5,) * 3)
    labels = Labels("picture", (Path("a"),), [tmp_path / "mask.png"], "here", how=how)
    answer = np.eye(4, dtype=np.float32)[mask].transpose(2, 0, 1)[None]
    assert measured("miou", [answer], labels) == 1.0
    # as the input: from -1 to 1, so that an error of 0.2 is a tenth of the range
    target = replace(labels, values=[tmp_path / "target.png"])
    given = np.full((1, 3, 4, 4), (100 / 255 - 0.5) / 0.5 + 0.2, np.float32)
    assert measured("psnr", [given], target) == pytest.approx(20.0, abs=1e-3)
    for name in ("top1", "spearman"):
        with pytest.raises(UsageError, match="needs"):
            measured(name, [np.eye(3, dtype=np.float32)], target)


@pytest.mark.parametrize("name", ["top1", "top5", "recall", "map50", "map", "miou", "psnr", "spearman"])
def test_a_metric_of_labels_needs_them(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} needs labels") as caught:
        load_metric(name, has_labels=False)
    assert "--labels" in caught.value.remedy
    assert load_metric(name, has_labels=True).needs_labels


@pytest.mark.parametrize("name", ["top1", "top5", "recall"])
def test_labels_that_are_no_classes_of_the_outputs_are_refused(name: str) -> None:
    outputs = [np.eye(3, dtype=np.float32)]
    for labels in (np.array([0, 1, 3]), np.array([0, -1, 2]), np.array([0.5, 1, 2]), np.array([0, 1])):
        with pytest.raises(UsageError):
            measured(name, outputs, labels)
    with pytest.raises(UsageError, match="no output holds scores"):
        measured(name, [np.zeros((1, 3, 4, 4), np.float32)], np.array([0]))
