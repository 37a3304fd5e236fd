"""Predicted layers in the graph and the table that a profile's page has (:mod:`trtopt.report.html.profile`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trtopt.report.schema.analysis import LayerRow
from trtopt.report.schema.layers import LayerInfo
from trtopt.report.schema.profile import ProfileLayer
from trtopt.report.text.names import Labels


def as_layers(rows: Sequence[LayerRow], labels: Labels, listed: Sequence[LayerInfo] = ()) -> tuple[ProfileLayer, ...]:
    """Predicted layers as those of a profile, their predicted time in the place of a measured one.

    Args:
        rows: The layers.
        labels: The modules of their nodes.
        listed: The layers of the engine, where there is one: tensors and kernels by the layers' names.
    """
    known: Mapping[str, LayerInfo] = {layer.name: layer for layer in listed}
    return tuple(_layer(row, known.get(row.name), labels) for row in rows)


def _layer(row: LayerRow, info: LayerInfo | None, labels: Labels) -> ProfileLayer:
    return ProfileLayer(
        name=row.name,
        type=row.op if info is None else info.type,
        onnx_nodes=row.onnx_nodes,
        modules=labels.modules(row.onnx_nodes),
        inputs=() if info is None else info.inputs,
        outputs=() if info is None else info.outputs,
        constants=() if info is None else info.constants,
        tactic="" if info is None else info.tactic,
        tensor_core=None,
        sparse=None,
        measured_us=row.predicted_us,
        predicted=row,
    )
