"""What the recipes about layout and duplicates change in engines of TensorRT for RTX: FP16, batch 8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from trtopt import build
from trtopt.report.schema.build import BuildReport

pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")

NHWC, NCHW = "Transpose <perm = [0, 2, 3, 1]>", "Transpose <perm = [0, 3, 1, 2]>"
CONV = "Conv <pads = [1, 1, 1, 1]>"


def run(
    folder: Path,
    recipes: str,
    graph: str,
    weights: Mapping[str, tuple[int, ...]],
    shapes: Sequence[Mapping[str, tuple[int, ...]]] = (),
) -> BuildReport:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {graph}')
    rng = np.random.default_rng(0)
    for name, shape in weights.items():
        array = rng.standard_normal(shape, dtype=np.float32) * 0.05
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, folder / "m.onnx")
    return build(folder / "m.onnx", output=folder / "m.engine", gpu="L4", recipes=recipes, opt_shapes=shapes)


def numbers(report: BuildReport) -> tuple[int, int]:
    """Kernels, and bytes of activations."""
    assert report.engine is not None and report.accuracy is not None
    assert all(output.sqnr_db > 50 for output in report.accuracy.outputs.values())
    return report.engine.kernels, report.engine.activation_bytes


def residual_block(source: str, index: int) -> str:
    """Two convolutions between Transposes with bias and ReLU outside, as TensorFlow exports them."""
    text, value = "", source
    for step in ("a", "b"):
        name = f"{step}{index}"
        text += f"t{name} = {NCHW} ({value}) c{name} = {CONV} (t{name}, w{name}) n{name} = {NHWC} (c{name}) "
        text += f"s{name} = Add(n{name}, v{name}) "
        value = f"s{name}"
        if step == "a":
            text += f"r{name} = Relu(s{name}) "
            value = f"r{name}"
    return text + f"d{index} = Add(sb{index}, {source}) x{index} = Relu(d{index}) "


def test_a_network_of_channels_last_islands_loses_their_transposes(tmp_path: Path) -> None:
    names = [f"{step}{index}" for index in (1, 2) for step in ("a", "b")]
    weights: dict[str, tuple[int, ...]] = {"k": (64, 10)}
    weights.update({f"w{name}": (64, 64, 3, 3) for name in names})
    weights.update({f"v{name}": (64,) for name in names})
    graph = (
        f"g (float[8, 28, 28, 64] x) => (float[8, 10] y) {{ {residual_block('x', 1)} {residual_block('x1', 2)} "
        "m = ReduceMean <axes = [1, 2], keepdims = 0> (x2) y = MatMul(m, k) }"
    )
    plain = numbers(run(tmp_path, "none", graph, weights))
    pushed = numbers(run(tmp_path, "transpose-pair,transpose-push", graph, weights))
    assert pushed[0] <= plain[0] - 2
    assert pushed[1] < 0.75 * plain[1]


def test_equal_branches_are_computed_once(tmp_path: Path) -> None:
    graph = (
        f"g (float[8, 64, 28, 28] x) => (float[8, 64, 28, 28] y) {{ a = {CONV} (x, w) b = Relu(a) c = {CONV} (x, w) "
        f"d = Relu(c) e = {CONV} (b, u) f = {CONV} (d, v) g = Add(e, f) y = Relu(g) }}"
    )
    weights = dict.fromkeys("wuv", (64, 64, 3, 3))
    plain = numbers(run(tmp_path, "none", graph, weights))
    once = numbers(run(tmp_path, "duplicate-expression,dead-node", graph, weights))
    assert once[0] == plain[0] - 1 and once[1] < plain[1]


def test_batch_normalization_of_features_leaves_tokens_where_they_are(tmp_path: Path) -> None:
    """As in PatchTST: two products with residuals, each normalized between two Transposes."""
    norm = "BatchNormalization (t{0}, g, b, m, v) u{0} = Transpose <perm = [0, 2, 1]> (n{0})"
    block = "t{0} = Transpose <perm = [0, 2, 1]> (r{0}) n{0} = " + norm
    block += " p{0} = MatMul(u{0}, w{0}) q{0} = Add(p{0}, b) r{1} = Add(r{0}, q{0})"
    graph = f"g (float[8, 100, 64] x) => (float[8, 100, 64] y) <float[64] v = {{{', '.join(['1'] * 64)}}}> "
    graph += f"{{ r0 = Add(x, b) {' '.join(block.format(at, at + 1) for at in range(3))} y = Neg(r3) }}"
    weights = {**dict.fromkeys("gbm", (64,)), **{f"w{at}": (64, 64) for at in range(3)}}
    before = numbers(run(tmp_path, "none", graph, weights))
    after = numbers(run(tmp_path, "token-batch-norm,transpose-push", graph, weights))
    assert after[0] < before[0] and after[1] < before[1]


def test_levels_of_deformable_attention_are_added_as_they_are_sampled(tmp_path: Path) -> None:
    graph = (
        "g (float[8, 32, 20, 20] a, float[8, 32, 10, 10] b, float[8, 300, 4, 2] p, float[8, 1, 300, 8] w) => "
        "(float[8, 32, 300] y) <int64[1] last = {-1}> { s = GridSample(a, p) t = GridSample(b, p) "
        "j = Concat <axis = -1> (s, t) m = Mul(j, w) y = ReduceSum <keepdims = 0> (m, last) }"
    )
    before = numbers(run(tmp_path, "none", graph, {}))
    after = numbers(run(tmp_path, "joined-sum", graph, {}))
    assert after[0] < before[0] and after[1] < before[1]


def test_branches_that_are_stacked_and_weighted_are_summed_without_a_transposed_map(tmp_path: Path) -> None:
    """Selective kernels: two convolutions, their sum, a gate for each."""
    graph = (
        "g (float[8, 64, 28, 28] x) => (float[8, 64, 28, 28] y) <int64[1] one = {1}, int64[2] map = {2, 3}, "
        "int64[5] gates = {0, 2, 64, 1, 1}> "
        f"{{ a = {CONV} (x, v) b = {CONV} (x, w) c = Relu(a) d = Relu(b) e = Unsqueeze(c, one) f = Unsqueeze(d, one) "
        "j = Concat <axis = 1> (e, f) s = ReduceSum <keepdims = 0> (j, one) m = GlobalAveragePool (s) "
        "g = Conv (m, p) h = Reshape(g, gates) i = Softmax <axis = 1> (h) k = Mul(j, i) "
        "t = ReduceSum <keepdims = 0> (k, one) "
        f"y = {CONV} (t, q) }}"
    )
    weights = {"v": (64, 64, 3, 3), "w": (64, 64, 3, 3), "p": (128, 64, 1, 1), "q": (64, 64, 3, 3)}
    before = numbers(run(tmp_path, "none", graph, weights))
    after = numbers(run(tmp_path, "short-reduction", graph, weights))
    assert after[0] <= before[0] - 2
    assert after[1] < 0.8 * before[1]


def test_zeros_beside_scores_of_an_odd_number_of_distances_are_columns_of_the_positions(tmp_path: Path) -> None:
    graph = (
        "g (float[8, 4, 64, 32] x) => (float[8, 4, 64, 128] y) <int64[8] p = {0, 0, 0, 1, 0, 0, 0, 0}> "
        "{ m = MatMul(x, k) y = Pad(m, p) }"
    )
    before = numbers(run(tmp_path, "none", graph, {"k": (4, 32, 127)}))
    after = numbers(run(tmp_path, "padded-product", graph, {"k": (4, 32, 127)}))
    assert after[0] < before[0] and after[1] < before[1]


def test_a_map_is_turned_before_it_is_flattened_for_a_product(tmp_path: Path) -> None:
    graph = (
        "g (float[8, 192, 14, 14] x) => (float[8, 196, 192] y) <int64[3] s = {0, 192, -1}> "
        "{ c = Conv <group = 192, pads = [1, 1, 1, 1]> (x, k) r = Reshape(c, s) t = Transpose <perm = [0, 2, 1]> (r) "
        "y = MatMul(t, w) }"
    )
    weights = {"k": (192, 1, 3, 3), "w": (192, 192)}
    plain = numbers(run(tmp_path, "none", graph, weights))
    turned = numbers(run(tmp_path, "merged-transpose", graph, weights))
    assert turned[0] == plain[0] - 2
    assert turned[1] < 0.75 * plain[1]


def test_a_map_is_turned_before_it_is_flattened_for_a_normalization(tmp_path: Path) -> None:
    graph = (
        "g (float[8, 32, 28, 28] x) => (float[8, 784, 64] y) <int64[3] s = {0, 64, -1}> "
        "{ c = Conv <pads = [1, 1, 1, 1]> (x, k) r = Reshape(c, s) t = Transpose <perm = [0, 2, 1]> (r) "
        "n = LayerNormalization(t, a, b) l = MatMul(n, w) e = Relu(l) y = MatMul(e, v) }"
    )
    weights = {"k": (64, 32, 3, 3), "w": (64, 64), "v": (64, 64), "a": (64,), "b": (64,)}
    plain = numbers(run(tmp_path, "none", graph, weights))
    turned = numbers(run(tmp_path, "merged-transpose", graph, weights))
    assert turned[0] < plain[0]
    assert turned[1] < plain[1]


def test_a_normalization_that_a_product_and_a_convolution_read_is_one_kernel(tmp_path: Path) -> None:
    graph = (
        "g (float[8, 784, 64] x) => (float[8, 784, 64] y, float[8, 64, 7, 7] z) <int64[4] s = {0, 64, 28, 28}> "
        "{ p = MatMul(x, w) n = LayerNormalization(p, a) y = MatMul(n, v) m = Mul(n, f) o = Add(m, b) "
        "t = Transpose <perm = [0, 2, 1]> (o) i = Reshape(t, s) z = Conv <strides = [4, 4]> (i, k) }"
    )
    weights = {"k": (64, 64, 4, 4), "w": (64, 64), "v": (64, 64), **dict.fromkeys("abf", (64,))}
    before = numbers(run(tmp_path, "none", graph, weights))
    after = numbers(run(tmp_path, "merged-transpose,constant-affine", graph, weights))
    assert after[0] < before[0]
    assert after[1] < 0.9 * before[1]


def test_a_factor_of_a_residual_is_in_the_kernel_of_the_convolution_that_is_added(tmp_path: Path) -> None:
    body, value = "", "x"
    for index in range(3):
        body += f"a{index} = Relu({value}) c{index} = {CONV} (a{index}, k{index}) m{index} = Mul({value}, s) "
        value = f"y{index}"
        body += f"{value} = Add(m{index}, c{index}) "
    graph = f"g (float[8, 64, 28, 28] x) => (float[8, 64, 28, 28] y2) <float[1] s = {{0.5}}> {{ {body} }}"
    weights = {f"k{index}": (64, 64, 3, 3) for index in range(3)}
    before = numbers(run(tmp_path, "none", graph, weights))
    after = numbers(run(tmp_path, "scaled-residual", graph, weights))
    assert after[0] < before[0]
    assert after[1] < before[1]


def test_what_is_cut_off_behind_a_convolution_is_left_out(tmp_path: Path) -> None:
    graph = (
        "g (float[8, 128, 512] x) => (float[8, 128, 512] y) <int64[1] s = {0}, int64[1] e = {-8}, int64[1] a = {2}> "
        "{ c = Conv <pads = [8, 8], dilations = [4]> (x, k) t = Slice(c, s, e, a) r = Relu(t) "
        "d = Conv <pads = [8, 8], dilations = [4]> (r, v) u = Slice(d, s, e, a) q = Relu(u) y = Add(q, x) }"
    )
    weights = {"k": (128, 128, 3), "v": (128, 128, 3)}
    before = numbers(run(tmp_path, "none", graph, weights))
    after = numbers(run(tmp_path, "cropped-conv", graph, weights))
    assert after[0] < before[0]
    assert after[1] < 0.9 * before[1]


@pytest.mark.parametrize(("groups", "length"), [(8, "1000"), (1, "1000"), (256, "1000"), (8, "L")])
def test_a_normalization_over_one_axis_is_one_kernel(groups: int, length: str, tmp_path: Path) -> None:
    """The compiler knows it over two axes; with one it transposes the map before and behind."""
    back = "s = Shape(a) q = Reshape(i, s)" if length == "L" else "q = Reshape(i, back)"
    one, zero = (", ".join([number] * groups) for number in "10")
    graph = (
        f"g (float[8, 64, {length}] x) => (float[8, 256, {length}] y) "
        f"<int64[3] rows = {{0, {groups}, -1}}, int64[3] back = {{0, 256, 1000}}, float[{groups}] o = {{{one}}}, "
        f"float[{groups}] z = {{{zero}}}> {{ a = Conv <pads = [1, 1]> (x, w) r = Reshape(a, rows) "
        f"i = InstanceNormalization (r, o, z) {back} m = Mul(q, f) n = Add(m, t) e = Relu(n) "
        "y = Conv <pads = [1, 1]> (e, v) }"
    )
    weights = {"w": (256, 64, 3), "f": (256, 1), "t": (256, 1), "v": (256, 256, 3)}
    shapes = [{"x": (8, 64, 1000)}]
    before = numbers(run(tmp_path, "constant-expression", graph, weights, shapes))
    after = numbers(run(tmp_path, "constant-expression,conv-1d", graph, weights, shapes))
    assert after[0] < before[0]
    assert after[1] < 0.85 * before[1]


def test_rows_are_multiplied_by_all_experts_before_one_is_selected(tmp_path: Path) -> None:
    graph = (
        "g (float[256, 512] x, float[256, 8] s) => (float[256, 512, 1] y) <int64[1] last = {-1}> "
        "{ i = ArgMax <axis = -1, keepdims = 0> (s) w = Gather(k, i) u = Unsqueeze(x, last) y = MatMul(w, u) }"
    )
    before = numbers(run(tmp_path, "none", graph, {"k": (8, 512, 512)}))
    after = numbers(run(tmp_path, "gathered-weights", graph, {"k": (8, 512, 512)}))
    assert after[1] < before[1] / 4


def test_products_of_each_with_each_of_an_odd_number_of_vectors_have_one_more(tmp_path: Path) -> None:
    graph = (
        "g (float[256, 64] x, float[256, 26, 64] z) => (float[256, 128] y) "
        "<int64[1] one = {1}, int64[2] flat = {-1, 729}> { a = Relu(x) u = Unsqueeze(a, one) e = Tanh(z) "
        "j = Concat <axis = 1> (u, e) t = Transpose <perm = [0, 2, 1]> (j) m = MatMul(j, t) f = Reshape(m, flat) "
        "y = MatMul(f, w) }"
    )
    before = numbers(run(tmp_path, "none", graph, {"w": (729, 128)}))
    after = numbers(run(tmp_path, "aligned-product", graph, {"w": (729, 128)}))
    assert after[0] < before[0] and after[1] < before[1]
