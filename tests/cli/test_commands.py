"""Whole runs of the other commands."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from trtopt.hardware.spec import all_gpus
from trtopt.rewrite.registry import all_recipes

Run = Callable[..., "subprocess.CompletedProcess[str]"]

NET = """\
import torch

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 4))
"""


def test_the_list_of_gpus_names_each(trtopt: Run) -> None:
    done = trtopt("gpu", "list")
    assert (done.returncode, done.stderr) == (0, "")
    names = [line.split()[0] for line in done.stdout.splitlines()[1:] if line][: len(all_gpus())]
    assert names == [gpu.name for gpu in all_gpus()]


def test_a_gpu_is_shown_by_any_spelling_with_the_backends_that_build_for_it(trtopt: Run) -> None:
    text = trtopt("gpu", "show", "rtx 4090").stdout
    assert "RTX-4090" in text and "8.9" in text and "tensorrt-rtx, tensorrt" in text
    text = trtopt("gpu", "show", "h100").stdout
    assert "H100-SXM5-80GB" in text and "tensorrt-rtx" not in text


def test_gpus_as_json(trtopt: Run) -> None:
    listed = json.loads(trtopt("gpu", "list", "--json").stdout)
    assert listed["schema"] == "trtopt.gpus/1"
    assert len(listed["gpus"]) == len(all_gpus())
    (shown,) = json.loads(trtopt("gpu", "show", "L4", "--json").stdout)["gpus"]
    assert shown in listed["gpus"]
    assert shown["tflops"]["fp16"] > 0


def test_an_unknown_gpu_is_a_usage_error(trtopt: Run) -> None:
    done = trtopt("gpu", "show", "H101")
    assert done.returncode == 2
    assert "H100" in done.stderr.partition("remedy: ")[2]


def test_recipes_are_listed_in_their_order(trtopt: Run) -> None:
    names = [recipe.name for recipe in all_recipes()]
    assert names
    text = trtopt("recipe", "list").stdout
    assert [line.split()[1] for line in text.splitlines()[1:] if line.split()[:1] and not line.startswith(" ")] == names
    listed = json.loads(trtopt("recipe", "list", "--json").stdout)
    assert [recipe["name"] for recipe in listed["recipes"]] == names


@pytest.mark.parametrize("name", [recipe.name for recipe in all_recipes()])
def test_every_recipe_explains_itself_under_its_headings(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from trtopt.cli import recipe

    assert recipe.run(["explain", name]) == 0
    text = capsys.readouterr().out
    assert text.startswith(name)
    for heading in ("Rewrite", "Requires", "Why faster", "Numerics", "Refuses when"):
        assert heading in text


def test_a_misspelt_recipe_gets_the_nearest(trtopt: Run) -> None:
    name = all_recipes()[0].name
    done = trtopt("recipe", "explain", name[:-1])
    assert done.returncode == 2
    assert f"did you mean {name}?" in done.stderr


def test_doctor_says_what_is_installed(trtopt: Run) -> None:
    done = trtopt("doctor")
    assert done.returncode == 0, done.stderr
    for name in ("trtopt", "python", "gpu", "tensorrt-rtx", "onnxruntime", "torch"):
        assert f"\n{name} " in "\n" + done.stdout


def test_the_self_test_builds_and_says_so(trtopt: Run) -> None:
    done = trtopt("doctor", "--selftest")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("self-test: ok")


def test_the_self_test_as_json(trtopt: Run) -> None:
    result = json.loads(trtopt("doctor", "--selftest", "--json").stdout)
    assert result["schema"] == "trtopt.doctor/1"
    assert {check["precision"] for check in result["checks"]} == {"fp16", "int8"}


def test_a_module_is_exported_and_checked(trtopt: Run, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NET)
    done = trtopt(
        "export", "nets.py:net", "-o", "net.onnx", "--input", "input:float32:2x3x8x8", "--dynamic", "input:0=batch:1..8"
    )
    assert done.returncode == 0, done.stderr
    assert "checked   against PyTorch: example inputs" in done.stdout
    assert "[batch, 3, 8, 8]" in done.stdout
    dims = onnx.load(tmp_path / "net.onnx").graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_param or dim.dim_value for dim in dims] == ["batch", 3, 8, 8]


def test_a_missing_export_target_is_a_usage_error(trtopt: Run, tmp_path: Path) -> None:
    done = trtopt("export", "none.py:net", "-o", "net.onnx", "--input", "x:float32:1x3")
    assert done.returncode == 2
    assert "none.py" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_value_behind_a_flag_is_told_apart_from_an_argument_too_many(trtopt: Run) -> None:
    done = trtopt("build", "m.onnx", "--json", "out.json")
    assert done.returncode == 2 and "--json takes no value" in done.stderr and "--report out.json" in done.stderr
    assert "--fp16 takes no value" in trtopt("build", "m.onnx", "--fp16", "x").stderr
    assert "One argument too many: x" in trtopt("build", "m.onnx", "--gpu", "L4", "x").stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("gpu",), "trtopt gpu list, trtopt gpu show NAME"),
        (("recipe", "explain"), "trtopt recipe explain NAME"),
        (("bundle",), "trtopt bundle model.rtx.engine --report model.json -o model.bundle"),
        (("build",), "trtopt build model.onnx --int8"),
    ],
)
def test_a_command_without_what_it_needs_shows_a_line_that_runs(
    trtopt: Run, arguments: tuple[str, ...], line: str
) -> None:
    done = trtopt(*arguments)
    assert done.returncode == 2 and f"remedy: such as: {line}" in done.stderr


def test_trtexec_is_told_which_commands_take_its_options(trtopt: Run) -> None:
    assert "remedy: trtopt build and trtopt profile take" in trtopt("trtexec", "--onnx=m.onnx").stderr


def test_a_sweep_says_where_its_options_stand(trtopt: Run, tmp_path: Path) -> None:
    assert 'gpu = ["T4", "L4"] under [matrix]' in trtopt("sweep", "m.onnx", "--gpu", "T4,L4").stderr
    (tmp_path / "m.onnx").write_bytes(b"\x08\xff")
    done = trtopt("sweep", "m.onnx")
    assert done.returncode == 2 and "is not text" in done.stderr and "codec" not in done.stderr


def test_options_in_front_of_the_command_are_told_where_they_stand(trtopt: Run) -> None:
    assert "remedy: trtopt build --onnx=m.onnx --fp16" in trtopt("--onnx=m.onnx", "--fp16").stderr
    done = trtopt("-v", "profile", "m.onnx")
    assert done.returncode == 2 and "remedy: trtopt profile -v m.onnx" in done.stderr


def test_a_python_file_is_told_how_its_module_is_named(trtopt: Run, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text("net = 1\n")
    done = trtopt("build", "nets.py")
    assert done.returncode == 2 and "give nets.py:NAME --input" in done.stderr
