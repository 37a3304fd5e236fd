"""Multiplications and additions of constants next to a convolution or matrix product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.conv import (
    input_channels,
    norm_affine,
    output_channels,
    per_channel,
    scale_inputs,
    scale_outputs,
    set_weights,
    sole_user,
    trains,
    weight_and_bias,
    why_not_behind,
    why_not_constant,
    why_not_fit,
    window_of,
)
from trtopt.graph.dims import Dimensions
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_PRODUCERS = ("Conv", "ConvTranspose", "Gemm")
_ARITHMETIC = ("Mul", "Div", "Add", "Sub")
_VIEWS = ("Reshape", "Transpose")


@dataclass(frozen=True)
class ConstantAffine:
    """Folds constant multiplications and additions into the Conv, ConvTranspose or Gemm before or after them.

    Rewrite:
        s (W x + b) + t = (s W) x + (s b + t) per output channel; W (s x + t) + b = (W s) x + (W t + b) per input
        channel. BatchNormalization before a convolution is such an s and t. Tokens may become the map of a convolution
        in between, by Reshape and Transpose.
    Requires:
        A constant that is a scalar or has one value per channel; a weight and a bias that are constants. An addition
        before a convolution needs one that does not pad: the padding is zero after the addition, not before.
        Weights used by other nodes too are left to them.
    Why faster:
        One operation per element less, and a step nearer to the activation that fuses. The compiler of TensorRT for
        RTX fuses most of these itself; quantized weights must contain the factor, or the quantizer sees another range
        than the kernel. A normalization read by products and, behind such arithmetic, by a convolution is one kernel.
    Numerics:
        The same sum with factors multiplied beforehand, in FP64, and rounded once to the weights' type.
    Refuses when:
        The value between the two is used elsewhere or is a graph output; an addition stands before a convolution that
        pads; the constant differs within a channel, is zero as a divisor, or not finite; a folded weight does not fit
        its type, or FP16 where the weights did.
    """

    name: str = "constant-affine"
    stage: Stage = Stage.FOLD
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Arithmetic with constants next to a Conv, ConvTranspose or Gemm."""
        places, known = [], None
        for node in edit.all_nodes(model.graph):
            data = _data_of(node)
            if data is None:
                continue
            producer = data.producer()
            other: ir.Node | None
            if edit.is_op(producer, *_PRODUCERS):
                # A normalization after a convolution belongs to the recipe batch-norm.
                if node.op_type == "BatchNormalization":
                    continue
                other, reason = producer, _why_not_after(node, producer)
            else:
                users = (user for user, index in node.outputs[0].uses() if index == 0 and edit.is_op(user, *_PRODUCERS))
                other = next(users, None)
                if other is not None:
                    reason = _why_not_before(node, data, other)
                elif (other := _conv_of_tokens(node)) is not None:
                    known = known or Dimensions(model)
                    reason = _why_not_tokens(node, data, other, known) or _why_not_before(node, data, other)
                else:
                    continue
            places.append((Match((node, other)), reason))
        return Findings.of(places)

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Fold one node."""
        node, product = match.nodes
        weight, bias = weight_and_bias(product)
        data = _data_of(node)
        after = data is not None and data.producer() is product
        sizes = (output_channels(product, weight), _rank(product)) if after else _inputs(product)
        affine = _affine(node, *sizes, not after and _is_behind_tokens(node, product))
        dtype = edit.array_of(product.inputs[1]).dtype
        if affine is None or data is None:
            return Refusal(match.label, "it was changed by a rewrite before")
        scale, shift = affine
        if after:
            new_weight, new_bias = scale_outputs(product, weight, scale), bias * scale + shift
        else:
            new_weight = scale_inputs(product, weight, scale)
            new_bias = bias + (_response(product, weight, shift) if shift.any() else 0.0)
        reason = why_not_fit(new_weight, dtype, weight) or why_not_fit(new_bias, dtype, bias, shift)
        if reason:
            return Refusal(match.label, reason)
        if after:
            output = str(node.outputs[0].name)
            edit.replace_value(node.outputs[0], product.outputs[0])
            edit.remove_node(node)
            # The surviving tensor holds what the arithmetic put out, so it goes by that name.
            product.outputs[0].name = output
        else:
            next(user for user, _ in node.outputs[0].uses()).replace_input_with(0, data)
            edit.remove_node(node)
        keeps_no_bias = edit.input_of(product, 2) is None and not new_bias.any()
        set_weights(edit.Names(model), product, new_weight, None if keeps_no_bias else new_bias)
        edit.tag(product, self.name)
        return None


def _data_of(node: ir.Node) -> ir.Value | None:
    """The operand of arithmetic that is no constant, where the other one is."""
    if edit.is_op(node, "BatchNormalization"):
        return node.inputs[0]
    if not edit.is_op(node, *_ARITHMETIC) or len(node.inputs) != 2:
        return None
    left, right = node.inputs
    if edit.constant_of(right) is not None and edit.constant_of(left) is None:
        return left
    return (
        right
        if node.op_type != "Div" and edit.constant_of(left) is not None and edit.constant_of(right) is None
        else None
    )


def _rank(product: ir.Node) -> int:
    return edit.array_of(product.inputs[1]).ndim


def _inputs(product: ir.Node) -> tuple[int, int]:
    """Input channels and rank of the data of a product with constant weights."""
    return input_channels(product, edit.array_of(product.inputs[1])), _rank(product)


def _affine(node: ir.Node, channels: int, rank: int, on_tokens: bool = False) -> tuple[np.ndarray, np.ndarray] | None:
    """Factor and summand per channel, the last axis of tokens; None where the constant is not one per channel."""
    ones, zeros = np.ones(channels), np.zeros(channels)
    if node.op_type == "BatchNormalization":
        affine = norm_affine(node)
        return affine if affine is not None and affine[0].shape == (channels,) else None
    left, right = (edit.constant_of(value) for value in node.inputs)
    array = np.asarray(left if right is None else right)
    if on_tokens:
        if array.shape[-1:] not in ((), (array.size,)):
            return None
        array = array.reshape(-1, *(1,) * (rank - 2))
    constant = per_channel(array, channels, rank)
    if constant is None:
        return None
    if node.op_type == "Add":
        return ones, constant
    if node.op_type == "Sub":
        return (ones, -constant) if left is None else (-ones, constant)
    with np.errstate(divide="ignore", invalid="ignore"):
        return (constant if node.op_type == "Mul" else ones / constant), zeros


def _conv_of_tokens(node: ir.Node) -> ir.Node | None:
    """The convolution that alone reads the map which Transpose and Reshape, or the reverse, make of a node's result."""
    first = sole_user(node.outputs[0]) if edit.is_op(node, *_ARITHMETIC) else None
    second = sole_user(first.outputs[0]) if edit.is_op(first, *_VIEWS) else None
    conv = sole_user(second.outputs[0]) if edit.is_op(second, *_VIEWS) else None
    if first is None or second is None or conv is None or first.op_type == second.op_type:
        return None
    perms = {"Transpose": (first, (0, 2, 1)), "Reshape": (second, (0, 3, 1, 2))}
    transpose, perm = perms[first.op_type]
    return conv if edit.is_op(conv, "Conv") and edit.ints_attribute(transpose, "perm") == perm else None


def _is_behind_tokens(node: ir.Node, product: ir.Node) -> bool:
    """Whether a node of tokens stands before a convolution of their map, and not of its own result."""
    return all(user is not product for user, _ in node.outputs[0].uses()) and _conv_of_tokens(node) is product


def _why_not_tokens(node: ir.Node, data: ir.Value, conv: ir.Node, known: Dimensions) -> str:
    tokens, picture = known.of(node.outputs[0]), known.of(conv.inputs[0])
    if tokens is None or picture is None or (len(tokens), len(picture)) != (3, 4):
        return "it is not known that its tokens become a map"
    if tokens[::2] != picture[:2]:
        return "it is not known that a token becomes a position of the map"
    return "" if known.of(data) == tokens else "its constant may make its other operand larger"


def _why_not(node: ir.Node, product: ir.Node, channels: int) -> str:
    reason = why_not_constant(product)
    if reason:
        return reason
    if trains(node):
        return "it is in training mode"
    affine = _affine(node, channels, _rank(product), _is_behind_tokens(node, product))
    if affine is None:
        return f"its constant is not one per channel of {product.name}"
    if not all(np.isfinite(array).all() for array in affine):
        return "its constant is not finite, or a divisor of zero"
    return ""


def _why_not_after(node: ir.Node, producer: ir.Node) -> str:
    weight = edit.constant_of(edit.input_of(producer, 1))
    reason = why_not_behind(node, producer)
    return reason or _why_not(node, producer, 0 if weight is None else output_channels(producer, weight))


def _why_not_before(node: ir.Node, data: ir.Value, product: ir.Node) -> str:
    on_tokens = _is_behind_tokens(node, product)
    if sole_user(node.outputs[0]) is not product and not on_tokens:
        return f"its output is used elsewhere than in {product.name}"
    weight = edit.constant_of(edit.input_of(product, 1))
    if product.op_type == "Gemm" and edit.int_attribute(product, "transA", 0):
        return f"{product.name} transposes its input"
    reason = _why_not(node, product, 0 if weight is None else input_channels(product, weight))
    affine = None if reason else _affine(node, *_inputs(product), on_tokens)
    if affine is None:
        return reason
    if node.op_type != "BatchNormalization" and not on_tokens and _broadcasts_up(node, data, _rank(product)):
        return "its constant gives its other operand more dimensions or channels"
    if not affine[1].any():
        return ""
    window = window_of(product)
    if product.op_type == "ConvTranspose" or (product.op_type == "Conv" and (window is None or any(window.pads))):
        return f"{product.name} pads with zeros, to which nothing was added"
    return ""


def _broadcasts_up(node: ir.Node, data: ir.Value, rank: int) -> bool:
    """Whether the constant may make the tensor larger than the operand that is no constant."""
    constant = np.asarray(next(array for array in map(edit.constant_of, node.inputs) if array is not None))
    if data.shape is not None:
        return len(data.shape) != rank or (constant.size > 1 and data.shape[1] != constant.size)
    return constant.size > 1 or constant.ndim == rank


def _response(product: ir.Node, weight: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """What a product puts out for the constant input ``shift``, one per input channel, where it does not pad."""
    rows = scale_inputs(product, weight, shift)
    last = product.op_type == "Conv" or edit.int_attribute(product, "transB", 0)
    result: np.ndarray = rows.reshape(rows.shape[0], -1).sum(axis=1) if last else rows.sum(axis=0)
    return result
