"""Biases of attention's projections behind a layer normalization."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.attention import Attention, attentions_of, path_to
from trtopt.graph.views import Sizes, one_per
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target
from trtopt.support.memo import once_per_array

_LARGEST_SHIFT = 0.5
_SMALLEST_SHIFT = 1 / 16
_FP16_LARGEST = 65504.0
_FP16_SMALLEST = 2.0**-14


@dataclass(frozen=True)
class NormalizedQkvBias:
    """Lets the weights after a layer normalization carry the biases of attention's projections.

    Rewrite:
        LayerNorm(x) = g * n + h, where n has the mean 0. So (g * n) W = n M with M = g * W, and it does not matter what
        is added to a whole column of M. With a shift t instead of g and h,
        LayerNorm(x) W + b = (n + t) (M - mean(M) + d / (C t)), d = h W + b, C features, means taken down each column.
    Requires:
        A LayerNormalization over the last axis with constant scale and bias, read by products with constant weights,
        of which at least one has a bias on the way to attention. What else reads it, as the residual of post-norm
        blocks does, gets (n + t) g + (h - t g), which the compiler computes where it is read.
    Why faster:
        TensorRT for RTX runs Q, K and V as one product whose output attention reads in place, if none has a bias: 10
        -> 7 kernels for a ViT-B block of batch 8, and no kernel for the bias of the queries: 125 -> 90 kernels and
        957.8 -> 793.2 MB for a whole ViT-B; 35 -> 31 kernels and 191.9 -> 180.9 MB for BERT of four blocks, beside
        qkv-bias.
    Numerics:
        The same real numbers; weights are computed in FP64 and rounded once. t is the least power of two, from 1/16 to
        1/2, for which d / (C t) is no larger than the weights are (root of the mean square): what rounds in the
        product stays what it was, within a factor of sqrt(1 + t^2) for activations and of sqrt(2) for weights.
    Refuses when:
        The statistics are used, a bias is too large for t = 1/2, or new weights leave the range of FP16 where the old
        ones did not. No match where the keys' or the values' product alone reads the value beside others.
    """

    name: str = "normalized-qkv-bias"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Layer normalizations before the projections of attention, those of one graph as one match.

        A block alone does not show the gain: at its ends the compiler changes the order of batch and tokens.
        """
        norms: dict[ir.Node, dict[ir.Node, None]] = {}
        for found in attentions_of(model):
            for norm, nodes in _biased(found).items():
                norms.setdefault(norm, {}).update(dict.fromkeys(nodes))
        together: dict[ir.Graph | ir.Function | None, dict[ir.Node, None]] = {}
        refusals = []
        for norm, reached in norms.items():
            reason = _why_not(norm)
            if reason:
                refusals.append(Refusal(str(norm.name), reason))
                continue
            users = dict.fromkeys(user for user, _ in norm.outputs[0].uses())
            adds = [add for user in _products(norm) if (add := _bias_add(user)) is not None]
            together.setdefault(norm.graph, {}).update(dict.fromkeys((norm, *users, *adds, *reached)))
        return Findings(tuple(Match(tuple(nodes)) for nodes in together.values()), tuple(refusals))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Change the normalizations of one graph, and the weights behind them."""
        changed = False
        for norm in match.nodes:
            if edit.is_op(norm, "LayerNormalization") and not _why_not(norm):
                self._carry(norm, edit.Splice(model, norm, self.name))
                changed = True
        return None if changed else Refusal(match.label, "it has changed since it was found")

    def _carry(self, norm: ir.Node, splice: edit.Splice) -> None:
        products = _products(norm)
        shift = _shift(norm, products)
        weights = [
            _new_weight(edit.array_of(product.inputs[1]), shift, *_before(norm, product)).astype(
                edit.array_of(product.inputs[1]).dtype
            )
            for product in products
        ]
        scale, output = edit.array_of(norm.inputs[1]).astype(np.float64), norm.outputs[0]
        if _is_read_otherwise(norm):
            _restore(norm, scale, _offset(norm) - shift * scale, splice)
        for index, name, content in ((1, "scale", np.ones_like(scale)), (2, "shift", np.full_like(scale, shift))):
            array = content.astype(edit.array_of(norm.inputs[1]).dtype)
            if len(norm.inputs) <= index:
                norm.resize_inputs(index + 1)
            norm.replace_input_with(index, splice.constant(array, output, name))
        edit.tag(norm, self.name)
        for product, weight in zip(products, weights, strict=True):
            _set_weight(product, weight, splice, self.name)


def _restore(norm: ir.Node, factor: np.ndarray, bias: np.ndarray, splice: edit.Splice) -> None:
    """Give what reads a normalized value beside its products factor * (n + t) + bias, which is as it was."""
    value, dtype = norm.outputs[0], edit.array_of(norm.inputs[1]).dtype
    for kind, operand, array in (("Mul", "factor", factor), ("Add", "offset", bias)):
        constant = splice.constant(array.astype(dtype), norm.outputs[0], operand)
        value = splice.restore(value, kind, _products(norm), constant)


def _biased(found: Attention) -> dict[ir.Node, list[ir.Node]]:
    """Normalizations that biased projections of an attention read, with the nodes up to its products."""
    sizes, norms = Sizes(), dict[ir.Node, list[ir.Node]]()
    for query, value in zip((True, False, False), (*found.scores.inputs, found.mix.inputs[1]), strict=True):
        path = path_to(value, sizes)
        if path is None or not path.moves or not edit.is_op(path.root, "Add") or not one_per(path.bias).any():
            continue
        products = [v.producer() for v in path.root.inputs if v is not None and edit.constant_tensor_of(v) is None]
        product = products[0] if products else None
        source = product.inputs[0] if edit.is_op(product, "MatMul") else None
        norm = edit.maker_of(source)
        # What the weights cannot carry, as that of one of two Adds behind one product, is left where it is.
        if product is None or _bias_add(product) is not path.root:
            continue
        if not edit.is_op(norm, "LayerNormalization"):
            continue
        # Alone, the bias of keys or values is nothing that qkv-bias could not move out of the network.
        if query or len(_products(norm)) > 1 or not _is_read_otherwise(norm):
            norms.setdefault(norm, list(found.nodes)).extend(node for node, _ in path.steps)
    return norms


def _why_not(norm: ir.Node) -> str:
    output = norm.outputs[0]
    if any(value.uses() for value in norm.outputs[1:]):
        return "its statistics are used"
    rank = len(output.shape) if output.shape is not None else 0
    scale, bias = edit.constant_of(edit.input_of(norm, 1)), edit.constant_of(edit.input_of(norm, 2))
    if scale is None or scale.ndim != 1 or edit.int_attribute(norm, "axis", -1) not in (-1, rank - 1):
        return "it is not over the last axis, or its scale is not a constant"
    if edit.input_of(norm, 2) is not None and (bias is None or bias.shape != scale.shape):
        return "its bias is not a constant"
    return _out_of_range(norm)


def _products(norm: ir.Node) -> list[ir.Node]:
    """The products of a normalized value with constant weights."""
    scale = edit.constant_tensor_of(edit.input_of(norm, 1))
    found = dict.fromkeys(user for user, index in norm.outputs[0].uses() if index == 0 and edit.is_op(user, "MatMul"))
    weights = {node: edit.constant_tensor_of(node.inputs[1]) for node in found}
    return [
        node
        for node, weight in weights.items()
        if weight is not None
        and len(weight.shape) == 2
        and weight.dtype.is_floating_point()
        and scale is not None
        and weight.shape[0] == scale.size
    ]


def _is_read_otherwise(norm: ir.Node) -> bool:
    output, products = norm.outputs[0], _products(norm)
    return output.is_graph_output() or any(user not in products for user, _ in output.uses())


def _out_of_range(norm: ir.Node) -> str:
    products = _products(norm)
    shift = _shift(norm, products)
    if not shift <= _LARGEST_SHIFT:
        return "a bias is too large beside the weights"
    for product in products:
        left = _left_range(edit.array_of(product.inputs[1]), shift, *_before(norm, product))
        if left:
            return f"the new weights of {product.name} leave the range of {left}"
    return ""


def _shift(norm: ir.Node, products: list[ir.Node]) -> float:
    """The shift t; infinite where none is large enough."""
    wanted = max(
        (_wanted_shift(edit.array_of(product.inputs[1]), *_before(norm, product)) for product in products), default=0.0
    )
    return 2.0 ** math.ceil(math.log2(max(wanted, _SMALLEST_SHIFT))) if math.isfinite(wanted) else math.inf


def _before(norm: ir.Node, product: ir.Node) -> tuple[bytes, bytes, bytes]:
    """The scale and the bias of a normalization, and the bias behind a product, as FP64."""
    scale, add = edit.array_of(norm.inputs[1]).astype(np.float64), _bias_add(product)
    biases = () if add is None else [array for v in add.inputs if (array := edit.constant_of(v)) is not None]
    bias = next((array.astype(np.float64).ravel() for array in biases), np.zeros(1))
    return scale.tobytes(), _offset(norm).tobytes(), bias.tobytes()


def _centred(weight: np.ndarray, scale: bytes, offset: bytes, bias: bytes) -> tuple[np.ndarray, np.ndarray, float]:
    """M - mean(M), d / C, and the root of M's mean square, of one product; see the class."""
    exact, factor = weight.astype(np.float64), np.frombuffer(scale)
    with np.errstate(invalid="ignore", over="ignore"):  # the caller refuses what is not finite
        added = (np.frombuffer(offset) @ exact + np.frombuffer(bias)) / factor.size
        exact *= factor[:, None]
        size = _norm(exact)
        exact -= exact.mean(axis=0)
    return exact, added, size


@once_per_array
def _wanted_shift(weight: np.ndarray, scale: bytes, offset: bytes, bias: bytes) -> float:
    """The least shift that one product allows; infinite where its numbers are not finite."""
    _, added, size = _centred(weight, scale, offset, bias)
    wanted = float(np.abs(added).max(initial=0.0) / size) if size else math.inf
    return wanted if math.isfinite(wanted) else math.inf


def _new_weight(weight: np.ndarray, shift: float, scale: bytes, offset: bytes, bias: bytes) -> np.ndarray:
    """The weight of one product behind a shift, as float64."""
    matrix, added, _ = _centred(weight, scale, offset, bias)
    matrix += added / shift
    return matrix


@once_per_array
def _left_range(weight: np.ndarray, shift: float, scale: bytes, offset: bytes, bias: bytes) -> str:
    """The type whose range a product's weight leaves behind a shift, in words; empty for none."""
    new, old = _new_weight(weight, shift, scale, offset, bias), weight.astype(np.float64)
    for limit, size in ((_FP16_LARGEST, np.abs(new).max()), (-_FP16_SMALLEST, -_norm(new))):
        if not size <= limit and (np.abs(old).max() if limit > 0 else -_norm(old)) <= limit:
            return "FP16"
    return "" if np.isfinite(new.astype(weight.dtype)).all() else "their type"


def _bias_add(product: ir.Node) -> ir.Node | None:
    """The Add of one constant per feature that alone uses a product."""
    user = edit.only_user(product.outputs[0])
    if not edit.is_op(user, "Add"):
        return None
    weight = edit.constant_tensor_of(product.inputs[1])
    arrays = [array for value in user.inputs if (array := edit.constant_of(value)) is not None]
    if weight is None or len(weight.shape) != 2 or len(arrays) != 1:
        return None
    return user if arrays[0].ndim < 2 and arrays[0].size in (1, weight.shape[1]) else None


def _offset(norm: ir.Node) -> np.ndarray:
    """The bias of a normalization."""
    offset = edit.input_of(norm, 2)
    return np.zeros(edit.array_of(norm.inputs[1]).shape) if offset is None else edit.array_of(offset).astype(np.float64)


def _norm(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(array**2))) if array.size else 0.0


def _set_weight(product: ir.Node, weight: np.ndarray, splice: edit.Splice, recipe: str) -> None:
    """Give a product its weight, and take the bias after it away."""
    add = _bias_add(product)
    output = product.outputs[0]
    if add is not None:
        # The product now gives what the Add gave, so it goes by that name.
        name = str(add.outputs[0].name)
        edit.replace_value(add.outputs[0], output)
        edit.remove_node(add)
        output.name = name
    product.replace_input_with(1, splice.constant(weight, output, "weight"))
    edit.tag(product, recipe)
