"""Write the plan's 16-bit type into the graph: every tensor typed, Casts where types meet."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.precision.casts import CAST_PREFIX, cast_node, insert_behind
from trtopt.precision.plan import NarrowType
from trtopt.precision.schemas import TYPE_ATTRIBUTES, FloatForm, why_fp32

_FLOAT = ir.DataType.FLOAT


def narrow_floats(model: ir.Model, narrow: NarrowType, wide: Collection[str]) -> ir.Model:
    """A clone of ``model`` whose main-graph nodes compute in ``narrow``, except those named in ``wide``.

    Graph inputs and outputs keep their types. Weights of narrow nodes are stored narrow; a weight that narrow and
    wide nodes share is stored twice. Subgraphs stay FP32: what they capture is cast back.

    Args:
        model: A widened model: FP32 is its only float type.
        narrow: FP16 or BF16.
        wide: Names of nodes that stay FP32; nodes without a narrow form (:func:`why_fp32`) do so anyway.
    """
    clone = model.clone()
    writer = _Writer(clone, narrow, frozenset(wide))
    for node in list(clone.graph):
        writer.retype(node)
    writer.finish()
    return clone


class _Writer:
    """Walks the main graph in topological order; a value's dtype is final once its producer was visited."""

    def __init__(self, model: ir.Model, narrow: NarrowType, wide: frozenset[str]) -> None:
        self._graph = model.graph
        self._narrow = narrow
        self._wide = wide
        self._names = edit.Names(model)
        self._casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        self._weights: dict[ir.Value, ir.Value] = {}
        self._declared = [value.dtype for value in model.graph.outputs]

    def retype(self, node: ir.Node) -> None:
        """Give ``node`` its inputs in the right type and mark its outputs."""
        narrow = node.name not in self._wide and why_fp32(node, self._narrow) is None
        form = FloatForm(node, self._narrow)
        narrowed: set[str] = set()
        for index, value in enumerate(node.inputs):
            if value is None or value.dtype not in (_FLOAT, self._narrow.dtype):
                continue
            variable, fits = form.input(index)
            want = self._narrow.dtype if narrow and fits else _FLOAT
            if want is self._narrow.dtype:
                narrowed.add(variable)
            if value.dtype is not want:
                node.replace_input_with(index, self._as(value, want))
        self._capture_wide(node)
        if narrow:
            self._mark_outputs(node, form, narrowed)

    def _mark_outputs(self, node: ir.Node, form: FloatForm, narrowed: set[str]) -> None:
        attribute = TYPE_ATTRIBUTES.get(node.op_type)
        for index, value in enumerate(node.outputs):
            if value.dtype is not _FLOAT:
                continue
            variable, fits = form.output(index)
            if not fits:
                continue
            if attribute is not None and attribute in node.attributes:
                node.attributes[attribute] = ir.AttrInt64(attribute, int(self._narrow.dtype))
            elif node.op_type == "ConstantOfShape":
                self._narrow_fill(node)
            elif variable not in narrowed:
                continue
            value.type = ir.TensorType(self._narrow.dtype)

    def _narrow_fill(self, node: ir.Node) -> None:
        fill = node.attributes.get("value")
        number = fill.as_tensor().numpy() if fill is not None else np.zeros(1, np.float32)
        node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(self._narrow.saturate(number)))

    def _as(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """``value`` as ``dtype``: a converted weight, or the output of a Cast behind its producer."""
        if value.is_initializer():
            return self._narrow_weight(value)
        key = (value, dtype)
        if key not in self._casts:
            suffix = self._narrow.name if dtype is self._narrow.dtype else "fp32"
            cast = cast_node(value, dtype, self._names, self._names.value(f"{value.name}_{suffix}"))
            insert_behind(self._graph, value, [cast])
            self._casts[key] = cast.outputs[0]
        return self._casts[key]

    def _narrow_weight(self, value: ir.Value) -> ir.Value:
        found = self._weights.get(value)
        if found is None:
            tensor = value.const_value
            if tensor is None:
                raise ValueError(f"initializer {value.name} has no value")
            name = self._names.value(f"{value.name}_{self._narrow.name}")
            array = self._narrow.saturate(tensor.numpy())
            found = ir.Value(
                name=name,
                shape=value.shape,
                type=ir.TensorType(self._narrow.dtype),
                const_value=ir.Tensor(array, name=name, dtype=self._narrow.dtype),
            )
            self._graph.register_initializer(found)
            self._weights[value] = found
        return found

    def _capture_wide(self, node: ir.Node) -> None:
        """Subgraphs of ``node`` read outer values as FP32."""
        for subgraph in edit.subgraphs_of(node):
            for graph in edit.all_graphs(subgraph):
                for inner in graph:
                    for index, value in enumerate(inner.inputs):
                        if value is not None and value.dtype is self._narrow.dtype:
                            inner.replace_input_with(index, self._as(value, _FLOAT))
                for position, value in enumerate(graph.outputs):
                    if value.dtype is self._narrow.dtype:
                        graph.outputs[position] = self._as(value, _FLOAT)

    def finish(self) -> None:
        """Restore the types of the graph's outputs; drop unused weights and casts that have become idle."""
        restored: dict[ir.Value, ir.Value] = {}
        for position, value in enumerate(self._graph.outputs):
            if value.dtype is self._narrow.dtype and self._declared[position] is _FLOAT:
                if value not in restored:
                    restored[value] = self._restored(value)
                self._graph.outputs[position] = restored[value]
        for name, value in list(self._graph.initializers.items()):
            if value in self._weights and not value.uses() and not value.is_graph_output():
                del self._graph.initializers[name]
        for node in list(self._graph):
            if node.op_type == "Cast" and str(node.name).startswith(CAST_PREFIX):
                self._drop_idle(node)

    def _drop_idle(self, cast: ir.Node) -> None:
        """A model that is narrow at its border has casts there that end at the type they start from."""
        source, result = cast.inputs[0], cast.outputs[0]
        if source is not None and source.dtype is result.dtype and edit.can_replace(result, source):
            edit.replace_value(result, source)
            edit.remove_node(cast)

    def _restored(self, value: ir.Value) -> ir.Value:
        """A graph output as FP32; the Cast takes over the output's name."""
        name = str(value.name)
        present = self._casts.get((value, _FLOAT))
        value.name = self._names.value(f"{name}_{self._narrow.name}")
        if present is None:
            cast = cast_node(value, _FLOAT, self._names, name)
            self._graph.append(cast)
            return cast.outputs[0]
        present.name = name
        return present
