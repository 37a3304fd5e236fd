"""Sums that are scattered compute as a product what ONNX Runtime's scatter computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from test_attention_written import floats, kinds_when_equal

INDEX = np.array([3, 0, 3, 5, -1, 0, 2])


def model(text: str, **constants: np.ndarray) -> onnx.ModelProto:
    found = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}')
    found.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in constants.items())
    return found


@pytest.mark.parametrize("rest", [(), (4,), ("B", 4)], ids=str)
@pytest.mark.parametrize("given", [False, True], ids=["constant", "input"])
def test_updates_of_one_index_each(tmp_path: Path, rest: tuple[int | str, ...], given: bool) -> None:
    """Indices repeat, count from the end and leave entries out; the same in a constant and in an input."""
    shape, sizes = ", ".join(map(str, rest)), [2 if size == "B" else int(size) for size in rest]
    more = f", {shape}" if shape else ""
    text = f"""g (float[6{more}] x, float[7{more}] u{", int64[E, 1] i" if given else ""}) => (float[6{more}] y)
        {{ y = ScatterND<reduction = "add">(x, i, u) }}"""
    index = {"i": INDEX[:, None]}
    feeds = {"x": floats(6, *sizes), "u": floats(7, *sizes), **(index if given else {})}
    kinds = kinds_when_equal(tmp_path, model(text, **({} if given else index)), **feeds)
    assert "MatMul" in kinds and "ScatterND" not in kinds


@pytest.mark.parametrize("axis", [0, 1, 2, -2])
def test_along_an_axis(tmp_path: Path, axis: int) -> None:
    """As ``scatter_add`` of an index that is expanded."""
    shape = [6 if at == axis % 3 else size for at, size in enumerate((2, 3, 4))]
    wide = [7 if at == axis % 3 else size for at, size in enumerate((2, 3, 4))]
    one = [7 if at == axis % 3 else 1 for at in range(3)]
    text = f"""g (float{shape} x, float{wide} u, int64{one} i) => (float{shape} y) <int64[3] s = {{{str(wide)[1:-1]}}}>
        {{ e = Expand(i, s) y = ScatterElements<reduction = "add", axis = {axis}>(x, e, u) }}"""
    kinds = kinds_when_equal(tmp_path, model(text), x=floats(*shape), u=floats(*wide), i=INDEX.reshape(one))
    assert "MatMul" in kinds and "ScatterElements" not in kinds


def test_a_constant_index_for_each_element_that_is_one_for_each_row(tmp_path: Path) -> None:
    text = """g (float[B, 6, 4] x, float[B, 7, 4] u) => (float[B, 6, 4] y)
        { y = ScatterElements<reduction = "add", axis = 1>(x, i, u) }"""
    index = np.tile(INDEX[None, :, None], (2, 1, 4))
    kinds = kinds_when_equal(tmp_path, model(text, i=index), x=floats(2, 6, 4), u=floats(2, 7, 4))
    assert "MatMul" in kinds and "ScatterElements" not in kinds


@pytest.mark.parametrize(
    ("reduction", "index"),
    [("max", INDEX[:, None].repeat(4, 1)), ("none", np.array([3, 0, 1, 5, -2, 2, 2])[:, None].repeat(4, 1)[:6])],
)
def test_others_stay(tmp_path: Path, reduction: str, index: np.ndarray) -> None:
    text = f"""g (float[6, 4] x, float[{len(index)}, 4] u) => (float[6, 4] y)
        {{ y = ScatterElements<reduction = "{reduction}">(x, i, u) }}"""
    kinds = kinds_when_equal(tmp_path, model(text, i=index), x=floats(6, 4), u=floats(len(index), 4))
    assert kinds == ["ScatterElements"]


def test_an_index_for_each_element_stays(tmp_path: Path) -> None:
    text = """g (float[6, 4] x, float[7, 4] u, int64[7, 4] i) => (float[6, 4] y)
        { y = ScatterElements<reduction = "add">(x, i, u) }"""
    index = np.random.default_rng(0).integers(0, 6, (7, 4))
    assert kinds_when_equal(tmp_path, model(text), x=floats(6, 4), u=floats(7, 4), i=index) == ["ScatterElements"]


def test_a_part_of_the_other_axes_stays(tmp_path: Path) -> None:
    text = """g (float[6, 4] x, float[7, 3] u) => (float[6, 4] y) { y = ScatterElements<reduction = "add">(x, i, u) }"""
    index = INDEX[:, None].repeat(3, 1)
    assert kinds_when_equal(tmp_path, model(text, i=index), x=floats(6, 4), u=floats(7, 3)) == ["ScatterElements"]


def test_more_entries_than_a_matrix_may_have_rows_stay(tmp_path: Path) -> None:
    text = """g (float[5000, 4] x, float[7, 4] u, int64[7, 1] i) => (float[5000, 4] y)
        { y = ScatterND<reduction = "add">(x, i, u) }"""
    kinds = kinds_when_equal(tmp_path, model(text), x=floats(5000, 4), u=floats(7, 4), i=INDEX[:, None])
    assert kinds == ["ScatterND"]


def test_integers_stay(tmp_path: Path) -> None:
    """Also where a number of the network makes them: how many updates each entry gets."""
    text = """g (float[6, 4] x, int64[7] i, int64[7] u) => (int64[6] y) {
        s = Shape<end = 1>(x) z = ConstantOfShape<value = int64[1] {0}>(s)
        y = ScatterElements<reduction = "add">(z, i, u) }"""
    kinds = kinds_when_equal(tmp_path, model(text), x=floats(6, 4), i=INDEX, u=np.ones(7, np.int64))
    assert "ScatterElements" in kinds


@pytest.mark.parametrize("count", [7, "E"])
def test_one_index_of_all_updates_stays(tmp_path: Path, count: int | str) -> None:
    text = f"""g (float[6, 4] x, float[{count}, 4] u, int64[1, 1] i, int64[2] s) => (float[6, 4] y)
        {{ e = Expand(i, s) y = ScatterElements<reduction = "add">(x, e, u) }}"""
    feeds = {"x": floats(6, 4), "u": floats(7, 4), "i": np.array([[2]]), "s": np.array([7, 4])}
    assert "ScatterElements" in kinds_when_equal(tmp_path, model(text), **feeds)
