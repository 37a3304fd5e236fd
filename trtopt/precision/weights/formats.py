"""The formats of ``--weights``: what a scale is, which numbers there are, and how one is stored.

========  ==================  =======================================================================================
int4      -7..7               a floating scale for 32, 64 or 128 weights along the sum
int8      -127..127           a floating scale for an output channel
nvfp4     FP4, E2M1           an E4M3 scale for 16 weights, times one FP32 scale of the tensor
mxfp8     FP8, E4M3           a power of two (E8M0) for 32 weights
========  ==================  =======================================================================================

Sources: ONNX, operator DequantizeLinear of opset 21 (``block_size``) and 23 (FP4); Open Compute Project,
Microscaling Formats (MX) Specification 1.0, sections 5.2 and 5.3 (E2M1, E4M3 and E8M0); for the two scales of NVFP4
TensorRT's documentation (Working with Quantized Types).
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir

_E4M3_MAX = 448.0
_SMALLEST_POWER, _LARGEST_POWER = -24, 15
"""Powers of two that FP16 holds: the compiler reads no scale of the type E8M0 (TensorRT for RTX 1.7.1 refuses such an
initializer), so it is stored in the type of the product."""


@dataclass(frozen=True)
class WeightFormat:
    """A format.

    Attributes:
        name: As of ``--weights``.
        dtype: The type of the stored numbers.
        largest: The largest of them.
        blocks: How many weights along the sum may share a scale, the default first; none for one per output channel.
        opset: The first opset whose DequantizeLinear has it.
    """

    name: str
    dtype: ir.DataType
    largest: float
    blocks: tuple[int, ...]
    opset: int

    @property
    def is_even(self) -> bool:
        """Whether its numbers are evenly spaced, so that several can be rounded together."""
        return self.dtype.is_integer()


INT4 = WeightFormat("int4", ir.DataType.INT4, 7.0, (128, 64, 32), 21)
INT8 = WeightFormat("int8", ir.DataType.INT8, 127.0, (), 21)
NVFP4 = WeightFormat("nvfp4", ir.DataType.FLOAT4E2M1, 6.0, (16,), 23)
MXFP8 = WeightFormat("mxfp8", ir.DataType.FLOAT8E4M3FN, _E4M3_MAX, (32,), 21)
FORMATS = {kind.name: kind for kind in (INT4, INT8, NVFP4, MXFP8)}


@dataclass(frozen=True)
class Scales:
    """The scales of a weight ``[K, N]``.

    Attributes:
        values: What a stored number is multiplied with, float32 ``[blocks, N]``.
        narrow: NVFP4: the E4M3 scales, ``[blocks, N]``; None for the others.
        tensor: NVFP4: the scale of the whole tensor; 1 for the others.
    """

    values: np.ndarray
    narrow: np.ndarray | None = None
    tensor: float = 1.0

    def spread(self, depth: int) -> np.ndarray:
        """The scale of each weight, ``[depth, N]``."""
        return np.repeat(self.values, depth // len(self.values), axis=0)


@dataclass(frozen=True)
class StoredWeight:
    """A weight in a format.

    Attributes:
        kind: The format.
        values: The stored numbers ``[K, N]``, of the format's type (``ml_dtypes``).
        scales: Their scales.
    """

    kind: WeightFormat
    values: np.ndarray
    scales: Scales

    @property
    def exact(self) -> np.ndarray:
        """What it stands for, float32 ``[K, N]``: stored number times scale, rounded to FP32 once."""
        numbers: np.ndarray = self.values.astype(np.float32) * self.scales.spread(len(self.values))
        return numbers

    def bytes(self, floating: ir.DataType) -> int:
        """What it takes, with its scales; ``floating`` is the type of the product."""
        bits = self.values.size * self.kind.dtype.bitwidth
        if self.scales.narrow is not None:
            return bits // 8 + self.scales.narrow.size + 4
        return bits // 8 + self.scales.values.size * int(floating.bitwidth) // 8


def scales_of(
    weight: np.ndarray, kind: WeightFormat, block: int, floating: ir.DataType, share: np.ndarray | float = 1.0
) -> Scales:
    """The scales of a weight.

    Args:
        weight: float32 ``[K, N]``; K is a multiple of ``block``.
        kind: The format.
        block: Weights along K that share a scale; 0 for all of them.
        floating: The type of the product, in which the scales of INT4 and INT8 are stored.
        share: Of the largest magnitude, what the largest number stands for: below 1 outliers are clipped. A number, or
            one for each scale.
    """
    depth, columns = weight.shape
    largest = np.abs(weight).reshape(depth // block if block else 1, -1, columns).max(axis=1)
    wanted = np.asarray(largest * share, np.float32) / np.float32(kind.largest)
    if kind is NVFP4:
        tensor = np.maximum(wanted.max() / np.float32(_E4M3_MAX), np.finfo(np.float32).tiny)
        narrow = np.clip(wanted / tensor, 0, _E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
        return Scales(narrow.astype(np.float32) * tensor, narrow, float(tensor))
    if kind is MXFP8:
        with np.errstate(divide="ignore"):
            powers = np.ceil(np.log2(wanted.astype(np.float64)))
        return Scales(np.exp2(np.clip(powers, _SMALLEST_POWER, _LARGEST_POWER)).astype(np.float32))
    stored = wanted.astype(floating.numpy())
    least = np.float32(ml_dtypes.finfo(stored.dtype).smallest_normal)
    return Scales(np.maximum(stored.astype(np.float32), least))


def nearest(weight: np.ndarray, kind: WeightFormat, scales: Scales) -> StoredWeight:
    """Each weight ``[K, N]`` as the number nearest to it; ties go to the even one, what is too large to the largest."""
    spread = scales.spread(len(weight))
    ratio = np.divide(weight, spread, out=np.zeros_like(weight, np.float32), where=spread > 0)
    clipped = np.clip(np.rint(ratio) if kind.is_even else ratio, -kind.largest, kind.largest)
    return StoredWeight(kind, clipped.astype(kind.dtype.numpy()), scales)
