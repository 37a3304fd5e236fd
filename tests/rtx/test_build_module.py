"""A PyTorch module that code makes is exported and built by one command; a file of weights ends in the line to run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Run, environment_in, run_here

pytest.importorskip("torch", reason="exporting needs torch")
pytest.importorskip("onnxscript", reason="exporting needs onnxscript")
pytest.importorskip("tensorrt_rtx", reason="building needs TensorRT for RTX")

import trtopt

NETS = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3)
        self.head = torch.nn.Linear(8, 4)

    def forward(self, image, scale=None):
        return self.head(torch.relu(self.conv(image)).mean((2, 3)))

def small():
    torch.manual_seed(0)
    return Net()

class Text(torch.nn.Module):
    def forward(self, input_ids, pixels):
        return input_ids.float().mean() + pixels.mean()
"""
INPUT = "image:float32:2x3x16x16"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(folder: Path) -> Run:
    return lambda *arguments: run_here(arguments, folder, environment_in(folder))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name not in (".cache", "__pycache__")}


def test_a_module_is_exported_and_built_under_its_own_name(run: Run, folder: Path) -> None:
    options = ("--input", INPUT, "--dynamic", "image:0=batch:1..16", "--recipes", "none", "--report", "r.json")
    done = run("build", "nets.py:small", *options)
    assert done.returncode == 0, done.stderr
    made = {"small.rtx.engine", "small.rtx.engine.manifest.json", "r.json", "r.build.log"}
    assert names(folder) == {"nets.py"} | made
    report = json.loads((folder / "r.json").read_text())
    assert report["model"]["path"] is None and report["model"]["target"] == "nets.py:small"
    assert f"trtopt build nets.py:small --input {INPUT}" in done.stdout and "MODEL.onnx" not in done.stdout
    assert report["model"]["inputs"] == [{"name": "image", "dtype": "float32", "shape": ["batch", 3, 16, 16]}]
    assert report["config"]["inputs"] == [INPUT]


@pytest.mark.parametrize("command", [("optimize", "-o", "o.onnx"), ("analyze",)], ids=["optimize", "analyze"])
def test_other_commands_take_a_module_too(run: Run, command: tuple[str, ...]) -> None:
    done = run(command[0], "nets.py:small", *command[1:], "--input", INPUT)
    assert done.returncode == 0, done.stderr


def test_from_python_by_its_name_and_live_with_a_dynamic_axis(folder: Path) -> None:
    import torch

    found = trtopt.analyze("nets.py:small", inputs=[INPUT])
    assert (found.model["path"], found.model["target"]) == (None, "nets.py:small")
    assert "nets.py:small on" in repr(found)
    bounded = trtopt.analyze("nets.py:small", inputs=[INPUT], dynamic=["image:0=batch:1..4"])
    assert bounded.model["input_shapes"]["image"][0] == 4 and not bounded.warnings
    assert found.model["path"] is None and found.model["inputs"][0]["shape"] == [2, 3, 16, 16]
    live = torch.nn.Linear(4, 2)
    found = trtopt.analyze(live, example_inputs=(torch.zeros(2, 4),), dynamic=["input:0=batch"])
    assert found.model["inputs"][0]["shape"] == ["batch", 4]


def test_without_inputs_the_line_that_exports_is_named(run: Run) -> None:
    done = run("build", "nets.py:small")
    assert done.returncode == 2
    assert "remedy: trtopt export nets.py:small -o small.onnx --input image:float32:1x3x224x224" in done.stderr
    done = run("analyze", "nets.py:Text")
    assert "--input input_ids:int64:1x128 --input pixels:float32:1x3x224x224" in done.stderr


class Payload:
    """Leaves a file behind when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (Path("unpickled"),)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("net.pt", "trtopt export nets.py:net -o net.onnx --input "),
        ("4 weights.PTH", "trtopt export nets.py:net -o net.onnx --input "),
        ("net.safetensors", "trtopt export nets.py:net -o net.onnx --input "),
        ("my net.pt2", "trtopt export 'my net.pt2' -o 'my net.onnx'"),
    ],
)
@pytest.mark.parametrize("command", [("build",), ("optimize", "-o", "o.onnx"), ("analyze",), ("sensitivity",)], ids=str)
def test_a_file_of_pytorch_ends_in_the_line_that_exports_and_is_not_unpickled(
    run: Run, folder: Path, command: tuple[str, ...], name: str, line: str
) -> None:
    import torch

    torch.save({"weight": Payload()}, folder / name)
    done = run(command[0], name, *command[1:])
    assert done.returncode == 2 and f"remedy: {line}" in done.stderr, done.stderr
    assert names(folder) == {"nets.py", name}


def test_inputs_of_a_module_are_refused_beside_an_onnx_file(run: Run, folder: Path) -> None:
    (folder / "model.onnx").write_bytes(b"x")
    done = run("build", "model.onnx", "--input", INPUT)
    assert done.returncode == 2 and "--input is for a PyTorch module" in done.stderr


def test_a_script_that_is_not_there_and_a_name_that_is_no_module(run: Run) -> None:
    assert "no module or function 'large'" in run("build", "nets.py:large", "--input", INPUT).stderr
    assert "does not exist" in run("build", "missing.py:net", "--input", INPUT).stderr
    assert run("build", "json:dumps", "--input", INPUT).returncode == 2
    done = run("build", "model.onnx:1")
    assert done.returncode == 2 and "does not exist" in done.stderr


def test_an_output_may_not_be_the_script(run: Run, folder: Path) -> None:
    done = run("build", "nets.py:small", "--input", INPUT, "-o", "nets.py")
    assert done.returncode == 2 and (folder / "nets.py").read_text() == NETS
    done = run("build", "nets.py:small", "--input", INPUT, "--report", "small.rtx.engine")
    assert done.returncode == 2 and "small.rtx.engine" in done.stderr
