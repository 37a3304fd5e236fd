"""Every operator of ONNX has a cost, is free, or does not run on TensorRT."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx.defs
import onnx.parser
import onnx_ir as ir
import pytest
from drawn_cases import given
from hypothesis import strategies as st
from onnx_cases import single_operators, some_operators

from trtopt.graph.cost import flop_of, has_cost
from trtopt.graph.edit import all_nodes
from trtopt.graph.products import products_of
from trtopt.graph.shapes import infer_shapes, static_shapes
from trtopt.hardware.spec import find_gpu
from trtopt.roofline.memory import peak_memory
from trtopt.roofline.node_work import GraphTypes, work_of_node
from trtopt.roofline.onnx_layers import FusedModel
from trtopt.support.precision import Precision

NOT_RUN = frozenset(
    """
    AffineGrid Bernoulli BitCast BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor CenterCropPad Col2Im Compress
    ConcatFromSequence ConvInteger CumProd DFT DeformConv Det DynamicQuantizeLinear ImageDecoder MatMulInteger
    MaxRoiPool MaxUnpool MelWeightMatrix Multinomial NegativeLogLikelihoodLoss Optional OptionalGetElement
    OptionalHasElement
    QLinearConv QLinearMatMul RegexFullMatch SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert
    SequenceLength SequenceMap SoftmaxCrossEntropyLoss SplitToSequence StringConcat StringNormalizer StringSplit SwiGLU
    TfIdfVectorizer Unique
    """.split()
)
"""What the parser of TensorRT for RTX 1.7.1 (an ONNX parser as of TensorRT 11) refuses: ``supports_operator``."""


def default_operators() -> set[str]:
    return {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}


def test_every_operator_tensorrt_runs_has_a_cost() -> None:
    without = {name for name in default_operators() if not has_cost(ir.node(name, []))}
    assert without == NOT_RUN & default_operators()


def conv(
    data: tuple[int, ...], weight: tuple[int, ...], stride: int, dilation: int, group: int
) -> tuple[ir.Node, dict]:
    spatial = tuple(
        (size - dilation * (kernel - 1) - 1) // stride + 1 for size, kernel in zip(data[2:], weight[2:], strict=True)
    )
    values = [ir.Value(name=name) for name in "xw"]
    node = ir.node("Conv", values, attributes={"group": group}, name="node")
    node.outputs[0].name = "y"
    return node, {"x": data, "w": weight, "y": (data[0], weight[0], *spatial)}


@given(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.integers(1, 2), st.integers(1, 3), st.integers(1, 2),
    st.integers(1, 2), st.integers(1, 3),
    many=40,
)  # fmt: skip
def test_convolutions_count_as_a_naive_loop_does(
    batch: int, inner: int, outer: int, group: int, kernel: int, stride: int, dilation: int, rank: int
) -> None:
    size = dilation * (kernel - 1) + 3
    node, shapes = conv(
        (batch, inner * group, *(size,) * rank), (outer * group, inner, *(kernel,) * rank), stride, dilation, group
    )
    counted = 0
    for _image, channel, *pixel in np.ndindex(*shapes["y"]):
        start = channel // outer * inner
        for source in range(start, start + inner):
            for tap in np.ndindex(*(kernel,) * rank):
                at = [place * stride + step * dilation for place, step in zip(pixel, tap, strict=True)]
                assert source < inner * group and all(index < size for index in at)
                counted += 2
    assert flop_of(node, shapes) == counted


@given(
    st.lists(st.integers(1, 4), max_size=2),
    st.lists(st.integers(1, 4), max_size=2),
    st.integers(1, 5), st.integers(1, 5), st.integers(1, 5),
    many=60,
)  # fmt: skip
def test_batched_products_count_what_broadcasting_makes(
    left: list[int], right: list[int], m: int, k: int, n: int
) -> None:
    common = min(len(left), len(right))
    for index in range(1, common + 1):
        if left[-index] != right[-index] and 1 not in (left[-index], right[-index]):
            right[-index] = left[-index]
    out = np.matmul(np.zeros((*left, m, k)), np.zeros((*right, k, n))).shape
    node = ir.node("MatMul", [ir.Value(name=name) for name in "ab"], name="node")
    node.outputs[0].name = "y"
    shapes = {"a": (*left, m, k), "b": (*right, k, n), "y": out}
    assert flop_of(node, shapes) == 2 * math.prod(out) * k
    products = products_of(node, shapes)
    assert products is not None
    assert products[0].m * products[0].n * products[0].batch == math.prod(out)


@pytest.mark.parametrize(
    ("graph", "flop"),
    [
        # Scores 2*2*3*5*4, softmax 5, scale 1 and mask 1 on 2*3*5 of them, values 2*2*3*5*6.
        (
            "g (float[1, 2, 3, 4] q, float[1, 2, 5, 4] k, float[1, 2, 5, 6] v, float[3, 5] m) => (float[1, 2, 3, 6] y) "
            "{ y = Attention(q, k, v, m) }",
            240 + 360 + 7 * 30,
        ),
        # 3-D operands; a cache of 2 makes 5 keys of 3.
        (
            "g (float[1, 3, 8] q, float[1, 3, 8] k, float[1, 3, 8] v, float[1, 2, 2, 4] p, float[1, 2, 2, 4] r) "
            "=> (float[1, 3, 8] y) { y = Attention <q_num_heads = 2, kv_num_heads = 2> (q, k, v, , p, r) }",
            240 + 240 + 6 * 30,
        ),
        # Bidirectional GRU: 3 gates of 4 units, 2 steps, batch 3, 5 inputs.
        (
            "g (float[2, 3, 5] x, float[2, 12, 5] w, float[2, 12, 4] r) => (float[2, 2, 3, 4] y) "
            '{ y = GRU <hidden_size = 4, direction = "bidirectional"> (x, w, r) }',
            2 * 2 * 3 * 2 * 12 * (5 + 4),
        ),
        # Each of 3 decoded tokens: outer product and read of a [4, 6] state, for 2 heads.
        (
            "g (float[1, 3, 8] q, float[1, 3, 8] k, float[1, 3, 12] v) => (float[1, 3, 12] y) "
            '{ y = LinearAttention <q_num_heads = 2, kv_num_heads = 2, update_rule = "linear"> (q, k, v) }',
            2 * (2 * 24 * 2 * 3),
        ),
    ],
)
def test_sequence_operators_by_hand(graph: str, flop: int) -> None:
    proto = onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 27]>' + graph)
    model = ir.from_proto(proto)
    values = [*model.graph.inputs, *model.graph.outputs]
    shapes = {str(value.name): tuple(int(dim) for dim in value.shape or ()) for value in values}
    assert flop_of(list(model.graph)[-1], shapes) == flop


CASES_PER_OPERATOR = 4


def on_tensors(cases: list[tuple[str, onnx.ModelProto]]) -> list[tuple[str, onnx.ModelProto]]:
    """The cases on tensors, the first few of each operator."""
    found: dict[str, list[tuple[str, onnx.ModelProto]]] = {}
    for name, proto in cases:
        graph = proto.graph
        if all(item.type.HasField("tensor_type") for item in (*graph.input, *graph.output)):
            of_operator = found.setdefault(graph.node[0].op_type, [])
            if len(of_operator) < CASES_PER_OPERATOR:
                of_operator.append((name, proto))
    return [case for cases in found.values() for case in cases]


@pytest.mark.parametrize(
    ("operators", "least"),
    [(some_operators, 50), pytest.param(single_operators, 120, marks=pytest.mark.long)],
    ids=["some", "all"],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_onnx_test_cases_have_a_work_wherever_their_shapes_are_known(
    operators: Callable[[], list[tuple[str, onnx.ModelProto]]], least: int
) -> None:
    cases, costed = on_tensors(operators()), set()
    for name, proto in cases:
        model = infer_shapes(ir.from_proto(proto))
        shapes = static_shapes(model, {})
        for index, item in enumerate(all_nodes(model.graph)):
            item.name = f"node{index}"
        (node,) = model.graph
        fused = FusedModel(model, shapes, GraphTypes(Precision.FP16))
        fused.layers()
        peak_memory(fused, find_gpu("L4"))
        work = work_of_node(node, shapes, GraphTypes(Precision.FP16))
        values = [value for value in (*node.inputs, *node.outputs) if value is not None and value.name]
        are_known = all(str(value.name) in shapes and value.dtype != ir.DataType.STRING for value in values)
        assert (work is not None) or not (has_cost(node) and are_known), name
        if work is not None:
            assert work.flop >= 0 and work.bytes >= 0, name
            costed.add(node.op_type)
    assert len(costed) > least
