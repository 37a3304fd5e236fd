"""Shapes as users write them, and the profiles planned from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from trtopt.config import ShapeMap
from trtopt.engine.request import ProfilePlan, ShapeProfile, parse_shapes, plan_profiles
from trtopt.errors import UsageError
from trtopt.graph.artifact import InputSpec


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("name:1x3x224x224", {"name": (1, 3, 224, 224)}),
        ("a:1x3,b:1x77", {"a": (1, 3), "b": (1, 77)}),
        ("a:1X3 , b:8", {"a": (1, 3), "b": (8,)}),
        ("a:[1,3,224,224]", {"a": (1, 3, 224, 224)}),
        ("a:[1, 3],b:2x2", {"a": (1, 3), "b": (2, 2)}),
        ("a:,b:[],c:scalar", {"a": (), "b": (), "c": ()}),
        ("'in:0':1x3,\"odd, name\":4", {"in:0": (1, 3), "odd, name": (4,)}),
        ("in:0:1x3", {"in:0": (1, 3)}),
        ("/model/x.1:0x3", {"/model/x.1": (0, 3)}),
    ],
)
def test_shapes_are_read_as_trtexec_and_polygraphy_write_them(text: str, shapes: ShapeMap) -> None:
    assert parse_shapes(text) == shapes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1x3x224x224",
        "a=1x3",
        "a:1x-3",
        "a:1x",
        "a:x3",
        "a:1.5",
        "a:[1,3",
        "a:1x3,a:1x4",
        "a:99999999999",
    ],
)
def test_anything_else_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        parse_shapes(text)


def spec(name: str, *shape: int | str) -> InputSpec:
    return InputSpec(name, np.dtype(np.float32), shape)


def plan(
    inputs: Sequence[InputSpec],
    low: Sequence[ShapeMap] = (),
    opt: Sequence[ShapeMap] = (),
    high: Sequence[ShapeMap] = (),
    seen: Sequence[ShapeMap] = (),
) -> ProfilePlan:
    return plan_profiles(inputs, min_shapes=low, opt_shapes=opt, max_shapes=high, observed=seen)


IMAGE = spec("x", "N", 3, 32, 32)
IDS, MASK = spec("ids", "batch", "seq"), spec("mask", "batch", "seq")


def test_bounds_of_an_export_are_the_range_widened_to_the_samples() -> None:
    bounds = {("ids", 0): (2, 4), ("ids", 1): (8, 64)}
    seen = [{"ids": (1, 48)}, {"ids": (1, 48)}, {"ids": (1, 70)}]
    given = {"min_shapes": (), "opt_shapes": (), "max_shapes": (), "bounds": bounds}
    assert plan_profiles([IDS], observed=seen, **given).profiles[0].shapes == {"ids": ((2, 8), (4, 48), (4, 70))}
    assert plan_profiles([IDS], observed=(), **given).profiles[0].shapes == {"ids": ((2, 8), (4, 64), (4, 64))}


def test_a_static_model_needs_no_profile() -> None:
    assert plan([spec("x", 1, 3)]) == ProfilePlan((), ())
    assert plan([spec("x", 1, 3)], opt=[{"x": (1, 3)}]) == ProfilePlan((), ())


def test_a_dynamic_batch_takes_1_to_16_and_says_so() -> None:
    planned = plan([IMAGE])
    assert planned.profiles == (ShapeProfile({"x": ((1, 3, 32, 32), (8, 3, 32, 32), (16, 3, 32, 32))}),)
    assert "1 to 16, optimum 8" in planned.notes[0]


def test_samples_widen_the_batch_and_set_the_other_axes() -> None:
    seen = [{"ids": (32, n), "mask": (32, n)} for n in (20, 77, 77, 128)]
    (profile,) = plan([IDS, MASK], seen=seen).profiles
    assert profile.shapes["ids"] == ((1, 20), (8, 77), (32, 128))
    assert profile.shapes["mask"] == profile.shapes["ids"]


def test_inputs_that_share_a_symbol_get_the_same_range_from_either() -> None:
    (profile,) = plan([IDS, MASK], seen=[{"ids": (1, 20)}, {"mask": (1, 50)}, {"mask": (1, 50)}]).profiles
    assert profile.shapes["ids"] == profile.shapes["mask"] == ((1, 20), (8, 50), (16, 50))


def test_an_axis_without_a_symbol_stands_alone() -> None:
    (profile,) = plan([spec("a", "?", "?"), spec("b", "?", 4)], seen=[{"a": (64, 7), "b": (1, 4)}]).profiles
    assert profile.shapes == {"a": ((1, 7), (8, 7), (64, 7)), "b": ((1, 4), (8, 4), (16, 4))}


def test_a_dynamic_axis_nothing_is_known_of_is_named_with_the_option() -> None:
    with pytest.raises(UsageError, match=r"Axis 1 \(seq\) of the input 'ids'") as caught:
        plan([IDS, MASK])
    assert "--opt-shapes" in caught.value.remedy


def test_the_optimum_alone_makes_the_profile_static_and_says_so() -> None:
    planned = plan([IMAGE], opt=[{"x": (4, 3, 32, 32)}])
    assert planned.profiles[0].is_static
    assert planned.profiles[0].shapes["x"][0] == (4, 3, 32, 32)
    assert any("exactly these shapes" in note for note in planned.notes)


def test_three_shapes_make_a_range() -> None:
    (profile,) = plan([IMAGE], [{"x": (1, 3, 32, 32)}], [{"x": (4, 3, 32, 32)}], [{"x": (64, 3, 32, 32)}]).profiles
    assert profile.shapes["x"] == ((1, 3, 32, 32), (4, 3, 32, 32), (64, 3, 32, 32))
    assert not profile.is_static
    assert profile.at_optimum().shapes["x"] == ((4, 3, 32, 32),) * 3


def test_minimum_and_maximum_alone_are_optimal_at_the_maximum() -> None:
    (profile,) = plan([IMAGE], [{"x": (1, 3, 32, 32)}], (), [{"x": (64, 3, 32, 32)}]).profiles
    assert profile.shapes["x"][1] == (64, 3, 32, 32)


def test_options_repeat_for_several_profiles() -> None:
    planned = plan([IMAGE], opt=[{"x": (1, 3, 32, 32)}, {"x": (32, 3, 32, 32)}])
    assert [profile.shapes["x"][2][0] for profile in planned.profiles] == [1, 32]


def test_an_input_left_out_of_the_options_follows_the_shared_symbol() -> None:
    (profile,) = plan([IDS, MASK], opt=[{"ids": (2, 64)}]).profiles
    assert profile.shapes["mask"] == ((2, 64),) * 3


@pytest.mark.parametrize(
    ("low", "opt", "high", "message"),
    [
        ([], [{"y": (1, 3, 32, 32)}], [], "no input 'y'"),
        ([], [{"x": (1, 3, 32)}], [], "has shape Nx3x32x32, not 1x3x32"),
        ([], [{"x": (1, 3, 32, 64)}], [], "not 1x3x32x64"),
        ([{"x": (8, 3, 32, 32)}], [{"x": (4, 3, 32, 32)}], [{"x": (16, 3, 32, 32)}], "minimum 8, optimum 4"),
        ([{"x": (8, 3, 32, 32)}], [], [{"x": (4, 3, 32, 32)}], "minimum 8, optimum 4"),
        ([{"x": (1, 3, 32, 32)}], [], [], "no optimum"),
        ([], [], [{"x": (1, 3, 32, 32)}], "no optimum"),
        ([{"x": (1, 3, 32, 32)}], [{"x": (1, 3, 32, 32)}] * 2, [], "different numbers of times"),
    ],
)
def test_shapes_that_contradict_the_model_or_each_other_are_usage_errors(
    low: list[ShapeMap], opt: list[ShapeMap], high: list[ShapeMap], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        plan([IMAGE], low, opt, high)


def test_an_unknown_input_gets_the_nearest_name() -> None:
    with pytest.raises(UsageError) as caught:
        plan([IDS, MASK], opt=[{"idz": (1, 2)}])
    assert "'ids'" in caught.value.remedy


def test_samples_outside_of_the_profiles_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="outside of every profile: ids: 1x200"):
        plan([IDS], opt=[{"ids": (4, 128)}], seen=[{"ids": (1, 128)}, {"ids": (1, 200)}])


def test_single_samples_fit_a_profile_of_larger_batches() -> None:
    assert plan([IMAGE], opt=[{"x": (8, 3, 32, 32)}], seen=[{"x": (1, 3, 32, 32)}]).profiles[0].is_static


def test_samples_may_fit_different_profiles() -> None:
    shapes: list[ShapeMap] = [{"x": (4, 3, 32, 32)}, {"x": (8, 3, 32, 32)}]
    assert len(plan([IMAGE], opt=shapes, seen=shapes).profiles) == 2


def test_numbers_for_a_shape_tensor_are_its_values() -> None:
    inputs = [spec("x", "N", 8), InputSpec("size", np.dtype(np.int64), (2,)), InputSpec("k", np.dtype(np.int32), ())]
    found = plan(
        inputs,
        [{"x": (1, 8), "size": (1, 8), "k": (1,)}],
        [{"x": (4, 8), "size": (4, 8), "k": (3,)}],
        [{"x": (16, 8), "size": (16, 8), "k": (5,)}],
    )
    (profile,) = found.profiles
    assert profile.values == {"size": ((1, 8), (4, 8), (16, 8)), "k": ((1,), (3,), (5,))}
    assert profile.shapes["size"] == ((2,), (2,), (2,)) and profile.shapes["k"] == ((), (), ())
    assert profile.at_optimum().values == {"size": ((4, 8),) * 3, "k": ((3,),) * 3}
    assert profile.to_json_dict()["size"] == {
        **{"min": [2], "opt": [2], "max": [2]},
        **{"min_values": [1, 8], "opt_values": [4, 8], "max_values": [16, 8]},
    }


def test_values_alone_make_a_profile_of_a_static_network() -> None:
    inputs = [spec("x", 4, 8), InputSpec("size", np.dtype(np.int64), (2,))]
    found = plan(inputs, [{"size": (1, 8)}], [{"size": (4, 8)}], [{"size": (16, 8)}])
    assert not found.profiles[0].is_static


@pytest.mark.parametrize("numbers", [(2,), (1, 2, 3)])
def test_numbers_that_are_one_for_each_axis_are_a_shape(numbers: tuple[int, ...]) -> None:
    inputs = [InputSpec("ids", np.dtype(np.int64), (2,)), spec("x", "N")]
    if numbers == (2,):
        assert plan(inputs, opt=[{"ids": numbers, "x": (1,)}]).profiles[0].values == {}
    else:
        with pytest.raises(UsageError, match="has shape 2, not 1x2x3"):
            plan(inputs, opt=[{"ids": numbers, "x": (1,)}])
