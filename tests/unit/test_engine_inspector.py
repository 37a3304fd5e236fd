"""The engine inspector's JSON of TensorRT 8 to 11."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from trtopt.engine.achieved import math_dtype
from trtopt.engine.inspector import parse_inspector_json
from trtopt.engine.layers import kernel_count, weight_bytes
from trtopt.errors import EngineBuildError

PROFILES = Path(__file__).parents[3] / "shared" / "profiles" / "tensorrt-layers"


def document(*layers: dict[str, Any], **more: Any) -> str:
    return json.dumps({"Layers": list(layers), **more})


OLD = {
    "Name": "Conv_0 + Relu_1",
    "LayerType": "CaskConvolution",
    "Inputs": [
        {
            "Name": "x",
            "Location": "Device",
            "Dimensions": [32, 4, 8, 8],
            "Format/Datatype": "Channel major FP16 format where channel % 4 == 0",
        }
    ],
    "Outputs": [
        {
            "Name": "y",
            "Dimensions": [32, 64, 8, 8],
            "Format/Datatype": "Thirty-two wide channel vectorized row major Int8 format",
        }
    ],
    "Weights": {"Type": "Half", "Count": 2304},
    "Bias": {"Type": "Half", "Count": 64},
    "TacticName": "sm80_xmma",
}
NEW = {
    "Name": "gemm_myl0_1",
    "LayerType": "gemm",
    "Inputs": [{"Name": "x", "Dimensions": [8, 64], "Format": "Row major linear format", "Datatype": "BFloat16"}],
    "Constants": [{"Name": "w", "Dimensions": [64, 32], "Format": "Row major linear format", "Datatype": "BFloat16"}],
    "Outputs": [{"Name": "y", "Dimensions": [8, 32], "Format": "Row major linear format", "Datatype": "BFloat16"}],
    "TacticName": "t",
    "Metadata": "[ONNX Layer: MatMul_0]\u001f[ONNX Layer: Add_1]",
}


def test_layers_of_tensorrt_8_name_their_nodes_in_the_layers_name() -> None:
    (layer,) = parse_inspector_json(document(OLD, Bindings=["x", "y"]))
    assert layer.onnx_nodes == ("Conv_0", "Relu_1")
    assert layer.kind == "conv"
    assert [item.dtype for item in (*layer.inputs, *layer.outputs, *layer.constants)] == [
        "Half",
        "Int8",
        "Half",
        "Half",
    ]
    assert weight_bytes([layer]) == 2 * (2304 + 64)


def test_layers_of_tensorrt_11_have_format_and_datatype_apart() -> None:
    (layer,) = parse_inspector_json(document(NEW, **{"I/O Tensors": [{"Name": "x"}]}))
    assert layer.onnx_nodes == ("MatMul_0", "Add_1")
    assert math_dtype(layer) == "bf16"
    assert layer.inputs[0].format == "Row major linear format"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        document({}),
        document({**NEW, "Inputs": [{"Name": "x", "Dimensions": [1], "Format": "odd"}]}),
        document({**NEW, "Inputs": [{"Name": "x", "Dimensions": [1], "Datatype": "Quarter"}]}),
        document({**NEW, "Metadata": "no brackets"}),
    ],
)
def test_other_json_is_an_error(text: str) -> None:
    with pytest.raises(EngineBuildError):
        parse_inspector_json(text)


def test_an_engine_that_tells_names_only_says_how_to_build_it() -> None:
    with pytest.raises(EngineBuildError) as caught:
        parse_inspector_json(json.dumps({"Layers": ["conv1", "relu1"]}))
    assert "detailed" in caught.value.remedy


@pytest.mark.shared
@pytest.mark.skipif(not PROFILES.exists(), reason="the profiles folder is not beside the checkout")
@pytest.mark.parametrize(
    ("file", "convolutions", "math"),
    [
        ("A100-80GB-PCIe/fp32/resnet.onnx.engine.graph.json", 21, "fp32"),
        ("A100-80GB-PCIe/fp16/resnet.onnx.engine.graph.json", 21, "fp16"),
        ("A100-80GB-PCIe/qat/resnet-qat.onnx.engine.graph.json", 21, "int8"),
        ("A100-80GB-PCIe/qat-residual/resnet-qat-residual.onnx.engine.graph.json", 21, "int8"),
        ("A100-80GB-PCIe/qat-residual-qgap/resnet-qat-residual-qgap.onnx.engine.graph.json", 21, "int8"),
        ("RTX-3060-Laptop/resnet18_fp16.graph.json", 20, "fp16"),
        ("RTX-3060-Laptop/mobilenet_v2_fp16.graph.json", 52, "fp16"),
        ("RTX-3060-Laptop/alexnet_fp16.graph.json", 5, "fp16"),
    ],
)
def test_published_engines_are_read_whole(file: str, convolutions: int, math: str) -> None:
    text = (PROFILES / file).read_text(encoding="utf-8")
    layers = parse_inspector_json(text)
    assert len(layers) == len(json.loads(text)["Layers"])
    conv = [layer for layer in layers if layer.kind == "conv"]
    assert len(conv) == convolutions
    assert Counter(math_dtype(layer) for layer in conv).most_common(1)[0][0] == math
    assert all(layer.onnx_nodes for layer in conv)
    assert kernel_count(layers) == len(layers) - sum(layer.type in ("NoOp", "shape_call") for layer in layers)
