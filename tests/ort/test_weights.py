"""Narrow weights in a run: fitted to samples, kept within the accuracy budget, never silently wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import trtopt
from trtopt.errors import TargetError, UsageError
from trtopt.report.schema.build import BuildReport

RNG = np.random.default_rng(0)
WIDTH, WIDE = 256, 2048


def samples(count: int = 48, width: int = WIDTH) -> np.ndarray:
    """[count, 8, width], most of whose power lies in few directions, as that of real activations."""
    mix = np.random.default_rng(1).standard_normal((16, width)).astype(np.float32)
    hidden = RNG.standard_normal((count, 8, 16)).astype(np.float32) @ mix
    return hidden + 0.1 * RNG.standard_normal(hidden.shape).astype(np.float32)


def save_network(path: Path, width: int) -> None:
    """x [batch, 8, width] -> three products with biases and ReLUs -> y."""
    nodes, constants, x = [], [], "x"
    for index in range(3):
        weight = RNG.standard_normal((width, width)).astype(np.float32) / np.sqrt(width, dtype=np.float32)
        bias = 0.1 * RNG.standard_normal(width).astype(np.float32)
        constants += [numpy_helper.from_array(weight, f"w{index}"), numpy_helper.from_array(bias, f"b{index}")]
        y = "y" if index == 2 else f"r{index}"
        nodes.append(helper.make_node("MatMul", [x, f"w{index}"], [f"m{index}"], name=f"product{index}"))
        nodes.append(helper.make_node("Add", [f"m{index}", f"b{index}"], [y if y == "y" else f"a{index}"]))
        if y != "y":
            nodes.append(helper.make_node("Relu", [f"a{index}"], [y]))
        x = y
    value = helper.make_tensor_value_info
    shape = ["batch", 8, width]
    graph = helper.make_graph(nodes, "g", [value("x", 1, shape)], [value("y", 1, shape)], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)


def stored(folder: Path, width: int = WIDTH, **options: Any) -> BuildReport:
    """TensorRT's judge is a model, and needs no compiler."""
    save_network(folder / "net.onnx", width)
    given: dict[str, Any] = {"precision": "fp16", "weights": "int4", "keep_all_weights": True}
    given.update(calib={"x": samples(width=width)}, min_agreement=0.0, min_sqnr_db=5.0)
    return trtopt.optimize(
        folder / "net.onnx",
        output=folder / "out.onnx",
        backend="tensorrt",
        cache_dir=folder / "cache",
        **{**given, **options},
    )


def sqnr(report: BuildReport) -> float:
    assert report.accuracy is not None
    return report.accuracy.outputs["y"].sqnr_db


@pytest.mark.parametrize(
    ("options", "share"),
    [({}, 0.2578), ({"weight_block": "32"}, 0.2813), ({"weight_block": 32}, 0.2813), ({"weights": "int8"}, 0.5039)],
)
def test_weights_take_the_bytes_of_their_format_and_of_their_scales(
    options: dict[str, str], share: float, tmp_path: Path
) -> None:
    report = stored(tmp_path, **options)
    assert report.weights is not None and report.weights.nodes == ("product0", "product1", "product2")
    assert report.weights.bytes / report.weights.bytes_before == pytest.approx(share, abs=1e-3)
    kinds = {node.op_type for node in onnx.load(tmp_path / "out.onnx").graph.node}
    assert "DequantizeLinear" in kinds and "QuantizeLinear" not in kinds


def test_weights_fitted_to_samples_are_better_than_the_nearest(tmp_path: Path) -> None:
    nearest = sqnr(stored(tmp_path, calib="synthetic", eval={"x": samples()}))
    assert sqnr(stored(tmp_path)) > nearest + 3


def test_other_samples_profit_too(tmp_path: Path) -> None:
    nearest = sqnr(stored(tmp_path, calib="synthetic", eval={"x": samples()}))
    assert sqnr(stored(tmp_path, eval={"x": samples(16)})) > nearest + 3


@pytest.mark.parametrize("precision", ["fp32", "bf16", None])
def test_the_products_compute_in_the_precision_asked_for(precision: str | None, tmp_path: Path) -> None:
    report = stored(tmp_path, precision=precision)
    assert report.weights is not None and len(report.weights.nodes) == 3


def test_weights_below_the_floor_are_no_result(tmp_path: Path) -> None:
    report = stored(tmp_path, min_sqnr_db=60.0)
    assert report.gate_failures and not (tmp_path / "out.onnx").exists()


def test_without_a_bound_samples_have_a_floor(tmp_path: Path) -> None:
    report = stored(tmp_path, min_sqnr_db=None)
    assert report.accuracy is not None and report.accuracy.floor is not None


def test_allowed_loss_is_a_warning(tmp_path: Path) -> None:
    report = stored(tmp_path, min_sqnr_db=60.0, allow_accuracy_loss=True)
    assert any("SQNR" in text for text in report.warnings) and (tmp_path / "out.onnx").exists()


@pytest.mark.long
def test_weights_go_back_for_the_budget(tmp_path: Path) -> None:
    """At batch 1 the bytes of the weights are the time, so that all three pay; the budget bears fewer."""
    shapes = {"opt_shapes": {"x": (1, 8, WIDE)}, "max_shapes": {"x": (48, 8, WIDE)}, "min_shapes": {"x": (1, 8, WIDE)}}
    every = stored(tmp_path, WIDE, keep_all_weights=False, **shapes)
    assert every.weights is not None and len(every.weights.nodes) == 3
    assert every.shipped is not None and every.plain is not None
    assert every.shipped.bytes < 0.3 * every.plain.bytes and every.shipped.predicted_us < every.plain.predicted_us
    fewer = stored(tmp_path, WIDE, keep_all_weights=False, min_sqnr_db=sqnr(every) + 1, **shapes)
    assert fewer.weights is not None and 0 < len(fewer.weights.nodes) < 3
    assert not fewer.gate_failures and sqnr(fewer) >= sqnr(every) + 1
    assert any("accuracy budget" in item.reason for item in fewer.guard)


def test_synthetic_samples_are_not_fitted_to(tmp_path: Path) -> None:
    report = stored(tmp_path, calib="synthetic")
    assert any("no samples to fit" in text for text in report.warnings)


def test_int8_products_keep_their_operands(tmp_path: Path) -> None:
    """What computes in 8 bits has no floating weight; the weights of the others are stored narrow."""
    report = stored(tmp_path, precision="int8", keep_all_int8=True)
    assert report.weights is not None and not report.weights.nodes
    assert any("no matrix product" in text for text in report.warnings)


@pytest.mark.parametrize(
    ("options", "error", "part"),
    [
        ({"weights": "int3"}, UsageError, "int3"),
        ({"weights": "int8", "weight_block": "64"}, UsageError, "--weights int4"),
        ({"weight_block": "17"}, UsageError, "17"),
        ({"weight_block": 17}, UsageError, "17|a text"),
        ({"weights": "nvfp4", "gpu": "L4"}, TargetError, "FP4"),
        ({"weights": "mxfp8", "gpu": "A100"}, TargetError, "FP8"),
    ],
)
def test_what_cannot_be_is_one_clear_error(
    options: dict[str, str], error: type[Exception], part: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=part):
        stored(tmp_path, **options)
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize(("weights", "db"), [("nvfp4", 12), ("mxfp8", 25)])
def test_floating_formats_are_verified_without_kernels_of_onnx_runtime(weights: str, db: float, tmp_path: Path) -> None:
    report = stored(tmp_path, weights=weights, gpu="RTX 5090")
    assert report.weights is not None and len(report.weights.nodes) == 3 and sqnr(report) > db
