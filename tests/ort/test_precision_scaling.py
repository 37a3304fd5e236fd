"""Scaled channels, run: the function stays the same through every operator that scales are followed through."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from trtopt.graph.edit import constant_of
from trtopt.graph.shapes import infer_in_place, infer_shapes
from trtopt.precision.observe.calibrate import channel_stats, product_inputs
from trtopt.precision.ptq.channel_scale_rules import channel_scales
from trtopt.precision.ptq.scaling import apply_scales, equalize, smooth
from trtopt.support.ort_session import OrtSession

Shapes = dict[str, tuple[int, ...]]
IMAGE = "float[N, 4, 8, 8] x"
TOKENS = "float[N, S, 8] x"
FEEDS = {IMAGE: (2, 4, 8, 8), TOKENS: (2, 5, 8)}


def model_of(nodes: str, source: str, weights: Shapes, constants: dict[str, list[int]], opset: int = 17) -> ir.Model:
    """Random weights of very different magnitude along every axis; ``constants`` are shapes and axes."""
    rank = 4 if source == IMAGE else 3
    outputs = f"float[{', '.join('ABCD'[:rank])}] y"
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]> g ({source}) => ({outputs}) {{ {nodes} }}'
    )
    rng = np.random.default_rng(1)
    for name, shape in weights.items():
        array = rng.standard_normal(shape)
        for axis in range(min(2, len(shape))):
            array *= 2.0 ** rng.uniform(-3, 3, [size if a == axis else 1 for a, size in enumerate(shape)])
        array = np.abs(array) + 0.1 if name.startswith("positive") else array
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    for name, values in constants.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(values, np.int64), name))
    model = infer_shapes(ir.from_proto(proto))
    for node in model.graph:
        node.name = f"node_{node.outputs[0].name}"
    return model


def feeds_of(source: str, seed: int = 0) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).standard_normal(FEEDS[source]).astype(np.float32)}


def difference(first: ir.Model, second: ir.Model, feeds: dict[str, np.ndarray]) -> float:
    """The largest difference of any output, relative to the largest value."""
    with OrtSession(first, fuse=False) as one, OrtSession(second, fuse=False) as two:
        pairs = list(zip(one.run(feeds), two.run(feeds), strict=True))
    return max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in pairs)


CONV = {"u": (8, 4, 3, 3), "c": (8,), "v": (6, 8, 1, 1), "d": (6,)}
"""A convolution from 4 to 8 channels with bias, and one from 8 to 6."""

NETWORKS: dict[str, tuple[str, str, Shapes, dict[str, list[int]], int]] = {
    # name: nodes, input, weights, constants, how many channels are free
    "activations": (
        "a = Conv(x, u, c) b = LeakyRelu(a) e = Neg(b) f = Abs(e) g = PRelu(f, positive) h = Relu(g) y = Conv(h, v, d)",
        IMAGE, CONV | {"positive": (8, 1, 1)}, {}, 8,
    ),
    "pools": (
        "a = Conv(x, u, c) b = MaxPool <kernel_shape = [2, 2]> (a) e = AveragePool <kernel_shape = [2, 2], "
        "pads = [1, 1, 1, 1]> (b) f = GlobalAveragePool(e) y = Conv(f, v)",
        IMAGE, CONV, {}, 8,
    ),
    "residual": (
        "a = Conv(x, u, c) b = Conv <pads = [1, 1, 1, 1]> (a, w) s = Add(a, b) r = Relu(s) y = Conv(r, v)",
        IMAGE, CONV | {"w": (8, 8, 3, 3)}, {}, 8,
    ),
    "concatenation": (
        "a = Conv(x, u, c) b = Conv(x, w) s = Concat <axis = 1> (a, b) r = Relu(s) y = Conv(r, z)",
        IMAGE, CONV | {"w": (2, 4, 3, 3), "z": (6, 10, 1, 1)}, {}, 10,
    ),
    "concatenation with the input": (
        "a = Conv <pads = [1, 1, 1, 1]> (x, u, c) s = Concat <axis = 1> (a, x) y = Conv(s, z)",
        IMAGE, CONV | {"z": (6, 12, 1, 1)}, {}, 8,
    ),
    "split": (
        "a = Conv(x, u, c) b, e = Split <axis = 1> (a) f = Relu(b) g = Conv(f, w) h = Conv(e, w2) y = Add(g, h)",
        IMAGE, CONV | {"w": (6, 4, 1, 1), "w2": (6, 4, 1, 1)}, {}, 8,
    ),
    "depthwise": (
        "a = Conv(x, u, c) r = Relu(a) b = Conv <group = 8> (r, w, k) s = Relu(b) y = Conv(s, v, d)",
        IMAGE, CONV | {"w": (8, 1, 3, 3), "k": (8,)}, {}, 16,
    ),
    "grouped": (
        "a = Conv(x, u, c) r = Relu(a) b = Conv <group = 2> (r, w, k) s = Relu(b) y = Conv(s, z)",
        IMAGE, CONV | {"w": (6, 4, 3, 3), "k": (6,), "z": (3, 6, 1, 1)}, {}, 14,
    ),
    "transposed": (
        "a = Conv(x, u, c) r = Relu(a) b = ConvTranspose <strides = [2, 2], group = 2> (r, w, k) s = Relu(b) "
        "y = Conv(s, z)",
        IMAGE, CONV | {"w": (8, 3, 2, 2), "k": (6,), "z": (3, 6, 1, 1)}, {}, 14,
    ),
    "batch norm behind a ReLU": (
        "a = Conv(x, u, c) r = Relu(a) b = BatchNormalization (r, g, k, m, positive) y = Conv(b, v, d)",
        IMAGE, CONV | {"g": (8,), "k": (8,), "m": (8,), "positive": (8,)}, {}, 16,
    ),
    "zeros padded onto channels": (
        "a = Conv(x, u, c) b = Pad(a, pads) e = Conv(x, w) s = Add(b, e) y = Conv(s, z)",
        IMAGE, CONV | {"w": (12, 4, 3, 3), "z": (3, 12, 1, 1)}, {"pads": [0, 2, 0, 0, 0, 2, 0, 0]}, 12,
    ),
    "shuffled channels": (
        "a = Conv(x, u, c) b = Reshape(a, apart) e = Transpose <perm = [0, 2, 1, 3, 4]> (b) f = Reshape(e, together) "
        "r = Relu(f) y = Conv(r, v, d)",
        IMAGE, CONV, {"apart": [0, 2, 4, 6, 6], "together": [0, 8, 6, 6]}, 8,
    ),
    "squeeze and excite": (
        "a = Conv(x, u, c) r = Relu(a) p = GlobalAveragePool(r) q = Conv(p, w) e = Relu(q) f = Conv(e, w2) "
        "g = Sigmoid(f) m = Mul(r, g) y = Conv(m, v, d)",
        IMAGE, CONV | {"w": (3, 8, 1, 1), "w2": (8, 3, 1, 1)}, {}, 11,
    ),
    "constants added and joined": (
        "a = Conv(x, u, c) b = Add(a, k) e = Max(b, o) f = Mul(e, g) "
        "sc = Constant <value_floats = [1.0, 1.0, 2.0, 2.0]> () h = Resize <mode = \"linear\"> (f, , sc) "
        "y = Conv(h, v)",
        IMAGE, CONV | {"k": (8, 1, 1), "o": (1,), "g": (8, 1, 1)}, {}, 8,
    ),
    "flattened": (
        "a = Conv(x, u, c) r = MaxPool <kernel_shape = [2, 2]> (a) f = Flatten(r) g = Gemm <transB = 1> (f, w, k) "
        "h = Relu(g) i = Gemm <alpha = 0.5, beta = 2.0> (h, z, k2) y = Reshape(i, shape)",
        IMAGE, CONV | {"w": (5, 200), "k": (5,), "z": (5, 4), "k2": (1,)}, {"shape": [0, 1, 1, 4]}, 13,
    ),
    "layer norm with three readers": (
        "n = LayerNormalization(x, g, k) a = MatMul(n, q) b = MatMul(n, w) e = Sigmoid(a) f = Mul(e, b) "
        "i = MatMul(f, z) y = Add(x, i)",
        TOKENS, {"g": (8,), "k": (8,), "q": (8, 6), "w": (8, 6), "z": (6, 8)}, {}, 14,
    ),
    "layer norm written out": (
        "m = ReduceMean <axes = [-1]> (x) t = Sub(x, m) s = Mul(t, t) e = ReduceMean <axes = [-1]> (s) r = Sqrt(e) "
        "n = Div(t, r) o = Mul(n, g) p = Add(o, k) a = MatMul(p, q) y = Add(x, a)",
        TOKENS, {"g": (8,), "k": (8,), "q": (8, 8)}, {}, 8,
    ),
    "values of attention": (
        "q = MatMul(x, wq) k = MatMul(x, wk) v0 = MatMul(x, wv) v1 = Add(v0, bv) q1 = Reshape(q, heads) "
        "k1 = Reshape(k, heads) v2 = Reshape(v1, heads) q2 = Transpose <perm = [0, 2, 1, 3]> (q1) "
        "k2 = Transpose <perm = [0, 2, 3, 1]> (k1) v3 = Transpose <perm = [0, 2, 1, 3]> (v2) s = MatMul(q2, k2) "
        "p = Softmax(s) o = MatMul(p, v3) o1 = Transpose <perm = [0, 2, 1, 3]> (o) o2 = Reshape(o1, merged) "
        "y = MatMul(o2, wo)",
        TOKENS, {"wq": (8, 6), "wk": (8, 6), "wv": (8, 6), "bv": (6,), "wo": (6, 8)},
        {"heads": [0, 0, 2, 3], "merged": [0, 0, 6]}, 6,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_any_scales_leave_the_function_as_it_is(name: str) -> None:
    nodes, source, weights, constants, free = NETWORKS[name]
    model = model_of(nodes, source, weights, constants)
    channels = channel_scales(model)
    assert channels.count - 1 == free
    for seed in range(3):
        scales = 2.0 ** np.random.default_rng(seed).uniform(-3, 3, channels.count)
        scales[0] = 1.0
        scaled = apply_scales(model, channels, scales)
        assert scaled.changes > 0 and not scaled.refusals
        assert difference(model, scaled.model, feeds_of(source, seed)) < 2e-5


@pytest.mark.parametrize("name", NETWORKS)
def test_equalized_and_smoothed_models_compute_the_same(name: str) -> None:
    nodes, source, weights, constants, _ = NETWORKS[name]
    model = model_of(nodes, source, weights, constants)
    products = {str(node.name) for node in model.graph if node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul")}
    before = {key: constant_of(value).copy() for key, value in model.graph.initializers.items()}  # type: ignore[union-attr]
    samples = [feeds_of(source, seed) for seed in range(4)]
    stats = channel_stats(model, samples, product_inputs(model, products))
    for result in (equalize(model, products), smooth(model, products, stats)):
        assert difference(model, result.model, feeds_of(source)) < 2e-5
        assert [v.name for v in result.model.graph.outputs] == [v.name for v in model.graph.outputs]
    assert all(np.array_equal(before[key], constant_of(value)) for key, value in model.graph.initializers.items())  # type: ignore[arg-type]


@pytest.mark.parametrize("opset", [13, 17, 18])
def test_channel_statistics_are_those_of_the_tensors(opset: int) -> None:
    model = model_of("a = Conv(x, u, c) r = Relu(a) y = Conv(r, v)", IMAGE, CONV, {}, opset)
    samples = [feeds_of(IMAGE, seed) for seed in range(3)]
    found = channel_stats(model, samples, {"x": 1, "r": 1})
    with OrtSession(model, ["r"]) as session:
        seen = np.concatenate([session.run(sample)[0] for sample in samples])
    inputs = np.concatenate([sample["x"] for sample in samples])
    for name, array in (("x", inputs), ("r", seen)):
        np.testing.assert_allclose(found[name].absmax, np.abs(array).max(axis=(0, 2, 3)), rtol=1e-6)
        np.testing.assert_allclose(found[name].mean_square, np.square(array).mean(axis=(0, 2, 3)), rtol=1e-5)


def test_statistics_count_the_last_axis_of_tokens_whatever_their_number() -> None:
    model = model_of("y = MatMul(x, w)", TOKENS, {"w": (8, 8)}, {})
    samples = [{"x": np.full((1, length, 8), length, np.float32)} for length in (1, 3)]
    found = channel_stats(model, samples, product_inputs(model, ["node_y"]))
    np.testing.assert_allclose(found["x"].absmax, np.full(8, 3.0))
    np.testing.assert_allclose(found["x"].mean_square, np.full(8, (1 * 1 + 3 * 9) / 4))


def test_a_tensor_with_nan_has_no_statistics() -> None:
    model = model_of("a = Sqrt(x) y = MatMul(a, w)", TOKENS, {"w": (8, 8)}, {})
    sample = {"x": -np.ones((1, 2, 8), np.float32)}
    assert not channel_stats(model, [sample], product_inputs(model, ["node_y"]))


def test_heads_whose_number_no_shape_says_keep_their_scale() -> None:
    """A Reshape to the sizes of another input: the product has 4 heads, and the shapes do not say so."""
    weight = ", ".join(["1.0"] * 1024)
    model = ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[1, S, 32] x, float[A, B, C, D] like, float[1, 4, S, 8] z) => (float[1, 4, S, S] y)
        <float[32, 32] w = {{{weight}}}>
        {{ p = MatMul(x, w) to = Shape(like) heads = Reshape(p, to)
          q = Transpose<perm = [0, 2, 1, 3]>(heads) k = Transpose<perm = [0, 1, 3, 2]>(z) y = MatMul(q, k) }}"""
    )
    for index, node in enumerate(model.graph):
        node.name = f"n{index}"
    infer_in_place(model)
    assert "(Reshape) moves elements in a way that is not followed" in channel_scales(model).why_not_written["n0"]
