"""Batch normalization after a convolution or matrix product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.conv import trains
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_PRODUCERS = ("Conv", "ConvTranspose", "Gemm")


@dataclass(frozen=True)
class BatchNorm:
    """Folds BatchNormalization into the Conv, ConvTranspose or Gemm before it.

    Rewrite:
        BN(W x + b) = (s W) x + s (b - mean) + beta with s = gamma / sqrt(variance + epsilon), per output channel.
    Requires:
        Inference mode; the statistics, the weights and the bias are constants. Weights used by other nodes too are
        left to them: the folded ones are new.
    Why faster:
        One multiplication and one addition per element less, and convolution, bias and activation become one kernel.
        Quantized weights must contain the scale, or the quantizer sees another range than the kernel.
    Numerics:
        The same sum with factors multiplied beforehand, in FP64, and rounded once to the weights' type.
    Refuses when:
        The output before normalization is used elsewhere or is a graph output; training mode; weights or statistics
        that are not constants (quantized weights are not); a folded weight beyond the range of its type; a Gemm whose
        bias differs per row.
    """

    name: str = "batch-norm"
    stage: Stage = Stage.FOLD
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """BatchNormalization nodes right after a Conv, ConvTranspose or Gemm."""
        places = []
        for node in edit.all_nodes(model.graph):
            producer = node.inputs[0].producer() if edit.is_op(node, "BatchNormalization") and node.inputs[0] else None
            if not edit.is_op(producer, *_PRODUCERS):
                continue
            places.append((Match((node, producer)), _why_not(node, producer)))
        return Findings.of(places)

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Fold one node."""
        norm, producer = match.nodes
        weight, bias = _folded(norm, producer)
        dtype = _array(producer, 1).dtype
        with np.errstate(over="ignore"):
            narrow = weight.astype(dtype), bias.astype(dtype)
        if not all(np.isfinite(array.astype(np.float64)).all() for array in narrow):
            return Refusal(match.label, f"a folded weight does not fit {dtype}")
        graph, output = producer.graph, str(norm.outputs[0].name)
        if graph is None:
            return Refusal(match.label, "it is in no graph")
        names = edit.Names(model)
        # The surviving tensor holds what the normalization put out, so it goes by that name.
        edit.replace_value(norm.outputs[0], producer.outputs[0])
        edit.remove_node(norm)
        producer.outputs[0].name = output
        if len(producer.inputs) < 3:
            producer.resize_inputs(3)
        producer.replace_input_with(1, edit.add_initializer(graph, names.value(f"{output}_weight"), narrow[0]))
        producer.replace_input_with(2, edit.add_initializer(graph, names.value(f"{output}_bias"), narrow[1]))
        for name in ("alpha", "beta"):
            if producer.op_type == "Gemm":
                producer.attributes.pop(name, None)
        edit.tag(producer, self.name)
        return None


def _why_not(norm: ir.Node, producer: ir.Node) -> str:
    value = producer.outputs[0]
    if value.is_graph_output():
        return f"the output of {producer.name} is a graph output"
    if len(value.uses()) != 1:
        return f"the output of {producer.name} is used elsewhere"
    if norm.graph is not producer.graph:
        return f"{producer.name} is outside the nested graph"
    if trains(norm):
        return "it is in training mode"
    if any(edit.constant_of(v) is None for v in norm.inputs[1:5]):
        return "its statistics are not constants"
    weight, bias = edit.constant_of(edit.input_of(producer, 1)), edit.constant_of(edit.input_of(producer, 2))
    if weight is None:
        return f"the weights of {producer.name} are not constants"
    if weight.dtype.kind in "iub":
        return f"the weights of {producer.name} are integers"
    if edit.input_of(producer, 2) is not None and bias is None:
        return f"the bias of {producer.name} is not a constant"
    channels = _channels(producer, weight)
    if any(_array(norm, index).shape != (channels,) for index in range(1, 5)):
        return f"its statistics are not one per channel of {producer.name}"
    if bias is not None and producer.op_type == "Gemm" and bias.size not in (1, bias.shape[-1] if bias.ndim else 1):
        return f"the bias of {producer.name} differs per row"
    return ""


def _channels(producer: ir.Node, weight: np.ndarray) -> int:
    """Output channels of a node with this weight."""
    if producer.op_type == "Conv":
        return int(weight.shape[0])
    if producer.op_type == "ConvTranspose":
        return int(weight.shape[1]) * edit.int_attribute(producer, "group", 1)
    return int(weight.shape[0 if edit.int_attribute(producer, "transB", 0) else 1])


def _array(node: ir.Node, index: int) -> np.ndarray:
    array = edit.constant_of(node.inputs[index])
    if array is None:
        raise ValueError(f"input {index} of {node.name} is not a constant")
    return array


def _folded(norm: ir.Node, producer: ir.Node) -> tuple[np.ndarray, np.ndarray]:
    """Weight and bias of the node that replaces both, in float64."""
    gamma, beta, mean, variance = (_array(norm, index).astype(np.float64) for index in range(1, 5))
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = gamma / np.sqrt(variance + edit.float_attribute(norm, "epsilon", 1e-5))
    weight = _array(producer, 1).astype(np.float64)
    bias_array = edit.constant_of(edit.input_of(producer, 2))
    bias = np.zeros(1) if bias_array is None else bias_array.astype(np.float64).reshape(-1)
    if producer.op_type == "Gemm":
        weight = weight * edit.float_attribute(producer, "alpha", 1.0)
        bias = bias * edit.float_attribute(producer, "beta", 1.0)
    return _scaled(producer, weight, scale), (bias - mean) * scale + beta


def _scaled(producer: ir.Node, weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """``weight`` times ``scale`` along its output channels."""
    factors: np.ndarray
    if producer.op_type == "Conv":
        factors = scale.reshape(-1, *[1] * (weight.ndim - 1))
    elif producer.op_type == "Gemm":
        factors = scale[:, None] if edit.int_attribute(producer, "transB", 0) else scale[None, :]
    else:
        # ConvTranspose: [C, M / group, ...]; each group's input channels meet that group's output channels.
        groups = edit.int_attribute(producer, "group", 1)
        by_group = scale.reshape(groups, -1).repeat(weight.shape[0] // groups, axis=0)
        factors = by_group.reshape(*by_group.shape, *[1] * (weight.ndim - 2))
    scaled: np.ndarray = weight * factors
    return scaled
