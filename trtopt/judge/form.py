"""The form in which a model is judged: with the axes that its profile leaves open, and what sizes they take.

A value of such a form that has an open axis carries its smallest, optimal and largest shape. So a subgraph that is cut
out of it says by itself for which shapes it is to be compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from trtopt.engine.request import ShapeProfile
from trtopt.graph.edit import dims_of_value
from trtopt.graph.shapes import at_shapes, infer_in_place, static_shapes
from trtopt.judge.axes import carry, shapes_of


def judged_form(model: ir.Model, profiles: Sequence[ShapeProfile]) -> ir.Model:
    """A clone of ``model`` as it is judged: for its first profile, with the shapes in it where that takes one only.

    With shape tensors it is judged at the optimum, where their values are constants.

    Raises:
        UsageError: A profile does not fit the inputs.
        InvalidModelError: The model cannot run at these shapes.
    """
    values = profiles[0].values if profiles else {}
    if not profiles or profiles[0].is_static or values:
        shapes = {name: shape for name, shape in optimum(profiles).items() if name not in values}
        return at_shapes(_with_values(model, {name: best for name, (_, best, _) in values.items()}), shapes)
    clone = model.clone()
    infer_in_place(clone)
    bounds = profiles[0].shapes
    low, best, high = (static_shapes(clone, {name: item[at] for name, item in bounds.items()}) for at in range(3))
    for value in _values(clone.graph):
        name = str(value.name)
        if name in low and name in best and name in high and value.const_value is None:
            carry(value, (low[name], best[name], high[name]))
    return clone


def _with_values(model: ir.Model, values: Mapping[str, Sequence[int]]) -> ir.Model:
    """A clone with shape tensors as constants, itself without any: what they say of shapes is then in the graph."""
    if not values:
        return model
    clone = model.clone()
    for value in [value for value in clone.graph.inputs if value.name in values]:
        dtype = np.dtype(np.int64 if value.dtype == ir.DataType.INT64 else np.int32)
        numbers = np.array(values[str(value.name)], dtype).reshape((-1,) if dims_of_value(value) else ())
        value.const_value = ir.tensor(numbers, name=value.name)
        clone.graph.inputs.remove(value)
        clone.graph.register_initializer(value)
    return clone


def optimum(profiles: Sequence[ShapeProfile]) -> dict[str, tuple[int, ...]]:
    """The input shapes of the first profile's optimum; none without a profile."""
    return {name: best for name, (_, best, _) in profiles[0].shapes.items()} if profiles else {}


def profile_of(model: ir.Model) -> ShapeProfile | None:
    """The profile of a judged form, or of a subgraph of one; None where every input has one shape."""
    if all(isinstance(dim, int) for value in model.graph.inputs for dim in dims_of_value(value) or ()):
        return None
    found = {str(value.name): shapes_of(value) for value in model.graph.inputs}
    return ShapeProfile({name: shapes for name, shapes in found.items() if shapes is not None})


def best_shapes(model: ir.Model) -> dict[str, tuple[int, ...]]:
    """The shapes of a judged form's inputs at which it is predicted; none where they are in the graph."""
    profile = profile_of(model)
    return {} if profile is None else optimum((profile,))


def only_at_optimum(subgraph: ir.Model) -> str:
    """What is said of a subgraph that no compiler takes with open axes."""
    return f"what is around {next(iter(subgraph.graph)).name} is judged at the optimum only"


def _values(graph: ir.Graph) -> list[ir.Value]:
    return [*graph.inputs, *(value for node in graph for value in node.outputs)]
