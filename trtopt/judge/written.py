"""A precision written into a graph without having run it: speed does not depend on the values."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from trtopt.engine.backend import Backend
from trtopt.graph.shapes import static_shapes
from trtopt.precision.decide import decide, wanted_tensors
from trtopt.precision.fp16.to_fp32 import widen
from trtopt.precision.observe.statistics import StatsBuilder, TensorStats
from trtopt.precision.write import apply_plan


def written(model: ir.Model, precision: str, shapes: Mapping[str, tuple[int, ...]], backend: Backend) -> ir.Model:
    """Write a precision into a graph without having run it: speed does not depend on the values.

    What needs no statistics is decided as a build decides it: the compiler's INT8 table, operators without a narrow
    form, constants that do not survive, final scores. Every range is taken as harmless (small values where a
    scale is needed), so a build on real samples may keep more nodes in a wider type.

    Args:
        model: The model; not changed.
        precision: One of ``config.PRECISIONS``.
        shapes: Input shapes, for those with dynamic axes.
        backend: Whose INT8 rules apply.
    """
    base = widen(model)
    wanted = wanted_tensors(base, precision, backend.name)
    stats = dict.fromkeys(wanted.histogram, _harmless())
    return apply_plan(base, decide(base, precision, backend.name, stats, static_shapes(base, shapes)))


def _harmless() -> TensorStats:
    """Evenly spread over -1/16..1/16: sums of a million such terms fit FP16."""
    builder = StatsBuilder(histogram=True)
    builder.update(np.linspace(-1 / 16, 1 / 16, 256, dtype=np.float32))
    return builder.finish()
