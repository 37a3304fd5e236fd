"""Which nodes may become 8-bit, what that takes, and which of them change together. Pure.

8-bit attention: the two products of activations around a softmax that a backend's fused kernel takes in 8 bits. All
four operands change together: queries, keys, probabilities and values. With fewer of them quantized there is no fused
kernel, and the scores are written to memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from trtopt.graph import cost, edit
from trtopt.graph.attention import attention_of
from trtopt.graph.edit import is_op
from trtopt.precision import rules
from trtopt.precision.observe import ranges
from trtopt.precision.observe.statistics import TensorStats
from trtopt.precision.plan import WEIGHTED, NarrowType, Operand, QuantizedOp
from trtopt.precision.qdq.ends import ending_products, ends_network
from trtopt.precision.write import LARGEST, eight_bit
from trtopt.report.schema.steps import Refusal
from trtopt.support.memo import once_per_array
from trtopt.support.precision import Precision

_MOST_APART = 16
"""Readers of one weight that are regions of their own. The subgraph around a step of a recurrence that is written out
holds all steps before it: the 131 regions of an LSTM of two layers and 64 steps took over ten minutes (2-core x86-64,
no GPU, used by others too)."""

_MOVES = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


@dataclass(frozen=True)
class AttentionProducts:
    """The two products of one attention: ``scores`` of queries and keys, ``mix`` of probabilities and values.

    ``readers`` are the names of the nodes that read the result, behind operators that only move it; none for an output
    of the network.
    """

    scores: ir.Node
    mix: ir.Node
    readers: frozenset[str]

    @property
    def operands(self) -> tuple[str, ...]:
        """The tensors that are quantized: queries, keys, probabilities, values."""
        return tuple(str(value.name) for node in (self.scores, self.mix) for value in node.inputs if value is not None)


def attention_products(
    model: ir.Model, backend: str, dtype: Precision, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> tuple[list[AttentionProducts], list[Refusal]]:
    """The attentions that the backend's table sends to ``dtype``, and the refusals of the products of the others.

    Without static ``shapes`` by tensor name, sizes that the model leaves open are taken to fit.
    """
    found, refused = [], []
    opset = model.graph.opset_imports.get("", 0)
    for node in model.graph:
        if not edit.is_op(node, "Softmax"):
            continue
        attention = attention_of(node, opset)
        if attention is None or any(_is_dequantized(value) for value in attention.scores.inputs):
            continue
        reason = _why_not(attention.scores, attention.mix, backend, dtype, shapes or {})
        if any(edit.is_op(step, "Max", "Tanh") for step in attention.between):
            reason = "no fused kernel squashes or floors scores before softmax"
        if reason:
            refused += [Refusal(str(product.name), reason) for product in (attention.scores, attention.mix)]
        else:
            found.append(AttentionProducts(attention.scores, attention.mix, _readers(attention.mix)))
    return found, refused


def _why_not(
    scores: ir.Node, mix: ir.Node, backend: str, dtype: Precision, shapes: Mapping[str, tuple[int, ...]]
) -> str:
    """Why the table leaves this attention out; empty where it does not."""
    head, head_of_values = _size(scores.inputs[0], -1, shapes), _size(mix.inputs[1], -1, shapes)
    if head is not None and head_of_values is not None and head != head_of_values:
        return "no fused kernel has values of another size than queries"
    queries = _size(scores.outputs[0], -2, shapes)
    keys = _size(scores.outputs[0], -1, shapes)
    verdict = rules.attention_placement(head, queries, keys, backend, dtype)
    return "" if verdict.granularity is not None else verdict.reason


def _size(value: ir.Value | None, axis: int, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    if value is None:
        return None
    known = shapes.get(str(value.name))
    if known is None and value.shape is not None:
        size = list(value.shape)[axis] if len(value.shape) >= -axis else None
        return size if isinstance(size, int) else None
    return known[axis] if known is not None and len(known) >= -axis else None


def _readers(mix: ir.Node) -> frozenset[str]:
    value = mix.outputs[0]
    while (node := edit.only_user(value)) is not None and node.op_type in _MOVES:
        value = node.outputs[0]
    return frozenset() if value.is_graph_output() else frozenset(str(node.name) for node, _ in value.uses())


IMPORTED = "imported"
"""Name of the method that took a range from a calibration cache."""


@dataclass(frozen=True)
class Problem:
    """What a decision about precision is made from.

    Attributes:
        model: A widened model, nodes named.
        backend: ``tensorrt-rtx`` or ``tensorrt``: whose table applies.
        stats: What was observed of :func:`trtopt.precision.decide.wanted_tensors`.
        shapes: Static shapes by tensor name, at the largest input shapes.
        method: How INT8 ranges are chosen from histograms.
        narrow: The type of what is neither 8-bit nor FP32.
        imported: INT8 ranges given by a calibration cache, largest magnitude by tensor name: they go before ``stats``.
        unknown: Why a tensor has no INT8 range although there are statistics, by tensor name.
        fallbacks: Nodes that stay FP32 because the outputs need it, with the reason.
        takes_bfloat: Whether the target computes in BF16.
        ends: Outputs that leave the network in FP32 whatever computes them
            (:func:`trtopt.precision.fp16.states.fp32_outputs`).
    """

    model: ir.Model
    backend: str
    stats: Mapping[str, TensorStats]
    shapes: Mapping[str, tuple[int, ...]]
    method: str
    narrow: NarrowType
    imported: Mapping[str, float] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    takes_bfloat: bool = False
    ends: Collection[str] = ()

    @property
    def fuses_quantizers(self) -> bool:
        """Whether INT8 quantizers behind 16-bit products are written as arithmetic."""
        return self.backend == "tensorrt-rtx"

    def own_ends(self, model: ir.Model) -> frozenset[str]:
        """The products of the Q/DQ that ``model``, this one or a piece of it, brings along, which write ``ends``."""
        return ending_products(model, self.ends) if self.fuses_quantizers else frozenset()


@dataclass(frozen=True)
class Region:
    """Nodes that read one tensor, after which the region is named; it is quantized once for all of them. What shares a
    weight with many, as the steps of a recurrence that is written out, is one region, named after the first."""

    name: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Candidates:
    """What may become 8-bit.

    Attributes:
        ops: The forms of each node: by type in the order asked for, the most accurate of a type first.
        regions: The nodes by the tensor they read, in graph order.
        refused: Products that stay wider, with the reason.
    """

    ops: Mapping[str, tuple[QuantizedOp, ...]]
    regions: tuple[Region, ...]
    refused: tuple[Refusal, ...]

    @property
    def all(self) -> dict[str, QuantizedOp]:
        """Every node in its first form."""
        return {node: forms[0] for node, forms in self.ops.items()}

    def of_types(self, dtypes: Sequence[Precision]) -> Candidates:
        """The same regions with the forms of some types only."""
        ops = {node: tuple(op for op in forms if op.dtype in dtypes) for node, forms in self.ops.items()}
        return Candidates({node: forms for node, forms in ops.items() if forms}, self.regions, self.refused)


def find_candidates(problem: Problem, dtypes: Sequence[Precision]) -> Candidates:
    """The nodes that the backend's table and the observed ranges let become 8-bit, in ``dtypes``, the preferred
    first."""
    ops: dict[str, tuple[QuantizedOp, ...]] = {}
    refused: dict[str, Refusal] = {}
    nodes = {str(node.name): node for node in problem.model.graph}
    for dtype in dtypes:
        found, out = _ops(problem, dtype)
        for op in found:
            forms = (op, *_coarser(op, nodes[op.node])) if problem.fuses_quantizers else (op,)
            if problem.fuses_quantizers and ends_network(nodes[op.node], problem.ends):
                forms = tuple(replace(form, ends=form.weight_axis is None) for form in forms)
            elif dtype == Precision.INT8 and problem.fuses_quantizers:
                forms = _with_result(forms, nodes[op.node], problem)
            ops[op.node] = (*ops.get(op.node, ()), *forms)
        for refusal in out:
            refused.setdefault(refusal.node, refusal)
    regions: dict[str, list[str]] = {}
    partners = _partners(problem, dtypes)
    readers = Counter(nodes[name].inputs[1] for name in ops)
    leaders: dict[ir.Value | None, ir.Node] = {}
    for node in problem.model.graph:
        if node.name in ops:
            first = partners.get(str(node.name), node)
            if readers[node.inputs[1]] > _MOST_APART:
                first = leaders.setdefault(node.inputs[1], node)
            regions.setdefault(str(first.inputs[0].name), []).append(str(node.name))  # type: ignore[union-attr]
    return Candidates(
        ops,
        tuple(Region(name, tuple(nodes)) for name, nodes in regions.items()),
        tuple(refusal for name, refusal in refused.items() if name not in ops),
    )


def without(candidates: Candidates, blocked: Mapping[str, str]) -> Candidates:
    """The candidates but for some nodes, which are refused for the reasons given."""
    if not blocked:
        return candidates
    regions = (replace(item, nodes=tuple(n for n in item.nodes if n not in blocked)) for item in candidates.regions)
    return Candidates(
        {node: forms for node, forms in candidates.ops.items() if node not in blocked},
        tuple(item for item in regions if item.nodes),
        (*candidates.refused, *(Refusal(node, reason) for node, reason in blocked.items())),
    )


def _partners(problem: Problem, dtypes: Sequence[Precision]) -> dict[str, ir.Node]:
    """The product of queries and keys, by the name of the product with the values that it changes with."""
    found = [item for dtype in dtypes for item in attention_products(problem.model, problem.backend, dtype)[0]]
    return {str(item.mix.name): item.scores for item in found}


def _coarser(op: QuantizedOp, node: ir.Node) -> tuple[QuantizedOp, ...]:
    """The form with one scale of a node that has scales per channel, if its weight allows it."""
    if op.weight_axis is None or op.dtype != Precision.INT8 or weight_sqnr_db(node) < rules.LEAST_WEIGHT_SQNR_DB:
        return ()
    return (replace(op, weight_axis=None, multiply=False),)


def _with_result(forms: Sequence[QuantizedOp], node: ir.Node, problem: Problem) -> tuple[QuantizedOp, ...]:
    """The forms of a product, those with one scale with the range of what they may write in 8 bits: scales per channel
    are a multiplication behind the product, and then the quantizer is none of its kernel. Where the weight is too
    uneven for one scale, one more form divides its largest channels, and multiplies what was written."""
    stats = problem.stats.get(str(node.outputs[0].name))
    if (
        stats is None
        or stats.nonfinite
        or not stats.has_histogram
        or stats.absmax <= 0
        or not rules.may_write_8_bits(node)
    ):
        return tuple(forms)
    amax, _ = ranges.choose_amax(stats, problem.method)
    is_small = amax < problem.narrow.smallest_normal * LARGEST[Precision.INT8]
    if is_small or ranges.int8_sqnr_db(stats, amax) < rules.RESULT_SQNR_DB:
        return tuple(forms)
    if not any(form.weight_axis is None for form in forms):
        forms = (*forms, replace(forms[-1], multiply=True))
    writing = (form.weight_axis is None or form.multiply for form in forms)
    return tuple(replace(form, result_amax=amax * writes) for form, writes in zip(forms, writing, strict=True))


def candidate_nodes(
    model: ir.Model, backend: str, dtype: Precision = Precision.INT8
) -> tuple[list[ir.Node], list[Refusal]]:
    """Nodes with a constant weight that the backend's table sends to ``dtype``, and the refusals of the others."""
    nodes, refused = [], []
    for node in model.graph:
        if node.op_type not in WEIGHTED or len(node.inputs) < 2:
            continue
        weight = edit.constant_of(node.inputs[1])
        if weight is None:
            if not _is_dequantized(node.inputs[1]):
                refused.append(Refusal(str(node.name), "no constant weight: attention and other products stay 16-bit"))
            continue
        if weight.ndim < 2 or edit.constant_of(node.inputs[0]) is not None or _is_dequantized(node.inputs[0]):
            continue
        verdict = rules.placement(node, backend, dtype)
        if verdict.granularity is None:
            refused.append(Refusal(str(node.name), verdict.reason))
        else:
            nodes.append(node)
    return nodes, refused


def _ops(problem: Problem, dtype: Precision) -> tuple[list[QuantizedOp], list[Refusal]]:
    nodes, refused = candidate_nodes(problem.model, problem.backend, dtype)
    found: list[QuantizedOp] = []
    given = problem.imported.items() if dtype == Precision.INT8 else ()
    amax = {activation: (bound, IMPORTED) for activation, bound in given}
    for node in nodes:
        op = _quantized_op(node, problem, dtype, amax)
        if isinstance(op, Refusal):
            refused.append(op)
        else:
            found.append(op)
    if dtype == Precision.INT8:
        left_out = _left_out(problem, found)
        refused += left_out.values()
        found = [op for op in found if op.node not in left_out]
    imported = {op.activation for op in found if op.method == IMPORTED}
    found = with_shared_ranges(problem.model, found, rules.LARGEST_SHARED_RATIO[problem.backend], imported)
    if rules.RESIDUALS[problem.backend].granularity is not None:
        found = _with_residuals(problem, found)
    attention, out = _attention_ops(problem, dtype, {op.node for op in found}, amax)
    return [*found, *attention], [*out, *refused]


def _with_residuals(problem: Problem, ops: Sequence[QuantizedOp]) -> list[QuantizedOp]:
    """The same, with the additions that read a quantized tensor as a residual."""
    quantized = {op.node for op in ops}
    values = {str(node.inputs[0].name): node.inputs[0] for node in problem.model.graph if node.name in quantized}  # type: ignore[union-attr]
    skips = {name: residual_adds(value, quantized) for name, value in values.items() if value is not None}
    return [replace(op, skips=skips[op.activation]) for op in ops]


_UNUSED_FP8 = 2.0**-6
"""Least share of the range of E4M3 that an operand of an attention fills. Its scale is FP16 and not below the normal
range, so that weights of many keys (2e-3 of 1500) leave the upper exponents unused; of 15 binades of normal numbers 9
are left then."""


def _attention_ops(
    problem: Problem, dtype: Precision, weighted: Collection[str], known: dict[str, tuple[float, str]]
) -> tuple[list[QuantizedOp], list[Refusal]]:
    """The products of attention, both or none of each."""
    products, refused = attention_products(problem.model, problem.backend, dtype, problem.shapes)
    found: list[QuantizedOp] = []
    for item in products:
        reason = ""
        if dtype == Precision.INT8 and not (item.readers and item.readers <= set(weighted)):
            reason = "the fused INT8 attention writes INT8, and what reads its result does not take it so"
        for name in item.operands:
            stats = problem.stats.get(name)
            if stats is None or stats.nonfinite or not stats.has_histogram or stats.absmax <= 0:
                reason = reason or f"{name} was not observed, or is not finite or zero in every sample"
                continue
            if dtype == Precision.INT8 and name in problem.unknown:
                reason = reason or problem.unknown[name]
            if name not in known:
                known[name] = _range(stats, problem.method, dtype)
            least = problem.narrow.smallest_normal * LARGEST[dtype]
            if dtype == Precision.FP8 and known[name][0] >= least * _UNUSED_FP8:
                known[name] = (max(known[name][0], least), known[name][1])
            decibel = ranges.int8_sqnr_db(stats, known[name][0]) if dtype == Precision.INT8 else math.inf
            if decibel < rules.SMALLEST_INPUT_SQNR_DB:
                reason = reason or f"{name} keeps only {decibel:.1f} dB in INT8: too heavy-tailed"
            if known[name][0] < least:
                reason = (
                    reason or f"{name} is so small that its scale is below the normal range of {problem.narrow.name}"
                )
        if reason:
            refused += [Refusal(str(node.name), reason) for node in (item.scores, item.mix)]
            continue
        for node, (left, right) in ((item.scores, item.operands[:2]), (item.mix, item.operands[2:])):
            other = Operand(right, *known[right])
            found.append(QuantizedOp(str(node.name), left, known[left][0], None, known[left][1], False, dtype, other))
    return found, refused


def _is_dequantized(value: ir.Value | None) -> bool:
    producer = edit.maker_of(value)
    return producer is not None and producer.op_type == "DequantizeLinear"


def _quantized_op(
    node: ir.Node, problem: Problem, dtype: Precision, known: dict[str, tuple[float, str]]
) -> QuantizedOp | Refusal:
    name, activation = str(node.name), str(node.inputs[0].name)  # type: ignore[union-attr]
    found = problem.stats.get(activation)
    weight = edit.constant_of(node.inputs[1])
    if weight is not None and not np.isfinite(np.abs(weight).max(initial=0)):
        return Refusal(name, f"its weight {node.inputs[1].name} holds NaN or infinity")  # type: ignore[union-attr]
    if found is None:
        return Refusal(name, f"{activation} was not observed")
    if found.nonfinite:
        return Refusal(name, f"{activation} holds NaN or infinity in the FP32 reference")
    if dtype == Precision.INT8 and activation in problem.unknown:
        return Refusal(name, problem.unknown[activation])
    if activation not in known:
        known[activation] = _range(found, problem.method, dtype)
    amax, chosen = known[activation]
    if amax <= 0:
        return Refusal(name, f"{activation} was zero in every sample")
    granularity = rules.placement(node, problem.backend, dtype).granularity
    if granularity == "per-channel":
        return QuantizedOp(name, activation, amax, _channel_axis(node), chosen, dtype=dtype)
    multiply = (
        dtype == Precision.INT8 and node.op_type == "Conv" and weight_sqnr_db(node) < rules.SMALLEST_WEIGHT_SQNR_DB
    )
    return QuantizedOp(name, activation, amax, 0 if multiply else None, chosen, multiply, dtype)


def _range(found: TensorStats, method: str, dtype: Precision) -> tuple[float, str]:
    """A floating type keeps its relative precision down to small numbers: clipping gains nothing, so the maximum."""
    return (found.absmax, "max") if dtype == Precision.FP8 else ranges.choose_amax(found, method)


def _left_out(problem: Problem, ops: Sequence[QuantizedOp]) -> dict[str, Refusal]:
    """First layers that INT8 makes no faster, then nodes whose input is too heavy-tailed for INT8, the worst first; as
    far as their share of the flop allows."""
    flop = cost.flop_by_node(problem.model, problem.shapes)
    eligible = [str(node.name) for node in problem.model.graph if cost.is_eligible_for_int8(node)]
    budget = rules.LARGEST_SHARE_LEFT_OUT * sum(flop.get(name, 0) for name in eligible)
    among = {op.node for op in ops}
    budget -= sum(flop.get(name, 0) for name in eligible if name not in among)
    judged = [op for op in ops if op.method != IMPORTED]  # a given range is taken as it is
    found = {}
    for name, reason in (_first_layers(problem, judged) | _heavy_tailed(problem, judged)).items():
        if flop.get(name, 0) <= budget:
            budget -= flop.get(name, 0)
            found[name] = Refusal(name, reason)
    return found


def _first_layers(problem: Problem, ops: Sequence[QuantizedOp]) -> dict[str, str]:
    verdict, among = rules.FIRST_LAYERS[problem.backend], {op.node for op in ops}
    if verdict.granularity is not None:
        return {}
    nodes = (node for node in problem.model.graph if node.name in among)
    return {str(node.name): verdict.reason for node in nodes if rules.is_first_of_few_channels(node)}


def _heavy_tailed(problem: Problem, ops: Sequence[QuantizedOp]) -> dict[str, str]:
    quality = {op.node: ranges.int8_sqnr_db(problem.stats[op.activation], op.activation_amax) for op in ops}
    worst = sorted(
        (op for op in ops if quality[op.node] < rules.SMALLEST_INPUT_SQNR_DB), key=lambda op: quality[op.node]
    )
    return {op.node: f"{op.activation} keeps only {quality[op.node]:.1f} dB in INT8: too heavy-tailed" for op in worst}


def weight_sqnr_db(node: ir.Node) -> float:
    """Signal to noise of the node's weight in INT8 with one scale, in dB."""
    return _sqnr_db(np.asarray(edit.constant_of(node.inputs[1]), np.float32))


@once_per_array
def _sqnr_db(weight: np.ndarray) -> float:
    values, scales = eight_bit(weight, None, None)
    noise = float(np.square(values * scales - weight).sum())
    power = float(np.square(weight).sum())
    return 10 * math.log10(power / noise) if power > 0 and noise > 0 else math.inf


def _channel_axis(node: ir.Node) -> int | None:
    """The weight's output-channel axis."""
    weight = edit.constant_of(node.inputs[1])
    if node.op_type == "Conv":
        return 0
    if node.op_type == "ConvTranspose":
        return 1
    if node.op_type == "Gemm":
        return 0 if edit.int_attribute(node, "transB", 0) else 1
    return 1 if weight is not None and weight.ndim == 2 else None


_EPILOGUE = frozenset({"Add", "BatchNormalization", "Clip", "Mul", "Relu"})
_LONGEST_EPILOGUE = 4


def residual_adds(value: ir.Value, quantized: Collection[str]) -> tuple[str, ...]:
    """Names of the additions that add ``value`` to the result of a quantized convolution."""
    found = []
    for node, index in value.uses():
        if node.op_type != "Add" or node.domain != "":
            continue
        conv = _conv_behind(node.inputs[1 - index])
        if conv is not None and conv.name in quantized:
            found.append(str(node.name))
    return tuple(found)


def _conv_behind(value: ir.Value | None) -> ir.Node | None:
    """The convolution that ``value`` comes from through element-wise operators with constants, read by nobody else."""
    for _ in range(_LONGEST_EPILOGUE):
        producer = edit.maker_of(value)
        if value is None or producer is None or edit.only_user(value) is None:
            return None
        if producer.op_type == "Conv":
            return producer
        others = [item for item in producer.inputs[1:] if edit.constant_tensor_of(item) is None]
        if producer.op_type not in _EPILOGUE or others:
            return None
        value = producer.inputs[0]
    return None


def with_shared_ranges(
    model: ir.Model, ops: Sequence[QuantizedOp], largest_ratio: float, given: Collection[str] = ()
) -> list[QuantizedOp]:
    """``ops`` with one range for a quantized Concat and those of its inputs that are quantized for other readers.

    The quantizer of a Concat's result moves before it, to the kernels that write the inputs; an input that others
    read quantized with another scale would be written twice. The largest range of a group serves all of it: a smaller
    one would clip.

    Args:
        model: The model the ops are of.
        ops: Ops of one 8-bit type.
        largest_ratio: Ranges of an input and the result that differ by more stay apart.
        given: Tensors whose range somebody else has set.
    """
    ranges = {op.activation: (op.activation_amax, op.method) for op in ops if op.activation not in given}
    leader = {name: name for name in ranges}

    def top(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    for node in model.graph:
        result = str(node.outputs[0].name) if node.outputs else ""
        if is_op(node, "Concat") and result in ranges:
            for value in node.inputs:
                if value is None or value.name not in ranges:
                    continue
                low, high = sorted((ranges[str(value.name)][0], ranges[result][0]))
                if high <= low * largest_ratio:
                    leader[top(str(value.name))] = top(result)
    largest: dict[str, tuple[float, str]] = {}
    for name, found in ranges.items():
        largest[top(name)] = max(found, largest.get(top(name), found))
    shared = {name: largest[top(name)] for name in ranges}
    return [
        op
        if op.activation not in shared
        else replace(op, activation_amax=shared[op.activation][0], method=shared[op.activation][1])
        for op in ops
    ]
