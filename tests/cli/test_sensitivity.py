"""``trtopt sensitivity`` as a user runs it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small_models import samples, save_small

from trtopt.config import SensitivityConfig, flag, options
from trtopt.report.schema.sensitivity import Sensitivity

Run = Callable[..., "subprocess.CompletedProcess[str]"]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "sensitivity.md").read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_small(tmp_path)
    np.savez(tmp_path / "calib.npz", x=samples(8))
    return tmp_path


def test_the_table_names_the_regions_the_worst_first(trtopt: Run, folder: Path) -> None:
    done = trtopt("sensitivity", "model.onnx", "--calib", "calib.npz", "--html", "s.html", columns=80)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("model.onnx, int8 for tensorrt-rtx: 2 regions on 8 samples\n")
    table = done.stdout.partition("One region alone")[2].partition("Along the network")[0]
    shares = [float(value) for value in re.findall(r"([\d.]+) %$", table, re.MULTILINE)]
    assert len(shares) == 2 and shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(100, abs=0.2)
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    page = (folder / "s.html").read_text(encoding="utf-8")
    assert "conv2" in page and "Content-Security-Policy" in page
    assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=", page)


def test_the_json_has_the_fields_of_the_contract(trtopt: Run, folder: Path) -> None:
    arguments = ("sensitivity", "model.onnx", "--calib", "calib.npz", "--fp8", "--json", "--report", "s.json")
    done = trtopt(*arguments)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == set(Sensitivity.__dataclass_fields__)
    assert found["precision"] == "fp8"
    assert json.loads((folder / "s.json").read_text()) == found
    again = json.loads(trtopt(*arguments).stdout)
    assert again["cached"] and again["regions"] == found["regions"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--calib", "none.npz"], 2, "The samples do not exist"),
        (["--fp16"], 2, "no option --fp16"),
        (["--precision", "fp32"], 2, "'fp32' is not one of int8, fp8"),
        (["--report", "model.onnx"], 2, "would overwrite the model"),
        (["--gpu", "nothing"], 2, "nothing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_message(trtopt: Run, folder: Path, arguments: list[str], code: int, message: str) -> None:
    done = trtopt("sensitivity", "model.onnx", *arguments)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr


def test_options_come_from_the_file_too(trtopt: Run, folder: Path) -> None:
    (folder / "trtopt.toml").write_text('[sensitivity]\nprecision = "fp8"\ncalib = "calib.npz"\n')
    done = trtopt("sensitivity", "model.onnx", "--config", "trtopt.toml")
    assert done.returncode == 0, done.stderr
    assert "fp8" in done.stdout.splitlines()[0]
    (folder / "trtopt.toml").write_text("[sensitivity]\nprecison = 1\n")
    done = trtopt("sensitivity", "model.onnx", "--config", "trtopt.toml")
    assert done.returncode == 2 and "did you mean precision?" in done.stderr


def test_the_page_has_every_option_once() -> None:
    written = re.findall(r"^\| `(--[\w-]+)[^`]*` \|", PAGE, flags=re.MULTILINE)
    assert sorted(written) == sorted(
        [*map(flag, options(SensitivityConfig)), "--config", "--json", "--verbose", "--quiet"]
    )


def test_the_page_names_every_field_of_the_report() -> None:
    for name in Sensitivity.__dataclass_fields__:
        assert f"`{name}`" in PAGE or name == "schema", name
