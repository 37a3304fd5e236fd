"""States: what a network takes and hands on to its own next step, such as the caches of a decoder's keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.input_values import input_values

_GROWS = ("Concat", "TensorScatter")
"""What puts new entries into a cache, which is its first operand."""

_PASSES = ("Cast", "Identity")

_LEAST_RANK = 3


@dataclass(frozen=True)
class State:
    """An input and the output that is this input in the next step.

    Attributes:
        input: The network's input.
        output: The network's output; of the same rank and type, and along all axes but one of the same size.
        node: What puts the new entries in; None where the input is handed on as it is.
        axis: The axis along which entries are put in; None without a ``node``.
    """

    input: ir.Value
    output: ir.Value
    node: ir.Node | None
    axis: int | None

    @property
    def in_place(self) -> bool:
        """Whether input and output have the same size, so that a compiler keeps both in the same memory."""
        return self.node is None or self.node.op_type == "TensorScatter"


def find_states(model: ir.Model) -> tuple[State, ...]:
    """The states of a network: floating-point inputs of three axes and more that a Concat or a TensorScatter fills up
    to an output, which the network itself reads.

    Casts may stand between. Where a network has such a state, inputs that it hands on as they are are states too. An
    input that is two outputs is none, nor are two inputs that are one output.

    Example:
        ``past_key`` of ``present_key = Concat(past_key, key)`` is the input of a state, ``present_key`` the output.
    """
    found = [state for value in model.graph.inputs for state in _states_of(value)]
    if all(state.node is None for state in found):
        return ()
    inputs, outputs = [state.input for state in found], [state.output for state in found]
    return tuple(s for s in found if inputs.count(s.input) == 1 and outputs.count(s.output) == 1)


def find_read_caches(model: ir.Model, states: Sequence[State]) -> tuple[ir.Value, ...]:
    """Inputs that are caches and no states: a decoder only reads the keys and values of its encoder.

    They look as a cache that is filled up does: of its type and rank, and of its size on every axis that has one size,
    that along which it is filled up apart.
    """
    own, growing = {state.input for state in states}, {state.node for state in states}
    axes = {state.axis for state in states if state.axis is not None}
    known = {_form(state.input, axis) for state in states for axis in axes if state.axis == axis}

    def is_new(value: ir.Value) -> bool:
        return any(node in growing for behind in _behind(value) for node, _ in behind.uses())

    others = [value for value in model.graph.inputs if value not in own and not is_new(value)]
    forms = {form for form in known if any(isinstance(size, int) for size in form[2:])}
    return tuple(value for value in others if any(_form(value, axis) in forms for axis in axes))


def tokens_and_scores(model: ir.Model) -> Iterator[tuple[str, str]]:
    """The names of the input of tokens ``[batch, tokens]`` and of each output that holds a score for each word of their
    vocabulary, ``[batch, tokens, vocabulary]`` or ``[batch, vocabulary]``."""
    states = {state.output.name for state in find_states(model)}
    values = input_values(model)
    sizes = {
        values[str(value.name)].size: str(value.name)
        for value in reversed(model.graph.inputs)
        if str(value.name) in values and values[str(value.name)].kind == "ids" and len(value.shape or ()) == 2
    }
    for value in model.graph.outputs:
        dims = edit.dims_of_value(value)
        if value.name not in states and dims and len(dims) in (2, 3) and dims[-1] and dims[-1] in sizes:
            yield sizes[dims[-1]], str(value.name)


def _form(value: ir.Value, axis: int) -> tuple[object, ...]:
    """Type, rank and sizes, without that of one axis and those that are open."""
    dims = enumerate(edit.dims_of_value(value) or ())
    return (axis, value.dtype, *(dim if isinstance(dim, int) and at != axis else None for at, dim in dims))


def _states_of(value: ir.Value) -> Iterator[State]:
    if value.dtype is None or not value.dtype.is_floating_point() or len(value.shape or ()) < _LEAST_RANK:
        return
    for behind in _behind(value):
        if behind is not value and behind.is_graph_output() and behind.dtype == value.dtype:
            yield State(value, behind, None, None)
        for node, index in behind.uses():
            if index != 0 or not edit.is_op(node, *_GROWS):
                continue
            axis = edit.int_attribute(node, "axis", -2) % len(value.shape or ())
            grown = list(_behind(node.outputs[0]))
            is_read = any(not edit.is_op(reader, *_PASSES) for item in grown for reader, _ in item.uses())
            outputs = (item for item in grown if item.is_graph_output() and is_read)
            yield from (State(value, output, node, axis) for output in outputs if _fits(value, output, axis))


def _behind(value: ir.Value) -> Iterator[ir.Value]:
    """A value, and what it is in another type."""
    yield value
    for node, _ in value.uses():
        if edit.is_op(node, *_PASSES):
            yield from _behind(node.outputs[0])


def _fits(value: ir.Value, output: ir.Value, axis: int) -> bool:
    """Whether an output can be fed as an input: sizes that are known agree, that along ``axis`` apart."""
    before, after = edit.dims_of_value(value) or (), edit.dims_of_value(output)
    if after is None or len(before) != len(after) or value.dtype != output.dtype:
        return False
    pairs = enumerate(zip(before, after, strict=True))
    return all(at == axis or a == b or not (isinstance(a, int) and isinstance(b, int)) for at, (a, b) in pairs)
