"""The types that arithmetic is done in, and what a precision that users ask for stands for."""

from __future__ import annotations

import enum


class Precision(str, enum.Enum):
    """A type of arithmetic, or what a user asks a graph to be written in.

    A member is a text: messages, JSON, hashes and comparisons see the value.
    """

    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    FP4 = "fp4"
    AUTO = "auto"
    """What a build is asked for that searches over all types."""

    __str__ = str.__str__
    __repr__ = str.__repr__

    def __format__(self, spec: str) -> str:
        return str.__format__(self, spec)

    @property
    def quantized_types(self) -> tuple[Precision, ...]:
        """The 8-bit types that a requested precision stands for: signed integers, and FP8 E4M3."""
        return _QUANTIZED_TYPES.get(self, ())

    @property
    def is_quantized(self) -> bool:
        """Whether parts of a graph in this precision become 8-bit."""
        return bool(self.quantized_types)

    @property
    def is_wide(self) -> bool:
        """Whether tensors stay FP32."""
        return self in (Precision.FP32, Precision.TF32)

    @property
    def base(self) -> Precision:
        """The type of the arithmetic that is not 8-bit."""
        return self if self.is_wide or self == Precision.BF16 else Precision.FP16

    @property
    def tensor(self) -> Precision:
        """The type of the tensors: TF32 is one of products only."""
        return Precision.FP32 if self == Precision.TF32 else self


_QUANTIZED_TYPES = {
    Precision.INT8: (Precision.INT8,),
    Precision.FP8: (Precision.FP8,),
    Precision.AUTO: (Precision.INT8, Precision.FP8),
}

PRECISIONS = (Precision.FP32, Precision.TF32, Precision.FP16, Precision.BF16, Precision.INT8, Precision.FP8)
"""What a graph can be written in."""

MATH_TYPES = tuple(item for item in Precision if item != Precision.AUTO)
"""Types of the operands of products."""

SIXTEEN_BIT_TYPES = (Precision.FP16, Precision.BF16)
EIGHT_BIT_TYPES = (Precision.INT8, Precision.FP8)

ELEMENT_BYTES: dict[Precision, float] = {
    **dict.fromkeys((Precision.FP32, Precision.TF32), 4),
    **dict.fromkeys(SIXTEEN_BIT_TYPES, 2),
    **dict.fromkeys(EIGHT_BIT_TYPES, 1),
    Precision.FP4: 0.5,
}
"""Bytes of one element of an operand."""

TENSORRT_TYPES = {
    "Float": Precision.FP32,
    "Half": Precision.FP16,
    "BFloat16": Precision.BF16,
    "Int8": Precision.INT8,
    "FP8": Precision.FP8,
    "FP4": Precision.FP4,
    "FP4E2M1": Precision.FP4,
}
"""By what TensorRT's inspector calls the type of a tensor."""

ONNX_TYPES = {
    "FLOAT16": Precision.FP16,
    "BFLOAT16": Precision.BF16,
    "INT8": Precision.INT8,
    "FLOAT8E4M3FN": Precision.FP8,
    "FLOAT8E5M2": Precision.FP8,
    "FLOAT4E2M1": Precision.FP4,
}
"""By what ONNX calls the type of a tensor that is narrower than FP32."""
