"""``trtopt analyze --sparse`` as a user runs it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from small_models import save_small

import trtopt as package

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def save_layers(folder: Path) -> Path:
    """x [4096, 1024] -> large -> small, and -> pruned; a depthwise convolution; a product of activations."""
    rng = np.random.default_rng(0)
    pruned = rng.standard_normal((1024, 1024)).astype(np.float32)
    pruned[::4] = pruned[1::4] = 0
    weights = {
        "large_w": rng.standard_normal((1024, 1024)),
        "pruned_w": pruned,
        "small_w": rng.standard_normal((1024, 16)),
        "depthwise_w": rng.standard_normal((64, 1, 3, 3)),
    }
    nodes = [
        helper.make_node("Gemm", ["x", "large_w"], ["h"], "large"),
        helper.make_node("Softmax", ["h"], ["p"], "softmax"),
        helper.make_node("Gemm", ["p", "pruned_w"], ["s"], "pruned"),
        helper.make_node("MatMul", ["s", "p_t"], ["scores"], "scores"),
        helper.make_node("Gemm", ["s", "small_w"], ["y"], "small"),
        helper.make_node("Conv", ["image", "depthwise_w"], ["map"], "depthwise", group=64),
    ]
    nodes.insert(2, helper.make_node("Transpose", ["p"], ["p_t"], "transpose", perm=[1, 0]))
    inputs = {"x": [4096, 1024], "image": [1, 64, 32, 32]}
    outputs = {"y": [4096, 16], "scores": [4096, 4096], "map": [1, 64, 30, 30]}
    graph = helper.make_graph(
        nodes,
        "layers",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(np.asarray(array, np.float32), name) for name, array in weights.items()],
    )
    path = folder / "layers.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def sparsity_of(done: subprocess.CompletedProcess[str]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The record, and its layers by node."""
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["sparsity"]
    return found, {node: row for row in found["layers"] for node in row["nodes"]}


def test_each_layer_has_a_verdict_its_times_and_a_reason(trtopt: Run, tmp_path: Path) -> None:
    save_layers(tmp_path)
    found, rows = sparsity_of(trtopt("analyze", "layers.onnx", "--gpu", "A100", "--sparse", "--json"))
    assert {name for name, row in rows.items() if row["eligible"]} == {"large", "pruned"}
    assert {name for name, row in rows.items() if row["is_sparse"]} == {"pruned"}
    assert rows["large"]["sparse_us"] < rows["large"]["dense_us"]
    assert (rows["large"]["dense_us"], rows["large"]["sparse_us"]) == pytest.approx(
        (rows["pruned"]["dense_us"], rows["pruned"]["sparse_us"]),
        rel=0.01,  # the others lie elsewhere in the network
    )
    for name, reason in {
        "small": "below 256 channels",
        "depthwise": "no multiple of 4",
        "scores": "its weight is not constant",
    }.items():
        assert reason in rows[name]["reason"]
        assert rows[name]["sparse_us"] == rows[name]["dense_us"] > 0
    gains = sum(row["dense_us"] - row["sparse_us"] for row in found["layers"])
    assert found["dense_us"] - found["sparse_us"] == pytest.approx(gains)
    assert found["backend"] == "tensorrt"


def test_the_prediction_of_the_network_itself_stays_dense(trtopt: Run, tmp_path: Path) -> None:
    path = save_layers(tmp_path)
    plain = json.loads(trtopt("analyze", "layers.onnx", "--gpu", "A100", "--json").stdout)
    asked = json.loads(trtopt("analyze", "layers.onnx", "--gpu", "A100", "--sparse", "--json").stdout)
    assert plain.pop("sparsity") is None
    assert asked["sparsity"]["dense_us"] == pytest.approx(asked["totals"]["predicted_us"])
    assert package.analyze(path, gpu="A100", sparse=True).to_json_dict() == asked
    asked.pop("sparsity")
    assert plain == asked


def test_the_terminal_says_the_total_which_weights_are_2_4_and_why_the_others_stay_dense(
    trtopt: Run, tmp_path: Path
) -> None:
    save_layers(tmp_path)
    text = " ".join(trtopt("analyze", "layers.onnx", "--gpu", "A100", "--sparse").stdout.split())
    assert "with sparse kernels in 2 layers" in text and "times as fast" in text
    assert "1 of 3 weights that can be (pruned_w)" in text
    assert "1 node: below 256 channels in (times taps) or out dense kernels are as fast (small)" in text
    assert "No sparse kernel was measured for this prediction" in text and "1.12 to 1.31" in text


def test_a_gpu_before_ampere_gains_nothing_and_the_reason_says_so(trtopt: Run, tmp_path: Path) -> None:
    save_layers(tmp_path)
    found, rows = sparsity_of(trtopt("analyze", "layers.onnx", "--gpu", "T4", "--sparse", "--json"))
    assert found["dense_us"] == found["sparse_us"]
    assert not any(row["eligible"] for row in rows.values())
    assert "compute capability 8.0" in rows["large"]["reason"]
    assert "would gain nothing" in trtopt("analyze", "layers.onnx", "--gpu", "T4", "--sparse").stdout


def test_int8_products_are_judged_in_int8(trtopt: Run, tmp_path: Path) -> None:
    save_layers(tmp_path)
    _, rows = sparsity_of(trtopt("analyze", "layers.onnx", "--gpu", "A100", "--int8", "--sparse", "--json"))
    assert rows["large"]["eligible"] and "INT8" in rows["large"]["reason"]


def test_the_page_has_the_table(trtopt: Run, tmp_path: Path) -> None:
    pytest.importorskip("jinja2", reason="Jinja2 fills the page")
    save_layers(tmp_path)
    assert trtopt("analyze", "layers.onnx", "--gpu", "A100", "--sparse", "--html", "a.html").returncode == 0
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "<h2>2:4 sparsity</h2>" in page and "below 256 channels" in page
    save_small(tmp_path)
    trtopt("analyze", "model.onnx", "--gpu", "A100", "--html", "b.html")
    assert "2:4 sparsity</h2>" not in (tmp_path / "b.html").read_text(encoding="utf-8")


def test_for_tensorrt_for_rtx_the_gain_is_nothing(trtopt: Run, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="--compile needs the compiler")
    save_layers(tmp_path)
    found, rows = sparsity_of(trtopt("analyze", "layers.onnx", "--gpu", "L4", "--sparse", "--compile", "--json"))
    assert found["backend"] == "tensorrt-rtx"
    assert found["dense_us"] == found["sparse_us"]
    assert "TensorRT for RTX ignores sparse weights" in rows["large"]["reason"]
    assert rows["pruned"]["is_sparse"]
