"""Which nodes share a kernel: the fusions TensorRT is known to do.

Its documentation lists them: convolution or matrix product with bias, activation, scale and residual; chains of
element-wise operators; normalisations and softmax with what surrounds them; attention. Measured against the kernels
TensorRT for RTX 1.7.1 lists (batch 8, FP16; BERT with 128 tokens):

============  ======================  ======  ====================  ======
network       kernels, compiler       here    megabytes, compiler   here
============  ======================  ======  ====================  ======
ResNet-50     58                      57      518                   510
MobileNetV2   56                      55      238                   231
ViT-B/16      125                     115     1132                  1008
BERT-base     147                     110     861                   702
ConvNeXt-T    117                     84      973                   624
============  ======================  ======  ====================  ======

Flop agree exactly. The compiler has more kernels that copy into another layout, that add biases before attention and
residuals before a normalisation, and that apply what follows a product of rank 4; it has fewer where it merges products
of one tensor (query, key and value), which stay apart here.

Fusing must not make a kernel wait for itself. A product takes in what follows it as long as all users of its result are
taken in, so that nothing but the last result leaves the kernel: no path can lead out of it and back. For the rest see
:mod:`trtopt.roofline.clusters`.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from trtopt.graph.edit import input_of, is_op
from trtopt.roofline.clusters import ROWWISE, FusedKernel, joined_kernels
from trtopt.roofline.flow import Flow, is_pointwise
from trtopt.roofline.node_work import dequantized, product_type
from trtopt.support.precision import Precision

_FUSING_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum")

_LARGEST_REGION = 24
"""Nodes between a product's result and the value they all flow into: GELU, a decomposed softmax with its mask, ..."""

_ATTENTION_TYPES = frozenset({Precision.FP16, Precision.BF16, Precision.INT8, Precision.FP8})
_ATTENTION_HEADS = range(9, 257)
"""Sizes of a head for which the compiler has a fused kernel; never in FP32 or TF32 (measured on TensorRT for RTX 1.7:
10 to 256 are fused, 8 and 512 are not)."""


def kernels_of(flow: Flow) -> list[FusedKernel]:
    """Group the nodes of a graph into kernels, in an order in which they can run. Each of ``flow.nodes`` is in exactly
    one of them."""
    owned: dict[ir.Node, FusedKernel] = {}
    for node in flow.nodes:
        if is_op(node, "MatMul", "Einsum") and node not in owned:
            _own(owned, _attention(flow, node, owned))
    for node in reversed(flow.nodes):
        if is_op(node, *_FUSING_PRODUCTS) and node not in owned:
            _own(owned, _with_epilogue(flow, node, owned))
    return joined_kernels(flow, owned)


def _own(owned: dict[ir.Node, FusedKernel], kernel: FusedKernel | None) -> None:
    if kernel is not None:
        owned.update(dict.fromkeys(kernel.nodes, kernel))


def _attention(flow: Flow, first: ir.Node, owned: dict[ir.Node, FusedKernel]) -> FusedKernel | None:
    """Q K^T, whatever is done to the scores, softmax, and the product with V, when nothing else reads the scores.

    Quantizing the scores breaks the fusion, unless all three operands are quantized too (measured on TensorRT for RTX).
    """
    scores = flow.elements(first.outputs[0])
    if not scores or not _has_fused_attention(flow, first):
        return None
    quantized = flow.quantized(first) is not None

    def may_join(node: ir.Node) -> bool:
        if is_op(node, "QuantizeLinear") and not quantized:
            return False
        size = flow.elements(node.outputs[0]) or 0
        return size == scores if is_pointwise(node) else node.op_type in ROWWISE

    nodes, end = _grown(flow, first.outputs[0], may_join, owned)
    users = flow.users.get(end, [])
    has_softmax = any(is_op(node, "Softmax", "ReduceSum") for node in nodes)
    if not has_softmax or end in flow.kept or len(users) != 1:
        return None
    second = users[0]
    if second in owned or not is_op(second, "MatMul", "Einsum") or quantized != (flow.quantized(second) is not None):
        return None
    left, right = (None if value is None else flow.behind(value) for value in second.inputs[:2])
    if left is not end or right is end:
        return None
    inner = sorted(nodes, key=flow.position.__getitem__)
    return FusedKernel(first, [first, *inner, second, *_quantizers(flow, second.outputs[0], owned)], is_attention=True)


def _has_fused_attention(flow: Flow, product: ir.Node) -> bool:
    """Whether the compiler has a fused attention for Q K^T of this type and head size."""
    query, key = product.inputs[0], input_of(product, 1)
    shape = flow.shapes.get(str(query.name)) if query is not None else None
    if shape is None or len(shape) < 3 or key is None or flow.is_constant(key):
        return False
    return shape[-1] in _ATTENTION_HEADS and product_type(product, flow.precision) in _ATTENTION_TYPES


def _with_epilogue(flow: Flow, product: ir.Node, owned: dict[ir.Node, FusedKernel]) -> FusedKernel:
    """A product with the element-wise operators that follow it, and the quantizers of its result."""
    size = flow.elements(product.outputs[0])

    def may_join(node: ir.Node) -> bool:
        if is_op(node, "QuantizeLinear"):
            return False
        return is_pointwise(node) and flow.elements(node.outputs[0]) == size

    if size is None:
        return FusedKernel(product, [product])
    nodes, end = _grown(flow, product.outputs[0], may_join, owned)
    if not is_op(product, "Conv", "ConvTranspose") or _writes_quantized(flow, product, nodes):
        nodes += _quantizers(flow, end, owned)
    return FusedKernel(product, [product, *sorted(set(nodes), key=flow.position.__getitem__)])


def _quantizers(flow: Flow, value: ir.Value, owned: dict[ir.Node, FusedKernel]) -> list[ir.Node]:
    """The quantizers that a kernel takes in: its result leaves it in one type, so nobody else may read it."""
    users = flow.users.get(value, [])
    if value in flow.kept or not all(_is_quantizer(flow, user) and user not in owned for user in users):
        return []
    return list(users)


def _writes_quantized(flow: Flow, conv: ir.Node, nodes: list[ir.Node]) -> bool:
    """Whether a convolution with the epilogue ``nodes`` has a kernel that writes 8 bits.

    It has to read 8 bits, and so must the residual it adds: with a floating one its result is floating, and the
    quantizer behind it a kernel of its own (TensorRT's documentation on skip connections).
    """
    inside = {value for node in (conv, *nodes) for value in node.outputs}
    residuals = [
        value
        for node in nodes
        for value in node.inputs
        if value is not None and value not in inside and not flow.is_constant(value)
    ]
    return flow.quantized(conv) is not None and all(dequantized(value) is not None for value in residuals)


def _is_quantizer(flow: Flow, node: ir.Node) -> bool:
    return is_op(node, "QuantizeLinear") and len(flow.inputs(node)) == 1


def _grown(
    flow: Flow, value: ir.Value, may_join: Callable[[ir.Node], bool], owned: dict[ir.Node, FusedKernel]
) -> tuple[list[ir.Node], ir.Value]:
    """The nodes that ``value`` flows through one region after the other, and the value that leaves the last one."""
    nodes: list[ir.Node] = []
    while True:
        region = _region(flow, value, may_join, owned)
        if region is None:
            return nodes, value
        nodes += region[0]
        value = region[1]


def _region(
    flow: Flow, value: ir.Value, may_join: Callable[[ir.Node], bool], owned: dict[ir.Node, FusedKernel]
) -> tuple[list[ir.Node], ir.Value] | None:
    """The fewest users of ``value``, and their users, such that a single value leaves them; None without such."""

    def is_open(item: ir.Value) -> bool:
        users = flow.users.get(item)
        return not users or item in flow.kept or any(user not in nodes for user in users)

    def first_use(item: ir.Value) -> int:
        return min((flow.position[user] for user in flow.users.get(item, ())), default=-1)

    nodes: dict[ir.Node, None] = {}
    leaving = [value]
    while leaving:
        value = min(leaving, key=first_use)
        users = flow.users.get(value, [])
        if not users or value in flow.kept or len(nodes) + len(users) > _LARGEST_REGION:
            return None
        if any(user in owned or user in flow.free or not may_join(user) for user in users):
            return None
        nodes.update(dict.fromkeys(users))
        outputs = (output for user in users for output in user.outputs if output.name)
        leaving = [item for item in dict.fromkeys((*leaving, *outputs)) if is_open(item)]
        if len(leaving) == 1:
            return list(nodes), leaving[0]
    return None
