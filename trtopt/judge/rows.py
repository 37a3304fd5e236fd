"""The kernels of a judged graph, timed by the performance model."""

from __future__ import annotations

from collections.abc import Sequence

from trtopt.errors import InvalidModelError
from trtopt.hardware.spec import GpuSpec
from trtopt.report.schema.analysis import LayerRow
from trtopt.roofline.layer import predict
from trtopt.roofline.work import Layer


def timed_rows(layers: Sequence[Layer], gpu: GpuSpec) -> tuple[LayerRow, ...]:
    """The kernels whose cost is known: the others cost the same before and after.

    Raises:
        InvalidModelError: None is.
    """
    rows, uncosted = predict(layers, gpu)
    if layers and not rows:
        raise InvalidModelError(
            f"no kernel has a known cost ({', '.join(item.op for item in uncosted)})",
            where=uncosted[0].nodes[0] if uncosted and uncosted[0].nodes else "",
            remedy="fix the condition of an If, or the trip count of a loop, in the model",
        )
    return rows


def kernels_of(rows: Sequence[LayerRow]) -> tuple[tuple[frozenset[str], int, float], ...]:
    return tuple((frozenset(row.onnx_nodes), row.bytes, row.predicted_us) for row in rows)
