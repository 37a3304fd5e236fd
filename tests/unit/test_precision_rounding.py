"""Layers as products of matrices, weights rounded together, biases added: numpy and graphs, nothing is run."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from trtopt.graph import edit
from trtopt.precision.bias import add_bias, why_no_bias
from trtopt.precision.plan import FP16, PrecisionPlan, QuantizedOp
from trtopt.precision.ptq import correct
from trtopt.precision.ptq.correct import Factor, best_share, blocks, product
from trtopt.precision.ptq.layer_walk import ProductLayer, layer_of, positions, rows_at
from trtopt.precision.write import quantize, quantize_weight
from trtopt.support.ort_session import OrtSession
from trtopt.support.precision import Precision

RNG = np.random.default_rng(0)


def model(text: str) -> ir.Model:
    found = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 21]>\ng {text}')
    for node in found.graph:
        node.name = str(node.outputs[0].name)
    return found


def node(found: ir.Model, name: str = "y") -> ir.Node:
    return next(item for item in found.graph if item.name == name)


def layer(found: ir.Model) -> ProductLayer:
    result = layer_of(node(found))
    assert isinstance(result, ProductLayer)
    return result


def correlated(rows: int, depth: int, rank: int = 8) -> np.ndarray:
    """Inputs most of whose power lies in few directions, as those of real layers."""
    mixed = RNG.standard_normal((rows, rank)) @ RNG.standard_normal((rank, depth))
    return (mixed + 0.1 * RNG.standard_normal((rows, depth))).astype(np.float32)


@pytest.mark.parametrize(("rows", "depth", "columns"), [(1000, 512, 700), (577, 768, 768), (384, 1024, 401)])
@pytest.mark.parametrize("cores", [2, 3])
def test_a_product_shared_among_cores_is_that_of_one(
    monkeypatch: pytest.MonkeyPatch, rows: int, depth: int, columns: int, cores: int
) -> None:
    left = RNG.standard_normal((depth, rows)).astype(np.float32).T
    right = RNG.standard_normal((depth, columns)).astype(np.float32)
    parts: list[int] = []
    shared = correct.in_threads
    monkeypatch.setattr(correct, "available_threads", lambda: cores)
    monkeypatch.setattr(correct, "in_threads", lambda *args: parts.append(shared(*args)))
    np.testing.assert_allclose(product(left, right), left @ right, rtol=1e-5, atol=1e-3)
    assert parts == [min(cores, rows // 192)]


def test_levels_that_are_not_free_are_zero_and_the_others_make_up_for_them() -> None:
    inputs = RNG.standard_normal((256, 8)).astype(np.float32) @ RNG.standard_normal((8, 32)).astype(np.float32)
    target = RNG.uniform(-20, 20, (32, 5)).astype(np.float32)
    free = RNG.random(target.shape) < 0.5
    levels = Factor(inputs).round(target, free)
    assert not levels[~free].any() and levels[free].any()
    cut = np.rint(target * free)
    assert np.square(inputs @ (levels - target)).sum() < 0.5 * np.square(inputs @ (cut - target)).sum()


@pytest.mark.parametrize("depth", [24, 90, 300])
def test_values_rounded_together_give_outputs_closer_than_the_nearest_values(depth: int) -> None:
    inputs, fresh = np.split(correlated(4096, depth), 2)
    weight = RNG.standard_normal((depth, 16)).astype(np.float32)
    _, step = quantize_weight(weight, 1, None)
    # Levels as coarse as 4 bits, so that rounding is all that matters.
    step = step * 16
    levels = Factor(inputs).round(weight / step, weight != 0)
    before, after = (fresh @ (values * step - weight) for values in (np.rint(weight / step), levels))
    assert levels.dtype == np.int8
    assert np.square(after).sum() < 0.5 * np.square(before).sum()


def test_levels_are_those_of_a_plain_search_for_the_nearest_plane() -> None:
    depth = 70
    inputs, target = correlated(500, depth), (RNG.standard_normal((depth, 3)) * 20).astype(np.float32)
    found = Factor(inputs).round(target, target != 0)
    gram = (inputs.T @ inputs).astype(np.float64)
    order = np.argsort(np.diagonal(inputs.T @ inputs), kind="stable")
    gram = gram[np.ix_(order, order)] + 0.01 * np.diagonal(gram).mean() * np.eye(depth)
    upper, wanted = np.linalg.cholesky(gram).T, target[order]
    left = np.zeros_like(wanted)
    for row in reversed(range(depth)):
        best = wanted[row] + upper[row, row + 1 :] @ left[row + 1 :] / upper[row, row]
        left[row] = wanted[row] - np.rint(best)
    assert np.mean((wanted - left).round() == found[order]) > 0.99


def test_levels_never_leave_the_range_and_unseen_inputs_do_no_harm() -> None:
    inputs = correlated(64, 40)
    inputs[:, 7] = 0.0
    target = np.full((40, 2), 500.0, np.float32)
    levels = Factor(inputs).round(target, target != 0)
    assert levels.min() >= -127 and levels.max() == 127
    column = np.full((4, 1), 3.2, np.float32)
    assert (Factor(np.zeros((8, 4), np.float32)).round(column, column != 0) == 3).all()
    for number in (np.nan, np.inf, 1e30, -1e20):
        with np.errstate(all="raise"), pytest.raises(np.linalg.LinAlgError):
            Factor(np.full((8, 4), number, np.float32))


def test_the_correction_makes_up_for_what_a_weight_can() -> None:
    exact = RNG.standard_normal((4000, 200)).astype(np.float32)
    read = exact * np.float32(0.8)
    weight = RNG.standard_normal((200, 5)).astype(np.float32)
    error = (read - exact) @ weight
    corrected = weight + Factor(read).correction(error)
    assert np.allclose(corrected, weight / 0.8, rtol=0.02, atol=0.02)
    effect = read @ (corrected - weight)
    assert best_share(error, effect) == pytest.approx(1.0, abs=0.02)
    assert best_share(error, -effect) == 0.0 and best_share(error, 0 * effect) == 0.0


def test_blocks_cover_every_input_once_and_are_bounded() -> None:
    for depth in (1, 1024, 1025, 4608, 8192):
        parts = blocks(depth)
        assert [index for part in parts for index in range(depth)[part]] == list(range(depth))
        assert max(part.stop - part.start for part in parts) <= 1024


CONVS = {
    "plain": ("", (2, 4, 7, 6), (8, 4, 3, 3)),
    "groups, strides, pads": ("<group = 2, strides = [2, 1], pads = [1, 0, 2, 1]>", (1, 4, 9, 6), (6, 2, 3, 2)),
    "dilations": ("<dilations = [2, 3], pads = [2, 2, 2, 2]>", (1, 3, 8, 9), (5, 3, 2, 3)),
    "same upper": ('<auto_pad = "SAME_UPPER", strides = [2, 2]>', (2, 3, 7, 8), (4, 3, 4, 3)),
    "same lower": ('<auto_pad = "SAME_LOWER", strides = [2, 3]>', (1, 3, 8, 8), (4, 3, 3, 4)),
    "valid": ('<auto_pad = "VALID">', (1, 3, 5, 5), (4, 3, 2, 2)),
    "depthwise": ("<group = 4, pads = [1, 1, 1, 1]>", (1, 4, 5, 5), (4, 1, 3, 3)),
    "one axis": ("<strides = [4], pads = [3, 2]>", (2, 3, 21), (4, 3, 7)),
    "three axes": ("<pads = [1, 0, 1, 1, 0, 1]>", (1, 2, 4, 5, 3), (3, 2, 3, 2, 3)),
}


def with_weight(text: str, weight: np.ndarray) -> ir.Model:
    found = model(text)
    value = edit.add_initializer(found.graph, "w", weight)
    node(found).replace_input_with(1, value)
    return found


def reference(found: ir.Model, data: np.ndarray) -> np.ndarray:
    with OrtSession(found) as session:  # ONNX's own reference pads wrongly before onnx 1.23
        return session.run({"x": data})[0]


@pytest.mark.parametrize("name", CONVS)
def test_rows_times_the_weight_are_the_convolution(name: str) -> None:
    attributes, shape, size = CONVS[name]
    data, weight = (RNG.standard_normal(item).astype(np.float32) for item in (shape, size))
    dims = ",".join(map(str, shape))
    found = with_weight(f"(float[{dims}] x, float[1] w0) => (float y) {{ y = Conv {attributes} (x, w0) }}", weight)
    del found.graph.inputs[1]
    item = layer(found)
    expected = reference(found, data)
    count = shape[0] * int(np.prod(expected.shape[2:]))
    for wanted in (count, 5):
        chosen = positions(item, shape, wanted, np.random.default_rng(1))
        assert len(chosen) == min(wanted, count) and len(set(chosen.tolist())) == len(chosen)
        rows = rows_at(item, data, chosen) @ item.matrices(weight)
        result = rows.transpose(1, 0, 2).reshape(len(chosen), -1)
        assert np.allclose(result, np.moveaxis(expected, 1, -1).reshape(count, -1)[chosen], atol=1e-4)
    assert np.array_equal(item.weight_of(item.matrices(weight)), weight)


@pytest.mark.parametrize(
    ("call", "shape", "size"),
    [
        ("Gemm (x, w0)", (5, 4), (4, 3)),
        ("Gemm <transA = 1, transB = 1> (x, w0)", (4, 5), (3, 4)),
        ("MatMul (x, w0)", (2, 3, 5, 4), (4, 6)),
        ("MatMul (x, w0)", (4,), (4, 6)),
    ],
)
def test_rows_times_the_weight_are_the_product(call: str, shape: tuple[int, ...], size: tuple[int, ...]) -> None:
    data, weight = (RNG.standard_normal(item).astype(np.float32) for item in (shape, size))
    found = with_weight(f"(float[{','.join(map(str, shape))}] x, float[1] w0) => (float y) {{ y = {call} }}", weight)
    del found.graph.inputs[1]
    item = layer(found)
    rows = rows_at(item, data, positions(item, shape, 1000, RNG))
    expected = reference(found, data)
    assert np.allclose(rows[0] @ item.matrices(weight)[0], expected.reshape(-1, expected.shape[-1]), atol=1e-5)
    assert np.array_equal(item.weight_of(item.matrices(weight)), weight)


W, B = "float[2,3] w = {1,2,3,4,5,6}", "float[3] b = {1,2,3}"

BIASES = {
    "a convolution without one": "<float[3,2,1,1] w = {1,2,3,4,5,6}> { y = Conv (x, w) }",
    "a convolution with one": "<float[3,2,1,1] w = {1,2,3,4,5,6}, float[3] b = {1,2,3}> { y = Conv (x, w, b) }",
    "a Gemm without one": "<float[2,3] w = {1,2,3,4,5,6}> { f = Flatten (x) y = Gemm <beta = 0.5> (f, w) }",
    "a Gemm with a scalar": f"<{W}, float[1] b = {{1}}> {{ f = Flatten (x) y = Gemm <beta = 0.5> (f, w, b) }}",
    "a Gemm that leaves it out": f"<{W}, {B}> {{ f = Flatten (x) y = Gemm <beta = 0.0> (f, w, b) }}",
    "a MatMul with an Add": f"<{W}, {B}> {{ f = Flatten (x) y = MatMul (f, w) z = Add (b, y) }}",
}


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_is_added_to_the_output(name: str) -> None:
    last = "z" if "z =" in BIASES[name] else "y"
    found = model(f"(float[1,2,1,1] x) => (float {last}) {BIASES[name]}")
    data, bias = RNG.standard_normal((1, 2, 1, 1)).astype(np.float32), np.array([0.5, -1, 2], np.float32)
    before = reference(found, data)
    assert why_no_bias(node(found)) is None
    count = len(found.graph)
    add_bias(found.graph, node(found), bias, edit.Names(found))
    assert len(found.graph) == count
    assert np.allclose(reference(found, data).ravel(), before.ravel() + bias, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(float[1,2] x) => (float y) <float[2,3] w = {1,2,3,4,5,6}> { y = MatMul (x, w) }", "no constant is added"),
        (
            "(float[1,2] x) => (float y, float z) <float[2,3] w = {1,2,3,4,5,6}, float[3] b = {1,2,3}>"
            "{ y = MatMul (x, w) z = Add (y, b) }",
            "no constant is added",
        ),
        (
            f"(float[1,2] x, float[1,3] r) => (float z) <{W}> {{ y = MatMul (x, w) z = Add (y, r) }}",
            "no constant is added",
        ),
        (
            "(float[1,2] x, float[3] b) => (float y) <float[2,3] w = {1,2,3,4,5,6}> { y = Gemm (x, w, b) }",
            "its bias is computed",
        ),
    ],
)
def test_a_bias_that_would_cost_a_kernel_is_refused(text: str, reason: str) -> None:
    assert reason in str(why_no_bias(node(model(text))))


@pytest.mark.parametrize("multiply", [False, True])
def test_a_plan_writes_its_own_values_and_biases(multiply: bool) -> None:
    found = model(
        "(float[1,2,1,1] x) => (float z) <float[3,2,1,1] w = {1,2,3,4,5,6}, float[3] b = {1,2,3}>"
        "{ y = Conv (x, w, b) z = Conv (x, w) }"
    )
    found.graph.outputs.insert(0, node(found).outputs[0])
    values, bias = np.array([[1, -2], [3, 4], [5, 127]], np.int8).reshape(3, 2, 1, 1), np.ones(3, np.float32)
    ops = tuple(QuantizedOp(name, "x", 1.0, None, "max", multiply) for name in "yz")
    plan = PrecisionPlan(Precision.INT8, FP16, quantized=ops, rounded={"y": values}, bias={"y": bias})
    done = quantize(found, plan).model
    stored = [v.const_value.numpy() for v in done.graph.initializers.values() if v.const_value is not None]
    assert sum(array.shape == values.shape and np.array_equal(array, values) for array in stored) == 1
    assert sum(array.dtype == np.int8 and array.shape == values.shape for array in stored) == 2
    assert sum(array.size == 3 and np.array_equal(array.ravel(), [2, 3, 4]) for array in stored) == 1
    assert "b" not in done.graph.initializers and "w" not in done.graph.initializers
