"""The types of a network's states: what a step hands on to the next has the type that the network computes it in.

A cache that is FP32 outside and FP16 inside would be cast whole in every step, both ways; and the compilers' layer that
updates a cache in place takes a network input only.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from trtopt.errors import InvalidModelError
from trtopt.graph import edit
from trtopt.graph.states import State, find_states
from trtopt.precision.fp16.network_io import IoRequest

_NARROW = {ir.DataType.FLOAT16: "fp16", ir.DataType.BFLOAT16: "bf16"}


def state_requests(model: ir.Model, named: Collection[str]) -> tuple[IoRequest, ...]:
    """What :func:`~trtopt.precision.fp16.network_io.apply_io` is asked for, so that no state is behind a cast.

    Args:
        model: A model whose precision is written.
        named: Inputs and outputs that keep their types, and with them the states that they belong to.

    Returns:
        Two requests for each FP32 state that the network computes in a 16-bit type.
    """
    found = []
    for state in find_states(model):
        dtype = _NARROW.get(_inner_type(state))
        if dtype and state.input.dtype is ir.DataType.FLOAT and not {state.input.name, state.output.name} & {*named}:
            found += [IoRequest(str(value.name), dtype, "chw") for value in (state.input, state.output)]
    return tuple(found)


def _inner_type(state: State) -> ir.DataType:
    """The type in which new entries are put in; of a state that is handed on, the one that all its readers want."""
    values = [] if state.node is None else [state.node.outputs[0]]
    values = values or [node.outputs[0] for node, _ in state.input.uses() if edit.is_op(node, "Cast")]
    types = {value.dtype for value in values if value.dtype is not None}
    return types.pop() if len(types) == 1 else ir.DataType.FLOAT


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
