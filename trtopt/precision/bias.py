"""A number added to each output channel of a product.

A number added to each output channel takes back what quantization does to the mean of a layer: clipped inputs, and
rounding errors of weights times inputs whose mean is not zero (Nagel et al. 2019, section 4.2, with the means observed
on samples).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit


def why_no_bias(node: ir.Node) -> str | None:
    """Why nothing can be added to the outputs of ``node`` without a kernel of its own; None where it can."""
    if node.op_type in ("Conv", "ConvTranspose", "Gemm"):
        bias = edit.input_of(node, 2)
        return None if bias is None or edit.constant_of(bias) is not None else "its bias is computed"
    if node.op_type != "MatMul":
        return f"{node.op_type} has no bias"
    return None if _added(node) is not None else "no constant is added behind it"


def add_bias(graph: ir.Graph, node: ir.Node, bias: np.ndarray, names: edit.Names) -> list[ir.Value]:
    """Add ``bias`` to the output channels of ``node``, in place.

    Args:
        graph: The main graph, which owns the node.
        node: A node for which :func:`why_no_bias` is None.
        bias: float32 ``[channels]``.
        names: The names taken in the model.

    Returns:
        The constants that were replaced; others may still read them.
    """
    output = str(node.outputs[0].name)
    holder, index, added = node, 2, np.asarray(bias, np.float32)
    if node.op_type == "MatMul":
        found = _added(node)
        if found is None:
            raise ValueError(f"{node.name} has no constant bias behind it")
        holder, index = found
        output = str(holder.outputs[0].name)
    old = edit.input_of(holder, index)
    if node.op_type == "Gemm":
        factor = edit.float_attribute(node, "beta", 1.0)
        if old is None or factor == 0.0:
            node.attributes.pop("beta", None)
            old_array = np.zeros(1, np.float32)
        else:
            added = added / np.float32(factor)
            old_array = np.asarray(edit.constant_of(old), np.float32)
    else:
        old_array = np.zeros(1, np.float32) if old is None else np.asarray(edit.constant_of(old), np.float32)
    value = edit.add_initializer(graph, names.value(f"{output}_bias"), np.asarray(old_array + added, np.float32))
    if len(holder.inputs) <= index:
        holder.resize_inputs(index + 1)
    holder.replace_input_with(index, value)
    return [] if old is None else [old]


def _added(node: ir.Node) -> tuple[ir.Node, int] | None:
    """The Add that alone reads a MatMul's output and adds a constant per channel, and the index of that constant."""
    output = node.outputs[0]
    uses = list(output.uses())
    weight = edit.constant_of(edit.input_of(node, 1))
    if len(uses) != 1 or output.is_graph_output() or weight is None or weight.ndim != 2:
        return None
    reader, index = uses[0]
    constant = edit.constant_of(edit.input_of(reader, 1 - index)) if edit.is_op(reader, "Add") else None
    if constant is None or constant.size not in (1, weight.shape[1]) or constant.shape[-1:] != (constant.size,):
        return None
    return reader, 1 - index
