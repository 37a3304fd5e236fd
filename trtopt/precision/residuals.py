"""Residuals in 8 bits, for backends whose convolutions write 8 bits only if the residual they add has 8 bits too."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.attention import only_user

_EPILOGUE = frozenset({"Add", "BatchNormalization", "Clip", "Mul", "Relu"})
_LONGEST_EPILOGUE = 4


def residual_adds(value: ir.Value, quantized: Collection[str]) -> tuple[str, ...]:
    """Names of the additions that add ``value`` to the result of a quantized convolution.

    Args:
        value: A tensor that some node reads quantized.
        quantized: Names of the nodes that are quantized.
    """
    found = []
    for node, index in value.uses():
        if node.op_type != "Add" or node.domain != "":
            continue
        conv = _conv_behind(node.inputs[1 - index])
        if conv is not None and conv.name in quantized:
            found.append(str(node.name))
    return tuple(found)


def _conv_behind(value: ir.Value | None) -> ir.Node | None:
    """The convolution that ``value`` comes from through element-wise operators with constants, read by nobody else."""
    for _ in range(_LONGEST_EPILOGUE):
        producer = value.producer() if value is not None else None
        if value is None or producer is None or only_user(value) is None:
            return None
        if producer.op_type == "Conv":
            return producer
        others = [item for item in producer.inputs[1:] if edit.constant_tensor_of(item) is None]
        if producer.op_type not in _EPILOGUE or others:
            return None
        value = producer.inputs[0]
    return None
