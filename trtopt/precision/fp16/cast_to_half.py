"""Write the plan's 16-bit types into the graph as operators' schemas allow: tensors typed, Casts where types meet."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.edit import CAST_PREFIX, cast_node, insert_behind
from trtopt.precision.plan import BF16, FP16, NarrowType
from trtopt.support.memo import once_per_array
from trtopt.support.precision import Precision

TYPE_ATTRIBUTES = {
    "Cast": "to",
    "EyeLike": "dtype",
    "RandomNormal": "dtype",
    "RandomUniform": "dtype",
    "RandomNormalLike": "dtype",
    "RandomUniformLike": "dtype",
    "Multinomial": "dtype",
    "Bernoulli": "dtype",
    "DequantizeLinear": "output_dtype",
}
"""Operators whose output type an attribute gives, if it is there."""

_FOLLOWED_INPUT = {"DequantizeLinear": 1, "EyeLike": 0, "RandomNormalLike": 0, "RandomUniformLike": 0, "Bernoulli": 0}
"""Operators whose output, without that attribute, has the type of this input though their schema does not say so."""

_NO_16_BIT_FORM = {
    ("BitCast", Precision.FP16): "it reinterprets the bits of FP32",
    ("BitCast", Precision.BF16): "it reinterprets the bits of FP32",
} | {
    (op, Precision.BF16): f"TensorRT for RTX refuses {op} in bf16"
    for op in ("ConvTranspose", "GRU", "HardSwish", "LpNormalization", "LpPool", "Mish")
}

_RECURRENT = ("GRU", "LSTM", "RNN")
"""Operators whose input 4 is the length of each sequence: the parser of TensorRT for RTX 1.7 selects between 16-bit
values and zeros in FP32 there, and refuses what it made."""

_TYPES_ONLY = (21, 22)
"""From the first to the second of these opsets operators only gained types: BF16 for Conv, pools, recurrent layers and
activations. A model of the first is one of the second as it stands (changelog of ONNX, docs/Changelog.md)."""


class FloatForm:
    """Which inputs and outputs of one node may be narrow."""

    def __init__(self, node: ir.Node, narrow: NarrowType) -> None:
        self._node = node
        self._name = narrow.schema_name
        self._schema = _schema_of(node, narrow)

    def input(self, index: int) -> tuple[str, bool]:
        """The type variable of an input, and whether it may be narrow."""
        return self._parameter(self._schema.inputs if self._schema else [], index)

    def output(self, index: int) -> tuple[str, bool]:
        """The type variable of an output, and whether it may be narrow."""
        variable, fits = self._parameter(self._schema.outputs if self._schema else [], index)
        followed = _FOLLOWED_INPUT.get(self._node.op_type)
        return (variable if followed is None else self.input(followed)[0]), fits

    def _parameter(self, parameters: Sequence[onnx.defs.OpSchema.FormalParameter], index: int) -> tuple[str, bool]:
        if not parameters:
            return "", False
        parameter = parameters[min(index, len(parameters) - 1)]
        return parameter.type_str, self._name in parameter.types


def _leads_to_range(node: ir.Node) -> bool:
    """Whether a float that ``node`` makes is read by a Range, or by what makes a single float of it that is."""
    waiting, seen = [node], {node}
    while waiting:
        for value in waiting.pop().outputs:
            if value.dtype is not None and not value.dtype.is_floating_point():
                continue
            readers = [reader for reader, _ in value.uses()]
            if any(edit.is_op(reader, "Range") for reader in readers):
                return True
            shape = edit.static_shape(value)
            if shape is not None and math.prod(shape) == 1:
                waiting += [reader for reader in readers if reader not in seen]
                seen.update(readers)
    return False


def why_fp32(node: ir.Node, narrow: NarrowType) -> str | None:
    """Why ``node`` has no form in ``narrow``, None when it has one or holds no floats."""
    if node.domain not in ("", "ai.onnx"):
        return f"operator of domain {node.domain}: its 16-bit form is unknown"
    if edit.subgraphs_of(node):
        return "control flow: ranges inside its subgraphs are not observed"
    if edit.is_op(node, "DequantizeLinear") and _has_scale_of_two(node):
        return "the scales of its weight are products of two, which 16 bits may not hold"
    reason = _NO_16_BIT_FORM.get((node.op_type, narrow.name))
    if reason is not None:
        return reason
    if node.op_type in _RECURRENT and edit.input_of(node, 4) is not None:
        return f"TensorRT for RTX masks what lies behind the lengths of {node.op_type} in FP32 only"
    if _leads_to_range(node):
        return "it says where a Range ends, which 16 bits round from 2048 on and TensorRT for RTX counts in FP32 only"
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    if any(isinstance(value.type, (ir.SequenceType, ir.OptionalType)) for value in values):
        return "sequences and optional values stay as they are"
    form = FloatForm(node, narrow)
    floats = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    inputs = [
        form.input(index) for index, value in enumerate(node.inputs) if value is not None and value.dtype in floats
    ]
    outputs = [form.output(index) for index, value in enumerate(node.outputs) if value.name and value.dtype in floats]
    if (inputs or outputs) and not any(fits for _, fits in (*inputs, *outputs)):
        return f"{node.op_type} has no {narrow.name} form in ONNX"
    variables = {variable for variable, fits in inputs if fits}
    typed = node.op_type == "ConstantOfShape" or TYPE_ATTRIBUTES.get(node.op_type, "") in node.attributes
    if inputs and not typed and any(fits and variable not in variables for variable, fits in outputs):
        return f"the type of an output of {node.op_type} does not follow from its inputs"
    return None


def _has_scale_of_two(node: ir.Node) -> bool:
    """Whether a DequantizeLinear makes scales, or reads such: weights in FP4 (NVFP4)."""
    scale = edit.input_of(node, 1)
    makes = any(edit.is_op(reader, "DequantizeLinear") and index == 1 for reader, index in node.outputs[0].uses())
    return makes or (scale is not None and edit.is_op(scale.producer(), "DequantizeLinear"))


def _schema_of(node: ir.Node, narrow: NarrowType) -> onnx.defs.OpSchema | None:
    imported = node.graph.opset_imports.get(node.domain) if node.graph is not None else None
    version = node.version or imported or onnx.defs.onnx_opset_version()
    if narrow.name == Precision.BF16 and node.domain in ("", "ai.onnx") and version == _TYPES_ONLY[0]:
        version = _TYPES_ONLY[1]
    return _schema(node.op_type, version, node.domain)


def import_bf16_forms(model: ir.Model) -> None:
    """Raise the opset of ``model``, which is changed, to the one that has the BF16 forms :class:`FloatForm` allows."""
    for graph in edit.all_graphs(model.graph):
        if graph.opset_imports.get("") == _TYPES_ONLY[0]:
            graph.opset_imports[""] = _TYPES_ONLY[1]


@lru_cache(maxsize=512)
def _schema(op_type: str, version: int, domain: str) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return None


_FLOAT = ir.DataType.FLOAT
_NARROW = {kind.dtype: kind for kind in (FP16, BF16)}


def cast_to_half(model: ir.Model, narrow: NarrowType, wide: Collection[str], bfloat: Collection[str] = ()) -> ir.Model:
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
            array = stored(tensor.numpy(), narrow)
            found = ir.Value(
                name=name,
                shape=value.shape,
                type=ir.TensorType(narrow.dtype),
                const_value=ir.Tensor(array, name=name, dtype=narrow.dtype),
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


@once_per_array
def stored(exact: np.ndarray, narrow: NarrowType) -> np.ndarray:
    """A weight as a 16-bit type stores it."""
    array = narrow.saturate(exact)
    if array.size == 1 and not array.any() and exact.any():  # an epsilon stays above zero
        return np.full_like(array, np.copysign(ml_dtypes.finfo(array.dtype).smallest_subnormal, exact))
    return array


def _dtype(narrow: NarrowType | None) -> ir.DataType:
    return _FLOAT if narrow is None else narrow.dtype
