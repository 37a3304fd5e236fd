"""The judge of TensorRT without a GPU: the fusions that its documentation names, and the performance model."""

from __future__ import annotations

import onnx_ir as ir

from trtopt.graph.shapes import static_shapes
from trtopt.hardware.spec import GpuSpec
from trtopt.judge.protocol import Priced
from trtopt.judge.rows import kernels_of, timed_rows
from trtopt.precision.decide import QUANTIZED_TYPES, placed_nodes
from trtopt.report.schema.build import Cost
from trtopt.roofline.node_work import Precision
from trtopt.roofline.onnx_layers import layers_of_graph
from trtopt.roofline.work import MathType

_BASES: dict[str | None, MathType] = {None: "fp32", "fp32": "fp32", "tf32": "tf32", "bf16": "bf16"}


class ModelJudge:
    """TensorRT without a GPU: its documented fusions, and the time of each fused layer by the performance model.

    Args:
        gpu: The GPU whose time is predicted.
        precision: As in :func:`judge_for`.
    """

    name = "model:tensorrt"

    def __init__(self, gpu: GpuSpec, precision: str | None) -> None:
        self._gpu, self._precision = gpu, precision

    def price(self, model: ir.Model, *, inner: bool) -> Priced:
        """See :class:`~trtopt.judge.protocol.Judge`; operators without a known cost are left out."""
        types = Precision(base=_BASES.get(self._precision, "fp16"))
        for dtype in QUANTIZED_TYPES.get(self._precision or "", ())[:1]:
            types = Precision("fp16", placed_nodes(model, "tensorrt", dtype), dtype)
        layers = layers_of_graph(model, static_shapes(model, {}), types)
        rows = timed_rows(layers, self._gpu)
        total = Cost(len(layers), 0, sum(row.bytes for row in rows), sum(row.predicted_us for row in rows))
        return Priced(total, kernels_of(rows))
