"""The configuration file: TOML, one table for each command."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtopt.config import BuildConfig
from trtopt.config.toml_file import load
from trtopt.errors import UsageError


def _write(folder: Path, text: str) -> Path:
    path = folder / "trtopt.toml"
    path.write_text(text)
    return path


def test_each_command_reads_its_own_table(tmp_path: Path) -> None:
    path = _write(tmp_path, '[build]\nprecision = "int8"\n[optimize]\nprecision = "bf16"\n')
    assert load(path, "build") == {"precision": "int8"}
    assert load(path, "optimize") == {"precision": "bf16"}


def test_values_of_every_kind_are_read(tmp_path: Path) -> None:
    path = _write(
        tmp_path,
        '[build]\ngpu = "L4"\nmax_accuracy_drop = 1\nkeep_all_int8 = true\n'
        'builder = ["workspace=1G"]\nopt_shapes = ["x:8x3", "x:1x3"]\nmax_shapes = "x:9x3"\n',
    )
    assert load(path, "build") == {
        "gpu": "L4",
        "max_accuracy_drop": 1.0,
        "keep_all_int8": True,
        "builder": ("workspace=1G",),
        "opt_shapes": ("x:8x3", "x:1x3"),
        "max_shapes": ("x:9x3",),
    }


def test_relative_paths_start_at_the_file_and_words_are_no_paths(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    path = _write(
        tmp_path / "conf",
        '[build]\ncalib = "synthetic"\neval = "../data/eval.npz"\nmetric = "metric.py:top5"\nreport = "/r.json"\n'
        'plugins = ["p.so"]\n',
    )
    folder = tmp_path / "conf"
    assert load(path, "build") == {
        "calib": "synthetic",
        "eval": str(folder / "../data/eval.npz"),
        "metric": str(folder / "metric.py:top5"),
        "report": "/r.json",
        "plugins": (str(folder / "p.so"),),
    }
    path.write_text('[build]\nmetric = "top1"\ncalib = "samples.py:feeds"\n')
    assert load(path, "build") == {"metric": "top1", "calib": str(folder / "samples.py:feeds")}


def test_what_is_read_makes_a_configuration(tmp_path: Path) -> None:
    path = _write(tmp_path, '[build]\nprecision = "int8"\nmin_sqnr_db = 20\n')
    assert BuildConfig(**load(path, "build")) == BuildConfig(precision="int8", min_sqnr_db=20.0)


@pytest.mark.parametrize(
    ("text", "where", "remedy"),
    [
        ('[build]\ncalib_metod = "max"\n', "[build] calib_metod", "did you mean calib_method?"),
        ('[build]\ncalib-method = "max"\n', "[build] calib-method", "did you mean calib_method?"),
        ('[biuld]\nprecision = "int8"\n', "biuld", "did you mean build?"),
        ('precision = "int8"\n', "precision", "put options under [build] or [optimize]"),
        ("[build]\nzzz = 1\n", "[build] zzz", "see docs/build.md"),
        ('[build]\nprecision = "int9"\n', "[build] precision", "did you mean int8?"),
        ("[build]\nprecision = 8\n", "[build] precision", "docs/build.md"),
        ('[build]\nkeep_all_int8 = "yes"\n', "[build] keep_all_int8", "docs/build.md"),
        ('[build]\nmax_accuracy_drop = "1"\n', "[build] max_accuracy_drop", "docs/build.md"),
        ("[build]\nopt_shapes = [[1, 3]]\n", "[build] opt_shapes", "docs/build.md"),
        ('[build]\noutput = ""\n', "[build] output", "docs/build.md"),
        ("[optimize]\n", "trtopt.toml", "add [build]"),
        ("[build\n", "trtopt.toml", "correct that line"),
    ],
)
def test_a_mistake_is_a_usage_error_that_says_where(tmp_path: Path, text: str, where: str, remedy: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(_write(tmp_path, text), "build")
    assert where in caught.value.where
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("name", ["fp16", "int8", "auto"])
def test_a_precision_for_a_key_says_how_a_file_writes_it(tmp_path: Path, name: str) -> None:
    """FP16 beside an 8-bit type needs no word here: ``precision`` has one value."""
    with pytest.raises(UsageError, match=f"Unknown option '{name}'") as caught:
        load(_write(tmp_path, f"[build]\n{name} = true\n"), "build")
    assert caught.value.remedy.startswith(f'write precision = "{name}"')


def test_the_home_folder_is_that_of_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    text = '[build]\ncache_dir = "~/cache"\noutput = "./~/model"\nplugins = ["~/p.so"]\ncalib = "synthetic"\n'
    found = load(_write(tmp_path, text), "build")
    assert found["cache_dir"] == str(tmp_path / "home/cache") and found["plugins"] == (str(tmp_path / "home/p.so"),)
    assert found["output"] == str(tmp_path / "~/model") and found["calib"] == "synthetic"
    with pytest.raises(UsageError, match="no home folder for ~nobody-here/x") as caught:
        load(_write(tmp_path, '[build]\ncache_dir = "~nobody-here/x"\n'), "build")
    assert "[build] cache_dir" in caught.value.where


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        load(tmp_path / "none.toml", "build")


def test_a_file_that_is_not_text_is_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "trtopt.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not text"):
        load(path, "build")


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "trtopt.toml"
    path.write_bytes(b"#" * (1 << 21))
    with pytest.raises(UsageError, match="too large"):
        load(path, "build")
