"""``trtopt calibrate-gpu``: profiles of a GPU become a table of the configuration file, which predictions then use."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_models import save_small

from trtopt.analysis.calibrate_gpu import calibrate_gpu
from trtopt.errors import UsageError
from trtopt.hardware.spec import GpuCalibration, find_gpu
from trtopt.profiling.ingest import ingest
from trtopt.roofline.layer import layer_time

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Run = Callable[..., "subprocess.CompletedProcess[str]"]

TRUTH = GpuCalibration(clock=0.6, launch=1.4)
FILES = ("layers.json", "profile.json")
KEPT = '# my settings\n[build]\nfp16 = true # fast\n\n[gpu."Other"]\nbase = "L4"\nsource = "a test"\n'


def _tensor(name: str, *shape: int) -> dict[str, Any]:
    return {"Name": name, "Location": "Device", "Dimensions": list(shape), "Format/Datatype": "Half"}


def _convolution(index: int) -> dict[str, Any]:
    channels = 64 * (index + 1)
    return {
        "Name": f"conv {index}",
        "LayerType": "CaskConvolution",
        "Inputs": [_tensor("x", 16, channels, 28, 28)],
        "Outputs": [_tensor("y", 16, channels, 28, 28)],
        "ParameterType": "Convolution",
        "Kernel": [3, 3],
        "PaddingMode": "kEXPLICIT_ROUND_DOWN",
        "PrePadding": [1, 1],
        "PostPadding": [1, 1],
        "Stride": [1, 1],
        "Dilation": [1, 1],
        "OutMaps": channels,
        "Groups": 1,
        "Weights": {"Type": "Half", "Count": 9 * channels * channels},
        "Bias": {"Type": "Half", "Count": channels},
        "Activation": "RELU",
    }


def _write(folder: Path, truth: GpuCalibration = TRUTH, number: int = 12) -> None:
    """Files of trtexec whose times are those of an RTX 4090 with these factors."""
    layers = [_convolution(index) for index in range(number)]
    (folder / "layers.json").write_text(json.dumps({"Layers": layers, "Bindings": ["x"]}))
    rows = [{"name": layer["Name"], "timeMs": 1.0, "averageMs": 1.0, "percentage": 1.0} for layer in layers]
    (folder / "profile.json").write_text(json.dumps([{"count": 100}, *rows]))
    gpu = dataclasses.replace(find_gpu("RTX 4090"), calibration=truth)
    for row, layer in zip(rows, ingest(folder / "layers.json", folder / "profile.json").layers, strict=True):
        assert layer.work is not None
        row["averageMs"] = layer_time(layer.work, gpu, timing="profile").predicted_us / 1000
    (folder / "profile.json").write_text(json.dumps([{"count": 100}, *rows]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    _write(tmp_path)
    return tmp_path


def test_profiles_become_a_table_and_the_rest_of_the_file_stays(trtopt: Run, folder: Path) -> None:
    (folder / "trtopt.toml").write_text(KEPT)
    done = trtopt("calibrate-gpu", *FILES, "--gpu", "RTX 4090", "--name", "mine")
    assert done.returncode == 0, done.stderr
    assert 'gpu."mine"' in done.stdout and "layers left out" in done.stdout
    text = (folder / "trtopt.toml").read_text()
    assert text.startswith(KEPT)
    table = tomllib.loads(text)["gpu"]["mine"]
    assert table["base"] == "RTX-4090"
    found = table["calibration"]
    assert found["clock"] == pytest.approx(0.6, rel=0.1) and found["layers"] == 12
    assert found["error_after"] < 0.5 * found["error_before"]
    _write(folder, GpuCalibration(clock=1.5))
    done = trtopt("calibrate-gpu", *FILES, "--gpu", "RTX 4090", "--name", "mine", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["schema"] == "trtopt.calibration/1" and report["written"] is True
    assert report["calibration"]["clock"] > 1.2
    text = (folder / "trtopt.toml").read_text()
    assert text.startswith(KEPT) and text.count("calibration]") == 1
    assert tomllib.loads(text)["gpu"]["mine"]["calibration"]["clock"] == report["calibration"]["clock"]


def test_later_predictions_use_it_and_say_so(trtopt: Run, folder: Path) -> None:
    save_small(folder)
    assert trtopt("calibrate-gpu", *FILES, "--gpu", "RTX 4090", "--name", "mine").returncode == 0
    (folder / "trtopt.toml").open("a").write("\n[analyze]\n[profile]\n[optimize]\n")
    config = ("--gpu", "mine", "--config", "trtopt.toml")
    said = "predictions for mine use a calibration of "
    for arguments in (
        ("analyze", "model.onnx", *config, "--html", "a.html", "--report", "a.json"),
        ("profile", "--layer-info", FILES[0], "--layer-profile", FILES[1], *config, "--report", "p.json"),
        ("report", "a.json"),
        ("report", "p.json"),
        ("gpu", "show", "mine", "--config", "trtopt.toml"),
        ("optimize", "model.onnx", *config, "--fp16", "-o", "o.onnx", "--report", "o.json"),
        ("report", "o.json"),
    ):
        done = trtopt(*arguments, columns=200)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout and "12 layers: error on layers left out" in done.stdout, arguments
    assert said in (folder / "a.html").read_text()
    for name in ("a.json", "p.json", "o.json"):
        assert json.loads((folder / name).read_text())["gpu"]["calibration"]["layers"] == 12
    plain = json.loads(trtopt("analyze", "model.onnx", "--gpu", "RTX 4090", "--json").stdout)
    assert plain["gpu"]["calibration"] is None
    calibrated = json.loads((folder / "a.json").read_text())
    assert calibrated["totals"]["predicted_us"] > plain["totals"]["predicted_us"]


def test_reports_of_profile_do_as_well_and_name_their_gpu(trtopt: Run, folder: Path) -> None:
    args = ("profile", "--layer-info", FILES[0], "--layer-profile", FILES[1], "--gpu", "RTX 4090", "--report", "p.json")
    assert trtopt(*args).returncode == 0
    from_files = trtopt("calibrate-gpu", *FILES, "--gpu", "RTX 4090", "-o", "a.toml", "--json")
    from_report = trtopt("calibrate-gpu", "p.json", "-o", "b.toml", "--json")
    one, two = (json.loads(done.stdout) for done in (from_files, from_report))
    assert one["calibration"] == two["calibration"] and two["gpu"] == "RTX-4090" == two["name"]
    assert (folder / "a.toml").read_text() == (folder / "b.toml").read_text()
    other = trtopt("calibrate-gpu", "p.json", "--gpu", "L4")
    assert other.returncode == 2 and "The profile is of RTX-4090, not of L4" in other.stderr


def test_a_table_of_the_user_keeps_its_figures(trtopt: Run, folder: Path) -> None:
    own = '[gpu.mine]\nbase = "RTX 4090"\ntdp_w = 400 # mine\nsource = "a label"\n'
    (folder / "trtopt.toml").write_text(own)
    done = trtopt("calibrate-gpu", *FILES, "--gpu", "mine")
    assert done.returncode == 0, done.stderr
    table = tomllib.loads((folder / "trtopt.toml").read_text())["gpu"]["mine"]
    assert (table["tdp_w"], table["source"], table["base"]) == (400, "a label", "RTX 4090")
    assert table["calibration"]["clock"] < 0.8


def test_without_a_gain_nothing_is_written(trtopt: Run, folder: Path) -> None:
    _write(folder, GpuCalibration())
    (folder / "trtopt.toml").write_text(KEPT)
    done = trtopt("calibrate-gpu", *FILES, "--gpu", "RTX 4090")
    assert done.returncode == 7
    assert "not a twentieth less: nothing was written" in done.stderr and "remedy" in done.stderr
    assert (folder / "trtopt.toml").read_text() == KEPT


def _zero_times(folder: Path) -> None:
    rows = json.loads((folder / "profile.json").read_text())
    (folder / "profile.json").write_text(
        json.dumps([{**row, "averageMs": 0} if "name" in row else row for row in rows])
    )


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (lambda folder: None, (*FILES,), "do not say which GPU"),
        (lambda folder: None, ("layers.json", "--gpu", "L4"), "0 layer profiles and 1"),
        (lambda folder: None, ("missing.json", "--gpu", "L4"), "cannot be read"),
        (lambda folder: None, (*FILES, "--gpu", "portable"), "many GPUs"),
        (lambda folder: None, (*FILES, "--gpu", "L4", "--name", "portable"), "cannot be called"),
        (lambda folder: None, (*FILES, "--gpu", "L4", "-o", "layers.json"), "overwrite"),
        (lambda folder: (folder / "profile.json").write_text("{"), (*FILES, "--gpu", "L4"), "ends too early"),
        (lambda folder: (folder / "profile.json").write_text("[3]"), (*FILES, "--gpu", "L4"), "no measured layers"),
        (lambda folder: _write(folder, number=5), (*FILES, "--gpu", "L4"), "5 different kernels to fit to"),
        (_zero_times, (*FILES, "--gpu", "L4"), "12 layers of zero time"),
        (lambda folder: (folder / "trtopt.toml").write_text("[build"), (*FILES, "--gpu", "L4"), "not valid TOML"),
        (
            lambda folder: (folder / "trtopt.toml").write_text('gpu.L4 = { source = "x" }\n'),
            (*FILES, "--gpu", "L4"),
            "not written in lines of its own",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_and_nothing_changes(
    trtopt: Run, folder: Path, change: Callable[[Path], object], arguments: tuple[str, ...], message: str
) -> None:
    change(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    done = trtopt("calibrate-gpu", *arguments)
    assert done.returncode == 2, done.stdout
    assert message in done.stderr and "where" in done.stderr and "remedy" in done.stderr
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("wrong", [{"flop": -1}, {"gemm": {"m": 0, "n": 1, "k": 1, "batch": 1}}, {"kind": 3}])
def test_a_report_with_a_wrong_layer_is_refused(trtopt: Run, folder: Path, wrong: dict[str, Any]) -> None:
    args = ("profile", "--layer-info", FILES[0], "--layer-profile", FILES[1], "--gpu", "RTX 4090", "--report", "p.json")
    assert trtopt(*args).returncode == 0
    report = json.loads((folder / "p.json").read_text())
    report["layers"][0]["work"].update(wrong)
    (folder / "p.json").write_text(json.dumps(report))
    with pytest.raises(UsageError, match="wrong layer"):
        calibrate_gpu([folder / "p.json"], output=folder / "trtopt.toml")
    assert not (folder / "trtopt.toml").exists()


@pytest.mark.parametrize(
    "line", ["clock = 9.0", "clock = true", "layers = 0", "date = 3", "bogus = 1", "error_before = -1", "clock = nan"]
)
def test_a_calibration_that_was_changed_by_hand_is_checked(trtopt: Run, folder: Path, line: str) -> None:
    values = {"layers": "7", "date": '"2026-11-22"', "clock": "0.9", "launch": "1.0", "bandwidth": "1.0"}
    values |= {"attention": "1.0", "error_before": "0.2", "error_after": "0.1"}
    name, _, value = line.partition(" = ")
    table = "\n".join(f"{key} = {each}" for key, each in {**values, name: value}.items())
    (folder / "trtopt.toml").write_text(f'[gpu.L4]\nsource = "a test"\n[gpu.L4.calibration]\n{table}\n')
    done = trtopt("gpu", "show", "L4", "--config", "trtopt.toml")
    assert done.returncode == 2 and "trtopt calibrate-gpu" in done.stderr
