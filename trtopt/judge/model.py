"""The judge of TensorRT without a GPU: the fusions that its documentation names, and the performance model."""

from __future__ import annotations

import onnx_ir as ir

from trtopt.engine.backend import TENSORRT
from trtopt.graph.shapes import static_shapes
from trtopt.hardware.spec import GpuSpec
from trtopt.judge.protocol import Priced
from trtopt.judge.rows import kernels_of, timed_rows
from trtopt.precision.decide import placed_nodes
from trtopt.report.schema.steps import Cost
from trtopt.roofline.node_work import GraphTypes
from trtopt.roofline.onnx_layers import layers_of_graph
from trtopt.support.precision import Precision


def types_in(model: ir.Model, precision: Precision | None, backend: str) -> GraphTypes:
    """The types a graph runs in once a precision is written into it, before anything was observed.

    Args:
        model: The model, nodes named.
        precision: The precision; None for the types the graph has.
        backend: Whose table says which nodes become 8-bit.
    """
    if precision is None:
        return GraphTypes()
    for dtype in precision.quantized_types[:1]:
        return GraphTypes(precision.base, placed_nodes(model, backend, dtype), dtype)
    return GraphTypes(precision.base)


class ModelJudge:
    """TensorRT without a GPU: its documented fusions, and the time of each fused layer by the performance model.

    Args:
        gpu: The GPU whose time is predicted.
        precision: As in :func:`judge_for`.
    """

    name = "model:tensorrt"

    def __init__(self, gpu: GpuSpec, precision: Precision | None) -> None:
        self._gpu, self._precision = gpu, precision

    def price(self, model: ir.Model, *, inner: bool) -> Priced:
        """See :class:`~trtopt.judge.protocol.Judge`; operators without a known cost are left out."""
        types = types_in(model, self._precision, TENSORRT.name)
        layers = layers_of_graph(model, static_shapes(model, {}), types)
        rows = timed_rows(layers, self._gpu)
        total = Cost(len(layers), 0, sum(row.bytes for row in rows), sum(row.predicted_us for row in rows))
        return Priced(total, kernels_of(rows))
