"""Write the plan's 16-bit types into the graph: every tensor typed, Casts where types meet."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.edit import CAST_PREFIX, cast_node, insert_behind
from trtopt.precision.fp16.schemas import TYPE_ATTRIBUTES, FloatForm, import_bf16_forms, why_fp32
from trtopt.precision.plan import BF16, FP16, NarrowType

_FLOAT = ir.DataType.FLOAT
_NARROW = {kind.dtype: kind for kind in (FP16, BF16)}


def narrow_floats(model: ir.Model, narrow: NarrowType, wide: Collection[str], bfloat: Collection[str] = ()) -> ir.Model:
    """A clone of ``model`` whose main-graph nodes compute in 16 bits, except those named in ``wide``.

    Graph inputs and outputs keep their types. Weights of narrow nodes are stored narrow; a weight that nodes of
    several types share is stored once in each. Subgraphs stay FP32: what they capture is cast back.

    Args:
        model: A widened model: FP32 is its only float type.
        narrow: FP16 or BF16.
        wide: Names of nodes that stay FP32; nodes without a narrow form (:func:`why_fp32`) do so anyway.
        bfloat: Names of nodes that compute in BF16, whatever ``narrow`` is; none of ``wide``.
    """
    clone = model.clone()
    kinds = dict.fromkeys(bfloat, BF16)
    written = {_FLOAT, narrow.dtype, *(kind.dtype for kind in kinds.values())}
    writer = _Writer(clone, lambda node: None if node.name in wide else kinds.get(str(node.name), narrow), written)
    for node in list(clone.graph):
        writer.retype(node)
    writer.finish()
    if BF16.dtype in written:
        import_bf16_forms(clone)
    return clone


class _Writer:
    """Walks the main graph in topological order; a value's dtype is final once its producer was visited."""

    def __init__(
        self, model: ir.Model, wanted: Callable[[ir.Node], NarrowType | None], written: Collection[ir.DataType]
    ) -> None:
        self._graph = model.graph
        self._wanted = wanted
        self._written = written
        self._names = edit.Names(model)
        self._casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        self._weights: dict[tuple[ir.Value, NarrowType], ir.Value] = {}
        self._declared = [value.dtype for value in model.graph.outputs]

    def retype(self, node: ir.Node) -> None:
        """Give ``node`` its inputs in the right type and mark its outputs."""
        narrow = self._wanted(node)
        if narrow is not None and why_fp32(node, narrow) is not None:
            narrow = None
        form = FloatForm(node, narrow or FP16)
        narrowed: set[str] = set()
        for index, value in enumerate(node.inputs):
            if value is None or value.dtype not in self._written:
                continue
            variable, fits = form.input(index)
            want = narrow if fits else None
            if want is not None:
                narrowed.add(variable)
            if value.dtype is not _dtype(want):
                node.replace_input_with(index, self._as(value, want))
        self._capture_wide(node)
        if narrow is not None:
            self._mark_outputs(node, narrow, form, narrowed)

    def _mark_outputs(self, node: ir.Node, narrow: NarrowType, form: FloatForm, narrowed: set[str]) -> None:
        attribute = TYPE_ATTRIBUTES.get(node.op_type)
        for index, value in enumerate(node.outputs):
            if value.dtype is not _FLOAT:
                continue
            variable, fits = form.output(index)
            if not fits:
                continue
            if attribute is not None and attribute in node.attributes:
                node.attributes[attribute] = ir.AttrInt64(attribute, int(narrow.dtype))
            elif node.op_type == "ConstantOfShape":
                fill = node.attributes.get("value")
                number = fill.as_tensor().numpy() if fill is not None else np.zeros(1, np.float32)
                node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(narrow.saturate(number)))
            elif variable not in narrowed:
                continue
            value.type = ir.TensorType(narrow.dtype)

    def _as(self, value: ir.Value, narrow: NarrowType | None) -> ir.Value:
        """``value`` in this type (None: FP32): a converted weight, or the output of a Cast behind its producer."""
        if value.is_initializer() and narrow is not None:
            return self._narrow_weight(value, narrow)
        dtype = _dtype(narrow)
        key = (value, dtype)
        if key not in self._casts:
            name = self._names.value(f"{value.name}_{'fp32' if narrow is None else narrow.name}")
            cast = cast_node(value, dtype, self._names, name)
            insert_behind(self._graph, value, [cast])
            self._casts[key] = cast.outputs[0]
        return self._casts[key]

    def _narrow_weight(self, value: ir.Value, narrow: NarrowType) -> ir.Value:
        found = self._weights.get((value, narrow))
        if found is None:
            tensor = value.const_value
            if tensor is None:
                raise ValueError(f"initializer {value.name} has no value")
            name = self._names.value(f"{value.name}_{narrow.name}")
            found = ir.Value(
                name=name,
                shape=value.shape,
                type=ir.TensorType(narrow.dtype),
                const_value=ir.Tensor(narrow.saturate(tensor.numpy()), name=name, dtype=narrow.dtype),
            )
            self._graph.register_initializer(found)
            self._weights[value, narrow] = found
        return found

    def _capture_wide(self, node: ir.Node) -> None:
        """Subgraphs of ``node`` read outer values as FP32."""
        for subgraph in edit.subgraphs_of(node):
            for graph in edit.all_graphs(subgraph):
                for inner in graph:
                    for index, value in enumerate(inner.inputs):
                        if value is not None and value.dtype in _NARROW:
                            inner.replace_input_with(index, self._as(value, None))
                for position, value in enumerate(graph.outputs):
                    if value.dtype in _NARROW:
                        graph.outputs[position] = self._as(value, None)

    def finish(self) -> None:
        """Restore the types of the graph's outputs; drop unused weights and casts that have become idle."""
        restored: dict[ir.Value, ir.Value] = {}
        for position, value in enumerate(self._graph.outputs):
            if value.dtype in _NARROW and self._declared[position] is _FLOAT:
                if value not in restored:
                    restored[value] = self._restored(value)
                self._graph.outputs[position] = restored[value]
        converted = {value for value, _ in self._weights}
        for name, value in list(self._graph.initializers.items()):
            if value in converted and not value.uses() and not value.is_graph_output():
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
        name, kind = str(value.name), _NARROW[ir.DataType(value.dtype or _FLOAT)]
        present = self._casts.get((value, _FLOAT))
        if present is None:
            return edit.cast_output(self._graph, value, _FLOAT, self._names, kind.name)
        value.name = self._names.value(f"{name}_{kind.name}")
        present.name = name
        return present


def _dtype(narrow: NarrowType | None) -> ir.DataType:
    return _FLOAT if narrow is None else narrow.dtype
