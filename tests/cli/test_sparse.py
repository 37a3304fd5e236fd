"""``--sparse`` as a user meets it: what is pruned, what stays dense and why, and what it costs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command_line import environment_in, run_here
from onnx import TensorProto, helper, numpy_helper

from trtopt.sparsity.layers import is_sparse

Run = Callable[..., "subprocess.CompletedProcess[str]"]

WIDTH, THIN, CLASSES, SAMPLES = 256, 48, 10, 256


def _network(weights: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """x [N, 512] -> two wide layers (up, down), a thin one that cannot gain, scores [N, 10]."""
    nodes = []
    last = "x"
    for name in ("up", "down", "thin"):
        nodes.append(helper.make_node("Gemm", [last, f"{name}.weight"], [f"{name}_y"], name, transB=1))
        nodes.append(helper.make_node("Relu", [f"{name}_y"], [last := f"{name}_z"], f"{name}_relu"))
    nodes.append(helper.make_node("Gemm", [last, "head.weight"], ["scores"], "head", transB=1))
    graph = helper.make_graph(
        nodes,
        "wide",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", WIDTH])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", CLASSES])],
        [numpy_helper.from_array(value.astype(np.float32), f"{name}.weight") for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def _weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"up": (WIDTH, WIDTH), "down": (WIDTH, WIDTH), "thin": (THIN, WIDTH), "head": (CLASSES, THIN)}
    return {name: rng.standard_normal(shape) / shape[1] ** 0.5 for name, shape in shapes.items()}


def _fill(folder: Path) -> Path:
    onnx.save(_network(_weights()), folder / "model.onnx")
    rng = np.random.default_rng(1)
    mixing = rng.standard_normal((64, WIDTH)) / 8  # inputs that depend on each other, as real ones do
    np.savez(folder / "calib.npz", x=(rng.standard_normal((SAMPLES, 64)) @ mixing).astype(np.float32))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return _fill(tmp_path)


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A run with a budget that any loss keeps, and its folder."""
    folder = _fill(tmp_path_factory.mktemp("pruned"))
    arguments = _arguments("--fp16", "--sparse", "--max-accuracy-drop", "1")
    return run_here(arguments, folder, environment_in(folder)), folder


def _arguments(*options: str, backend: str = "tensorrt", calib: str | None = "calib.npz") -> list[str]:
    given = ["--calib", calib] if calib is not None else []
    target = ["--backend", backend, "--gpu", "A100" if backend == "tensorrt" else "L4"]
    shapes = ["--min-shapes", f"x:1x{WIDTH}", "--opt-shapes", f"x:8192x{WIDTH}", "--max-shapes", f"x:8192x{WIDTH}"]
    return ["optimize", "model.onnx", "-o", "out.onnx", "--report", "r.json", *given, *target, *shapes, *options]


def _report(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "r.json").read_text())
    return report


def _layers(folder: Path) -> dict[str, dict[str, Any]]:
    return {layer["nodes"][0]: layer for layer in _report(folder)["sparsity"]["layers"]}


def _sparse_weights(folder: Path) -> list[tuple[int, ...]]:
    """The shapes of the weights of the file that are 2:4 along their inputs, quantized ones included."""
    model = onnx.load(folder / "out.onnx")
    arrays = [numpy_helper.to_array(item) for item in model.graph.initializer]
    return sorted(array.shape for array in arrays if array.ndim == 2 and is_sparse(array, 1))


def test_only_layers_that_gain_are_pruned_and_the_others_say_why_they_are_not(
    pruned: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, folder = pruned
    assert done.returncode == 0, done.stderr
    assert _sparse_weights(folder) == [(WIDTH, WIDTH), (WIDTH, WIDTH)]
    layers, found = _layers(folder), _report(folder)["sparsity"]
    assert {name for name, layer in layers.items() if layer["sparse"]} == {"up", "down"}
    assert "256 channels" in layers["thin"]["reason"] and layers["head"]["reason"]
    gain = sum(layer["dense_us"] - layer["sparse_us"] for layer in layers.values())
    assert 0 < gain == pytest.approx(found["dense_us"] - found["sparse_us"], rel=1e-9)
    assert found["curve"][0]["layers"] == 0 and found["curve"][0]["predicted_us"] == pytest.approx(found["dense_us"])
    assert found["curve"][-1]["layers"] == 2 and found["curve"][-1]["predicted_us"] == pytest.approx(found["sparse_us"])
    assert "1.3 times" in " ".join(done.stdout.split())


def test_fitted_weights_cost_less_than_the_smallest_set_to_zero(
    pruned: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    _, folder = pruned
    for name in ("up", "down"):
        layer = _layers(folder)[name]
        assert layer["method"] == "recovered" and 0.5 < layer["kept_magnitude"] < 1
        assert layer["sqnr_db"] > layer["magnitude_sqnr_db"] + 3


def test_the_default_budget_leaves_layers_dense(trtopt: Run, folder: Path) -> None:
    done = trtopt(*_arguments("--fp16", "--sparse"))
    assert done.returncode == 0, done.stderr
    found = _report(folder)["sparsity"]
    agreement = _report(folder)["accuracy"]["outputs"]["scores"]["top1_agreement"]
    assert found["budget"]["is_default"] and found["budget"]["reached"] and found["budget"]["given_back"]
    assert 1 - agreement <= 0.01 < max(point["drop"] for point in found["curve"])
    assert _layers(folder)[found["budget"]["given_back"][0]]["reason"] == "left dense for the accuracy budget"


def test_a_loss_that_is_allowed_is_said_first(trtopt: Run, folder: Path) -> None:
    done = trtopt(*_arguments("--fp16", "--sparse", "--allow-accuracy-loss"))
    assert done.returncode == 0, done.stderr
    agreement = _report(folder)["accuracy"]["outputs"]["scores"]["top1_agreement"]
    assert agreement < 0.99 and len(_sparse_weights(folder)) == 2
    assert f"top-1 agreement {100 * agreement:.1f} %" in " ".join(done.stdout.split("\n\n")[0].split())
    assert _report(folder)["sparsity"]["budget"] is None


def test_tensorrt_for_rtx_gains_nothing_and_keeps_its_weights(trtopt: Run, folder: Path) -> None:
    done = trtopt(*_arguments("--fp16", "--sparse", backend="tensorrt-rtx"))
    assert done.returncode == 0, done.stderr
    found = _report(folder)["sparsity"]
    assert _sparse_weights(folder) == [] and found["dense_us"] == found["sparse_us"]
    assert "ignores the pattern, the predicted gain is 0" in " ".join(done.stderr.split())
    assert all("TensorRT for RTX ignores" in layer["reason"] for layer in found["layers"] if layer["weight"])


def test_it_prunes_for_tensorrt_for_rtx_when_told_to(trtopt: Run, folder: Path) -> None:
    done = trtopt(*_arguments("--fp16", "--sparse-all", "--allow-accuracy-loss", backend="tensorrt-rtx"))
    assert done.returncode == 0, done.stderr
    found = _report(folder)["sparsity"]
    assert _sparse_weights(folder) == [(CLASSES, THIN), (THIN, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH)]
    assert found["dense_us"] == found["sparse_us"]
    assert all(layer["reason"].startswith("asked for by --sparse-all; ") for layer in _layers(folder).values())


def test_a_model_that_is_sparse_already_is_kept_to_the_bit(trtopt: Run, folder: Path) -> None:
    weights = _weights()
    for name in ("up", "down"):
        weights[name][:, 1::2] = 0
    onnx.save(_network(weights), folder / "model.onnx")
    done = trtopt(*_arguments("--sparse"))
    assert done.returncode == 0, done.stderr
    found = {item.name: numpy_helper.to_array(item) for item in onnx.load(folder / "out.onnx").graph.initializer}
    kept = [array for array in found.values() if array.shape == (WIDTH, WIDTH)]
    assert all(
        any(np.array_equal(weights[name].astype(np.float32), array) for array in kept) for name in ("up", "down")
    )
    assert _layers(folder)["up"]["method"] == "was sparse" and _report(folder)["sparsity"]["curve"] == []


def test_int8_keeps_the_zeros(trtopt: Run, folder: Path) -> None:
    options = ("--int8", "--keep-all-int8", "--sparse-all", "--allow-accuracy-loss")
    done = trtopt(*_arguments(*options))
    assert done.returncode == 0, done.stderr
    model = onnx.load(folder / "out.onnx")
    integers = [numpy_helper.to_array(item) for item in model.graph.initializer if item.data_type == TensorProto.INT8]
    weights = [array for array in integers if array.ndim == 2]
    assert len(weights) >= 3 and all(is_sparse(array, 1) for array in weights)
    assert "round-weights" in [step["name"] for step in _report(folder)["steps"]]


def test_gains_in_int8_of_layers_that_stay_in_16_bits_are_called_so(trtopt: Run, folder: Path) -> None:
    done = trtopt(*_arguments("--int8", "--sparse-all", "--allow-accuracy-loss"))
    assert done.returncode == 0, done.stderr
    weights = onnx.load(folder / "out.onnx").graph.initializer
    wide = 4 - sum(len(item.dims) == 2 and item.data_type == TensorProto.INT8 for item in weights)
    text = f"Gains are predicted in INT8; {wide} pruned layer{'s' if wide > 1 else ''} did not become that."
    assert wide > 0 and text in _report(folder)["sparsity"]["note"]


def test_without_samples_nothing_is_pruned(trtopt: Run, folder: Path) -> None:
    done = trtopt(*_arguments("--fp16", "--sparse", calib=None))
    assert done.returncode == 2 and "--calib" in done.stderr
    assert not (folder / "out.onnx").exists()


def test_synthetic_samples_prune_by_magnitude_with_a_warning(trtopt: Run, folder: Path) -> None:
    done = trtopt(*_arguments("--fp16", "--sparse", "--allow-accuracy-loss", calib="synthetic"))
    assert done.returncode == 0, done.stderr
    assert {layer["method"] for layer in _layers(folder).values() if layer["sparse"]} == {"magnitude"}
    assert "by magnitude alone" in " ".join((done.stdout + done.stderr).split())


def test_a_target_that_is_not_one_gpu_is_refused(trtopt: Run, folder: Path) -> None:
    done = trtopt("optimize", "model.onnx", "-o", "out.onnx", "--calib", "calib.npz", "--sparse", "--gpu", "portable")
    assert done.returncode == 4 and "--sparse-all" in done.stderr


def test_a_metric_that_cannot_be_held_leaves_everything_dense(trtopt: Run, folder: Path) -> None:
    (folder / "metric.py").write_text(
        "import numpy as np\nX = np.load('calib.npz')['x']\nfirst = []\n"
        "def closeness(run):\n    first.append(run({'x': X})[0])\n"
        "    return -float(np.abs(first[-1] - first[0]).max() > 0.02)\n"
    )
    done = trtopt(*_arguments("--fp16", "--sparse", "--metric", "metric.py:closeness"))
    assert done.returncode == 0, done.stderr
    assert _sparse_weights(folder) == [] and len(_report(folder)["sparsity"]["budget"]["given_back"]) == 2


def test_a_model_of_16_bit_weights_is_pruned_when_its_precision_is_said(trtopt: Run, folder: Path) -> None:
    weights = {"up": _weights()["up"]}
    nodes = [helper.make_node("Gemm", ["x", "up"], ["y"], "up", transB=1)]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["N", WIDTH]) for name in ("x", "y")]
    stored = [numpy_helper.from_array(array.astype(np.float16), name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "half", values[:1], values[1:], stored)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(made, folder / "model.onnx")
    np.savez(folder / "calib.npz", x=np.load(folder / "calib.npz")["x"].astype(np.float16)[:32])
    done = trtopt(*_arguments("--sparse-all", "--allow-accuracy-loss"))
    assert done.returncode == 2 and "--fp16" in done.stderr and not (folder / "out.onnx").exists()
    done = trtopt(*_arguments("--fp16", "--sparse-all", "--allow-accuracy-loss"))
    assert done.returncode == 0, done.stderr
    found = [item for item in onnx.load(folder / "out.onnx").graph.initializer if len(item.dims) == 2]
    assert [item.data_type for item in found] == [TensorProto.FLOAT16]
    assert is_sparse(numpy_helper.to_array(found[0]), 1)


def test_a_model_that_is_sparse_in_part_counts_that_part_in_its_curve(trtopt: Run, folder: Path) -> None:
    weights = _weights()
    weights["down"][:, 1::2] = 0
    onnx.save(_network(weights), folder / "model.onnx")
    done = trtopt(*_arguments("--fp16", "--sparse", "--max-accuracy-drop", "1"))
    assert done.returncode == 0, done.stderr
    found = _report(folder)["sparsity"]
    assert [point["layers"] for point in found["curve"]] == [1, 2]
    assert found["curve"][0]["predicted_us"] < found["dense_us"]
    assert found["curve"][1]["predicted_us"] == pytest.approx(found["sparse_us"])


def test_too_few_samples_prune_by_magnitude_with_a_warning(trtopt: Run, folder: Path) -> None:
    np.savez(folder / "calib.npz", x=np.load(folder / "calib.npz")["x"][:2])
    done = trtopt(*_arguments("--fp16", "--sparse", "--allow-accuracy-loss"))
    assert done.returncode == 0, done.stderr
    assert {layer["method"] for layer in _layers(folder).values() if layer["sparse"]} == {"magnitude"}
    assert "by magnitude alone: fewer than 6 samples" in " ".join(done.stderr.split())


def test_the_budget_of_sparse_gates_nothing_where_nothing_is_pruned(trtopt: Run, folder: Path) -> None:
    (folder / "metric.py").write_text(
        "import numpy as np\nX = np.load('calib.npz')['x']\nfirst = []\n"
        "def equality(run):\n    first.append(run({'x': X})[0])\n"
        "    return float(np.array_equal(first[-1], first[0]))\n"
    )
    done = trtopt(*_arguments("--bf16", "--sparse", "--metric", "metric.py:equality"))
    assert done.returncode == 0, done.stderr
    found = _report(folder)
    assert _sparse_weights(folder) == [] and found["accuracy"]["metric"]["drop"] == 1.0
