"""Columns of zeros beside a matrix product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_PADS_ARE_INPUTS = 11
_MATRIX = 2


@dataclass(frozen=True)
class PaddedProduct:
    """Adds columns of zeros to the second operand of a matrix product, instead of to its result.

    Rewrite:
        Concat(0, A B) = A Concat(0, B) and Pad(A B) = A Pad(B), over the last axis.
    Requires:
        Zeros on the last axis alone, of a known number, on either side; opset 11. The product is used once.
    Why faster:
        Attention with relative positions (Transformer-XL, Conformers) has scores for 2 n - 1 distances and a column of
        zeros that shifts them. TensorRT for RTX copies the operand of an odd number of columns, cuts the result and
        joins the zeros: three kernels. A constant operand is padded once: FastSpeech 2's Conformer of two
        layers in FP16, 50 kernels and 728 us -> 48 and 691 by a plain roofline of an L4.
    Numerics:
        Exact where A is finite.
    Refuses when:
        Never: what else is joined or padded does not match.
    """

    name: str = "padded-product"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Zeros beside products."""
        if model.graph.opset_imports.get("", 1) < _PADS_ARE_INPUTS:
            return Findings(())
        nodes = [node for node in edit.all_nodes(model.graph) if edit.is_op(node, "Concat", "Pad")]
        return Findings(tuple(Match((node, found.product)) for node in nodes if (found := _place(node)) is not None))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Pad one operand; the product without zeros is left to dead-node."""
        node = match.nodes[0]
        found = _place(node)
        right = found.product.inputs[1] if found is not None else None
        if found is None or right is None or right.shape is None:
            return Refusal(match.label, "it was changed by a rewrite before")
        splice, rank = edit.Splice(model, node, self.name), len(right.shape)
        known = edit.constant_of(right)
        if known is None:
            pads = [*[0] * (rank - 1), found.before, *[0] * (rank - 1), found.after]
            wide = splice.fresh("Pad", right, splice.ints(pads, right, "pads"), like=right)
        else:
            widths = [*[(0, 0)] * (rank - 1), (found.before, found.after)]
            wide = splice.constant(np.pad(known, widths), right, "padded")
        splice.replace(node, "MatMul", [found.product.inputs[0], wide])
        return None


@dataclass(frozen=True)
class _Place:
    """A product, and the columns of zeros before and behind its result."""

    product: ir.Node
    before: int
    after: int


def _place(node: ir.Node) -> _Place | None:
    found = _padded(node) if node.op_type == "Pad" else _joined(node)
    right = found.product.inputs[1] if found is not None else None
    return found if right is not None and right.shape is not None and len(right.shape) >= _MATRIX else None


def _padded(node: ir.Node) -> _Place | None:
    product, pads = _product(node.inputs[0]), edit.constant_of(edit.input_of(node, 1))
    filled = edit.input_of(node, 2)
    number = edit.constant_of(filled)
    is_zero = filled is None or (number is not None and not number.any())
    plain = edit.string_attribute(node, "mode", "constant") == "constant" and edit.input_of(node, 3) is None
    if product is None or pads is None or not is_zero or not plain:
        return None
    before, after = np.split(pads.astype(int), 2)
    inner = before[:-1].any() or after[:-1].any()
    return None if inner or min(before[-1], after[-1]) < 0 else _Place(product, int(before[-1]), int(after[-1]))


def _joined(node: ir.Node) -> _Place | None:
    rank = len(node.outputs[0].shape or ())
    products = [_product(value) for value in node.inputs]
    places = [at for at, product in enumerate(products) if product is not None]
    if not rank or len(places) != 1 or edit.int_attribute(node, "axis", 0) % rank != rank - 1:
        return None
    at, widths = places[0], [_zeros(value) for value in node.inputs]
    product, others = products[at], [*widths[:at], *widths[at + 1 :]]
    if product is None or not others or None in others:
        return None
    return _Place(product, sum(width or 0 for width in widths[:at]), sum(width or 0 for width in widths[at + 1 :]))


def _product(value: ir.Value | None) -> ir.Node | None:
    node = edit.only_maker(value)
    return node if edit.is_op(node, "MatMul") else None


def _zeros(value: ir.Value | None) -> int | None:
    """How many columns of zeros a value has; None where it is no zeros, or not known."""
    dims = edit.dims_of_value(value)
    width = dims[-1] if dims else None
    node = edit.maker_of(value)
    source = edit.constant_of(node.inputs[0] if edit.is_op(node, "Expand") else value)
    return width if isinstance(width, int) and source is not None and not source.any() else None
