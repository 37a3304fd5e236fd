"""Names that a user knows in an exported graph: the symbols of its dynamic axes, the fields of its outputs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from trtopt.errors import InvalidModelError, UsageError
from trtopt.source.torch_call import Call, leaves, named_tensors


def name_axes(model: ir.Model, call: Call) -> None:
    """Give dynamic axes their symbols, which the exporter forgets where an argument holds no tensor (torch 2.13).

    Raises:
        InvalidModelError: A dynamic axis became one of a fixed size.
    """
    inputs = {value.name: value for value in model.graph.inputs}
    symbols: dict[str, str] = {}
    for axis in call.dynamic:
        shape = inputs[axis.name].shape
        size = shape[axis.axis] if shape is not None else None
        if isinstance(size, int):
            raise InvalidModelError(
                f"The axis {axis.axis} of {axis.name} has one size only, {size}: forward computes with it as a number",
                where=type(call.module).__name__,
                remedy=f"leave out --dynamic {axis.name}:{axis.axis}, or take sizes from the input's shape in forward",
            )
        symbols[str(getattr(size, "value", size))] = axis.symbol
    symbols = {old: new for old, new in symbols.items() if old != new}
    if not symbols:
        return
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, symbols))})\b")
    values = {value for node in model.graph.all_nodes() for value in node.outputs}
    for value in values.union(model.graph.inputs):
        if value.shape is not None:
            dims = [dim if isinstance(dim, int) else dim.value for dim in value.shape]
            renamed = [
                pattern.sub(lambda found: symbols[found[0]], dim) if isinstance(dim, str) else dim for dim in dims
            ]
            value.shape = ir.Shape(renamed)


def name_outputs(model: ir.Model, example: Any, given: Sequence[str]) -> None:
    """Name the outputs as ``given``, else after the fields and keys of ``example``, what the module gives.

    Outputs without a field keep the exporter's names. A value within the graph that has such a name gets another.

    Raises:
        UsageError: ``given`` are not as many different names as there are outputs, or one is an input's.
    """
    graph = model.graph
    names: list[str] = list(given)
    if not names:
        named = list(named_tensors(example))
        if [id(leaf) for _, leaf in named] != [id(leaf) for leaf in leaves(example)]:
            return
        names = [name if not name[:1].isdigit() else "" for name, _ in named]
    outside = {value.name for value in graph.inputs}
    if given and (len(set(given)) != len(graph.outputs) or len(given) != len(graph.outputs) or outside & set(given)):
        raise UsageError(
            f"--output-names: not a name for each of the {len(graph.outputs)} outputs, different from each other and "
            "from the inputs",
            where=", ".join(given),
            remedy=f"the outputs are {', '.join(str(value.name) for value in graph.outputs)}",
        )
    if len(names) != len(graph.outputs):
        return
    known = {value.name: value for node in graph for value in node.outputs}
    for place, name in enumerate(names):
        output = graph.outputs[place]
        if not name or name == output.name or name in outside or name in graph.initializers:
            continue
        if (other := known.get(name)) is not None:
            other.name = f"{name}_inside"
        if output.producer() is None or output in graph.outputs[:place]:
            graph.append(node := ir.node("Identity", [output]))
            node.outputs[0].type, node.outputs[0].shape = output.type, output.shape
            graph.outputs[place] = output = node.outputs[0]
        output.name = name
