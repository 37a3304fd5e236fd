"""The 2:4 pattern, and which weights of a model can have it."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from trtopt.graph import edit
from trtopt.sparsity.layers import (
    SparseCandidates,
    best_mask,
    by_magnitude,
    candidates,
    is_sparse,
    kept_share,
    with_pruned,
)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("shape", "axis"), [((8, 5), 0), ((5, 8), 1), ((3, 8, 3, 2), 1)])
def test_the_best_mask_keeps_as_much_as_any_choice_of_two_of_each_four(shape: tuple[int, ...], axis: int) -> None:
    saliency = np.abs(random(*shape))
    mask = best_mask(saliency, axis)
    assert mask.shape == shape
    fours, kept = (
        np.moveaxis(array, axis, -1).reshape(-1, 4) for array in (saliency.astype(np.float64), saliency * mask)
    )
    best = [max(a + b for a, b in itertools.combinations(four, 2)) for four in fours]
    np.testing.assert_allclose(kept.sum(axis=1, dtype=np.float64), best, rtol=1e-6)
    assert is_sparse(random(*shape) * mask, axis)


def test_of_equals_the_first_stay() -> None:
    assert best_mask(np.zeros((1, 4)), 1).tolist() == [[True, True, False, False]]
    assert best_mask(np.array([[1.0, 2.0, 2.0, 2.0]]), 1).tolist() == [[False, True, True, False]]


def test_a_mask_needs_whole_fours() -> None:
    with pytest.raises(ValueError, match="6 is no multiple of 4"):
        best_mask(np.ones((6, 4)), 0)


def test_sparse_is_along_the_reduction_axis_for_each_kernel_position() -> None:
    weight = np.zeros((4, 8, 2, 1), np.float32)
    assert is_sparse(weight, 1)
    weight[1, 0:2, 0] = weight[1, 2:4, 1] = 1
    assert is_sparse(weight, 1)
    weight[1, 2, 0] = 1
    assert not is_sparse(weight, 1)
    assert not is_sparse(np.zeros((4, 6), np.float32), 1)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_the_kept_share_is_that_of_the_magnitudes(dtype: type) -> None:
    weight: np.ndarray = np.array([[3, -1, 0, 4]], dtype)
    assert kept_share(weight, best_mask(np.abs(weight), 1)) == pytest.approx(7 / 8)
    assert kept_share(np.zeros((1, 4), dtype), np.zeros((1, 4), bool)) == 1


GRAPH: dict[str, tuple[str, tuple[str, str], dict[str, Any]]] = {
    "conv": ("Conv", ("image", "w_conv"), {"pads": [1, 1, 1, 1]}),
    "thin": ("Conv", ("image", "w_thin"), {"group": 4}),
    "deep": ("Conv", ("image", "w_depthwise"), {"group": 8}),
    "gemm": ("Gemm", ("row", "w_gemm"), {"transB": 1}),
    "matmul": ("MatMul", ("row", "w_matmul"), {}),
    "odd": ("MatMul", ("gemm_out", "w_odd"), {}),
    "dynamic": ("MatMul", ("row", "other"), {}),
    "stack": ("MatMul", ("row", "w_stack"), {}),
    "one": ("MatMul", ("row", "w_both"), {}),
    "two": ("Gemm", ("row", "w_both"), {"transB": 1}),
    "three": ("MatMul", ("row", "w_twice"), {}),
    "four": ("MatMul", ("one_out", "w_twice"), {}),
    "table": ("Add", ("row", "w_read"), {}),
    "five": ("MatMul", ("row", "w_read"), {}),
    "sparse": ("MatMul", ("row", "w_sparse"), {}),
}
SHAPES = {
    **{"w_conv": (8, 8, 3, 3), "w_thin": (8, 2, 1, 1), "w_depthwise": (8, 1, 3, 3), "w_gemm": (6, 8), "w_odd": (6, 5)},
    **{"w_matmul": (8, 4), "w_stack": (2, 8, 4), "w_both": (8, 8), "w_twice": (8, 8), "w_read": (8, 8)},
}


def model() -> ir.Model:
    """A node for each reason, and for each kind of weight that can be pruned."""
    values = {name: ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT)) for name in ("image", "row", "other")}
    inputs = list(values.values())
    graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": 21}, name="g")
    arrays = {name: random(*shape) for name, shape in SHAPES.items()}
    arrays["w_sparse"] = np.where(np.arange(8)[:, None] % 2, random(8, 4), np.float32(0))
    values |= {name: edit.add_initializer(graph, name, array) for name, array in arrays.items()}
    for name, (operator, names, attributes) in GRAPH.items():
        read = [values[each] for each in names]
        graph.append(edit.new_node(operator, read, name=name, output=f"{name}_out", attributes=attributes))
        values[f"{name}_out"] = graph[-1].outputs[0]
    graph.outputs.append(values["conv_out"])
    return ir.Model(graph, ir_version=10)


def found() -> SparseCandidates:
    return candidates(model())


def test_weights_that_can_be_pruned_are_found_with_all_their_nodes() -> None:
    layers = {layer.weight: (layer.nodes, layer.axis, layer.sparse) for layer in found().layers}
    assert layers == {
        "w_conv": (("conv",), 1, False),
        "w_gemm": (("gemm",), 1, False),
        "w_matmul": (("matmul",), 0, False),
        "w_twice": (("three", "four"), 0, False),
        "w_sparse": (("sparse",), 0, True),
    }


def test_all_others_are_refused_with_the_reason() -> None:
    assert found().refused == {
        "thin": "each of its 4 groups reads 2 channels: no multiple of 4",
        "deep": "each of its 8 groups reads 1 channels: no multiple of 4",
        "odd": "it sums over 6 channels: no multiple of 4",
        "dynamic": "its weight is not constant",
        "stack": "its weight has 3 axes, not 2",
        "one": "nodes that share its weight sum over different axes of it",
        "two": "nodes that share its weight sum over different axes of it",
        "five": "its weight is read by Add table too",
    }


def nested() -> ir.Model:
    """A product in a branch, and one outside that reads the same weight."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[2,8] x, bool go) => (float[2,8] y) {
        outer = MatMul (x, w)
        y = If (go) <then_branch = t () => (float[2,8] s) { s = MatMul (outer, w) },
                     else_branch = e () => (float[2,8] n) { n = Neg (outer) }>
    }"""
    made = ir.from_onnx_text(text)
    weight = edit.add_initializer(made.graph, "weight", random(8, 8))
    for node in edit.all_nodes(made.graph):
        node.name = str(node.outputs[0].name)
        if node.op_type == "MatMul":
            node.replace_input_with(1, weight)
    return made


def test_products_in_nested_graphs_are_refused_and_so_is_who_shares_their_weight() -> None:
    result = candidates(nested())
    assert result.layers == ()
    assert result.refused == {"s": "it is inside of a nested graph", "outer": "its weight is read by MatMul s too"}


def test_an_integer_weight_and_one_that_can_be_fed_are_refused() -> None:
    made = model()
    weights = made.graph.initializers
    weights["w_matmul"].const_value = ir.tensor(np.ones((8, 4), np.int32), name="w_matmul")
    made.graph.inputs.append(weights["w_gemm"])
    refused = candidates(made).refused
    assert refused["matmul"] == "its weight is INT32"
    assert refused["gemm"] == "its weight is an input of the network with a default"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_refused(value: float) -> None:
    made, weight = model(), random(8, 4)
    weight[3, 1] = value
    made.graph.initializers["w_matmul"].const_value = ir.tensor(weight, name="w_matmul")
    assert candidates(made).refused["matmul"] == "its weight holds values that are not finite"


def test_pruned_weights_are_written_into_a_clone() -> None:
    made = model()
    before = {name: np.array(value.const_value.numpy()) for name, value in made.graph.initializers.items()}  # type: ignore[union-attr]
    layers = [by_magnitude(made, layer) for layer in candidates(made).layers]
    written = with_pruned(made, layers)
    after = {name: value.const_value.numpy() for name, value in written.graph.initializers.items()}  # type: ignore[union-attr]
    for layer in candidates(made).layers:
        assert is_sparse(after[layer.weight], layer.axis)
        stays = after[layer.weight] != 0
        np.testing.assert_array_equal(after[layer.weight][stays], before[layer.weight][stays])
    assert [layer.method for layer in layers] == ["magnitude"] * 4 + ["was sparse"]
    np.testing.assert_array_equal(after["w_sparse"], before["w_sparse"])
    for name, value in made.graph.initializers.items():
        np.testing.assert_array_equal(value.const_value.numpy(), before[name])  # type: ignore[union-attr]


def test_the_weight_of_a_constant_node_is_pruned() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[2,8] x) => (float[2,4] y) { y = MatMul (x, w) }"""
    made = ir.from_onnx_text(text)
    node = made.graph[0]
    constant = ir.node("Constant", [], attributes={"value": ir.tensor(random(8, 4))}, name="holder")
    constant.outputs[0].name = "weight"
    made.graph.insert_before(node, constant)
    node.replace_input_with(1, constant.outputs[0])
    node.name = "product"
    [layer] = candidates(made).layers
    written = with_pruned(made, [by_magnitude(made, layer)])
    weight = edit.constant_of(written.graph[1].inputs[1])
    assert weight is not None and is_sparse(weight, 0) and np.count_nonzero(weight) == 16
