"""The table ``[matrix]`` of a configuration file."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtopt.config.toml_file import load, load_matrix
from trtopt.errors import UsageError


def matrix(folder: Path, text: str) -> list[dict[str, object]]:
    (folder / "trtopt.toml").write_text(text)
    return load_matrix(folder / "trtopt.toml", "build")


def test_every_combination_is_a_build_the_last_list_varying_fastest(tmp_path: Path) -> None:
    found = matrix(tmp_path, '[matrix]\ngpu = ["L4", "RTX 4090"]\nprecision = ["fp16", "int8"]\n')
    assert found == [
        {"gpu": "L4", "precision": "fp16"},
        {"gpu": "L4", "precision": "int8"},
        {"gpu": "RTX 4090", "precision": "fp16"},
        {"gpu": "RTX 4090", "precision": "int8"},
    ]


def test_values_are_those_of_their_options(tmp_path: Path) -> None:
    text = '[matrix]\nmodel = ["a.onnx"]\nsparse = [true]\nmax_accuracy_drop = [1]\n'
    text += 'opt_shapes = ["x:1x3"]\ncalib = ["c.npz"]\n'
    (found,) = matrix(tmp_path, text)
    assert found == {
        "model": str(tmp_path / "a.onnx"),
        "sparse": True,
        "max_accuracy_drop": 1.0,
        "opt_shapes": ("x:1x3",),
        "calib": str(tmp_path / "c.npz"),
    }


def test_without_the_table_there_is_no_matrix_and_with_it_the_options_stay(tmp_path: Path) -> None:
    assert matrix(tmp_path, '[build]\ngpu = "L4"\n') == []
    assert len(matrix(tmp_path, '[build]\ngpu = "L4"\n[matrix]\nprecision = ["fp16"]\n')) == 1
    assert load(tmp_path / "trtopt.toml", "build") == {"gpu": "L4"}


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        ("", "expands to nothing", "1 or more values"),
        ("gpu = []", "expands to nothing", "1 or more values"),
        ('gpu = "L4"', "gpu is no list", "write gpu = [...]"),
        ('precison = ["fp16"]', "Unknown option 'precison'", "did you mean precision?"),
        ('precision = ["fp61"]', "'fp61' is not a value of precision", "did you mean fp16?"),
        ("sparse = [1]", "must be true or false", "docs"),
        ("model = [3]", "must be a text", "docs"),
        ('model = ["a\\u0000b"]', "without null characters", "docs"),
        (
            "\n".join(f"{key} = {[0.1] * 40}" for key in ("max_accuracy_drop", "min_sqnr_db")),
            "1600 builds",
            "at most 1000",
        ),
    ],
)
def test_a_wrong_matrix_is_named(text: str, message: str, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        matrix(tmp_path, f"[matrix]\n{text}\n")
    assert message in caught.value.what and remedy in caught.value.remedy
    assert "[matrix]" in caught.value.where


def test_a_matrix_that_is_no_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'matrix' is no table"):
        matrix(tmp_path, "matrix = 3\n")
    with pytest.raises(UsageError) as caught:
        matrix(tmp_path, "[matrx]\n")
    assert caught.value.remedy == "did you mean matrix?"
