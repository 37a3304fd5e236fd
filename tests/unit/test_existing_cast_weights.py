"""Integer weights behind a Cast, as torchao's exports have them, in the form the compilers read."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from trtopt.precision.qdq.existing import canonicalize_qdq
from trtopt.precision.qdq.wide_weights import with_wide_weights
from trtopt.source.onnx_file import load

RNG = np.random.default_rng(0)
DEPTH, COLUMNS, BLOCK = 64, 24, 32
X = RNG.standard_normal((3, DEPTH)).astype(np.float32)

BEHIND = "f = Cast <to = 1> (w) m = MatMul(x, f) y = Mul(m, s)"
GROUPS = (
    "r = Reshape(w, three) f = Cast <to = 1> (r) d = Sub(f, z) g = Mul(d, s) b = Reshape(g, two) "
    "t = Transpose <perm = [1, 0]> (b) y = MatMul(x, t)"
)
BEFORE = "f = Cast <to = 1> (w) g = Mul(s, f) y = MatMul(x, g)"


def net(path: Path, body: str, **tensors: np.ndarray) -> ir.Model:
    text = f"g (float[3, {DEPTH}] x) => (float[3, {COLUMNS}] y) {{ {body} }}"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
    for name, array in tensors.items():
        tensor = ir.to_proto(ir.Tensor(array, name=name))
        assert isinstance(tensor, onnx.TensorProto)
        model.graph.initializer.append(tensor)
    onnx.save(model, path)
    return load(path).model


def run(model: ir.Model) -> np.ndarray:
    (y,) = ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": X})
    return np.asarray(y)


def groups(low: int, high: int, zero: float = 0.0) -> dict[str, np.ndarray]:
    shape = (COLUMNS, DEPTH // BLOCK, 1)
    return {
        "w": RNG.integers(low, high, (COLUMNS, DEPTH)).astype(np.int8),
        "s": RNG.uniform(0.5, 1, shape).astype(np.float32),
        "z": np.full(shape, zero, np.float32),
        "three": np.array([COLUMNS, DEPTH // BLOCK, BLOCK]),
        "two": np.array([COLUMNS, DEPTH]),
    }


PER_COLUMN = {
    "w": RNG.integers(-128, 128, (DEPTH, COLUMNS)).astype(np.int8),
    "s": RNG.uniform(0.5, 1, (1, COLUMNS)).astype(np.float32),
}


@pytest.mark.parametrize(
    ("body", "tensors", "dtype", "block"),
    [
        (BEHIND, PER_COLUMN, ir.DataType.INT8, 0),
        (BEFORE, PER_COLUMN, ir.DataType.INT8, 0),
        (GROUPS, groups(-8, 8), ir.DataType.INT4, BLOCK),
        (GROUPS, groups(0, 16, zero=8), ir.DataType.INT4, BLOCK),
        (GROUPS, groups(-100, 100), ir.DataType.INT8, BLOCK),
    ],
)
def test_the_product_reads_a_dequantized_weight_of_the_same_values(
    body: str, tensors: dict[str, np.ndarray], dtype: ir.DataType, block: int, tmp_path: Path
) -> None:
    before = net(tmp_path / "net.onnx", body, **tensors)
    found = canonicalize_qdq(before, "tensorrt-rtx")
    assert found is not None
    assert [node.op_type for node in found.model.graph] == ["DequantizeLinear", "MatMul"]
    node = found.model.graph[0]
    assert node.inputs[0] is not None and node.inputs[0].dtype is dtype
    assert node.attributes.get_int("block_size", 0) == block
    assert np.allclose(run(found.model), run(before), rtol=1e-5, atol=1e-3)
    wide, readers = with_wide_weights(found.model)
    assert [node.op_type for node in wide.graph] == ["MatMul"] and len(readers) == 1
    assert np.allclose(run(wide), run(before), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    "tensors",
    [
        {**PER_COLUMN, "s": -PER_COLUMN["s"]},
        {**PER_COLUMN, "s": RNG.uniform(0.5, 1, (DEPTH, COLUMNS)).astype(np.float32)},
        {**PER_COLUMN, "w": PER_COLUMN["w"].astype(ml_dtypes.float8_e4m3fn)},
    ],
    ids=["negative scales", "a scale per weight", "fp8"],
)
def test_what_has_no_such_form_is_stored_wide(tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
    before = net(tmp_path / "net.onnx", BEFORE, **tensors)
    found = canonicalize_qdq(before, "tensorrt-rtx")
    assert found is not None and [node.op_type for node in found.model.graph] == ["MatMul"]
    exact = tensors["w"].astype(np.float32) * tensors["s"]
    assert np.allclose(run(found.model), X @ exact, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("body", ["f = Cast <to = 1> (w) g = Tanh(f) y = MatMul(x, g)", "y = MatMul(x, w)"])
def test_other_weights_are_left_alone(body: str, tmp_path: Path) -> None:
    weight = PER_COLUMN["w"] if "Cast" in body else PER_COLUMN["w"].astype(np.float32)
    assert canonicalize_qdq(net(tmp_path / "net.onnx", body, w=weight), "tensorrt-rtx") is None
