"""The decision: which nodes run narrow, which stay wide and why, which carry INT8. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import onnx_ir as ir

from trtopt.report.schema.steps import Refusal
from trtopt.support.precision import Precision

WEIGHTED = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
"""Products: with a constant weight they may become 8-bit."""


@dataclass(frozen=True)
class NarrowType:
    """A 16-bit floating-point type.

    Attributes:
        name: ``fp16`` or ``bf16``.
        dtype: Its ONNX type.
        largest: Largest finite value.
        smallest_normal: Smallest positive value with full relative precision.
        precision: Distance from 1 to the next value.
    """

    name: Precision
    dtype: ir.DataType
    largest: float
    smallest_normal: float
    precision: float

    @property
    def largest_exact_integer(self) -> int:
        """Every integer up to this one has a value of its own."""
        return int(2 / self.precision)

    @property
    def schema_name(self) -> str:
        """How operator schemas write a tensor of this type."""
        return f"tensor({'float16' if self.dtype is ir.DataType.FLOAT16 else 'bfloat16'})"

    def round(self, array: np.ndarray) -> np.ndarray:
        """``array`` rounded to this type, as float32 (values too large become infinite)."""
        with np.errstate(over="ignore"):
            return array.astype(self.dtype.numpy()).astype(np.float32)

    def saturate(self, array: np.ndarray) -> np.ndarray:
        """``array`` as an array of this type; finite values too large become its largest."""
        exact = np.asarray(array, np.float32)
        with np.errstate(over="ignore"):
            stored = exact.astype(self.dtype.numpy())
        beyond = np.isinf(stored) & np.isfinite(exact)
        return (
            np.where(beyond, np.copysign(self.largest, exact).astype(stored.dtype), stored) if beyond.any() else stored
        )


FP16 = NarrowType(Precision.FP16, ir.DataType.FLOAT16, 65504.0, 2.0**-14, 2.0**-10)
_BF16_MAX = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
BF16 = NarrowType(Precision.BF16, ir.DataType.BFLOAT16, _BF16_MAX, 2.0**-126, 2.0**-7)


@dataclass(frozen=True)
class Operand:
    """A second activation of a product; bound and method as of :class:`QuantizedOp`."""

    name: str
    amax: float
    method: str


@dataclass(frozen=True)
class QuantizedOp:
    """One node whose data input and constant weight become 8-bit; or the two activations that it multiplies.

    Attributes:
        node: The node's name.
        activation: Name of the tensor it reads.
        activation_amax: The range's bound: the scale is ``amax / 127`` (INT8) or ``amax / 448`` (FP8).
        weight_axis: Axis of the weight with a scale per channel; None for one scale per tensor.
        method: The calibration method that gave the range.
        multiply: Write the scales per channel as one scale and a multiplication behind the node (INT8 only): for
            compilers that do not fold scales per channel into a convolution, and for products that write 8 bits.
        dtype: The 8-bit type of both.
        other: The second operand where it is an activation (attention's products) and no constant weight.
        skips: Names of the additions that read ``activation`` as a residual, and read it quantized too.
        ends: Whether its result leaves the network in FP32, and the node writes it so: the scales are stored in FP32.
        result_amax: The bound of the range of its result, where the node may write that in 8 bits; 0 where not.
        writes: Whether it does: what reads the result reads it dequantized.
    """

    node: str
    activation: str
    activation_amax: float
    weight_axis: int | None
    method: str
    multiply: bool = False
    dtype: Precision = Precision.INT8
    other: Operand | None = None
    skips: tuple[str, ...] = ()
    ends: bool = False
    result_amax: float = 0.0
    writes: bool = False


@dataclass(frozen=True)
class PrecisionPlan:
    """What the precision rewrites will do.

    Attributes:
        requested: ``fp32``, ``tf32``, ``fp16``, ``bf16``, ``int8``, ``fp8`` or ``auto``.
        narrow: The type of what is neither 8-bit nor kept in FP32; None to leave everything FP32.
        wide: Nodes that stay FP32, with the reason.
        quantized: Nodes that become 8-bit.
        refused: Nodes that could have become 8-bit and do not, with the reason.
        rounded: INT8 weights by node, int8 of the weight's shape, where something better than the nearest value was
            found; the scales stay those of the weight.
        bias: What is added to the output channels of a quantized node, by node: float32 ``[channels]``.
        bfloat: Nodes that run in BF16 instead of ``narrow``, with the reason; none of ``wide``.
        fused_quantizers: Whether quantizers are written as TensorRT for RTX fuses them: INT8 ones behind 16-bit
            products as arithmetic, FP8 ones with operators that keep ONNX Runtime from taking them for INT8.
        ends: Products of the model's own Q/DQ whose results leave the network in FP32
            (:mod:`trtopt.precision.qdq.ends`).
    """

    requested: Precision
    narrow: NarrowType | None = None
    wide: Mapping[str, str] = field(default_factory=dict)
    quantized: tuple[QuantizedOp, ...] = ()
    refused: tuple[Refusal, ...] = ()
    rounded: Mapping[str, np.ndarray] = field(default_factory=dict)
    bias: Mapping[str, np.ndarray] = field(default_factory=dict)
    bfloat: Mapping[str, str] = field(default_factory=dict)
    fused_quantizers: bool = False
    ends: frozenset[str] = frozenset()
