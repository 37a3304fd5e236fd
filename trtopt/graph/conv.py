"""Weights and windows of convolutions and matrix products, as rewriting needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit

HALF_LOSS = 1e-3
"""Rounding to FP16 changes a weight by about 2e-4 in the L2 norm; beyond this, part of it lies below FP16's range."""

_HALF_MAX = 65520.0
"""What rounds to infinity in FP16."""

_CHUNK = 1 << 20
"""Elements looked at together: weights may be large."""


@dataclass(frozen=True)
class SlidingWindow:
    """What a convolution or pooling does per spatial axis; ``pads`` are all begins, then all ends."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]

    @property
    def begins(self) -> tuple[int, ...]:
        return self.pads[: len(self.kernel)]

    @property
    def ends(self) -> tuple[int, ...]:
        return self.pads[len(self.kernel) :]

    @property
    def is_pointwise(self) -> bool:
        """Whether each output position reads the input position of the same index and no other."""
        return set(self.kernel) | set(self.strides) == {1} and not any(self.pads)


def window_of(node: ir.Node) -> SlidingWindow | None:
    """The window of a Conv, ConvTranspose or pooling node; None where it depends on the input's size or is unknown."""
    weight = edit.constant_of(edit.input_of(node, 1)) if edit.is_op(node, "Conv", "ConvTranspose") else None
    kernel = edit.ints_attribute(node, "kernel_shape") or (tuple(weight.shape[2:]) if weight is not None else ())
    automatic = edit.string_attribute(node, "auto_pad", "NOTSET")
    if not kernel or automatic not in ("NOTSET", "VALID"):
        return None
    pads = None if automatic == "VALID" else edit.ints_attribute(node, "pads")
    return SlidingWindow(
        kernel,
        edit.ints_attribute(node, "strides") or (1,) * len(kernel),
        pads or (0,) * (2 * len(kernel)),
        edit.ints_attribute(node, "dilations") or (1,) * len(kernel),
    )


def may_see_padding_alone(node: ir.Node) -> bool:
    """Whether a pooling window may lie on padding with every element: a dilated one can step over a small map."""
    window = window_of(node)
    pads = window is None or any(window.pads)
    return pads and set(edit.ints_attribute(node, "dilations") or (1,)) != {1}


def set_window(node: ir.Node, window: SlidingWindow) -> None:
    """Write ``window`` to a Conv, ConvTranspose or pooling node."""
    node.attributes.pop("auto_pad", None)
    for name, values in (
        ("kernel_shape", window.kernel),
        ("strides", window.strides),
        ("pads", window.pads),
        ("dilations", window.dilations),
    ):
        if name in node.attributes or set(values) - {0 if name == "pads" else 1}:
            node.attributes[name] = ir.AttrInt64s(name, values)


def output_channels(node: ir.Node, weight: np.ndarray) -> int:
    """Output channels of a Conv, ConvTranspose or Gemm with this weight."""
    return _channels(node, weight, of_first_axis="Conv", transposed=1)


def input_channels(node: ir.Node, weight: np.ndarray) -> int:
    """Input channels of a Conv, ConvTranspose or Gemm with this weight."""
    return _channels(node, weight, of_first_axis="ConvTranspose", transposed=0)


def _channels(node: ir.Node, weight: np.ndarray, *, of_first_axis: str, transposed: int) -> int:
    if node.op_type not in ("Conv", "ConvTranspose"):
        return int(weight.shape[0 if bool(edit.int_attribute(node, "transB", 0)) == transposed else 1])
    is_first = node.op_type == of_first_axis
    return int(weight.shape[0]) if is_first else int(weight.shape[1]) * edit.int_attribute(node, "group", 1)


def why_not_constant(node: ir.Node) -> str:
    """Why the weight and bias of a Conv, ConvTranspose or Gemm cannot be computed with; empty where they can."""
    weight, bias = edit.constant_of(edit.input_of(node, 1)), edit.constant_of(edit.input_of(node, 2))
    if weight is None:
        return f"the weights of {node.name} are not constants"
    if weight.dtype.kind in "iub":
        return f"the weights of {node.name} are integers"
    if edit.input_of(node, 2) is not None and bias is None:
        return f"the bias of {node.name} is not a constant"
    if bias is not None and node.op_type == "Gemm" and bias.size not in (1, bias.shape[-1] if bias.ndim else 1):
        return f"the bias of {node.name} differs per row"
    return ""


def why_not_behind(node: ir.Node, producer: ir.Node) -> str:
    """Why a node that reads what another makes cannot become part of it; empty where it can."""
    value = producer.outputs[0]
    if value.is_graph_output():
        return f"the output of {producer.name} is a graph output"
    if edit.only_user(value) is None:
        return f"the output of {producer.name} is used elsewhere"
    return "" if node.graph is producer.graph else f"{producer.name} is outside the nested graph"


def weight_and_bias(node: ir.Node) -> tuple[np.ndarray, np.ndarray]:
    """Weight and bias (one per output channel) in float64, a Gemm's factors included.

    Both are constants: ask :func:`why_not_constant` first, else ValueError is raised.
    """
    weight, bias_array = edit.array_of(node.inputs[1]).astype(np.float64), edit.constant_of(edit.input_of(node, 2))
    bias = np.zeros(1) if bias_array is None else bias_array.astype(np.float64).reshape(-1)
    if node.op_type == "Gemm":
        weight = weight * edit.float_attribute(node, "alpha", 1.0)
        bias = bias * edit.float_attribute(node, "beta", 1.0)
    return weight, np.broadcast_to(bias, output_channels(node, weight))


def scale_outputs(node: ir.Node, weight: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """``weight`` with each output channel times its factor."""
    return _scaled(node, weight, factors, grouped="ConvTranspose", transposed=True)


def scale_inputs(node: ir.Node, weight: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """``weight`` with each input channel times its factor."""
    return _scaled(node, weight, factors, grouped="Conv", transposed=False)


def _scaled(node: ir.Node, weight: np.ndarray, factors: np.ndarray, *, grouped: str, transposed: bool) -> np.ndarray:
    if node.op_type == grouped:
        factors = _per_group(factors, weight.shape[0], edit.int_attribute(node, "group", 1), weight.ndim)
    elif node.op_type in ("Conv", "ConvTranspose") or bool(edit.int_attribute(node, "transB", 0)) == transposed:
        factors = factors.reshape(-1, *[1] * (weight.ndim - 1))
    scaled: np.ndarray = weight * factors
    return scaled


def _per_group(factors: np.ndarray, rows: int, groups: int, ndim: int) -> np.ndarray:
    """Factors of the second axis of a grouped weight: each row of a group meets that group's channels."""
    by_row = factors.reshape(groups, -1).repeat(rows // groups, axis=0)
    result: np.ndarray = by_row.reshape(*by_row.shape, *[1] * (ndim - 2))
    return result


def per_channel(constant: np.ndarray, channels: int, rank: int) -> np.ndarray | None:
    """A constant that differs along axis 1 of a tensor only, as one float64 per channel; None for all others."""
    shape = (1,) * (rank - constant.ndim) + constant.shape
    if len(shape) != rank or any(size != 1 for index, size in enumerate(shape) if index != 1):
        return None
    if shape[1] not in (1, channels):
        return None
    return np.broadcast_to(constant.astype(np.float64).reshape(-1), channels)


def trains(norm: ir.Node) -> bool:
    """Whether a BatchNormalization is in training mode."""
    training = edit.int_attribute(norm, "training_mode", 0) != 0
    return training or any(value.uses() or value.is_graph_output() for value in norm.outputs[1:])


def norm_affine(norm: ir.Node) -> tuple[np.ndarray, np.ndarray] | None:
    """Factor and summand per channel of a BatchNormalization, in FP64; None where they are not constant."""
    found = (edit.constant_of(edit.input_of(norm, index)) for index in range(1, 5))
    arrays = [array.astype(np.float64) for array in found if array is not None]
    if len(arrays) < 4 or len({array.shape for array in arrays}) > 1:
        return None
    gamma, beta, mean, variance = arrays
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = gamma / np.sqrt(variance + edit.float_attribute(norm, "epsilon", 1e-5))
        return scale, beta - mean * scale


def why_not_fit(new: np.ndarray, dtype: np.dtype, *old: np.ndarray) -> str:
    """Why a weight computed in float64 does not fit its type, or FP16 where the weights it comes from do."""
    with np.errstate(over="ignore"):
        if not np.isfinite(new.astype(dtype).astype(np.float64)).all():
            return f"a folded weight does not fit {dtype}"
    if not survives_half(new) and all(survives_half(array) for array in old):
        return "a folded weight does not fit float16"
    return ""


def survives_half(array: np.ndarray) -> bool:
    """Whether rounding to FP16 keeps the array: no overflow, and little lost below its range."""
    flat, lost, norm = array.reshape(-1), 0.0, 0.0
    # Scaled by the largest entry, as squares of small entries underflow.
    scale = float(np.abs(flat).max(initial=0)) or 1.0
    if not scale < _HALF_MAX:
        return False
    for start in range(0, flat.size, _CHUNK):
        exact = flat[start : start + _CHUNK].astype(np.float64)
        lost += float(np.square((exact.astype(np.float16) - exact) / scale).sum())
        norm += float(np.square(exact / scale).sum())
    return lost <= HALF_LOSS**2 * norm


def set_weights(names: edit.Names, node: ir.Node, weight: np.ndarray, bias: np.ndarray | None) -> None:
    """Give a node new weights of its weights' type, as constants named after its output; without bias for None."""
    dtype, graph, output = edit.array_of(node.inputs[1]).dtype, edit.graph_of(node), node.outputs[0].name
    node.resize_inputs(2 if bias is None else 3)
    node.replace_input_with(1, edit.add_initializer(graph, names.value(f"{output}_weight"), weight.astype(dtype)))
    if bias is not None:
        node.replace_input_with(2, edit.add_initializer(graph, names.value(f"{output}_bias"), bias.astype(dtype)))
    for name in ("alpha", "beta"):
        if node.op_type == "Gemm":
            node.attributes.pop(name, None)


def copy_node(node: ir.Node, inputs: Sequence[ir.Value | None], *, name: str, output: str) -> ir.Node:
    """A node with the operator, attributes and output type of ``node``, of one output of unknown shape, in no graph."""
    copy = ir.Node(node.domain, node.op_type, list(inputs), list(node.attributes.values()), name=name)
    copy.outputs[0].name, copy.outputs[0].type = output, node.outputs[0].type
    return copy


def swap_nodes(names: edit.Names, first: ir.Node, second: ir.Node) -> tuple[ir.Node, ir.Node]:
    """Run ``second`` before ``first``, which alone feeds it; the last one's output keeps its name.

    The second node stays the object it is; the first is made anew behind it. Returns the two in their new order.
    """
    source, graph = first.inputs[0], second.graph
    if source is None or graph is None:
        raise ValueError(f"{first.name} has no input, or {second.name} is in no graph")
    middle, output = str(first.outputs[0].name), second.outputs[0]
    moved = copy_node(first, first.inputs, name=str(first.name), output=names.value(f"{output.name}_swapped"))
    moved.outputs[0].shape = output.shape
    graph.insert_after(second, moved)
    name = str(output.name)
    edit.replace_value(output, moved.outputs[0])
    second.replace_input_with(0, source)
    moved.replace_input_with(0, output)
    edit.remove_node(first)
    output.shape = None
    output.name, moved.outputs[0].name = middle, name
    return second, moved


def sole_user(value: ir.Value) -> ir.Node | None:
    """The one node that reads a value, in the graph that makes it; None where there are others, or a graph output."""
    user, producer = edit.only_user(value), value.producer()
    return user if producer is None or user is None or producer.graph is user.graph else None
