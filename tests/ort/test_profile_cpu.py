"""Every node of a model timed by ONNX Runtime, whatever the runtime makes of the graph. No test depends on a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from trtopt.engine.layers import BITS
from trtopt.errors import InvalidModelError, UsageError
from trtopt.graph.artifact import ModelArtifact
from trtopt.precision.observe.samples import random_feeds
from trtopt.profiling.cpu import predict_cpu, probe_cpu
from trtopt.profiling.measured import MeasuredLayer, Measurement, RunLimits
from trtopt.profiling.onnxruntime import measure
from trtopt.roofline.work import Layer
from trtopt.source.onnx_file import load

QUICK = RunLimits(warm_up_runs=1, warm_up_seconds=0, min_runs=4, max_runs=4)
HEADER = '<ir_version: 10, opset_import: ["": 21]>'


def listed(value: str, count: int) -> str:
    """The content of a constant tensor in ONNX text."""
    return ", ".join([value] * count)


def loaded(folder: Path, text: str, header: str = HEADER) -> ModelArtifact:
    path = folder / "model.onnx"
    onnx.save(onnx.parser.parse_model(f"{header}\n{text}"), path)
    return load(path)


def measured(artifact: ModelArtifact, **feeds: np.ndarray) -> Measurement:
    return measure(artifact, feeds, threads=1, limits=QUICK)


def by_name(found: Measurement) -> dict[str, MeasuredLayer]:
    assert len({layer.info.name for layer in found.layers}) == len(found.layers)
    return {layer.info.name: layer for layer in found.layers}


def ran(found: Measurement) -> set[str]:
    return {layer.info.name for layer in found.layers if layer.median_us is not None}


def check_times(found: Measurement) -> None:
    """What a time has to be whatever the machine does."""
    for layer in found.layers:
        assert layer.measured_us >= 0
        assert math.isfinite(layer.measured_us)
        if layer.median_us is None:
            assert (layer.measured_us, layer.spread_us, layer.work) == (0, None, None)
            assert not layer.info.is_kernel
        else:
            assert layer.spread_us is not None
            assert layer.spread_us >= 0
            assert layer.info.is_kernel
        assert all(item.dtype in BITS for item in (*layer.info.inputs, *layer.info.outputs, *layer.info.constants))
    assert found.end_to_end_us is not None
    assert found.end_to_end_us > 0
    assert found.host_us is None
    assert found.accuracy is None


CONV = """
net (float[N, 3, 8, 8] x) => (float[N, 4] y)
<float[4, 3, 3, 3] w = {VALUES}, int64[2] axes = {2, 3}>
{
    [conv] c = Conv <pads = [1, 1, 1, 1]> (x, w)
    [relu] r = Relu (c)
    k = Constant <value = float {2}> ()
    m = Mul (r, k)
    p = ReduceMean <keepdims = 0> (m, axes)
    y = Softmax (p)
}
""".replace("VALUES", listed("0.5", 108))


def test_every_node_of_a_convolutional_network(tmp_path: Path) -> None:
    artifact = loaded(tmp_path, CONV)
    found = measured(artifact, x=np.ones((2, 3, 8, 8), np.float32))
    check_times(found)
    layers = by_name(found)
    assert set(layers) == {str(node.name) for node in artifact.model.graph}
    assert ran(found) == set(layers) - {"node_of_k"}
    assert [layer.op for layer in found.layers] == ["Conv", "Relu", "Constant", "Mul", "ReduceMean", "Softmax"]
    conv = layers["conv"]
    assert conv.info.onnx_nodes == ("conv",)
    assert [(item.name, item.shape, item.dtype) for item in conv.info.inputs] == [("x", (2, 3, 8, 8), "Float")]
    assert [(item.name, item.shape, item.dtype) for item in conv.info.constants] == [("w", (4, 3, 3, 3), "Float")]
    assert [(item.name, item.shape, item.dtype) for item in conv.info.outputs] == [("c", (2, 4, 8, 8), "Float")]
    assert conv.work is not None
    assert (conv.work.kind, conv.work.flop, conv.work.dtype) == ("conv", 2 * 2 * 4 * 64 * 27, "fp32")
    assert (conv.work.read_bytes, conv.work.weight_bytes, conv.work.write_bytes) == (2 * 192 * 4, 108 * 4, 2 * 256 * 4)


def test_the_source_says_how_it_was_measured(tmp_path: Path) -> None:
    artifact = loaded(tmp_path, CONV)
    source = measured(artifact, x=np.ones((2, 3, 8, 8), np.float32)).source
    assert source.origin == "onnxruntime"
    assert source.files == {"model": str(tmp_path / "model.onnx")}
    assert source.launching == "profile"
    assert source.runs == 3  # of four, the first quarter settles
    assert source.conditions["threads"] == 1
    assert source.conditions["graph_optimizations"] == "off"
    assert source.conditions["input_shapes"] == {"x": [2, 3, 8, 8]}


ATTENTION = """
net (int64[B, S] ids, int64[B, S] mask) => (float[B, S, 8] y)
<float[4, 8] table = {VALUES}, float[8, 8] w = {WEIGHT}, float scale = {0.35}, float one = {1}>
{
    e = Gather (table, ids)
    q = MatMul (e, w)
    k = MatMul (e, w)
    t = Transpose <perm = [0, 2, 1]> (k)
    s = MatMul (q, t)
    d = Mul (s, scale)
    f = Cast <to = 1> (mask)
    g = Sub (f, one)
    axes = Constant <value_ints = [1]> ()
    u = Unsqueeze (g, axes)
    a = Add (d, u)
    p = Softmax (a)
    y = MatMul (p, e)
}
""".replace("VALUES", listed("0.1", 32)).replace("WEIGHT", listed("0.2", 64))


def test_every_node_of_an_attention_with_integer_inputs(tmp_path: Path) -> None:
    artifact = loaded(tmp_path, ATTENTION)
    feeds = random_feeds(artifact.inputs, {"ids": (2, 5), "mask": (2, 5)})
    assert {name: (array.dtype, array.shape) for name, array in feeds.items()} == {
        "ids": (np.int64, (2, 5)),
        "mask": (np.int64, (2, 5)),
    }
    found = measured(artifact, **feeds)
    check_times(found)
    layers = by_name(found)
    assert ran(found) == {str(node.name) for node in artifact.model.graph if node.op_type != "Constant"}
    product = layers["node_of_s"].work
    assert product is not None
    assert product.flop == 2 * 2 * 5 * 5 * 8
    assert layers["node_of_f"].info.inputs[0].dtype == "Int64"


CONTROL = """
net (float[4] x, int64 n, bool c) => (float[4] y)
{
    [outside] t = Relu (x)
    [loop] l = Loop (n, c, t) <body = b (int64 i, bool go, float[4] v) => (bool on, float[4] w) {
        [again] on = Identity (go)
        [exp] e = Exp (v)
        [tanh] w = Tanh (e)
    }>
    [if] y = If (c) <
        then_branch = yes () => (float[4] p) { [neg] p = Neg (l) },
        else_branch = no () => (float[4] q) { [abs] q = Abs (l) }
    >
}
"""


def test_nodes_in_loops_and_branches(tmp_path: Path) -> None:
    artifact = loaded(tmp_path, CONTROL)
    found = measured(artifact, x=np.ones(4, np.float32), n=np.array(3), c=np.array(True))
    check_times(found)
    layers = by_name(found)
    assert set(layers) == {"outside", "loop", "again", "exp", "tanh", "if", "neg", "abs"}
    assert ran(found) == set(layers) - {"abs"}
    once, thrice = layers["outside"].work, layers["exp"].work
    assert once is not None
    assert thrice is not None
    assert (thrice.bytes, thrice.flop, thrice.steps) == (3 * once.bytes, 3 * once.flop, 3)
    order = [layer.info.name for layer in found.layers]
    assert order.index("outside") < order.index("loop") < order.index("exp") < order.index("if") < order.index("neg")
    assert order.index("abs") == order.index("neg") + 1


def test_a_loop_without_iterations_runs_no_node_inside(tmp_path: Path) -> None:
    artifact = loaded(tmp_path, CONTROL)
    found = measured(artifact, x=np.ones(4, np.float32), n=np.array(0), c=np.array(False))
    assert ran(found) == {"outside", "loop", "if", "abs"}


FUNCTIONS = """
net (float[2, 8, 4, 4] x, bool c) => (float[2, 8, 4, 4] y)
<float[8] s = {1, 1, 1, 1, 1, 1, 1, 1}>
{
    [swish] h = HardSwish (x)
    [mish] m = Mish (h)
    [norm] g = GroupNormalization <num_groups = 4> (m, s, s)
    [if] y = If (c) <
        then_branch = yes () => (float[2, 8, 4, 4] p) { [inner] p = HardSwish (g) },
        else_branch = no () => (float[2, 8, 4, 4] q) { [other] q = HardSwish (g) }
    >
}
"""


def test_operators_that_run_by_the_parts_of_their_definition_have_the_sum(tmp_path: Path) -> None:
    """ONNX Runtime 1.31 has no kernels for these operators on a CPU."""
    artifact = loaded(tmp_path, FUNCTIONS)
    found = measured(artifact, x=np.ones((2, 8, 4, 4), np.float32), c=np.array(True))
    check_times(found)
    assert set(by_name(found)) == {"swish", "mish", "norm", "if", "inner", "other"}
    assert ran(found) == {"swish", "mish", "norm", "if", "inner"}
    assert [layer.info.name for layer in found.layers][:3] == ["swish", "mish", "norm"]
    work = by_name(found)["swish"].work
    assert work is not None
    assert work.bytes == 2 * 256 * 4


HALF = """
net (float16[1, 4, 4, 4] x) => (float16[1, 4, 4, 4] y)
<float16[4, 4, 1, 1] w = {VALUES}>
{
    [conv] c = Conv (x, w)
    [relu] y = Relu (c)
}
""".replace("VALUES", listed("1", 16))


def test_what_runs_in_fp32_instead_of_fp16_is_measured_with_its_casts(tmp_path: Path) -> None:
    found = measured(loaded(tmp_path, HALF), x=np.ones((1, 4, 4, 4), np.float16))
    check_times(found)
    conv = by_name(found)["conv"]
    assert conv.work is not None
    assert (conv.work.dtype, conv.work.bytes) == ("fp32", 4 * (64 + 16 + 64))
    assert conv.info.outputs[0].dtype == "Float"
    added = [layer for layer in found.layers if not layer.info.onnx_nodes]
    assert {layer.op for layer in added} == {"Cast"}
    assert sorted(layer.work.bytes for layer in added if layer.work is not None) == [16 * 6, 64 * 6, 64 * 6]


QUANTIZED = """
net (float[2, 8] x) => (float[2, 4] y)
<float sx = {0.1}, int8 zero = {0}, int8[8, 4] w = {VALUES}, float sw = {0.01}>
{
    q = QuantizeLinear (x, sx, zero)
    d = DequantizeLinear (q, sx, zero)
    v = DequantizeLinear (w, sw, zero)
    [product] y = MatMul (d, v)
}
""".replace("VALUES", listed("3", 32))


def test_a_product_behind_dequantizers_is_one_of_fp32(tmp_path: Path) -> None:
    """The runtime's fusions are off: nothing makes an INT8 kernel of it."""
    found = measured(loaded(tmp_path, QUANTIZED), x=np.ones((2, 8), np.float32))
    check_times(found)
    product = by_name(found)["product"].work
    assert product is not None
    assert (product.dtype, product.bytes) == ("fp32", 4 * (16 + 32 + 8))
    dequantize = by_name(found)["node_of_v"].work
    assert dequantize is not None
    assert dequantize.write_bytes == 32 * 4


def test_unnamed_and_equally_named_nodes_and_shapes_that_depend_on_data(tmp_path: Path) -> None:
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Relu", ["a"], ["c"], name="same"),
            onnx.helper.make_node("Relu", ["c"], ["y"], name="same"),
            onnx.helper.make_node("Relu", ["b"], ["s"], name='a "quoted\\" name'),
            onnx.helper.make_node("NonZero", ["s"], ["z"]),
        ],
        "net",
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [3]) for name in "ab"],
        [
            onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [3]),
            onnx.helper.make_tensor_value_info("z", onnx.TensorProto.INT64, [1, "M"]),
        ],
    )
    path = tmp_path / "model.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10), path)
    artifact = load(path)
    found = measured(artifact, a=np.ones(3, np.float32), b=np.array([1, 0, 2], np.float32))
    check_times(found)
    assert ran(found) == {str(node.name) for node in artifact.model.graph}
    assert by_name(found)["node_of_z"].info.outputs[0].shape == (1, 2)
    assert by_name(found)["node_of_z"].work is not None


SWISH = "net (float[2, 4] x) => (float[2, 4] y) { [swish] y = Swish (x) }"


def test_a_definition_knows_the_defaults_of_the_attributes(tmp_path: Path) -> None:
    found = measured(loaded(tmp_path, SWISH, HEADER.replace("21", "24")), x=np.ones((2, 4), np.float32))
    assert ran(found) == {"swish"}


MAPPED = """
net (float[2, 4] x) => (float[2, 4] y)
{
    s = SplitToSequence (x)
    [map] m = SequenceMap <body = b (float[1, 4] v) => (float[1, 4] w) { w = Tanh (v) }> (s)
    y = ConcatFromSequence <axis = 0> (m)
}
"""


def test_an_operator_whose_parts_cannot_be_told_apart_is_named(tmp_path: Path) -> None:
    found = measured(loaded(tmp_path, MAPPED), x=np.ones((2, 4), np.float32))
    layers = by_name(found)
    assert layers["map"].measured_us == 0
    assert {"Loop", "SequenceAt", "Tanh"} <= {layer.op for layer in found.layers if not layer.info.onnx_nodes}
    assert any("no kernel for some operators and ran Identity, Loop" in text for text in found.warnings)


def test_a_model_that_the_runtime_cannot_load(tmp_path: Path) -> None:
    header = '<ir_version: 10, opset_import: ["": 21, "my.domain": 1]>'
    artifact = loaded(tmp_path, "net (float[2] x) => (float[2] y) { y = my.domain.Unheard (x) }", header)
    with pytest.raises(InvalidModelError, match="cannot load"):
        measured(artifact, x=np.ones(2, np.float32))


def test_inputs_that_do_not_fit(tmp_path: Path) -> None:
    artifact = loaded(tmp_path, CONV)
    with pytest.raises(UsageError):
        measured(artifact, x=np.ones((2, 4, 8, 8), np.float32))
    with pytest.raises(UsageError):
        measured(artifact, other=np.ones((2, 3, 8, 8), np.float32))
    with pytest.raises(InvalidModelError, match="fails on an input"):
        measured(artifact, x=np.ones((2, 3, 8, 8), np.float64))


def test_the_probe_gives_rates_of_this_machine() -> None:
    cpu = probe_cpu(1)
    figures: Mapping[str, float] = {
        "peak": cpu.tflops["fp32"],
        "memory": cpu.bandwidth_gbs,
        "caches": cpu.cache_bandwidth_gbs,
        "size": cpu.cache_bytes,
        "node": cpu.latency_us,
    }
    assert all(math.isfinite(value) and value > 0 for value in figures.values()), figures
    assert math.isfinite(cpu.profiled_us)
    assert cpu.cache_bandwidth_gbs >= cpu.bandwidth_gbs
    assert (cpu.threads, bool(cpu.name)) == (1, True)
    assert probe_cpu(1) is cpu


def test_every_node_with_known_work_gets_a_prediction(tmp_path: Path) -> None:
    found = measured(loaded(tmp_path, CONV), x=np.ones((2, 3, 8, 8), np.float32))
    layers = [Layer(layer.info.name, layer.op, layer.info.onnx_nodes, layer.work) for layer in found.layers]
    rows = predict_cpu(layers, probe_cpu(1))
    assert [row is None for row in rows] == [layer.op == "Constant" for layer in found.layers]
    assert all(row.predicted_us > 0 for row in rows if row is not None)
