"""Channel groups: what they span, what goes with them, and how they are padded."""

from __future__ import annotations

import cProfile

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from trtopt.graph.channels.groups import ChannelGroup, groups_of
from trtopt.graph.channels.padding import pad_group, padded_size, why_not_finite
from trtopt.graph.channels.rules import Dim
from trtopt.graph.edit import add_initializer, constant_of, new_node
from trtopt.graph.shapes import infer_shapes
from trtopt.rewrite.protocol import Target
from trtopt_recipes.align_channels import MisalignedChannels

X = "float[N, 8, 6, 6] x"


def model_of(nodes: str, inputs: str = X, outputs: str = "float[N, A, B, C] y", **weights: tuple[int, ...]) -> ir.Model:
    """Weights hold 1, 2, 3, ..., so that entries can be told apart."""
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 18]> g ({inputs}) => ({outputs}) {{ {nodes} }}'
    )
    for name, shape in weights.items():
        array = np.arange(1, 1 + int(np.prod(shape)), dtype=np.float32).reshape(shape)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return infer_shapes(ir.from_proto(proto))


def value_of(model: ir.Model, name: str) -> ir.Value:
    return next(value for node in model.graph for value in node.outputs if value.name == name)


def groups_around(model: ir.Model, name: str, axis: int = 1) -> list[ChannelGroup]:
    return list(groups_of([Dim(value_of(model, name), axis)]))


def spans(group: ChannelGroup) -> set[tuple[str, int, int, int, int]]:
    return {(str(s.dim.value.name), s.dim.axis, s.start, s.stop, s.each) for s in group.spans}


def params(group: ChannelGroup) -> set[tuple[str, int, int, str]]:
    return {(str(p.node.outputs[0].name), p.index, p.axis, p.kind) for p in group.params}


def test_a_residual_joins_its_producers() -> None:
    model = model_of(
        "a = Conv(x, u, c) b = Conv(a, v) s = Add(a, b) y = Conv(s, w)", u=(5, 8, 1, 1), v=(5, 5, 1, 1),
        w=(4, 5, 1, 1), c=(5,)
    )  # fmt: skip
    (group,) = groups_around(model, "a")
    assert group.size == 5 and not group.reason and not group.outputs
    assert spans(group) == {(name, 1, 0, 5, 1) for name in "abs"}
    assert params(group) == {("a", 1, 0, "makes"), ("a", 2, 0, "makes"), ("b", 1, 0, "makes"), ("b", 1, 1, "sums"),
                             ("y", 1, 1, "sums")}  # fmt: skip
    assert {node.outputs[0].name for node in group.nodes} == {"a", "b", "s", "y"}


def test_a_concatenation_holds_spans_and_flatten_holds_blocks() -> None:
    model = model_of(
        "a = Conv(x, u) b = Conv(x, v) k = Concat <axis = 1> (a, b, a) f = Flatten(k) y = Gemm(f, w)",
        outputs="float[N, 4] y", u=(3, 8, 1, 1), v=(2, 8, 1, 1), w=(288, 4),
    )  # fmt: skip
    first, second = groups_around(model, "a")
    assert spans(first) == {
        ("a", 1, 0, 3, 1), ("k", 1, 0, 3, 1), ("k", 1, 5, 8, 1), ("f", 1, 0, 108, 36), ("f", 1, 180, 288, 36)
    }  # fmt: skip
    assert spans(second) == {("b", 1, 0, 2, 1), ("k", 1, 3, 5, 1), ("f", 1, 108, 180, 36)}
    (dim,) = {span.dim for span in first.spans if span.dim.value.name == "f"}
    assert padded_size(first, 1, dim, 288) == 288 + 2 * 36
    assert padded_size(first, 1, dim, 180) == 180 + 36
    pad_group(model, first, 1, "me")
    padded = constant_of(value_of(model, "y").producer().inputs[1])  # type: ignore[union-attr]
    assert padded is not None and padded.shape == (360, 4)
    assert not padded[108:144].any() and not padded[324:].any() and padded[144:324].all() and padded[:108].all()


def test_a_later_split_cuts_what_comes_before() -> None:
    model = model_of(
        "s = Constant <value_ints = [3, 4]> () a = Conv(x, u) r = Relu(a) p, q = Split <axis = 1> (r, s) "
        "b = Conv(x, v) y = Add(q, b)",
        u=(7, 8, 1, 1),
        v=(4, 8, 1, 1),
    )
    first, second = groups_around(model, "a")
    assert spans(first) == {("a", 1, 0, 3, 1), ("r", 1, 0, 3, 1), ("p", 1, 0, 3, 1)}
    assert spans(second) == {("a", 1, 3, 7, 1), ("r", 1, 3, 7, 1), *((name, 1, 0, 4, 1) for name in "qby")}
    assert [str(dim.value.name) for dim in second.outputs] == ["y"] and not first.outputs


def test_groups_of_a_convolution_are_alike() -> None:
    model = model_of("a = Conv(x, u) y = Conv <group = 2> (a, v)", u=(6, 8, 1, 1), v=(4, 3, 1, 1))
    (group,) = groups_around(model, "a")
    assert spans(group) == {("a", 1, 0, 3, 1), ("a", 1, 3, 6, 1)} and group.size == 3
    pad_group(model, group, 1, "me")
    first, second = (constant_of(node.inputs[1]) for node in model.graph)
    assert first is not None and second is not None
    assert first.shape == (8, 8, 1, 1) and not first[[3, 7]].any() and first[[0, 1, 2, 4, 5, 6]].all()
    assert second.shape == (4, 4, 1, 1) and not second[:, 3].any() and second[:, :3].all()


def test_a_depthwise_convolution_gets_groups() -> None:
    model = model_of(
        "a = Conv(x, u) d = Conv <group = 3> (a, v) y = Conv(d, w)", u=(3, 8, 1, 1), v=(6, 1, 1, 1), w=(4, 6, 1, 1)
    )
    (group,) = groups_around(model, "a")
    assert spans(group) == {("a", 1, 0, 3, 1), ("d", 1, 0, 6, 2)}
    pad_group(model, group, 1, "me")
    node = value_of(model, "d").producer()
    assert node is not None and node.attributes["group"].as_int() == 4
    assert node.metadata_props == {"trtopt.recipe": "me"}
    assert infer_shapes(model).graph.outputs[0].shape == ir.Shape(["N", 4, 6, 6])


def test_weights_shared_by_two_nodes_stay_as_they_are() -> None:
    model = model_of(
        "a = Conv(x, u) b = Conv(x, u) c = Add(a, b) d = Conv(x, u) e = Conv(c, w) y = Concat <axis = 1> (e, d)",
        u=(3, 8, 1, 1),
        w=(4, 3, 1, 1),
    )
    (group,) = groups_around(model, "a")
    pad_group(model, group, 1, "me")
    a, b, d = (value_of(model, name).producer() for name in "abd")
    assert a is not None and b is not None and d is not None
    assert a.inputs[1] is b.inputs[1] and a.inputs[1] is not d.inputs[1]
    assert d.inputs[1] is not None and d.inputs[1].name == "u" and d.inputs[1].shape == ir.Shape([3, 8, 1, 1])


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE])
def test_padded_weights_keep_their_type(dtype: ir.DataType) -> None:
    x = ir.Value(name="x", shape=ir.Shape(["N", 8, 6]), type=ir.TensorType(dtype))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 17})
    first = add_initializer(graph, "u", np.ones((3, 8, 1), dtype.numpy()))
    second = add_initializer(graph, "w", np.ones((4, 3, 1), dtype.numpy()))
    a = new_node("Conv", [x, first], name="a", output="a")
    y = new_node("Conv", [a.outputs[0], second], name="y", output="y")
    for node, channels in ((a, 3), (y, 4)):
        graph.append(node)
        node.outputs[0].shape, node.outputs[0].type = ir.Shape(["N", channels, 6]), ir.TensorType(dtype)
    graph.outputs.append(y.outputs[0])
    model = ir.Model(graph, ir_version=10)
    (group,) = groups_around(model, "a")
    pad_group(model, group, 1, "me")
    assert [node.inputs[1].dtype for node in (a, y) if node.inputs[1] is not None] == [dtype, dtype]
    assert [node.inputs[1].shape for node in (a, y) if node.inputs[1]] == [ir.Shape([4, 8, 1]), ir.Shape([4, 4, 1])]


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ("s = Softmax <axis = 1> (a)", "Softmax"),
        ("s = LRN <size = 3> (a)", "LRN"),
        ("i = Constant <value_int = 1> () s = CumSum(a, i)", "not followed through: CumSum"),
        ("s = Add(a, x)", "x is an input"),
        ("t = Transpose <perm = [0, 2, 3, 1]> (a) n = LayerNormalization(t, l) s = Transpose <perm = [0, 3, 1, 2]> (n)",
         "zeros would change mean and variance"),
        ("s = MatMul(a, a)", "multiplies two activations"),
        ("s = GroupNormalization <num_groups = 4> (a, k, k)", "GroupNormalization"),
    ],
)  # fmt: skip
def test_the_reason_names_what_is_in_the_way(nodes: str, reason: str) -> None:
    model = model_of(f"a = Conv(x, u) {nodes} y = Relu(s)", u=(8, 8, 1, 1), l=(8,), k=(4,))
    assert reason in groups_around(model, "a")[0].reason


@pytest.mark.parametrize(
    ("nodes", "finite"),
    [
        ("s = Sigmoid(a)", True),
        ("s = Exp(a)", True),
        ("e = Exp(a) f = Exp(e) g = Exp(f) s = Exp(g)", False),
        ("s = Log(a)", None),
        ("s = Div(a, a)", False),
        ("m = GlobalMaxPool(x) n = ReduceMax <keepdims = 1> (m) s = Add(a, n)", True),
        ("m = GlobalMaxPool(x) n = ReduceMax <keepdims = 1> (m) t = Add(a, n) s = Exp(t)", False),
        ("m = GlobalMaxPool(x) n = ReduceMax <keepdims = 1> (m) t = Mul(a, n) s = Exp(t)", True),
    ],
)
def test_zeros_must_stay_finite(nodes: str, finite: bool | None) -> None:
    model = model_of(f"a = Conv(x, u) {nodes} y = Conv(s, w)", u=(3, 8, 1, 1), w=(4, 3, 1, 1))
    group = groups_around(model, "a")[0]
    assert bool(group.reason) is (finite is None)
    if finite is not None:
        assert bool(why_not_finite(group)) is not finite


def test_alternatives_are_offered_where_they_add_little() -> None:
    model = model_of("a = Conv(x, u) y = Conv(a, w)", u=(61, 8, 1, 1), w=(8, 61, 1, 1))
    recipe = MisalignedChannels()

    def choices(*target: str | None) -> list[str]:
        return [match.choice for match in recipe.find(model, Target(*target)).matches]

    assert choices("tensorrt-rtx", "fp16", "8.9") == ["62"]
    assert choices("tensorrt-rtx", "fp32") == choices("tensorrt-rtx", "int8") == []
    assert choices("tensorrt", "fp16") == choices("tensorrt", "int8") == choices(None, "bf16") == ["64"]
    assert choices("tensorrt", "fp32") == choices() == ["64"]
    model = model_of("a = Conv(x, u) y = Conv(a, w)", u=(180, 8, 1, 1), w=(8, 180, 1, 1))
    assert choices("tensorrt", "fp16") == ["184", "192"]
    assert choices("tensorrt-rtx", "fp16") == []


def _residual_blocks(count: int) -> ir.Model:
    """Five nodes a block; the channels between blocks are all one group, those in them groups of their own."""
    x = ir.Value(name="x", shape=ir.Shape([8, 61, 14, 14]), type=ir.TensorType(ir.DataType.FLOAT))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 17})
    weight = add_initializer(graph, "w", np.zeros((61, 61, 1, 1), np.float32))
    value = x
    for number in range(count):
        inner = value
        for step, kind in enumerate(("Conv", "Relu", "Conv", "Add", "Relu")):
            operands = {"Conv": [inner, weight], "Relu": [inner], "Add": [inner, value]}[kind]
            node = new_node(kind, operands, name=f"n{number}_{step}", output=f"v{number}_{step}", like=x)
            graph.append(node)
            inner = node.outputs[0]
        value = inner
    graph.outputs.append(value)
    return ir.Model(graph, ir_version=9)


def test_twice_the_graph_takes_twice_the_work() -> None:
    calls = dict[int, int]()
    for blocks in (200, 400):
        model, profile = _residual_blocks(blocks), cProfile.Profile()
        found = profile.runcall(MisalignedChannels().find, model, Target("tensorrt-rtx", "fp16", "8.9"))
        assert len(found.matches) == blocks
        calls[blocks] = sum(entry.callcount for entry in profile.getstats())
    assert calls[400] < 2.2 * calls[200]
