"""The engine inspector's JSON of TensorRT 8 to 11."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from trtopt.engine.achieved import math_dtype
from trtopt.engine.layers import check_detailed, kernel_count, parse_inspector_json, weight_bytes
from trtopt.errors import EngineBuildError

PROFILES = Path(__file__).parents[3] / "shared" / "profiles" / "tensorrt-layers"


def document(*layers: Any, **more: Any) -> str:
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
UNTOLD = "N/A due to dynamic shapes"
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
        document({**NEW, "Inputs": [{"Name": "x", "Dimensions": ["1"], "Datatype": "Half"}]}),
        document({**NEW, "Inputs": [{"Name": "x", "Dimensions": [10**400], "Datatype": "Half"}]}),
        document({**OLD, "Weights": {"Type": "Half", "Count": -1}}),
        document({**OLD, "Weights": {"Type": "Quarter", "Count": 1}}),
        document({**NEW, "Metadata": "[ONNX Layer: a"}),
        document(7),
        "[" * 100_000,
    ],
)
def test_other_json_is_an_error(text: str) -> None:
    with pytest.raises(EngineBuildError):
        parse_inspector_json(text)


def test_an_engine_that_tells_names_only_says_how_to_build_it() -> None:
    layers = parse_inspector_json(json.dumps({"Layers": ["conv1 + relu1", "Reformatting CopyNode for x to conv2"]}))
    assert [(layer.name, layer.type, layer.onnx_nodes) for layer in layers] == [
        ("conv1 + relu1", "", ("conv1", "relu1")),
        ("Reformatting CopyNode for x to conv2", "", ()),
    ]
    assert not any((*layer.inputs, *layer.outputs) for layer in layers)
    with pytest.raises(EngineBuildError) as caught:
        check_detailed(layers)
    assert "detailed" in caught.value.remedy


def test_an_engine_inspected_without_shapes_says_how_to_inspect_it() -> None:
    """TensorRT 8.4 with a dynamic batch, as users post it: the format reads "N/A due to dynamic shapes"."""
    tensor = {"Name": "x", "Location": "Device", "Dimensions": [-1, 128, 14, 14], "Format/Datatype": UNTOLD}
    (layer,) = parse_inspector_json(document({**OLD, "Inputs": [tensor]}))
    assert (layer.inputs[0].dtype, layer.inputs[0].shape) == ("", (-1, 128, 14, 14))
    with pytest.raises(EngineBuildError) as caught:
        check_detailed([layer])
    assert "shapes of all inputs" in caught.value.remedy
    check_detailed(parse_inspector_json(document(OLD, NEW)))


@pytest.mark.parametrize(
    "told", [{"Format": "odd"}, {"Datatype": "Quarter"}, {"Format/Datatype": "Row/Linear Quarter"}]
)
def test_a_type_that_is_not_known_is_told_by_name_where_it_matters(told: dict[str, str]) -> None:
    """A profile of such an engine is worth reading; a build has to know the types."""
    (layer,) = parse_inspector_json(document({**NEW, "Inputs": [{"Name": "x", "Dimensions": [1], **told}]}))
    assert layer.inputs[0].dtype == ""
    with pytest.raises(EngineBuildError) as caught:
        check_detailed([layer])
    assert next(iter(told.values())) in caught.value.where


@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        ("Conv_9", ("Conv_9",)),
        ("Conv_1 || Conv_2", ("Conv_1", "Conv_2")),
        ("conv1.weight + QuantizeLinear_7 + Conv_9", ("QuantizeLinear_7", "Conv_9")),
        ("onnx::Conv_193 + /conv1/Conv + /relu/Relu [profile 1]", ("/conv1/Conv", "/relu/Relu")),
        ("Conv_0 + PWN(PWN(Sigmoid_1), Mul_2)", ("Conv_0", "Sigmoid_1", "Mul_2")),
        ("{ForeignNode[fc.weight...(Unnamed Layer* 58) [ElementWise]]}", ()),
        ("{ForeignNode[/Constant_7_output_0 + ONNXTRT_Broadcast.../Einsum_1]}", ("/Einsum_1",)),
        ("MatMul + b3/read:0 + (Unnamed Layer* 21) [Shuffle] + unsqueeze_node_after_b3/read:0 + add_2",
         ("MatMul", "add_2")),
        ("reshape_after_Gemm_48", ()),
        ("__myl_MulSumAdd_myl24_1", ()),
        ("/classifier/classifier_1/Gemm_myl55_1", ()),
    ],
)  # fmt: skip
def test_what_are_nodes_in_the_name_of_a_layer_without_metadata(name: str, nodes: tuple[str, ...]) -> None:
    (layer,) = parse_inspector_json(document({**OLD, "Name": name}))
    assert layer.onnx_nodes == nodes


def test_metadata_of_another_front_end_is_not_taken_for_onnx() -> None:
    entry = {**OLD, "Name": "conv1", "Metadata": "[CONVOLUTION]-[aten_ops.convolution.default]-[conv1]"}
    assert parse_inspector_json(document(entry))[0].onnx_nodes == ("conv1",)
    assert parse_inspector_json(document({**entry, "Metadata": ""}))[0].onnx_nodes == ()


def test_a_quantizer_that_runs_as_a_copy_is_a_node_and_a_change_of_format_is_none() -> None:
    layers = parse_inspector_json(
        document(
            {**OLD, "Name": "QuantizeLinear_2", "LayerType": "Reformat", "Origin": "QDQ"},
            {**OLD, "Name": "Reformatting CopyNode for Input Tensor 0 to Conv_0 + Relu_1", "LayerType": "Reformat"},
        )
    )
    assert [layer.onnx_nodes for layer in layers] == [("QuantizeLinear_2",), ()]


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
