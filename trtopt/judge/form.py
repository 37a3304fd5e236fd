"""The form in which a model is judged: with the axes that its profile leaves open, and what sizes they take.

A value of such a form that has an open axis carries its smallest, optimal and largest shape. So a subgraph that is cut
out of it says by itself for which shapes it is to be compiled.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from trtopt.engine.request import ShapeProfile
from trtopt.graph.edit import dims_of_value
from trtopt.graph.shapes import at_shapes, infer_in_place, static_shapes
from trtopt.judge.axes import carry, shapes_of


def judged_form(model: ir.Model, profiles: Sequence[ShapeProfile]) -> ir.Model:
    """A clone of ``model`` as it is judged: for its first profile, with the shapes in it where that takes one only.

    Raises:
        UsageError: A profile does not fit the inputs.
        InvalidModelError: The model cannot run at these shapes.
    """
    if not profiles or profiles[0].is_static:
        return at_shapes(model, optimum(profiles))
    clone = model.clone()
    infer_in_place(clone)
    bounds = profiles[0].shapes
    low, best, high = (static_shapes(clone, {name: item[at] for name, item in bounds.items()}) for at in range(3))
    for value in _values(clone.graph):
        name = str(value.name)
        if name in low and name in best and name in high and value.const_value is None:
            carry(value, (low[name], best[name], high[name]))
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
