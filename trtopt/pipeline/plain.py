"""*Plain*: what anyone gets without optimizing, and what every product is held against.

A plain cast writes a precision everywhere: no hazards, no repairs, no recipes, no canonical forms. It is the one
baseline of builds, benchmarks and the README.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from trtopt.engine.request import ShapeProfile
from trtopt.graph.shapes import at_shapes
from trtopt.precision.fp16.cast_to_half import cast_to_half
from trtopt.precision.fp16.network_io import IoRequest, apply_io
from trtopt.precision.fp16.to_fp32 import to_fp32
from trtopt.precision.plan import BF16, FP16
from trtopt.support.precision import Precision


def plain(
    model: ir.Model,
    precision: Precision | None = Precision.FP16,
    profiles: Sequence[ShapeProfile] = (),
    io: Sequence[IoRequest] = (),
    wide: Collection[str] = (),
) -> ir.Model:
    """The plain form of a model as :func:`trtopt.source.onnx_file.load` gives it, opset and types made right.

    Every float tensor, initializers too, is FP16; operators whose types in ONNX forbid it stay FP32 with casts around
    them. Inputs and outputs keep their types (FP32 in what exporters write), but for those of ``io``.

    Args:
        model: The model; not changed.
        precision: ``bf16`` is likewise everywhere, FP32 and TF32 leave FP32; of the 8-bit ones this is the 16-bit form.
            None keeps the model's types.
        profiles: The shapes the engine takes; where they allow one, it is written into the graph.
        io: Types and layouts of inputs and outputs, checked.
        wide: Names of nodes that stay FP32 all the same; none in what is called plain.

    Raises:
        InvalidModelError: The model cannot be written in these types, or not run at these shapes.
        UsageError: ``io`` asks for channels that the model cannot take.
    """
    fixed = with_only_shape(model, profiles)
    cast = fixed if precision is None else to_fp32(fixed)
    if precision is not None and not precision.is_wide:
        cast = cast_to_half(cast, BF16 if precision.base == Precision.BF16 else FP16, wide)
    return apply_io(cast, io) if io else cast


def with_only_shape(model: ir.Model, profiles: Sequence[ShapeProfile]) -> ir.Model:
    """The model at the one shape that its profiles allow; itself where they allow several."""
    if not has_one_shape(profiles):
        return model
    return at_shapes(model, {name: shape for name, (shape, _, _) in profiles[0].shapes.items()})


def has_one_shape(profiles: Sequence[ShapeProfile]) -> bool:
    """Whether profiles allow a single shape."""
    return bool(profiles) and profiles[0].is_static and all(profile == profiles[0] for profile in profiles)
