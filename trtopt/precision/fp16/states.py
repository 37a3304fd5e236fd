"""The types of a network's states: what a step hands on to the next has the type that the network computes it in.

A cache that is FP32 outside and FP16 inside would be cast whole in every step, both ways; and the compilers' layer that
updates a cache in place takes a network input only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from trtopt.errors import InvalidModelError
from trtopt.graph import edit
from trtopt.graph.states import State, find_read_caches, find_states
from trtopt.precision.fp16.network_io import IoRequest, apply_io

_NARROW = {ir.DataType.FLOAT16: "fp16", ir.DataType.BFLOAT16: "bf16"}


def state_requests(model: ir.Model, named: Collection[str]) -> tuple[IoRequest, ...]:
    """What :func:`~trtopt.precision.fp16.network_io.apply_io` is asked for, so that no state is behind a cast, nor a
    cache that is only read.

    Args:
        model: A model whose precision is written.
        named: Inputs and outputs that keep their types, and with them the states that they belong to.

    Returns:
        Two requests for each FP32 state that the network computes in a 16-bit type, one for a cache that it reads.
    """
    states, found = find_states(model), list[IoRequest]()
    pairs: list[tuple[tuple[ir.Value, ...], ir.DataType | None]] = [
        ((state.input, state.output), _type_of_growth(state) or _type_read(state.input)) for state in states
    ]
    pairs += [((value,), _type_read(value)) for value in find_read_caches(model, states)]
    for values, inner in pairs:
        dtype = _NARROW.get(inner) if inner is not None else None
        if dtype and values[0].dtype is ir.DataType.FLOAT and not {value.name for value in values} & {*named}:
            found += [IoRequest(str(value.name), dtype, "chw") for value in values]
    return tuple(found)


def with_states(model: ir.Model, io: Sequence[IoRequest] = ()) -> ir.Model:
    """A model whose precision is written with the inputs and outputs of ``io``, and states in their inner type; itself
    where that changes nothing."""
    asked = (*io, *state_requests(model, {request.name for request in io}))
    return apply_io(model, asked) if asked else model


def fp32_outputs(model: ir.Model, io: Sequence[IoRequest] = ()) -> frozenset[str]:
    """Names of the outputs that leave a network in FP32: no states, and none that ``io`` gives another type."""
    others = {str(state.output.name) for state in find_states(model)}
    others |= {request.name for request in io if request.dtype != "fp32"}
    return frozenset(
        str(value.name)
        for value in model.graph.outputs
        if value.dtype is ir.DataType.FLOAT and str(value.name) not in others
    )


def _type_of_growth(state: State) -> ir.DataType | None:
    """The type in which new entries are put in; None for a state that is handed on."""
    return None if state.node is None else state.node.outputs[0].dtype


def _type_read(value: ir.Value) -> ir.DataType | None:
    """The type that readers cast a value to; None where they want several."""
    types = {node.outputs[0].dtype for node, _ in value.uses() if edit.is_op(node, "Cast")}
    return types.pop() if len(types) == 1 else None


def check_states(model: ir.Model) -> None:
    """Check that what is updated in place is a network input.

    Raises:
        InvalidModelError: A TensorScatter updates something else, which no compiler takes.
    """
    for node in edit.all_nodes(model.graph):
        cache = edit.input_of(node, 0) if edit.is_op(node, "TensorScatter") else None
        if cache is not None and not cache.is_graph_input():
            maker = cache.producer()
            raise InvalidModelError(
                f"TensorScatter updates {cache.name}, "
                + (f"which {maker.op_type} computes; " if maker is not None else "a constant; ")
                + "a cache has to be an input of the network, of the type it is computed in",
                where=f"node {node.name}",
                remedy="make the cache an input and an output of the model; leave out --io that gives it another type",
            )
