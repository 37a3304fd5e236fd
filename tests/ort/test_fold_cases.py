"""What constants are folded to, on ONNX's own cases of one node: what ONNX Runtime computes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from trtopt.graph.fold import FoldError, can_fold, evaluate

ort = pytest.importorskip("onnxruntime")

LEAST = 500
"""Cases that are folded: 665 with onnx 1.19 and ONNX Runtime 1.23, 710 with 1.23 and 1.31."""


def computed(model: onnx.ModelProto, inputs: list[object]) -> list[object] | None:
    """What ONNX Runtime gives; None where it lacks the operator or a type of it."""
    feeds = dict(zip((item.name for item in model.graph.input), inputs, strict=True))
    try:
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        return list(session.run(None, feeds))
    except Exception:  # noqa: BLE001
        return None


def with_constants(model: onnx.ModelProto, inputs: list[object]) -> ir.Model:
    """The model with its inputs as initializers."""
    constants = [numpy_helper.from_array(a, i.name) for a, i in zip(inputs, model.graph.input, strict=True)]
    model.graph.initializer.extend(constants)
    del model.graph.input[:]
    return ir.from_proto(model)


def is_equal(found: object, expected: object) -> bool:
    one, other = np.asarray(found), np.asarray(expected)
    if one.shape != other.shape or other.dtype.kind not in "fiub":
        return one.shape == other.shape
    return np.allclose(one.astype(np.float64), other.astype(np.float64), rtol=1e-3, atol=1e-5, equal_nan=True)


@pytest.mark.filterwarnings("ignore")
def test_constants_are_folded_to_what_onnx_runtime_computes() -> None:
    from onnx.backend.test.case.node import collect_testcases

    folded, wrong = 0, []
    for case in collect_testcases(None):
        model, inputs = case.model, list(case.data_sets[0][0])
        if len(model.graph.node) != 1 or not all(isinstance(item, np.ndarray) for item in inputs):
            continue
        expected = computed(model, inputs)
        constant = with_constants(model, inputs)
        node = constant.graph[0]
        if expected is None or not can_fold(node):
            continue
        try:
            found = evaluate(node, constant.opset_imports[""])
        except FoldError:
            continue
        folded += 1
        if not all(map(is_equal, found, expected)):
            wrong.append(case.name)
    assert wrong == []
    assert folded > LEAST
