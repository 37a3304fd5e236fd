"""Results that leave the network: the last squashing function and a small product before it, and detection heads."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from trtopt.graph import edit
from trtopt.support.nms_plugins import PLUGINS

_SQUASHING = frozenset(["Sigmoid", "Softmax", "LogSoftmax", "Tanh"])
"""Operators that press scores together, so that rounding what they read or write makes equal what was not."""

SMALL_HEAD_WEIGHTS = 2**19
"""Largest number of weights of a head kept in FP32: at most 1 MB more to read, some microseconds on a small GPU."""


_DECODES = frozenset("ArgMax Concat Exp LogSoftmax NonMaxSuppression Sigmoid Softmax Softplus TopK".split()).union(
    PLUGINS
)
"""Operators that turn the numbers of heads into scores, sizes and detections, and put them side by side."""

_HANDS_ON = frozenset(
    "Add Cast Clip Div Expand Flatten Gather GatherElements GatherND Greater Identity Less Max Min Mul Neg Not "
    "Pow ReduceMax Reshape Resize Shape Slice Split Sqrt Squeeze Sub Tile Transpose Unsqueeze Where".split()
)
"""Operators between a head and the network's outputs that are no further layer."""

_BOX = 4
"""Numbers of a box."""

_LONGEST_DECODE = 256
"""Nodes looked at behind a head."""


def is_prediction_head(node: ir.Node) -> bool:
    """Whether a product with a constant weight is a last layer of a detector, or of a mask's scores.

    Such a layer, a prediction per place, is a convolution on a map of more than one place, or a product that gives four
    numbers per row; what leads from it to the network's outputs only moves, decodes and combines numbers; and something
    there decodes, or another convolution of the network ends so at another output. The last layer of a classifier is
    none: pooling stands behind its convolution or before its product.
    """
    if node.op_type in ("Conv", "ConvTranspose"):
        behind = _behind(node)
        if behind is None or not _has_places(node):
            return False
        kinds, outputs = behind
        return bool(kinds & _DECODES) or _ends_beside(node, outputs)
    shape = node.outputs[0].shape
    is_box = shape is not None and len(shape) >= 3 and shape[-1] == _BOX
    return is_box and _behind(node) is not None


def _behind(node: ir.Node) -> tuple[frozenset[str], frozenset[ir.Value]] | None:
    """The types of the operators between ``node`` and the network's outputs, and these; None where another layer is
    among them.

    A convolution to one channel behind a softmax is no layer but a mean: boxes given as distributions of distances.
    """
    front, seen = [(node.outputs[0], False)], {node}
    ends: set[ir.Value] = set()
    while front:
        value, weighed = front.pop()
        if value.is_graph_output():
            ends.add(value)
        for reader, _ in value.uses():
            if reader in seen:
                continue
            seen.add(reader)
            mean = weighed and reader.op_type == "Conv" and _channels_out(reader) == 1
            if len(seen) > _LONGEST_DECODE or not (mean or reader.op_type in _DECODES | _HANDS_ON):
                return None
            weighed_next = reader.op_type == "Softmax" or (weighed and reader.op_type in ("Reshape", "Transpose"))
            front += [(output, weighed_next) for output in reader.outputs]
    return frozenset(reader.op_type for reader in seen if reader is not node), frozenset(ends)


def _channels_out(conv: ir.Node) -> int:
    weight = edit.constant_tensor_of(conv.inputs[1])
    return int(weight.shape.numpy()[0]) if weight is not None else 0


def _has_places(node: ir.Node) -> bool:
    """Whether a convolution's map has, or may have, more than one place."""
    shape = node.outputs[0].shape
    return shape is None or any(dim != 1 for dim in list(shape)[2:])


def _ends_beside(node: ir.Node, outputs: frozenset[ir.Value]) -> bool:
    """Whether another convolution of the graph is a last layer too, of other outputs."""
    for other in node.graph or ():
        if other is not node and other.op_type == "Conv" and _has_places(other):
            behind = _behind(other)
            if behind is not None and not behind[1] & outputs:
                return True
    return False


def score_nodes(model: ir.Model, integer: Collection[str]) -> dict[str, str]:
    """Nodes to keep in FP32, by name, with the reason; those named in ``integer`` stay INT8."""
    reasons: dict[str, str] = {}
    for node in model.graph:
        if node.op_type not in _SQUASHING or not any(value.is_graph_output() for value in node.outputs):
            continue
        reasons[str(node.name)] = "its result leaves the network in FP32: rounding it on the way would only make ties"
        for head in _head(node.inputs[0]):
            if head.name not in integer:
                reasons[str(head.name)] = f"small, and its scores only pass {node.op_type} before they leave in FP32"
    return reasons


def _head(value: ir.Value | None) -> list[ir.Node]:
    """The product (and the addition of its bias) that makes ``value``, if it is small."""
    node = edit.maker_of(value)
    added = []
    if node is not None and node.op_type == "Add":
        added = [node]
        node = next((item.producer() for item in node.inputs if item is not None and item.producer() is not None), None)
    if node is None or node.op_type not in ("Gemm", "MatMul"):
        return []
    weight = edit.constant_tensor_of(node.inputs[1])
    return [node, *added] if weight is not None and weight.size <= SMALL_HEAD_WEIGHTS else []
