"""A precision written into a graph without having run it: speed does not depend on the values."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from trtopt.engine.backend import TENSORRT_RTX, Backend
from trtopt.graph.shapes import static_shapes
from trtopt.judge.protocol import Judge, Priced
from trtopt.precision.decide import decide, wanted_tensors
from trtopt.precision.fp16.network_io import IoRequest, apply_io
from trtopt.precision.fp16.to_fp32 import to_fp32
from trtopt.precision.observe.statistics import StatsBuilder, TensorStats
from trtopt.precision.write import apply_plan, cast_borders
from trtopt.support.precision import Precision


class WritingJudge:
    """Writes a precision into each model that it is asked about, and asks another judge.

    Args:
        judge: That of TensorRT for RTX, which prices models as they are.
        precision: As in :func:`judge_for`, like the next one.
        io: See above.
    """

    def __init__(self, judge: Judge, precision: Precision | None, io: tuple[IoRequest, ...]) -> None:
        self._judge, self._precision, self._io = judge, precision, io

    @property
    def name(self) -> str:
        """That of the other judge."""
        return self._judge.name

    def price(self, model: ir.Model, *, inner: bool) -> Priced:
        """See :class:`~trtopt.judge.protocol.Judge`."""
        if self._precision is not None:
            model = written(model, self._precision, {}, TENSORRT_RTX)
            if inner:
                model = cast_borders(
                    model, ir.DataType.BFLOAT16 if self._precision == Precision.BF16 else ir.DataType.FLOAT16
                )
        if self._io and not inner:
            model = apply_io(model, self._io)
        return self._judge.price(model, inner=inner)


def written(model: ir.Model, precision: Precision, shapes: Mapping[str, tuple[int, ...]], backend: Backend) -> ir.Model:
    """Write a precision into a graph without having run it: speed does not depend on the values.

    What needs no statistics is decided as a build decides it: the compiler's INT8 table, operators without a narrow
    form, constants that do not survive, final scores. Every range is taken as harmless (small values where a
    scale is needed), so a build on real samples may keep more nodes in a wider type.

    Args:
        model: The model; not changed.
        precision: The precision asked for.
        shapes: Input shapes, for those with dynamic axes.
        backend: Whose INT8 rules apply.
    """
    base = to_fp32(model)
    wanted = wanted_tensors(base, precision, backend.name)
    stats = dict.fromkeys(wanted.histogram, _harmless())
    return apply_plan(base, decide(base, precision, backend.name, stats, static_shapes(base, shapes)))


def _harmless() -> TensorStats:
    """Evenly spread over -1/16..1/16: sums of a million such terms fit FP16."""
    builder = StatsBuilder(histogram=True)
    builder.update(np.linspace(-1 / 16, 1 / 16, 256, dtype=np.float32))
    return builder.finish()
