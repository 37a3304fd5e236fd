"""Masks too large for FP16, and casts around the product of Q and K: attention stays one kernel, in FP16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

import trtopt
from trtopt.engine.layers import activation_bytes
from trtopt.report.schema.build import BuildReport
from trtopt.report.schema.layers import LayerInfo
from trtopt.source.onnx_file import load

pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")

_HEADS = "{0}0 = MatMul(x, w{0}) {0}1 = Reshape({0}0, heads) {0} = Transpose <perm = [0, 2, {1}]> ({0}1)"
_PROJECTIONS = " ".join(_HEADS.format(*each) for each in (("q", "1, 3"), ("k", "3, 1"), ("v", "1, 3")))
_MIX = "o0 = MatMul(p, v) o1 = Transpose <perm = [0, 2, 1, 3]> (o0) o2 = Reshape(o1, flat) y = MatMul(o2, wo)"
_MASK = "m0 = Unsqueeze(m, one) m1 = Cast <to = 1> (m0) m2 = Sub(unit, m1) b = Mul(m2, low)"
_ADDED = "s0 = MatMul(q, k) s1 = Mul(s0, scale) s2 = Add(s1, b) p = Softmax <axis = -1> (s2)"
_SELECTED = (
    "m0 = Unsqueeze(m, one) b = Cast <to = 9> (m0) s0 = MatMul(q, k) s1 = Mul(s0, scale) s2 = Where(b, s1, low) "
    "p = Softmax <axis = -1> (s2)"
)
_WIDE_SCORES = (
    "s0 = MatMul(q, k) s1 = Cast <to = 1> (s0) s2 = Mul(s1, scale) s3 = Add(s2, b) s4 = Softmax <axis = -1> (s3) "
    "p = Cast <to = 10> (s4)"
)
_WIDE_PRODUCT = (
    "qw = Cast <to = 1> (q) kw = Cast <to = 1> (k) s0 = MatMul(qw, kw) s1 = Mul(s0, scale) s2 = Add(s1, b) "
    "s3 = Softmax <axis = -1> (s2) p = Cast <to = 10> (s3)"
)
_WIDE_UP_TO_THE_MASK = (
    "qw = Cast <to = 1> (q) kw = Cast <to = 1> (k) s0 = MatMul(qw, kw) s1 = Mul(s0, scale) s2 = Add(s1, b) "
    "s3 = Cast <to = 10> (s2) p = Softmax <axis = -1> (s3)"
)


def attention(folder: Path, body: str, dtype: type = np.float32) -> Path:
    """x [4, 64, 256], m [4, 64, 64]: four heads of 64."""
    name = "float" if dtype is np.float32 else "float16"
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 20]> g ({name}[4, 64, 256] x, int64[4, 64, 64] m) => '
        f"({name}[4, 64, 256] y) <int64[4] heads = {{0, 0, 4, 64}}, int64[3] flat = {{0, 0, 256}}, "
        f"int64[1] one = {{1}}, float unit = {{1}}, float scale = {{0.125}}> {{ {_PROJECTIONS} {body} {_MIX} }}"
    )
    rng = np.random.default_rng(0)
    for each in "qkvo":
        weight: np.ndarray = (rng.standard_normal((256, 256)) / 16).astype(dtype)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, f"w{each}"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(np.finfo(np.float32).min), "low"))
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


def built(path: Path, recipes: str, dtype: type = np.float32, precision: str = "fp16") -> BuildReport:
    x: np.ndarray = np.random.default_rng(1).standard_normal((4, 64, 256)).astype(dtype)
    mask = np.tril(np.ones((4, 64, 64), np.int64))
    mask[:, :, 50:] = 0
    return trtopt.build(
        path,
        precision=precision,
        calib={"x": x, "m": mask},
        output=path.with_suffix(".engine"),
        backend="tensorrt-rtx",
        gpu="L4",
        recipes=recipes,
        keep_all_int8=precision == "int8",
        allow_accuracy_loss=precision == "int8",
    )


def layers(report: BuildReport) -> tuple[LayerInfo, ...]:
    assert report.engine is not None
    return report.engine.layers


def fused(report: BuildReport) -> int:
    """Kernels that compute attention as a whole."""
    return sum("mha" in f"{layer.name} {layer.type}".lower() for layer in layers(report))


def kernels(report: BuildReport) -> int:
    return sum(layer.is_kernel for layer in layers(report))


def sqnr_db(report: BuildReport) -> float:
    assert report.accuracy is not None and report.accuracy.outputs["y"].nonfinite == 0
    return float(report.accuracy.outputs["y"].sqnr_db)


@pytest.mark.parametrize(
    ("body", "precision"),
    [
        pytest.param(f"{_MASK} {_ADDED}", "fp16", id="added-fp16"),
        pytest.param(_SELECTED, "int8", id="selected-int8"),
        pytest.param(f"{_MASK} {_ADDED}", "int8", id="added-int8", marks=pytest.mark.long),
        pytest.param(_SELECTED, "fp16", id="selected-fp16", marks=pytest.mark.long),
    ],
)
def test_no_node_stays_fp32_for_a_mask(body: str, precision: str, tmp_path: Path) -> None:
    path = attention(tmp_path, body)
    plain, clamped = built(path, "none", precision=precision), built(path, "mask-constant", precision=precision)
    assert {"s2", "p"} <= outputs_kept(plain, path) and not outputs_kept(clamped, path)
    assert fused(plain) == fused(clamped) == 1
    assert kernels(clamped) <= kernels(plain)
    assert sqnr_db(clamped) > sqnr_db(plain) - 1
    if body != _SELECTED and precision == "fp16":
        assert activation_bytes(layers(clamped)) < activation_bytes(layers(plain)), "the mask is a tensor: read in FP16"


def outputs_kept(report: BuildReport, path: Path) -> set[str]:
    """The outputs of the nodes that stay FP32."""
    kept = {item.node for item in report.precision.kept}
    nodes = load(path).model.graph
    return {str(node.outputs[0].name) for node in nodes if node.name in kept}


@pytest.mark.parametrize(
    "core",
    [
        pytest.param(_WIDE_SCORES, marks=pytest.mark.long),
        pytest.param(_WIDE_PRODUCT, marks=pytest.mark.long),
        _WIDE_UP_TO_THE_MASK,
    ],
    ids=["scores", "product", "up-to-the-mask"],
)
def test_fp32_casts_in_a_model_typed_fp16_are_gone_with_fp16(core: str, tmp_path: Path) -> None:
    path = attention(tmp_path, f"{_MASK} {core}", np.float16)
    report = built(path, "all", np.float16)
    assert fused(report) == 1 and not report.precision.kept
    assert sqnr_db(report) > 50
    assert report.precision.achieved["fp16"].flop_share > 0.99
