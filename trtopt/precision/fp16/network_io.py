"""Types and memory layouts of the network's inputs and outputs, as ``--io NAME:DTYPE:LAYOUT`` asks for them.

The graph keeps its logical order, [N, C, H, W]: a layout says how the caller's memory holds it. What the graph does see
is another type, and channels of an input filled up with zeros to a multiple of 4 or 8.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir

from trtopt.errors import UsageError
from trtopt.graph import edit
from trtopt.graph.edit import cast_node, insert_behind
from trtopt.report.schema.build import NetworkIo
from trtopt.support.words import did_you_mean

_T = ir.DataType
DTYPES = {
    "fp32": _T.FLOAT,
    "fp16": _T.FLOAT16,
    "bf16": _T.BFLOAT16,
    "uint8": _T.UINT8,
    "int8": _T.INT8,
    "int32": _T.INT32,
    "int64": _T.INT64,
    "bool": _T.BOOL,
}
_FLOATS = (_T.FLOAT, _T.FLOAT16, _T.BFLOAT16, _T.DOUBLE)

MULTIPLES = {"chw": 1, "hwc": 1, "hwc4": 4, "hwc8": 8}
"""Layouts, and what the number of channels is a multiple of."""

_FORMATS = {
    "hwc": {"fp32": "HWC", "fp16": "HWC", "uint8": "HWC"},
    "hwc4": {"fp32": "HWC", "fp16": "HWC", "uint8": "HWC"},
    "hwc8": {"fp32": "HWC", "fp16": "HWC8", "bf16": "HWC8", "uint8": "HWC"},
}
"""The compiler's name of a layout, by type; a type that is missing does not have the layout."""

_FORM = "NAME:DTYPE:LAYOUT, for example x:fp16:hwc4"


@dataclass(frozen=True)
class IoRequest:
    """One ``--io``, or the input or output it became; keys of :data:`DTYPES` and :data:`MULTIPLES`."""

    name: str
    dtype: str
    layout: str

    @property
    def where(self) -> str:
        """The option as errors name it."""
        return f"--io {self.name}:{self.dtype}:{self.layout}"


def parse_io(texts: Iterable[str]) -> tuple[IoRequest, ...]:
    """Read ``--io`` options.

    Raises:
        UsageError: One has another form, an unknown type or layout, a layout its type does not have, or a tensor is
            named twice.
    """
    found: dict[str, IoRequest] = {}
    for text in texts:
        name, dtype, layout = ("", *text.rsplit(":", 2))[-3:] if text.count(":") >= 2 else ("", "", "")
        request = IoRequest(name, dtype.lower(), layout.lower())
        where = f"--io {text}"
        if not name:
            raise UsageError("Not an input or output with a type and a layout", where=where, remedy=f"write {_FORM}")
        for what, word, known in (("type", request.dtype, list(DTYPES)), ("layout", request.layout, list(MULTIPLES))):
            if word not in known:
                remedy = did_you_mean(word, known) or f"choose one of {', '.join(known)}"
                raise UsageError(f"There is no {what} {word!r}", where=where, remedy=remedy)
        if request.layout != "chw" and request.dtype not in _FORMATS[request.layout]:
            layouts = [layout for layout, types in _FORMATS.items() if request.dtype in types]
            raise UsageError(
                f"The compiler has no layout {request.layout} for {request.dtype}",
                where=where,
                remedy=f"choose {', '.join(['chw', *layouts])}",
            )
        if name in found:
            raise UsageError(f"{name!r} is named twice", where=where, remedy="give each tensor one --io")
        found[name] = request
    return tuple(found.values())


def formats(requests: Iterable[IoRequest]) -> dict[str, str]:
    """The compiler's memory format for each tensor that does not have the usual one."""
    return {item.name: _FORMATS[item.layout][item.dtype] for item in requests if item.layout != "chw"}


def check_io(model: ir.Model, requests: Iterable[IoRequest]) -> None:
    """Check that the model has the tensors, with types and ranks that fit.

    Raises:
        UsageError: It does not.
    """
    inputs = {str(value.name): value for value in model.graph.inputs}
    outputs = {str(value.name): value for value in model.graph.outputs}
    for request in requests:
        value = inputs.get(request.name) or outputs.get(request.name)
        if value is None:
            names = [*inputs, *outputs]
            remedy = did_you_mean(request.name, names) or f"its inputs and outputs are {', '.join(names)}"
            raise UsageError(f"The model has no input or output {request.name!r}", where=request.where, remedy=remedy)
        _check_type(value, request, is_input=request.name in inputs)
        _check_layout(value, request, is_input=request.name in inputs)


def _check_type(value: ir.Value, request: IoRequest, *, is_input: bool) -> None:
    wanted = DTYPES[request.dtype]
    if value.dtype is wanted:
        return
    if value.dtype not in _FLOATS:
        raise UsageError(
            f"{request.name!r} is of type {str(value.dtype).lower()}, and only floating-point tensors change theirs",
            where=request.where,
            remedy="leave the option out; such a tensor is fed as it is",
        )
    if wanted not in _FLOATS and not (wanted is _T.UINT8 and is_input):
        types = "fp32, fp16, bf16 or uint8" if is_input else "fp32, fp16 or bf16"
        raise UsageError(
            f"A floating-point {'input' if is_input else 'output'} cannot be {request.dtype}",
            where=request.where,
            remedy=f"choose {types}",
        )


def _check_layout(value: ir.Value, request: IoRequest, *, is_input: bool) -> None:
    if request.layout == "chw":
        return
    shape = value.shape
    if shape is None or len(shape) != 4:
        rank = "of unknown rank" if shape is None else f"of rank {len(shape)}"
        raise UsageError(
            f"{request.name!r} is {rank}, and {request.layout} is a layout of images [N, C, H, W]",
            where=request.where,
            remedy=f"write {request.name}:{request.dtype}:chw",
        )
    multiple, channels = MULTIPLES[request.layout], shape[1]
    if multiple > 1 and not isinstance(channels, int):
        raise UsageError(
            f"The channels of {request.name!r} are dynamic, and {request.layout} fills them up to a multiple",
            where=request.where,
            remedy=f"write {request.name}:{request.dtype}:hwc",
        )
    if isinstance(channels, int) and channels % multiple and not is_input:
        raise UsageError(
            f"The output {request.name!r} has {channels} channels, no multiple of {multiple}",
            where=request.where,
            remedy=f"write {request.name}:{request.dtype}:hwc",
        )


def apply_io(model: ir.Model, requests: Sequence[IoRequest]) -> ir.Model:
    """A clone of ``model`` whose inputs and outputs have the types and channels asked for.

    The model, of any precision, passed :func:`check_io`. A Cast is written where the old type is still needed, and
    removed where the new one is.

    Raises:
        UsageError: An input whose channels are filled up is read by something other than a convolution.
    """
    clone = model.clone()
    names = edit.Names(clone)
    for request in requests:
        dtype = DTYPES[request.dtype]
        for value in clone.graph.inputs:
            if value.name == request.name:
                _retype_input(clone.graph, value, dtype, names)
                missing = -int(value.shape[1]) % MULTIPLES[request.layout] if MULTIPLES[request.layout] > 1 else 0  # type: ignore[index,arg-type]
                if missing:
                    pad_channels(value, missing, names, request.where)
        for position, value in enumerate(clone.graph.outputs):
            if value.name == request.name and value.dtype is not dtype:
                _retype_output(clone.graph, position, dtype, names)
    return clone


def _retype_input(graph: ir.Graph, value: ir.Value, dtype: ir.DataType, names: edit.Names) -> None:
    old = value.dtype
    if old is None or old is dtype:
        return
    uses = list(value.uses())
    value.type = ir.TensorType(dtype)
    others = []
    for node, index in uses:
        target = edit.int_attribute(node, "to", 0) if edit.is_op(node, "Cast") else None
        exact = edit.holds(old, dtype)
        if exact and target == dtype and edit.can_replace(node.outputs[0], value):
            edit.replace_value(node.outputs[0], value)
            edit.remove_node(node)
        elif not (exact and target is not None):
            others.append((node, index))
    if others:
        edit.cast_for_readers(graph, value, old, names, "as_before", others)


def _retype_output(graph: ir.Graph, position: int, dtype: ir.DataType, names: edit.Names) -> None:
    value = graph.outputs[position]
    producer = value.producer()
    source = producer.inputs[0] if edit.is_op(producer, "Cast") else None
    if source is not None and source.dtype is dtype and not value.uses() and edit.can_replace(value, source):
        edit.replace_value(value, source)
        if producer is not None:
            edit.remove_node(producer)
        return
    graph.outputs[position] = edit.cast_output(graph, value, dtype, names, "as_before")


def fed_as_before(model: ir.Model, original: ir.Model, requests: Sequence[IoRequest]) -> ir.Model:
    """A clone of an :func:`apply_io` result that takes the inputs of ``original`` again.

    The conversion the caller would make, a Cast and zeros for the channels that are missing, is done inside: this is
    the graph that is compared with ``original``.
    """
    clone = model.clone()
    names = edit.Names(clone)
    before = {str(value.name): value for value in original.graph.inputs}
    wanted = {request.name for request in requests}
    for position, value in enumerate(clone.graph.inputs):
        old = before.get(str(value.name))
        if old is None or value.name not in wanted or (old.dtype is value.dtype and old.shape == value.shape):
            continue
        name = str(value.name)
        value.name = names.value(f"{name}_fed")
        fresh = ir.Value(name=name, type=old.type, shape=None if old.shape is None else old.shape.copy())
        made = _converted(clone.graph, fresh, value, names)
        clone.graph.inputs[position] = fresh
        insert_behind(clone.graph, fresh, made)
        value.replace_all_uses_with(made[-1].outputs[0])
    return clone


def _converted(graph: ir.Graph, fresh: ir.Value, value: ir.Value, names: edit.Names) -> list[ir.Node]:
    """Nodes that turn ``fresh`` into what was fed as ``value``."""
    made: list[ir.Node] = []
    last = fresh
    missing = 0
    if fresh.shape is not None and value.shape is not None and len(fresh.shape) == 4:
        before, after = fresh.shape[1], value.shape[1]
        missing = after - before if isinstance(before, int) and isinstance(after, int) else 0
    if missing:
        # Before the cast: Pad has no kernel for every type.
        pads = np.array([0, 0, 0, 0, 0, missing, 0, 0], np.int64)
        constant = edit.add_initializer(graph, names.value(f"{fresh.name}_pads"), pads)
        label = names.value(f"{fresh.name}_padded")
        made.append(edit.new_node("Pad", [last, constant], name=names.node(label), output=label, like=value))
        last = made[-1].outputs[0]
        last.type = fresh.type
    if value.dtype is not None and value.dtype is not fresh.dtype:
        made.append(cast_node(last, value.dtype, names, names.value(f"{fresh.name}_cast")))
    return made


def feeds_for(feeds: Mapping[str, np.ndarray], model: ir.Model, requests: Sequence[IoRequest]) -> dict[str, np.ndarray]:
    """A sample of the original model as an engine of the :func:`apply_io` result takes it; logical order."""
    shapes = {str(value.name): value.shape for value in model.graph.inputs}
    result = dict(feeds)
    for request in requests:
        shape = shapes.get(request.name)
        if request.name not in result or shape is None:
            continue
        array = result[request.name]
        channels = shape[1] if len(shape) == 4 else None
        if isinstance(channels, int) and channels > array.shape[1]:
            array = np.pad(array, [(0, 0), (0, channels - array.shape[1]), (0, 0), (0, 0)])
        dtype = ml_dtypes.bfloat16 if request.dtype == "bf16" else DTYPES[request.dtype].numpy()
        result[request.name] = array.astype(dtype)
    return result


def describe(
    original: ir.Model, changed: ir.Model, requests: Iterable[IoRequest], states: Collection[str] = ()
) -> tuple[NetworkIo, ...]:
    """The report's records of what the caller feeds and gets; ``states`` were not asked for."""
    records = []
    for request in requests:
        pair = [
            (old, new)
            for graph_before, graph_after in (
                (original.graph.inputs, changed.graph.inputs),
                (original.graph.outputs, changed.graph.outputs),
            )
            for old in graph_before
            for new in graph_after
            if old.name == new.name == request.name
        ]
        for old, new in pair[:1]:
            kind = "input" if any(value is new for value in changed.graph.inputs) else "output"
            shape = tuple(dim if isinstance(dim, int) else (dim.value or "?") for dim in new.shape or ())
            caller = _caller(kind, request, old, shape)
            is_state = request.name in states
            records.append(NetworkIo(request.name, kind, request.dtype, request.layout, shape, caller, is_state))
    return tuple(records)


def _caller(kind: str, request: IoRequest, old: ir.Value, shape: tuple[int | str, ...]) -> str:
    """What the caller must do, in words."""
    verb = "feed" if kind == "input" else "read"
    order = "x".join(map(str, shape if request.layout == "chw" else (shape[0], *shape[2:], shape[1])))
    axes = "in the order of the shape" if request.layout == "chw" else "channels last"
    text = f"{verb} {request.dtype} values, {axes}: memory holds {order}"
    before = old.shape[1] if old.shape is not None and len(old.shape) == 4 else None
    if len(shape) == 4 and isinstance(before, int) and before != shape[1]:
        text += f"; {before} channels and zeros in the others"
    if request.dtype == "uint8" and old.dtype is not DTYPES["uint8"]:
        text += "; the numbers 0 to 255 stand for themselves"
    return text


_PLAIN = frozenset({"Cast", "QuantizeLinear", "DequantizeLinear"})
_ARITHMETIC = {"Mul": 1.0, "Div": 1.0, "Add": 0.0, "Sub": 0.0}
"""Operators with constants per channel, and what the constant of a new channel is."""


def pad_channels(value: ir.Value, missing: int, names: edit.Names, where: str) -> None:
    """Give ``value``, an input [N, C, H, W], ``missing`` more channels that change nothing.

    Between the input and the convolutions may stand casts, Q/DQ, and arithmetic with constants that are scalars or one
    per channel. Weights used elsewhere too are left to their other users.

    Raises:
        UsageError: Something else reads the input.
    """
    channels = _channels(value)
    pending = [value]
    while pending:
        item = pending.pop()
        if item.shape is not None:
            item.shape = ir.Shape([item.shape[0], _channels(item) + missing, *item.shape[2:]])
        if item.is_graph_output():
            raise _refused(f"{item.name} is an output too", where)
        for node, index in list(item.uses()):
            if edit.is_op(node, "Conv") and index == 0 and edit.int_attribute(node, "group", 1) == 1:
                _pad_weight(node, missing, names, where)
            elif node.op_type in _PLAIN and index == 0:
                _pad_constants(node, channels, missing, 1.0, names, where)
                pending.append(node.outputs[0])
            elif edit.is_op(node, *_ARITHMETIC) and any(
                edit.constant_of(operand) is not None for operand in node.inputs
            ):
                _pad_constants(node, channels, missing, _ARITHMETIC[node.op_type], names, where)
                pending.append(node.outputs[0])
            else:
                raise _refused(f"{node.op_type} {node.name} reads it", where)


def _channels(value: ir.Value) -> int:
    dim = value.shape[1] if value.shape is not None else None
    if not isinstance(dim, int):
        raise ValueError(f"{value.name} has no static channels")
    return dim


def _pad_weight(node: ir.Node, missing: int, names: edit.Names, where: str) -> None:
    """Zeros along the input channels of a convolution's weight, behind DequantizeLinear where it is quantized."""
    holder, weight = node, node.inputs[1]
    producer = edit.maker_of(weight)
    if edit.is_op(producer, "DequantizeLinear"):
        holder, weight = _own_copy(node, producer, names), producer.inputs[0]
    array = edit.constant_of(weight)
    if array is None or node.graph is None:
        raise _refused(f"the weights of Conv {node.name} are not constants", where)
    zero = np.zeros((), array.dtype)
    if holder is not node:
        point = edit.constant_of(edit.input_of(holder, 2))
        scale = edit.constant_of(edit.input_of(holder, 1))
        if scale is None or (scale.size > 1 and edit.int_attribute(holder, "axis", 1) % array.ndim != 0):
            raise _refused(f"the weights of Conv {node.name} have scales per input channel", where)
        if point is not None and point.astype(np.float64).any():
            raise _refused(f"the weights of Conv {node.name} have a zero point", where)
    filled = np.concatenate([array, np.broadcast_to(zero, (array.shape[0], missing, *array.shape[2:]))], axis=1)
    made = edit.add_initializer(node.graph, names.value(f"{node.outputs[0].name}_weight"), filled.astype(array.dtype))
    holder.replace_input_with(0 if holder is not node else 1, made)
    if holder is not node:
        holder.outputs[0].shape = ir.Shape(filled.shape)


def _own_copy(node: ir.Node, dequantize: ir.Node, names: edit.Names) -> ir.Node:
    """The DequantizeLinear of a weight, for ``node`` alone."""
    value = dequantize.outputs[0]
    if len(value.uses()) == 1 or node.graph is None:
        return dequantize
    label = names.value(f"{value.name}_wide")
    copy = ir.node(
        "DequantizeLinear", list(dequantize.inputs), attributes=dict(dequantize.attributes), name=names.node(label)
    )
    copy.outputs[0].name, copy.outputs[0].type = label, value.type
    node.graph.insert_before(node, copy)
    node.replace_input_with(1, copy.outputs[0])
    return copy


def _pad_constants(node: ir.Node, channels: int, missing: int, fill: float, names: edit.Names, where: str) -> None:
    """Give the constants of ``node`` an entry for each new channel; those that hold one number stay."""
    for index, value in enumerate(node.inputs):
        array = edit.constant_of(value)
        if array is None or array.size == 1 or node.graph is None:
            continue
        axis = 0 if node.op_type in _PLAIN else array.ndim - 3
        if axis < 0 or array.shape[axis] not in (1, channels):
            raise _refused(f"a constant of {node.op_type} {node.name} is not one per channel", where)
        if array.shape[axis] == channels:
            more = np.full((*array.shape[:axis], missing, *array.shape[axis + 1 :]), fill if index < 2 else 0)
            filled = np.concatenate([array, more.astype(array.dtype)], axis=axis)
            name = names.value(f"{node.outputs[0].name}_constant")
            node.replace_input_with(index, edit.add_initializer(node.graph, name, filled))


def _refused(reason: str, where: str) -> UsageError:
    return UsageError(
        f"The channels of the input cannot be filled up: {reason}",
        where=where,
        remedy="only convolutions ignore channels of zeros; write hwc, which keeps the channels",
    )
