"""Shape inference raises where it fails, and finds shapes that the graph computes."""

from __future__ import annotations

import numpy as np
import onnx.helper
import onnx.numpy_helper
import onnx.parser
import onnx_ir as ir
import pytest

from trtopt.errors import InvalidModelError, UsageError
from trtopt.graph import shapes as shapes_module
from trtopt.graph.edit import static_shape
from trtopt.graph.shapes import infer_shapes, static_shapes

HEADER = '<ir_version: 10, opset_import: ["" : 21, "my" : 1]>'


def parse(graph: str) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(HEADER + graph))


def value(model: ir.Model, name: str) -> ir.Value:
    return next(v for node in model.graph.all_nodes() for v in node.outputs if v.name == name)


def test_every_value_gets_a_shape_and_the_model_stays() -> None:
    model = parse("g (float[N, 3] x) => (float[N, 3] y) { a = Relu(x) y = Neg(a) }")
    inferred = infer_shapes(model)
    assert str(value(inferred, "a").shape) == "[N,3]"
    assert value(model, "a").shape is None


def test_stale_shapes_inside_the_graph_are_replaced() -> None:
    model = parse("g (float[N, 3] x) => (float[N, 3] y) <float[7, 7] a> { a = Relu(x) y = Neg(a) }")
    assert str(value(infer_shapes(model), "a").shape) == "[N,3]"


@pytest.mark.parametrize(
    "graph",
    [
        "g (float[2] x, float[3] z) => (float[2] y) { y = Add(x, z) }",
        "g (float[2] x, int64[2] z) => (float[2] y) { y = Add(x, z) }",
        "g (float[2, 3] x) => (int64[2, 3] y) { y = Relu(x) }",
        "g (bool c, float[2] x) => (float[2] y) { y = If (c) <"
        "then_branch = a () => (float[2] p) { n = Transpose <perm = [0, 1]> (x) p = Neg(n) },"
        "else_branch = b () => (float[2] q) { q = Exp(x) }> }",
    ],
)
def test_a_failure_raises(graph: str) -> None:
    with pytest.raises(InvalidModelError):
        infer_shapes(parse(graph))


@pytest.mark.parametrize("place", ["initializer", "node", "branch"])
def test_a_long_vector_of_integers_is_no_size(place: str) -> None:
    """ONNX reads such constants where sizes may be computed: those that an attention bias is gathered by, too."""
    rows = "a = Unsqueeze(table, one) b = GatherND(x, a)"
    graph = f"g (float[9, 3] x) => (float[K, 3] y) <int64[1] one = {{1}}> {{ {rows} y = Neg(b) }}"
    if place == "branch":
        branches = f"then_branch = t () => (float[4000, 3] p) {{ {rows} p = Neg(b) }}"
        branches += ", else_branch = e () => (float[4000, 3] q) { q = Expand(x, size) }"
        constants = "int64[1] one = {1}, int64[2] size = {4000, 3}"
        graph = f"g (bool c, float[1, 3] x) => (float[K, 3] y) <{constants}> {{ y = If (c) <{branches}> }}"
    proto = onnx.parser.parse_model(HEADER + graph)
    table = onnx.numpy_helper.from_array(np.zeros(4000, np.int64), "table")
    if place == "node":
        proto.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["table"], value=table))
    else:
        (proto.graph.node[0].attribute[0].g if place == "branch" else proto.graph).initializer.append(table)
    inferred = infer_shapes(ir.from_proto(proto))
    assert value(inferred, "b").dtype == ir.DataType.FLOAT
    assert [each.name for each in inferred.graph.inputs] == [each.name for each in proto.graph.input]


def test_declared_names_of_output_dimensions_fill_what_inference_does_not_know() -> None:
    model = parse("g (float[N, 3] x) => (int64[2, found] y) { y = NonZero(x) }")
    assert str(infer_shapes(model).graph.outputs[0].shape) == "[2,found]"


def test_outputs_of_custom_operators_keep_their_declared_shapes() -> None:
    model = parse("g (float[2] x) => (float[5] y) <float[5] a> { a = my.Op(x) y = Neg(a) }")
    assert static_shape(value(infer_shapes(model), "y")) == (5,)


def test_shapes_computed_in_the_graph_become_static() -> None:
    model = parse(
        "g (float[N, 3, 8] x) => (float[N, 24] y) <int64 zero = {0}, int64[1] rest = {-1}, int64[1] axis = {0}> "
        "{ s = Shape(x) n = Gather(s, zero) u = Unsqueeze(n, axis) t = Concat <axis = 0> (u, rest) y = Reshape(x, t) }"
    )
    shapes = static_shapes(model, {"x": (5, 3, 8)})
    assert shapes["y"] == (5, 24) and shapes["t"] == (2,) and shapes["x"] == (5, 3, 8) and shapes["rest"] == (1,)
    assert len(list(model.graph)) == 5


def test_constants_around_a_branch_are_known_inside_and_those_of_one_name_inside_hide_them() -> None:
    deep = "then_branch = t () => (p) { p = Pad(a, pads) }, else_branch = e () => (q) { q = Exp(a) }"
    model = parse(
        "g (bool c, bool d, float[1, 4] x) => (float[A, B] y) <int64[4] pads = {0, 1, 0, 2}, int64[2] size = {2, 2}> "
        f"{{ y = If (c) <then_branch = u () => (r) {{ a = Neg(x) r = If (d) <{deep}> }}, "
        "else_branch = v () => (s) <int64[2] size = {4, 1}> { s = Reshape(x, size) }> }"
    )
    shapes = static_shapes(model, {})
    assert shapes["p"] == (1, 7)
    assert shapes["s"] == (4, 1)
    assert {str(v.name) for v in model.graph.initializers.values()} == {"pads", "size"}
    assert not model.graph.node(0).attributes["then_branch"].as_graph().initializers


def test_a_branch_chosen_by_a_shape_is_followed() -> None:
    model = parse(
        "g (float[N, 4] x) => (y) <int64 zero = {0}, int64 one = {1}> "
        "{ s = Shape(x) n = Gather(s, zero) c = Equal(n, one) y = If (c) <"
        "then_branch = a () => (p) { p = Squeeze(x, zero1) },"
        "else_branch = b () => (q) { q = Exp(x) }> }".replace("zero1", "axis").replace("{ s =", "{ s =", 1)
    )
    model.graph.register_initializer(
        ir.Value(name="axis", const_value=ir.tensor([0]), type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1]))
    )
    for node in model.graph.all_nodes():
        for index, used in enumerate(node.inputs):
            if used is not None and used.name == "axis":
                node.replace_input_with(index, model.graph.initializers["axis"])
    assert static_shapes(model, {"x": (1, 4)})["y"] == (4,)
    assert static_shapes(model, {"x": (2, 4)})["y"] == (2, 4)


def test_sizes_that_one_inference_leaves_open_are_found_in_the_part_that_computes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deep = " ".join(f"x{i + 1} = Relu(x{i})" for i in range(20))
    model = infer_shapes(
        parse(
            "g (float[N, 4] x0) => (float[M, 4] y, int64[M] late) "
            "<int64 zero = {0}, int64 one = {1}, int64[1] axis = {0}> "
            f"{{ {deep} s = Shape(x20) n = Gather(s, zero) r = Range(zero, n, one) d = Add(r, r) "
            "y = Gather(x20, d) late = Neg(d) }"
        )
    )
    counts: list[int] = []
    whole = shapes_module._fixed
    monkeypatch.setattr(shapes_module, "_fixed", lambda m, to: counts.append(len(m.graph)) or whole(m, to))
    found = static_shapes(model, {"x0": (5, 4)})
    assert counts == [6]
    assert found == shapes_module._collect(whole(model, {"x0": (5, 4)}))
    assert found["y"] == (5, 4) and found["late"] == (5,)


def test_a_size_that_is_found_late_and_does_not_fit_is_an_error() -> None:
    """Without the numbers, the Expand has the shape of what it repeats."""
    model = infer_shapes(
        parse(
            "g (float[N, 4] x) => (float[M, 4] y) <int64[1] zero = {0}, int64[1] one = {1}> "
            "{ s = Shape(x) n = Gather(s, zero) o = Mul(n, one) times = Concat<axis = 0>(o, one) "
            "t = Tile(x, times) d = Shape(t) y = Expand(x, d) }"
        )
    )
    with pytest.raises(InvalidModelError):
        static_shapes(model, {"x": (3, 4)})


def test_values_whose_shape_depends_on_data_are_absent() -> None:
    shapes = static_shapes(parse("g (float[N] x) => (int64[1, M] y) { y = NonZero(x) }"), {"x": (4,)})
    assert "y" not in shapes and shapes["x"] == (4,)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({}, "no shape"),
        ({"z": (2, 3)}, "no input named z"),
        ({"x": (2, 4)}, "does not fit"),
        ({"x": (2,)}, "does not fit"),
    ],
)
def test_shapes_that_do_not_fit_the_inputs_are_usage_errors(shapes: dict[str, tuple[int, ...]], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        static_shapes(parse("g (float[N, 3] x) => (float[N, 3] y) { y = Relu(x) }"), shapes)


def test_shapes_the_model_cannot_run_at_are_invalid() -> None:
    model = parse("g (float[N] x, float[M] z) => (float[K] y) { y = Add(x, z) }")
    with pytest.raises(InvalidModelError, match=r"x:2, z:3") as caught:
        static_shapes(model, {"x": (2,), "z": (3,)})
    assert "choose shapes" in str(caught.value)


@pytest.mark.parametrize(
    "node",
    ["GroupNormalization<num_groups = 2>(x, s, s)", "MeanVarianceNormalization(x)"],
)
def test_normalisations_that_onnx_cannot_infer_keep_the_shape_of_their_input(node: str) -> None:
    model = parse(f"g (float[N, 4, 8, 8] x, float[4] s) => (float[N, 4, 8, 8] y) {{ a = {node} y = Relu(a) }}")
    assert static_shapes(model, {"x": (3, 4, 8, 8)})["y"] == (3, 4, 8, 8)
    assert str(value(infer_shapes(model), "a").shape) == "[N,4,8,8]"
    assert [each.op_type for each in model.graph] == [node.partition("<")[0].partition("(")[0], "Relu"]


def test_sums_of_integers_that_broadcast_over_two_axes_are_inferred() -> None:
    rows, columns = ", ".join(map(str, range(3))), ", ".join(map(str, range(5)))
    model = parse(
        f"g (float[N, 3] x) => (int64[3, 5] y) <int64[3] r = {{{rows}}}, int64[5] c = {{{columns}}},"
        " int64[1] one = {1}, int64[1] zero = {0}> { p = Unsqueeze(r, one) q = Unsqueeze(c, zero) y = Add(p, q) }"
    )
    assert static_shapes(model, {"x": (2, 3)})["y"] == (3, 5)
