"""Models that hold Q/DQ already, from quantization-aware training or another quantizer: kept, checked and mended.

Q/DQ that the backend's placement rules gain nothing by is taken out.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.errors import InvalidModelError
from trtopt.graph import edit
from trtopt.graph.attention import Attention, attention_of
from trtopt.graph.shapes import infer_in_place
from trtopt.graph.views import is_move
from trtopt.precision import rules
from trtopt.precision.observe.ranges import LEVELS
from trtopt.precision.plan import FP16, WEIGHTED
from trtopt.precision.qdq import forms
from trtopt.precision.qdq.apart import together
from trtopt.precision.qdq.arithmetic import read_arithmetic
from trtopt.precision.qdq.blocked import NBITS, expand_blocked
from trtopt.precision.qdq.canonicalize import (
    INTEGERS,
    QdqEditor,
    Quantizer,
    dequantized,
    existing_nodes,
    quantizer_of,
)
from trtopt.precision.qdq.cast_weights import expand_cast_weights, has_cast_weights
from trtopt.report.schema.steps import StepRecord
from trtopt.support.dequantize import MXFP8
from trtopt.support.precision import Precision

_READERS = {
    "tensorrt-rtx": frozenset[str](),
    "tensorrt": frozenset("Add AveragePool Concat GlobalAveragePool MaxPool ReduceMean Resize".split()),
}
"""What else computes on quantized tensors, per backend: TensorRT's INT8 layers (its documentation on explicit
quantization). TensorRT for RTX has none, and runs a kernel for such Q/DQ. But an addition may read a tensor that is
quantized for a product anyway: if all its readers do, the 16-bit tensor is never written (ResNet-50, INT8, batch 8: 564
MB moved instead of 660, by as many kernels)."""

_SMALLEST_RATIO = 2.0**-10
"""Of a channel's scale to the largest: the step of channels below it is this share, 1/1024, of the others' step."""


@dataclass(frozen=True)
class Pair:
    """A QuantizeLinear and one of its DequantizeLinear."""

    quantize: ir.Node
    dequantize: ir.Node
    how: Quantizer

    @property
    def source(self) -> ir.Value:
        """The tensor that is quantized."""
        value = self.quantize.inputs[0]
        if value is None:
            raise ValueError(f"{self.quantize.name} has no input")
        return value

    @property
    def dtype(self) -> Precision:
        """The 8-bit type as the rules name it."""
        return Precision.INT8 if self.how.dtype.is_integer() else Precision.FP8


def place_qdq(work: QdqEditor) -> None:
    """Let operators that gain nothing by a quantized input read the tensor itself, and drop Q/DQ that is left over.

    Needs the model in the form of :mod:`trtopt.precision.qdq.forms`. Where a convolution leaves INT8, its weight
    becomes a floating constant again. Scales per channel of a convolution that TensorRT for RTX does not fuse become
    one scale and a multiplication behind the convolution.
    """
    judge = _Rules(work)
    removed: dict[str, list[str]] = defaultdict(list)
    found = list(pairs(work))
    shared = {pair.quantize for pair in found if judge.feeds_product(pair)}
    written = {pair.quantize for pair in found if judge.is_written(pair)}
    for pair in found:
        for reader, index in list(pair.dequantize.outputs[0].uses()):
            reason = judge.objection(pair, reader, index)
            stays = pair.quantize in written or (pair.quantize in shared and edit.is_op(reader, "Add"))
            if reason and not stays:
                reader.replace_input_with(index, pair.source)
                removed[reason].append(f"{pair.source.name} -> {reader.name}")
        if pair.dequantize.outputs[0].is_graph_output() and edit.can_replace(pair.dequantize.outputs[0], pair.source):
            removed["an output of the network is only rounded by it"].append(str(pair.dequantize.outputs[0].name))
            edit.replace_value(pair.dequantize.outputs[0], pair.source)
    for reason, places in removed.items():
        work.say(places, f"Q/DQ taken out ({reason})")
    work.drop_unused()
    _widen_constants(work)
    if work.backend == "tensorrt-rtx":
        _split_scales(work, judge)
    work.drop_unused()


def pairs(work: QdqEditor) -> Iterator[Pair]:
    """The activations that are quantized and dequantized again, with a constant scale."""
    for node in work.nodes("DequantizeLinear"):
        quantize = edit.maker_of(node.inputs[0])
        how = quantizer_of(node)
        if edit.is_op(quantize, "QuantizeLinear") and how is not None:
            yield Pair(quantize, node, how)


class _Rules:
    """The backend's rules, asked about the nodes of a clone without Q/DQ: they know operators and constant weights."""

    def __init__(self, work: QdqEditor) -> None:
        self._backend = work.backend
        bare = _without_qdq(work.model)
        self._bare = {node.name: node for node in bare.graph}
        self._refused: dict[tuple[str, str], str] = {}
        self._attention: dict[str, str] = {}
        nodes = {node.name: node for node in work.graph}
        for node in bare.graph:
            if edit.is_op(node, "Softmax"):
                found = attention_of(node, bare.graph.opset_imports[""])
                if found is not None:
                    reason = self._incomplete(found, nodes)
                    self._attention[str(found.scores.name)] = self._attention[str(found.mix.name)] = reason

    def objection(self, pair: Pair, reader: ir.Node, index: int) -> str:
        """Why ``reader`` gains nothing by the Q/DQ at its input ``index``; empty when it does."""
        if edit.is_op(reader, "QuantizeLinear"):
            return "the tensor is quantized a second time"
        if reader.domain != "" or reader.op_type not in WEIGHTED:
            if reader.domain == "" and reader.op_type in _READERS[self._backend]:
                return ""
            return f"{reader.op_type} does not compute in 8 bits"
        if reader.name in self._attention:
            return self._attention[str(reader.name)]
        other = edit.input_of(reader, 1 - index) if index < 2 else None
        maker = edit.maker_of(other)
        if not edit.is_op(maker, "DequantizeLinear"):
            return "the other operand is not quantized"
        return self.refused(reader, pair.dtype)

    def feeds_product(self, pair: Pair) -> bool:
        """Whether a product computes in 8 bits on this pair's tensor."""
        uses = pair.dequantize.outputs[0].uses()
        return any(edit.is_op(node, *WEIGHTED) and not self.objection(pair, node, index) for node, index in uses)

    def is_written(self, pair: Pair) -> bool:
        """Whether an INT8 product writes this pair's tensor in 8 bits itself, for elementwise operators."""
        maker = pair.source.producer()
        if (
            maker is None
            or self._backend != "tensorrt-rtx"
            or pair.dtype != Precision.INT8
            or pair.how.axis is not None
        ):
            return False
        inputs = [edit.maker_of(value) for value in maker.inputs]
        if len(inputs) != 2 or any(not edit.is_op(node, "DequantizeLinear") for node in inputs):
            return False
        weight, bare = inputs[1], self._bare[maker.name]
        how = None if weight is None else quantizer_of(weight)
        if how is None or how.axis is not None or edit.constant_tensor_of(edit.input_of(bare, 1)) is None:
            return False
        return rules.may_write_8_bits(bare) and not self.refused(maker, pair.dtype)

    def refused(self, node: ir.Node, dtype: Precision) -> str:
        """Why a product with a constant weight stays out of ``dtype``; empty when it does not."""
        key = (str(node.name), dtype)
        if key not in self._refused:
            verdict = self.verdict(node, dtype)
            self._refused[key] = "" if verdict is None or verdict.granularity is not None else verdict.reason
        return self._refused[key]

    def verdict(self, node: ir.Node, dtype: Precision) -> rules.Placement | None:
        """What the table says of a product with a constant weight; None for others."""
        bare = self._bare[node.name]
        weight = edit.constant_tensor_of(edit.input_of(bare, 1))
        return None if weight is None or len(weight.shape) < 2 else rules.placement(bare, self._backend, dtype)

    def _incomplete(self, found: Attention, nodes: dict[str | None, ir.Node]) -> str:
        """What attention on quantized operands lacks to be one kernel."""
        scores, mix = nodes[found.scores.name], nodes[found.mix.name]
        makers = [_maker(value) for node in (scores, mix) for value in node.inputs]
        if not all(edit.is_op(maker, "DequantizeLinear") for maker in makers):
            return "attention is one kernel only with queries, keys, values and probabilities all quantized, or none"
        if self._backend != "tensorrt-rtx":
            return ""
        how = next((quantizer_of(maker) for maker in makers if maker is not None), None)
        dtype = Precision.INT8 if how is None or how.dtype.is_integer() else Precision.FP8
        query = found.scores.inputs[0]
        size = None if query is None or query.shape is None else query.shape[-1]
        verdict = rules.attention_placement(size if isinstance(size, int) else 0, None, None, self._backend, dtype)
        if verdict.granularity is None:
            return verdict.reason
        if dtype == Precision.INT8 and not _is_quantized_behind(mix.outputs[0]):
            return "INT8 attention is one kernel only with its result quantized too"
        return ""


def _without_qdq(model: ir.Model) -> ir.Model:
    """A clone in which nothing is quantized; weights behind a DequantizeLinear are their 8-bit numbers."""
    clone = model.clone()
    for node in clone.graph:
        if not edit.is_op(node, "DequantizeLinear") or node.inputs[0] is None:
            continue
        value = node.inputs[0]
        maker = value.producer()
        source = maker.inputs[0] if edit.is_op(maker, "QuantizeLinear") else value
        for reader, index in list(node.outputs[0].uses()):
            if source is not None:
                reader.replace_input_with(index, source)
    for node in reversed(list(clone.graph)):
        idle = not any(value.uses() or value.is_graph_output() for value in node.outputs)
        if idle and edit.is_op(node, "QuantizeLinear", "DequantizeLinear"):
            edit.remove_node(node)
    return clone


def _maker(value: ir.Value | None) -> ir.Node | None:
    """The node that made the values of ``value``, before they were moved."""
    node = edit.maker_of(value)
    while node is not None and is_move(node):
        value = node.inputs[0]
        node = edit.maker_of(value)
    return node


def _is_quantized_behind(value: ir.Value) -> bool:
    """Whether all that reads a value, through operators that move it, quantizes it."""
    readers = [reader for reader, _ in value.uses()]
    if not readers or value.is_graph_output():
        return False
    return all(
        edit.is_op(reader, "QuantizeLinear") or (is_move(reader) and _is_quantized_behind(reader.outputs[0]))
        for reader in readers
    )


def _widen_constants(work: QdqEditor) -> None:
    """8-bit constants that no product in 8 bits reads are stored in floating point.

    The compiler would dequantize the weight of a convolution in a kernel of its own, at each inference. Weights of
    MatMul and Gemm stay: it reads 8-bit weights in the kernel of the product.
    """
    done = []
    for dequantize in work.nodes("DequantizeLinear"):
        values, how = edit.constant_of(dequantize.inputs[0]), quantizer_of(dequantize)
        readers = [use for use in dequantize.outputs[0].uses() if not _reads_8_bit(*use)]
        if values is None or how is None or not readers:
            continue
        exact = dequantized(values, how, dequantize.outputs[0].dtype or ir.DataType.FLOAT)
        name = f"{dequantize.inputs[0].name}_wide"  # type: ignore[union-attr]
        constant = work.constant(name, exact)
        for reader, index in readers:
            reader.replace_input_with(index, constant)
            done.append(f"{dequantize.inputs[0].name} -> {reader.name}")  # type: ignore[union-attr]
    work.say(done, "8-bit constants that are read outside of 8-bit products are floating again")
    work.drop_unused()


def _reads_8_bit(node: ir.Node, index: int) -> bool:
    """Whether a dequantized constant at this input is read as it is stored."""
    if edit.is_op(node, "MatMul", "Gemm", "DequantizeLinear"):  # the last reads E4M3 scales of FP4 weights
        return index < 2
    data = edit.maker_of(node.inputs[0]) if edit.is_op(node, "Conv", "ConvTranspose") else None
    return index == 1 and edit.is_op(data, "DequantizeLinear")


def _split_scales(work: QdqEditor, judge: _Rules) -> None:
    """Scales per channel that the compiler does not fuse: one scale, and a multiplication behind the convolution."""
    done = []
    for node in work.nodes("Conv", "Gemm", "MatMul"):
        data, weight = (edit.maker_of(value) for value in node.inputs[:2])
        if not (edit.is_op(data, "DequantizeLinear") and edit.is_op(weight, "DequantizeLinear")):
            continue
        if data is None or weight is None:
            continue
        activation, how = quantizer_of(data), quantizer_of(weight)
        if activation is None or how is None or how.axis is None or not how.dtype.is_integer():
            continue
        verdict = judge.verdict(node, Precision.INT8)
        if verdict is None or verdict.granularity != "per-tensor":
            continue
        reason = _split(work, node, weight, activation, how) if node.op_type == "Conv" else verdict.reason
        if reason:
            work.leave(node, f"its weight keeps scales per channel: {reason}")
        else:
            done.append(str(node.name))
    work.say(done, "convolutions with scales per channel have one scale and a multiplication behind them")


def _split(work: QdqEditor, node: ir.Node, weight: ir.Node, activation: Quantizer, how: Quantizer) -> str:
    """Why it was not done; empty when it was.

    Exact but for channels whose scale is below 1/1024 of the largest: theirs is raised to that.
    """
    values, output = edit.constant_of(weight.inputs[0]), node.outputs[0]
    bias = edit.input_of(node, 2)
    offset = _constant_behind(bias)
    if values is None or how.axis != 0 or (bias is not None and offset is None) or activation.axis is not None:
        return "its bias or weight is computed, or its scales lie on another axis"
    rows = values.reshape(values.shape[0], -1).astype(np.float32)
    used = np.where(np.abs(rows).max(axis=1) > 0, np.abs(how.scale), 0)
    largest = np.float32(used.max() if used.any() else 1)
    ratios = np.maximum(np.where(used > 0, used / largest, 1), _SMALLEST_RATIO).astype(np.float32)
    rows = np.rint(rows * (how.scale / (largest * ratios))[:, None])
    bound = float(np.abs(rows).sum(axis=1).max()) * float(largest) * float(activation.scale) * (LEVELS + 1)
    if bound > FP16.largest:
        return f"before the multiplication its sums could reach {bound:.3g}, beyond FP16"
    dtype, name = output.dtype or ir.DataType.FLOAT, str(output.name)
    floating = dtype.numpy()
    single = Quantizer(np.asarray(largest, np.float32), np.zeros((), np.int32), ir.DataType.INT8, None)
    stored = work.constant(f"{name}_weight", rows.astype(np.int8).reshape(values.shape))
    dequantize = work.dequantize(stored, single, weight.outputs[0].dtype)
    work.graph.insert_before(node, dequantize)
    node.replace_input_with(1, dequantize.outputs[0])
    node.resize_inputs(2)
    column = [1, -1] + [1] * (values.ndim - 2)
    ratio = work.constant(f"{name}_ratio", ratios.reshape(column).astype(floating))
    chain = [work.node("Mul", [output, ratio], f"{name}_scaled", output)]
    if offset is not None:
        shift = work.constant(f"{name}_bias", offset.reshape(column).astype(floating))
        chain.append(work.node("Add", [chain[0].outputs[0], shift], f"{name}_biased", output))
    edit.chain_behind(output, chain, work.names, "unscaled")
    return ""


def _constant_behind(value: ir.Value | None) -> np.ndarray | None:
    """The constant that reaches ``value``, through casts and copies of it, which exporters leave at shared biases."""
    node = edit.maker_of(value)
    while value is not None and edit.is_op(node, "Identity", "Cast"):
        value = node.inputs[0]
        node = edit.maker_of(value)
    return edit.constant_of(value)


STEP = "existing-qdq"
"""Name of the step in reports."""

_OPS = frozenset("QuantizeLinear DequantizeLinear DynamicQuantizeLinear ConvInteger MatMulInteger".split())


@dataclass(frozen=True)
class CanonicalQdq:
    """A model whose Q/DQ the compiler reads and gains by.

    Attributes:
        model: The model.
        step: What was changed.
        warnings: What of that costs accuracy.
    """

    model: ir.Model
    step: StepRecord
    warnings: tuple[str, ...]


def is_quantized(model: ir.Model) -> bool:
    """Whether a model holds Q/DQ, operators on quantized tensors, or weights stored narrow."""
    return has_cast_weights(model) or any(
        node.op_type in _OPS or node.op_type.startswith("QLinear") or node.op_type in ("QGemm", NBITS, MXFP8)
        for node in edit.all_nodes(model.graph)
    )


def canonicalize_qdq(model: ir.Model, backend: str) -> CanonicalQdq | None:
    """Bring the Q/DQ of a model to the form ``backend`` reads, and to the places where it gains by it.

    What is quantized stays quantized with its own scales. Operators on quantized tensors become Q/DQ; zero points
    become 0; biases and weights are stored as constants; Q/DQ around operators that do not compute in 8 bits is taken
    out. Only the main graph is changed.

    Args:
        model: A model as loaded: opset 21 or later, everything named; not changed.
        backend: ``tensorrt-rtx`` or ``tensorrt``: whose placement rules apply.

    Returns:
        None for a model that is not quantized.

    Raises:
        InvalidModelError: It is quantized in a way that has no equal in Q/DQ: scales computed at run time, arithmetic
            on 8-bit integers, zero points inside nested graphs.
    """
    if not is_quantized(model):
        return None
    start = time.perf_counter()
    clone = model.clone()
    _check_nested(clone)
    work = QdqEditor(clone, backend, edit.Names(clone))
    forms.standard_domain(work)
    forms.expand(work)
    expand_blocked(work)
    expand_cast_weights(work)
    if work.changes:
        infer_in_place(clone)
    together(clone)
    read_arithmetic(work)
    for mend_form in forms.PASSES:
        mend_form(work)
    place_qdq(work)
    for domain in set(clone.graph.opset_imports) - {"", *(node.domain for node in edit.all_nodes(clone.graph))}:
        del clone.graph.opset_imports[domain]
    if work.changes:
        infer_in_place(clone)
    seconds = time.perf_counter() - start
    step = StepRecord(STEP, "PRECISION", work.changes, seconds, tuple(work.refusals), tuple(work.details))
    return CanonicalQdq(clone, step, tuple(work.warnings))


def _check_nested(model: ir.Model) -> None:
    """Raises InvalidModelError for Q/DQ in nested graphs that needs mending: the compiler would take UINT8 for INT8."""
    for node in edit.all_nodes(model.graph):
        if node.graph is model.graph or not edit.is_op(node, "QuantizeLinear", "DequantizeLinear"):
            continue
        how = quantizer_of(node)
        if how is not None and how.dtype in INTEGERS and not how.is_symmetric:
            raise InvalidModelError(
                f"{node.op_type} inside an If, Loop or Scan has a zero point or is unsigned",
                where=f"node {node.name}",
                remedy="quantize symmetrically (INT8, zero point 0), or leave the branch in FP32",
            )


def existing_ranges(model: ir.Model) -> dict[str, float]:
    """Largest magnitude by tensor name, of the activations that a mended model quantizes to INT8 with one scale."""
    found = {}
    for node in model.graph:
        if edit.is_op(node, "QuantizeLinear") and node.inputs[0] is not None:
            how = quantizer_of(node)
            if how is not None and how.axis is None and how.dtype is ir.DataType.INT8:
                found[str(node.inputs[0].name)] = float(how.scale) * LEVELS
    return found


def existing_types(model: ir.Model) -> frozenset[Precision]:
    """The 8-bit types of the tensors that a mended model dequantizes."""
    hows = [quantizer_of(node) for node in model.graph if edit.is_op(node, "DequantizeLinear")]
    return frozenset(Precision.INT8 if how.dtype.is_integer() else Precision.FP8 for how in hows if how is not None)


def without_qdq(model: ir.Model) -> ir.Model:
    """A clone of a mended model in which products read the tensors themselves, and floating weights.

    Weights that are stored in 8 bits for products of floating tensors stay so, and what is quantized at run time or in
    nested graphs does too.
    """
    clone = model.clone()
    work = QdqEditor(clone, "", edit.Names(clone))
    quantized = existing_nodes(clone)
    for pair in list(pairs(work)):
        result = pair.dequantize.outputs[0]
        if result.dtype is pair.source.dtype and edit.can_replace(result, pair.source):
            edit.replace_value(result, pair.source)
    for node in clone.graph:
        for index, value in enumerate(node.inputs[:2] if node.name in quantized else ()):
            maker = edit.maker_of(value)
            if value is None or not edit.is_op(maker, "DequantizeLinear"):
                continue
            values, how = edit.constant_of(maker.inputs[0]), quantizer_of(maker)
            if values is not None and how is not None:
                exact = dequantized(values, how, value.dtype or ir.DataType.FLOAT)
                node.replace_input_with(index, work.constant(f"{value.name}_wide", exact))
    work.drop_unused()
    return clone
