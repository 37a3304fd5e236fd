"""Attention as exports write it: softmax(scale * Q K^T + mask) V, head by head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph.edit import (
    all_nodes,
    constant_of,
    constant_tensor_of,
    input_of,
    int_attribute,
    is_op,
    maker_of,
    only_user,
)
from trtopt.graph.views import Sizes, is_move, is_pass, moved

_DEPTH = 24
"""Nodes between a projection and its product, or between the product and softmax: real exports have up to ten."""

_NOTHING = -1e4
"""A masked score this low has the weight 0 beside any other, where scores by themselves are above -9.8e3 in FP32: what
masks are clamped to for FP16 (-1.5e4, recipe mask-constant) is lower."""


@dataclass(frozen=True)
class Attention:
    """The nodes around one softmax.

    Attributes:
        scores: Q K^T, the keys transposed: [..., queries, keys].
        between: What lies between the two, from the product on: scales, masks, casts.
        after: What hands the probabilities on: casts, dropouts.
        hindrance: Why a number added to a row of the scores may change the result, or why the rows of what V is
            multiplied by may not sum to 1; empty when neither is so.
    """

    softmax: ir.Node
    scores: ir.Node
    between: tuple[ir.Node, ...]
    after: tuple[ir.Node, ...]
    mix: ir.Node
    hindrance: str = ""

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        """All of them, softmax first."""
        return (self.softmax, self.scores, *self.between, *self.after, self.mix)


@dataclass(frozen=True)
class Path:
    """How an operand of attention comes from a bias.

    Attributes:
        root: The Add or Gemm whose output has the bias in it.
        steps: The nodes after it that move elements or multiply by one number, each with the output that is followed.
        bias: The bias, broadcast over the output of ``root``, as float64.
    """

    root: ir.Node
    steps: tuple[tuple[ir.Node, ir.Value], ...]
    bias: np.ndarray

    @property
    def moves(self) -> int:
        """How many of the steps, from the first on, it takes until the rest only multiply."""
        return max((i + 1 for i, (node, _) in enumerate(self.steps) if is_move(node)), default=0)

    def carried(self, count: int, sizes: Sizes) -> np.ndarray | None:
        """The bias after the first ``count`` steps; None where a step is not known well enough."""
        array: np.ndarray | None = self.bias
        for node, output in self.steps[:count]:
            if array is not None and is_op(node, "Mul", "Div"):
                factor = constant_of(node.inputs[1 - _data_index(node)])
                if factor is None:
                    return None
                number = float(factor.astype(np.float64).ravel()[0])
                array = _scaled(array, number if node.op_type == "Mul" else 1 / number)
            elif array is not None:
                array = moved(node, output, array, sizes)
        return array


def _scaled(array: np.ndarray, factor: float) -> np.ndarray:
    index = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)
    return np.broadcast_to(array[index] * factor, array.shape)


def is_over_last(softmax: ir.Node, opset: int) -> bool:
    """Whether a Softmax is over the last axis."""
    value, axis = softmax.inputs[0], int_attribute(softmax, "axis", -1 if opset >= 13 else 1)
    return axis == -1 or (value is not None and value.shape is not None and axis == len(value.shape) - 1)


def attention_of(softmax: ir.Node, opset: int) -> Attention | None:
    """The attention around a Softmax; None where there is none, or it is not over the last axis."""
    if softmax.inputs[0] is None or not softmax.inputs[0].shape or not is_over_last(softmax, opset):
        return None
    between: list[ir.Node] = []
    scores = _product_behind(softmax.inputs[0], between, _DEPTH)
    if scores is None or _last(scores.outputs[0]) != _last(softmax.inputs[0]):
        return None
    after: list[ir.Node] = []
    node, value = only_user(softmax.outputs[0]), softmax.outputs[0]
    hindrance = ""
    while node is not None and (is_pass(node) or is_op(node, "Mul", "Div", "Where")) and len(after) < _DEPTH:
        if not is_pass(node):
            hindrance = f"{node.name} changes the probabilities after softmax"
        after.append(node)
        value = node.outputs[0]
        node = only_user(value)
    if not is_op(node, "MatMul") or node.inputs[0] is not value:
        return None
    hindrance = hindrance or next((reason for step in between if (reason := _changes_shift(step))), "")
    return Attention(softmax, scores, tuple(reversed(between)), tuple(after), node, hindrance)


def attentions_of(model: ir.Model) -> Iterator[Attention]:
    """Every attention of a model, nested graphs included."""
    opset = model.graph.opset_imports.get("", 1)
    for node in all_nodes(model.graph):
        found = attention_of(node, opset) if is_op(node, "Softmax") else None
        if found is not None:
            yield found


def _product_behind(value: ir.Value | None, nodes: list[ir.Node], depth: int) -> ir.Node | None:
    """The product of two activations that ``value`` is made from, adding the nodes on the way to ``nodes``.

    Every value on the way has one user and is no output.
    """
    node = maker_of(value)
    if node is None or value is None or depth == 0 or only_user(value) is None:
        return None
    if is_op(node, "MatMul"):
        return node if all(constant_tensor_of(operand) is None for operand in node.inputs) else None
    if is_pass(node) or is_op(node, "Reshape", "Clip", "Tanh", "Div", "Sub"):
        operands = [node.inputs[0]]
    elif is_op(node, "Add", "Mul", "Max"):
        operands = list(node.inputs)
    elif is_op(node, "Where"):
        operands = [node.inputs[1], node.inputs[2]]
    else:
        return None
    mark = len(nodes)
    for operand in operands:
        nodes.append(node)
        found = _product_behind(operand, nodes, depth - 1)
        if found is not None:
            return found
        del nodes[mark:]
    return None


def _changes_shift(node: ir.Node) -> str:
    """Why a number added to a whole row before ``node`` is not one added to a whole row after it."""
    if is_pass(node) or is_op(node, "Add", "Sub"):
        return ""
    if is_op(node, "Mul", "Div"):
        lasts = [_last(value) for value in node.inputs]
        return "" if 1 in lasts else f"{node.name} multiplies the scores by different numbers along the keys"
    if is_op(node, "Reshape"):
        before, after = _last(node.inputs[0]), _last(node.outputs[0])
        return "" if before is not None and before == after else f"{node.name} mixes the keys with other axes"
    if is_op(node, "Max", "Where"):
        others = node.inputs[1:3] if is_op(node, "Where") else node.inputs
        arrays = [array for value in others if (array := constant_of(value)) is not None]
        vanishing = [array for array in arrays if (array.astype(np.float64) <= _NOTHING).all()]
        if len(vanishing) == len(others) - 1:  # all but the scores
            return ""
        return f"{node.name} puts numbers in the place of scores that do not vanish beside them"
    return f"{node.name} ({node.op_type}) between Q K^T and softmax is not linear"


def _last(value: ir.Value | None) -> int | str | None:
    """The size of the last axis, 1 for a scalar."""
    if value is None or value.shape is None:
        return None
    if len(value.shape) == 0:
        return 1
    dim = value.shape[-1]
    return dim if isinstance(dim, int) else dim.value


def path_to(value: ir.Value | None, sizes: Sizes) -> Path | None:
    """How ``value`` comes from a bias; None where something else than moves and a scale lies between, or no bias."""
    steps: list[tuple[ir.Node, ir.Value]] = []
    while value is not None and len(steps) < _DEPTH:
        node = value.producer()
        if node is None:
            return None
        bias = bias_of(node, sizes)
        if bias is not None:
            return Path(node, tuple(reversed(steps)), bias)
        if is_move(node) or is_pass(node):
            index = 0
        elif is_op(node, "Mul", "Div"):
            index = _data_index(node)
            if index < 0:
                return None
        else:
            return None
        steps.append((node, value))
        value = node.inputs[index]
    return None


def _data_index(node: ir.Node) -> int:
    """Which input of a Mul or Div is multiplied by one number, -1 where none is."""
    for index in (0, 1) if node.op_type == "Mul" else (0,):
        other = node.inputs[1 - index]
        if other is not None and other.shape is not None and all(dim == 1 for dim in other.shape):
            return index
    return -1


def bias_of(node: ir.Node, sizes: Sizes) -> np.ndarray | None:
    """The bias that ``node`` adds, one number per entry of the last axis, broadcast over its output."""
    shape = sizes.of(node.outputs[0])
    if shape is None or not shape:
        return None
    if is_op(node, "Gemm"):
        constants = [constant_of(input_of(node, 2))]
        factor = node.attributes["beta"].as_float() if "beta" in node.attributes else 1.0
    elif is_op(node, "Add"):
        constants, factor = [constant_of(value) for value in node.inputs], 1.0
        data = [value for value, array in zip(node.inputs, constants, strict=True) if array is None]
        # An Add that makes the data larger is more than a bias.
        if len(data) != 1 or sizes.of(data[0]) != shape:
            return None
    else:
        return None
    for array in constants:
        if array is not None and array.size in (1, shape[-1]) and array.shape[-1:] in ((), (array.size,)):
            flat = np.broadcast_to(array.astype(np.float64).ravel() * factor, (shape[-1],))
            return np.broadcast_to(flat, shape)
    return None
