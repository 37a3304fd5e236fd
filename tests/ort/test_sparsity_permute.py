"""Permuted channels, run: the network computes what it did, and masks keep more of every layer group that moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from trtopt.graph import invariants
from trtopt.graph.shapes import infer_shapes
from trtopt.precision.fp16.to_fp32 import widen
from trtopt.rewrite.driver import run
from trtopt.source.onnx_file import load
from trtopt.source.pytorch import export
from trtopt.sparsity.layers import candidates
from trtopt.sparsity.permute import Permuted, permute
from trtopt.support.ort_session import OrtSession

MODELS = Path(__file__).resolve().parents[3] / "shared" / "models"
BOUND = 1e-5
"""Largest difference of an output over its largest element: FP32 sums in another order."""

IMAGE = "float[N, 8, 8, 8] x"
TOKENS = "int64[N, S] x"
SIZES = {"N": 2, "S": 5, "batch": 2, "seq": 16, "sequence": 576}


def model_of(
    text: str, weights: dict[str, tuple[int, ...]], source: str = IMAGE, **constants: int | list[int]
) -> ir.Model:
    """Random weights whose channels are of different magnitude along every axis."""
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g ({source}) => (float[A, B] y) {{ {text} }}'
    )
    rng = np.random.default_rng(1)
    for name, shape in weights.items():
        array = rng.standard_normal(shape) / np.sqrt(max(1, np.prod(shape[1:])))
        for axis in range(min(2, len(shape))):
            array *= np.exp(rng.standard_normal([size if a == axis else 1 for a, size in enumerate(shape)]) / 2)
        array = np.abs(array) + 0.1 if name.startswith("positive") else array
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    for name, values in constants.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(values, np.int64), name))
    model = infer_shapes(ir.from_proto(proto))
    for node in model.graph:
        node.name = str(node.outputs[0].name)
    return model


def feeds_of(model: ir.Model) -> dict[str, np.ndarray]:
    """Integers are 0 or 1: token numbers, types and masks alike."""
    rng = np.random.default_rng(0)
    feeds: dict[str, np.ndarray] = {}
    for value in model.graph.inputs:
        shape = [dim if isinstance(dim, int) else SIZES[str(dim.value)] for dim in value.shape or ()]
        dtype: Any = value.dtype.numpy() if value.dtype is not None else np.float32
        integers = np.issubdtype(dtype, np.integer)
        feeds[str(value.name)] = (rng.integers(0, 2, shape) if integers else rng.standard_normal(shape)).astype(dtype)
    return feeds


def check(model: ir.Model, **options: Any) -> Permuted:
    """Permute all that can be pruned; the function is the same, and what moved keeps more."""
    names = [name for layer in candidates(model).layers for name in layer.nodes]
    result = permute(model, names, **options)
    invariants.check(result.model)
    feeds = feeds_of(model)
    with OrtSession(model, fuse=False) as before, OrtSession(result.model, fuse=False) as after:
        for one, other in zip(before.run(feeds), after.run(feeds), strict=True):
            assert float(np.abs(one - other).max()) <= BOUND * float(np.abs(one).max())
    assert all(group.after > group.before for group in result.groups)
    assert [layer.node for layer in result.layers] == names
    return result


NETWORKS: dict[str, tuple[str, dict[str, tuple[int, ...]], dict[str, list[int]], str]] = {
    # name: nodes, weights, constants, layers whose input channels move
    "bottlenecks": (
        """
        s = Conv(x, w0, b0) r = Relu(s)
        a1 = Conv(r, w1) n1 = BatchNormalization(a1, g1, h1, m1, positive1) c1 = Relu(n1)
        a2 = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (c1, w2, b2) c2 = Relu(a2) a3 = Conv(c2, w3)
        d = Conv <strides = [2, 2]> (r, w4, b4) e = Add(a3, d) f = Relu(e)
        a5 = Conv(f, w5) c5 = LeakyRelu(a5) a6 = Conv <pads = [1, 1, 1, 1]> (c5, w6) k = Add(a6, f)
        p = GlobalAveragePool(k) q = Flatten(p) y = Gemm <transB = 1> (q, w7, b7)
        """,
        {
            "w0": (16, 8, 1, 1), "b0": (16,), "w1": (16, 16, 1, 1), "g1": (16,), "h1": (16,), "m1": (16,),
            "positive1": (16,), "w2": (16, 16, 3, 3), "b2": (16,), "w3": (32, 16, 1, 1), "w4": (32, 16, 1, 1),
            "b4": (32,), "w5": (16, 32, 1, 1), "w6": (32, 16, 3, 3), "w7": (5, 32), "b7": (5,),
        },
        {}, "a1 a2 a3 d a5 a6 y",
    ),
    "inverted residuals with squeeze and excite": (
        """
        s = Conv(x, w0) a = Conv(s, w1, b1) b = HardSwish(a) c = Conv <group = 24, pads = [1, 1, 1, 1]> (b, w2, b2)
        p = ReduceMean <axes = [2, 3]> (c) p1 = Conv(p, w3, b3) p2 = Relu(p1) p3 = Conv(p2, w4, b4)
        p4 = HardSigmoid(p3) m = Mul(c, p4) d = Conv(m, w5) e = Add(s, d) n = PRelu(e, slope) z = Mul(n, gain)
        f = Conv(z, w6) q = GlobalAveragePool(f) y = Flatten(q)
        """,
        {
            "w0": (16, 8, 1, 1), "w1": (24, 16, 1, 1), "b1": (24,), "w2": (24, 1, 3, 3), "b2": (24,),
            "w3": (8, 24, 1, 1), "b3": (8,), "w4": (24, 8, 1, 1), "b4": (24,), "w5": (16, 24, 1, 1),
            "slope": (16, 1, 1), "gain": (1, 16, 1, 1), "w6": (6, 16, 1, 1),
        },
        {}, "a p1 p3 d f",
    ),
    "a concatenation, and a split whose halves meet": (
        """
        a = Conv(x, w0) b = Conv(x, w1) c = Concat <axis = 1> (a, b) t = Tanh(c) d = Conv(t, w2)
        d1, d2 = Split <axis = 1> (d) g = Sigmoid(d1) h = Mul(g, d2) e = Conv(h, w3) i = Conv(b, w4) j = Add(e, i)
        l = GlobalMaxPool(j) y = Flatten(l)
        """,
        {
            "w0": (12, 8, 1, 1), "w1": (16, 8, 1, 1), "w2": (32, 28, 1, 1), "w3": (6, 16, 1, 1), "w4": (6, 16, 1, 1),
        },
        {}, "d e i",
    ),
    "grouped and transposed convolutions": (
        """
        a = Conv(x, w0) b = Conv <group = 2, pads = [1, 1, 1, 1]> (a, w1, b1) c = Relu(b)
        d = ConvTranspose <group = 2, strides = [2, 2]> (c, w2) e = Conv(d, w3) p = GlobalAveragePool(e) y = Flatten(p)
        """,
        {"w0": (32, 8, 1, 1), "w1": (32, 16, 3, 3), "b1": (32,), "w2": (32, 8, 2, 2), "w3": (6, 16, 1, 1)},
        {}, "b e",
    ),
    "channels of zeros beside a shortcut": (
        """
        a = Conv(x, w0) b = Conv(a, w1) c = Relu(b) d = Conv(c, w2) e = Pad(a, pads) f = Add(d, e) h = Relu(f)
        k = Conv(h, w3) p = GlobalAveragePool(k) y = Flatten(p)
        """,
        {"w0": (16, 8, 1, 1), "w1": (16, 16, 1, 1), "w2": (32, 16, 1, 1), "w3": (6, 32, 1, 1)},
        {"pads": [0, 8, 0, 0, 0, 8, 0, 0]}, "b d k",
    ),
    "halves that are rotated into each other": (
        """
        a = Conv(x, w0) a1, a2 = Split <axis = 1> (a) n = Neg(a2) h = Concat <axis = 1> (n, a1) m = Mul(h, sine)
        k = Mul(a, cosine) r = Add(m, k) b = Conv(r, w1) p = GlobalAveragePool(b) y = Flatten(p)
        """,
        {"w0": (32, 8, 1, 1), "sine": (32, 1, 1), "cosine": (32, 1, 1), "w1": (6, 32, 1, 1)},
        {}, "b",
    ),
    "flattened maps": (
        """
        a = Conv(x, w0) b = MaxPool <kernel_shape = [4, 4], strides = [3, 3]> (a) c = Conv(b, w1)
        d = Flatten(c) e = Gemm(d, w2, b2) f = Softmax(e) y = MatMul(f, w3)
        """,
        {"w0": (16, 8, 1, 1), "w1": (12, 16, 1, 1), "w2": (48, 24), "b2": (24,), "w3": (24, 6)},
        {}, "c y",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_the_function_stays(name: str) -> None:
    text, weights, constants, moved = NETWORKS[name]
    result = check(model_of(text, weights, **constants))
    changed = {layer.node for layer in result.layers if layer.after != layer.before}
    assert changed == set(moved.split()), result.refused


def test_a_hidden_stream_moves_with_its_tables_and_normalizations() -> None:
    text = """
        t = Gather(table, x) o = Slice(position, zero, five, one)
        v = Add(t, o) n = LayerNormalization(v, scale, bias) k = Expand(class, sizes) h = Concat <axis = 1> (k, n)
        a = MatMul(h, w1) a1 = Add(a, b1) g = Erf(a1) m = MatMul(g, w2) r = Add(h, m)
        u = ReduceMean <axes = [-1]> (r) d = Sub(r, u) s = ReduceL2 <axes = [-1]> (d) q = Div(d, s) z = Mul(q, scale2)
        c = Gather <axis = 1> (z, first) y = Gemm(c, w3, b3)
    """
    weights = {
        "table": (9, 32), "position": (1, 40, 32), "scale": (32,), "bias": (32,), "class": (1, 1, 32), "w1": (32, 48),
        "b1": (48,), "w2": (48, 32), "scale2": (32,), "w3": (32, 7), "b3": (7,),
    }  # fmt: skip
    result = check(model_of(text, weights, TOKENS, zero=[0], one=[1], five=[5], first=0, sizes=[2, 1, 32]))
    assert {layer.node for layer in result.layers if layer.after > layer.before} == {"a", "m", "y"}, result.refused


def test_weights_that_blocks_share_stay_shared() -> None:
    block = "a{0} = Conv(s{1}, u, c) r{0} = Relu(a{0}) b{0} = Conv(r{0}, v) s{0} = Add(s{1}, b{0}) "
    text = "s0 = Conv(x, w0) " + "".join(block.format(i, i - 1) for i in (1, 2, 3))
    text += "p = GlobalAveragePool(s3) q = Conv(p, w1) y = Flatten(q)"
    weights = {"w0": (16, 8, 1, 1), "u": (24, 16, 1, 1), "c": (24,), "v": (16, 24, 1, 1), "w1": (6, 16, 1, 1)}
    result = check(model_of(text, weights))
    assert sorted(group.channels for group in result.groups) == [16, 24]
    (inner,) = [group for group in result.groups if group.channels == 24]
    assert inner.nodes == ("b1", "b2", "b3")
    assert {layer.node for layer in result.layers if layer.after > layer.before} == {"a1", "a2", "a3", "b1", "b2",
                                                                                   "b3", "q"}  # fmt: skip
    read = {str(node.name): node.inputs[1] for node in result.model.graph if node.op_type == "Conv"}
    assert read["a1"] is read["a2"] is read["a3"] and read["b1"] is read["b2"] is read["b3"]


def test_a_transformer_from_torch(tmp_path: Path) -> None:
    """Heads block the way of q, k, v and the projection; the hidden stream and the inner layers move."""
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Linear(12, 32)
            self.block = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")
            self.head = torch.nn.Linear(32, 5)

        def forward(self, x: Any) -> Any:
            return self.head(self.block(self.embed(x)).mean(1))

    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(torch.exp(torch.randn(parameter.shape[-1]) / 2))
    export(net, tmp_path / "net.onnx", (torch.randn(2, 6, 12),), dynamic=["x:0=N"])
    result = check(run(load(tmp_path / "net.onnx")).artifact.model)
    assert sorted(group.channels for group in result.groups) == [32, 64], result.refused


REAL = {
    # model: layers whose masks keep more, at least, once it is cleaned
    "resnet20_cifar10/model.onnx": 19,
    "squeezenet11_fp16/model_fp16.onnx": 25,
    "fastestdet_coco/model.onnx": 28,
    "dscnn_kws/model.onnx": 5,
    "crepe_tiny/model.onnx": 5,
    "mnist_cntk/model.onnx": 1,
}


@pytest.mark.shared
@pytest.mark.parametrize("name", REAL)
def test_real_models(name: str) -> None:
    path = MODELS / name
    if not path.exists():
        pytest.skip(f"{path} is not there")
    result = check(widen(run(load(path), strict=True).artifact.model))
    assert sum(layer.after > layer.before for layer in result.layers) >= REAL[name]
