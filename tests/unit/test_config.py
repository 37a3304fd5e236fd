"""The configuration: every option once, checked when it is made."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from trtopt.config import GROUPS, BuildConfig, field_kinds, flag, options
from trtopt.config.words import command_words, given
from trtopt.errors import UsageError
from trtopt.support.words import did_you_mean, nearest


def test_every_field_is_described_and_stands_under_a_heading_of_the_help() -> None:
    for name, option in options(BuildConfig).items():
        assert option.help, name
        assert option.group in GROUPS, name


def test_repeatable_options_are_those_that_hold_several_values() -> None:
    kinds = field_kinds(BuildConfig)
    for name, option in options(BuildConfig).items():
        assert option.repeatable == (kinds[name] in ("texts", "shapes")), name


def test_no_two_options_share_a_spelling() -> None:
    spellings = [flag(name) for name in options(BuildConfig)]
    spellings += [alias for option in options(BuildConfig).values() for alias in option.aliases]
    assert len(spellings) == len(set(spellings))


def test_a_path_is_kept_as_text_and_one_profile_as_a_tuple_of_one() -> None:
    config = BuildConfig(output=Path("a") / "b.engine", opt_shapes={"x": [1, 3]}, plugins=Path("p.so"))  # type: ignore[arg-type]
    assert config.output == str(Path("a") / "b.engine")
    assert config.opt_shapes == ({"x": (1, 3)},)
    assert config.plugins == ("p.so",)


def test_an_integer_is_a_number() -> None:
    assert BuildConfig(min_sqnr_db=30).min_sqnr_db == 30.0


@pytest.mark.parametrize(
    "values",
    [
        {"precision": "int9"},
        {"precision": 8},
        {"precision": ""},
        {"calib_method": None},
        {"calib": b"samples.npz"},
        {"max_accuracy_drop": "0.01"},
        {"max_accuracy_drop": True},
        {"max_accuracy_drop": float("nan")},
        {"min_sqnr_db": float("inf")},
        {"keep_all_int8": 1},
        {"builder": 3},
        {"builder": [3]},
        {"plugins": [""]},
        {"gpu": Path("L4")},
        {"opt_shapes": "x:1x3"},
        {"opt_shapes": ["x:1x3"]},
        {"opt_shapes": {"x": "1x3"}},
        {"opt_shapes": {"x": (1, -1)}},
        {"opt_shapes": {"x": (1, 2.0)}},
        {"opt_shapes": {"": (1,)}},
    ],
    ids=str,
)
def test_a_wrong_value_is_a_usage_error_that_names_the_option(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        BuildConfig(**values)
    (name,) = values
    assert caught.value.where == name
    assert caught.value.remedy


def test_a_misspelt_choice_gets_the_nearest_one() -> None:
    with pytest.raises(UsageError, match="'FP61'") as caught:
        BuildConfig(precision="FP61")
    assert caught.value.remedy == "did you mean fp16?"


def test_options_override_fields_by_name() -> None:
    config = BuildConfig(precision="int8", calib="a.npz").with_options({"calib": "b.npz"})
    assert (config.precision, config.calib) == ("int8", "b.npz")


def test_an_unknown_option_gets_the_nearest_name() -> None:
    with pytest.raises(UsageError) as caught:
        BuildConfig().with_options({"calib_metod": "max"})
    assert caught.value.remedy == "did you mean calib_method?"


def test_defaults_pass_their_own_checks() -> None:
    assert dataclasses.replace(BuildConfig()) == BuildConfig()


def test_nothing_is_suggested_when_nothing_is_near() -> None:
    assert nearest("zzzz", ["fp16", "int8"]) == ""
    assert did_you_mean("zzzz", ["fp16", "int8"]) == ""


def test_options_are_written_as_the_command_line_reads_them() -> None:
    shapes = ({"a:0": (1, 3), "b": (2,)}, {"b": (4,)})
    config = BuildConfig(
        precision="int8",
        opt_shapes=shapes,
        recipes="none",
        builder=("a=1", "b=2"),
        strict_recipes=True,
        min_sqnr_db=20.5,
    )  # type: ignore[arg-type]
    assert list(command_words(vars(config), given(config))) == [
        *("--int8", "--min-sqnr-db", "20.5", "--recipes", "none", "--strict-recipes"),
        *("--opt-shapes", "'a:0':1x3,b:2", "--opt-shapes", "b:4", "--builder", "a=1", "--builder", "b=2"),
    ]
    assert list(command_words({"batches": [1, 8]}, ["batches"])) == ["--batches", "1,8"]
