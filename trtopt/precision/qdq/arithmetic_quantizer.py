"""A quantizer as plain arithmetic, which TensorRT for RTX fuses into the 16-bit product before it.

The compiler writes ``QuantizeLinear`` to INT8 behind a convolution or product in FP16 as a kernel of its own: it splits
the operator into a scaling, a clip, a rounding and a cast, and its fused kernels take in all but the rounding. Rounded
by an addition, the same quantizer joins the kernel (TensorRT for RTX 1.7.1: ``CorrCastMulMinMaxAddAddCast``), which
saves a kernel that reads and writes the tensor. QuantizeLinear to FP8 has no rounding and joins as it is.

    y = min(max(x / s, -127), 127)          in FP32
    q = int8((y + 1.5 * 2^23) - 1.5 * 2^23)

The sum has no bits below one, so FP32 arithmetic rounds it to an integer, ties to even; taking the number away again is
exact. The cast then has nothing left to round, whatever its mode.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

_MIDDLE = 1.5 * 2**23
"""From 2^23 to 2^24 neighbouring FP32 numbers are one apart (IEEE 754); the middle leaves room for either sign."""

_PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_EPILOGUE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Relu", "LeakyRelu", "Clip", "Sigmoid", "HardSigmoid", "HardSwish", "Swish", "Tanh"}
    | {"Gelu", "Erf", "Elu", "Exp", "Log", "Min", "Max", "Abs", "Neg", "Identity"}
)
_STEPS = 8


def follows_product(value: ir.Value, others: Collection[str]) -> bool:
    """Whether a product computes ``value``, elementwise operators apart.

    Args:
        value: What is to be quantized.
        others: Names of products that do not count: an 8-bit one writes 16-bit and takes in no quantizer.
    """
    front = [value]
    for _ in range(_STEPS):
        nodes = [node for item in front if (node := item.producer()) is not None]
        if any(node.op_type in _PRODUCTS and node.name not in others for node in nodes):
            return True
        front = [item for node in nodes if node.op_type in _EPILOGUE for item in node.inputs if item is not None]
    return False


ROUNDING: tuple[tuple[str, str, float], ...] = (
    ("Min", "below", 127.0),
    ("Max", "clipped", -127.0),
    ("Add", "raised", _MIDDLE),
    ("Sub", "rounded", _MIDDLE),
)
"""What follows the division by the scale: operator, what its result is called, and its constant."""
