"""Expands of what its readers repeat anyway, and shapes that are computed, or taken of what is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.dimension import Dim
from trtopt.graph.dims import Dimensions
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_ENTRYWISE = frozenset(
    "Abs Cast Ceil Clip Cos Elu Erf Exp Floor Gelu Identity IsInf IsNaN LeakyRelu Log Neg Not Reciprocal Relu Round "
    "Selu Sigmoid Sign Sin Softplus Sqrt Tanh".split()
)
_CARRYING = frozenset("Concat LayerNormalization Reshape Softmax Transpose Unsqueeze".split())
_MATRIX, _AXES = 2, 13
"""The rank of a matrix, and the opset from which on the axes of Unsqueeze are an input."""
_HEADS = -3
"""The axis of the heads of attention."""
_DEPTH, _PASSES = 16, 4
"""Operators followed behind an Expand, and how often what else of them becomes short is looked at."""


@dataclass(frozen=True)
class ExpandedOperand:
    """Leaves out an Expand whose readers repeat their operands anyway, and gives others a shape that is short to say.

    Rewrite:
        Add(scores, Where(Expand(mask, [Shape(x)[0], 1, 32, 32]), 0, -inf)) becomes Add(scores, Where(mask, 0, -inf)).
        Expand(token, Where(Equal(s, -1), 1, s)) for s = [Shape(x)[0], -1, -1] becomes
        Expand(token, Concat(Shape(x)[0:1], [1, 1])), and so does Shape(Max(rows, columns)) become
        Concat(Shape(x)[0:1], [1], Shape(x)[1:2]).
    Requires:
        Each reader of the Expand up to an operator with another operand that provably has the repeated dimension is
        element-wise, a Gather from a constant, a product that does not sum over it, a Transpose, a Reshape that leaves
        it where it is, an Unsqueeze, a normalization or Softmax of axes behind it, or a Concat of nothing else. Not for
        keys and values that the heads of an attention share: fused attention wants them for each head. For the
        others, a shape of numbers and named dimensions of inputs, and opset 15; an axis is asked of the first input
        that has a dimension of its name.
    Why faster:
        A constant mask is one row, whatever the batch, and folds with what else is constant. Two layers of a ViT with
        SDPA at batch 1 to 8, on TensorRT for RTX: 29 -> 28 kernels. So do positions and the weights they are multiplied
        by: XLNet of three layers in FP16, batch 8, 1290 -> 1236 us by a plain roofline of an L4. What is computed for
        its shape alone goes.
    Numerics:
        Exact.
    Refuses when:
        Never: an Expand whose readers need it does not match.
    """

    name: str = "expanded-operand"
    stage: Stage = Stage.FOLD
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Expands, and Shapes; the choice of a match is ``dropped`` or ``shape``."""
        nodes = [node for node in model.graph if edit.is_op(node, "Expand", "Shape")]
        known = Dimensions(model) if nodes else None
        matches = []
        for node in nodes:
            if known is None:
                break
            if node.op_type == "Shape":
                if _is_elsewhere(model, known, node):
                    matches.append(Match((node,), choice="shape"))
            elif _is_dropped(known, node) and (_keeps_rank(node) or model.graph.opset_imports.get("", 1) >= _AXES):
                matches.append(Match((node,), choice="dropped"))
            elif _is_long(known, node) and _sources(model, known.held(node.inputs[1]) or ()) is not None:
                matches.append(Match((node,), choice="shape"))
        return Findings(tuple(matches))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Remove one Expand, or say its shape in short."""
        node, known = match.nodes[0], Dimensions(model)
        source, made = node.inputs[0], node.outputs[0]
        if source is None or node.graph is None:
            return Refusal(match.label, "it is gone by now")
        if match.choice == "dropped":
            if not _is_dropped(known, node):
                return Refusal(match.label, "its readers need it by now")
            _drop(model, node, source, self.name)
            return None
        old = made if node.op_type == "Shape" else node.inputs[1]
        shape = None if old is None else _short_shape(model, node, old, known.held(old) or (), self.name)
        if shape is None:
            return Refusal(match.label, "its shape is another by now")
        if node.op_type == "Shape":
            edit.replace_value(made, shape)
            edit.remove_node(node)
            return None
        node.replace_input_with(1, shape)
        edit.tag(node, self.name)
        return None


def _keeps_rank(node: ir.Node) -> bool:
    source, made = node.inputs[0], node.outputs[0]
    return source is not None and len(source.shape or ()) == len(made.shape or ())


def _drop(model: ir.Model, node: ir.Node, source: ir.Value, recipe: str) -> None:
    """Let the readers of an Expand read its source, of the same rank."""
    made = node.outputs[0]
    more = len(made.shape or ()) - len(source.shape or ())
    if more:
        splice = edit.Splice(model, node, recipe)
        axes = splice.constant(np.arange(more), made, "axes")
        source = splice.fresh("Unsqueeze", source, axes, like=source)
    edit.replace_value(made, source)
    edit.remove_node(node)


def _is_dropped(known: Dimensions, node: ir.Node) -> bool:
    source, made = node.inputs[0], node.outputs[0]
    before, after = known.of(source), known.of(made)
    if source is None or before is None or after is None:
        return False
    before = (*[1] * (len(after) - len(before)), *before)
    axes = {axis for axis, (one, other) in enumerate(zip(before, after, strict=True)) if one != other}
    short: dict[ir.Value, frozenset[int]] | None = {}
    for _ in range(_PASSES if edit.can_replace(made, source) else 0):
        readers = _Readers(known, short or {})
        if not readers.need_not(made, frozenset(axes), _DEPTH) or not readers.join_the_same():
            return False
        before_it, short = short, readers.short
        if short is None or short == before_it:
            return short is not None
    return False


class _Readers:
    """What the readers of a value need of it, where values beside it have the size 1 along ``short`` axes too."""

    def __init__(self, known: Dimensions, short: Mapping[ir.Value, frozenset[int]]) -> None:
        self._known, self._short = known, short
        self._answers: dict[tuple[ir.Value, frozenset[int]], bool] = {}
        self._joined: dict[ir.Node, dict[int, frozenset[int]]] = {}

    def join_the_same(self) -> bool:
        """Whether each Concat that was met joins what may have the size 1 along the same axes, and nothing else."""
        return all(len(met) == len(node.inputs) and len(set(met.values())) == 1 for node, met in self._joined.items())

    @property
    def short(self) -> dict[ir.Value, frozenset[int]] | None:
        """What was asked about, with the axes; None where one value is short in two ways."""
        found = dict(self._answers.keys())
        return found if len(found) == len(self._answers) else None

    def need_not(self, value: ir.Value, axes: frozenset[int], depth: int) -> bool:
        """Whether ``value`` may have the size 1 along ``axes``, where it repeats itself."""
        if not axes:
            return True
        if value.is_graph_output() or depth == 0:
            return False
        key = (value, axes)
        if key not in self._answers:
            self._answers[key] = all(self._takes_one(node, index, axes, depth) for node, index in value.uses())
        return self._answers[key]

    def _takes_one(self, node: ir.Node, index: int, axes: frozenset[int], depth: int) -> bool:
        """Whether the operand ``index`` of a node may have the size 1 along ``axes``."""
        value = node.inputs[index]
        dims = self._known.of(value)
        if value is None or dims is None or node.domain != "" or len(node.outputs) != 1:
            return False
        if node.graph is not value.graph:
            return False
        made = node.outputs[0]
        if node.op_type in _ENTRYWISE and index == 0:
            return self.need_not(made, axes, depth - 1)
        if node.op_type == "Gather" and index == 1 and edit.constant_tensor_of(node.inputs[0]) is not None:
            rank = len(edit.static_shape(node.inputs[0]) or ())
            first = edit.int_attribute(node, "axis", 0) % rank if rank else 0
            return bool(rank) and self.need_not(made, frozenset(axis + first for axis in axes), depth - 1)
        if node.op_type == "MatMul":
            return self._multiplies(node, index, axes, depth)
        if node.op_type in _CARRYING and (index == 0 or node.op_type == "Concat"):
            carried = _carried(node, dims, self._known.of(made), axes)
            if node.op_type == "Concat":
                self._joined.setdefault(node, {})[index] = axes
            return carried is not None and self.need_not(made, carried, depth - 1)
        if node.op_type not in edit.BROADCAST:
            return False
        others = [self._beside(other) for other in node.inputs if other is not value]
        if any(other is None or len(other) > len(dims) for other in others):
            return False
        left = set()
        for axis in axes:
            there = {_at(other or (), axis - len(dims)) for other in others}
            if dims[axis] in there:
                continue  # another operand has that dimension
            if there - {1}:
                return False
            left.add(axis)
        return self.need_not(made, frozenset(left), depth - 1)

    def _beside(self, value: ir.Value | None) -> tuple[Dim, ...] | None:
        """The dimensions of another operand, which may become short with the one in question."""
        dims, short = self._known.of(value), self._short.get(value, ()) if value is not None else ()
        return dims if dims is None else tuple(1 if axis in short else dim for axis, dim in enumerate(dims))

    def _multiplies(self, node: ir.Node, index: int, axes: frozenset[int], depth: int) -> bool:
        """Whether an operand of a product may have the size 1 along ``axes``, none of which is summed."""
        dims, other = self._known.of(node.inputs[index]), self._beside(node.inputs[1 - index])
        rank = min(len(dims or ()), len(other or ()))
        if dims is None or other is None or rank < _MATRIX or node.inputs[0] is node.inputs[1]:
            return False
        counted = {axis - len(dims) for axis in axes}  # from the last
        summed, stays = (-1, -2) if index == 0 else (-2, -1)
        if _HEADS in counted and _is_attention(node):
            return False
        if summed in counted or any(at != stays and _at(other, at) not in (1, _at(dims, at)) for at in counted):
            return False
        left = {at for at in counted if at == stays or _at(other, at) == 1}
        return self.need_not(node.outputs[0], frozenset(at + max(len(dims), len(other)) for at in left), depth - 1)


def _is_attention(node: ir.Node) -> bool:
    """Whether a product makes the scores of a Softmax, or takes its result as the first operand."""
    return _has_softmax(node.outputs[0], behind=True) or _has_softmax(node.inputs[0], behind=False)


def _has_softmax(value: ir.Value | None, behind: bool) -> bool:
    """Whether a Softmax is behind a value, or before it, and what lies between is element-wise."""
    for _ in range(_DEPTH):
        node = None if value is None else edit.only_user(value) if behind else value.producer()
        if node is None or edit.is_op(node, "Softmax"):
            return node is not None
        if node.op_type not in _ENTRYWISE and node.op_type not in edit.BROADCAST:
            return False
        value = node.outputs[0] if behind else node.inputs[0]
    return False


def _carried(
    node: ir.Node, dims: Sequence[Dim], made: Sequence[Dim] | None, axes: frozenset[int]
) -> frozenset[int] | None:
    """The axes along which a result repeats itself where its operand does; None where that may not be shorter."""
    if node.op_type == "Transpose":
        perm = edit.ints_attribute(node, "perm") or tuple(reversed(range(len(dims))))
        return frozenset(perm.index(axis) for axis in axes)
    if node.op_type == "Concat":
        return None if edit.int_attribute(node, "axis", 0) % len(dims) in axes else axes
    if node.op_type == "Unsqueeze":
        rank, new = len(made or ()), edit.axes_of(node)
        stay = [axis for axis in range(rank) if new is not None and axis not in {each % rank for each in new}]
        return frozenset(stay[axis] for axis in axes) if len(stay) == len(dims) else None
    if node.op_type != "Reshape":  # over what is behind an axis
        first = edit.int_attribute(node, "axis", -1) % max(len(dims), 1)
        short = all(value is None or len(value.shape or dims) < len(dims) - max(axes) for value in node.inputs[1:])
        return axes if max(axes) < first and short else None
    asked, last = edit.constant_of(edit.input_of(node, 1)), max(axes) + 1
    if asked is None or made is None or tuple(made[:last]) != tuple(dims[:last]):
        return None
    copies = (-1,) if edit.int_attribute(node, "allowzero", 0) else (0, -1)
    return axes if all(int(asked[axis]) in copies for axis in axes) else None


def _at(dims: Sequence[Dim], axis: int) -> Dim:
    """A dimension counted from the last; 1 where there is none."""
    return dims[axis] if -axis <= len(dims) else 1


def _is_long(known: Dimensions, node: ir.Node) -> bool:
    """Whether the shape is computed by more than a Shape and a Concat with constants."""
    shape = node.inputs[1]
    held = known.held(shape)
    maker = edit.maker_of(shape)
    if held is None or maker is None or not held or any(dim is None or dim in (0, -1) for dim in held):
        return False
    makers = [value.producer() for value in maker.inputs if value is not None] if maker.op_type == "Concat" else [maker]
    return any(
        part is not None and part.op_type not in ("Shape", "Constant") for part in makers
    ) or maker.op_type not in ("Concat", "Shape", "Constant")


def _is_elsewhere(model: ir.Model, known: Dimensions, node: ir.Node) -> bool:
    """Whether an input, or an input before it, has the dimensions of which a Shape asks a value."""
    source, held = node.inputs[0], known.held(node.outputs[0]) or ()
    named = _sources(model, held)
    if source is None or not named or node.outputs[0].is_graph_output():
        return False
    return not source.is_graph_input() or (len(held) == 1 and all(value is not source for value, _ in named.values()))


def _sources(model: ir.Model, held: Sequence[Dim | None]) -> dict[str, tuple[ir.Value, int]] | None:
    """By its name, an input and its axis for every dimension that is no number; None where one is not of an input."""
    if model.opset_imports.get("", 1) < 15:
        return None
    named: dict[str, tuple[ir.Value, int]] = {}
    for value in model.graph.inputs:
        for axis, dim in enumerate(edit.dims_of_value(value) or ()):
            if isinstance(dim, str):
                named.setdefault(dim, (value, axis))
    wanted = [dim for dim in held if not isinstance(dim, int)]
    if not all(isinstance(dim, str) and dim in named for dim in wanted):
        return None
    return {dim: named[dim] for dim in wanted if isinstance(dim, str)}


def _short_shape(
    model: ir.Model, node: ir.Node, old: ir.Value, held: Sequence[Dim | None], recipe: str
) -> ir.Value | None:
    """``held``, which ``old`` holds, as a tensor made from shapes of inputs and constants, in front of ``node``."""
    sources = _sources(model, held)
    if sources is None or node.graph is None:
        return None
    splice, parts = edit.Splice(model, node, recipe), list[ir.Value]()
    for dim in held:
        if isinstance(dim, str):
            value, axis = sources[dim]
            parts.append(splice.op("Shape", value, attributes={"start": axis, "end": axis + 1}, like=old))
            parts[-1].shape = ir.Shape((1,))
        else:
            parts.append(splice.ints([dim], old, "dim"))
    return parts[0] if len(parts) == 1 else splice.op("Concat", *parts, attributes={"axis": 0}, like=old)
