"""Equality of two graphs, tried on random numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from trtopt.rewrite.equal import difference
from trtopt.source.onnx_file import load


def model_of(tmp_path: Path, graph: str, **weights: np.ndarray) -> ir.Model:
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]>' + graph)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    onnx.save(model, tmp_path / "m.onnx")
    return load(tmp_path / "m.onnx").model


def square(tmp_path: Path, body: str, batch: str = "8", **weights: np.ndarray) -> ir.Model:
    return model_of(tmp_path, f"g (float[{batch}, 4] x) => (float[{batch}, 4] y) {{ {body} }}", **weights)


def test_rounding_is_no_difference(tmp_path: Path) -> None:
    third = np.float32(1 / 3).reshape(1)
    first = square(tmp_path, "a = Mul(x, w) y = Add(a, a)", w=third)
    second = square(tmp_path, "a = Add(x, x) y = Mul(a, w)", w=third)
    assert difference(first, second) == ""


def selecting(tmp_path: Path, score: str, table: np.ndarray) -> ir.Model:
    """The rows of a table with the largest scores, of which some nearly agree in pairs."""
    weights = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
    weights[:, 0:96:2] = weights[:, 1:96:2] * np.float32(1 + 1e-7)
    parts = {"w": weights, "u": weights[:32], "v": weights[32:], "h": np.array([32, 32]), "k": np.array([50])}
    used = {name: array for name, array in parts.items() if f"{name})" in f"{score} k)"}
    graph = f"g (float[1, 64] x) => (float[1, 50, 4] y) {{ {score} b, i = TopK(s, k) y = Gather(t, i) }}"
    return model_of(tmp_path, graph, **used, t=table)


def test_a_network_that_selects_may_select_one_of_two_equals(tmp_path: Path) -> None:
    table = np.random.default_rng(1).standard_normal((256, 4), dtype=np.float32)
    whole = selecting(tmp_path, "s = MatMul(x, w)", table)
    halves = "a, b2 = Split <axis = 1> (x, h) c = MatMul(a, u) d = MatMul(b2, v) s = Add(c, d)"
    summed = selecting(tmp_path, halves, table)
    assert difference(whole, summed) == ""
    assert "largest output" in difference(whole, selecting(tmp_path, halves, -table))
    assert "largest output" in difference(whole, selecting(tmp_path, "a = MatMul(x, w) s = Neg(a)", table))


def test_a_network_that_multiplies_its_rounding_may_round_its_weights_again(tmp_path: Path) -> None:
    """Rows nearly agree before their mean is taken off, as behind the mean of random images."""
    small, c, s = np.float32(1e-3), *np.random.default_rng(2).uniform(0.5, 2, (2, 4)).astype(np.float32)
    body, scaled = (
        "a = Mul(x, t) b = Add(a, c) k = Mul(b, s) y = Sub(k, e)",
        "a = Mul(x, t) k = Add(a, c) y = Sub(k, e)",
    )
    first = square(tmp_path, body, t=small.reshape(1), c=c, s=s, e=c * s)
    assert difference(first, square(tmp_path, scaled, t=small * s, c=c * s * np.float32(1 - 1e-7), e=c * s)) == ""
    assert difference(first, square(tmp_path, scaled, t=small * s, c=c * s * np.float32(1 - 1e-6), e=c * s))


def test_a_difference_names_the_output_and_its_size(tmp_path: Path) -> None:
    text = difference(square(tmp_path, "y = Relu(x)"), square(tmp_path, "y = Abs(x)"))
    assert text.startswith("y: by ") and "the largest output is" in text


def test_a_batch_written_into_the_graph_is_no_difference(tmp_path: Path) -> None:
    """At batch one the second fails; at its own batch it agrees."""
    graph = "g (float[8, 1, 10000] x) => (float[8, 100, 100] y) { y = Reshape(x, s) }"
    first = model_of(tmp_path, graph, s=np.array([0, 100, 100], np.int64))
    assert difference(first, model_of(tmp_path, graph, s=np.array([8, 100, 100], np.int64))) == ""


def test_what_differs_only_in_a_larger_batch_is_seen_where_the_whole_batch_is_cheap(tmp_path: Path) -> None:
    """Of large inputs one row is tried first: recipes do not mix rows, and samples verify the whole network as well."""
    body, zero = "y = CumSum(x, z)", np.array(0, np.int64)
    assert difference(square(tmp_path, "y = Identity(x)"), square(tmp_path, body, z=zero))


def test_random_numbers_are_not_compared(tmp_path: Path) -> None:
    noise = square(tmp_path, "r = RandomNormalLike(x) y = Add(x, r)")
    assert difference(noise, noise) == ""


def test_the_second_that_cannot_run_is_a_difference(tmp_path: Path) -> None:
    bad = square(tmp_path, "a = Reshape(x, s) y = Reshape(a, t)", s=np.array([8, 4], np.int64), t=np.array([0, 0]))
    for node in list(bad.graph):
        if node.op_type == "Reshape" and node.outputs[0].name == "a":
            node.op_type = "Gather"
    assert difference(square(tmp_path, "y = Identity(x)"), bad)


def test_integers_must_agree(tmp_path: Path) -> None:
    def counts(op: str) -> ir.Model:
        graph = f"g (int64[4] x) => (int64[4] y) <int64[1] c = {{1}}> {{ y = {op}(x, c) }}"
        return model_of(tmp_path, graph)

    assert difference(counts("Add"), counts("Add")) == ""
    assert "elements" in difference(counts("Add"), counts("Sub"))


def test_nan_in_the_same_places_is_no_difference(tmp_path: Path) -> None:
    model = square(tmp_path, "y = Log(x)")
    assert difference(model, model) == ""
    assert "finite" in difference(model, square(tmp_path, "a = Abs(x) y = Log(a)"))


def test_dynamic_axes_are_tried_at_the_shapes_given(tmp_path: Path) -> None:
    first, second = square(tmp_path, "y = Relu(x)", "N"), square(tmp_path, "a = Relu(x) y = Relu(a)", "N")
    assert difference(first, second, {"x": (8, 4)}) == ""
    assert difference(first, square(tmp_path, "y = Neg(x)", "N"), {"x": (8, 4)})


@pytest.mark.parametrize("scale", [0.25, 0.75, 1.5])
@pytest.mark.parametrize("last", ["Add(r, i)", "Identity(r)", "GlobalMaxPool(r)"])
def test_scales_of_images_stay_as_they_are(tmp_path: Path, scale: float, last: str) -> None:
    """One rounding off, they change sizes, so that nothing would be known of the numbers."""
    size, rng = int(8 * scale), np.random.default_rng(3)
    given = {"w": np.array([0.3], np.float32), "s": np.array([1, 1, scale, scale], "f4")}
    given |= {"i": rng.standard_normal((1, 3, size, size), dtype=np.float32)} if "i)" in last else {}

    def resized(scaled: str) -> ir.Model:
        graph = f"g (float[1, 3, 8, 8] x) => (float[1, 3, N, M] y) {{ {scaled} r = Resize(a, , s) y = {last} }}"
        return model_of(tmp_path, graph, **given)

    wrong = resized("b = Mul(x, w) a = Neg(b)")
    assert "largest output" in difference(resized("a = Mul(x, w)"), wrong)


def test_weights_that_are_no_numbers_one_rounding_off_stay_as_they_are(tmp_path: Path) -> None:
    weight = np.array([0.3, 0.3, 0.7, 0.7], np.float32)
    first = square(tmp_path, "d = Sub(v, u) k = Sqrt(d) y = Add(x, k)", u=weight, v=weight)
    assert "largest output" in difference(first, square(tmp_path, "y = Relu(x)"))


def normalized(tmp_path: Path, body: str) -> ir.Model:
    parts = {"one": np.ones(1, np.float32), "zero": np.zeros(1, np.float32), "all": np.ones((512, 1), np.float32)}
    used = {name: array for name, array in parts.items() if f", {name}" in body}
    shapes = "<int64[3] rows = {0, 1, -1}, int64[3] back = {0, 512, -1}>"
    return model_of(tmp_path, f"g (float[1, 512, 1999] x) => (float[1, 512, 1999] y) {shapes} {{ {body} }}", **used)


def test_sums_of_a_million_numbers_are_taken_exactly(tmp_path: Path) -> None:
    body = "r = Reshape(x, rows) n = InstanceNormalization <epsilon = 1e-8> (r, one, zero) y = Reshape(n, back)"
    whole = normalized(tmp_path, body)
    assert difference(whole, normalized(tmp_path, "y = LayerNormalization <axis = 1, epsilon = 1e-8> (x, all)")) == ""
    other = normalized(tmp_path, "y = LayerNormalization <axis = 1, epsilon = 1e-4> (x, all)")
    assert "largest output" in difference(whole, other)
