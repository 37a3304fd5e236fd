"""What the real builder makes of BF16 beside FP16, and of FP32 between two Casts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from trtopt.engine.backend import TENSORRT_RTX
from trtopt.engine.build import Compiler
from trtopt.engine.request import BuildRequest
from trtopt.graph import edit
from trtopt.graph.shapes import infer_shapes, static_shapes
from trtopt.hardware.spec import find_gpu
from trtopt.judge.judges import judge_for
from trtopt.pipeline.plan_runner import repaired
from trtopt.precision.decide import decide, with_bfloat
from trtopt.precision.fp16.cast_to_half import cast_to_half
from trtopt.precision.fp16.hazards import wide_nodes
from trtopt.precision.observe.ranges import ValueRanges
from trtopt.precision.observe.statistics import StatsBuilder, TensorStats
from trtopt.precision.plan import BF16, FP16
from trtopt.precision.write import apply_plan
from trtopt.report.schema.layers import LayerInfo
from trtopt.source.save import save_model
from trtopt.support.ort_session import OrtSession
from trtopt.support.precision import Precision

pytest.importorskip("tensorrt_rtx")


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    with Compiler() as running:
        yield running


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def network(text: str, **weights: np.ndarray) -> ir.Model:
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\ng {text}')
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(a), name) for name, a in weights.items())
    for node in proto.graph.node:
        node.name = node.output[0]
    return infer_shapes(ir.from_proto(proto))


def kernels(model: ir.Model, compiler: Compiler, folder: Path) -> list[LayerInfo]:
    path = folder / "model.onnx"
    save_model(model, path)
    nodes = tuple(str(node.name) for node in edit.all_nodes(model.graph))
    request = BuildRequest(onnx=path, backend=TENSORRT_RTX, gpu=find_gpu("L4"), nodes=nodes)
    return [layer for layer in compiler.layers(request) if layer.is_kernel]


def weights_of(layers: Collection[LayerInfo], node: str, shape: tuple[int, ...]) -> str:
    """The type in which the kernel of ``node`` reads its weight."""
    return next(
        tensor.dtype
        for layer in layers
        if node in layer.onnx_nodes
        for tensor in layer.constants
        if tuple(tensor.shape) == shape
    )


BLOCK = """
    q{i} = Mul(h{i}, h{i}) m{i} = ReduceMean(q{i}, axis) v{i} = Add(m{i}, e) s{i} = Sqrt(v{i}) n{i} = Div(h{i}, s{i})
    k{i} = Mul(n{i}, g) u{i} = MatMul(k{i}, wu) a{i} = Relu(u{i}) d{i} = MatMul(a{i}, wd) h{j} = Add(h{i}, d{i})"""


def encoder() -> ir.Model:
    """Two feed-forward blocks as in T5, h0 [4, 64, 128]: RMS normalisation, ReLU of values up to 2e5, residual."""
    blocks = "".join(BLOCK.format(i=i, j=i + 1) for i in range(2))
    return network(
        f"(float[4,64,128] h0) => (float[4,64,128] y) {{ {blocks} y = Mul(h2, g) }}",
        axis=np.array([-1]),
        e=np.float32(1e-6),
        g=np.ones(128, np.float32),
        wu=normal(128, 512, scale=4e4 / 128**0.5),
        wd=normal(512, 128, seed=1, scale=2e-5 / 512**0.5),
    )


def spans_of(model: ir.Model, feeds: dict[str, np.ndarray]) -> tuple[dict[str, TensorStats], ValueRanges]:
    names = [str(value.name) for node in model.graph for value in node.outputs]
    with OrtSession(model, names) as session:
        found = dict(zip(names, session.run(feeds), strict=True)) | feeds
    stats = {}
    for name, array in found.items():
        builder = StatsBuilder(histogram=False)
        builder.update(array)
        stats[name] = builder.finish()
    return stats, ValueRanges(stats, static_shapes(model, {}))


def test_a_hot_feed_forward_block_runs_in_bf16_in_as_many_kernels_as_in_fp16(
    compiler: Compiler, tmp_path: Path
) -> None:
    base, feeds = encoder(), {"h0": normal(4, 64, 128)}
    stats, spans = spans_of(base, feeds)
    plan = decide(base, Precision.FP16, "tensorrt-rtx", stats, static_shapes(base, {}))
    found = repaired(base, with_bfloat(base, plan, spans), [feeds])
    assert set(found.plan.bfloat) == {"u0", "d0", "u1", "d1"} and not found.fallbacks
    mixed = apply_plan(base, found.plan)
    layers = kernels(mixed, compiler, tmp_path)
    assert len(layers) == len(kernels(cast_to_half(base, FP16, ()), compiler, tmp_path))
    for name, shape in [("u0", (128, 512)), ("d0", (512, 128))]:
        assert weights_of(layers, name, shape) == "BFloat16"
    with judge_for(TENSORRT_RTX, find_gpu("L4"), None) as judge:
        times = {
            label: judge.price(model, inner=False).total.predicted_us
            for label, model in {"bf16": mixed, "fp32": apply_plan(base, plan)}.items()
        }
    assert times["bf16"] < 0.7 * times["fp32"]


BETWEEN = """(float[64,128] x) => (float[64,128] y) {{
    a = MatMul(x, w0) b = Relu(a) c = MatMul(b, w) {behind} z = MatMul(d, w0) y = Relu(z) }}"""


@pytest.mark.parametrize("behind", ["d = Relu(c)", "d = Identity(c)", "d = Mul(c, k)"])
@pytest.mark.parametrize("scale", [1e5, 1e-8])
def test_weights_that_fp16_does_not_hold_are_fp32_in_the_engine_too(
    scale: float, behind: str, compiler: Compiler, tmp_path: Path
) -> None:
    """Kept in FP32 alone, the product would become an FP16 one with rounded weights: its readers are kept with it."""
    w0, k = normal(128, 128, scale=0.1), np.float32(0.5)
    base = network(BETWEEN.format(behind=behind), w0=w0, w=normal(128, 128, seed=1, scale=scale), k=k)
    stats = {name: _small() for name in ("x", "a", "b", "c", "d", "z", "y")}
    wide = wide_nodes(base, ValueRanges(stats, static_shapes(base, {})), FP16)
    layers = kernels(cast_to_half(base, FP16, wide), compiler, tmp_path)
    assert _of(layers, "c") == "Float"
    layers = kernels(cast_to_half(base, FP16, (), {"c"}), compiler, tmp_path)
    assert _of(layers, "c") == "BFloat16"


def _small() -> TensorStats:
    builder = StatsBuilder(histogram=False)
    builder.update(np.linspace(-1, 1, 64, dtype=np.float32))
    return builder.finish()


def test_the_compiler_rounds_the_weights_of_fp32_between_casts(compiler: Compiler, tmp_path: Path) -> None:
    """The reason for the rule above; when this fails, the rule may go."""
    base = network(BETWEEN.format(behind="d = Relu(c)"), w0=normal(128, 128), w=normal(128, 128, scale=1e5))
    assert _of(kernels(cast_to_half(base, FP16, {"c"}), compiler, tmp_path), "c") == "Half"


def _of(layers: Collection[LayerInfo], node: str) -> str:
    layer = next(layer for layer in layers if node in layer.onnx_nodes)
    return next(tensor.dtype for tensor in layer.constants if tuple(tensor.shape) == (128, 128))


BF16_OPS = {
    "convolution": "(float[1,8,8,8] x) => (float[1,8,6,6] y) { a = Relu(x) c = Conv(a, w) y = Relu(c) }",
    "pools": """(float[1,8,8,8] x) => (y) { a = MaxPool <kernel_shape = [2,2]> (x) b = AveragePool
        <kernel_shape = [2,2]> (a) c = GlobalAveragePool(b) y = Relu(c) }""",
    "activations": """(float[1,8,8,8] x) => (y) { a = Elu(x) b = HardSigmoid(a) c = Softplus(b) d = Selu(c)
        e = Softsign(d) y = Round(e) }""",
    "instance normalisation": "(float[1,8,8,8] x) => (y) { a = InstanceNormalization(x, g, g) y = Relu(a) }",
    "sines": "(float[1,8,8,8] x) => (y) { a = Sin(x) b = Cos(a) c = Atan(b) y = Tan(c) }",
    "refused by themselves": "(float[1,8,8,8] x) => (y) { a = ConvTranspose(x, w) b = HardSwish(a) y = Mish(b) }",
    "lstm": "(float[6,2,16] x) => (y) { s, h = LSTM <hidden_size = 16> (x, lw, lr) y = Relu(s) }",
    "rnn": "(float[6,2,16] x) => (y) { s, h = RNN <hidden_size = 16> (x, rw, rw) y = Relu(s) }",
    "gru": "(float[6,2,16] x) => (y) { s, h = GRU <hidden_size = 16> (x, gw, gw) y = Relu(s) }",
}


@pytest.mark.parametrize("name", BF16_OPS)
def test_what_opset_22_has_in_bf16_builds(name: str, compiler: Compiler, tmp_path: Path) -> None:
    weights = {
        **{"w": normal(8, 8, 3, 3), "g": np.ones(8, np.float32), "lw": normal(1, 64, 16), "lr": normal(1, 64, 16)},
        **{"gw": normal(1, 48, 16), "rw": normal(1, 16, 16)},
    }
    used = {key: array for key, array in weights.items() if f"{key})" in BF16_OPS[name] or f"{key}," in BF16_OPS[name]}
    base = network(BF16_OPS[name], **used)
    layers = kernels(cast_to_half(base, BF16, ()), compiler, tmp_path)
    assert layers
    if name == "convolution":
        assert weights_of(layers, "c", (8, 8, 3, 3)) == "BFloat16"
