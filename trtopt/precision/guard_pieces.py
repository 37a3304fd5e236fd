"""The pieces of a network that the guard prices, and what makes two of them alike."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph import edit
from trtopt.precision.plan import PrecisionPlan
from trtopt.rewrite.region import structure_key


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
