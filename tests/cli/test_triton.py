"""``trtopt triton`` from the command line."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import detectors
import onnx
import onnx.parser
import pytest
import triton_schema
from engine_files import rtx_engine

from trtopt.cli.triton import make_parser

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def net(tmp_path: Path) -> Path:
    text = '<ir_version: 10, opset_import: ["" : 21]> g (float[N, S] x) => (float[N, S] y) { y = Relu(x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


def test_it_writes_a_repository_and_says_what(trtopt: Run, net: Path, tmp_path: Path) -> None:
    shapes = ("--min-shapes", "x:1x4", "--opt-shapes", "x:8x16", "--max-shapes", "x:32x64")
    done = trtopt("triton", "net.onnx", "-o", "repo", "--name", "relu", "--max-batch", "32", *shapes)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "repo/relu: version 1, onnxruntime\nbatches of up to 32 along the axis N\n"
    config = triton_schema.read(tmp_path / "repo/relu")
    triton_schema.check_valid(config)
    assert list(config.dynamic_batching.preferred_batch_size) == [8, 32]
    again = trtopt("triton", "net.onnx", "-o", "repo", "--name", "relu", "--max-batch", "32", *shapes, "--json")
    report = json.loads(again.stdout)
    assert (report["schema"], report["version"], report["max_batch"]) == ("trtopt.triton/1", 2, 32)
    assert report["models"] == [
        {"name": "relu", "path": "repo/relu", "backend": "onnxruntime", "files": ["model.onnx"]}
    ]


def test_wrong_input_is_one_error_and_no_repository(trtopt: Run, net: Path, tmp_path: Path) -> None:
    (tmp_path / "net.rtx.engine").write_bytes(rtx_engine())
    (tmp_path / "text.onnx").write_text("no model")
    for arguments, code, message in (
        (("net.rtx.engine",), 4, "this one is of TensorRT for RTX"),
        (("none.onnx",), 2, "cannot be read"),
        (("text.onnx",), 3, "not an ONNX model"),
        (("net.onnx", "--max-batch", "many"), 2, "invalid int value"),
        (("net.onnx", "--device", "gpus"), 2, "did you mean"),
        (("net.onnx", "--opt-shapes", "x:1x2x3"), 2, "input 'x'"),
    ):
        done = trtopt("triton", *arguments, "-o", "repo")
        assert done.returncode == code, done.stderr
        assert message in done.stderr and "remedy:" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "repo").exists()


def test_a_model_that_optimize_cut_becomes_an_ensemble(trtopt: Run, tmp_path: Path) -> None:
    onnx.save(detectors.detector(), tmp_path / "det.onnx")
    assert trtopt("optimize", "det.onnx", "-o", "cut.onnx", "--recipes", "none").returncode == 0
    done = trtopt("triton", "cut.onnx", "-o", "repo", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [model["name"] for model in report["models"]] == ["cut_engine", "cut_host", "cut"]
    whole = triton_schema.read(tmp_path / "repo/cut")
    triton_schema.check_valid(whole)
    assert [tensor.name for tensor in whole.output][:2] == ["detections", "selected"]
    host = triton_schema.read(tmp_path / "repo/cut_host")
    assert host.instance_group[0].kind == host.instance_group[0].KIND_CPU
    assert {tensor.name for tensor in host.input} == {"boxes", "scores"}


def test_what_a_terminal_acts_on_is_shown_as_escapes(trtopt: Run, tmp_path: Path) -> None:
    proto = onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 21]> g (float[N] x) => (float[N] y) { y = Relu(x) }')  # fmt: skip # noqa: E501
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "N\x1b[2J"
    onnx.save(proto, tmp_path / "odd.onnx")
    done = trtopt("triton", "odd.onnx", "-o", "repo")
    assert done.returncode == 0 and "along the axis N\\x1b[2J" in done.stdout and "\x1b" not in done.stdout


def test_the_page_has_each_option() -> None:
    page = (Path(__file__).parents[2] / "docs" / "triton.md").read_text(encoding="utf-8")
    rows = "".join(line for line in page.splitlines() if line.startswith("| `--"))
    assert set(re.findall(r"--[\w-]+", rows)) == set(make_parser().option_names()) - {"--help", "--output", "--json"}
