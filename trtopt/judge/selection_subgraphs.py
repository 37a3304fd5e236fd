"""The pieces of a network that the guard prices, and what makes two of them alike."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph import edit
from trtopt.judge.subgraph import structure_key
from trtopt.precision.plan import PrecisionPlan


@dataclass(frozen=True)
class Piece:
    """The network around a region: FP32, static shapes; ``key`` is that of its structure."""

    model: ir.Model
    key: str
    names: tuple[str, ...]


def piece_of(model: ir.Model) -> Piece:
    return Piece(model, structure_key(model), tuple(str(node.name) for node in model.graph))


def piece_key(piece: Piece, plan: PrecisionPlan) -> str:
    """Equal for pieces of equal structure with equal types."""
    places = {name: index for index, name in enumerate(piece.names)}
    forms = sorted(
        (
            places[op.node],
            op.dtype,
            str(op.weight_axis),
            op.multiply,
            sorted(places[n] for n in op.skips if n in places),
        )
        for op in plan.quantized
    )
    types = [sorted(places[name] for name in names if name in places) for names in (plan.wide, plan.bfloat)]
    narrow = plan.narrow.name if plan.narrow is not None else ""
    return hashlib.sha256(f"{piece.key} {narrow} {plan.fused_quantizers} {forms} {types}".encode()).hexdigest()


def additions(model: ir.Model) -> dict[str, tuple[str, ...]]:
    """The additions of two computed tensors, by the tensors they read."""
    found: dict[str, tuple[str, ...]] = {}
    for node in model.graph:
        values = [value for value in node.inputs if value is not None and edit.constant_tensor_of(value) is None]
        if node.op_type == "Add" and len({value.name for value in values}) == 2:
            for value in values:
                found[str(value.name)] = (*found.get(str(value.name), ()), str(node.name))
    return found


def between(model: ir.Model, first: Collection[str], last: Collection[str]) -> tuple[str, ...]:
    """Names of the nodes on the ways from ``first`` to ``last``, these among them, in graph order.

    A piece that is cut between two of its nodes lets the compiler compute in one kernel what in the network waits for
    the product between them: of a residual around attention, it joins the normalizations before and behind it.
    """
    after: set[ir.Node] = set()
    for node in model.graph:
        if node.name in first or any(value is not None and value.producer() in after for value in node.inputs):
            after.add(node)
    before: set[ir.Node] = set()
    for node in reversed(model.graph):
        if node.name in last or any(user in before for value in node.outputs for user, _ in value.uses()):
            before.add(node)
    return tuple(str(node.name) for node in model.graph if node in after and node in before)
