"""What a user's mistake must not cost: a model, samples, a device, a good engine."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from command_line import Run, environment_in, run_here
from small_models import samples, save_small

from trtopt.errors import UsageError
from trtopt.support.files import atomic_write, check_outputs, check_writable


def _kept(path: Path) -> bytes:
    return path.read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-o", "real.onnx"], "--output would overwrite the model"),
        (["--save-onnx", "calib.npz"], "--save-onnx would overwrite --calib calib.npz"),
        (["-o", "eval.npz"], "--output would overwrite --eval eval.npz"),
        (["--report", "metric.py"], "--report would overwrite --metric metric.py:one"),
        (["--report", "link.rtx.engine"], "--report would overwrite the engine link.rtx.engine"),
        (["--report", "r.json", "-o", "r.build.log"], "--output would overwrite the builder's log"),
        (["-o", "trtopt.toml"], "--output would overwrite --config"),
    ],
)
def test_no_output_overwrites_what_is_read_or_another_output(
    trtopt: Run, tmp_path: Path, options: list[str], message: str
) -> None:
    save_small(tmp_path, "real.onnx")
    (tmp_path / "link.onnx").symlink_to("real.onnx")
    for name in ("calib.npz", "eval.npz"):
        np.savez(tmp_path / name, x=samples(4))
    (tmp_path / "metric.py").write_text("def one(run):\n    return 1.0\n")
    (tmp_path / "trtopt.toml").write_text("[build]\n")
    before = {path.name: _kept(path) for path in tmp_path.iterdir()}
    inputs = ["--calib", "calib.npz", "--eval", "eval.npz", "--metric", "metric.py:one", "--config", "trtopt.toml"]

    result = trtopt("build", "link.onnx", *inputs, *options)

    assert result.returncode == 2
    assert message in result.stderr
    assert {path.name: _kept(path) for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("model", [".", ""])
def test_a_folder_as_the_model_is_a_usage_error(trtopt: Run, model: str) -> None:
    result = trtopt("build", model)

    assert result.returncode == 2
    assert "error: The model path is a folder" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_name_too_long_for_the_file_system_is_a_usage_error(trtopt: Run, tmp_path: Path) -> None:
    save_small(tmp_path)

    result = trtopt("build", "model.onnx", "-o", "a" * 300)

    assert result.returncode == 2
    assert "error: Cannot write" in result.stderr


def test_a_name_that_just_fits_the_file_system_is_written(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 255)

    check_writable(path)
    atomic_write(path, "whole")

    assert path.read_text() == "whole"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are of POSIX")
def test_a_pipe_or_a_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    for path in (pipe, Path(os.devnull)):
        with pytest.raises(UsageError, match="device or a pipe"):
            check_writable(path)


def test_an_output_that_is_a_link_to_an_input_is_another_file(tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    model.write_text("model")
    link = tmp_path / "model.engine"
    link.symlink_to(model)

    check_outputs({"--output": link}, {"the model": model})
    atomic_write(link, "engine")

    assert model.read_text() == "model"


@pytest.mark.skipif(os.name == "nt", reason="file modes are of POSIX")
def test_files_get_the_mode_of_ordinary_files_without_touching_the_umask(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    before = os.umask(0o027)
    try:
        writers = [
            threading.Thread(target=lambda i=i: [atomic_write(tmp_path / f"{i}", "x") for _ in range(50)])  # type: ignore[misc]
            for i in range(8)
        ]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        after = os.umask(0o027)
    finally:
        os.umask(before)

    assert after == 0o027
    assert {(tmp_path / f"{i}").stat().st_mode & 0o777 for i in range(8)} == {0o640}


@pytest.mark.parametrize("columns", ["", "wide", "0"])
def test_a_strange_columns_variable_does_not_stop_the_report(tmp_path: Path, columns: str) -> None:
    save_small(tmp_path)
    environment = {**environment_in(tmp_path), "COLUMNS": columns}

    result = run_here(["optimize", "model.onnx", "-o", "out.onnx", "--recipes", "none"], tmp_path, environment)

    assert result.returncode == 0, result.stderr


def test_a_metric_or_sampler_that_exits_is_a_usage_error_and_not_its_exit_code(trtopt: Run, tmp_path: Path) -> None:
    save_small(tmp_path)
    (tmp_path / "metric.py").write_text("import sys\n\n\ndef leave(run):\n    sys.exit(7)\n")
    (tmp_path / "module.py").write_text("raise SystemExit(7)\n")

    called = trtopt("build", "model.onnx", "--metric", "metric.py:leave", "--recipes", "none")
    loaded = trtopt("build", "model.onnx", "--metric", "module.py:leave")

    assert [called.returncode, loaded.returncode] == [2, 2]
    assert "metric.py:5" in called.stderr
    assert "SystemExit" in loaded.stderr


def test_labels_that_are_no_class_indices_do_not_pass_the_gate(trtopt: Run, tmp_path: Path) -> None:
    save_small(tmp_path)
    for name, labels in {"text": np.array(["a"] * 4), "scores": np.array([0.5, 0.1, 0.2, 0.3])}.items():
        np.savez(tmp_path / "eval.npz", x=samples(4), __labels__=labels)
        options = ("--eval", "eval.npz", "--metric", "top1", "--max-accuracy-drop", "0", "--recipes", "none")
        result = trtopt("build", "model.onnx", *options)
        assert result.returncode == 2, name
        assert "the labels are no class indices" in result.stderr


@pytest.mark.parametrize("option", ["--opt-shapes", "--max-shapes"])
def test_a_profile_for_no_samples_at_all_is_refused(trtopt: Run, tmp_path: Path, option: str) -> None:
    save_small(tmp_path)
    other = [] if option == "--opt-shapes" else ["--min-shapes", "x:0x3x8x8"]

    result = trtopt("build", "model.onnx", option, "x:0x3x8x8", *other)

    assert result.returncode == 2
    assert "has no elements" in result.stderr


def test_a_failed_gate_leaves_the_report_and_an_earlier_engine_alone(trtopt: Run, tmp_path: Path) -> None:
    save_small(tmp_path)
    (tmp_path / "model.rtx.engine").write_text("earlier")

    files = ["--report", "r.json", "--save-onnx", "s.onnx", "--export-layer-info", "l.json"]
    options = ["--int8", "--keep-all-int8", "--recipes", "none", "--min-sqnr-db", "200"]
    result = trtopt("build", "model.onnx", *options, *files)

    assert result.returncode == 7
    assert json.loads((tmp_path / "r.json").read_text())["engine"] is None
    assert (tmp_path / "model.rtx.engine").read_text() == "earlier"
    assert not (tmp_path / "s.onnx").exists() and not (tmp_path / "l.json").exists()
    shutil.rmtree(tmp_path / ".cache", ignore_errors=True)
