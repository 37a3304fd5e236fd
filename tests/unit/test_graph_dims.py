"""What is said of dimensions holds at every shape the inputs can have."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx.shape_inference
import onnx_ir as ir
import pytest

from trtopt.errors import InvalidModelError
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.dimension import AtMost, Dim, Product, reshaped
from trtopt.graph.dims import Dimensions
from trtopt.graph.edit import constant_of
from trtopt.rewrite.driver import run
from trtopt.source.onnx_file import load
from trtopt.support.ort_session import OrtSession

HEAD = '<ir_version: 8, opset_import: ["" : 17]> g (float[N, S, 8] x, float[M, T, 8] z) => '
CONSTANTS = (
    "<int64 i0 = {0}, int64 i1 = {1}, int64[1] a = {0}, int64[1] k1 = {1}, int64[1] t = {2}, int64[1] f = {4}, "
    "int64[1] less = {-1}, int64[1] last = {-1}, float[8] w = {1, 2, 3, 4, 5, 6, 7, 8}, int64[2] back = {1, -1}>"
)
SHAPE = "s = Shape(a0) d0 = Gather(s, i0) d1 = Gather(s, i1) n = Unsqueeze(d0, a) m = Unsqueeze(d1, a)"
NETWORK = (
    f"a0 = Add(x, z) {SHAPE} a1 = Relu(a0) a2 = Mul(w, a1) a3 = Add(a2, x) a4 = Sub(a0, a3) "
    "h = Concat <axis = 0> (n, m, less, f) b0 = Reshape(a2, h) b1 = Transpose <perm = [0, 2, 3, 1]> (b0) "
    "b2 = Transpose <perm = [0, 2, 1, 3]> (b0) b3 = MatMul(b2, b1) b4 = Softmax(b3) b5 = MatMul(b4, b2) "
    "b6 = Transpose <perm = [0, 2, 1, 3]> (b5) j = Concat <axis = 0> (n, m, less) b7 = Reshape(b6, j) "
    "b8 = Add(b7, a4) c0 = ReduceMean <axes = [-1]> (b8) c1 = Sub(b8, c0) c2 = LayerNormalization(c1, w) "
    "c3 = ReduceMax <axes = [2], keepdims = 0> (a3) "
    "k = Concat <axis = 0> (m, n, less) e0 = Reshape(c2, k) e1 = Reshape(e0, h) p = Slice(s, a, t) "
    "g = Concat <axis = 0> (p, less) e2 = Reshape(e1, g) e3 = Transpose(e2) e4 = Transpose(a0) e5 = Max(e3, e4) "
    "f0, f1 = Split <axis = -1> (a0) f2 = Slice(f1, t, f, last) f3 = Unsqueeze(f2, last) f4 = Squeeze(f3, last) "
    "f5 = Flatten <axis = 2> (a0) f6 = Transpose(f5) f8 = Gemm <transB = 1> (f5, f5) "
    "g0, g1 = TopK(a0, t) g2 = Cast <to = 1> (g1) "
    "g3, g4 = TopK(a0, k1) g5 = GatherND <batch_dims = 2> (a0, g4)"
)
VALUES = (
    "a0 a1 a2 a3 a4 b0 b1 b2 b3 b4 b5 b6 b7 b8 c0 c1 c2 c3 e0 e1 e2 e3 e4 e5 f0 f1 f2 f3 f4 f5 f6 f8 g0 g2 g5"
).split()


def model(folder: Path, body: str, outputs: str) -> ModelArtifact:
    """A model; outputs written without dimensions are of any shape."""
    proto = onnx.parser.parse_model(f"{HEAD} ({outputs}) {CONSTANTS} {{ {body} }}")
    for output in proto.graph.output:
        if not output.type.tensor_type.shape.dim:
            output.type.tensor_type.ClearField("shape")
    onnx.save(proto, folder / "m.onnx")
    return load(folder / "m.onnx")


def test_what_it_says_holds_at_every_shape(tmp_path: Path) -> None:
    artifact = model(tmp_path, NETWORK, ", ".join(f"float {name}" for name in VALUES))
    known = Dimensions(artifact.model)
    told = {value: known.of(value) for value in artifact.model.graph.outputs}
    sizes: list[tuple[int, int, int, int]] = [(2, 3, 2, 3), (2, 3, 1, 1), (1, 1, 2, 3), (1, 3, 2, 1), (3, 1, 1, 1)]
    with OrtSession(artifact.model) as session:
        for n, s, m, t in sizes:
            found = session.run({"x": np.ones((n, s, 8), np.float32), "z": np.ones((m, t, 8), np.float32)})
            shapes = {value: array.shape for value, array in zip(artifact.model.graph.outputs, found, strict=True)}
            names = {"N": n, "S": s, "M": m, "T": t}
            for value, dims in told.items():
                for size, dim in zip(shapes[value], dims or (), strict=True):
                    assert size_of(dim, names, shapes) in (None, size), value.name


def test_loading_names_what_is_left_open(tmp_path: Path) -> None:
    body = (
        "s = Shape(x) d1 = Gather(s, i1) m = Unsqueeze(d1, a) p = Slice(w, a, m, a) "
        "q = Transpose <perm = [0, 2, 1]> (x) r = Add(q, p) y = Neg(r)"
    )
    artifact = model(tmp_path, body, "float y")
    values = {value.name: value for node in artifact.model.graph for value in node.outputs}
    assert str(values["r"].shape) == "[N,8,S]"
    assert str(values["p"].shape) == "[None]"  # w may be shorter than S


def size_of(dim: Dim, names: dict[str, int], shapes: dict[ir.Value, tuple[int, ...]]) -> int | None:
    """What a dimension is; None where it is that of a value that is not seen."""
    if isinstance(dim, Product):
        factors = [(size_of(part, names, shapes), power) for part, power in dim.powers]
        sizes = [size**power for size, power in factors if size is not None]
        return dim.number * math.prod(sizes) if len(sizes) == len(factors) else None
    if isinstance(dim, tuple):
        return shapes[dim[0]][dim[1]] if dim[0] in shapes else None
    return names[dim] if isinstance(dim, str) else dim


def test_equal_dimensions_are_found(tmp_path: Path) -> None:
    artifact = model(tmp_path, NETWORK, ", ".join(f"float {name}" for name in VALUES))
    known = Dimensions(artifact.model)
    values = {str(value.name): value for value in artifact.model.graph.outputs}
    first: tuple[Dim, Dim] = ((values["a0"], 0), (values["a0"], 1))
    assert known.of(values["b0"]) == (*first, 2, 4)
    assert known.of(values["b5"]) == (first[0], 2, first[1], 4)
    assert known.of(values["b7"]) == (*first, 8)
    assert known.of(values["f1"]) == (*first, 4)  # also of the second output of Split
    assert known.of(values["f4"]) == (*first, 2)
    assert known.of(values["g0"]) == known.of(values["g2"]) == (*first, 2)
    assert known.of(values["g5"]) == first
    rows = known.of(values["f6"]) or ()
    assert known.of(values["f8"]) == (rows[1], rows[1])
    assert known.of(values["a3"]) != (*first, 8)  # x may be larger by then, for all that is known


@pytest.mark.parametrize(
    ("node", "held"),
    [
        ("y = Size(x)", Product(8, frozenset({("N", 1), ("S", 1)}))),
        ("s = Shape(x) y = ReduceProd <keepdims = 0> (s)", Product(8, frozenset({("N", 1), ("S", 1)}))),
        ("s = Shape(x) y = ReduceProd (s)", Product(8, frozenset({("N", 1), ("S", 1)}))),
        ("s = Shape <start = 0, end = 1> (x) y = Max(s, s)", "N"),
        ("s = Shape <start = 0, end = 1> (x) r = Shape <start = 0, end = 1> (z) y = Max(s, r)", None),
        ("s = Shape <start = 0, end = 1> (x) r = Shape <start = 0, end = 1> (z) y = Max(s, s, r)", None),
        ("s = Shape(x) n = Concat <axis = 0> (s, less) y = ReduceProd <keepdims = 0> (n)", None),
        ("s = Size(x) r = Range(i0, s, four) y = Size(r)", Product(2, frozenset({("N", 1), ("S", 1)}))),
    ],
)
def test_numbers_that_are_computed_from_dimensions(node: str, held: Dim | None, tmp_path: Path) -> None:
    artifact = model(tmp_path, f"four = Constant <value_int = 4> () {node}", "int64 y")
    assert Dimensions(artifact.model).held(artifact.model.graph.outputs[0]) in ((held,), None if held is None else ())


def test_a_product_over_no_axes_is_no_product() -> None:
    text = (
        '<ir_version: 8, opset_import: ["" : 18]> g (float[N, S, 8] x) => (int64[K] y) '
        "{ s = Shape(x) y = ReduceProd <noop_with_empty_axes = 1> (s) }"
    )
    found = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    assert Dimensions(found).held(found.graph.outputs[0]) is None


def test_names_of_outputs_are_not_believed(tmp_path: Path) -> None:
    body = "q = NonZero(x) r = Cast <to = 1> (q) y = Transpose(r)"
    artifact = model(tmp_path, body, "float[N, 3] y")
    value = artifact.model.graph.outputs[0]
    assert (Dimensions(artifact.model).of(value) or ())[0] != "N"


@pytest.mark.parametrize(
    ("target", "dims"),
    [
        (("N", "S", -1, 4), ["N", "S", 2, 4]),
        (("N", -1, 8), ["N", "S", 8]),
        ((0, 0, 2, -1), ["N", "S", 2, 4]),
        (("N", -1, 4), ["N", Product(2, frozenset({("S", 1)})), 4]),
        ((-1, 8), [Product(1, frozenset({("N", 1), ("S", 1)})), 8]),
        (("M", "S", -1), ["M", "S", None]),
        (("N", "S", 3, -1), ["N", "S", 3, None]),
        (("N", None, -1), ["N", None, None]),
    ],
)
def test_dimensions_after_a_reshape(target: tuple[Dim | None, ...], dims: list[Dim | None]) -> None:
    assert reshaped(("N", "S", 8), target) == dims


def test_the_shape_becomes_numbers(tmp_path: Path) -> None:
    body = f"a0 = Add(x, z) {SHAPE} h = Concat <axis = 0> (n, m, less, f) y = Reshape(a0, h)"
    artifact = model(tmp_path, body, "float y")
    after = run(artifact, recipes="computed-reshape", strict=True).artifact
    node = after.model.graph.outputs[0].producer()
    shape = None if node is None else constant_of(node.inputs[1])
    assert shape is not None and shape.tolist() == [0, 0, 2, 4]


TABLE = (
    "<float[1, 8, 4] table = {"
    + ", ".join(str(number) for number in range(32))
    + "}, int64[1] a = {0}, int64[1] b = {1}>"
)


def test_rows_taken_of_a_table_are_as_many_as_what_they_are_added_to(tmp_path: Path) -> None:
    """Positions of a text: where there are more tokens than rows, the model cannot run at all."""
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N, S, 4] x) => (float y, float taken) '
        f"{TABLE} {{ n = Shape <start = 1, end = 2> (x) taken = Slice(table, a, n, b, b) y = Add(x, taken) }}"
    )
    for output in proto.graph.output:
        output.type.tensor_type.ClearField("shape")
    onnx.save(proto, tmp_path / "m.onnx")
    artifact = load(tmp_path / "m.onnx")
    known, (y, taken) = Dimensions(artifact.model), artifact.model.graph.outputs
    assert known.of(y) == ("N", "S", 4) and known.of(taken) == (1, AtMost("S", 8), 4)
    with OrtSession(artifact.model) as session:
        for tokens in (1, 2, 8):
            assert session.run({"x": np.zeros((2, tokens, 4), np.float32)})[0].shape == (2, tokens, 4)
        with pytest.raises(InvalidModelError):
            session.run({"x": np.zeros((2, 9, 4), np.float32)})


WAVES = (
    '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 1, L] x, float[M] q) => (float taken, float split) '
    "<int64[1] two = {2}, int64[1] five = {5}, int64[1] six = {6}, int64[1] less = {-1}, int64[1] four = {4}, "
    "int64[1] z = {0}, int64[1] o = {1}, float[8, 1, 10] w = {WEIGHTS}, float[8, 8, 4] v = {PADDED}>"
)
LENGTHS = (
    "{ n = Shape <start = 0, end = 1> (x) l = Shape <start = 2, end = 3> (x) l0 = Div(l, five) l1 = Sub(l0, o) "
    "l2 = Sub(l1, two) l3 = Div(l2, two) l4 = Add(o, l3) c0 = Conv <strides = [5]> (x, w) "
    "c1 = MaxPool <kernel_shape = [2], strides = [2]> (c0) t0 = Conv <pads = [2, 2]> (c1, v) "
    "taken = Slice(t0, z, less, two) a = Add(taken, c1) b = Transpose <perm = [0, 2, 1]> (a) "
    "h = Concat <axis = 0> (n, l4, less, four) split = Reshape(b, h) "
    "m = Shape(q) d0 = Sub(m, six) d1 = Div(d0, two) }"
)


def test_windows_of_an_open_axis_are_counted(tmp_path: Path) -> None:
    """Speech encoders: lengths behind convolutions, and the same by arithmetic on the samples' number."""
    text = WAVES.replace("WEIGHTS", ", ".join(["1"] * 80)).replace("PADDED", ", ".join(["1"] * 256))
    proto = onnx.parser.parse_model(
        text + LENGTHS.replace("d0 = Sub(six, m) m = Shape(q)", "m = Shape(q) d0 = Sub(m, six)")
    )
    for output in proto.graph.output:
        output.type.tensor_type.ClearField("shape")
    onnx.save(proto, tmp_path / "m.onnx")
    artifact = load(tmp_path / "m.onnx")
    known = Dimensions(artifact.model)
    taken, split = artifact.model.graph.outputs
    assert known.of(taken) == ("N", 8, "floor((L-5)/10)")
    assert known.of(split) == ("N", "floor((L-5)/10)", 2, 4)
    values = {value.name: value for node in artifact.model.graph for value in node.outputs}
    assert known.held(values["l4"]) == ("floor((L-5)/10)",)
    assert known.held(values["d0"]) == ("floor((M-6)/1)",)
    assert known.held(values["d1"]) == (None,)  # 3 - 6 would be rounded to -1, not down to -2
    with OrtSession(artifact.model) as session:
        for length in (15, 24, 25, 84, 85, 86):
            found = session.run({"x": np.zeros((2, 1, length), np.float32), "q": np.zeros(3, np.float32)})
            assert found[1].shape == (2, (length - 5) // 10, 2, 4)


PATCHES = (
    '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 1, H, W] x) => (float y, float back) '
    "<int64[1] two = {2}, int64[1] four = {4}, int64[1] o = {1}, int64[1] z = {0}, int64[2] flat = {1, 4}, "
    "float[4, 1, 2, 2] w = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, float[1, 1, 4] token = {1, 2, 3, 4}, "
    "float[1, 4, 2, 1] grid = {1, 2, 3, 4, 5, 6, 7, 8}> "
    "{ n = Shape <start = 0, end = 1> (x) h = Shape <start = 2, end = 3> (x) v = Shape <start = 3> (x) "
    "c = Conv <strides = [2, 2]> (x, w) h2 = Div(h, two) v2 = Div(v, two) p = Mul(h2, v2) "
    'i = Concat <axis = 0> (o, four, h2, v2) m = Resize <mode = "linear"> (grid, , , i) d = Add(c, m) '
    "s = Concat <axis = 0> (n, four, p) r = Reshape(d, s) t = Transpose <perm = [0, 2, 1]> (r) "
    "e = Concat <axis = 0> (n, flat) k = Expand(token, e) a = Concat <axis = 1> (k, t) p1 = Add(p, o) "
    "u = Concat <axis = 0> (n, p1, two, two) y = Reshape(a, u) cut = Slice(a, z, p, o) "
    "s2 = Concat <axis = 0> (n, h2, v2, four) back = Reshape(cut, s2) }"
)


def test_patches_of_an_open_image_are_counted(tmp_path: Path) -> None:
    """A vision transformer at any height and width: resized positions, and a class token before the patches."""
    proto = onnx.parser.parse_model(PATCHES)
    for output in proto.graph.output:
        output.type.tensor_type.ClearField("shape")
    onnx.save(proto, tmp_path / "m.onnx")
    artifact = load(tmp_path / "m.onnx")
    known = Dimensions(artifact.model)
    y, back = artifact.model.graph.outputs
    assert (known.of(y) or ())[1] == "floor((product(floor((H+0)/2), floor((W+0)/2))+1)/1)"
    assert known.of(back) == ("N", "floor((H+0)/2)", "floor((W+0)/2)", 4)
    after = run(artifact, recipes="computed-reshape", strict=True).artifact
    shapes = [constant_of(node.inputs[1]) for node in after.model.graph if node.op_type == "Reshape"]
    assert [None if shape is None else shape.tolist() for shape in shapes] == [[0, 4, -1], [0, 0, 2, 2], None]
    values = {value.name: value for node in after.model.graph for value in node.outputs}
    assert str(values["t"].shape) == "[N,product(floor((H+0)/2), floor((W+0)/2)),4]"
    with OrtSession(artifact.model) as session:
        for height, width in ((2, 2), (5, 4), (9, 3)):
            found = session.run({"x": np.zeros((2, 1, height, width), np.float32)})
            assert found[0].shape == (2, (height // 2) * (width // 2) + 1, 2, 2)


def test_what_is_repeated_is_as_many_times_as_long(tmp_path: Path) -> None:
    """ALiBi's slopes, a row for each head and entry of the batch."""
    text = (
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N, S] x) => (float y) '
        "<float[3, 1, 4] slopes = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, int64[1] o = {1}> "
        "{ n = Shape <start = 0, end = 1> (x) r = Concat <axis = 0> (n, o, o) t = Tile(slopes, r) "
        "i = Concat <axis = 0> (n, n) u = Tile(x, i) v = Abs(u) w = ReduceSum <keepdims = 0> (v) y = Mul(t, w) }"
    )
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    model = load(tmp_path / "m.onnx").model
    known = Dimensions(model)
    values = {value.name: value for node in model.graph for value in node.outputs}
    assert [known.name(dim) if not isinstance(dim, int) else dim for dim in known.of(values["t"]) or ()] == [
        "product(3, N)",
        1,
        4,
    ]
    assert [known.name(dim) for dim in known.of(values["u"]) or ()] == ["product(N, N)", "product(N, S)"]
