"""Files as trtexec writes them, by version of TensorRT: facts from NVIDIA's documentation and sources, written anew."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

INT8_32 = "Thirty-two wide channel vectorized row major Int8 format."


def tensor(name: str, *shape: int, form: str = "Half") -> dict[str, Any]:
    """A tensor as TensorRT 8 to 10 list it."""
    return {"Name": name, "Location": "Device", "Dimensions": list(shape), "Format/Datatype": form}


def split_tensor(name: str, *shape: int, dtype: str = "Half") -> dict[str, Any]:
    """A tensor as TensorRT 11 lists it: the format and the type apart."""
    return {"Name": name, "Dimensions": list(shape), "Format": "Row major linear format", "Datatype": dtype}


CONVOLUTION_8 = {
    "Name": "node_of_a_1 + node_of_a_bn_1 + node_of_a_bn_2",
    "LayerType": "CaskConvolution",
    "Inputs": [tensor("x", 16, 512, 28, 28, form=INT8_32)],
    "Outputs": [tensor("y", 16, 256, 28, 28, form=INT8_32)],
    "ParameterType": "Convolution",
    "Kernel": [1, 1],
    "PaddingMode": "kEXPLICIT_ROUND_DOWN",
    "PrePadding": [0, 0],
    "PostPadding": [0, 0],
    "Stride": [1, 1],
    "Dilation": [1, 1],
    "OutMaps": 256,
    "Groups": 1,
    "Weights": {"Type": "Int8", "Count": 131072},
    "Bias": {"Type": "Float", "Count": 256},
    "AllowSparse": 0,
    "Activation": "RELU",
    "HasBias": 1,
    "HasReLU": 1,
    "TacticName": "sm80_xmma_fprop_implicit_gemm_interleaved_i8i8_i8i32_f32_nchw_vect_c_32kcrs_vect_c_32_nchw",
    "TacticValue": "0x11bde0e1d9f2f35d",
}
"""The fields of the example for ``kDETAILED`` in "Engine Inspector" of the developer guide of TensorRT 8.2 to 8.6
(docs.nvidia.com/deeplearning/tensorrt/developer-guide, section 6.12), the dot behind the format included."""

CONVOLUTION_10 = {
    **{key: value for key, value in CONVOLUTION_8.items() if key != "AllowSparse"},
    "Name": "/conv1/Conv + /relu/Relu",
    "Inputs": [tensor("input", 1, 3, 224, 224, form="Channel major FP16 format where channel % 4 == 0")],
    "Outputs": [tensor("z", 1, 64, 112, 112, form="Channel major FP16 format where channel % 8 == 0")],
    "Kernel": [7, 7],
    "PrePadding": [3, 3],
    "PostPadding": [3, 3],
    "Stride": [2, 2],
    "OutMaps": 64,
    "Weights": {"Type": "Half", "Count": 9408},
    "Bias": {"Type": "Half", "Count": 64},
    "HasSparseWeights": 1,
    "HasDynamicFilter": 0,
    "ConvXAsActInputIdx": -1,
    "TacticName": "sm80_xmma_fprop_implicit_gemm_f16f16_f16f16_f16_nhwckrsc_nhwc_tilesize128x32x16",
    "StreamId": 0,
    "Metadata": "[ONNX Layer: /conv1/Conv]\x1e[ONNX Layer: /relu/Relu]",
}
"""10: the fields of 8, with streams and metadata, 0x1E between nodes (docs.nvidia.com/deeplearning/tensorrt/10.16.1/
inference-library/engine-tools.html, "Engine Inspector", and NVIDIA/TensorRT issue 4020, trtexec 10.1)."""

GEMM_10 = {
    "Name": "/key/MatMul+/query/MatMul+/value/MatMul_myl0_16",
    "LayerType": "gemm",
    "Inputs": [{"Name": "h", "Dimensions": [1, 40, 256], "Format/Datatype": "Half"}],
    "Outputs": [{"Name": "qkv", "Dimensions": [3, 40, 256], "Format/Datatype": "Half"}],
    "TacticName": "sm80_xmma_gemm_f16f16_f16f32_f32_nn_n_tilesize32x32x64_stage6_warpsize2x2x1_tensor16x8x16",
    "StreamId": 0,
    "Metadata": "[ONNX Layer: /key/MatMul]\x1f[ONNX Layer: /query/MatMul]\x1f[ONNX Layer: /value/MatMul]",
}
"""Myelin's product of one input with three weights, which it does not list (NVIDIA/TensorRT issue 4397)."""

ATTENTION_10 = {
    "Name": "_gemm_mha_v2_myl0_17",
    "LayerType": "kgen",
    "Inputs": [
        {"Name": "qkv", "Dimensions": [4, 40, 64], "Format/Datatype": "Half"},
        {"Name": "qkv", "Dimensions": [4, 64, 40], "Format/Datatype": "Half"},
        {"Name": "mask", "Dimensions": [1, 1, 40, 40], "Format/Datatype": "Half"},
        {"Name": "qkv", "Dimensions": [4, 40, 64], "Format/Datatype": "Half"},
    ],
    "Outputs": [{"Name": "o", "Dimensions": [4, 40, 64], "Format/Datatype": "Half"}],
    "TacticName": "_gemm_mha_v2_0x957a2fe283f77dcf35c142c1390a3e6a",
    "StreamId": 0,
    "Metadata": "[ONNX Layer: /attn/MatMul]\x1f[ONNX Layer: /attn/Softmax]\x1f[ONNX Layer: /attn/MatMul_1]",
}
"""Myelin's fused attention (the same issue)."""

FOREIGN = {
    "Name": "{ForeignNode[fc.weight.../softmax/Softmax]}",
    "LayerType": "Myelin",
    "Inputs": [tensor("z", 1, 64, 112, 112, form="Row major linear FP16 format")],
    "Outputs": [tensor("out", 1, 1000, form="Row major linear FP16 format")],
    "TacticValue": "0x0000000000000000",
}
"""Part of a network that Myelin compiles as a whole (NVIDIA/TensorRT issue 3768)."""

GEMM_11 = {
    "Name": "gemm_myl0_1",
    "LayerType": "gemm",
    "Inputs": [split_tensor("input_0", 8, 64, dtype="BFloat16")],
    "Constants": [split_tensor("w", 64, 32, dtype="BFloat16"), split_tensor("alpha", 1, dtype="Float")],
    "Outputs": [split_tensor("output_0", 8, 32, dtype="BFloat16")],
    "TacticName": "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n",
    "StreamId": 0,
    "Metadata": "[ONNX Layer: MatMul_0]\x1f[ONNX Layer: Add_1]",
}
IO_11 = {
    "I/O Tensors": [
        {
            "Name": name,
            "IOMode": mode,
            "DataType": "BFloat16",
            "Dimensions": shape,
            "Location": "Device",
            "IsShapeInferenceIO": False,
            "ProfileInfo": [
                {"MinShape": shape, "OptShape": shape, "MaxShape": shape, "Format": "Row major linear FP32 format"}
            ],
        }
        for name, mode, shape in (("input_0", "Input", [8, 64]), ("output_0", "Output", [8, 32]))
    ]
}
"""11: objects in place of the names in ``Bindings``, and ``Format`` beside ``Datatype`` in place of ``Format/Datatype``
(docs.nvidia.com/deeplearning/tensorrt/11.3.0/api/migration/tensorrt-10x-to-11x-IEngineInspector.html)."""


def layer_info(*layers: Any, **more: Any) -> dict[str, Any]:
    """The layer info of TensorRT 8 to 10."""
    return {"Layers": list(layers), "Bindings": ["x", "y"], **more}


def row(name: str, average_ms: str, median_ms: str | None = None, *, total: str = "1") -> str:
    """A record of a layer profile, with the numbers as they are written."""
    median = "" if median_ms is None else f', "medianMs" : {median_ms}'
    return f'{{ "name" : "{name}", "timeMs" : {total}, "averageMs" : {average_ms}{median}, "percentage" : 1.5 }}'


def profile_text(rows: Sequence[str], runs: int | None = 100) -> str:
    """A layer profile as sampleReporting.cpp writes it: a record per line, names as they are."""
    head = [] if runs is None else [f'{{ "count" : {runs} }}']
    return "[\n  " + "\n, ".join([*head, *rows]) + "\n]\n"


def time_record(start: float, compute: float, enqueue: float | None = 0.01, side: str = "H2d") -> dict[str, float]:
    """A record of ``--exportTimes``; ``side`` "In" and no enqueue times are TensorRT 7.0's."""
    begin = {} if enqueue is None else {"startEnqMs": start, "endEnqMs": start + enqueue}
    lowered = side[0].lower() + side[1:]
    return {
        **begin,
        f"start{side}Ms": start,
        f"end{side}Ms": start,
        "startComputeMs": start,
        "endComputeMs": start + compute,
        f"{lowered}Ms": 0,
        "computeMs": compute,
        "latencyMs": compute,
    }


def written(folder: Path, name: str, content: Any) -> Path:
    """The file's path; anything but text and bytes is written as JSON."""
    path = folder / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


ODD: list[Any] = [
    None, True, -1, 0, 1, 3, 2**31, 10**30, -0.5, 1e308, "", "Half", "NoOp", "gemm", "deconv", "[ONNX Layer: ", [], {},
    [0], [-1, 3, 4, 4], [0, 0, 0, 0], [1, 1], [[]], "Channel major FP16 format where channel % 0 == 0", " [profile 2]",
    "Reformatting CopyNode for x to y", "N/A due to dynamic shapes", "PWN(", "{ForeignNode[]}", "x_myl1_2",
]  # fmt: skip
"""Values that a damaged file may hold anywhere."""


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values within a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(each for key, item in items for each in places(item, (*path, key)))]


def with_value(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at a path; without the value if ``new`` is Ellipsis."""
    if not path:
        return None if new is ... else new
    key, *rest = path
    copy = dict(value) if isinstance(value, dict) else list(value)
    if not rest and new is ...:
        del copy[key]
    else:
        copy[key] = with_value(value[key], tuple(rest), new)
    return copy
