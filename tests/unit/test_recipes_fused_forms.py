"""The forms of Softplus and Mish that fuse, evaluated step by step in each type."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from trtopt.graph.edit import constant_of
from trtopt.rewrite.driver import run
from trtopt.source.onnx_file import load

STEPS: dict[str, Callable[..., np.ndarray]] = {
    "Abs": np.abs,
    "Add": np.add,
    "Div": np.divide,
    "Exp": np.exp,
    "Min": np.minimum,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Relu": lambda x: np.maximum(x, x.dtype.type(0)),
}


def rewritten(op_type: str, folder: Path) -> ir.Model:
    text = f'<ir_version: 8, opset_import: ["" : 18]> g (float[N] x) => (float[N] y) {{ y = {op_type}(x) }}'
    onnx.save(onnx.parser.parse_model(text), folder / "m.onnx")
    model = run(load(folder / "m.onnx"), recipes=op_type.lower()).artifact.model
    assert op_type not in {node.op_type for node in model.graph}
    return model


def evaluated(model: ir.Model, x: np.ndarray) -> tuple[np.ndarray, float]:
    """The result with every value rounded to the type of ``x``, and the largest magnitude on the way."""
    values: dict[ir.Value, np.ndarray] = {model.graph.inputs[0]: x}
    largest = 0.0
    for node in model.graph:
        arrays = []
        for value in node.inputs:
            assert value is not None
            constant = constant_of(value)
            arrays.append(values[value] if constant is None else constant.astype(x.dtype))
        with np.errstate(under="ignore"):
            result = STEPS[node.op_type](*arrays)
        assert result.dtype == x.dtype
        values[node.outputs[0]] = result
        largest = max(largest, float(np.abs(result.astype(np.float64)).max()))
    return values[model.graph.outputs[0]], largest


def exact(op_type: str, x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    softplus = np.logaddexp(0, wide)
    return softplus if op_type == "Softplus" else wide * np.tanh(softplus)


@pytest.mark.parametrize("op_type", ["Softplus", "Mish"])
def test_small_values_keep_their_precision(op_type: str, tmp_path: Path) -> None:
    model = rewritten(op_type, tmp_path)
    for dtype, low, bound in ((np.float32, -80.0, 1e-6), (np.float16, -9.0, 3e-3)):
        x = np.linspace(low, 90, 100_001).astype(dtype)
        x = x[np.abs(x) > 1e-2]
        result, _ = evaluated(model, x)
        wanted = exact(op_type, x)
        assert float(np.abs(result / wanted - 1).max()) < bound


@pytest.mark.parametrize("op_type", ["Softplus", "Mish"])
def test_every_finite_half_gives_a_finite_result_close_to_the_function(op_type: str, tmp_path: Path) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    x = every[np.isfinite(every)]
    result, largest = evaluated(rewritten(op_type, tmp_path), x)
    wanted = exact(op_type, x)
    assert math.isfinite(largest) and largest <= 65504
    assert bool((np.abs(result - wanted) <= 3e-3 * np.abs(wanted) + 1e-6).all())


def test_infinities_stay(tmp_path: Path) -> None:
    x = np.array([-np.inf, np.inf], np.float32)
    result, _ = evaluated(rewritten("Softplus", tmp_path), x)
    assert result.tolist() == [0.0, math.inf]
    result, _ = evaluated(rewritten("Mish", tmp_path), x[1:])
    assert result.tolist() == [math.inf]
