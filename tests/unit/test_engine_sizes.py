"""Sizes that a dynamic engine does not tell, from the graph and from what stands beside."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir
import pytest

from trtopt.engine.request import ShapeProfile
from trtopt.engine.sizes import sized
from trtopt.graph.shapes import infer_shapes, static_shapes
from trtopt.report.schema.layers import LayerInfo, TensorInfo

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
g (float[N, S, 64] x, float[64, 192] w) => (float[N, S, 192] y) { h = Relu(x) m = MatMul(h, w) y = Relu(m) }"""
SHAPES = {"x": (8, 16, 64)}
PROFILE = ShapeProfile({"x": ((1, 1, 64), (8, 16, 64), (16, 32, 64))})


def model(text: str = TEXT) -> ir.Model:
    found = infer_shapes(ir.from_proto(onnx.parser.parse_model(text)))
    for node in found.graph:
        node.name = str(node.outputs[0].name)
    return found


def layer(nodes: tuple[str, ...], read: list[TensorInfo], written: list[TensorInfo]) -> LayerInfo:
    return LayerInfo("+".join(nodes), "kgen", nodes, tuple(read), tuple(written))


def half(name: str, *shape: int) -> TensorInfo:
    return TensorInfo(name, shape, "Half")


OTHER = layer(("z",), [], [])
"""Of a static engine that holds nothing alike."""


def sizes(*layers: LayerInfo, static: tuple[LayerInfo, ...] = (OTHER,)) -> list[list[tuple[int, ...]]] | None:
    source = model()
    found = sized(layers, source, static_shapes(source, SHAPES), (PROFILE,), static)
    return None if found is None else [[item.shape for item in (*each.inputs, *each.outputs)] for each in found]


def test_a_tensor_is_a_value_of_the_graph_or_a_view_of_it() -> None:
    found = sizes(
        layer(("h",), [half("x", -1, -1, 64)], [half("h.1_myl0", -1, -1, 64)]),
        layer(("m",), [half("h.1_myl0", -1, 64)], [half("__mye1_myl0", -1, 192)]),
        layer(("y",), [half("__mye1_myl0", -1, 64)], [half("y", -1, -1, 192)]),
    )
    assert found == [[(8, 16, 64)] * 2, [(128, 64), (128, 192)], [(128, 64), (8, 16, 192)]]


def test_what_has_no_node_is_as_large_as_what_it_reads() -> None:
    found = sizes(
        layer(("h",), [half("x", -1, -1, 64)], [half("__mye1_myl0", -1, 16, 4, 16)]),
        layer((), [half("__mye1_myl0", -1, 16, 4, 16)], [half("__mye2_myl0", -1, 16, 16)]),
    )
    assert found is not None and found[1] == [(8, 16, 4, 16), (32, 16, 16)]


NORMALIZED = """<ir_version: 10, opset_import: ["" : 21]>
g (float[N, 4, 6, 5] x, float[4] g, float[4] b) => (float[N, 4, 6, 5] y)
{ i = InstanceNormalization(x, g, b) y = Relu(i) }"""


def test_counters_of_a_normalization_are_not_as_large_as_its_map() -> None:
    source = model(NORMALIZED)
    counters = TensorInfo("__mye1_myl0", (-1,), "Int32")
    layers = (
        layer(("i", "y"), [], [counters]),
        layer(("i", "y"), [counters, half("x", -1, 4, 6, 5)], [half("y", -1, 4, 6, 5)]),
    )
    shapes = static_shapes(source, {"x": (8, 4, 6, 5), "g": (4,), "b": (4,)})
    ranges = {name: (dims, dims, dims) for name, dims in shapes.items() if name in "gb"}
    profile = ShapeProfile({"x": ((1, 4, 6, 5), (8, 4, 6, 5), (16, 4, 6, 5)), **ranges})
    found = sized(layers, source, shapes, (profile,))
    assert found is not None
    assert [item.shape for item in found[1].inputs] == [(32,), (8, 4, 6, 5)]


def test_what_is_guessed_needs_a_static_engine() -> None:
    layers = (
        layer(("h",), [half("x", -1, -1, 64)], [half("__mye1_myl0", -1, 16, 4, 16)]),
        layer((), [half("__mye1_myl0", -1, 16, 4, 16)], [half("__mye2_myl0", -1, 16, 16)]),
    )
    assert sizes(*layers, static=()) is None and sizes(*layers) is not None


def test_one_axis_may_be_padded_beside_an_open_one() -> None:
    found = sizes(layer((), [half("x", -1, 16, 64)], [half("__mye1_myl0", -1, 17, 64)]))
    assert found == [[(8, 16, 64), (8, 17, 64)]]


def test_static_layers_stay_and_what_nothing_tells_is_not_guessed() -> None:
    assert sizes(layer((), [half("q", 3, 4)], [half("r", 3, 4)])) == [[(3, 4), (3, 4)]]
    assert sizes(layer((), [half("q", -1, 4)], [half("r", -1, 4)])) is None


def test_the_rows_of_three_products_in_one_are_those_of_their_operand() -> None:
    """The heads of one of them, read from the same buffer, do not tell them."""
    found = sizes(
        layer(("h",), [half("x", -1, -1, 64)], [half("__mye1_myl0", -1, 64)]),
        layer(("m", "m", "m"), [half("__mye1_myl0", -1, 64)], [half("__mye2_myl0", 3, -1, 64)]),
        layer((), [half("__mye2_myl0", -1, 16, 16)], [half("__mye3_myl0", -1, 16, 16)]),
    )
    assert found is not None and found[1:] == [[(128, 64), (3, 128, 64)], [(96, 16, 16)] * 2]


def test_tokens_before_the_batch_are_not_several_products() -> None:
    found = sizes(
        layer((), [half("x", -1, 64)], [half("__mye1_myl0", 16, -1, 64)]), layer(("h",), [], [half("x", -1, 64)])
    )
    assert found is not None and found[0] == [(128, 64), (16, 8, 64)]


def test_rows_of_one_matrix_are_not_those_of_each_of_sixteen() -> None:
    """A product over all rows beside heads that are read tokens first (tf2onnx's attention in batches of any size)."""
    found = sizes(
        layer(("m",), [half("__mye1_myl0", 1, -1, 64)], [half("__mye2_myl0", 16, -1, 192)]),
        layer(("h",), [half("x", -1, 64)], [half("__mye1_myl0", 1, -1, 64)]),
    )
    assert found is not None and found[0] == [(1, 128, 64), (16, 8, 192)]


def test_channels_that_are_padded_in_a_map_of_open_size() -> None:
    """A batch of one, and a copy that no node makes; no static engine is asked."""
    text = (
        """<ir_version: 10, opset_import: ["" : 21]> g (float[1, 3, H, W] x) => (float[1, 3, H, W] y) { y = Relu(x) }"""
    )
    source, shapes = model(text), {"x": (1, 3, 16, 8)}
    profile = ShapeProfile({"x": ((1, 3, 8, 4), (1, 3, 16, 8), (1, 3, 32, 16))})
    layers = (
        layer(("y",), [half("x", 1, 3, -1, -1)], [half("x.1_myl0", 1, 4, -1, -1)]),
        layer(("y",), [half("x.1_myl0", 1, 4, -1, -1)], [half("y", 1, 3, -1, -1)]),
    )
    found = sized(layers, source, static_shapes(source, shapes), (profile,))
    assert found is not None and found[0].outputs[0].shape == (1, 4, 16, 8)


def test_a_table_of_positions_is_not_the_rows_of_a_batch() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[N, 16, 64] x, float[16, 64] p) => (float[N, 16, 64] h) { c = Neg(p) h = Add(x, c) }"""
    source = model(text)
    layers = [layer(("c", "h"), [half("x", -1, 16, 64)], [half("__mye1_myl0", -1, 64)])]
    profile = ShapeProfile({"x": ((1, 16, 64), (8, 16, 64), (8, 16, 64))})
    found = sized(layers, source, static_shapes(source, SHAPES), (profile,))
    assert found is not None and found[0].outputs[0].shape == (128, 64)


def test_the_static_engine_tells_what_the_graph_does_not() -> None:
    """A loop over the sequence reads and writes the rows of one step."""
    source = model()
    dynamic = layer(("m",), [half("__mye1_myl0", 2, -1, 64)], [half("__mye2_myl0", 2, -1, 192)])
    static = layer(("m",), [half("__mye7_myl0", 2, 8, 64)], [half("__mye8_myl0", 2, 8, 192)])
    found = sized([dynamic], source, static_shapes(source, SHAPES), (PROFILE,), [static])
    assert found is not None and [item.shape for item in (*found[0].inputs, *found[0].outputs)] == [
        (2, 8, 64),
        (2, 8, 192),
    ]


@pytest.mark.parametrize("name", ["h", "h_myl0", "h.1_myl0"])
def test_the_compiler_adds_to_names(name: str) -> None:
    assert sizes(layer((), [], [half(name, -1, -1, 64)])) == [[(8, 16, 64)]]
