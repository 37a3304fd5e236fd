"""Conversion of operators to a current opset, node by node, in place.

ONNX's own version converter serializes the model with its weights, and in several operators it changes results or
types: ``Resize`` 10 gets the coordinate mode of opset 11, ``Hardmax`` before 13 keeps its axis, ``Clip`` and ``Pad``
of FP16 get FP32 bounds, ``Scan`` 8 loses its batch axis. Here each operator whose meaning or form changed between
opset 7 and :data:`TARGET` has a rule; all others only gained types or attributes with the old behaviour as default.
The source of each rule is the operator changelog of ONNX (docs/Changelog.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import onnx_ir as ir

from trtopt.errors import InvalidModelError
from trtopt.graph import edit

TARGET = 21
"""Opset that older models are converted to; TensorRT 10.3 and later and TensorRT for RTX read it."""

_REDUCE_18 = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")


class _UnsupportedError(ValueError):
    """The node has no equivalent in the target opset; the message says why."""


def convert(graph: ir.Graph, source: int, target: int) -> int:
    """Convert every node of the default domain in ``graph`` and its nested graphs, in place.

    Shapes and dtypes of values help where the old meaning depends on them (``Softmax``, ``GroupNormalization``), so
    infer them before. ``opset_imports`` is left to the caller.

    Args:
        source: Its opset, 7 or later.
        target: The opset wanted; nodes are left alone when it is not later than ``source``.

    Returns:
        The number of nodes that changed.

    Raises:
        InvalidModelError: A node has no equivalent; the message names it.
    """
    changed = 0
    for node in list(edit.all_nodes(graph)):
        if node.domain != "":
            continue
        for before, rule in _RULES.get(node.op_type, ()):
            if source < before <= target:
                try:
                    rule(node)
                except _UnsupportedError as error:
                    raise InvalidModelError(
                        f"{node.op_type} of opset {source} cannot be converted to opset {target}: {error}",
                        where=f"node {node.name or node.outputs[0].name}",
                        remedy="export the model again with opset 13 or later",
                    ) from error
                changed += 1
                if node.graph is None:
                    break
    return changed


def _constant(node: ir.Node, label: str, array: np.ndarray) -> ir.Value:
    """A ``Constant`` node before ``node``: functions have no initializers, and folding turns these into them."""
    base = node.outputs[0].name
    constant = ir.node("Constant", [], attributes={"value": ir.tensor(array)}, name=f"{base}_{label}")
    constant.outputs[0].name = f"{base}_{label}"
    constant.outputs[0].type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
    constant.outputs[0].shape = ir.Shape(array.shape)
    edit.graph_of(node).insert_before(node, constant)
    return constant.outputs[0]


def _set_input(node: ir.Node, index: int, value: ir.Value | None) -> None:
    if len(node.inputs) <= index:
        node.resize_inputs(index + 1)
    node.replace_input_with(index, value)


def _ints_to_input(node: ir.Node, attribute: str, index: int) -> None:
    """An attribute that became an int64 input."""
    ints = edit.ints_attribute(node, attribute)
    if ints is not None:
        del node.attributes[attribute]
        _set_input(node, index, _constant(node, attribute, np.asarray(ints, dtype=np.int64)))


def _numpy_dtype(node: ir.Node) -> np.dtype:
    value = edit.input_of(node, 0)
    dtype = None if value is None else value.dtype
    if dtype is None:
        raise _UnsupportedError("the type of its input is not known")
    return np.dtype(dtype.numpy())


def _split_outputs(node: ir.Node) -> None:
    if edit.input_of(node, 1) is None:
        node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", len(node.outputs))


def _slice(node: ir.Node) -> None:
    for index, name in enumerate(("starts", "ends", "axes"), start=1):
        _ints_to_input(node, name, index)


def _to_input(node: ir.Node, name: str, index: int, default: np.ndarray) -> None:
    """An attribute that became an input, of the type and shape of its default."""
    attribute = node.attributes.pop(name, None)
    value = default if attribute is None else np.full_like(default, attribute.value)
    _set_input(node, index, _constant(node, name, value))


def _clip(node: ir.Node) -> None:
    """Bounds became inputs of the data's own type (opset 11)."""
    dtype = _numpy_dtype(node)
    limits = np.finfo(dtype)
    for index, name in enumerate(("min", "max"), start=1):
        if name in node.attributes:
            bound = np.clip(node.attributes[name].as_float(), float(limits.min), float(limits.max))
            del node.attributes[name]
            _set_input(node, index, _constant(node, name, np.asarray(bound, dtype=dtype)))


def _pad(node: ir.Node) -> None:
    """Pads and value became inputs, the value of the data's own type (opset 11)."""
    _ints_to_input(node, "pads", 1)
    value = edit.float_attribute(node, "value", 0.0)
    node.attributes.pop("value", None)
    if value != 0.0:
        _set_input(node, 2, _constant(node, "value", np.asarray(value, dtype=_numpy_dtype(node))))


def _batch_norm_9(node: ir.Node) -> None:
    if edit.int_attribute(node, "spatial", 1) != 1:
        raise _UnsupportedError("statistics per element (spatial=0) no longer exist")
    node.attributes.pop("spatial", None)


def _batch_norm_14(node: ir.Node) -> None:
    """Before opset 14, a node with more than one output was in training mode."""
    if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        raise _UnsupportedError("it is in training mode (more than one output)")
    if len(node.outputs) > 1:
        raise _UnsupportedError(
            "it was exported in training mode (more than one output): call model.eval() before export"
        )


def _softmax(node: ir.Node) -> None:
    """Before opset 13 the input was flattened to 2-D at ``axis``, 1 by default; now one axis is normalized.

    Both mean the same when at most one dimension from ``axis`` on is larger than 1; else, and where the rank is not
    known, the flattening is written out.
    """
    value = edit.input_of(node, 0)
    axis = edit.int_attribute(node, "axis", 1)
    if value is None:
        raise _UnsupportedError("it has no input")
    if value.shape is None:
        _flattened(node, value, axis)
        return
    rank = len(value.shape)
    axis = axis + rank if axis < 0 else axis
    if rank == 0 or axis >= rank:
        raise _UnsupportedError(f"axis {axis} is out of range for rank {rank}")
    wide = [index for index in range(axis, rank) if value.shape[index] != 1]
    if len(wide) <= 1:
        node.attributes["axis"] = ir.AttrInt64("axis", wide[0] if wide else axis)
        return
    _flattened(node, value, axis)


def _flattened(node: ir.Node, value: ir.Value, axis: int) -> None:
    """x -> Flatten -> node(axis=-1) -> Reshape to the shape of x."""
    output = node.outputs[0]
    name = str(output.name)
    flat = ir.node("Flatten", [value], attributes={"axis": axis}, name=f"{name}_flatten")
    shape = ir.node("Shape", [value], name=f"{name}_shape")
    core = ir.node(node.op_type, [flat.outputs[0]], attributes={"axis": -1}, name=node.name)
    back = ir.node("Reshape", [core.outputs[0], shape.outputs[0]], name=f"{name}_reshape")
    for new, label in ((flat, "flat"), (shape, "shape"), (core, "normalized")):
        new.outputs[0].name = f"{name}_{label}"
    _replace(node, [flat, shape, core, back])


def _replace(node: ir.Node, nodes: Sequence[ir.Node]) -> None:
    """Put ``nodes`` in place of a node with one output; the last one's output takes over its name and type."""
    graph, old, new = edit.graph_of(node), node.outputs[0], nodes[-1].outputs[0]
    new.name, new.type, new.shape = old.name, old.type, old.shape
    graph.insert_before(node, list(nodes))
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _to_resize(node: ir.Node) -> None:
    """``Upsample`` 7 and 9, and ``Resize`` 10, are ``Resize`` with asymmetric coordinates."""
    scales = edit.input_of(node, 1)
    if "scales" in node.attributes:
        scales = _constant(node, "scales", np.asarray(node.attributes["scales"].as_floats(), dtype=np.float32))
    mode = edit.string_attribute(node, "mode", "nearest")
    attributes: dict[str, str] = {"mode": mode, "coordinate_transformation_mode": "asymmetric"}
    if mode == "nearest":
        attributes["nearest_mode"] = _nearest_mode(node, scales)
    new = ir.node("Resize", [node.inputs[0], None, scales], attributes=attributes, name=node.name)
    _replace(node, [new])


def _nearest_mode(node: ir.Node, scales: ir.Value | None) -> str:
    """Opset 10 did not say how to round; its test cases round down when enlarging and up when shrinking."""
    if edit.is_op(node, "Upsample"):
        return "floor"
    factors = edit.constant_of(scales)
    if factors is None:
        raise _UnsupportedError("its scales are not constant, and rounding depends on whether they shrink or enlarge")
    if np.all(factors >= 1):
        return "floor"
    if np.all(factors <= 1):
        return "ceil"
    raise _UnsupportedError("it enlarges one axis and shrinks another")


def _resize_13(node: ir.Node) -> None:
    """Empty tensors stood for inputs left out; one coordinate mode was dropped."""
    for index in (1, 2):
        value = edit.input_of(node, index)
        tensor = edit.constant_of(value)
        if tensor is not None and tensor.size == 0:
            node.replace_input_with(index, None)
    if edit.input_of(node, 3) is not None and edit.input_of(node, 2) is not None:
        raise _UnsupportedError("it has both scales and sizes")
    if edit.string_attribute(node, "coordinate_transformation_mode", "half_pixel") != "tf_half_pixel_for_nn":
        return
    # x = (i + 0.5) / scale rounded down is the half-pixel coordinate x - 0.5 rounded half up.
    is_nearest = edit.string_attribute(node, "mode", "nearest") == "nearest"
    if not is_nearest or edit.string_attribute(node, "nearest_mode", "round_prefer_floor") != "floor":
        raise _UnsupportedError("coordinate mode tf_half_pixel_for_nn no longer exists")
    node.attributes["coordinate_transformation_mode"] = ir.AttrString("coordinate_transformation_mode", "half_pixel")
    node.attributes["nearest_mode"] = ir.AttrString("nearest_mode", "round_prefer_ceil")


def _scatter(node: ir.Node) -> None:
    attributes = {"axis": edit.int_attribute(node, "axis", 0)}
    _replace(node, [ir.node("ScatterElements", list(node.inputs), attributes=attributes, name=node.name)])


def _scan(node: ir.Node) -> None:
    raise _UnsupportedError("it has a batch axis, which later versions do not")


def _roi_align(node: ir.Node) -> None:
    name = "coordinate_transformation_mode"
    node.attributes[name] = ir.AttrString(name, "output_half_pixel")


def _grid_sample(node: ir.Node) -> None:
    renamed = {"bilinear": "linear", "bicubic": "cubic"}
    mode = edit.string_attribute(node, "mode", "bilinear")
    node.attributes["mode"] = ir.AttrString("mode", renamed.get(mode, mode))


def _group_norm(node: ir.Node) -> None:
    """Scale and bias had one entry per group; since opset 21 they have one per channel."""
    value = edit.input_of(node, 0)
    channels = None if value is None or value.shape is None or len(value.shape) < 2 else value.shape[1]
    groups = edit.int_attribute(node, "num_groups", 0)
    if not isinstance(channels, int) or groups < 1 or channels % groups:
        raise _UnsupportedError("the number of channels is not known")
    for index, label in ((1, "scale"), (2, "bias")):
        array = edit.constant_of(edit.input_of(node, index))
        if array is None:
            raise _UnsupportedError(f"its {label} is not constant")
        _set_input(node, index, _constant(node, label, np.repeat(array, channels // groups)))


_AXES_TO_INPUT = partial(_ints_to_input, attribute="axes", index=1)
_RULES: dict[str, tuple[tuple[int, Callable[[ir.Node], None]], ...]] = {
    "BatchNormalization": ((9, _batch_norm_9), (14, _batch_norm_14)),
    "Clip": ((11, _clip),),
    "DFT": ((20, partial(_to_input, name="axis", index=2, default=np.asarray(1, np.int64))),),
    "Dropout": ((12, partial(_to_input, name="ratio", index=1, default=np.asarray(0.5, np.float32))),),
    "GridSample": ((20, _grid_sample),),
    "GroupNormalization": ((21, _group_norm),),
    "Hardmax": ((13, _softmax),),
    "LogSoftmax": ((13, _softmax),),
    "Pad": ((11, _pad),),
    "ReduceSum": ((13, _AXES_TO_INPUT),),
    "Resize": ((11, _to_resize), (13, _resize_13)),
    "RoiAlign": ((16, _roi_align),),
    "Scan": ((9, _scan),),
    "Scatter": ((11, _scatter),),
    "Slice": ((10, _slice),),
    "Softmax": ((13, _softmax),),
    "Split": ((13, partial(_ints_to_input, attribute="split", index=1)), (18, _split_outputs)),
    "Squeeze": ((13, _AXES_TO_INPUT),),
    "TopK": ((10, partial(_to_input, name="k", index=1, default=np.asarray([-1], np.int64))),),
    "Unsqueeze": ((13, _AXES_TO_INPUT),),
    "Upsample": ((10, _to_resize),),
    **{f"Reduce{name}": ((18, _AXES_TO_INPUT),) for name in _REDUCE_18},
}
"""By operator, in the order of versions: each brings a node of a version before its number to at least that."""
