"""The precision rewrites keep the fusions of the real TensorRT for RTX builder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from rtx_nets import constant, model

import trtopt
from trtopt.report.schema.build import BuildReport

pytest.importorskip("tensorrt_rtx")


def built(proto: onnx.ModelProto, precision: str, folder: Path, **calib: np.ndarray) -> BuildReport:
    """Build with every 8-bit layer that the table allows, whether it pays or not."""
    options = {"output": folder / "m.engine", "backend": "tensorrt-rtx", "gpu": "L4"}
    return trtopt.build(proto, precision=precision, calib=calib, keep_all_int8=precision == "int8", **options)


def residual_block() -> onnx.ModelProto:
    """x [8, 64, 28, 28] -> conv, ReLU, conv, + x, ReLU; smooth weights, which one scale each serves well."""
    rng = np.random.default_rng(0)
    weights = [constant(name, (rng.uniform(-1, 1, (64, 64, 3, 3)) / 14).astype(np.float32)) for name in ("w1", "w2")]
    biases = [constant(name, rng.standard_normal(64).astype(np.float32)) for name in ("b1", "b2")]
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], name="conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"], name="relu1"),
        helper.make_node("Conv", ["r1", "w2", "b2"], ["c2"], name="conv2", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c2", "x"], ["a"], name="add"),
        helper.make_node("Relu", ["a"], ["y"], name="relu2"),
    ]
    return model(nodes, [("x", np.float32, [8, 64, 28, 28])], [("y", np.float32)], [*weights, *biases])


def test_an_int8_residual_block_stays_two_convolution_kernels(tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((8, 64, 28, 28)).astype(np.float32)
    report = built(residual_block(), "int8", tmp_path, x=x)
    layers = report.engine.layers
    assert report.precision.int8_flop_share == 1.0
    second = next(layer for layer in layers if "conv2" in layer.onnx_nodes)
    assert {"conv2", "add", "relu2"} <= set(second.onnx_nodes)
    first = next(layer for layer in layers if "conv1" in layer.onnx_nodes)
    assert {"conv1", "relu1"} <= set(first.onnx_nodes)
    assert report.precision.achieved["int8"].flop_share > 0.9
    assert report.accuracy.outputs["y"].sqnr_db > 30


def transformer_block() -> onnx.ModelProto:
    """x [2, 64, 128], mask [2, 1, 1, 64]: four heads of 32, a mask of -3.4e38, residuals, GELU."""
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return constant(name, (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32))

    constants = [weight(f"w{each}", 128, 128) for each in "qkvo"]
    constants += [weight("wu", 128, 512), weight("wd", 512, 128), weight("bu", 512), weight("bd", 128)]
    constants += [constant("heads", np.array([2, 64, 4, 32])), constant("flat", np.array([2, 64, 128]))]
    scalars = {"scale": 0.17, "one": 1.0, "low": np.finfo(np.float32).min, "root": 2.0**0.5, "half": 0.5}
    constants += [constant(name, np.asarray(value, np.float32)) for name, value in scalars.items()]
    nodes = []
    for each in "qkv":
        order = [0, 2, 3, 1] if each == "k" else [0, 2, 1, 3]
        nodes += [
            helper.make_node("MatMul", ["x", f"w{each}"], [f"{each}0"], name=f"proj_{each}"),
            helper.make_node("Reshape", [f"{each}0", "heads"], [f"{each}1"], name=f"reshape_{each}"),
            helper.make_node("Transpose", [f"{each}1"], [f"{each}2"], name=f"transpose_{each}", perm=order),
        ]
    chain = [
        ("Sub", ["one", "mask"], "m0"),
        ("Mul", ["m0", "low"], "m1"),
        ("MatMul", ["q2", "k2"], "s0"),
        ("Mul", ["s0", "scale"], "s1"),
        ("Add", ["s1", "m1"], "s2"),
        ("Softmax", ["s2"], "p"),
        ("MatMul", ["p", "v2"], "o0"),
        ("Transpose", ["o0"], "o1"),
        ("Reshape", ["o1", "flat"], "o2"),
        ("MatMul", ["o2", "wo"], "o3"),
        ("Add", ["o3", "x"], "h"),
        ("MatMul", ["h", "wu"], "u0"),
        ("Add", ["u0", "bu"], "u1"),
        ("Div", ["u1", "root"], "g0"),
        ("Erf", ["g0"], "g1"),
        ("Add", ["g1", "one"], "g2"),
        ("Mul", ["u1", "g2"], "g3"),
        ("Mul", ["g3", "half"], "g4"),
        ("MatMul", ["g4", "wd"], "d0"),
        ("Add", ["d0", "bd"], "d1"),
        ("Add", ["d1", "h"], "y"),
    ]
    for op, inputs, output in chain:
        attributes = {"perm": [0, 2, 1, 3]} if op == "Transpose" else {}
        nodes.append(helper.make_node(op, inputs, [output], name=f"{op}_{output}", **attributes))
    inputs = [("x", np.float32, [2, 64, 128]), ("mask", np.float32, [2, 1, 1, 64])]
    return model(nodes, inputs, [("y", np.float32)], constants)


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_masked_attention_stays_one_kernel(precision: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    mask = np.ones((2, 1, 1, 64), np.float32)
    mask[..., 50:] = 0
    report = built(
        transformer_block(), precision, tmp_path, x=rng.standard_normal((2, 64, 128)).astype(np.float32), mask=mask
    )
    fused = [layer for layer in report.engine.layers if {"MatMul_s0", "MatMul_o0"} <= set(layer.onnx_nodes)]
    assert len(fused) == 1 and "Softmax_p" in fused[0].onnx_nodes
    assert "mha" in f"{fused[0].name} {fused[0].type}".lower()
    kept = {item.node for item in report.precision.kept}
    assert kept == {"Mul_m1", "Add_s2", "Softmax_p"}
    outputs = report.accuracy.outputs["y"]
    assert outputs.nonfinite == 0 and outputs.sqnr_db > (50 if precision == "fp16" else 25)
    if precision == "int8":
        assert report.precision.int8_flop_share == 1.0
        assert report.precision.achieved["int8"].flop_share > 0.8
        assert [tensor.dtype for tensor in fused[0].inputs if tensor.dtype != "Float"] == ["Int8"] * 3
