"""Constants of attention masks that FP16 does not hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.attention import is_over_last
from trtopt.graph.views import is_move, is_pass
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_BECOMES_HALF = ("fp16", "int8", "fp8")

_LARGEST = 1.5e4
"""What constants are clamped to: two masks may be added up, with the headroom for what was not seen (a factor of two,
``trtopt.precision.fp16.hazards``), before FP16 ends at 65504."""

_LARGEST_SUM = 3.1e4

_SMALLEST_SCALE = 1 / 64
"""A mask may be multiplied by numbers from here to 1: what is left of it, 234, still leaves FP32 no weight."""

_ONE_AXIS = 13
"""The opset from which on softmax is over one axis."""

_DEPTH = 24
"""Nodes between a constant and its softmax; real exports have up to ten."""


@dataclass(frozen=True)
class MaskConstant:
    """Clamps the constants of attention masks (-3.4e38, -1e9, -65504) to what FP16 holds when masks are added up.

    Rewrite:
        softmax(scores + (1 - m) C) = softmax(scores + (1 - m) C') for integers m and C' = -1.5e4, and likewise for C in
        Where(condition, C, x) and in constant masks: exp(C - largest score) is 0 with either.
    Requires:
        A precision whose graph becomes FP16 (fp16, int8, fp8). From the constant on, only views, casts, additions,
        selections, a factor of integers and a scale from 1/64 to 1 up to Softmax over the last axis, or over another
        along which the condition of a selection right before it differs. A factor is known to be integers when it
        comes from a Cast of booleans or integers.
    Why faster:
        What a constant too large for FP16 is added to must stay FP32 up to its softmax, and a mask that is a tensor
        of its own is FP32. On TensorRT for RTX attention is one kernel either way, and reads half the bytes of mask:
        two layers with a mask [8, 1, 512, 512], 331.4 -> 318.8 MB.
    Numerics:
        Equal where a row of scores has a key that is not masked, and its scores differ by less than 1.5e4 - 104 (times
        the scale after the mask). A row masked throughout becomes the softmax of its scores, where FP32 gave all keys
        the same weight, and NaN when two masks added up to -inf.
    Refuses when:
        The mask is used by something else, or is a graph output; it is multiplied by numbers that may not be integers
        (a float input); a constant has several different numbers beyond FP16; more than two masks are added up;
        softmax is over another axis, but for such a selection. Masks of -inf are left: FP16 holds it, a row masked
        throughout is NaN in FP32 as well, and the compiler lists the blocks that are -inf, to skip them.
    """

    name: str = "mask-constant"
    stage: Stage = Stage.FOLD
    lossless: bool = False

    def find(self, model: ir.Model, target: Target) -> Findings:
        """The first nodes that take a constant too large on its way to Softmax."""
        matches: list[Match] = []
        refusals: list[Refusal] = []
        if target.precision not in _BECOMES_HALF:
            return Findings()
        flow = _Flow(model.opset_imports.get("", 1))
        for node in edit.all_nodes(model.graph):
            if edit.is_op(node, "ConstantOfShape"):
                ways = [flow.from_value(node.outputs[0])] if _is_large(_filling(node)) else []
                sources: list[ir.Value] = []
            else:
                sources, ways = _sources(node, flow, refusals)
            if not any(way.reaches for way in ways):
                continue
            reason = next((way.reason for way in ways if way.reason), "")
            if reason:
                refusals.append(Refusal(str(node.name), reason))
            else:
                makers = (value.producer() for value in sources)
                matches.append(Match((node, *(maker for maker in makers if maker is not None)), tuple(sources)))
        return Findings(tuple(matches), tuple(refusals))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Clamp the constants of one node; what else uses them keeps them."""
        node = match.nodes[0]
        if edit.is_op(node, "ConstantOfShape"):
            filling = _filling(node)
            if filling is None:
                return Refusal(match.label, "it is filled with zeros")
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(_clamped(filling)))
            edit.tag(node, self.name)
            return None
        if node.graph is None:
            return Refusal(match.label, "it is in no graph")
        for index, value in list(_constants(node)):
            array = edit.constant_of(value)
            if array is not None and _is_large(array):
                node.replace_input_with(index, _initializer(model, node.graph, str(value.name), _clamped(array)))
                maker = value.producer()
                if maker is not None and not value.uses() and not value.is_graph_output():
                    edit.remove_node(maker)
        edit.tag(node, self.name)
        return None


@dataclass(frozen=True)
class _Way:
    """Where a value goes: whether a softmax is among it, why the value cannot be clamped, empty when it can, and the
    least that scales on the way leave of it."""

    reaches: bool = False
    reason: str = ""
    scale: float = 1.0


def _sources(node: ir.Node, flow: _Flow, refusals: list[Refusal]) -> tuple[list[ir.Value], list[_Way]]:
    """The constants of ``node`` that are too large, and where each goes; notes those that are left for -inf."""
    sources, ways = [], []
    for index, value in _constants(node):
        way = flow.from_input(node, index)
        array = edit.constant_of(value) if way.reaches else None  # only now: reading every weight takes long
        if array is None:
            continue
        if _is_large(array):
            sources.append(value)
            ways.append(way if _is_plain(array) else _Way(True, f"numbers beyond FP16 in {value.name} differ"))
        elif np.isneginf(array.astype(np.float64)).any():
            refusals.append(Refusal(str(node.name), f"{value.name} masks with -inf, which FP16 holds"))
    return sources, ways


def _constants(node: ir.Node) -> Iterator[tuple[int, ir.Value]]:
    """The inputs of ``node`` that are float constants and may be a mask, or a factor of one."""
    indices = range(0)
    if edit.is_op(node, "Add", "Sub", "Mul"):
        indices = range(2)
    elif edit.is_op(node, "Where"):
        indices = range(1, 3)
    elif _is_view(node):
        indices = range(1)
    for index in indices:
        value = node.inputs[index]
        tensor = edit.constant_tensor_of(value)
        if value is not None and tensor is not None and tensor.dtype.is_floating_point():
            yield index, value


class _Flow:
    """Follows values to the softmax they end in. Everything is looked at once per value."""

    def __init__(self, opset: int) -> None:
        self._opset = opset
        self._ways: dict[ir.Value, _Way] = {}
        self._bounds: dict[ir.Value, float] = {}

    def from_value(self, value: ir.Value, depth: int = _DEPTH) -> _Way:
        """Where all uses of ``value`` lead."""
        if value not in self._ways:
            ways = [self.from_input(node, index, depth) for node, index in value.uses()] if depth else []
            reason = f"{value.name} is a graph output" if value.is_graph_output() else ""
            reason = reason or next((way.reason for way in ways if way.reason), "")
            self._ways[value] = _Way(
                any(way.reaches for way in ways), reason, min((way.scale for way in ways), default=1)
            )
        return self._ways[value]

    def from_input(self, node: ir.Node, index: int, depth: int = _DEPTH) -> _Way:
        """Where input ``index`` of ``node`` leads."""
        if edit.is_op(node, "Softmax"):
            fits = is_over_last(node, self._opset) or _selects_along(node, self._opset)
            return _Way(True, "" if fits else f"{node.name} is not over the last axis")
        if edit.is_op(node, "Attention") and index == 3:
            return _Way(True)
        if edit.is_op(node, "Shape") or (edit.is_op(node, "Equal") and _is_zero(node.inputs[1 - index])):
            return _Way()  # the same for the clamped mask
        if not _carries(node, index):
            return _Way(False, f"it is used by {node.name} ({node.op_type}) as well")
        ways = [self.from_value(output, depth - 1) for output in node.outputs]
        reason = next((way.reason for way in ways if way.reason), "")
        further = _Way(any(way.reaches for way in ways), reason)
        if not further.reaches or further.reason:
            return further
        scale = _least_scale(node, index) * min(way.scale for way in ways)
        if scale < _SMALLEST_SCALE:
            return _Way(True, f"it is scaled by {scale:.3g} from {node.name} on")
        if edit.is_op(node, "Mul") and not _is_factor(node.inputs[1 - index]):
            other = node.inputs[1 - index]
            return _Way(True, f"{other.name if other else ''} may hold other numbers than integers")
        if edit.is_op(node, "Add", "Sub"):
            total = self._bound(node.outputs[0], _DEPTH)
            if total > _LARGEST_SUM:
                return _Way(True, f"masks of {total:.3g} together are added up in {node.outputs[0].name}")
        return _Way(True, scale=scale)

    def _bound(self, value: ir.Value | None, depth: int) -> float:
        """The largest magnitude that masks give ``value`` once they are clamped."""
        if value is None or depth == 0:
            return 0.0
        if value not in self._bounds:
            self._bounds[value] = self._bound_of(value, depth - 1)
        return self._bounds[value]

    def _bound_of(self, value: ir.Value, depth: int) -> float:
        node = value.producer()
        array = edit.constant_of(value)
        if array is None and edit.is_op(node, "ConstantOfShape"):
            array = _filling(node)
        if array is not None:
            return min(_largest(array), _LARGEST)
        if node is None:
            return 0.0
        if edit.is_op(node, "Add", "Sub"):
            return sum(self._bound(operand, depth) for operand in node.inputs)
        if edit.is_op(node, "Where"):
            return max(self._bound(operand, depth) for operand in node.inputs[1:3])
        if edit.is_op(node, "Mul"):
            first, second = node.inputs[:2]
            scales = [scale for scale in (_scale(first), _scale(second)) if scale is not None]
            return max(self._bound(first, depth), self._bound(second, depth)) * min(scales, default=1.0)
        return self._bound(node.inputs[0], depth) if _is_view(node) or edit.is_op(node, "Max", "Clip", "Div") else 0.0


def _carries(node: ir.Node, index: int) -> bool:
    """Whether a mask that is input ``index`` of ``node`` is a mask behind it."""
    if edit.is_op(node, "Add", "Sub", "Mul"):
        return True
    if edit.is_op(node, "Where"):
        return index > 0
    if edit.is_op(node, "Max"):  # a floor under the masked scores
        return all(value is node.inputs[index] or edit.constant_tensor_of(value) is not None for value in node.inputs)
    if edit.is_op(node, "Div"):
        divisor = edit.constant_of(node.inputs[1])
        return index == 0 and divisor is not None and bool(((divisor >= 1) & (divisor <= 1 / _SMALLEST_SCALE)).all())
    return index == 0 and (_is_view(node) or edit.is_op(node, "Clip"))


def _is_view(node: ir.Node) -> bool:
    return is_move(node) or is_pass(node) or edit.is_op(node, "Trilu")


def _is_factor(value: ir.Value | None) -> bool:
    return _scale(value) is not None or _is_integral(value, _DEPTH)


def _scale(value: ir.Value | None) -> float | None:
    """The largest entry of a constant whose entries are all scales a mask may have."""
    tensor = edit.constant_tensor_of(value)
    if tensor is None or not tensor.dtype.is_floating_point():
        return None
    array = tensor.numpy().astype(np.float64)
    fits = array.size and ((array >= _SMALLEST_SCALE) & (array <= 1)).all()
    return float(array.max()) if fits else None


def _least_scale(node: ir.Node, index: int) -> float:
    """What a product or quotient with a scale leaves of input ``index`` at least; 1 where it is none."""
    array = edit.constant_of(node.inputs[1 - index]) if edit.is_op(node, "Mul", "Div") else None
    if array is None or (edit.is_op(node, "Mul") and _scale(node.inputs[1 - index]) is None):
        return 1.0
    return float(array.min()) if edit.is_op(node, "Mul") else 1 / float(array.max())


def _is_integral(value: ir.Value | None, depth: int) -> bool:
    """Whether a float holds integers: then what is not 0 is at least 1."""
    node = edit.maker_of(value)
    array = edit.constant_of(value) if depth else None
    if array is not None:
        return array.size <= 1 << 20 and bool((array == np.rint(array)).all())
    if node is None or depth == 0:
        return False
    if edit.is_op(node, "Cast"):
        dtype = node.inputs[0].dtype if node.inputs[0] is not None else None
        if dtype is not None and (dtype == ir.DataType.BOOL or dtype.is_integer()):
            return True
    if _is_view(node) or edit.is_op(node, "Neg"):
        return _is_integral(node.inputs[0], depth - 1)
    return edit.is_op(node, "Add", "Sub", "Mul") and all(_is_integral(operand, depth - 1) for operand in node.inputs)


def _selects_along(softmax: ir.Node, opset: int) -> bool:
    """Whether a Where right before a softmax tells the elements apart that it is over, along whatever axis."""
    value = softmax.inputs[0]
    where = edit.maker_of(value)
    condition = edit.dims_of_value(where.inputs[0]) if edit.is_op(where, "Where") else None
    if condition is None or value is None or value.shape is None or opset < _ONE_AXIS:
        return False
    axis = edit.int_attribute(softmax, "axis", -1) % len(value.shape) - len(value.shape)
    return -axis <= len(condition) and condition[axis] not in (1, None)


def _filling(node: ir.Node) -> np.ndarray | None:
    """What a ConstantOfShape holds; None for its default, zero."""
    attribute = node.attributes.get("value")
    return None if attribute is None or attribute.is_ref() else attribute.as_tensor().numpy()


def _largest(array: np.ndarray) -> float:
    """The largest finite magnitude."""
    wide = np.abs(array.astype(np.float64))
    return float(wide[np.isfinite(wide)].max(initial=0.0))


def _is_large(array: np.ndarray | None) -> bool:
    return array is not None and array.dtype.kind not in "iub" and _largest(array) > _LARGEST


def _is_plain(array: np.ndarray) -> bool:
    """Whether all entries too large are one number: in a row of nothing else, the order among several would count."""
    wide = array.astype(np.float64)
    large = wide[np.isfinite(wide) & (np.abs(wide) > _LARGEST)]
    return bool((large == large[0]).all())


def _is_zero(value: ir.Value | None) -> bool:
    array = edit.constant_of(value)
    return array is not None and not array.any()


def _clamped(array: np.ndarray) -> np.ndarray:
    wide = array.astype(np.float64)
    return np.where(np.isfinite(wide), np.clip(wide, -_LARGEST, _LARGEST), wide).astype(array.dtype)


def _initializer(model: ir.Model, graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """A constant named after the one it stands for; masks that every layer uses are clamped once."""
    base = f"{name}_clamped"
    existing = graph.initializers.get(base)
    found = edit.constant_of(existing)
    if existing is not None and found is not None and found.dtype == array.dtype and np.array_equal(found, array):
        return existing
    return edit.add_initializer(graph, edit.Names(model).value(base), array)
