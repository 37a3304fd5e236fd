"""A factor per channel behind a linear layer, also behind the transposes and reshapes that follow it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.conv import output_channels, scale_outputs, set_weights, weight_and_bias, why_not_fit
from trtopt.graph.conv import why_not_constant as why_not_constant_product
from trtopt.graph.views import scaled_by
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_VIEWS = ("Flatten", "Reshape", "Squeeze", "Unsqueeze")
_LONGEST = 8
"""Nodes between product and factor; more are never seen, and the search must stay short."""


@dataclass(frozen=True)
class LayerScale:
    """Folds a factor per channel into the weights before it, behind a bias, transposes and reshapes too.

    Rewrite:
        k * view(x W + b) = view(x (W k) + b k), where ``view`` moves elements and keeps channels together.
    Requires:
        A constant factor (or divisor) per channel, or one number right behind a MatMul and its bias; MatMul with a
        constant matrix, or Conv, ConvTranspose or Gemm with a transpose or reshape between; values between used once.
    Why faster:
        One multiplication per element less, and the product ends in its residual addition: the library's convolutions
        fuse that, but not with a factor before it. Nothing on its own in ConvNeXt-T; with rank-4-linear 97 kernels and
        684 MB become 94 and 650 MB (TensorRT for RTX, FP16, batch 8, weights included).
    Numerics:
        The same sum with factors multiplied beforehand, in FP64, and rounded once to the weights' type.
    Refuses when:
        A value between is used elsewhere or is a graph output; the weights or biases are not constants; the factor is
        not finite; a folded weight does not fit its type, or FP16 where the weights did (layer scales of an untrained
        network are 1e-6).
    """

    name: str = "layer-scale"
    stage: Stage = Stage.FOLD
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Multiplications by a constant that lead back to a product."""
        places = []
        for node in edit.all_nodes(model.graph):
            path = _path(node)
            if path is None or (path.reason and path.factor.size == 1):
                # One number behind a linear layer is most often part of an activation.
                continue
            match = Match((node, *(add for add, _ in path.biases), path.product))
            places.append((match, path.reason or _why_not(path)))
        return Findings.of(places)

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Fold one factor."""
        node = match.nodes[0]
        path = _path(node)
        graph = path.product.graph if path is not None else None
        if path is None or graph is None:
            return Refusal(match.label, "it was changed by a rewrite before")
        factors = _factors(path)
        scaled = [_scaled_bias(add, axis, factors) for add, axis in path.biases]
        weight, bias = _scaled_product(path.product, factors)
        dtype = path.factor.dtype
        reasons = [why_not_fit(new, dtype, old) for new, old in [*scaled, weight, bias]]
        reason = next(filter(None, reasons), "")
        if reason:
            return Refusal(match.label, reason)
        names = edit.Names(model)
        for (add, _), (array, _) in zip(path.biases, scaled, strict=True):
            index = 0 if edit.constant_tensor_of(add.inputs[0]) is not None else 1
            name = names.value(f"{add.outputs[0].name}_bias")
            add.replace_input_with(index, edit.add_initializer(graph, name, array.astype(dtype)))
            edit.tag(add, self.name)
        if edit.is_op(path.product, "MatMul"):
            name = names.value(f"{path.product.outputs[0].name}_weight")
            path.product.replace_input_with(1, edit.add_initializer(graph, name, weight[0].astype(dtype)))
        else:
            set_weights(names, path.product, weight[0], bias[0] if bias[0].any() else None)
        edit.tag(path.product, self.name)
        output = node.outputs[0]
        name = str(output.name)
        edit.replace_value(output, path.data)
        edit.remove_node(node)
        # The surviving tensor holds what the multiplication put out, so it goes by that name.
        path.data.name = name
        return None


@dataclass
class _Path:
    """From a multiplication back to the product it scales.

    Attributes:
        data: The operand that is not the constant.
        factor: The constant.
        divides: Whether it is a divisor.
        product: The product.
        biases: Additions of constants on the way, and the axis of the channels in each.
        views: Whether there is a transpose or reshape on the way.
        reason: Why the values between cannot change; empty where they can.
    """

    data: ir.Value
    factor: np.ndarray
    divides: bool
    product: ir.Node
    biases: list[tuple[ir.Node, int]] = field(default_factory=list)
    views: bool = False
    reason: str = ""


def _path(node: ir.Node) -> _Path | None:
    """The path from a multiplication by a constant to a product; None where there is none."""
    scaled = scaled_by(node)
    if scaled is None or scaled[0].shape is None:
        return None
    (data, factor), rank = scaled, len(scaled[0].shape)
    producer = data.producer()
    axes = [rank - factor.ndim + axis for axis, size in enumerate(factor.shape) if size != 1]
    if producer is None or factor.ndim > rank or len(axes) > 1 or factor.dtype.kind in "iub":
        return None
    axis = axes[0] if axes else rank - 1
    path = _Path(data, factor, node.op_type == "Div", producer)
    value = data
    for _ in range(_LONGEST):
        producer = value.producer()
        if producer is None:
            return None
        if edit.only_user(value) is None or producer.graph is not node.graph:
            path.reason = path.reason or f"the output of {producer.name} is used elsewhere"
        if edit.is_op(producer, *_PRODUCTS):
            path.product = producer
            return path if _is_scaled_by(path, axis, value, single=not axes) else None
        step = _step(producer, value, axis)
        if step is None:
            return None
        if edit.is_op(producer, "Add"):
            path.biases.append((producer, axis))
        else:
            path.views = True
        value, axis = step
    return None


def _step(node: ir.Node, output: ir.Value, axis: int) -> tuple[ir.Value, int] | None:
    """The input of a bias, transpose or reshape, and where the channels of its output's ``axis`` are in it."""
    if edit.is_op(node, "Add"):
        tensors = [edit.constant_tensor_of(value) for value in node.inputs]
        source = node.inputs[0 if tensors[0] is None else 1]
        constant = next((tensor for tensor in tensors if tensor is not None), None)
        if source is None or constant is None or tensors.count(None) != 1 or source.shape is None:
            return None
        return (source, axis) if len(edit.dims_of(constant)) <= len(source.shape) else None
    source = node.inputs[0] if edit.is_op(node, "Transpose", *_VIEWS) else None
    if source is None or source.shape is None or output.shape is None:
        return None
    if edit.is_op(node, "Transpose"):
        order = edit.ints_attribute(node, "perm") or tuple(reversed(range(len(source.shape))))
        return source, order[axis]
    behind = _elements(output.shape[axis + 1 :])
    size = output.shape[axis]
    for index, dim in enumerate(source.shape):
        if dim == size and behind is not None and _elements(source.shape[index + 1 :]) == behind:
            return source, index
    return None


def _elements(dims: Sequence[int | ir.SymbolicDim]) -> int | None:
    sizes = edit.numbers_of(dims)
    return None if sizes is None else math.prod(sizes)


def _is_scaled_by(path: _Path, axis: int, value: ir.Value, *, single: bool) -> bool:
    """Whether ``axis`` of a product's output holds its output channels, and this recipe is the one to fold them."""
    product, shape = path.product, value.shape
    if shape is None or (single and (path.views or not edit.is_op(product, "MatMul"))):
        return False
    if edit.is_op(product, "MatMul"):
        weight = edit.constant_tensor_of(product.inputs[1])
        if weight is None or len(edit.dims_of(weight)) < 2 or weight.dtype.is_integer():
            return False
        return axis == len(shape) - 1 and path.factor.size in (1, edit.dims_of(weight)[-1])
    # Right behind these it is the business of the recipe constant-affine.
    return path.views and axis == 1


def _why_not(path: _Path) -> str:
    if not np.isfinite(path.factor.astype(np.float64)).all() or (path.divides and not path.factor.all()):
        return "its constant is not finite, or a divisor of zero"
    if edit.is_op(path.product, "MatMul"):
        return ""
    reason = why_not_constant_product(path.product)
    weight = edit.constant_of(path.product.inputs[1])
    if reason or weight is None:
        return reason
    return "" if output_channels(path.product, weight) == path.factor.size else "its constant is not one per channel"


def _factors(path: _Path) -> np.ndarray:
    factors = path.factor.astype(np.float64).reshape(-1)
    return 1 / factors if path.divides else factors


def _scaled_bias(add: ir.Node, axis: int, factors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The constant of an addition times the factors of ``axis``, and as it was."""
    old = next(array for array in map(edit.constant_of, add.inputs) if array is not None).astype(np.float64)
    rank = 0 if add.outputs[0].shape is None else len(add.outputs[0].shape)
    new = old * factors.reshape([-1 if index == axis else 1 for index in range(rank)])
    while new.ndim > max(old.ndim, 1) and new.shape[0] == 1:
        new = new[0]
    return new, old


def _scaled_product(
    product: ir.Node, factors: np.ndarray
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Weight and bias times the factors, each with what it was."""
    if edit.is_op(product, "MatMul"):
        weight, bias = edit.array_of(product.inputs[1]).astype(np.float64), np.zeros(1)
    else:
        weight, bias = weight_and_bias(product)
    scaled = weight * factors if edit.is_op(product, "MatMul") else scale_outputs(product, weight, factors)
    return (scaled, weight), (bias * factors, bias)
