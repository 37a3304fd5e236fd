"""Transformers whose activations are [batch, tokens, features]."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.permute import can_permute, data_inputs, keeps_rank, permute
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_SWAP = (1, 0, 2)

_DEPTH = 8
"""Nodes between an attention and the Transpose behind its projection."""

_OVER_AN_AXIS = frozenset({"Softmax", "LogSoftmax", "ArgMax", "ArgMin"})
"""Operators that work along an axis of scores, not of features."""


@dataclass(frozen=True)
class BatchFirstAttention:
    """Lets a transformer work on [tokens, batch, features].

    Rewrite:
        Layers that treat every token alike (products with a weight, normalisation over the features, element-wise
        operators) give the same numbers for tokens in any order. Activations are transposed where they enter such a
        region, and back where they leave it; the Reshape and Transpose that split features into heads, and those that
        merge them, read and write the other order. Attention itself is not touched. Where each attention turns its
        tokens and turns them back, as torch's MultiheadAttention with the batch first does, these Transposes go.
    Requires:
        A batch of more than one, heads split by Reshape to [batch, tokens, heads, size] and a Transpose, at most scales
        and products with a weight between, or Transposes of the tokens around attention. Windows of a map are a batch.
    Why faster:
        In [tokens, batch, features] batch and heads are one axis with one stride, so that the fused attention kernel
        reads the projections and writes its result in place. TensorRT for RTX changes to this order by itself, but at
        the ends of a transformer it goes back and forth in kernels of its own, and splits the normalizations there: 31
        -> 29 kernels and 180.9 -> 166.7 MB for BERT of four blocks, batch 8, 20 -> 18 and 651.5 -> 577.5 MB for
        Whisper's encoder of two; torchvision's ViT of four blocks of 384, batch 8: 37 -> 33 kernels, 750.2 -> 646.1 us.
    Numerics:
        Exact: the same products and sums.
    Refuses when:
        The target is TensorRT, whose fusion expects the batch first. No match where more transposes would be needed
        than there are attentions, but for two. A normalization that only hands its result on stays in the old order.
    """

    name: str = "batch-first-attention"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Regions of layers that treat every token alike, around at least one attention."""
        places, is_fused = [], target.backend == "tensorrt"
        opset = model.graph.opset_imports.get("", 1)
        for graph in edit.all_graphs(model.graph):
            for region in _regions(graph, opset):
                if region.borders > region.merges + 2:
                    continue
                nodes = tuple(node for node in graph if node in region.nodes)
                places.append((Match(nodes), "TensorRT fuses attention with the batch first" if is_fused else ""))
        return Findings.of(places)

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Change the order in one region."""
        writer = _Writer(model, match.nodes, self.name)
        for node in match.nodes:
            writer.enter(node)
        for node in match.nodes:
            writer.turn(node)
        for node in match.nodes:
            writer.leave(node)
        return None


@dataclass
class _Region:
    """Nodes to be turned, and the values of rank 3 between them."""

    nodes: set[ir.Node] = field(default_factory=set)
    values: set[ir.Value] = field(default_factory=set)

    @property
    def merges(self) -> int:
        """Attentions whose heads are merged here, or whose tokens come in the other order."""
        turned = sum(_is_turned_back(value.producer()) for value in self.values)
        return turned + sum(_merged_by(node) is not None for node in self.nodes)

    @property
    def borders(self) -> int:
        """Transposes that it takes, less those that vanish."""
        return sum(self._transposes(value) for value in self.values)

    def _transposes(self, value: ir.Value) -> int:
        outside = [user for user, _ in value.uses() if user not in self.nodes]
        if value.producer() not in self.nodes:
            return 1 if not _is_swap(value.producer()) else 0 if outside else -1
        swaps = sum(map(_is_swap, outside))
        return int(value.is_graph_output() or len(outside) > swaps) - swaps


def _regions(graph: ir.Graph | ir.Function, opset: int) -> Iterator[_Region]:
    seen: set[ir.Node] = set()
    for seed in [node for each in graph for node in _seeds(each, opset)]:
        if seed in seen:
            continue
        region, stack = _Region(), [seed]
        seen.add(seed)
        while stack:
            node = stack.pop()
            region.nodes.add(node)
            for value in _ports(node, opset):
                if value in region.values:
                    continue
                region.values.add(value)
                near = [value.producer(), *(user for user, _ in value.uses())]
                for other in near:
                    if other is None or other in seen or other.graph is not graph:
                        continue
                    if value in _ports(other, opset):
                        seen.add(other)
                        stack.append(other)
        members = list(region.nodes)
        region.nodes.update(merge for member in members if (merge := _merged_by(member)) is not None)
        region.nodes.update(user for member in members for user in _split_by(member))
        _leave_before_norms(region)
        yield region


def _seeds(node: ir.Node, opset: int) -> list[ir.Node]:
    """A Reshape that merges heads, and what reads tokens that come from an attention on the other order."""
    if edit.is_op(node, "Reshape"):
        return [node] if _merged_by(node) is not None and not _is_single_batch(node.outputs[0]) else []
    if not _is_turned_back(node) or _is_single_batch(node.outputs[0]):
        return []
    readers = [user for user, _ in node.outputs[0].uses() if user.graph is node.graph]
    return [user for user in readers if node.outputs[0] in _ports(user, opset)]


def _is_swap(node: ir.Node | None) -> bool:
    return _perm(node) == _SWAP


def _is_turned_back(node: ir.Node | None) -> bool:
    """Whether a Transpose gives [batch, tokens, features] of what an attention gave as [tokens, batch, features]."""
    if node is None or not _is_swap(node):
        return False
    for _ in range(_DEPTH):
        node = _maker(node)
        perm = _perm(node)
        if len(perm) > 3:
            return perm[0] > perm[1] and _is_attention(node)
        if not edit.is_op(node, "Add", "Cast", "Gemm", "Identity", "MatMul", "Reshape"):
            return False
    return False


def _leave_before_norms(region: _Region) -> None:
    """Let a normalization that only hands its result on take its data in the old order: it can, in one kernel."""
    for node in [node for node in region.nodes if edit.is_op(node, "LayerNormalization", "RMSNormalization")]:
        users = [user for user, _ in node.outputs[0].uses()]
        if not any(user in region.nodes or _is_swap(user) for user in users):
            region.nodes.discard(node)
            region.values.discard(node.outputs[0])


def _ports(node: ir.Node, opset: int) -> list[ir.Value]:
    """The values of rank 3 that change their order together when ``node`` does; empty where it cannot."""
    first = edit.input_of(node, 0)
    if node.domain != "" or first is None:
        return []
    if _merged_by(node) is not None:
        return [node.outputs[0]]
    if _split_by(node):
        return [first]
    if edit.is_op(node, "Gather"):
        return [first] if _rank(first) == 3 and _picks_token(node) else []
    if edit.is_op(node, "MatMul"):
        weight = edit.constant_tensor_of(node.inputs[1])
        return [first, node.outputs[0]] if _rank(first) == 3 and weight is not None and len(weight.shape) == 2 else []
    if edit.is_op(node, "LayerNormalization", "RMSNormalization"):
        plain = edit.int_attribute(node, "axis", -1) in (-1, 2) and not any(v.uses() for v in node.outputs[1:])
        scales = [edit.constant_tensor_of(value) for value in node.inputs[1:]]
        plain = plain and all(each is not None and math.prod(edit.dims_of(each)[:-1]) == 1 for each in scales)
        return [first, node.outputs[0]] if plain and _rank(first) == 3 else []
    if node.op_type in _OVER_AN_AXIS or not can_permute(node, _SWAP, opset) or not keeps_rank(node):
        return []
    found = [node.inputs[index] for index in data_inputs(node, 3)]
    return [*(value for value in found if value is not None), *node.outputs]


def _rank(value: ir.Value | None) -> int | None:
    return None if value is None or value.shape is None else len(value.shape)


def _picks_token(node: ir.Node) -> bool:
    index = edit.constant_of(edit.input_of(node, 1))
    return edit.int_attribute(node, "axis", 0) in (1, -2) and index is not None and index.ndim == 0


def _perm(node: ir.Node | None) -> tuple[int, ...]:
    return (edit.ints_attribute(node, "perm") or ()) if edit.is_op(node, "Transpose") else ()


def _keeps_tokens(node: ir.Node) -> bool:
    """Whether a Reshape leaves the first two axes as they are."""
    before, after = node.inputs[0], node.outputs[0]
    if before is None or before.shape is None or after.shape is None or min(len(before.shape), len(after.shape)) < 2:
        return False
    sizes = [[dim for dim in shape[1:] if isinstance(dim, int)] for shape in (before.shape, after.shape)]
    is_known = [len(item) + 1 for item in sizes] == [len(before.shape), len(after.shape)]
    # Where only the batch is open, sizes of equal product say that it stays.
    axes = (1,) if is_known and math.prod(sizes[0]) == math.prod(sizes[1]) > 0 else (0, 1)
    pairs = [(before.shape[axis], after.shape[axis]) for axis in axes]
    return all((isinstance(old, int) or old.value is not None) and old == new for old, new in pairs)


def _merged_by(node: ir.Node) -> ir.Node | None:
    """The Transpose before a Reshape that merges heads into [batch, tokens, features]."""
    source = node.inputs[0] if edit.is_op(node, "Reshape") else None
    transpose = edit.maker_of(source)
    perm = _perm(transpose)
    if source is None or len(perm) < 4 or perm[0] > perm[1] or _rank(node.outputs[0]) != 3 or not _keeps_tokens(node):
        return None
    if not _is_attention(transpose):  # a recurrent layer's directions are merged likewise
        return None
    alone = len(source.uses()) == 1 and not source.is_graph_output()
    return transpose if alone and transpose is not None and transpose.graph is node.graph else None


def _is_attention(transpose: ir.Node | None) -> bool:
    """Whether a Transpose of heads reads an attention's."""
    values = _maker(transpose)
    if edit.is_op(values, "Reshape") and _rank(values.inputs[0]) == len(_perm(transpose)):
        values = _maker(values)  # it has that shape already
    return edit.is_op(values, "MatMul", "Einsum", "Attention")


def _maker(node: ir.Node | None) -> ir.Node | None:
    value = None if node is None else edit.input_of(node, 0)
    return edit.maker_of(value)


def _split_by(node: ir.Node) -> list[ir.Node]:
    """What is behind a Reshape that splits [batch, tokens, features] into heads, up to Transposes, which are last."""
    if not edit.is_op(node, "Reshape") or _rank(node.inputs[0]) != 3 or not _keeps_tokens(node):
        return []
    inside, turns, values = list[ir.Node](), list[ir.Node](), [node.outputs[0]]
    while values:
        value = values.pop()
        users = [user for user, _ in value.uses()]
        if value.is_graph_output() or not users or any(user.graph is not node.graph for user in users):
            return []
        for user in users:
            perm = _perm(user)
            if len(perm) > 3 and perm.index(0) < perm.index(1):
                turns.append(user)
            elif user not in inside and value is user.inputs[0] and _is_headwise(user) and len(inside) < _DEPTH:
                inside.append(user)
                values.append(user.outputs[0])
            else:
                return []
    return [*inside, *turns]


def _is_headwise(node: ir.Node) -> bool:
    """Whether a node computes each head of each token alike from its first operand: a scale, a product, a cast."""
    if node.domain or len(node.outputs) != 1 or len(node.inputs) > 2:
        return False
    if edit.is_op(node, "Cast", "Neg"):
        return True
    tensor = edit.constant_tensor_of(edit.input_of(node, 1))
    if edit.is_op(node, "MatMul"):
        return tensor is not None and len(tensor.shape) == 2
    return edit.is_op(node, "Add", "Div", "Mul", "Sub") and tensor is not None and len(tensor.shape) < 3


def _is_single_batch(tokens: ir.Value) -> bool:
    return tokens.shape is not None and tokens.shape[0] == 1


class _Writer:
    """Turns the nodes of one region."""

    def __init__(self, model: ir.Model, nodes: tuple[ir.Node, ...], recipe: str) -> None:
        self._recipe, opset = recipe, model.graph.opset_imports.get("", 1)
        self._splice = edit.Splice(model, nodes[0], recipe)
        self._region = frozenset(nodes)
        self._ports = {node: _ports(node, opset) for node in nodes}
        self._merges = {node: merge for node in nodes if (merge := _merged_by(node)) is not None}
        self._splits = {node: users for node in nodes if (users := _split_by(node))}
        self._entries: dict[ir.Value, ir.Value] = {}

    def enter(self, node: ir.Node) -> None:
        """Give a node its data in the other order."""
        for value in self._ports[node]:
            if value.producer() in self._region:
                continue
            for index, item in enumerate(node.inputs):
                if item is value:
                    node.replace_input_with(index, self._entry(value))

    def _entry(self, value: ir.Value) -> ir.Value:
        if value not in self._entries:
            self._entries[value] = self._splice.behind(value, "Transpose", attributes={"perm": _SWAP})
            _swap_shape(self._entries[value])
        return self._entries[value]

    def turn(self, node: ir.Node) -> None:
        """Change a node's attributes and constants, and those of the Transpose beside it."""
        if not self._ports[node]:
            return
        if node in self._merges:
            transpose = self._merges[node]
            perm = _perm(transpose)
            self._set_perm(transpose, (perm[1], perm[0], *perm[2:]))
            _swap_shape(transpose.outputs[0])
            self._swap_target(node)
        elif node in self._splits:
            for user in self._splits[node]:
                if not _perm(user):
                    _swap_shape(user.outputs[0])
                    continue
                self._set_perm(user, tuple({0: 1, 1: 0}.get(axis, axis) for axis in _perm(user)))
            _swap_shape(node.outputs[0])
            self._swap_target(node)
        elif edit.is_op(node, "Gather"):
            node.attributes["axis"] = ir.AttrInt64("axis", 0)
        elif not edit.is_op(node, "MatMul", "LayerNormalization", "RMSNormalization"):
            permute(node, _SWAP, self._splice.names)
        edit.tag(node, self._recipe)

    def _set_perm(self, node: ir.Node, perm: tuple[int, ...]) -> None:
        node.attributes["perm"] = ir.AttrInt64s("perm", perm)
        edit.tag(node, self._recipe)

    def _swap_target(self, node: ir.Node) -> None:
        """Exchange the first two entries of the shape that a Reshape gives."""
        splice, output, shape = self._splice, node.outputs[0], edit.constant_of(node.inputs[1])
        if shape is not None:
            swapped = np.concatenate([shape[1::-1], shape[2:]])
            node.replace_input_with(1, splice.constant(swapped, output, "shape"))
            return
        order = splice.ints([1, 0, *range(2, _rank(output) or 0)], output, "order")
        given = node.inputs[1]
        node.replace_input_with(1, splice.op("Gather", given, order, like=given, before=node))

    def leave(self, node: ir.Node) -> None:
        """Give the outputs of a node in the old order to those outside."""
        for value in node.outputs:
            if value not in self._ports[node]:
                continue
            self._splice.restore(value, "Transpose", self._region, attributes={"perm": _SWAP})
            _swap_shape(value)


def _swap_shape(value: ir.Value) -> None:
    if value.shape is not None:
        value.shape = ir.Shape([value.shape[1], value.shape[0], *value.shape[2:]])
