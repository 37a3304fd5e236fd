"""Helpers for edits, evaluation of constant nodes, and the invariants."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from trtopt.graph import invariants
from trtopt.graph.edit import (
    Names,
    add_initializer,
    can_replace,
    constant_of,
    new_node,
    remove_node,
    replace_value,
    tag,
)
from trtopt.graph.fold import FoldError, can_fold, constants_from, evaluate
from trtopt.graph.invariants import InvariantError
from trtopt.graph.shapes import infer_shapes
from trtopt.graph.skeleton import flat_skeleton, skeleton

HEADER = '<ir_version: 10, opset_import: ["" : 21]>'


def parse(graph: str) -> ir.Model:
    model = ir.from_proto(onnx.parser.parse_model(HEADER + graph))
    for node in model.graph.all_nodes():
        node.name = f"node_{node.outputs[0].name}"
    return model


def node(model: ir.Model, output: str) -> ir.Node:
    return next(n for n in model.graph.all_nodes() if n.outputs[0].name == output)


NESTED = (
    "g (bool c, float[2] x) => (float[2] y) <float[2] w = {1, 2}> { t = Add(x, w) y = If (c) <"
    "then_branch = a () => (float[2] p) { q = Neg(t) p = Exp(q) },"
    "else_branch = b () => (float[2] s) { s = Sin(t) }> }"
)


def test_new_names_differ_from_every_name_also_in_nested_graphs() -> None:
    names = Names(parse(NESTED))
    assert [names.value(base) for base in ("p", "w", "fresh", "fresh")] == ["p_1", "w_1", "fresh", "fresh_1"]
    assert names.node("node_q") == "node_q_1" and names.node("p") == "p"


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ("g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Add(x, w) }", np.array([1, 2], np.float32)),
        ("g (float[1] x) => (float[1] y) { w = Constant <value_float = 3.0> () y = Add(x, w) }", np.float32(3)),
        ("g (int64[2] x) => (int64[2] y) { w = Constant <value_ints = [1, 2]> () y = Add(x, w) }", np.array([1, 2])),
        ("g (float[2] x, float[2] w) => (float[2] y) { y = Add(x, w) }", None),
        ("g (float[2] x) => (float[2] y) { w = Neg(x) y = Add(x, w) }", None),
    ],
)
def test_the_value_of_a_constant(graph: str, expected: np.ndarray | None) -> None:
    found = constant_of(node(parse(graph), "y").inputs[1])
    if expected is None:
        assert found is None
    else:
        assert found is not None and found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_a_new_initializer_has_type_and_shape() -> None:
    model = parse(NESTED)
    value = add_initializer(model.graph, "new", np.zeros((2, 3), dtype=ml_dtypes.bfloat16))
    assert value.dtype == ir.DataType.BFLOAT16 and value.shape == [2, 3]
    assert model.graph.initializers["new"] is value


def test_a_graph_output_keeps_its_name_when_it_is_replaced() -> None:
    model = parse("g (float[2] x) => (float[2] y) { a = Neg(x) y = Identity(a) }")
    identity = node(model, "y")
    assert identity.inputs[0] is not None and can_replace(identity.outputs[0], identity.inputs[0])
    replace_value(identity.outputs[0], identity.inputs[0])
    remove_node(identity)
    invariants.check(model)
    assert [value.name for value in model.graph.outputs] == ["y"]


@pytest.mark.parametrize(
    "graph",
    [
        "g (float[2] x) => (float[2] y) { y = Identity(x) }",
        "g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Identity(w) }",
        "g (float[2] x) => (float[2] y, float[2] z) { z = Neg(x) y = Identity(z) }",
        "g (bool c, float[2] x) => (float[2] z) { t = Neg(x) z = If (c) <"
        "then_branch = a () => (float[2] y) { y = Identity(t) }, else_branch = b () => (float[2] s) { s = Sin(t) }> }",
    ],
)
def test_an_output_that_needs_a_node_of_its_own_cannot_be_replaced(graph: str) -> None:
    identity = node(parse(graph), "y")
    assert identity.inputs[0] is not None
    assert not can_replace(identity.outputs[0], identity.inputs[0])


def test_a_removed_node_takes_the_uses_of_its_nested_graphs_along() -> None:
    model = parse(NESTED.replace("float[2] y)", "float[2] t)"))
    shared = node(model, "t").outputs[0]
    assert len(shared.uses()) == 2
    remove_node(node(model, "y"))
    assert not shared.uses()


def test_new_nodes_carry_type_shape_and_tag() -> None:
    model = parse(NESTED)
    like = model.graph.inputs[1]
    made = new_node("Relu", [like], name="n", output="o", like=like)
    tag(made, "some-recipe")
    assert made.outputs[0].shape == [2] and made.outputs[0].dtype == ir.DataType.FLOAT
    assert made.metadata_props == {"trtopt.recipe": "some-recipe"}


# Invariants


def dangling(model: ir.Model) -> None:
    model.graph.initializers.pop("w")


def unsorted(model: ir.Model) -> None:
    first = next(iter(model.graph))
    model.graph.remove(first)
    model.graph.append(first)


def same_value_name(model: ir.Model) -> None:
    node(model, "q").outputs[0].name = "w"


def same_node_name(model: ir.Model) -> None:
    node(model, "q").name = "node_t"


def unnamed(model: ir.Model) -> None:
    node(model, "q").name = ""


def lost_output(model: ir.Model) -> None:
    model.graph.outputs.clear()


def renamed_output(model: ir.Model) -> None:
    model.graph.outputs[0].name = "z"


def other_dtype(model: ir.Model) -> None:
    model.graph.outputs[0].dtype = ir.DataType.FLOAT16


def other_shape(model: ir.Model) -> None:
    model.graph.outputs[0].shape = ir.Shape([3])


@pytest.mark.parametrize(
    "damage",
    [
        dangling,
        unsorted,
        same_value_name,
        same_node_name,
        unnamed,
        lost_output,
        renamed_output,
        other_dtype,
        other_shape,
    ],
)
def test_damage_is_found(damage: Callable[[ir.Model], None]) -> None:
    model = parse(NESTED)
    before = invariants.signature(model)
    invariants.check(model, before)
    damage(model)
    with pytest.raises(InvariantError):
        invariants.check(model, before)


# Evaluation of constant nodes


def test_a_constant_node_is_replaced_by_what_it_computes() -> None:
    model = infer_shapes(parse("g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { n = Neg(w) y = Add(x, n) }"))
    negate = node(model, "n")
    assert can_fold(negate) and not can_fold(node(model, "y"))
    assert constants_from(model, negate, evaluate(negate, 21)) == []
    invariants.check(model)
    np.testing.assert_array_equal(constant_of(model.graph.initializers["n"]), np.array([-1, -2], np.float32))


def test_a_bfloat16_constant_stays_bfloat16() -> None:
    model = parse("g (bfloat16[2] x) => (bfloat16[2] y) { n = Neg(x) y = Add(x, n) }")
    weight = add_initializer(model.graph, "weight", np.array([1, 2], dtype=ml_dtypes.bfloat16))
    negate = node(model, "n")
    negate.replace_input_with(0, weight)
    negate.outputs[0].dtype = ir.DataType.BFLOAT16
    (array,) = evaluate(negate, 21)
    assert array.dtype == ml_dtypes.bfloat16 and array.tolist() == [-1, -2]


@pytest.mark.parametrize("graph", ["e = Expand(o, s)", "e = ConstantOfShape(s)", "e = Tile(t, s)"])
def test_a_small_constant_does_not_become_a_huge_one(graph: str) -> None:
    weights = "<float[1] o = {1}, float[1, 1] t = {1}, int64[2] s = {100000, 100000}>"
    model = parse(f"g (float[1] x) => (float[M, N] y) {weights} {{ {graph} y = Mul(x, e) }}")
    with pytest.raises(FoldError, match="0000000000 bytes"):
        evaluate(node(model, "e"), 21)


def test_a_node_that_cannot_be_evaluated_is_an_error() -> None:
    model = parse(
        "g (float[2] x) => (float[2] y) <float[2] w = {1, 2}, int64[1] s = {3}> { r = Reshape(w, s) y = Add(x, r) }"
    )
    with pytest.raises(FoldError):
        evaluate(node(model, "r"), 21)


def test_shapes_are_inferred_while_other_threads_read_the_model() -> None:
    """A clone made meanwhile has the weights, those of Constant nodes included."""
    array = np.ones((200, 200), np.float32)
    constant = ir.node("Constant", [], attributes={"value": ir.tensor(array, name="c")}, name="constant")
    constant.outputs[0].name = "c"
    weight = ir.Value(name="w", const_value=ir.tensor(array, name="w"))
    product = ir.node("MatMul", [weight, constant.outputs[0]], name="product")
    product.outputs[0].name = "y"
    graph = ir.Graph([], [product.outputs[0]], nodes=[constant, product], initializers=[weight], opset_imports={"": 21})
    model = ir.Model(graph, ir_version=10)
    clones = []

    def described() -> Iterator[ir.Value]:
        clones.append(model.clone())
        yield product.outputs[0]

    proto = flat_skeleton(model, described())
    assert proto.ByteSize() < 2000 and [node.op_type for node in proto.graph.node] == ["Constant", "MatMul"]
    (clone,) = clones
    for tensor in (clone.graph.initializers["w"].const_value, clone.graph[0].attributes["value"].as_tensor()):
        assert tensor is not None and np.array_equal(tensor.numpy(), array)


def test_a_skeleton_holds_types_and_shapes_but_no_weights() -> None:
    model = parse("g (float[N, 512] x) => (float[N, 512] y) { y = MatMul(x, w) }")
    weight = add_initializer(model.graph, "weight", np.ones((512, 512), dtype=np.float32))
    node(model, "y").replace_input_with(1, weight)
    proto = skeleton(model)
    assert proto.ByteSize() < 1000 and list(proto.graph.initializer[0].dims) == [512, 512]
    np.testing.assert_array_equal(constant_of(weight), 1)


def test_what_the_reference_implementation_is_not_made_for_is_left_alone() -> None:
    """A convolution of constants takes it thousands of times its output in memory, a Scatter microseconds a number."""
    model = parse("g (float[1] x) => (float[1, 1, 50, 50] y, float[M, M] s) { y = Conv(x, x) s = ScatterND(x, x, x) }")
    shapes: dict[str, list[tuple[int, ...]]] = {
        "y": [(1, 1, 50, 50), (1, 1, 3, 3)],
        "s": [(600, 600), (600, 600, 2), (600, 600)],
    }
    for name, wanted in shapes.items():
        for index, shape in enumerate(wanted):
            array = np.zeros(shape, np.int64 if shape[-1] == 2 else np.float32)
            node(model, name).replace_input_with(index, add_initializer(model.graph, f"{name}{index}", array))
    assert not can_fold(node(model, "y"))
    with pytest.raises(FoldError, match="limit is 1048576"):
        evaluate(node(model, "s"), 21)
