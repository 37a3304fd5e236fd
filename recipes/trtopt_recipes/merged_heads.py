"""Attention whose heads were merged into the batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.dimension import Dim, factors_of, product_of
from trtopt.graph.dims import Dimensions
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_UNARY = frozenset("Abs Cast Clip Elu Erf Exp LeakyRelu Log Neg Relu Sigmoid Softplus Sqrt Tanh".split())
_BINARY = frozenset("Add Div Mul Sub Where".split())
_MERGED = "what was merged here is used merged, too"

_Lead = tuple[Dim, Dim]


@dataclass(frozen=True)
class MergedHeads:
    """Computes attention on [batch, heads, ...], where exports merge both axes first and split them afterwards.

    Rewrite:
        Reshape(f(Reshape(q, [-1, s, d]), Reshape(k, [-1, t, d]), ...), [b, h, s, t]) = f(q, k, ...) for q of
        [b, h, s, d], k of [b, h, t, d] and so on. f: products of such tensors with each other or with a matrix,
        Softmax, Transposes of the other axes, element-wise operators whose other operands are the same for all heads,
        or were repeated for every entry of the batch (ALiBi's slopes). The shapes may be computed. Likewise for heads
        that are merged as Transpose(Reshape(x, [s, b * h, d])) for x of [s, b, h * d], and turned back by a Transpose.
    Requires:
        Dimensions that are provably equal: the trailing ones before and after the Reshapes, and the two that are
        merged. A product of two such tensors; nothing between is used outside, or is a graph output.
    Why faster:
        torch.bmm and torch.baddbmm take tensors of rank 3, so that attention written with them merges heads into the
        batch, splits them where a mask is added, and merges them again. The recipes for attention, and the compiler's
        fused kernel, look for one product, Softmax and one product with nothing between that moves axes (BLOOM, three
        blocks, batch 8 and 128 tokens: 34 -> 23 kernels, no stream syncs instead of 21). torch's MultiheadAttention
        that returns its weights, which is its default, does the same with the tokens first (three blocks of 384, batch
        8: 33 -> 25 kernels, 490 -> 372 us by a plain roofline of an L4).
    Numerics:
        Exact.
    Refuses when:
        A tensor between is used merged elsewhere, too.
    """

    name: str = "merged-heads"
    stage: Stage = Stage.CLEAN
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Connected nodes between such Reshapes, each named after the last; what splits or turns is at the end."""
        nodes = list(model.graph)
        if not any(_may_merge(node) for node in nodes):
            return Findings(())
        known = Dimensions(model)
        leads = _leads(nodes, known)
        matches, refusals = [], []
        for inner in _connected(nodes, leads, known):
            readers = [user for node in inner for user, _ in node.outputs[0].uses()]
            ends = [user for user in readers if user not in inner]
            if not ends:
                continue
            whole = all(_splits(user, leads, known) or _turns(user, known) for user in ends)
            if whole and not any(node.outputs[0].is_graph_output() for node in inner):
                matches.append(Match((*inner, *dict.fromkeys(ends))))
            elif any(_splits(user, leads, known) for user in ends):
                refusals.append(Refusal(str(inner[-1].name), _MERGED))
        return Findings(tuple(matches), tuple(refusals))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Compute on the axes as they were before they were merged; unused Reshapes are left to dead-node."""
        known = Dimensions(model)
        leads = _leads(model.graph, known)
        inner = [node for node in match.nodes if node.outputs[0] in leads and _merges(node, known) is None]
        ends = [node for node in match.nodes if node not in inner]
        if not inner or any(
            node.graph is None or not (_splits(node, leads, known) or _turns(node, known)) for node in ends
        ):
            return Refusal(match.label, "it is not merged and split any more")
        for node in inner:
            for index, value in enumerate(node.inputs):
                source = _unmerged(model, value, node.outputs[0], leads[node.outputs[0]], known)
                if source is not None:
                    node.replace_input_with(index, source)
        for node in inner:
            perm, axis = edit.ints_attribute(node, "perm"), edit.int_attribute(node, "axis", -1)
            if perm is not None:
                node.attributes["perm"] = ir.AttrInt64s("perm", [0, 1, *(axis + 1 for axis in perm[1:])])
            elif node.op_type == "Softmax" and axis > 0:
                node.attributes["axis"] = ir.AttrInt64("axis", axis + 1)
            node.outputs[0].shape = None
            edit.tag(node, self.name)
        for node in ends:
            made = node.inputs[0]
            if edit.is_op(node, "Transpose"):
                _turn_apart(edit.Splice(model, node, self.name), node, known)
                continue
            if made is not None:
                made.shape = node.outputs[0].shape
            edit.Splice(model, node, self.name).bypass(node)
        return None


def _may_merge(node: ir.Node) -> bool:
    return edit.is_op(node, "Reshape")


def _leads(nodes: Iterable[ir.Node], known: Dimensions) -> dict[ir.Value, _Lead]:
    """The two axes that the first axis of a tensor was, by tensor."""
    leads: dict[ir.Value, _Lead] = {}
    for node in nodes:
        found = _merges(node, known) or _carried(node, leads, known)
        if found is not None:
            leads[node.outputs[0]] = found
    return leads


def _merges(node: ir.Node, known: Dimensions) -> _Lead | None:
    """The batch and the heads that a Reshape merges, or a Transpose of one; None where it may do anything else."""
    if edit.is_op(node, "Transpose"):
        return _merges_turned(node, known)
    if not _may_merge(node):
        return None
    before, after = known.of(node.inputs[0]), known.of(node.outputs[0])
    if before is None or after is None or len(before) < 4 or len(after) != len(before) - 1:
        return None
    # One dimension that nobody can name is what the others leave.
    unlike = sum(one != other for one, other in zip(before[2:], after[1:], strict=True))
    whole = after[0] == product_of(*factors_of(before[:2]))
    return (before[0], before[1]) if unlike == 0 or (unlike == 1 and whole) else None


def _merges_turned(node: ir.Node, known: Dimensions) -> _Lead | None:
    """Batch and heads where a Transpose puts them first of what a Reshape makes of [tokens, batch, features]."""
    perm, source = edit.ints_attribute(node, "perm") or (), node.inputs[0]
    reshape = edit.maker_of(source)
    if len(perm) != 3 or perm[0] != 1 or reshape is None or not _may_merge(reshape) or not known.is_main(node):
        return None
    before, after = known.of(reshape.inputs[0]), known.of(source)
    if before is None or after is None or len(before) != 3 or len(after) != 3 or before[0] != after[0]:
        return None
    width, size = before[2], after[2]
    if not isinstance(width, int) or not isinstance(size, int) or size < 1 or width % size or width == size:
        return None
    lead = (before[1], width // size)
    return lead if after[1] == product_of(*factors_of(lead)) else None


def _turns(node: ir.Node, known: Dimensions) -> bool:
    """Whether a Transpose moves the merged axis of three behind another."""
    perm, dims = edit.ints_attribute(node, "perm") or (), known.of(node.outputs[0])
    return len(perm) == 3 and perm[0] != 0 and known.is_main(node) and dims is not None and isinstance(dims[2], int)


def _turn_apart(splice: edit.Splice, node: ir.Node, known: Dimensions) -> None:
    """Transpose with the axes apart, and merge them behind."""
    made, perm = node.outputs[0], edit.ints_attribute(node, "perm") or ()
    turned = splice.fresh("Transpose", node.inputs[0], attributes={"perm": _apart(perm, 0)}, like=made)
    size = (known.of(made) or ())[2]  # a number, as _turns has seen
    shape = np.asarray([*(-1 if axis == 0 else 0 for axis in perm[:-1]), size], np.int64)
    splice.finish(splice.op("Reshape", turned, splice.constant(shape, made, "shape"), like=made))


def _apart(perm: tuple[int, ...], merged: int) -> tuple[int, ...]:
    """An order of axes, of which one is two."""
    pairs = ((axis, axis + 1) if axis == merged else (axis + (axis > merged),) for axis in perm)
    return tuple(axis for pair in pairs for axis in pair)


def _splits(node: ir.Node, leads: Mapping[ir.Value, _Lead], known: Dimensions) -> bool:
    """Whether a Reshape in the main graph gives a tensor the two axes back that were merged, and nothing else."""
    value = node.inputs[0] if _may_merge(node) and known.is_main(node) else None
    before, after = known.of(value), known.of(node.outputs[0])
    if value is None or value not in leads or before is None or after is None or len(after) != len(before) + 1:
        return False
    unlike = sum(one != other for one, other in zip((*leads[value], *before[1:]), after, strict=True))
    return unlike <= 1


def _carried(node: ir.Node, leads: Mapping[ir.Value, _Lead], known: Dimensions) -> _Lead | None:
    """The axes in the first one of what an operator makes, where it works on each entry of that axis by itself."""
    given = [value for value in node.inputs if value is not None]
    merged = [value for value in given if value in leads]
    if not merged or len({leads[value] for value in merged}) != 1:
        return None
    ranks = {len(known.of(value) or ()) for value in merged}
    rank, lead, others = max(ranks), leads[merged[0]], [value for value in given if value not in leads]
    if len(ranks) != 1 or rank < 3:
        return None
    perm, axis = edit.ints_attribute(node, "perm"), edit.int_attribute(node, "axis", -1)
    if edit.is_op(node, "MatMul"):
        fits = all(len(known.of(value) or ()) == 2 for value in others)
    elif edit.is_op(node, "Transpose"):
        fits = perm is not None and perm[0] == 0
    elif edit.is_op(node, "Softmax"):
        fits = axis % rank != 0
    else:
        fits = edit.is_op(node, *_UNARY, *_BINARY) and all(_is_alike(value, rank, lead, known) for value in others)
    return lead if fits else None


def _is_alike(value: ir.Value, rank: int, lead: _Lead, known: Dimensions) -> bool:
    """Whether an operand is the same for every entry of the merged axis, or repeated for every entry of the first."""
    dims = known.of(value)
    if dims is None or len(dims) > rank:
        return False
    return len(dims) < rank or dims[0] == 1 or _repeated(value, rank, lead, known) is not None


def _repeated(value: ir.Value, rank: int, lead: _Lead, known: Dimensions) -> ir.Value | None:
    """What of the rank of merged tensors is repeated as a whole for every entry of the first of the two axes; the
    second is longer than 1."""
    node = value.producer()
    source = node.inputs[0] if edit.is_op(node, "Tile") else None
    before, after = known.of(source), known.of(value)
    if before is None or after is None or len(after) != rank or before[1:] != after[1:]:
        return None
    return source if before[0] == lead[1] and isinstance(lead[1], int) and lead[1] > 1 else None


def _unmerged(
    model: ir.Model, value: ir.Value | None, made: ir.Value, lead: _Lead, known: Dimensions
) -> ir.Value | None:
    """What stands for an operand of a merged tensor where the axes are not merged; None where it does itself."""
    node = edit.maker_of(value)
    if value is None or node is None:
        return None
    if _merges(node, known) == lead:
        return node.inputs[0] if _may_merge(node) else _split_before(model, node, lead, known)
    return _repeated(value, len(known.of(made) or ()), lead, known)


def _split_before(model: ir.Model, node: ir.Node, lead: _Lead, known: Dimensions) -> ir.Value | None:
    """Heads that are split before a Transpose, and not merged with the batch."""
    splice, made, source = edit.Splice(model, node, MergedHeads.name), node.outputs[0], node.inputs[0]
    reshape = edit.maker_of(source)
    if reshape is None:
        return None
    size = (known.of(source) or ())[2]  # a number, as _merges_turned has seen
    shape = splice.ints([0, 0, lead[1], size], made, "shape")
    value = splice.fresh("Reshape", reshape.inputs[0], shape, like=made)
    perm = _apart(edit.ints_attribute(node, "perm") or (), 1)
    return splice.fresh("Transpose", value, attributes={"perm": perm}, like=made)


def _connected(
    nodes: Iterable[ir.Node], leads: Mapping[ir.Value, _Lead], known: Dimensions
) -> Iterator[tuple[ir.Node, ...]]:
    """The nodes that carry merged axes to each other, a product of two such tensors among them."""
    groups: dict[ir.Node, list[ir.Node]] = {}
    for node in nodes:
        if not node.outputs or node.outputs[0] not in leads or _merges(node, known) is not None:
            continue
        makers = [value.producer() for value in node.inputs if value is not None and value in leads]
        joined = [node]
        for group in {id(groups[maker]): groups[maker] for maker in makers if maker in groups}.values():
            joined = [*group, *joined]
        groups.update(dict.fromkeys(joined, joined))
    order = {node: index for index, node in enumerate(nodes)}
    for group in {id(group): group for group in groups.values()}.values():
        if any(edit.is_op(node, "MatMul") and all(value in leads for value in node.inputs) for node in group):
            yield tuple(sorted(group, key=order.__getitem__))
