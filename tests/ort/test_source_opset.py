"""Conversion to a current opset keeps results, in ONNX Runtime before and after."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

from trtopt.errors import InvalidModelError
from trtopt.source.onnx_file import load
from trtopt.source.save import save_model


def run_file(path: Path, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return list(onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run(None, feeds))


def converted(tmp_path: Path, opset: int, graph: str, **feeds: np.ndarray) -> onnx.ModelProto:
    """Load ``graph`` at ``opset``, save it, and compare its outputs with those of the file as it was."""
    path, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 7, opset_import: ["" : {opset}]> {graph}'), path)
    model = load(path).model
    save_model(model, after)
    proto = onnx.load(after)
    onnx.checker.check_model(proto, full_check=True)
    assert proto.opset_import[0].version == 21
    for expected, found in zip(run_file(path, feeds), run_file(after, feeds), strict=True):
        assert expected.dtype == found.dtype and expected.shape == found.shape
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    return proto


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def kinds(proto: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in proto.graph.node]


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("axis", ["", "<axis = 0>", "<axis = 2>", "<axis = 3>"])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 5, 1, 1), (1, 1, 1, 6)])
def test_softmax_before_13_normalizes_all_axes_from_axis_on(
    tmp_path: Path, op: str, axis: str, shape: tuple[int, ...]
) -> None:
    text = ", ".join(map(str, shape))
    converted(tmp_path, 11, f"g (float[{text}] x) => (float[{text}] y) {{ y = {op} {axis} (x) }}", x=floats(*shape))


def test_softmax_over_one_axis_stays_one_node(tmp_path: Path) -> None:
    graph = "g (float[N, 5, 1, 1] x) => (float[N, 5, 1, 1] y) { y = Softmax (x) }"
    assert kinds(converted(tmp_path, 7, graph, x=floats(2, 5, 1, 1))) == ["Softmax"]


def test_softmax_of_a_rank_that_nothing_tells(tmp_path: Path) -> None:
    nodes = "s = Shape(x) i = Cast<to = 6>(s) h = Slice(i, from, to) b = Cast<to = 7>(h) n = Concat<axis = 0>(b, rest)"
    given = "int64[1] from = {0}, int64[1] to = {1}, int64[1] rest = {-1}"
    text = f"g (float[N, 5, W] x) => (float[a, b] y) <{given}> {{ {nodes} z = Reshape(x, n) y = Softmax<axis = 1>(z) }}"
    assert "Softmax" in kinds(converted(tmp_path, 11, text, x=floats(2, 5, 3)))


def test_softmax_with_a_dynamic_trailing_axis(tmp_path: Path) -> None:
    graph = "g (float[N, 5, W] x) => (float[N, 5, W] y) { y = Softmax <axis = 1> (x) }"
    converted(tmp_path, 9, graph, x=floats(2, 5, 3))


@pytest.mark.parametrize("opset", [7, 9])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_upsample_becomes_resize(tmp_path: Path, opset: int, mode: str) -> None:
    if opset == 7:
        node = f'y = Upsample <mode = "{mode}", scales = [1.0, 1.0, 2.0, 3.0]> (x)'
        graph = f"g (float[1, 2, 3, 4] x) => (float[1, 2, 6, 12] y) {{ {node} }}"
    else:
        node = f'y = Upsample <mode = "{mode}"> (x, s)'
        graph = f"g (float[1, 2, 3, 4] x) => (float[1, 2, 6, 12] y) <float[4] s = {{1, 1, 2, 3}}> {{ {node} }}"
    assert "Resize" in kinds(converted(tmp_path, opset, graph, x=floats(1, 2, 3, 4)))


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize(("scale", "size"), [("2.5", 10), ("0.6", 2)])
def test_resize_10_keeps_its_coordinates(tmp_path: Path, mode: str, scale: str, size: int) -> None:
    graph = (
        f"g (float[1, 1, 4, 4] x) => (float[1, 1, {size}, {size}] y) <float[4] s = {{1, 1, {scale}, {scale}}}> "
        f'{{ y = Resize <mode = "{mode}"> (x, s) }}'
    )
    converted(tmp_path, 10, graph, x=floats(1, 1, 4, 4))


def test_resize_11_with_empty_scales_and_sizes(tmp_path: Path) -> None:
    graph = (
        "g (float[1, 1, 4, 4] x) => (float[1, 1, 7, 9] y) <float[0] e = {}, int64[4] z = {1, 1, 7, 9}> "
        '{ y = Resize <mode = "linear", coordinate_transformation_mode = "pytorch_half_pixel"> (x, e, e, z) }'
    )
    converted(tmp_path, 11, graph, x=floats(1, 1, 4, 4))


def test_resize_11_with_the_coordinates_that_were_dropped(tmp_path: Path) -> None:
    graph = (
        "g (float[1, 1, 4, 4] x) => (float[1, 1, 10, 10] y) <float[0] e = {}, float[4] s = {1, 1, 2.5, 2.5}> "
        '{ y = Resize <mode = "nearest", coordinate_transformation_mode = "tf_half_pixel_for_nn", '
        'nearest_mode = "floor"> (x, e, s) }'
    )
    converted(tmp_path, 11, graph, x=floats(1, 1, 4, 4))


@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_resize_11_that_interpolates_at_the_coordinates_that_were_dropped_is_refused(tmp_path: Path, mode: str) -> None:
    graph = (
        "g (float[1, 1, 4, 4] x) => (float[1, 1, 8, 8] y) <float[0] e = {}, float[4] s = {1, 1, 2, 2}> "
        f'{{ y = Resize <mode = "{mode}", coordinate_transformation_mode = "tf_half_pixel_for_nn", '
        'nearest_mode = "floor"> (x, e, s) }'
    )
    onnx.save(onnx.parser.parse_model(f'<ir_version: 7, opset_import: ["" : 11]> {graph}'), tmp_path / "m.onnx")
    with pytest.raises(InvalidModelError, match="no longer exists"):
        load(tmp_path / "m.onnx")


@pytest.mark.parametrize("attributes", ["<min = -0.5>", "<max = 0.5>", "<min = -0.5, max = 0.25>", ""])
def test_clip_bounds_become_inputs(tmp_path: Path, attributes: str) -> None:
    graph = f"g (float[3, 4] x) => (float[3, 4] y) {{ y = Clip {attributes} (x) }}"
    converted(tmp_path, 7, graph, x=floats(3, 4))


def test_clip_bounds_have_the_type_of_the_data(tmp_path: Path) -> None:
    # ONNX Runtime has no kernel for FP16 at this opset, so only the converted model can run.
    path, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    graph = "g (float16[4] x) => (float16[4] y) { y = Clip <min = -1.0, max = 1.0> (x) }"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 7, opset_import: ["" : 10]> {graph}'), path)
    save_model(load(path).model, after)
    data = np.array([-3, -0.5, 0.5, 3], dtype=np.float16)
    (found,) = run_file(after, {"x": data})
    np.testing.assert_array_equal(found, np.clip(data, -1, 1))


@pytest.mark.parametrize(
    "attributes",
    [
        "<pads = [0, 1, 2, 1]>",
        "<pads = [0, 1, 2, 1], value = 3.5>",
        '<pads = [0, 1, 2, 1], mode = "edge">',
        '<pads = [0, 1, 2, 1], mode = "reflect">',
    ],
)
def test_pad_becomes_inputs(tmp_path: Path, attributes: str) -> None:
    graph = f"g (float[4, 5] x) => (float[6, 7] y) {{ y = Pad {attributes} (x) }}"
    converted(tmp_path, 7, graph, x=floats(4, 5))


@pytest.mark.parametrize(
    ("opset", "node", "out"),
    [
        (7, "y = Slice <starts = [1, 0], ends = [3, 2]> (x)", "float[2, 2]"),
        (7, "y = Slice <axes = [1], starts = [-2], ends = [1000]> (x)", "float[4, 2]"),
        (7, "y = Squeeze (u) u = Unsqueeze <axes = [0, 3]> (x)", "float[4, 5]"),
        (11, "y = Squeeze <axes = [0]> (u) u = Unsqueeze <axes = [0]> (x)", "float[4, 5]"),
        (7, "y, k = TopK <k = 2, axis = 1> (x)", "float[4, 2]"),
        (7, "y, z = Split <axis = 1, split = [2, 3]> (x)", "float[4, 2]"),
        (7, "y, z = Split <axis = 0> (x)", "float[2, 5]"),
        (13, "y, z = Split <axis = 0> (x)", "float[2, 5]"),
        (7, "y = ReduceSum <axes = [1], keepdims = 0> (x)", "float[4]"),
        (11, "y = ReduceMean <axes = [0]> (x)", "float[1, 5]"),
        (13, "y = ReduceMax <axes = [-1]> (x)", "float[4, 1]"),
        (17, "y = ReduceL2 <axes = [0], keepdims = 0> (x)", "float[5]"),
        (7, "y = ReduceProd (x)", "float[1, 1]"),
        (7, "y = Dropout <ratio = 0.3> (x)", "float[4, 5]"),
        (11, "y = Dropout (x)", "float[4, 5]"),
        (7, "y = Flatten (x)", "float[4, 5]"),
    ],
)
def test_attributes_that_became_inputs(tmp_path: Path, opset: int, node: str, out: str) -> None:
    converted(tmp_path, opset, f"g (float[4, 5] x) => ({out} y) {{ {node} }}", x=floats(4, 5))


@pytest.mark.parametrize("opset", [7, 9])
def test_batch_normalization(tmp_path: Path, opset: int) -> None:
    spatial = "<spatial = 1>" if opset == 7 else ""
    graph = (
        "g (float[2, 3, 4] x) => (float[2, 3, 4] y) "
        "<float[3] s = {1, 2, 3}, float[3] b = {0, 1, 0}, float[3] m = {0.5, 0, 1}, float[3] v = {1, 2, 0.5}> "
        f"{{ y = BatchNormalization {spatial} (x, s, b, m, v) }}"
    )
    converted(tmp_path, opset, graph, x=floats(2, 3, 4))


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers(tmp_path: Path, op: str) -> None:
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    graph = (
        f"g (float[3, 2, 5] x, float[1, {4 * gates}, 5] w, float[1, {4 * gates}, 4] r) => (float[3, 1, 2, 4] y) "
        f"{{ y = {op} <hidden_size = 4> (x, w, r) }}"
    )
    converted(tmp_path, 7, graph, x=floats(3, 2, 5), w=floats(1, 4 * gates, 5), r=floats(1, 4 * gates, 4))


def test_scatter_and_one_hot(tmp_path: Path) -> None:
    graph = "g (float[4, 5] x, int64[1, 5] i, float[1, 5] u) => (float[4, 5] y) { y = Scatter <axis = 0> (x, i, u) }"
    converted(tmp_path, 9, graph, x=floats(4, 5), i=np.array([[0, 1, 2, 3, 0]]), u=floats(1, 5))


def test_grid_sample(tmp_path: Path) -> None:
    graph = (
        "g (float[1, 1, 4, 4] x, float[1, 3, 3, 2] grid) => (float[1, 1, 3, 3] y) "
        '{ y = GridSample <mode = "bicubic"> (x, grid) }'
    )
    converted(tmp_path, 16, graph, x=floats(1, 1, 4, 4), grid=floats(1, 3, 3, 2).clip(-1, 1))


def test_roi_align(tmp_path: Path) -> None:
    graph = (
        "g (float[1, 2, 8, 8] x, float[1, 4] rois, int64[1] batch) => (float[1, 2, 2, 2] y) "
        "{ y = RoiAlign <output_height = 2, output_width = 2, sampling_ratio = 2> (x, rois, batch) }"
    )
    rois = np.array([[0.5, 1, 6, 7]], dtype=np.float32)
    converted(tmp_path, 10, graph, x=floats(1, 2, 8, 8), rois=rois, batch=np.zeros(1, dtype=np.int64))


def test_group_normalization_18(tmp_path: Path) -> None:
    graph = (
        "g (float[2, 6, 4] x) => (float[2, 6, 4] y) <float[3] s = {1, 2, 3}, float[3] b = {0, 1, 2}> "
        "{ y = GroupNormalization <num_groups = 3> (x, s, b) }"
    )
    path, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {graph}'), path)
    save_model(load(path).model, after)
    data = floats(2, 6, 4)
    groups = data.astype(np.float64).reshape(2, 3, 8)
    normal = (groups - groups.mean(2, keepdims=True)) / np.sqrt(groups.var(2, keepdims=True) + 1e-5)
    expected = normal * np.array([1, 2, 3])[:, None] + np.array([0, 1, 2])[:, None]
    (found,) = run_file(after, {"x": data})
    np.testing.assert_allclose(found, expected.reshape(data.shape), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("taken", [True, False])
def test_branches_are_converted_too(tmp_path: Path, taken: bool) -> None:
    graph = (
        "g (bool c, float[2, 3, 4] x) => (float[2, 3, 4] y) { y = If (c) <"
        "then_branch = a () => (float[2, 3, 4] p) { p = Softmax (x) },"
        "else_branch = b () => (float[2, 3, 4] q) { u = Unsqueeze <axes = [0]> (x) q = Squeeze <axes = [0]> (u) }> }"
    )
    converted(tmp_path, 11, graph, x=floats(2, 3, 4), c=np.array(taken))


def test_loop_bodies_are_converted_too(tmp_path: Path) -> None:
    graph = (
        "g (int64 n, bool c, float[3, 4] x) => (float[3, 4] y, float[S, 3, 1] z) { y, z = Loop (n, c, x) <"
        "body = b (int64 i, bool k, float[3, 4] s) => (bool k2, float[3, 4] t, float[3, 1] r) "
        "{ k2 = Identity(k) t = Clip <min = -0.5, max = 0.5> (s) r = ReduceSum <axes = [1]> (t) }> }"
    )
    converted(tmp_path, 9, graph, x=floats(3, 4), n=np.array(3), c=np.array(True))
