"""A small network, and what ONNX Runtime's quantizer makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

RNG = np.random.default_rng(0)
X = RNG.standard_normal((4, 8, 12, 12)).astype(np.float32)
NO_INTEGER_BIAS = {"QuantizeBias": False}

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "unsigned": {"activation_type": QuantType.QUInt8},
    "unsigned weights": {
        "activation_type": QuantType.QUInt8,
        "weight_type": QuantType.QUInt8,
        "per_channel": True,
    },
    "symmetric": {
        "activation_type": QuantType.QInt8,
        "per_channel": True,
        "extra_options": {"ActivationSymmetric": True, **NO_INTEGER_BIAS},
    },
    "fake-quantized weights": {
        "activation_type": QuantType.QInt8,
        "extra_options": {"ActivationSymmetric": True, "AddQDQPairToWeight": True},
    },
    "unsigned symmetric": {"activation_type": QuantType.QUInt8, "extra_options": {"ActivationSymmetric": True}},
    "16 bits": {"activation_type": QuantType.QUInt16},
    "microsoft": {"activation_type": QuantType.QInt8, "extra_options": {"UseQDQContribOps": True}},
    "operators": {"quant_format": QuantFormat.QOperator},
    "signed operators": {
        "quant_format": QuantFormat.QOperator,
        "activation_type": QuantType.QInt8,
        "weight_type": QuantType.QInt8,
        "per_channel": True,
    },
}
"""Arguments of ``quantize_static`` by what they give."""


class _Reader(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self) -> None:
        self._feeds = iter([{"x": X}])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._feeds, None)


def network() -> onnx.ModelProto:
    """x [4, 8, 12, 12] -> conv, ReLU, depthwise conv, ReLU6, 1x1 conv, + ReLU's output, max pool, Gemm -> y [4, 10]."""
    shapes = {"w1": (16, 8, 3, 3), "w2": (16, 1, 3, 3), "w3": (16, 16, 1, 1), "w4": (16 * 36, 10)}
    arrays = {name: RNG.standard_normal(shape) / np.sqrt(np.prod(shape[1:])) for name, shape in shapes.items()}
    arrays["w4"] /= 8
    arrays |= {f"b{number}": RNG.standard_normal(16) / 4 for number in (1, 2, 3)} | {"b4": RNG.standard_normal(10)}
    constants = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()]
    constants += [numpy_helper.from_array(np.float32(bound), name) for name, bound in (("low", 0), ("high", 1.5))]
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], name="conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"], name="relu1"),
        helper.make_node("Conv", ["r1", "w2", "b2"], ["c2"], name="depthwise", pads=[1, 1, 1, 1], group=16),
        helper.make_node("Clip", ["c2", "low", "high"], ["r2"], name="clip"),
        helper.make_node("Conv", ["r2", "w3", "b3"], ["c3"], name="conv3"),
        helper.make_node("Add", ["c3", "r1"], ["a"], name="add"),
        helper.make_node("MaxPool", ["a"], ["m"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["m"], ["f"], name="flatten"),
        helper.make_node("Gemm", ["f", "w4", "b4"], ["y"], name="gemm"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [4, 8, 12, 12])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [4, 10])],
        constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def quantized(folder: Path, variant: str) -> tuple[Path, Path]:
    """The network in FP32 and as ``quantize_static`` quantizes it with ``VARIANTS[variant]``."""
    source, result = folder / "source.onnx", folder / "quantized.onnx"
    onnx.save(network(), source)
    quantize_static(str(source), str(result), _Reader(), **VARIANTS[variant])
    return source, result
