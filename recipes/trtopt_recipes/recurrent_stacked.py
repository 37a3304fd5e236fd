"""Stacked LSTM, GRU and RNN layers over a known number of steps."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.recurrent import (
    Cells,
    Lanes,
    Writer,
    initial_of,
    is_recurrent,
    is_used,
    recurrent_of,
    replace_outputs,
    sequence,
    weights_of,
    why_not_unrolled,
)
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_MAX_LAYERS = 4
"""Layers in one group: each set of layers that run together has a copy of their weights."""


@dataclass(frozen=True)
class StackedRecurrence:
    """Runs stacked recurrent layers of one direction side by side, each some steps behind the one below.

    Rewrite:
        While a layer computes its step t, the one above computes step t - n, for which the outputs of the layer below
        are there: one batched product and one set of element-wise nodes per step serve all layers. The input of the
        layer above is multiplied by its weights for n = ``apart`` steps at once.
    Requires:
        Layers of one kind, size and direction, each the only input of the next; a static number of steps up to
        ``max_steps``; the standard activations; constant weights.
    Why faster:
        A step of a small batch is bound by the start of its kernels and by latency: two layers of 64 steps are 2 x 56
        + 4 x 8 + 16 kernels one after another instead of 2 x 128. The weights of the inputs are read every n steps
        instead of once, 5 % of all bytes there.
    Numerics:
        The same products; the biases are added beforehand, in FP64, and rounded once.
    Refuses when:
        As ``static-recurrence``; one step only; some of the layers begin with zeros and some do not, or
        with what a layer below ends with; weights of several
        types. Layers that differ in kind, size or direction are no stack.
    """

    name: str = "stacked-recurrence"
    stage: Stage = Stage.FUSE
    lossless: bool = True
    max_steps: int = 64
    apart: int = 8

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Chains of layers, each named after its first."""
        places = []
        taken: set[ir.Node] = set()
        for node in edit.all_nodes(model.graph):
            if node in taken or not is_recurrent(node):
                continue
            chain = _chain(node)
            taken.update(chain)
            layers = [item for item in chain if is_recurrent(item)]
            if len(layers) < 2:
                continue
            places.append((Match(tuple(chain)), self._why_not(layers, target)))
        return Findings.of(places)

    def _why_not(self, layers: list[ir.Node], target: Target) -> str:
        for node in layers:
            reason = why_not_unrolled(node, self.max_steps)
            if reason:
                return f"{node.name}: {reason}"
        if target.precision == "int8":
            return "INT8 would quantize each step by itself"
        if (recurrent_of(layers[0]).steps or 0) < 2:
            return "it has one step only"
        if len({initial_of(node) == () for node in layers}) > 1:
            return "some of the layers begin with a state of zeros, some do not"
        if _begins_with_result(layers):
            return "a layer begins with what one below ends with"
        tensors = [edit.constant_tensor_of(edit.input_of(node, 1)) for node in layers]
        if len({tensor.dtype for tensor in tensors if tensor is not None}) > 1:
            return "the weights of the layers differ in type"
        return ""

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Write out the steps of one chain of layers."""
        layers = [node for node in match.nodes if is_recurrent(node)]
        first, last = layers[0], layers[-1]
        kind, source, given = recurrent_of(first), first.inputs[0], edit.constant_of(edit.input_of(first, 1))
        graph = last.graph
        if source is None or given is None or kind.steps is None or graph is None:
            return Refusal(match.label, "its steps are not known any more")
        steps, apart = kind.steps, min(self.apart, -(-kind.steps // 2))
        write = Writer(model, last, self.name, given.dtype)
        cells = Cells(write, kind, tuple(weights_of(node, 0) for node in layers))
        starts = [apart * index for index in range(len(layers))]
        initial = zip(*(initial_of(node) or () for node in layers), strict=True)
        lanes = Lanes(cells, steps, starts, tuple(write.concat(states, "initial", 0) for states in initial))
        (whole,) = cells.projection([0], source, "input")
        rows: list[list[ir.Value]] = [[] for _ in layers]
        rows[0] = list(write.split(whole, [1] * steps, "input/steps", 0))[:: -1 if kind.reverse[0] else 1]

        def read(lane: int, step: int) -> ir.Value:
            if step >= len(rows[lane]):
                below = lanes.outputs[lane - 1][step : step + apart]
                label = f"layer{lane}/step{step}"
                (product,) = cells.projection([lane], write.concat(below, f"{label}/input", 0), label)
                rows[lane] += write.split(product, [1] * len(below), f"{label}/steps", 0)
            return rows[lane][step]

        lanes.run(read)
        for node in layers[1:]:
            node.replace_input_with(0, None)
        for node in match.nodes:
            if node not in layers and not is_used(node, 0):
                edit.remove_node(node)
        news = [_outputs(write, node, lanes, lane) for lane, node in enumerate(layers)]
        for node, values in zip(layers, news, strict=True):
            replace_outputs(node, values)
        graph.sort()  # users of the lower layers' outputs may stand before the last layer
        return None


def _begins_with_result(layers: list[ir.Node]) -> bool:
    """Whether the first state of a layer is computed from one of the layers, which then cannot run beside it."""
    pending = [value for node in layers[1:] for value in initial_of(node) or ()]
    seen: set[ir.Node] = set()
    while pending:
        node = pending.pop().producer()
        if node is None or node in seen:
            continue
        if node in layers:
            return True
        seen.add(node)
        pending += edit.values_read(node)
    return False


def _outputs(write: Writer, node: ir.Node, lanes: Lanes, lane: int) -> dict[int, ir.Value]:
    """What replaces the outputs of a layer, by index."""
    kind = recurrent_of(node)
    news = {1 + index: lanes.final([lane], index) for index in (0, 1) if is_used(node, 1 + index)}
    if is_used(node, 0):
        ordered = lanes.outputs[lane][:: -1 if kind.reverse[0] else 1]
        news[0] = sequence(write, kind.hidden, [ordered])
    return news


def _chain(first: ir.Node) -> list[ir.Node]:
    """``first`` and the layers above it of the same kind, size and direction, with the nodes between."""
    chain, layers = [first], 1
    if _signature(first) is None:
        return chain
    while layers < _MAX_LAYERS:
        found = _above(chain[-1])
        if found is None or _signature(found[-1]) != _signature(first):
            break
        chain += found
        layers += 1
    return chain


def _signature(node: ir.Node) -> tuple[object, ...] | None:
    weights = edit.constant_tensor_of(edit.input_of(node, 2))
    if weights is None or len(edit.dims_of(weights)) != 3 or edit.dims_of(weights)[0] != 1:
        return None
    kind = recurrent_of(node)
    return kind.op, kind.hidden, kind.reverse, kind.reset_after


def _above(node: ir.Node) -> list[ir.Node] | None:
    """The node that removes the axis of directions, and the layer that reads what is left."""
    value = node.outputs[0]
    for reshape in value.consumers():
        if reshape.graph is not node.graph or not _drops_directions(reshape):
            continue
        for user, index in reshape.outputs[0].uses():
            if index == 0 and user.graph is node.graph and is_recurrent(user):
                return [reshape, user]
    return None


def _drops_directions(node: ir.Node) -> bool:
    if edit.is_op(node, "Squeeze"):
        return edit.axes_of(node) == (1,)
    before, after = node.inputs[0], node.outputs[0]
    if not edit.is_op(node, "Reshape") or before is None or before.shape is None or after.shape is None:
        return False
    old, new = list(before.shape), list(after.shape)
    return len(old) == 4 and old[1] == 1 and [old[0], *old[2:]] == new
