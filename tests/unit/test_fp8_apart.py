"""FP8 apart from INT8 and together again: models of others keep what they compute, and their types."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import TensorProto

from trtopt.graph.edit import constant_of
from trtopt.precision.qdq.apart import apart, fp8_apart, together
from trtopt.source.onnx_file import load

PRODUCT = "q = QuantizeLinear(READ, s, z) d = DequantizeLinear(q, s, z) v = DequantizeLinear(w, s) y = MatMul(LEFT, v)"


def read(
    body: str, folder: Path, *, scale: float = 0.5, kinds: tuple[str, str] = ("FLOAT16", "FLOAT8E4M3FN"), io: str = ""
) -> ir.Model:
    kind, narrow = (getattr(TensorProto, name) for name in kinds)
    text = f"g ({io or 'float16[8, 8] x) => (float16[8, 8] y'}) {{ {body} }}"
    model = onnx.parser.parse_model(f'<ir_version: 11, opset_import: ["" : 23]> {text}')
    model.graph.initializer.extend(
        [
            onnx.helper.make_tensor("s", kind, [], [scale]),
            onnx.helper.make_tensor("z", narrow, [], [0.0]),
            onnx.helper.make_tensor("w", narrow, [8, 8], [1.0] * 64),
            onnx.helper.make_tensor("half", kind, [], [0.5]),
            onnx.helper.make_tensor("half4", kind, [1, 1, 1, 1], [0.5]),
            onnx.helper.make_tensor("low", kind, [], [-65504.0]),
            onnx.helper.make_tensor("low4", kind, [1, 1, 1, 1], [-65504.0]),
            onnx.helper.make_tensor("one", TensorProto.INT64, [1], [1]),
        ]
    )
    onnx.save(model, folder / "given.onnx")
    return load(folder / "given.onnx").model


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize(
    ("before", "left", "scale", "outputs"),
    [
        pytest.param("n = Shape(x) i = Max(n, one) r = Expand(x, i)", "d", 0.5, "", id="Max of integers"),
        pytest.param("r = Max(x, low4)", "d", 0.5, "", id="Max that adds axes"),
        pytest.param("r = Relu(x)", "Mul(d, half4)", 0.5, "", id="Mul that adds axes"),
        pytest.param("r = Relu(x)", "Mul(d, half)", 0.5, ", float16[8, 8] d", id="of an output"),
        pytest.param("r = Relu(x)", "Mul(d, half)", 2.0**-24, "", id="scale too small for its half"),
    ],
)
def test_others_are_left_as_they_are(before: str, left: str, scale: float, outputs: str, tmp_path: Path) -> None:
    product = PRODUCT.replace("READ", "r").replace("v = ", f"m = {left} v = ").replace("LEFT", "m")
    if left == "d":
        product = PRODUCT.replace("READ", "r").replace("LEFT", "d")
    rank4 = "float16[1, 1, 8, 8] y" if "4" in before + left else "float16[M, N] y"
    model = read(f"{before} {product}", tmp_path, scale=scale, io=f"float16[8, 8] x) => ({rank4}{outputs}")
    given = operators(model)
    together(model)
    assert operators(model) == given
    (maker,) = (node for node in model.graph if node.outputs[0].name == "d")
    assert maker.inputs[1] is not None
    assert maker.inputs[1].name == "s"


def test_activations_of_bf16_are_kept(tmp_path: Path) -> None:
    body = "r = Relu(x) " + PRODUCT.replace("READ", "r").replace("LEFT", "d")
    model = read(body, tmp_path, kinds=("BFLOAT16", "FLOAT8E4M3FN"), io="bfloat16[8, 8] x) => (bfloat16[8, 8] y")
    made = apart(model, "tensorrt-rtx")
    assert operators(made) == "Relu Max QuantizeLinear DequantizeLinear Mul DequantizeLinear MatMul".split()
    together(made)
    assert operators(made) == operators(model)


def test_no_constant_is_left_over(tmp_path: Path) -> None:
    model = read("r = Relu(x) " + PRODUCT.replace("READ", "r").replace("LEFT", "d"), tmp_path)
    made = apart(model, "tensorrt-rtx")
    for write in (together, fp8_apart):
        write(made)
        names = {name for name, value in made.graph.initializers.items() if not value.uses()}
        assert names <= {name for name, value in model.graph.initializers.items() if not value.uses()}


def test_products_keep_the_type_that_they_read(tmp_path: Path) -> None:
    """DequantizeLinear names another type than its scale's."""
    body = (
        PRODUCT.replace("READ", "x")
        .replace("LEFT", "d")
        .replace("DequantizeLinear(", "DequantizeLinear<output_dtype = 1>(")
    )
    model = read(body, tmp_path, io="float16[8, 8] x) => (float[8, 8] y")
    made = apart(model, "tensorrt-rtx")
    (product,) = (node for node in made.graph if node.op_type == "Mul")
    maker, factor = product.inputs[0].producer(), product.inputs[1]  # type: ignore[union-attr]
    assert maker is not None
    assert factor is not None
    assert factor.dtype is ir.DataType.FLOAT
    assert maker.attributes["output_dtype"].as_int() == int(ir.DataType.FLOAT)


@pytest.mark.parametrize(
    ("narrow", "largest", "scale"),
    [
        *(("FLOAT8E4M3FN", 448.0, scale) for scale in (1e-3, 70.0, 80.0)),
        *(("FLOAT8E5M2", 57344.0, s) for s in (0.5, 1)),
    ],
)
def test_halves_do_not_overflow(narrow: str, largest: float, scale: float, tmp_path: Path) -> None:
    model = read(PRODUCT.replace("READ", "x").replace("LEFT", "d"), tmp_path, scale=scale, kinds=("FLOAT16", narrow))
    made = apart(model, "tensorrt-rtx")
    (product,) = (node for node in made.graph if node.op_type == "Mul")
    maker = product.inputs[0].producer()  # type: ignore[union-attr]
    assert maker is not None
    stored, factor = (float(constant_of(node.inputs[1])) for node in (maker, product))  # type: ignore[arg-type]
    assert stored * largest <= np.finfo(np.float16).max
    assert stored * factor == np.float16(scale)
