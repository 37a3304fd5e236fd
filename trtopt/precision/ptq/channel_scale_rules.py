"""What each operator says about the scales of the channels it reads and makes (see ``channel_scales``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from trtopt.graph.edit import axes_of, constant_of, input_of, int_attribute, maker_of, static_shape, string_attribute
from trtopt.graph.views import is_move, is_pass, merged_rows, moved, one_per
from trtopt.precision.plan import WEIGHTED
from trtopt.precision.ptq.channel_scales import ChannelScales, Tracker, constant_dims

_LARGEST_CONSTANT = 1e30
"""A constant beyond it stands for infinity (a mask): scaling it could overflow."""


def channel_scales(model: ir.Model, *, alike: bool = False) -> ChannelScales:
    """The scales that ``model`` leaves free.

    Args:
        model: A widened model, nodes named, shapes inferred. It is not changed; what is returned names its nodes.
        alike: All channels of a value have one scale, which the bounds of a Clip take up too.
    """
    first = _walked(model, Tracker(model, alike=alike))
    # What fixes a value may come after nodes that took it for free, and tied others to it: they are asked again.
    second = _walked(model, Tracker(model, first.fixed(), alike=alike))
    found = second.finish()
    reasons = first.finish()
    return replace(
        found,
        why_not_read={name: reasons.why_not_read.get(name, why) for name, why in found.why_not_read.items()},
        why_not_written={name: reasons.why_not_written.get(name, why) for name, why in found.why_not_written.items()},
    )


def _walked(model: ir.Model, tracker: Tracker) -> Tracker:
    for node in model.graph:
        rule = _RULES.get(node.op_type, _unknown) if node.domain == "" else _unknown
        if is_move(node) or is_pass(node):
            rule = _move
        rule(tracker, node)
    return tracker


def _unknown(tracker: Tracker, node: ir.Node) -> None:
    tracker.fix_inputs(node, f"{node.name} ({node.op_type}) does not commute with a scale")


def _nothing(tracker: Tracker, node: ir.Node) -> None:
    """Reads no values."""


def _why_not_weight(node: ir.Node) -> str:
    """Why the constants of a product cannot take up scales."""
    weight = node.inputs[1]
    if weight is None or constant_dims(node, 1) is None:
        return f"the weight of {node.name} is no constant"
    if len(weight.uses()) > 1 or weight.is_graph_output():
        return f"the weight of {node.name} is shared"
    if input_of(node, 2) is not None and constant_dims(node, 2) is None:
        return f"the bias of {node.name} is no constant"
    return ""


def _conv(tracker: Tracker, node: ir.Node) -> None:
    reason, dims, data = _why_not_weight(node), constant_dims(node, 1), node.inputs[0]
    if reason or dims is None or data is None:
        tracker.fix_inputs(node, reason)
        return
    groups, column = int_attribute(node, "group", 1), (1,) * (len(dims) - 2)
    transposed = node.op_type == "ConvTranspose"
    channels = dims[0] if transposed else dims[1] * groups
    outputs = dims[1] * groups if transposed else dims[0]
    reads = tracker.along(data, 1, channels, f"{node.name} reads channels that are not on one axis")
    writes = tracker.fresh(outputs)
    if transposed:  # [C, K / groups, ...]
        makes = writes.reshape(groups, -1).repeat(dims[0] // groups, axis=0).reshape(*dims[:2], *column)
        sums = reads.reshape(-1, 1, *column)
    else:  # [K, C / groups, ...]
        makes = writes.reshape(-1, 1, *column)
        sums = reads.reshape(groups, -1).repeat(dims[0] // groups, axis=0).reshape(*dims[:2], *column)
    tracker.constant(node, 1, makes, sums)
    if input_of(node, 2) is not None:
        tracker.constant(node, 2, writes)
    tracker.product(node, reads, writes)
    tracker.set(node.outputs[0], writes.reshape(1, -1, *column))


def _gemm(tracker: Tracker, node: ir.Node) -> None:
    reason, dims, data = _why_not_weight(node), constant_dims(node, 1), node.inputs[0]
    reason = f"{node.name} reads it transposed" if int_attribute(node, "transA", 0) else reason
    if reason or dims is None or data is None:
        tracker.fix_inputs(node, reason)
        return
    transposed = int_attribute(node, "transB", 0)
    reads = tracker.along(data, 1, dims[transposed], f"{node.name} reads channels that are not on one axis")
    writes = tracker.fresh(dims[1 - transposed])
    rows, columns = (writes[:, None], reads[None]) if transposed else (writes[None], reads[:, None])
    tracker.constant(node, 1, rows, columns)
    if input_of(node, 2) is not None:
        tracker.constant(node, 2, writes)
    tracker.product(node, reads, writes)
    tracker.set(node.outputs[0], writes[None])


def _matmul(tracker: Tracker, node: ir.Node) -> None:
    left, right = node.inputs
    dims = constant_dims(node, 1)
    if left is None or right is None or constant_of(left) is not None:
        _unknown(tracker, node)
    elif constant_of(right) is None:
        _attention_product(tracker, node, left, right)
    elif dims is None or len(dims) != 2 or _why_not_weight(node) or left.shape is None or len(left.shape) < 2:
        tracker.fix_inputs(node, _why_not_weight(node) or f"{node.name} is no product with one matrix of weights")
    else:
        reads = tracker.along(left, -1, dims[0], f"{node.name} reads channels that are not on one axis")
        writes = tracker.fresh(dims[1])
        tracker.constant(node, 1, writes[None], reads[:, None])
        tracker.product(node, reads, writes)
        tracker.set(node.outputs[0], writes.reshape((1,) * (len(left.shape) - 1) + (-1,)))


def _attention_product(tracker: Tracker, node: ir.Node, left: ir.Value, right: ir.Value) -> None:
    """Probabilities times V: each channel of V becomes a channel of the result."""
    tracker.fix(tracker.of(left), f"{node.name} multiplies it with another activation")
    scales, rank = tracker.of(right), len(node.outputs[0].shape or ())
    if scales.ndim < 2 or scales.ndim > rank or scales.shape[-2] != 1:
        tracker.fix(scales, f"{node.name} sums over its channels")
        return
    tracker.set(node.outputs[0], scales.reshape((1,) * (rank - scales.ndim) + scales.shape))


def _same(tracker: Tracker, node: ir.Node) -> None:
    tracker.set(node.outputs[0], tracker.of(node.inputs[0]))


def _clip(tracker: Tracker, node: ir.Node) -> None:
    """A lower bound of zero is a ReLU."""
    low, old = constant_of(input_of(node, 1)), "min" in node.attributes or "max" in node.attributes
    zero = input_of(node, 1) is None or (low is not None and not low.any())
    if not old and zero and input_of(node, 2) is None:
        _same(tracker, node)
        return
    bounds = [index for index in (1, 2) if input_of(node, index) is not None]
    if tracker.alike and not old and all(constant_dims(node, index) is not None for index in bounds):
        for index in bounds:
            tracker.constant(node, index, tracker.of(node.inputs[0]))
        _same(tracker, node)
        return
    what = "a bound of one number, and one per channel would not fuse into the kernel in front"
    tracker.fix_inputs(node, f"{node.name} (Clip) has {what}")


def _prelu(tracker: Tracker, node: ir.Node) -> None:
    tracker.fix(tracker.of(node.inputs[1]), f"{node.name} takes it as slope")
    _same(tracker, node)


def _sum(tracker: Tracker, node: ir.Node) -> None:
    """Add, Sub, Sum, Mean, Max, Min, Where: everything is scaled alike; constants along with it."""
    first = 1 if node.op_type == "Where" else 0
    if first:
        tracker.fix(tracker.of(node.inputs[0]), f"{node.name} takes it as condition")
    reason = f"{node.name} ({node.op_type}) joins it with what cannot be scaled"
    scales: np.ndarray | None = None
    constants = []
    for index, value in enumerate(node.inputs[first:], first):
        array = constant_of(value)
        if array is None:
            own = tracker.of(value)
            scales = own if scales is None else tracker.tie(scales, own, reason)
        elif array.any():
            if float(np.abs(array).max()) > _LARGEST_CONSTANT:
                tracker.fix_inputs(node, f"{node.name} holds a number as large as infinity")
            constants.append(index)
    if scales is None or not scales.any():
        return
    rank = len(node.outputs[0].shape or ())
    if scales.ndim > rank:
        tracker.fix(scales, f"the shape of {node.outputs[0].name} is not known")
        return
    scales = scales.reshape((1,) * (rank - scales.ndim) + scales.shape)
    for index in constants:
        tracker.constant(node, index, scales)
    tracker.set(node.outputs[0], scales)


def _mul(tracker: Tracker, node: ir.Node) -> None:
    """One operand carries the scales: constants do not matter, another activation is fixed."""
    rank = len(node.outputs[0].shape or ())
    activations = [index for index, value in enumerate(node.inputs) if constant_of(value) is None]
    free = [index for index in activations if tracker.is_free(node.inputs[index])]
    if not free:
        _channel_factor(tracker, node, activations)
        return
    carrier = 0 if node.op_type == "Div" else next((i for i in free if _is_product(node.inputs[i])), free[0])
    for index in activations:
        if index != carrier:
            tracker.fix(tracker.of(node.inputs[index]), f"{node.name} multiplies another activation with it")
    scales = tracker.of(node.inputs[carrier])
    if scales.ndim > rank or node.inputs[0] is node.inputs[1]:
        tracker.fix(scales, f"{node.name} does not commute with a scale")
        return
    tracker.set(node.outputs[0], scales.reshape((1,) * (rank - scales.ndim) + scales.shape))


def _is_product(value: ir.Value | None) -> bool:
    """Whether a product, or its bias, makes ``value``."""
    node = maker_of(value)
    if node is not None and node.op_type == "Add":
        return any(_is_product(item) for item in node.inputs if item is not None and constant_of(item) is None)
    return node is not None and node.op_type in WEIGHTED


def _channel_factor(tracker: Tracker, node: ir.Node, activations: list[int]) -> None:
    """A constant per channel makes scales of its own: the last step of a normalization that is written out."""
    dims = constant_dims(node, 1 - activations[0]) if len(activations) == 1 and node.op_type == "Mul" else None
    rank = len(node.outputs[0].shape or ())
    if dims is None or max(dims, default=1) < 2 or sum(dim > 1 for dim in dims) != 1 or len(dims) > rank:
        return
    axis = next(axis for axis, dim in enumerate(dims) if dim > 1) - len(dims)
    writes = tracker.fresh(dims[axis])
    shape = [1] * rank
    shape[axis] = -1
    tracker.constant(node, 1 - activations[0], writes.reshape(shape))
    tracker.maker(node, writes)
    tracker.set(node.outputs[0], writes.reshape(shape))


def _norm(tracker: Tracker, node: ir.Node) -> None:
    """Normalizations: what comes in stays, or is scaled as a whole; the constants per channel behind may be scaled."""
    data, dims = node.inputs[0], constant_dims(node, 1)
    bias = input_of(node, 2)
    others = any(value.uses() or value.is_graph_output() for value in node.outputs[1:])
    if tracker.alike and not others:
        tracker.epsilon(node, tracker.of(data))
    else:
        tracker.fix_inputs(node, f"{node.name} ({node.op_type}) normalizes it")
    layer = node.op_type in ("LayerNormalization", "RMSNormalization")
    rank = len(data.shape or ()) if data is not None else 0
    axis = rank - 1 if layer else 1
    if dims is None or len(dims) != 1 or not rank or others or (bias is not None and constant_dims(node, 2) != dims):
        return
    if layer and int_attribute(node, "axis", -1) % rank != rank - 1:
        return
    size = data.shape[axis] if data is not None and data.shape is not None else None
    if size != dims[0]:
        return  # GroupNormalization before opset 21 has a factor per group
    writes = tracker.fresh(dims[0])
    tracker.constant(node, 1, writes)
    if bias is not None:
        tracker.constant(node, 2, writes)
    tracker.maker(node, writes)
    tracker.set(node.outputs[0], writes.reshape([-1 if index == axis else 1 for index in range(rank)]))


def _batch_norm(tracker: Tracker, node: ir.Node) -> None:
    """A factor and an offset per channel: scales before and behind it are free of each other."""
    data, dims = node.inputs[0], constant_dims(node, 1)
    others = any(value.uses() or value.is_graph_output() for value in node.outputs[1:])
    constant = all(constant_dims(node, index) == dims for index in (2, 3, 4))
    if data is None or dims is None or others or not constant or int_attribute(node, "training_mode", 0):
        _unknown(tracker, node)
        return
    reads = tracker.along(data, 1, dims[0], f"{node.name} reads channels that are not on one axis")
    writes = tracker.fresh(dims[0])
    tracker.constant(node, 1, writes, reads)
    tracker.constant(node, 2, writes)
    tracker.constant(node, 3, reads)  # the mean is that of what comes in
    tracker.maker(node, writes)
    tracker.set(node.outputs[0], writes.reshape([-1 if axis == 1 else 1 for axis in range(len(data.shape or ()))]))


def _keeps_axes(tracker: Tracker, node: ir.Node) -> None:
    """Pooling and Resize: scales pass where they differ only along axes that stay as they are."""
    data, out = node.inputs[0], node.outputs[0]
    scales, before, after = tracker.of(data), tracker.sizes.of(data), tracker.sizes.of(out)
    varied = [axis for axis, size in enumerate(scales.shape) if size > 1]
    kept = before is not None and after is not None and all(before[a] == after[a] for a in varied)
    others = any(value.uses() or value.is_graph_output() for value in node.outputs[1:])
    crops = string_attribute(node, "coordinate_transformation_mode", "") == "tf_crop_and_resize"
    if not kept or others or crops:
        _unknown(tracker, node)
        return
    tracker.set(out, scales)


def _pad(tracker: Tracker, node: ir.Node) -> None:
    """Zeros may have any scale: padded channels get scales of their own."""
    scales, pads, value = tracker.of(node.inputs[0]), constant_of(input_of(node, 1)), input_of(node, 2)
    fill = constant_of(value)
    constant = string_attribute(node, "mode", "constant") == "constant"
    zeros = constant and (value is None or (fill is not None and not fill.any()))
    varied = [axis for axis, size in enumerate(scales.shape) if size > 1]
    if pads is None or len(pads) != 2 * scales.ndim or not (zeros or not constant) or len(varied) > 1:
        _unknown(tracker, node)
        return
    for axis in varied:
        around = int(pads[axis]), int(pads[axis + scales.ndim])
        if any(around) and (min(around) < 0 or not zeros):
            _unknown(tracker, node)
            return
        ends = [tracker.fresh(count).reshape([-1 if a == axis else 1 for a in range(scales.ndim)]) for count in around]
        scales = np.concatenate([ends[0], scales, ends[1]], axis=axis)
    tracker.set(node.outputs[0], scales)


def _pool(tracker: Tracker, node: ir.Node) -> None:
    if any(size > 1 for size in tracker.of(node.inputs[0]).shape[2:]):
        tracker.fix_inputs(node, f"{node.name} pools over channels")
    _keeps_axes(tracker, node)


def _reduce(tracker: Tracker, node: ir.Node) -> None:
    """Reductions over axes along which the scales are alike."""
    data = node.inputs[0]
    scales = tracker.of(data)
    axes = axes_of(node)
    if not axes or not scales.ndim or any(scales.shape[axis] > 1 for axis in axes):
        _unknown(tracker, node)
        return
    keep = int_attribute(node, "keepdims", 1)
    dropped = {axis % scales.ndim for axis in axes}
    shape = [size for axis, size in enumerate(scales.shape) if keep or axis not in dropped]
    tracker.set(node.outputs[0], scales.reshape(shape))


def _concat(tracker: Tracker, node: ir.Node) -> None:
    out = node.outputs[0]
    rank = len(out.shape or ())
    axis = int_attribute(node, "axis", 0) % max(rank, 1)
    parts = [tracker.of(value) for value in node.inputs]
    lengths = [_size_along(value, axis) for value in node.inputs]
    if None in lengths or any(part.ndim != rank for part in parts):
        _unknown(tracker, node)
        return
    others = np.broadcast_shapes(*((*part.shape[:axis], 1, *part.shape[axis + 1 :]) for part in parts))
    full = [
        np.broadcast_to(part, (*others[:axis], length or 0, *others[axis + 1 :]))
        for part, length in zip(parts, lengths, strict=True)
    ]
    tracker.set(out, one_per(np.concatenate(full, axis=axis)))


def _size_along(value: ir.Value | None, axis: int) -> int | None:
    """The size of one axis; None where it is not a number."""
    if value is None or value.shape is None or axis >= len(value.shape):
        return None
    size = value.shape[axis]
    return size if isinstance(size, int) else None


def _move(tracker: Tracker, node: ir.Node) -> None:
    """Operators that move elements."""
    data = node.inputs[0]
    scales, shape = tracker.of(data), tracker.sizes.of(data)
    if not scales.any():
        return
    for value in node.inputs[1:]:
        tracker.fix(tracker.of(value), f"{node.name} reads it as an index")
    if tracker.alike:
        for output in node.outputs:
            tracker.set(output, scales.reshape(-1)[:1].reshape((1,) * len(output.shape or ())))
        return
    fits = shape is not None and len(shape) == scales.ndim
    if shape is None or not fits or any(own not in (1, size) for own, size in zip(scales.shape, shape, strict=True)):
        tracker.fix(scales, f"the shape around {node.name} is not known")
        return
    full = np.broadcast_to(scales, shape)
    for output in node.outputs:
        array = moved(node, output, full, tracker.sizes)
        if array is None and node.op_type == "Reshape" and static_shape(output) is None:
            width = _row_length(output)
            array = merged_rows(output, full, width, tracker.sizes) if width else None
        if array is None:
            tracker.fix(scales, f"{node.name} ({node.op_type}) moves elements in a way that is not followed")
        else:
            tracker.set(output, one_per(array))


def _row_length(value: ir.Value) -> int | None:
    """The size of the last axis, from the value itself or from the weight that a product reads it with."""
    known = _size_along(value, len(value.shape or ()) - 1)
    for user, index in value.uses():
        dims = constant_dims(user, 1) if user.op_type == "MatMul" and index == 0 else None
        known = dims[0] if known is None and dims is not None and len(dims) == 2 else known
    return known


_Rule = Callable[[Tracker, ir.Node], None]

_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("Conv", "ConvTranspose"), _conv),
    "Gemm": _gemm,
    "MatMul": _matmul,
    **dict.fromkeys(("Relu", "LeakyRelu", "Abs", "Neg"), _same),
    "Clip": _clip,
    "PRelu": _prelu,
    **dict.fromkeys(("Add", "Sub", "Sum", "Mean", "Max", "Min", "Where"), _sum),
    **dict.fromkeys(("Mul", "Div"), _mul),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization", "InstanceNormalization", "GroupNormalization"), _norm),
    "BatchNormalization": _batch_norm,
    **dict.fromkeys(("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"), _pool),
    "Resize": _keeps_axes,
    "Pad": _pad,
    **dict.fromkeys(("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2"), _reduce),
    "Concat": _concat,
    **dict.fromkeys(("Shape", "Size", "Constant"), _nothing),
}
