"""Options that change nothing beside the others are said, with what they go with; those that act are not."""

from __future__ import annotations

from typing import Any

import pytest

from trtopt.config import BuildConfig
from trtopt.config.idle import idle_options
from trtopt.support.precision import Precision


def said(precision: Precision | None = Precision.FP16, **options: Any) -> list[str]:
    config = BuildConfig(precision=precision, **options)
    return [text.partition(" has no effect")[0] for text in idle_options(vars(config) | {"precision": precision})]


@pytest.mark.parametrize(
    ("idle", "acting"),
    [
        ({"keep_all_int8": True}, {"precision": Precision.INT8}),
        ({"calib_method": "max"}, {"precision": Precision.FP8}),
        ({"keep_all_weights": True}, {"weights": "int4"}),
        ({"boxes": "yolov8"}, {"metric": "map50"}),
        ({"boxes": "yolov8", "metric": "top1"}, {"metric": "recall"}),
        ({"steps": 5, "calib": "s.npz"}, {"eval": "decode:prompts.npz"}),
        ({"strict_recipes": True, "recipes": "none"}, {"recipes": "all"}),
    ],
    ids=str,
)
def test_an_option_is_idle_without_what_it_goes_with(idle: dict[str, Any], acting: dict[str, Any]) -> None:
    name = next(iter(idle))
    assert said(**idle) == [f"--{name.replace('_', '-')}"]
    assert said(**{**idle, **acting}) == []


def test_nothing_is_said_of_defaults() -> None:
    assert said() == [] and said(None) == []


def test_it_names_what_the_option_goes_with() -> None:
    config = BuildConfig(boxes="yolov8")
    text = "--boxes has no effect: it goes with --metric recall, map50 or map"
    assert list(idle_options(vars(config))) == [text]
