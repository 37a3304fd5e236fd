"""Linear layers on the tokens of an image that is a convolution's before or behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.dims import Dimensions
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_UNARY = frozenset(
    "Abs Celu Elu Erf Exp Gelu HardSigmoid HardSwish LeakyRelu Mish Neg Relu Selu Sigmoid Softplus Softsign Swish "
    "Tanh".split()
)
"""Operators of one input that treat every element alike."""

_CONV_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
"""A Conv of BF16 is not in ONNX before opset 22, one of doubles not in runtimes."""

_LAST_TWO, _TO_LAST, _TO_FIRST = (0, 2, 1), (0, 2, 3, 1), (0, 3, 1, 2)


@dataclass(frozen=True)
class LinearAsConv:
    """Runs a linear layer as a 1x1 convolution where its tokens become an image, or come from one.

    Rewrite:
        Reshape(Transpose(x W + b), [N, C, H, W]) = Conv(Transpose(Reshape(x)), W^T, b), and
        f(Transpose(Reshape(z))) W + b = Reshape(Transpose(Conv(f(z), W^T, b))) for activations f. Maps are turned
        where they are maps: a layer normalization before one is a kernel then, not two with FP32 between them.
    Requires:
        A product of tokens [N, S, C] with a constant matrix, and a constant bias; tokens that provably are the
        positions of an image, in either order of Reshape and Transpose; FP32 or FP16.
    Why faster:
        Bias, activation and layout become parts of convolutions; between a product and a convolution each takes a
        kernel of its own, on the widest tensors of the feed-forward blocks of SegFormer and PVT.
    Numerics:
        The same products and sums.
    Refuses when:
        The height or width is not given in the shape of the Reshape; its tokens are those of an attention with one
        head, which is several kernels then (TensorRT for RTX 1.7.1).
    """

    name: str = "linear-as-conv"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Linear layers between tokens and an image; those between two images are found as entering the second."""
        places = []
        for layer in _layers(model):
            reason = ""
            if layer.enters and layer.size is None:
                reason = "the shape of its image does not give height and width"
            elif layer.enters and _is_attended(layer.source):
                reason = "its tokens are those of an attention with one head, which would be several kernels"
            places.append((Match((layer.product, *layer.others, *_context(layer)), choice=layer.way), reason))
        return Findings.of(places)

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Rewrite one layer."""
        layers = _layers(model)
        layer = next((one for one in layers if one.product is match.nodes[0] and one.way == match.choice), None)
        if layer is None:
            return Refusal(match.label, "it was changed by a rewrite before")
        last = layer.last
        splice = edit.Splice(model, last, self.name)
        value = layer.source
        if layer.enters:
            value = splice.fresh("Reshape", value, _image(layer, splice))
            value = splice.fresh("Transpose", value, attributes={"perm": _TO_FIRST})
        for node in layer.activations:
            attributes = {name: attribute.value for name, attribute in node.attributes.items()}
            value = splice.fresh(node.op_type, value, attributes=attributes)
        weight = np.ascontiguousarray(layer.weight.T)[:, :, None, None]
        inputs = [value, splice.constant(weight, last.outputs[0], "weight")]
        if layer.bias is not None:
            inputs.append(splice.constant(layer.bias, last.outputs[0], "bias"))
        value = splice.op("Conv", *inputs)
        if not layer.enters:
            value.shape = None
            shape = np.asarray([0, -1, layer.weight.shape[1]], np.int64)
            value = splice.fresh("Transpose", value, attributes={"perm": _TO_LAST})
            value = splice.op("Reshape", value, splice.constant(shape, last.outputs[0], "tokens"))
        splice.finish(value)
        rest = [layer.product, *layer.others]
        while ready := [node for node in rest if node.graph is not None and not node.outputs[0].uses()]:
            for node in ready:
                if not node.outputs[0].is_graph_output():
                    edit.remove_node(node)
                rest.remove(node)
        return None


@dataclass(frozen=True)
class _Layer:
    """A linear layer on tokens: of ``source`` [N, S, C] into an image, or of the image ``source`` [N, C, H, W].

    ``others`` are its nodes besides the product, ``last`` among them makes the result; ``size`` is the image's, or the
    shape it is computed in.
    """

    product: ir.Node
    others: tuple[ir.Node, ...]
    last: ir.Node
    source: ir.Value
    weight: np.ndarray
    bias: np.ndarray | None
    enters: bool
    size: tuple[int, ...] | ir.Value | None = None
    activations: tuple[ir.Node, ...] = ()

    @property
    def way(self) -> str:
        """The choice of its match."""
        return "enters" if self.enters else "leaves"


def _is_attended(tokens: ir.Value) -> bool:
    """Whether tokens are the rows of ``Softmax(..) V``: with several heads, a Transpose is between."""
    node = tokens.producer()
    while edit.is_op(node, "Reshape") and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    value = node.inputs[0] if edit.is_op(node, "MatMul") else None
    return value is not None and edit.is_op(value.producer(), "Softmax")


def _image(layer: _Layer, splice: edit.Splice) -> ir.Value:
    """The shape of the image before the layer, its channels last."""
    like, channels = layer.last.outputs[0], layer.weight.shape[0]
    if not isinstance(layer.size, ir.Value):
        return splice.ints([0, *(layer.size or ()), channels], like, "image")
    ends = [[at] for at in _height_and_width(layer.last)]
    bounds = [splice.ints(end, like, "axis") for end in ends]
    size = splice.fresh("Slice", layer.size, *bounds, like=layer.size)
    batch, last = (splice.ints([dim], like, "dim") for dim in (0, channels))
    return splice.fresh("Concat", batch, size, last, attributes={"axis": 0}, like=layer.size)


def _height_and_width(last: ir.Node) -> tuple[int, int]:
    """Where they are in the shape of the Reshape: it makes the image, or the image with its channels last."""
    return (2, 4) if edit.is_op(last, "Reshape") else (1, 3)


def _context(layer: _Layer) -> tuple[ir.Node, ...]:
    """The convolution that reads or makes the image: what the layer costs shows there."""
    node = edit.only_user(layer.last.outputs[0]) if layer.enters else layer.source.producer()
    return (node,) if edit.is_op(node, "Conv") else ()


def _layers(model: ir.Model) -> Iterator[_Layer]:
    """The linear layers of tokens that are an image before or behind, in the order of the graph."""
    products = [node for node in edit.all_nodes(model.graph) if edit.is_op(node, "MatMul")]
    known = Dimensions(model) if products else None
    for product in products:
        x, weight = product.inputs[0], edit.constant_of(product.inputs[1])
        if known is None or x is None or weight is None or weight.ndim != 2 or x.dtype not in _CONV_TYPES:
            continue
        if weight.dtype != x.dtype.numpy() or len(known.of(x) or ()) != 3:
            continue
        add = edit.only_user(product.outputs[0])
        bias = _bias(add, product.outputs[0], weight.shape[1])
        end = product if add is None or bias is None else add
        nodes = () if end is product else (end,)
        entered = _entered(end.outputs[0], known)
        if entered is not None:
            views, size = entered
            yield _Layer(product, (*nodes, *views), views[-1], x, weight, bias, True, size)
            continue
        left = _left(x, known)
        if left is not None and end.outputs[0].dtype == x.dtype:
            before, activations, image = left
            yield _Layer(product, (*nodes, *before), end, image, weight, bias, False, None, activations)


def _bias(add: ir.Node | None, value: ir.Value, channels: int) -> np.ndarray | None:
    """The constant that a node adds to ``value``, one number per channel."""
    if not edit.is_op(add, "Add"):
        return None
    array = edit.constant_of(add.inputs[1] if add.inputs[0] is value else add.inputs[0])
    return array.reshape(-1) if array is not None and array.shape[-1:] == (channels,) == (array.size,) else None


def _entered(
    value: ir.Value, known: Dimensions
) -> tuple[tuple[ir.Node, ...], tuple[int, ...] | ir.Value | None] | None:
    """The two nodes that make an image of tokens, and its height and width, or the shape they are computed in."""
    one = edit.only_user(value)
    two = edit.only_user(one.outputs[0]) if one is not None else None
    if one is None or two is None or one.inputs[0] is not value or two.inputs[0] is not one.outputs[0]:
        return None
    tokens, image = known.of(value), known.of(two.outputs[0])
    if tokens is None or image is None or len(image) != 4 or image[:2] != (tokens[0], tokens[2]):
        return None
    if not _is_view(one, two, _LAST_TWO) and not _is_view(two, one, _TO_FIRST):
        return None
    middle = known.of(one.outputs[0])
    if edit.is_op(one, "Reshape") and (middle is None or (middle[0], middle[3]) != (tokens[0], tokens[2])):
        return None
    shape = (one if edit.is_op(one, "Reshape") else two).inputs[1]
    told = (known.held(shape) or ())[slice(*_height_and_width(two))]
    for size in (image[2:], told):
        numbers = tuple(dim for dim in size if isinstance(dim, int))
        if len(numbers) == 2 and 0 not in numbers:
            return (one, two), numbers
    return (one, two), None if len(told) < 2 or None in told or 0 in told else shape


def _left(x: ir.Value, known: Dimensions) -> tuple[tuple[ir.Node, ...], tuple[ir.Node, ...], ir.Value] | None:
    """The nodes that make tokens of an image, last first, the activations among them in order, and the image."""
    activations: list[ir.Node] = []
    node = x.producer()
    while (
        node is not None
        and node.domain == ""
        and node.op_type in _UNARY
        and edit.only_user(node.outputs[0]) is not None
    ):
        activations.append(node)
        node = edit.maker_of(node.inputs[0])
    if node is None or node.inputs[0] is None or (activations and edit.only_user(node.outputs[0]) is None):
        return None
    inner = node.inputs[0].producer()
    image = inner.inputs[0] if inner is not None and inner.inputs else None
    tokens, dims = known.of(node.outputs[0]), known.of(image)
    if inner is None or image is None or tokens is None or dims is None or len(dims) != 4 or len(tokens) != 3:
        return None
    if (tokens[0], tokens[2]) != dims[:2] or not edit.is_op(image.producer(), "Conv"):
        return None
    if not _is_view(node, inner, _LAST_TWO) and not _is_view(inner, node, _TO_LAST):
        return None
    return (*activations, node, inner), tuple(reversed(activations)), image


def _is_view(transpose: ir.Node, reshape: ir.Node, perm: tuple[int, ...]) -> bool:
    is_pair = edit.is_op(transpose, "Transpose") and edit.is_op(reshape, "Reshape")
    return is_pair and edit.ints_attribute(transpose, "perm") == perm
