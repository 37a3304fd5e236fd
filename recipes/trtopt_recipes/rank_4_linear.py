"""Linear layers on tensors of rank 4, as 1x1 convolutions or on flattened tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_TO_FIRST, _TO_LAST = (0, 3, 1, 2), (0, 2, 3, 1)
"""[N, H, W, C] -> [N, C, H, W], and back."""

_CONV_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
"""A Conv of BF16 is not in ONNX before opset 22, one of doubles not in runtimes."""

_LEAST_PRODUCT = 256
"""Input and output channels from which on TensorRT for RTX 1.7 computes a 16-bit 1x1 convolution as a GEMM."""


@dataclass(frozen=True)
class Rank4Linear:
    """Runs linear layers of rank 4 as 1x1 convolutions or on flattened tokens.

    Rewrite:
        y[b, h, w, :] = x[b, h, w, :] W + c is a 1x1 convolution of x as [B, C, H, W] with the weight W^T and the bias
        c, and a product of x as [B H W, C] with W. What follows per element or per channel (bias, activation, a second
        linear layer, a scale) moves along, with convolutions a residual addition too; transposes around it cancel.
    Requires:
        MatMul of a tensor of rank 4 or more with a constant matrix. For tokens, at most one unknown dimension besides
        the channels; for convolutions, rank 4 and FP32 or FP16.
    Why faster:
        TensorRT for RTX fuses neither bias nor activation into a product of rank 4. Two ConvNeXt blocks (96 channels of
        56 x 56, batch 8, FP16): 12 kernels and 241 MB become 8 and 145 MB as convolutions, 10 and 164 MB on tokens.
        ConvNeXt-T with layer-scale, convolutions in the first two stages and tokens in the others: 117 kernels and
        915 MB become 94 and 592 MB.
    Numerics:
        The same products and sums; the order of the sums is the kernel's.
    Refuses when:
        The weights are quantized; the rank is unknown; for rank 5 and more, several unknown dimensions. Convolutions of
        256 and more channels, which TensorRT for RTX turns into GEMMs again, are not offered in FP16 where tokens are.
    """

    name: str = "rank-4-linear"
    stage: Stage = Stage.FUSE
    lossless: bool = True
    forms: tuple[str, ...] = ("conv", "tokens")

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Chains of linear layers and what stands between them; a match per form."""
        matches: list[Match] = []
        refusals: list[Refusal] = []
        for graph in edit.all_graphs(model.graph):
            for chain in _chains(graph, refusals):
                offered = [form for form in self.forms if _can(chain, form)]
                if len(offered) > 1 and _becomes_product(chain, target):
                    offered = ["tokens"]
                # Both forms name the transposes that one of them removes: alternatives are compared on one region.
                nodes = (*chain.nodes, *_cancelled(chain)) if "conv" in offered else tuple(chain.nodes)
                matches.extend(Match(nodes, choice=form) for form in offered)
                if not offered:
                    refusals.append(Refusal(str(chain.nodes[0].name), "several dimensions of its input are unknown"))
        return Findings(tuple(matches), tuple(refusals))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Rewrite one chain in one form."""
        nodes = [node for node in match.nodes if not edit.is_op(node, "Transpose")]
        entry = nodes[0].inputs[0]
        if entry is None or entry.shape is None:
            return Refusal(match.label, "the rank of its input is unknown")
        if any(node.graph is None for node in nodes):
            return Refusal(match.label, "it was changed by a rewrite before")
        chain = _Chain(entry, nodes)
        splice = edit.Splice(model, nodes[0], self.name)
        if match.choice == "conv":
            _as_convolutions(splice, chain)
        else:
            _on_tokens(splice, chain.without_residuals(), entry.shape)
        return None


@dataclass
class _Chain:
    """Nodes that compute each position of a tensor by itself, from linear layers on, and residual additions.

    ``place`` counts the chains of a graph.
    """

    entry: ir.Value
    nodes: list[ir.Node] = field(default_factory=list)
    place: int = 0

    def without_residuals(self) -> _Chain:
        """The part that depends on the input and constants alone."""
        known, nodes = {self.entry}, []
        for node in self.nodes:
            if all(v is None or v in known or edit.constant_tensor_of(v) is not None for v in node.inputs):
                known.add(node.outputs[0])
                nodes.append(node)
        return _Chain(self.entry, nodes)

    def exits(self) -> list[ir.Value]:
        """Values that others use."""
        inside = set(self.nodes)
        values = [node.outputs[0] for node in self.nodes]
        return [v for v in values if v.is_graph_output() or any(user not in inside for user, _ in v.uses())]


def _chains(graph: ir.Graph, refusals: list[Refusal]) -> Iterator[_Chain]:
    """The chains of a graph, each with all linear layers of one input."""
    chains: dict[ir.Value, _Chain] = {}
    owner: dict[ir.Value, _Chain] = {}
    for node in graph:
        if edit.is_op(node, "MatMul"):
            entry = node.inputs[0]
            reason = _why_not(node)
            if reason:
                refusals.append(Refusal(str(node.name), reason))
            if entry is None or reason is not None:
                continue
            chain = owner.get(entry) or chains.setdefault(entry, _Chain(entry, place=len(chains)))
        elif node.op_type in edit.ELEMENTWISE and node.domain == "" and owner:
            joined = _joined(node, owner)
            if joined is None:
                continue
            chain = joined
        else:
            continue
        chain.nodes.append(node)
        owner[node.outputs[0]] = chain
    yield from chains.values()


def _why_not(node: ir.Node) -> str | None:
    """None for a linear layer of rank 4 or more; else the reason, empty where it is another thing."""
    entry, right = node.inputs
    rank = None if entry is None or entry.shape is None else len(entry.shape)
    if rank is not None and rank < 4:
        return ""
    weight = edit.constant_tensor_of(right)
    if weight is None:
        producer = edit.maker_of(right)
        quantized = edit.is_op(producer, "DequantizeLinear") and edit.constant_tensor_of(
            producer.inputs[0] if producer else None
        )
        return "its weights are quantized" if quantized and rank is not None else ""
    dims = edit.dims_of(weight)
    if len(dims) < 2 or math.prod(dims[:-2]) != 1 or weight.dtype.is_integer():
        return ""
    if rank is None:
        return "the rank of its input is unknown"
    return None if len(dims) <= rank else ""


def _joined(node: ir.Node, owner: dict[ir.Value, _Chain]) -> _Chain | None:
    """The chain that the inputs of an elementwise node belong to, constants per channel aside.

    An addition may have one operand from elsewhere (a residual); of two chains that meet in it, the later one gets it.
    """
    values = [value for value in node.inputs if value is not None]
    found = [owner[value] for value in values if value in owner]
    if not found:
        return None
    chain = max(found, key=lambda item: item.place)
    rank = 0 if chain.entry.shape is None else len(chain.entry.shape)
    for value in values:
        tensor = edit.constant_tensor_of(value)
        if tensor is not None:
            if math.prod(edit.dims_of(tensor)[:-1]) != 1 or len(edit.dims_of(tensor)) > rank:
                return None
        elif owner.get(value) is not chain and not (edit.is_op(node, "Add") and _same_shape(value, node.outputs[0])):
            return None
    return chain


def _same_shape(value: ir.Value, other: ir.Value) -> bool:
    if value.shape is None or other.shape is None or value.shape != other.shape:
        return False
    return all(isinstance(dim, int) or dim.value is not None for dim in value.shape)


def _can(chain: _Chain, form: str) -> bool:
    shape = chain.entry.shape
    if shape is None:
        return False
    if form == "conv":
        types = [node.outputs[0].dtype for node in chain.nodes if edit.is_op(node, "MatMul")]
        return len(shape) == 4 and all(dtype in _CONV_TYPES for dtype in types)
    known = [isinstance(dim, int) for dim in shape[:-1]]
    ends = [value.shape for value in chain.without_residuals().exits()]
    return known.count(False) <= 1 and all(end is not None and isinstance(end[-1], int) for end in ends)


def _becomes_product(chain: _Chain, target: Target) -> bool:
    """Whether TensorRT for RTX turns one of the 1x1 convolutions into a GEMM over [N, C, H W] again.

    Layer normalization before it and the residual addition behind it then cost more than on tokens (three ConvNeXt
    blocks, 384 channels of 14 x 14: 81 MB instead of 74).
    """
    if target.backend != "tensorrt-rtx" or target.precision in ("fp32", "tf32"):
        return False
    return any(min(_matrix(node).shape) >= _LEAST_PRODUCT for node in chain.nodes if edit.is_op(node, "MatMul"))


def _cancelled(chain: _Chain) -> list[ir.Node]:
    """The transposes before and behind a chain that convolutions do without."""
    before = chain.entry.producer()
    first = [before] if before is not None and _is_transpose(before, _TO_LAST) and _is_only_use(chain) else []
    return first + [node for value in chain.exits() for node in _channels_first(value, chain)]


def _is_only_use(chain: _Chain) -> bool:
    inside = set(chain.nodes)
    return not chain.entry.is_graph_output() and all(user in inside for user, _ in chain.entry.uses())


def _channels_first(value: ir.Value, chain: _Chain) -> list[ir.Node]:
    """The transposes of an exit to [N, C, H, W]; of those that are graph outputs, one."""
    users = dict.fromkeys(user for user, _ in value.uses())
    found = [node for node in users if _is_transpose(node, _TO_FIRST) and node.graph is chain.nodes[0].graph]
    named = [node for node in found if node.outputs[0].is_graph_output()]
    return [node for node in found if node not in named[1:]]


def _is_transpose(node: ir.Node, order: tuple[int, ...]) -> bool:
    return edit.is_op(node, "Transpose") and edit.ints_attribute(node, "perm") == order


def _as_convolutions(splice: edit.Splice, chain: _Chain) -> None:
    before = chain.entry.producer()
    cancelled = _cancelled(chain)
    exits = {value: _channels_first(value, chain) for value in chain.exits()}
    for value, transposes in exits.items():
        splice.restore(value, "Transpose", {*chain.nodes, *transposes}, attributes={"perm": _TO_LAST})
    data: ir.Value | None
    if before is not None and _is_transpose(before, _TO_LAST):
        data = before.inputs[0]
    else:
        data = splice.fresh("Transpose", chain.entry, attributes={"perm": _TO_FIRST}, like=chain.entry)
    _move(splice, chain, data, channels_first=True)
    for node in chain.nodes:
        if edit.is_op(node, "MatMul"):
            _replace_by_convolution(splice, node)
    for node in cancelled:
        if node is before:
            edit.remove_node(node)
        else:
            splice.bypass(node)


def _replace_by_convolution(splice: edit.Splice, node: ir.Node) -> None:
    weight = _matrix(node)
    kernel = splice.constant(np.ascontiguousarray(weight.T)[:, :, None, None], node.outputs[0], "weight")
    add = _bias_after(node, weight.shape[1])
    last, inputs = node, [node.inputs[0], kernel]
    if add is not None:
        bias = next(array for array in map(edit.constant_of, add.inputs) if array is not None)
        last = add
        inputs.append(
            splice.constant(np.broadcast_to(bias.reshape(-1), weight.shape[1]).copy(), add.outputs[0], "bias")
        )
    splice.replace(last, "Conv", inputs, attributes={"kernel_shape": (1, 1)})
    if add is not None:
        edit.remove_node(node)


def _bias_after(node: ir.Node, channels: int) -> ir.Node | None:
    """The Add of a constant per channel that alone uses a product."""
    value = node.outputs[0]
    uses = tuple(value.uses())
    add = uses[0].node if len(uses) == 1 and not value.is_graph_output() else None
    if not edit.is_op(add, "Add") or add.graph is not node.graph:
        return None
    other = add.inputs[1] if add.inputs[0] is value else add.inputs[0]
    tensor = edit.constant_tensor_of(other)
    return add if tensor is not None and tensor.size in (1, channels) and tensor.dtype == value.dtype else None


def _on_tokens(splice: edit.Splice, chain: _Chain, shape: ir.Shape) -> None:
    leading = [dim if isinstance(dim, int) else -1 for dim in shape[:-1]]
    if -1 not in leading:
        leading[0] = -1  # the graph then stays good for other batches
    for value in chain.exits():
        channels = value.shape[-1] if value.shape is not None else -1
        target = splice.ints([*leading, channels], value, "shape")
        splice.restore(value, "Reshape", set(chain.nodes), target)
    flat = splice.ints([-1, _matrix(chain.nodes[0]).shape[0]], chain.entry, "shape")
    data = splice.fresh("Reshape", chain.entry, flat, like=chain.entry)
    _move(splice, chain, data, channels_first=False)


def _move(splice: edit.Splice, chain: _Chain, data: ir.Value | None, *, channels_first: bool) -> None:
    """Let the chain read ``data``, and bring its constants and residuals into that layout."""
    inner = {node.outputs[0] for node in chain.nodes}
    for node in chain.nodes:
        linear = edit.is_op(node, "MatMul")
        for index, value in enumerate(node.inputs):
            array = edit.constant_of(value)
            if value is chain.entry:
                node.replace_input_with(index, data)
            elif value is None or value in inner:
                continue
            elif array is None:
                node.replace_input_with(index, _residual(splice, node, value))
            elif linear:
                if array.ndim > 2:
                    node.replace_input_with(index, splice.constant(_matrix(node), node.outputs[0], "weight"))
            elif array.ndim > 0:
                moved = array.reshape((-1, 1, 1) if channels_first else -1)
                if moved.shape != array.shape:
                    node.replace_input_with(index, splice.constant(moved, node.outputs[0], "constant"))
        # What was inferred of the old layout no longer holds.
        node.outputs[0].shape = None


def _residual(splice: edit.Splice, node: ir.Node, value: ir.Value) -> ir.Value | None:
    """``value`` as [N, C, H, W]."""
    producer = value.producer()
    if producer is None or not _is_transpose(producer, _TO_LAST):
        moved = splice.fresh("Transpose", value, attributes={"perm": _TO_FIRST}, like=value, before=node)
        return moved
    return producer.inputs[0]


def _matrix(node: ir.Node) -> np.ndarray:
    weight = edit.array_of(node.inputs[1])
    return weight.reshape(weight.shape[-2:])
