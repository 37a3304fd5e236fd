"""``trtopt profile`` and ``trtopt report`` as a user meets them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from small_models import save_external, save_small

import trtopt as trtopt_package
from trtopt.engine.backend import is_engine
from trtopt.errors import UsageError
from trtopt.precision.observe.polygraphy import read_outputs

Run = Callable[..., "subprocess.CompletedProcess[str]"]

SHARED = Path(__file__).parents[3] / "shared"
A100 = SHARED / "profiles" / "tensorrt-layers" / "A100-80GB-PCIe"
needs_profiles = pytest.mark.skipif(not A100.is_dir(), reason="the folder profiles is not beside the checkout")


def tensor(name: str, shape: list[int], form: str) -> dict[str, Any]:
    return {"Name": name, "Location": "Device", "Dimensions": shape, "Format/Datatype": form}


LINEAR, PACKED = "Row major linear FP32", "Channel major FP16 format where channel % 4 == 0"
LAYERS = {
    "Layers": [
        {
            "Name": "Reformatting CopyNode for Input Tensor 0 to /stem/Conv",
            "LayerType": "Reformat",
            "Inputs": [tensor("image", [8, 3, 64, 64], LINEAR)],
            "Outputs": [tensor("packed", [8, 3, 64, 64], PACKED)],
            "TacticName": "",
            "Metadata": "",
        },
        {
            "Name": "/stem/Conv",
            "LayerType": "CaskConvolution",
            "Inputs": [tensor("packed", [8, 3, 64, 64], PACKED)],
            "Outputs": [tensor("stem", [8, 32, 64, 64], "Channel major FP16 format where channel % 8 == 0")],
            "ParameterType": "Convolution",
            "Kernel": [3, 3],
            "PrePadding": [1, 1],
            "PostPadding": [1, 1],
            "Stride": [1, 1],
            "Dilation": [1, 1],
            "OutMaps": 32,
            "Groups": 1,
            "Weights": {"Type": "Half", "Count": 864},
            "Bias": {"Type": "Half", "Count": 32},
            "TacticName": "trt_turing_cutlass_image_network_first_layer_hmma_fprop_f16f16f32_nhwc_nhwc_k32r3s3c4",
            "Metadata": "[ONNX Layer: /stem/Conv]",
        },
    ],
    "Bindings": ["image", "stem"],
}
PROFILE = [
    {"count": 200},
    {"name": LAYERS["Layers"][0]["Name"], "timeMs": 2.0, "averageMs": 0.01, "medianMs": 0.0098, "percentage": 40.0},  # type: ignore[index]
    {"name": "/stem/Conv", "timeMs": 3.0, "averageMs": 0.015, "medianMs": 0.0149, "percentage": 60.0},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "layers.json").write_text(json.dumps(LAYERS))
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))
    return tmp_path


FILES = ("--layer-info", "layers.json", "--layer-profile", "profile.json")


def test_files_of_trtexec_become_a_report_in_every_form(trtopt: Run, folder: Path) -> None:
    outputs = ("--report", "r.json", "--markdown", "r.md", "--trace", "r.trace.json")
    done = trtopt("profile", *FILES, "--gpu", "A100", *outputs)
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "r.json").read_text())
    assert report["schema"] == "trtopt.profile/1" and report["totals"]["measured_us"] == 25.0
    copy, conv = report["layers"]
    assert (copy["measured_us"], conv["measured_us"], conv["median_us"]) == (10.0, 15.0, 14.9)
    assert conv["onnx_nodes"] == ["/stem/Conv"] and conv["modules"] == ["stem"] and conv["tensor_core"] is True
    assert conv["gemm"] == {"m": 8 * 64 * 64, "n": 32, "k": 27, "batch": 1} and conv["ratio"] > 0
    assert {"reformat-copy", "padded-input"} <= {finding["rule"] for finding in report["findings"]}
    assert "25.0 us, measured" in done.stdout and "reformat-copy" in done.stdout
    assert "/stem/Conv" in (folder / "r.md").read_text()
    assert len(json.loads((folder / "r.trace.json").read_text())["traceEvents"]) > 3


def test_json_is_all_that_stands_on_stdout(trtopt: Run, folder: Path) -> None:
    done = trtopt("profile", *FILES, "--gpu", "A100", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["totals"]["measured_us"] == 25.0


def test_a_report_is_shown_again_and_compared(trtopt: Run, folder: Path) -> None:
    assert trtopt("profile", *FILES, "--gpu", "A100", "--report", "before.json").returncode == 0
    faster = [dict(row) for row in PROFILE]
    faster[2]["averageMs"] = 0.010
    (folder / "profile.json").write_text(json.dumps(faster))
    assert trtopt("profile", *FILES, "--gpu", "A100", "--report", "after.json").returncode == 0
    again = trtopt("report", "after.json", "--markdown", "again.md")
    assert again.returncode == 0 and "20.0 us, measured" in again.stdout and (folder / "again.md").exists()
    done = trtopt("report", "after.json", "--against", "before.json", "--markdown", "both.md")
    assert done.returncode == 0, done.stderr
    assert "5.00 us less (20.0 %)" in done.stdout and "-5.00 us" in done.stdout
    assert "/stem/Conv" in (folder / "both.md").read_text()
    found = json.loads(trtopt("report", "after.json", "--against", "before.json", "--json").stdout)
    assert found["schema"] == "trtopt.comparison/1" and found["regions"][0]["gain_us"] == pytest.approx(5.0)


def test_every_node_is_timed_on_the_cpu(trtopt: Run, tmp_path: Path) -> None:
    model = onnx.load(save_small(tmp_path))
    done = trtopt("profile", "model.onnx", "--backend", "onnxruntime", "--report", "r.json")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    names = {node for layer in report["layers"] for node in layer["onnx_nodes"]}
    assert names >= {node.name for node in model.graph.node if node.name}
    assert report["totals"]["end_to_end_us"] > 0 and report["source"]["origin"] == "onnxruntime"
    assert any(layer["predicted_us"] for layer in report["layers"])
    assert "trtopt.build" not in done.stdout and "rank correlation" in done.stdout


def test_a_model_runs_on_the_values_of_a_file_at_their_shapes(trtopt: Run, tmp_path: Path) -> None:
    """Nothing else says the lengths of ``x``; the values of ``s`` decide the shape of the output."""
    body = "g (float[N,L] x, int64[2] s) => (float[A,B] y) {r = Relu(x) y = Reshape(r, s)}"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {body}'), tmp_path / "m.onnx")
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.savez(tmp_path / "in.npz", x=x, s=np.array([2, 6]))
    run = ("profile", "m.onnx", "--backend", "onnxruntime", "--polygraphy", "kept")
    done = trtopt(*run, "--load-inputs", "in.npz")
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(read_outputs(tmp_path / "kept" / "outputs.json")[1][0]["y"], x.reshape(2, 6))
    done = trtopt(*run, "--shapes", "x:3x4,s:6x2")
    assert done.returncode == 0, done.stderr
    assert read_outputs(tmp_path / "kept" / "outputs.json")[1][0]["y"].shape == (6, 2)
    (tmp_path / "x.bin").write_bytes(x.tobytes())
    for arguments, why in (
        (("--load-inputs", "x:x.bin"), "values without a shape"),
        (("--load-inputs", "in.npz", "--shapes", "x:4x3"), "--shapes says [4, 3]"),
        (("--load-inputs", "in.npz", "--shapes", "s:3x4"), "are in --shapes and in a file"),
    ):
        done = trtopt(*run, *arguments)
        assert done.returncode == 2 and why in done.stderr, done.stderr


def test_the_model_of_an_engine_names_its_modules(trtopt: Run, folder: Path) -> None:
    save_small(folder, "other.onnx")
    done = trtopt("profile", "other.onnx", *FILES, "--gpu", "A100")
    assert done.returncode == 2 and "The engine holds no node of the model" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "There is nothing to profile"),
        (("missing.onnx",), 2, "missing.onnx"),
        (("--layer-info", "layers.json"), 2, "give --layer-profile too"),
        (("--times", "t.json"), 2, "give --layer-info and --layer-profile"),
        (FILES, 2, "name it: --gpu A100"),
        ((*FILES, "--gpu", "A1000000"), 2, "A1000000"),
        ((*FILES, "--gpu", "A100", "--backend", "onnxruntime"), 2, "were measured already"),
        ((*FILES, "--gpu", "A100", "--backend", "tensorrt"), 2, "were measured already"),
        (("--layer-info", ".", "--layer-profile", "profile.json", "--gpu", "A100"), 2, "Is a directory"),
        (("--layer-info", "profile.json", "--layer-profile", "layers.json", "--gpu", "A100"), 2, "profile.json"),
        ((*FILES, "--gpu", "A100", "--specialization", "lazy"), 2, "Only an engine is loaded with"),
        ((*FILES, "--gpu", "A100", "--cache-dir", "kept"), 2, "where:  --cache-dir"),
        ((*FILES, "--gpu", "A100", "--report", "layers.json"), 2, "would overwrite"),
        ((*FILES, "--gpu", "A100", "--export-times", "t.json"), 2, "No engine is timed"),
        ((*FILES, "--gpu", "A100", "--load-inputs", "x.npz"), 2, "were measured already"),
        ((*FILES, "--gpu", "A100", "--iterations", "0"), 2, "give a whole number from 1"),
        (("--inf-streams", "1.5"), 2, "give a whole number from 1 to 64"),
        (("--duration", "-1"), 2, "give a number from 0"),
        ((*FILES, "--gpu", "A100", "--html", "no/such/folder.html"), 2, "folder does not exist"),
    ],
)
def test_bad_input_is_one_error_before_anything_is_written(
    trtopt: Run, folder: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    done = trtopt("profile", *arguments)
    assert done.returncode == code and words in done.stderr and "Traceback" not in done.stderr
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_neither_the_configuration_nor_weights_are_written_over(trtopt: Run, folder: Path) -> None:
    (folder / "c.toml").write_text('[profile]\ngpu = "A100"\nreport = "c.toml"\n')
    done = trtopt("profile", "--config", "c.toml", *FILES)
    assert done.returncode == 2 and "would overwrite" in done.stderr
    assert (folder / "c.toml").read_text().startswith("[profile]")
    save_external(folder)
    weights = next(path for path in folder.iterdir() if path.suffix not in (".json", ".onnx", ".toml"))
    before = weights.read_bytes()
    done = trtopt("profile", "model.onnx", *FILES, "--gpu", "A100", "--report", weights.name)
    assert done.returncode == 2 and "would overwrite" in done.stderr and weights.read_bytes() == before


def test_pipes_are_not_waited_for(trtopt: Run, folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    for arguments in (
        ("profile", "--layer-info", "pipe", "--layer-profile", "profile.json", "--gpu", "A100"),
        ("profile", "pipe"),
        ("report", "pipe"),
    ):
        done = trtopt(*arguments)
        assert done.returncode == 2 and "is not a file" in done.stderr


def test_python_profiles_again_and_again(folder: Path) -> None:
    """The function and no package of that name."""
    files = {"layer_info": str(folder / "layers.json"), "layer_profile": str(folder / "profile.json")}
    for _ in range(2):
        assert trtopt_package.profile(**files, gpu="A100").totals.measured_us == 25.0
    with pytest.raises(UsageError, match="There is no option 'gpuu'"):
        trtopt_package.profile(**files, gpuu="A100")


def test_without_a_gpu_the_ways_that_are_left_are_named(trtopt: Run, tmp_path: Path) -> None:
    from trtopt.hardware.probe import present_gpu

    if present_gpu() is not None:
        pytest.skip("this machine has a GPU")
    save_small(tmp_path)
    done = trtopt("profile", "model.onnx")
    assert done.returncode == 4 and "--backend onnxruntime" in done.stderr and "--layer-info" in done.stderr
    assert trtopt("build", "model.onnx", "--gpu", "L4", "-o", "m.engine").returncode == 0
    assert is_engine(tmp_path / "m.engine") and not is_engine(tmp_path / "model.onnx")
    done = trtopt("profile", "m.engine")
    assert done.returncode == 4 and "8.9" in done.stderr and "tensorrt-rtx" in done.stderr
    done = trtopt("profile", "m.engine", "--backend", "onnxruntime")
    assert done.returncode == 2 and "The engine was built by tensorrt-rtx" in done.stderr


@pytest.mark.parametrize("command", ["analyze", "optimize"])
def test_other_reports_are_shown_again_as_they_were(trtopt: Run, tmp_path: Path, command: str) -> None:
    save_small(tmp_path)
    output = () if command == "analyze" else ("-o", "out.onnx", "--int8")  # with ranges from random data: a warning
    done = trtopt(command, "model.onnx", *output, "--gpu", "L4", "--report", "r.json")
    assert done.returncode == 0, done.stderr
    again = trtopt("report", "r.json")
    assert again.returncode == 0 and again.stdout.startswith(done.stdout.rstrip())
    warned = command == "optimize"
    assert ("Warnings" in again.stdout, "warning: " in done.stderr) == (warned, warned)
    assert "Warnings" not in done.stdout and "note: x axis 0 (N)" in done.stderr
    assert json.loads(trtopt("report", "r.json", "--json").stdout) == json.loads((tmp_path / "r.json").read_text())
    refused = trtopt("report", "r.json", "--trace", "t.json")
    assert refused.returncode == 2 and "no such form" in refused.stderr and not (tmp_path / "t.json").exists()


@pytest.mark.parametrize("arguments", [("x.json",), ("layers.json",), ("layers.json", "--against", "layers.json")])
def test_what_is_no_report_is_refused(trtopt: Run, folder: Path, arguments: tuple[str, ...]) -> None:
    done = trtopt("report", *arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_profiles_of_different_networks_are_refused(trtopt: Run, folder: Path) -> None:
    assert trtopt("profile", *FILES, "--gpu", "A100", "--report", "a.json").returncode == 0
    other = json.loads((folder / "a.json").read_text())
    for layer in other["layers"]:
        layer.update(name=layer["name"] + "x", onnx_nodes=[name + "x" for name in layer["onnx_nodes"]], outputs=[])
    (folder / "b.json").write_text(json.dumps(other))
    done = trtopt("report", "a.json", "--against", "b.json")
    assert done.returncode == 2 and "of their time in common" in done.stderr


def test_the_reasons_are_explained(trtopt: Run) -> None:
    done = trtopt("explain", "reformat-copy")
    assert done.returncode == 0 and "Remedy:" in done.stdout
    assert "slower-than-predicted" in trtopt("explain").stdout


@pytest.mark.shared
@needs_profiles
def test_the_findings_of_an_a100_name_what_costs_time(trtopt: Run, tmp_path: Path) -> None:
    """ResNet-18 in FP16: the copies at its borders, the first layer that computes four channels, what is far off."""
    prefix = str(A100 / "fp16" / "resnet.onnx.engine")
    files = ("--layer-info", f"{prefix}.graph.json", "--layer-profile", f"{prefix}.profile.json")
    times = ("--times", f"{prefix}.timing.json.gz")
    done = trtopt("profile", *files, *times, "--gpu", "A100-PCIe-80GB", "--report", "r.json")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    found = {finding["rule"]: finding for finding in report["findings"]}
    assert "k64r7s7c4" in found["padded-input"]["message"] and found["padded-input"]["nodes"][0] == "Conv_0"
    assert found["reformat-copy"]["gain_us"] == pytest.approx(80.896 + 7.168)
    far = [layer for layer in report["layers"] if layer["ratio"] and not 1 / 1.2 < layer["ratio"] < 1.2]
    far = [layer for layer in far if abs(layer["measured_us"] - layer["predicted_us"]) >= 1]
    named = [
        node
        for rule in ("slower-than-predicted", "faster-than-predicted")
        if rule in found
        for node in found[rule]["nodes"]
    ]
    assert far and all(layer["onnx_nodes"][0] in named for layer in far if layer["onnx_nodes"])
    assert report["totals"]["end_to_end_us"] < report["totals"]["measured_us"]
