"""What samples tell about the channels of tensors: the largest magnitude and the mean square of each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.events import Event, OnEvent, ignore
from trtopt.graph import edit
from trtopt.support.ort_session import Feeds, OrtSession

_TASK = "channels"
_AXES_ARE_AN_INPUT = 18
"""From this opset on, ReduceMax and its like take their axes as an input."""


@dataclass(frozen=True, eq=False)
class ChannelStats:
    """Statistics of the channels of one tensor over all samples.

    Attributes:
        absmax: float32 ``[channels]``, the largest magnitude.
        mean_square: float32 ``[channels]``.
    """

    absmax: np.ndarray
    mean_square: np.ndarray


def product_inputs(model: ir.Model, nodes: Collection[str]) -> dict[str, int]:
    """The data inputs of products, with the axis that counts the channels; negative axes count from the end."""
    found = {}
    for node in model.graph:
        data = node.inputs[0] if node.name in nodes else None
        if data is not None and edit.constant_tensor_of(data) is None:
            found[str(data.name)] = 1 if node.op_type in ("Conv", "ConvTranspose") else -1
    return found


def channel_stats(
    model: ir.Model, samples: Iterable[Feeds], tensors: Mapping[str, int], on_event: OnEvent = ignore
) -> dict[str, ChannelStats]:
    """Run samples and observe channels. The graph itself reduces each tensor, so that memory holds no more of them
    than inference does, whatever the number of samples.

    Args:
        model: A widened model.
        samples: The samples.
        tensors: Floating tensors of the main graph, by name, with the axis that counts the channels.
        on_event: Told of progress.

    Returns:
        By tensor; those are missing that held NaN or infinity.

    Raises:
        UsageError: A sample is bad.
        InvalidModelError: ONNX Runtime cannot load or run the model.
        MissingDependencyError: ONNX Runtime is not installed.
    """
    observed = model.clone()
    outputs = _observe(observed, tensors)
    sums: dict[str, list[np.ndarray]] = {}
    on_event(Event("start", _TASK))
    if outputs:
        with OrtSession(observed) as session:
            for feeds in samples:
                got = dict(zip(session.output_names, session.run(feeds), strict=True))
                for name, (low, high, square, shape) in outputs.items():
                    _add(sums, name, [got[low], got[high], got[square]], int(np.prod(got[shape])))
                on_event(Event("advance", _TASK))
    on_event(Event("end", _TASK))
    found = {}
    for tensor, (absmax, total, count) in sums.items():
        if np.isfinite(absmax).all() and np.isfinite(total).all():
            mean = total / np.maximum(count / max(absmax.size, 1), 1)
            found[tensor] = ChannelStats(absmax.astype(np.float32), mean.astype(np.float32))
    return found


def _add(sums: dict[str, list[np.ndarray]], name: str, got: list[np.ndarray], elements: int) -> None:
    low, high, square = (array.astype(np.float64) for array in got)
    absmax = np.maximum(np.abs(low), np.abs(high))
    if name not in sums:
        sums[name] = [absmax, square, np.asarray(float(elements))]
        return
    known = sums[name]
    sums[name] = [np.maximum(known[0], absmax), known[1] + square, known[2] + elements]


def _observe(model: ir.Model, tensors: Mapping[str, int]) -> dict[str, tuple[str, str, str, str]]:
    """Make reductions of tensors the outputs of ``model``: names of the smallest, the largest, the sum of squares, the
    shape. Tensors whose rank is not known are left out."""
    graph, names = model.graph, edit.Names(model)
    values = {value.name: value for value in graph.inputs}
    values.update((value.name, value) for node in graph for value in node.outputs)
    opset = graph.opset_imports.get("", 0)
    found = {}
    results: list[ir.Value] = []
    for tensor, axis in tensors.items():
        value = values[tensor]
        if value.shape is None or not len(value.shape):
            continue
        rank = len(value.shape)
        axes = [other for other in range(rank) if other != axis % rank]
        made = [_reduced(graph, names, value, kind, axes, opset) for kind in ("Min", "Max", "SumSquare")]
        shape = edit.new_node("Shape", [value], name=names.node(f"{tensor}/shape"), output=names.value(f"{tensor}/s"))
        shape.outputs[0].type = ir.TensorType(ir.DataType.INT64)
        graph.append(shape)
        made.append(shape.outputs[0])
        results.extend(made)
        low, high, square, dims = (str(item.name) for item in made)
        found[tensor] = (low, high, square, dims)
    graph.outputs[:] = results
    return found


def _reduced(graph: ir.Graph, names: edit.Names, value: ir.Value, kind: str, axes: list[int], opset: int) -> ir.Value:
    name = f"{value.name}/{kind}"
    inputs: list[ir.Value | None] = [value]
    node = edit.new_node(f"Reduce{kind}", inputs, name=names.node(name), output=names.value(name))
    node.attributes["keepdims"] = ir.AttrInt64("keepdims", 0)
    if opset >= _AXES_ARE_AN_INPUT:
        node.resize_inputs(2)
        node.replace_input_with(1, edit.add_initializer(graph, names.value(f"{name}/axes"), np.asarray(axes, np.int64)))
    else:
        node.attributes["axes"] = ir.AttrInt64s("axes", axes)
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    graph.append(node)
    return node.outputs[0]
