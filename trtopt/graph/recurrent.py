"""LSTM, GRU and RNN nodes: whether they compute the standard equations, and their constants, gate by gate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
"""Gates per hidden unit, in the order of their rows: input, output, forget, cell; update, reset, hidden; hidden."""

_ACTIVATIONS = {"LSTM": ("sigmoid", "tanh", "tanh"), "GRU": ("sigmoid", "tanh"), "RNN": ("tanh",)}
_FP16_MAX = 65504.0


@dataclass(frozen=True)
class Recurrent:
    """Sizes of a recurrent node.

    Attributes:
        op: The operator.
        steps: Time steps; None where they are not static.
        hidden: Hidden units.
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
    """Constants of one direction, in float64.

    Attributes:
        inputs: [gates x hidden, inputs].
        recurrent: [gates x hidden, hidden].
        input_bias: [gates x hidden].
        recurrent_bias: [gates x hidden].
    """

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
    weights = edit.constant_tensor_of(edit.input_of(node, 2))
    if weights is None:
        raise ValueError(f"the weights of {node.name} are not constants")
    after = edit.is_op(node, "GRU") and edit.int_attribute(node, "linear_before_reset", 0) != 0
    return Recurrent(node.op_type, _steps(node.inputs[0]), edit.dims_of(weights)[2], reverse, after)


def _steps(source: ir.Value | None) -> int | None:
    """The length of the first axis of a layer's input, which has three."""
    if source is None:
        return None
    if source.shape is not None and len(source.shape) == 3:
        first = source.shape[0]
        return first if isinstance(first, int) else None
    node = source.producer()
    axes = _axes(node) if node is not None and edit.is_op(node, "Unsqueeze") else None
    return 1 if axes is not None and set(axes) & {0, -3} else None


def _axes(node: ir.Node) -> tuple[int, ...] | None:
    array = edit.constant_of(edit.input_of(node, 1))
    return edit.ints_attribute(node, "axes") if array is None else tuple(int(axis) for axis in array.reshape(-1))


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
    inputs, recurrent = edit.constant_of(edit.input_of(node, 1)), edit.constant_of(edit.input_of(node, 2))
    if inputs is None or recurrent is None:
        raise ValueError(f"the weights of {node.name} are not constants")
    return Weights(
        inputs[direction].astype(np.float64), recurrent[direction].astype(np.float64), *biases_of(node, direction)
    )


def biases_of(node: ir.Node, direction: int) -> tuple[np.ndarray, np.ndarray]:
    """The biases of one direction, of the input and of the state, in float64."""
    rows = GATES[node.op_type] * recurrent_of(node).hidden
    bias = edit.constant_of(edit.input_of(node, 3))
    both = np.zeros(2 * rows) if bias is None else bias[direction].astype(np.float64)
    return both[:rows], both[rows:]


def fits(array: np.ndarray, dtype: np.dtype, *parts: np.ndarray) -> bool:
    """Whether a constant made of ``parts`` is finite as ``dtype``, and within FP16's range where they are."""
    with np.errstate(over="ignore"):
        narrow = array.astype(dtype).astype(np.float64)
    largest = max((float(np.abs(part).max(initial=0)) for part in parts), default=0.0)
    return bool(np.isfinite(narrow).all()) and (
        largest > _FP16_MAX or float(np.abs(narrow).max(initial=0)) <= _FP16_MAX
    )


def initial_of(node: ir.Node) -> tuple[ir.Value, ...] | None:
    """The state a recurrent node begins with, empty where that is zero; None where half of it is given."""
    count = 2 if node.op_type == "LSTM" else 1
    given = [value for index in range(5, 5 + count) if (value := edit.input_of(node, index)) is not None]
    given = [value for value in given if (array := edit.constant_of(value)) is None or array.any()]
    return tuple(given) if len(given) in (0, count) else None
