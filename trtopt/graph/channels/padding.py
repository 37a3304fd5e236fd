"""Adds channels of zeros to a group: its producers, its consumers and everything between."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from trtopt.graph.channels.groups import ChannelGroup
from trtopt.graph.channels.links import Count, Dim, Param, size_of
from trtopt.graph.edit import Names, add_initializer, constant_of, input_of, int_attribute, tag


def padded_size(group: ChannelGroup, extra: int, dim: Dim, number: int) -> int:
    """Where element ``number`` of a dim begins once each appearance of the group in it has ``extra`` more channels."""
    return number + sum(extra * span.each for span in group.spans_of(dim) if span.stop <= number)


def pad_group(model: ir.Model, group: ChannelGroup, extra: int, recipe: str) -> None:
    """Add ``extra`` channels to a group that has no reason against it.

    Every constant that changes is a new one, named after the output of the node that reads it.

    Args:
        model: Edited.
        group: A group of this model.
        extra: Channels to add at the end of the group.
        recipe: Who asks: nodes that change are marked with it.
    """
    names = Names(model)
    by_input: dict[tuple[ir.Node, int], list[Param]] = {}
    for param in group.params:
        by_input.setdefault((param.node, param.index), []).append(param)
    done: dict[tuple[object, ...], ir.Value] = {}
    for (node, index), params in by_input.items():
        _pad_constant(node, index, params, (group, extra), names, done)
    by_place: dict[tuple[ir.Node, int | str], list[Count]] = {}
    for count in group.counts:
        by_place.setdefault((count.node, count.place), []).append(count)
    for (node, place), counts in by_place.items():
        numbers = {each.position: padded_size(group, extra, each.dim, each.number) for each in counts}
        _write_numbers(node, place, numbers, (names, model.opset_imports[""]))
    changed = dict.fromkeys([*(param.node for param in group.params), *(count.node for count in group.counts)])
    for node in changed:
        tag(node, recipe)
    for dim in dict.fromkeys(span.dim for span in group.spans):
        shape, size = dim.value.shape, size_of(dim)
        if shape is not None and size is not None:
            new = list(shape)
            new[dim.axis] = padded_size(group, extra, dim, size)
            dim.value.shape = ir.Shape(new)


def _pad_constant(
    node: ir.Node,
    index: int,
    params: list[Param],
    padding: tuple[ChannelGroup, int],
    names: Names,
    done: dict[tuple[object, ...], ir.Value],
) -> None:
    """Replace one constant input; nodes that share it and need the same share the new one too."""
    old = node.inputs[index]
    array = constant_of(old)
    if array is None or old is None or node.graph is None:
        raise ValueError(f"input {index} of {node.name} is not a constant")
    sources = [(param.axis, _sources(*padding, param), param.fill) for param in params]
    key = (old, node.graph, *((axis, source.tobytes(), fill) for axis, source, fill in sources))
    if key not in done:
        for axis, source, fill in sources:
            array = _taken(array, axis, source, fill)
        base = f"{node.outputs[0].name}_{old.name}_padded"
        done[key] = add_initializer(node.graph, names.value(base), array)
    node.replace_input_with(index, done[key])


def _sources(group: ChannelGroup, extra: int, param: Param) -> np.ndarray:
    """For each entry of the new constant the entry it was, -1 for new ones."""
    total = (size_of(param.dim) or 0) // param.blocks
    parts, start = [], 0
    for span in group.spans_of(param.dim):
        if span.stop <= total:
            parts += [np.arange(start, span.stop), np.full(extra * span.each, -1)]
            start = span.stop
    return np.concatenate([*parts, np.arange(start, total)])


def _taken(array: np.ndarray, axis: int, source: np.ndarray, fill: float) -> np.ndarray:
    taken: np.ndarray = np.take(array, np.maximum(source, 0), axis=axis)
    where = [slice(None)] * array.ndim
    where[axis] = source < 0  # type: ignore[call-overload]
    taken[tuple(where)] = fill
    return taken


def _write_numbers(node: ir.Node, place: int | str, numbers: dict[int, int], model: tuple[Names, int]) -> None:
    """Put new sizes into an attribute or a constant input of a node; a Split without sizes gets them."""
    names, opset = model
    if isinstance(place, str):
        attribute = node.attributes[place]
        if attribute.type == ir.AttributeType.INT:
            node.attributes[place] = ir.AttrInt64(place, numbers[-1])
        else:
            listed = [numbers.get(position, int(number)) for position, number in enumerate(attribute.as_ints())]
            node.attributes[place] = ir.AttrInt64s(place, listed)
        return
    array = constant_of(input_of(node, place))
    if array is None:
        axis = int_attribute(node, "axis", 0)
        array = np.array([size_of(Dim(out, axis % len(out.shape or ()))) for out in node.outputs], np.int64)
        node.attributes.pop("num_outputs", None)
    array = array.copy()
    for position, number in numbers.items():
        array[position] = number
    if node.op_type == "Split" and opset < 13:
        node.attributes["split"] = ir.AttrInt64s("split", [int(number) for number in array])
        return
    if node.graph is None:
        raise ValueError(f"node {node.name} is in no graph")
    if len(node.inputs) <= place:
        node.resize_inputs(place + 1)
    node.replace_input_with(place, add_initializer(node.graph, names.value(f"{node.outputs[0].name}_sizes"), array))
