"""Which shape a prediction is made at."""

from __future__ import annotations

import numpy as np
import pytest

from trtopt.config import ShapeMap
from trtopt.engine.request import input_shapes
from trtopt.errors import UsageError
from trtopt.graph.artifact import InputSpec


def spec(name: str, *shape: int | str) -> InputSpec:
    return InputSpec(name, np.dtype("float32"), shape)


@pytest.mark.parametrize(
    ("inputs", "given", "shapes"),
    [
        ([spec("x", 1, 3, 8, 8)], [], {"x": (1, 3, 8, 8)}),
        ([spec("x", "N", 3)], [], {"x": (8, 3)}),
        ([spec("x", "?", 3), spec("y", "?", 3)], [{"x": (2, 3)}], {"x": (2, 3), "y": (8, 3)}),
        ([spec("x", "N", 3)], [{"x": (2, 3)}], {"x": (2, 3)}),
        ([spec("ids", "N", "T"), spec("mask", "N", "T")], [{"ids": (2, 7)}], {"ids": (2, 7), "mask": (2, 7)}),
        ([spec("a", "N"), spec("b", 4, "N")], [], {"a": (8,), "b": (4, 8)}),
        ([spec("a", "N", 2), spec("b", "M", 2)], [{"a": (2, 2)}, {"b": (3, 2)}], {"a": (2, 2), "b": (3, 2)}),
        ([spec("scalar")], [], {"scalar": ()}),
    ],
)
def test_axes_take_what_is_given_then_their_symbol_then_the_default_of_a_batch(
    inputs: list[InputSpec], given: list[ShapeMap], shapes: ShapeMap
) -> None:
    assert input_shapes(inputs, given).shapes == shapes


def test_the_default_batch_is_said_once_per_symbol() -> None:
    assert len(input_shapes([spec("a", "N", 2), spec("b", "N", 2)], []).notes) == 1
    assert "taken as 8" in input_shapes([spec("a", "N", 2)], []).notes[0]
    assert input_shapes([spec("a", "N", 2)], [{"a": (1, 2)}]).notes == ()


def test_bounds_of_an_export_are_kept() -> None:
    inputs = [spec("x", "N", "T"), spec("y", "N")]
    found = input_shapes(inputs, [], {("x", 0): (1, 4), ("x", 1): (16, 128)})
    assert found.shapes == {"x": (4, 128), "y": (4,)}
    assert found.notes[0] == "x axis 0 (N) is taken as 4, from --dynamic; --shapes sets another"
    assert input_shapes(inputs, [], {("x", 0): (1, 64), ("x", 1): (1, 2)}).shapes["x"] == (8, 2)
    assert input_shapes(inputs, [{"x": (2, 7)}], {("x", 0): (1, 4)}).shapes["x"] == (2, 7)


@pytest.mark.parametrize(
    ("inputs", "given", "what", "remedy"),
    [
        ([spec("ids", "N", "T")], [], "axis 1 (T) of the input 'ids'", "with a number for T, such as ids:8x128"),
        ([spec("x", 1, 3, "H", "W")], [], "axis 2 (H) and 3 (W)", "--shapes x:1x3xHxW with a number for H and W"),
        ([spec("ids", "N", "T")], [{"idz": (1, 2)}], "no input 'idz'", "did you mean 'ids'?"),
        ([spec("ids", "N", "T")], [{"ids": (1, 2, 3)}], "not 1x2x3", "one number per axis, such as --shapes ids:8x128"),
        ([spec("x", "N", 3)], [{"x": (1, 4)}], "not 1x4", "static dimensions stay"),
        ([spec("x", "N", 3)], [{"x": (0, 3)}], "no elements", "at least 1"),
        ([spec("x", "N"), spec("y", "N")], [{"x": (1,), "y": (2,)}], "two sizes: 1 and 2", "same size"),
        ([spec("x", "N")], [{"x": (1,)}, {"x": (2,)}], "two shapes", "one shape"),
    ],
)
def test_what_is_missing_or_wrong_is_named_with_the_option(
    inputs: list[InputSpec], given: list[ShapeMap], what: str, remedy: str
) -> None:
    with pytest.raises(UsageError) as caught:
        input_shapes(inputs, given)
    assert what in caught.value.what
    assert remedy in caught.value.remedy
