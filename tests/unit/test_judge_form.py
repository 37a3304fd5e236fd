"""The form in which a model is judged: open axes stay open, and pieces of it know their sizes."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir
import pytest

from trtopt.engine.request import ShapeProfile
from trtopt.graph.edit import dims_of_value
from trtopt.graph.shapes import infer_shapes
from trtopt.judge.form import best_shapes, judged_form, profile_of
from trtopt.judge.subgraph import CutError, Cutter, structure_key

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
g (float[N, 8, H, 32] x, float[8, 8, 1, 1] w) => (float[N, 8, P, 16] y) <int64[1] zero = {0}, int64[2] tail = {8, -1}> {
    a = Conv (x, w) b = Relu(a) c = Conv <strides = [2, 2]> (b, w) d = Relu(c)
    s = Shape <end = 1> (d) t = Concat <axis = 0> (s, tail) e = Reshape(d, t) f = Relu(e)
    u = Shape (d) h = Reshape(f, u) y = Conv (h, w) }"""
OPEN = ShapeProfile({"x": ((1, 8, 8, 32), (4, 8, 16, 32), (8, 8, 64, 32))})


def model() -> ir.Model:
    found = infer_shapes(ir.from_proto(onnx.parser.parse_model(TEXT)))
    for node in found.graph:
        node.name = str(node.outputs[0].name)
    return found


def piece(*names: str, profile: ShapeProfile = OPEN) -> ir.Model:
    return Cutter(judged_form(model(), (profile,))).subgraph(names)


def test_a_piece_keeps_the_open_axes_with_their_sizes() -> None:
    found = piece("f")
    (shapes,) = (item.shapes for item in (profile_of(found),) if item is not None)
    assert [str(node.name) for node in found.graph] == ["c", "d", "s", "t", "e", "f", "u", "h", "y"]
    assert shapes == {"b": ((1, 8, 8, 32), (4, 8, 16, 32), (8, 8, 64, 32)), "w": ((8, 8, 1, 1),) * 3}
    assert best_shapes(found)["b"] == (4, 8, 16, 32)
    assert dims_of_value(found.graph.inputs[0]) == ("N", 8, "H", 32)


def test_axes_of_the_same_sizes_are_one_axis() -> None:
    form = judged_form(model(), (OPEN,))
    found = Cutter(form).subgraph(["y"], across_stored=False)
    dims = [dims_of_value(value) for value in found.graph.inputs if value.name != "w"]
    assert all(dim == "N" or isinstance(dim, int | str) for shape in dims for dim in shape or ())
    assert profile_of(found) is not None


ATTENTION = """<ir_version: 10, opset_import: ["" : 21]>
g (float[2, 4, 8, 16] q, float[2, 4, 16, 8] k, float[2, 4, 8, 16] v, float[2, 1, 8, 8] m, float[64, 64] w)
=> (float[2, 8, 64] y) <int64[3] rows = {2, 8, 64}, float[1] f = {0.5}> {
    a = Mul (q, f) b = MatMul (a, k) c = Add (b, m) d = Softmax <axis = -1> (c) e = MatMul (d, v)
    h = Transpose <perm = [0, 2, 1, 3]> (e) i = Reshape (h, rows) y = MatMul (i, w) }"""


def test_a_piece_holds_what_lies_between_its_nodes() -> None:
    """The products of an attention are reached from both sides; without its Softmax they would be no attention."""
    found = infer_shapes(ir.from_proto(onnx.parser.parse_model(ATTENTION)))
    for node in found.graph:
        node.name = str(node.outputs[0].name)
    piece = Cutter(judged_form(found, ())).subgraph(["a", "h"])
    assert [str(node.name) for node in piece.graph] == ["a", "b", "c", "d", "e", "h", "i", "y"]


def test_a_piece_ends_where_many_read_or_are_joined() -> None:
    """What the steps of a recurrence that is written out are given, and what they give, is stored."""
    steps, lanes = 48, ", ".join(f"s{i}" for i in range(48))
    body = " ".join(f"t{i} = Tanh (s{i}) r{i} = Sigmoid (t{i})" for i in range(steps))
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
    g (float[2, {steps}, 8] x, float[8, 8] w, float[8, 8] v) => (float[2, {steps}, 8] y) {{
        a = MatMul (x, w) {lanes} = Split <axis = 1, num_outputs = {steps}> (a) {body}
        c = Concat <axis = 1> ({lanes.replace("s", "r")}) y = MatMul (c, v) }}"""
    found = infer_shapes(ir.from_proto(onnx.parser.parse_model(text)))
    for node in found.graph:
        node.name = str(node.outputs[0].name)
    cutter = Cutter(judged_form(found, ()))
    assert [str(node.name) for node in cutter.subgraph(["a"]).graph] == ["a", "s0"]
    assert [str(node.name) for node in cutter.subgraph(["y"]).graph] == ["c", "y"]


def test_a_profile_of_one_shape_is_written_into_the_form() -> None:
    fixed = OPEN.at_optimum()
    found = judged_form(model(), (fixed,))
    assert profile_of(found) is None and not best_shapes(found)
    assert [node.op_type for node in found.graph].count("Shape") == 0


def test_equal_pieces_of_other_profiles_have_other_keys() -> None:
    wide = ShapeProfile({"x": ((1, 8, 8, 32), (4, 8, 16, 32), (16, 8, 64, 32))})
    assert structure_key(piece("f")) == structure_key(piece("f"))
    assert structure_key(piece("f")) != structure_key(piece("f", profile=wide))


def test_clones_keep_the_profile() -> None:
    assert profile_of(piece("f").clone()) == profile_of(piece("f"))


def test_what_is_not_there_cannot_be_cut_out() -> None:
    with pytest.raises(CutError, match="no node of the model"):
        piece("nothing")


def blocks(count: int) -> ir.Model:
    """Residual blocks: ``x + silu(norm(x) w)``."""
    body = "".join(
        f" n{i} = LayerNormalization (x{i}, g) m{i} = MatMul (n{i}, w) s{i} = Sigmoid (m{i}) a{i} = Mul (m{i}, s{i})"
        f" p{i} = MatMul (a{i}, w) x{i + 1} = Add (x{i}, p{i})"
        for i in range(count)
    )
    head = '<ir_version: 10, opset_import: ["" : 21]>\ng (float[8, 32] x0, float[32, 32] w, float[32] g)'
    found = infer_shapes(ir.from_proto(onnx.parser.parse_model(f"{head} => (float[8, 32] x{count}) {{{body} }}")))
    for node in found.graph:
        node.name = str(node.outputs[0].name)
    return found


def test_a_piece_of_a_region_ends_at_a_residual_and_is_that_of_every_block() -> None:
    """What a residual comes from waits in memory for the products of the block; a SiLU reads one tensor twice, and
    does not wait."""
    cutter = Cutter(judged_form(blocks(6), ()))
    pieces = [cutter.subgraph([f"m{i}"], across_stored=False) for i in range(1, 5)]
    assert [str(node.name) for node in pieces[1].graph] == ["p1", "x2", "n2", "m2", "s2", "a2", "p2"]
    assert len({structure_key(piece) for piece in pieces}) == 1
    whole = Cutter(judged_form(blocks(6), ())).subgraph(["m2"])
    assert {"p0", "p1", "p2"} < {str(node.name) for node in whole.graph}
