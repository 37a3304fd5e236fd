"""The error of a plan at the outputs, by which improvements are kept."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from trtopt.accuracy.compare import decibels
from trtopt.graph import edit
from trtopt.graph.artifact import InputSpec
from trtopt.graph.shapes import infer_shapes
from trtopt.pipeline.improve import OutputErrorMeter
from trtopt.precision.observe.samples import open_samples
from trtopt.precision.plan import PrecisionPlan, QuantizedOp
from trtopt.support.precision import Precision

RNG = np.random.default_rng(0)
IMAGES = (InputSpec("x", np.dtype(np.float32), (4, 8, 6, 6)),)


def network(tail: str, shape: str) -> ir.Model:
    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["" : 21]>\n'
        f"g (float[4,8,6,6] x, float[10,8,3,3] w) => (float{shape} y)"
        f"{{ a = Conv(x, w) p = GlobalAveragePool(a) {tail} }}"
    )
    model.graph.inputs.pop()
    weight = edit.add_initializer(model.graph, "weight", RNG.standard_normal((10, 8, 3, 3)).astype(np.float32))
    model.graph.node(0).replace_input_with(1, weight)
    model = infer_shapes(model)
    for node in model.graph:
        node.name = str(node.outputs[0].name)
    return model


@pytest.mark.parametrize(("tail", "shape"), [("y = Identity(p)", "[4,10,1,1]"), ("y = Flatten(p)", "[4,10]")])
def test_scores_are_compared_along_their_classes_wherever_unit_axes_are(tail: str, shape: str) -> None:
    model = network(tail, shape)
    samples = open_samples({"x": RNG.standard_normal((4, 8, 6, 6)).astype(np.float32)}, IMAGES)
    plan = PrecisionPlan(Precision.INT8, quantized=(QuantizedOp("a", "x", 4.0, None, "max"),))
    judge = OutputErrorMeter(model, samples)
    assert judge.of(model, PrecisionPlan(Precision.INT8)) == 0
    assert 25 < decibels(judge.of(model, plan)) < 50
