"""LSTM, GRU and RNN nodes: the standard equations, the constants gate by gate, and the steps written out as nodes.

A layer becomes matrix products and element-wise nodes, step by step; independent layers run side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.conv import why_not_fit
from trtopt.graph.products import GATES

_ACTIVATIONS = {"LSTM": ("sigmoid", "tanh", "tanh"), "GRU": ("sigmoid", "tanh"), "RNN": ("tanh",)}


@dataclass(frozen=True)
class Recurrent:
    """Sizes of a recurrent node.

    Attributes:
        steps: Time steps; None where they are not static.
        reverse: Per direction, whether it runs from the last step to the first.
        reset_after: A GRU that applies the reset gate after the product (``linear_before_reset``).
    """

    op: str
    steps: int | None
    hidden: int
    reverse: tuple[bool, ...]
    reset_after: bool


@dataclass(frozen=True)
class Weights:
    """Constants of one direction, in float64: [gates x hidden, inputs], [gates x hidden, hidden], [gates x hidden]
    twice."""

    inputs: np.ndarray
    recurrent: np.ndarray
    input_bias: np.ndarray
    recurrent_bias: np.ndarray


def is_recurrent(node: ir.Node | None) -> bool:
    """Whether it is an LSTM, GRU or RNN of the default domain."""
    return edit.is_op(node, *GATES)


def recurrent_of(node: ir.Node) -> Recurrent:
    """The sizes of a recurrent node that :func:`why_not_plain` has nothing against."""
    direction = edit.string_attribute(node, "direction", "forward")
    reverse = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[direction]
    after = edit.is_op(node, "GRU") and edit.int_attribute(node, "linear_before_reset", 0) != 0
    return Recurrent(node.op_type, _steps(node.inputs[0]), edit.array_of(node.inputs[2]).shape[2], reverse, after)


def _steps(source: ir.Value | None) -> int | None:
    """The length of the first axis of a layer's input, which has three."""
    if source is None:
        return None
    if source.shape is not None and len(source.shape) == 3:
        first = source.shape[0]
        return first if isinstance(first, int) else None
    node = source.producer()
    axes = edit.axes_of(node) if edit.is_op(node, "Unsqueeze") else None
    return 1 if axes is not None and set(axes) & {0, -3} else None


def why_not_plain(node: ir.Node) -> str:
    """Why a recurrent node is more than the standard equations over all steps with constant weights; "" if not."""
    if "clip" in node.attributes:  # 0 is a bound, too
        return "it clips its gates"
    if edit.int_attribute(node, "input_forget", 0):
        return "its input and forget gates are coupled"
    if edit.int_attribute(node, "layout", 0):
        return "its batch is the first axis"
    direction = edit.string_attribute(node, "direction", "forward")
    activations = node.attributes.get("activations")
    if activations is not None:
        given = tuple(item.lower() for item in activations.as_strings())
        if given != _ACTIVATIONS[node.op_type] * (2 if direction == "bidirectional" else 1):
            return "its activations are not the standard ones"
    weights = [edit.constant_of(edit.input_of(node, index)) for index in (1, 2)]
    bias = edit.constant_of(edit.input_of(node, 3))
    if any(array is None or array.ndim != 3 for array in weights) or (
        edit.input_of(node, 3) is not None and bias is None
    ):
        return "its weights are not constants"
    if not all(_is_finite(array) for array in (*weights, bias) if array is not None):
        return "its weights are not finite"
    if not runs_all_steps(node):
        return "its sequences may differ in length"
    peepholes = edit.input_of(node, 7)
    found = edit.constant_of(peepholes)
    if peepholes is not None and (found is None or found.any()):
        return "it has peepholes"
    return ""


def _is_finite(array: np.ndarray) -> bool:
    plain = array if array.dtype.kind == "f" else array.astype(np.float32)
    return array.size == 0 or bool(np.isfinite([plain.min(), plain.max()]).all())  # both pass a NaN on


def runs_all_steps(node: ir.Node) -> bool:
    """Whether no sequence of a recurrent node ends before the last step."""
    lengths = edit.input_of(node, 4)
    if lengths is None:
        return True
    given, shape = edit.constant_of(lengths), edit.static_shape(node.inputs[0])
    return given is not None and shape is not None and bool((given == shape[0]).all())


def weights_of(node: ir.Node, direction: int) -> Weights:
    """The constants of one direction of a node that :func:`why_not_plain` has nothing against."""
    inputs, recurrent = (edit.array_of(value)[direction].astype(np.float64) for value in node.inputs[1:3])
    return Weights(inputs, recurrent, *biases_of(node, direction))


def biases_of(node: ir.Node, direction: int) -> tuple[np.ndarray, np.ndarray]:
    """The biases of one direction, of the input and of the state, in float64."""
    rows = GATES[node.op_type] * recurrent_of(node).hidden
    bias = edit.constant_of(edit.input_of(node, 3))
    both = np.zeros(2 * rows) if bias is None else bias[direction].astype(np.float64)
    return both[:rows], both[rows:]


def initial_of(node: ir.Node) -> tuple[ir.Value, ...] | None:
    """The state a recurrent node begins with, empty where that is zero; None where half of it is given."""
    count = 2 if node.op_type == "LSTM" else 1
    given = [value for index in range(5, 5 + count) if (value := edit.input_of(node, index)) is not None]
    given = [value for value in given if (array := edit.constant_of(value)) is None or array.any()]
    return tuple(given) if len(given) in (0, count) else None


State = tuple[ir.Value, ...]
"""Hidden state, and for an LSTM the cell state: [lanes, batch, hidden]."""


class Writer:
    """Writes nodes and constants in front of a node."""

    def __init__(self, model: ir.Model, anchor: ir.Node, recipe: str, dtype: np.dtype) -> None:
        self._graph, self._anchor, self._recipe, self._dtype = edit.graph_of(anchor), anchor, recipe, dtype
        self._names = edit.Names(model)
        self._integers: dict[tuple[int, ...], ir.Value] = {}
        self._split_has_input = model.opset_imports[""] >= 13

    def constant(self, label: str, array: np.ndarray) -> ir.Value:
        name = self._names.value(f"{self._anchor.name}/{label}")
        return edit.add_initializer(self._graph, name, np.ascontiguousarray(array.astype(self._dtype)))

    def node(self, op: str, inputs: Sequence[ir.Value], label: str, **attributes: int) -> ir.Value:
        return self.insert(op, inputs, label, 1, attributes).outputs[0]

    def split(self, value: ir.Value, sizes: Sequence[int], label: str, axis: int) -> tuple[ir.Value, ...]:
        """``value`` in parts along an axis."""
        if len(sizes) == 1:
            return (value,)
        attributes: dict[str, ir.Attr | int | list[int]] = {"axis": axis}
        inputs = [value]
        if self._split_has_input:
            inputs.append(self.integers(sizes))
        else:
            attributes["split"] = list(sizes)
        return tuple(self.insert("Split", inputs, label, len(sizes), attributes).outputs)

    def concat(self, values: Sequence[ir.Value], label: str, axis: int) -> ir.Value:
        """``values`` one after another along an axis."""
        return values[0] if len(values) == 1 else self.node("Concat", values, label, axis=axis)

    def integers(self, numbers: Sequence[int]) -> ir.Value:
        key = tuple(numbers)
        if key not in self._integers:
            name = self._names.value(f"{self._anchor.name}/integers")
            self._integers[key] = edit.add_initializer(self._graph, name, np.asarray(key, np.int64))
        return self._integers[key]

    def insert(
        self,
        op: str,
        inputs: Sequence[ir.Value | None],
        label: str,
        outputs: int,
        attributes: Mapping[str, ir.Attr | int | list[int]],
    ) -> ir.Node:
        base = f"{self._anchor.name}/{label}"
        node = ir.node(op, list(inputs), attributes=attributes, num_outputs=outputs, name=self._names.node(base))
        for index, value in enumerate(node.outputs):
            value.name = self._names.value(base if outputs == 1 else f"{base}_{index}")
        edit.tag(node, self._recipe)
        self._graph.insert_before(self._anchor, node)
        return node


@dataclass
class Cells:
    """The step of recurrent layers of one kind and size, several of them side by side: lanes.

    Attributes:
        weights: Constants, one per lane.
    """

    writer: Writer
    kind: Recurrent
    weights: tuple[Weights, ...]
    _constants: dict[tuple[str, tuple[int, ...]], ir.Value] = field(default_factory=dict)

    def projection(self, lanes: Sequence[int], source: ir.Value, label: str) -> tuple[ir.Value, ...]:
        """What all steps of these lanes read of their common input, biases included: [steps, batch, gates] each."""
        weight = self._constant("weight", lanes, lambda lane: self.weights[lane].inputs.T, axis=-1)
        product = self.writer.node("MatMul", [source, weight], f"{label}/product")
        bias = self._constant("bias", lanes, self._bias, axis=-1)
        columns = [len(self.weights[lane].recurrent) for lane in lanes]
        return self.writer.split(
            self.writer.node("Add", [product, bias], f"{label}/bias"), columns, f"{label}/lanes", -1
        )

    def first(self, lanes: Sequence[int], read: ir.Value, label: str) -> State:
        """The step of several lanes from a state of zeros."""
        write, hidden = self.writer.node, self.kind.hidden
        if self.kind.op == "RNN":
            return (write("Tanh", [read], f"{label}/h"),)
        if self.kind.op == "LSTM":
            i, o, _, g = self._gates(read, label)
            cell = write("Mul", [i, g], f"{label}/c")
            return write("Mul", [o, write("Tanh", [cell], f"{label}/tanh_c")], f"{label}/h"), cell
        gates, new = self.writer.split(read, (2 * hidden, hidden), f"{label}/split", -1)
        z, r = self.writer.split(write("Sigmoid", [gates], f"{label}/gates"), (hidden, hidden), f"{label}/zr", -1)
        if self.kind.reset_after:
            product = write("Mul", [r, self._constant("hidden_bias", lanes, self._hidden_bias)], f"{label}/reset")
            new = write("Add", [new, product], f"{label}/sum_n")
        new = write("Tanh", [new], f"{label}/n")
        return (write("Mul", [self._one_minus(z, label), new], f"{label}/h"),)

    def next(self, lanes: Sequence[int], read: ir.Value, state: State, label: str) -> State:
        """The step of several lanes.

        ``read`` is what they read of their inputs, [lanes, batch, gates], its first axis in the order of ``lanes``.
        """
        if self.kind.op == "GRU":
            return self._next_gru(lanes, read, state, label)
        write = self.writer.node
        product = write("MatMul", [state[0], self._constant("recurrent", lanes, self._recurrent)], f"{label}/product")
        total = write("Add", [product, read], f"{label}/sum")
        if self.kind.op == "RNN":
            return (write("Tanh", [total], f"{label}/h"),)
        i, o, f, g = self._gates(total, label)
        kept = write("Mul", [f, state[1]], f"{label}/kept")
        cell = write("Add", [kept, write("Mul", [i, g], f"{label}/added")], f"{label}/c")
        return write("Mul", [o, write("Tanh", [cell], f"{label}/tanh_c")], f"{label}/h"), cell

    def _next_gru(self, lanes: Sequence[int], read: ir.Value, state: State, label: str) -> State:
        write, hidden = self.writer.node, self.kind.hidden
        sizes = (2 * hidden, hidden)
        read_gates, read_new = self.writer.split(read, sizes, f"{label}/split", -1)
        if self.kind.reset_after:
            product = write(
                "MatMul", [state[0], self._constant("recurrent", lanes, self._recurrent)], f"{label}/product"
            )
            own, own_new = self.writer.split(product, sizes, f"{label}/split_product", -1)
            own_new = write("Add", [own_new, self._constant("hidden_bias", lanes, self._hidden_bias)], f"{label}/bias")
        else:
            weight = self._constant("recurrent_zr", lanes, lambda lane: self._recurrent(lane)[..., : 2 * hidden])
            own = write("MatMul", [state[0], weight], f"{label}/product")
        gates = write("Sigmoid", [write("Add", [own, read_gates], f"{label}/sum")], f"{label}/gates")
        z, r = self.writer.split(gates, (hidden, hidden), f"{label}/zr", -1)
        if self.kind.reset_after:
            own_new = write("Mul", [r, own_new], f"{label}/reset")
        else:
            weight = self._constant("recurrent_n", lanes, lambda lane: self._recurrent(lane)[..., 2 * hidden :])
            own_new = write("MatMul", [write("Mul", [r, state[0]], f"{label}/reset"), weight], f"{label}/product_n")
        new = write("Tanh", [write("Add", [own_new, read_new], f"{label}/sum_n")], f"{label}/n")
        kept = write("Mul", [z, state[0]], f"{label}/kept")
        return (write("Add", [write("Mul", [self._one_minus(z, label), new], f"{label}/added"), kept], f"{label}/h"),)

    def _gates(self, total: ir.Value, label: str) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
        """Input, output and forget gate and the new cell content of an LSTM."""
        hidden = self.kind.hidden
        gates, content = self.writer.split(total, (3 * hidden, hidden), f"{label}/split", -1)
        gates = self.writer.node("Sigmoid", [gates], f"{label}/gates")
        i, o, f = self.writer.split(gates, (hidden, hidden, hidden), f"{label}/iof", -1)
        return i, o, f, self.writer.node("Tanh", [content], f"{label}/g")

    def _one_minus(self, value: ir.Value, label: str) -> ir.Value:
        key = ("one", ())
        if key not in self._constants:
            self._constants[key] = self.writer.constant("one", np.ones(()))
        return self.writer.node("Sub", [self._constants[key], value], f"{label}/one_minus_z")

    def _recurrent(self, lane: int) -> np.ndarray:
        return self.weights[lane].recurrent.T[None]

    def _bias(self, lane: int) -> np.ndarray:
        return merged_bias(self.weights[lane].input_bias, self.weights[lane].recurrent_bias, self.kind)

    def _hidden_bias(self, lane: int) -> np.ndarray:
        return self.weights[lane].recurrent_bias[None, None, 2 * self.kind.hidden :]

    def _constant(
        self, kind: str, lanes: Sequence[int], of_lane: Callable[[int], np.ndarray], axis: int = 0
    ) -> ir.Value:
        """The constants of these lanes in one, the same for every step."""
        key = (kind, tuple(lanes))
        if key not in self._constants:
            array = np.concatenate([of_lane(lane) for lane in lanes], axis)
            self._constants[key] = self.writer.constant(kind, array)
        return self._constants[key]


class Lanes:
    """Runs lanes of equal length through time; each may start later than the one before.

    Args:
        starts: When each lane starts, rising.
        initial: The state all lanes start with, [lanes, batch, hidden]; empty for zeros.

    Attributes:
        outputs: Per lane, the hidden state after each step: [1, batch, hidden].
    """

    def __init__(self, cells: Cells, steps: int, starts: Sequence[int], initial: State = ()) -> None:
        self._cells, self._steps, self._starts = cells, steps, starts
        everything = tuple(range(len(starts)))
        self._latest: dict[int, _Held] = dict.fromkeys(everything, _Held(everything, initial)) if initial else {}
        self._parts: dict[ir.Value, tuple[ir.Value, ...]] = {}
        self.outputs: list[list[ir.Value]] = [[] for _ in starts]

    def run(self, read: Callable[[int, int], ir.Value]) -> None:
        """All steps; ``read(lane, step)`` is what a lane reads of its input, asked for in the order of time."""
        for time in range(self._starts[-1] + self._steps):
            label = f"step{time}"
            active = [lane for lane, start in enumerate(self._starts) if 0 <= time - start < self._steps]
            reads = {lane: read(lane, time - self._starts[lane]) for lane in active}
            going = [lane for lane in active if lane in self._latest]
            new = [lane for lane in active if lane not in self._latest]
            states = []
            if going:
                state = self._gathered(going, label)
                own = self._concat([reads[lane] for lane in going], f"{label}/read")
                states.append(self._cells.next(going, own, state, label))
            if new:
                own = self._concat([reads[lane] for lane in new], f"{label}/read")
                states.append(self._cells.first(new, own, f"{label}/first"))
            joined = tuple(self._concat(values, f"{label}/join") for values in zip(*states, strict=True))
            held = _Held((*going, *new), joined)
            for lane in active:
                self._latest[lane] = held
                self.outputs[lane].append(self._part(lane, 0, label))

    def final(self, lanes: Sequence[int], index: int) -> ir.Value:
        """The hidden state (0) or cell state (1) of lanes after their last step: [lanes, batch, hidden]."""
        return self._gathered(lanes, "final")[index]

    def _gathered(self, lanes: Sequence[int], label: str) -> State:
        held = self._latest[lanes[0]]
        if held.lanes == tuple(lanes) and all(self._latest[lane] is held for lane in lanes):
            return held.state
        count = len(held.state)
        return tuple(
            self._concat([self._part(lane, index, label) for lane in lanes], f"{label}/gather")
            for index in range(count)
        )

    def _part(self, lane: int, index: int, label: str) -> ir.Value:
        held = self._latest[lane]
        value = held.state[index]
        if value not in self._parts:
            self._parts[value] = self._cells.writer.split(value, [1] * len(held.lanes), f"{label}/lanes", 0)
        return self._parts[value][held.lanes.index(lane)]

    def _concat(self, values: Sequence[ir.Value], label: str) -> ir.Value:
        return self._cells.writer.concat(values, label, 0)


@dataclass(frozen=True, eq=False)
class _Held:
    """A state and the lanes along its first axis."""

    lanes: tuple[int, ...]
    state: State


def merged_bias(inputs: np.ndarray, recurrent: np.ndarray, kind: Recurrent) -> np.ndarray:
    """The part of both biases that does not depend on the state: [gates x hidden]."""
    if kind.reset_after:
        recurrent = np.concatenate([recurrent[: 2 * kind.hidden], np.zeros(kind.hidden)])
    total: np.ndarray = inputs + recurrent
    return total


def why_not_unrolled(node: ir.Node, max_steps: int) -> str:
    """Why the steps of a recurrent node cannot be written out; "" if they can."""
    reason = why_not_plain(node)
    if reason:
        return reason
    kind = recurrent_of(node)
    if kind.steps is None:
        return "its number of steps is not static"
    if not 1 <= kind.steps <= max_steps:
        return f"it has {kind.steps} steps, more than {max_steps}" if kind.steps else "it has no steps"
    if initial_of(node) is None:
        return "only one of its two initial states is given"
    inputs = edit.constant_tensor_of(edit.input_of(node, 1))
    for direction in range(len(kind.reverse)):
        parts = biases_of(node, direction)
        if inputs is None or why_not_fit(merged_bias(*parts, kind), inputs.dtype.numpy(), *parts):
            return "the sum of its biases is beyond the range of their type"
    return ""


def is_used(node: ir.Node, index: int) -> bool:
    """Whether a node has this output and anything uses it."""
    value = node.outputs[index] if index < len(node.outputs) else None
    return value is not None and bool(value.name) and (value.is_graph_output() or bool(value.uses()))


def sequence(writer: Writer, hidden: int, outputs: Sequence[Sequence[ir.Value]]) -> ir.Value:
    """The first output of a recurrent node, [steps, directions, batch, hidden], from its steps [1, batch, hidden]."""
    shape = writer.integers((len(outputs[0]), 1, -1, hidden))
    whole = [writer.concat(steps, "output/steps", 0) for steps in outputs]
    return writer.concat([writer.node("Reshape", [value, shape], "output/shape") for value in whole], "output", 1)


def replace_outputs(node: ir.Node, news: dict[int, ir.Value]) -> None:
    """Put ``news`` in the place of outputs of ``node``, under their names, and remove it."""
    kept = {new: str(node.outputs[index].name) for index, new in news.items()}
    for index, new in news.items():
        new.type = node.outputs[index].type
        edit.replace_value(node.outputs[index], new)
    edit.remove_node(node)
    for new, name in kept.items():
        new.name = name
