"""Bad input: the right exit code, one message with a remedy, nothing written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import Run, environment_in, run_process
from onnx import helper
from small_models import samples, save_external, save_small, set_location, small_model

Prepare = Callable[[Path], list[str]]

_HIDE = """\
import importlib.machinery, sys
class Hidden(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] in {names!r}:
            return None
        return super().find_spec(fullname, path, target)
sys.meta_path[:] = [Hidden if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
"""


def _bytes(content: bytes) -> Prepare:
    def prepare(folder: Path) -> list[str]:
        (folder / "model.onnx").write_bytes(content)
        return []

    return prepare


def _edited(edit: Callable[[onnx.ModelProto], None]) -> Prepare:
    def prepare(folder: Path) -> list[str]:
        model = small_model()
        edit(model)
        onnx.save(model, folder / "model.onnx")
        return []

    return prepare


def _options(*options: str) -> Prepare:
    def prepare(folder: Path) -> list[str]:
        save_small(folder)
        return list(options)

    return prepare


def _calib(**arrays: np.ndarray) -> Prepare:
    def prepare(folder: Path) -> list[str]:
        save_small(folder)
        np.savez(folder / "calib.npz", **arrays)
        return ["--int8", "--calib", "calib.npz"]

    return prepare


def _nan() -> np.ndarray:
    array = samples()
    array[2, 0, 0, 0] = np.nan
    return array


def _pickle(folder: Path) -> list[str]:
    save_small(folder)
    np.savez(folder / "calib.npz", x=np.array([{"a": 1}], dtype=object))
    return ["--int8", "--calib", "calib.npz"]


def _set_operator(model: onnx.ModelProto) -> None:
    model.graph.node[1].op_type = "Relv"


def _set_input(model: onnx.ModelProto) -> None:
    model.graph.node[2].input[0] = "nowhere"


def _make_cycle(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "r2"


def _set_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 6


def _set_future_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 9999


def _set_weight_shape(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].dims[0] = 17


def _set_wrong_channels(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 4


def _dynamic_height(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "H"


def _taller_samples(folder: Path) -> list[str]:
    _edited(_dynamic_height)(folder)
    np.savez(folder / "calib.npz", x=samples(shape=(3, 12, 8)))
    return ["--calib", "calib.npz", "--min-shapes", "x:1x3x8x8", "--opt-shapes", "x:8x3x8x8"]


def _calibration_cache(folder: Path) -> list[str]:
    save_small(folder)
    (folder / "model.cache").write_text("TRT-100300-EntropyCalibration2\nx: 3c010a14\n")
    return ["--int8", "--calib=model.cache"]


def _external_missing(folder: Path) -> list[str]:
    save_external(folder)
    (folder / "weights.bin").unlink()
    return []


def _external_short(folder: Path) -> list[str]:
    save_external(folder)
    os.truncate(folder / "weights.bin", 100)
    return []


def _external_parent(folder: Path) -> list[str]:
    model = save_external(folder)
    (folder / "weights.bin").rename(folder.parent / "stolen.bin")
    set_location(model, "../stolen.bin")
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return []


def _external_absolute(folder: Path) -> list[str]:
    model = save_external(folder)
    set_location(model, str(folder / "weights.bin"))
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return []


def _external_link(folder: Path) -> list[str]:
    save_external(folder)
    (folder / "weights.bin").rename(folder.parent / "stolen.bin")
    (folder / "weights.bin").symlink_to(folder.parent / "stolen.bin")
    return []


CASES: dict[str, tuple[int, str, Prepare]] = {
    "missing file": (2, "does not exist", lambda folder: []),
    "a folder": (2, "not a file", lambda folder: (folder / "model.onnx").mkdir() or []),  # type: ignore[func-returns-value]
    "empty file": (3, "empty", _bytes(b"")),
    "truncated protobuf": (3, "", _bytes(small_model().SerializeToString()[:2000])),
    "a text file": (3, "not an ONNX model", _bytes(b"name,score\nconv,1\n" * 20)),
    "unknown operator": (3, "Relv", _edited(_set_operator)),
    "undefined input": (3, "nowhere", _edited(_set_input)),
    "a cycle": (3, "cycle", _edited(_make_cycle)),
    "opset too old": (3, "Opset 6", _edited(_set_opset)),
    "opset from the future": (3, "Opset 9999", _edited(_set_future_opset)),
    "weight of another size": (3, "w1", _edited(_set_weight_shape)),
    "shapes that do not fit": (3, "", _edited(_set_wrong_channels)),
    "external data missing": (3, "missing", _external_missing),
    "external data too short": (3, "too short", _external_short),
    "external data in the parent folder": (3, "outside", _external_parent),
    "external data by absolute path": (3, "absolute", _external_absolute),
    "external data by symbolic link": (3, "symbolic link", _external_link),
    "calibration: missing file": (2, "none.npz", _options("--int8", "--calib", "none.npz")),
    "calibration: wrong name": (2, "'y'", _calib(y=samples())),
    "calibration: missing name": (2, "'x'", _calib(__labels__=np.arange(4))),
    "calibration: wrong shape": (2, "shape", _calib(x=samples(shape=(4, 8, 8)))),
    "calibration: wrong dtype": (2, "int64", _calib(x=samples().astype(np.int64))),
    "calibration: text": (2, "", _calib(x=np.array(["a", "b"]))),
    "calibration: NaN": (2, "NaN", _calib(x=_nan())),
    "calibration: zero samples": (2, "no samples", _calib(x=samples(0))),
    "calibration: a cache of TensorRT": (2, "holds no samples", _calibration_cache),
    "calibration: a pickle": (2, "pickle", _pickle),
    "shapes: unknown input": (2, "'input'", _options("--opt-shapes", "input:1x3x8x8")),
    "shapes: not a shape": (2, "", _options("--opt-shapes", "x=1,3,8,8")),
    "shapes: another static dimension": (2, "shape", _options("--opt-shapes", "x:1x4x8x8")),
    "shapes: minimum above optimum": (2, "minimum", _options("--min-shapes", "x:9x3x8x8", "--opt-shapes", "x:8x3x8x8")),
    "shapes: dynamic axis without a range": (2, "--opt-shapes", _edited(_dynamic_height)),
    "samples out of the profile": (2, "outside of every profile", _taller_samples),
    "unknown GPU": (2, "H101", _options("--gpu", "H101")),
    "a GPU the backend cannot target": (4, "H100", _options("--gpu", "H100", "--backend", "tensorrt-rtx")),
    "unknown recipe": (2, "identiti", _options("--recipes", "identiti")),
    "unknown builder key": (2, "worksapce", _options("--builder", "worksapce=1G")),
    "unknown metric": (2, "top5", _options("--metric", "top5")),
    "metric without labels": (2, "labels", _options("--metric", "top1")),
    "missing plugin": (2, "none.so", _options("--plugins", "none.so")),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_gives_its_exit_code_one_message_and_no_file(trtopt: Run, tmp_path: Path, name: str) -> None:
    code, message, prepare = CASES[name]
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    out.mkdir()
    options = prepare(folder)
    outputs = ["-o", "../out/m.engine", "--report", "../out/r.json", "--save-onnx", "../out/o.onnx"]
    before = sorted(folder.iterdir())
    done = trtopt("build", "model.onnx", *options, *outputs, cwd=folder)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("error: ") == 1, done.stderr
    error = done.stderr[done.stderr.index("error: ") :]
    assert message in error
    assert "\n  where:  " in error
    assert error.partition("\n  remedy: ")[2].strip()
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) < 24
    assert list(out.iterdir()) == []
    assert sorted(folder.iterdir()) == before


def test_a_long_error_is_one_screen_that_ends_with_the_remedy(trtopt: Run, tmp_path: Path) -> None:
    save_small(tmp_path)
    (tmp_path / "metric.py").write_text("def long(run):\n    raise ValueError('\\n'.join(map(str, range(500))))\n")
    done = trtopt("build", "model.onnx", "--metric", "metric.py:long", "-o", "m.engine")
    assert done.returncode == 2
    error = done.stderr[done.stderr.index("error: ") :].splitlines()
    assert len(error) <= 20
    assert "more lines" in error[-3]
    assert error[-2].startswith("  where:  metric.py:2")
    assert error[-1].startswith("  remedy: ")


@pytest.mark.parametrize("option", ["-o", "--report", "--save-onnx", "--calib-cache", "--export-layer-info"])
def test_an_output_that_cannot_be_written_stops_the_run_at_once(trtopt: Run, tmp_path: Path, option: str) -> None:
    save_small(tmp_path)
    done = trtopt("build", "model.onnx", option, "missing/file")
    assert done.returncode == 2
    assert "The output folder does not exist" in done.stderr
    assert "mkdir -p" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("option", ["-o", "--report", "--save-onnx"])
def test_an_output_does_not_overwrite_the_model(trtopt: Run, tmp_path: Path, option: str) -> None:
    model = save_small(tmp_path)
    before = model.read_bytes()
    done = trtopt("build", "model.onnx", option, "../" + tmp_path.name + "/model.onnx")
    assert done.returncode == 2
    assert "would overwrite the model" in done.stderr
    assert model.read_bytes() == before


def test_two_outputs_do_not_overwrite_each_other(trtopt: Run, tmp_path: Path) -> None:
    save_small(tmp_path)
    done = trtopt("build", "model.onnx", "-o", "a", "--report", "a")
    assert done.returncode == 2
    assert "--report would overwrite --output" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize(
    ("package", "extra"), [("onnxruntime", "cpu"), ("tensorrt_rtx", "rtx")], ids=["onnxruntime", "tensorrt_rtx"]
)
def test_a_missing_package_is_exit_code_4_with_the_line_that_installs_it(
    tmp_path: Path, package: str, extra: str
) -> None:
    save_small(tmp_path)
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / "sitecustomize.py").write_text(_HIDE.format(names=(package,)))
    paths = os.pathsep.join(filter(None, [str(tmp_path / "hide"), os.environ.get("PYTHONPATH")]))
    environment = {**environment_in(tmp_path), "PYTHONPATH": paths}
    done = run_process(["build", "model.onnx", "--fp16"], tmp_path, environment)
    assert done.returncode == 4, done.stderr
    assert package in done.stderr
    assert "pip install" in done.stderr.partition("remedy: ")[2]
    assert extra in done.stderr.partition("remedy: ")[2]
    assert "Traceback" not in done.stderr
    names = {path.name for path in tmp_path.iterdir()} - {".cache"}  # the home folder's, empty
    assert names == {"hide", "model.onnx"}


def test_a_model_the_compiler_refuses_is_exit_code_6_with_the_node(trtopt: Run, tmp_path: Path) -> None:
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("MaxPool", ["x"], ["y", "places"], "pool", kernel_shape=[2, 2], strides=[2, 2])],
            "refused",
            [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 4, 4, 4])],
            [
                helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2, 4, 2, 2]),
                helper.make_tensor_value_info("places", onnx.TensorProto.INT64, [2, 4, 2, 2]),
            ],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    onnx.save(model, tmp_path / "model.onnx")
    done = trtopt("build", "model.onnx", "--fp32", "--report", "report.json")
    assert done.returncode == 6, done.stderr
    assert "node 0, 'pool' (MaxPool)" in done.stderr
    assert done.stderr.count("error: ") == 1
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ""] == ["model.onnx"]
