"""How time, throughput and memory change with the batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.errors import InvalidModelError, UsageError
from trtopt.events import Event, OnEvent, ignore
from trtopt.graph import edit
from trtopt.graph.artifact import InputSpec
from trtopt.graph.shapes import static_shapes
from trtopt.hardware.spec import GpuSpec
from trtopt.report.schema.analysis import BatchPoint, BatchSweep, range_of_sum
from trtopt.roofline.constants import constants_for
from trtopt.roofline.intervals import range_of
from trtopt.roofline.layer import layer_times
from trtopt.roofline.memory import peak_memory
from trtopt.roofline.node_work import GraphTypes
from trtopt.roofline.onnx_layers import FusedModel
from trtopt.roofline.work import Work

KNEE = 0.9
"""Share of the sweep's best throughput at which more batch is no longer worth its latency."""

_DYNAMIC = "export the model with a dynamic batch, such as trtopt export --dynamic NAME:0=batch"

Shapes = Mapping[str, tuple[int, ...]]


_Part = tuple[str, float, float, float]
"""Kind, predicted time and range of a kernel, as :func:`range_of_sum` takes them."""


@dataclass(frozen=True)
class BatchAxis:
    """The axis that is the batch.

    Attributes:
        size: Its size now.
        symbol: Its name, None where the model fixes it.
        axes: Every (input, axis) that has it.
    """

    size: int
    symbol: str | None
    axes: tuple[tuple[str, int], ...]

    def at(self, shapes: Shapes, batch: int) -> dict[str, tuple[int, ...]]:
        """Input shapes with another batch."""
        changed = {name: list(shape) for name, shape in shapes.items()}
        for name, axis in self.axes:
            changed[name][axis] = batch
        return {name: tuple(shape) for name, shape in changed.items()}

    @property
    def text(self) -> str:
        """For messages: which axis of which inputs."""
        places = ", ".join(f"axis {axis} of {name}" for name, axis in self.axes)
        return f"{self.symbol or f'fixed to {self.size}'} ({places})"


def batch_axis(inputs: Sequence[InputSpec], shapes: Shapes) -> BatchAxis | None:
    """The axis that counts samples: the first dynamic first axis of an input, with every axis of the same symbol; in a
    model without one, the first axis of the first input and those of the same size.

    Returns:
        None when no input has an axis.
    """
    ranked = [item for item in inputs if item.shape]
    if not ranked:
        return None
    first = next((item for item in ranked if not isinstance(item.shape[0], int)), ranked[0])
    size, dim = shapes[first.name][0], first.shape[0]
    named = isinstance(dim, str) and dim != "?"
    axes = tuple(
        (item.name, axis)
        for item in ranked
        for axis, other in enumerate(item.shape)
        if other == dim and (named or axis == 0)
    )
    return BatchAxis(size, None if isinstance(dim, int) else str(dim), axes)


@dataclass(frozen=True)
class BatchSweeper:
    """Predicts a network at other batch sizes.

    Attributes:
        model: The ONNX model.
        axis: Its batch.
        shapes: The input shapes it was analysed at.
        values: The static shape of every value at those.
        precision: The types it runs in.
        gpu: The GPU.
    """

    model: ir.Model
    axis: BatchAxis
    shapes: Shapes
    values: Shapes
    precision: GraphTypes
    gpu: GpuSpec

    def sweep(self, batches: Sequence[int], budget_us: float | None = None, on_event: OnEvent = ignore) -> BatchSweep:
        """Predict every batch size; all points are kept, since throughput does not rise steadily with the batch.

        Knee and best batch are of those that fit the GPU's memory (the smallest, where none does).

        Args:
            batches: In increasing order.
            budget_us: The latency that a batch may take at the most.
            on_event: Called with progress.

        Raises:
            UsageError: The model cannot run at a batch size: it is fixed in the graph.
        """
        times: dict[Work, _Part] = {}
        found = []
        on_event(Event("start", "batch sweep", total=len(batches)))
        for batch in batches:
            found.append(self._point(batch, times))
            on_event(Event("advance", "batch sweep"))
        on_event(Event("end", "batch sweep"))
        points = tuple(found)
        usable = [point for point in points if point.fits] or points[:1]
        best = max(point.throughput for point in usable)
        knee = next(point.batch for point in usable if point.throughput >= KNEE * best)
        within = [point for point in usable if budget_us is not None and point.predicted_us <= budget_us]
        chosen = max(within, key=lambda point: point.throughput).batch if within else None
        return BatchSweep(points, knee, budget_us, chosen)

    def _point(self, batch: int, times: dict[Work, _Part]) -> BatchPoint:
        model, values = self.at_batch(batch)
        fused = FusedModel(model, values, self.precision)
        works = [layer.work for layer in fused.layers() if layer.work is not None]
        new = [work for work in dict.fromkeys(works) if work not in times]
        found = layer_times(new, self.gpu, constants_for(self.gpu))
        for work, us in zip(new, (time.predicted_us for time in found), strict=True):
            times[work] = (work.kind, us, *range_of(work, us, self.gpu))
        total = sum(times[work][1] for work in works)
        low, high = range_of_sum(times[work] for work in works)
        memory = peak_memory(fused, self.gpu)
        throughput = batch / (total * 1e-6) if total else 0.0
        return BatchPoint(batch, total, throughput, memory.activation_bytes, memory.fits, low, high)

    def at_batch(self, batch: int) -> tuple[ir.Model, Shapes]:
        """The model and the shapes of its values at another batch.

        Raises:
            UsageError: The graph holds the batch it was exported with, so that it cannot run at another.
        """
        if batch == self.axis.size:
            return self.model, self.values
        inputs = self.axis.at(self.shapes, batch)
        model = self.model if self.axis.symbol is not None else self._rebatched(batch)
        try:
            values = static_shapes(model, inputs)
        except InvalidModelError as error:
            raise UsageError(
                f"The model cannot run at batch {batch}: {error.what}",
                where=f"--batch-sweep, batch {self.axis.text}",
                remedy=_DYNAMIC,
            ) from error
        _check_reshapes(model, values, batch)
        return model, values

    def _rebatched(self, batch: int) -> ir.Model:
        """A clone of a model of fixed batch whose inputs, and reshapes that keep the batch in front, have another."""
        clone = self.model.clone()
        inputs = {str(value.name): value for value in clone.graph.inputs}
        for name, shape in self.axis.at(self.shapes, batch).items():
            inputs[name].shape = ir.Shape(shape)
        names = edit.Names(clone)
        for node in clone.graph:
            if not edit.is_op(node, "Reshape") or len(node.inputs) < 2:
                continue
            target, data = edit.constant_of(node.inputs[1]), node.inputs[0]
            old = self.values.get(str(data.name)) if data is not None else None
            if target is None or not target.size or not old or edit.constant_of(data) is not None:
                continue
            if int(target[0]) == self.axis.size == old[0]:
                changed = np.array([batch, *target[1:]], np.int64)
                node.replace_input_with(
                    1, edit.add_initializer(clone.graph, names.value(f"{node.name}_shape"), changed)
                )
        return clone


def _check_reshapes(model: ir.Model, values: Shapes, batch: int) -> None:
    """Inference lets a reshape to fixed sizes pass; it has to keep the number of elements."""
    for node in model.graph:
        if not edit.is_op(node, "Reshape") or node.inputs[0] is None:
            continue
        before, after = (values.get(str(value.name)) for value in (node.inputs[0], node.outputs[0]))
        if before is not None and after is not None and math.prod(before) != math.prod(after):
            raise UsageError(
                f"The batch is fixed inside the graph: at batch {batch}, {list(before)} is reshaped to {list(after)}",
                where=f"--batch-sweep, node {node.name} (Reshape)",
                remedy=_DYNAMIC,
            )
