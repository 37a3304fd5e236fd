"""A model's own Q/DQ against the same model without, by the performance model: what stays, what goes, what is said."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from trtopt.config import BuildConfig
from trtopt.engine.backend import TENSORRT
from trtopt.engine.request import ShapeProfile
from trtopt.events import ignore
from trtopt.graph import edit
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.shapes import infer_in_place
from trtopt.hardware.spec import find_gpu
from trtopt.judge.judges import judge_for
from trtopt.judge.protocol import Priced
from trtopt.judge.target import BuildTarget
from trtopt.pipeline.guard import OwnQdq, own_qdq
from trtopt.precision.observe.samples import open_samples
from trtopt.precision.observe.trt_cache import imports
from trtopt.precision.qdq.canonicalize import existing_nodes
from trtopt.report.schema.steps import Cost
from trtopt.rewrite.driver import Rewritten
from trtopt.support.clock import Clock
from trtopt.support.precision import Precision


def net(batch: str, size: int) -> ir.Model:
    """x [batch, size] -> a product of INT8."""
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
    g (float[{batch}, {size}] x) => (float[{batch}, {size}] y)
    <float s = {{0.05}}, float t = {{0.01}}, int8 z = {{0}}, int8[{size}, {size}] w = {{1}}> {{
        q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z)
        v = DequantizeLinear (w, t, z) y = MatMul (d, v)
    }}"""
    found = ir.from_onnx_text(text.replace(f", int8[{size}, {size}] w = {{1}}", ""))
    weight = edit.add_initializer(found.graph, "w", np.ones((size, size), np.int8))
    for node in found.graph:
        node.name = node.outputs[0].name
        if node.name == "v":
            node.replace_input_with(0, weight)
    infer_in_place(found)
    return found


class SlowQuantizers:
    """A judge of a target on which a quantizer is a kernel of its own."""

    name = "slow-quantizers"

    def price(self, model: ir.Model, *, inner: bool) -> Priced:
        kernels = sum(node.op_type in ("MatMul", "QuantizeLinear") for node in model.graph)
        return Priced(Cost(kernels, 0, 0, 5.0 * kernels), ())


def judged(
    model: ir.Model,
    precision: str | None,
    shapes: Sequence[int],
    judge: SlowQuantizers | None = None,
    **options: object,
) -> tuple[OwnQdq, tuple[str, ...]]:
    clock = Clock(ignore)
    target = BuildTarget(TENSORRT, find_gpu("L4"), (ShapeProfile({"x": (tuple(shapes),) * 3}),) if shapes else ())
    artifact = ModelArtifact(model, Path("m.onnx"), "0")
    config = BuildConfig().with_options(options)
    asked = None if precision is None else Precision(precision)
    open_judge = partial(judge_for, TENSORRT, target.gpu)
    if judge is not None:
        open_judge = lambda *_, **__: nullcontext(judge)  # noqa: E731
    return own_qdq(artifact, Rewritten, target, asked, config, clock, open_judge), tuple(clock.warnings)


def test_what_is_taken_out_leaves_its_ranges() -> None:
    found, said = judged(net("8", 64), Precision.INT8, [8, 64], SlowQuantizers())
    assert found.guard == () and len(said) == 1 and "is taken out" in said[0]
    assert found.ranges == {"x": pytest.approx(0.05 * 127)}
    base = found.rewritten.artifact.model
    assert not existing_nodes(base) and found.rewritten.artifact.steps[-1].details
    samples = open_samples("synthetic", [], count=1)
    assert imports(base, None, ("x",), samples, found.ranges).amax == found.ranges


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_what_pays_is_kept_and_its_price_recorded(precision: str) -> None:
    found, said = judged(net("4096", 4096), precision, [4096, 4096])
    assert said == () and existing_nodes(found.rewritten.artifact.model) == {"y"}
    (record,) = found.guard
    assert record.kept and record.nodes == ("y",) and record.dtype == "int8"
    assert found.sixteen_bit is not None and record.before_us == found.sixteen_bit.predicted_us
    assert record.after_us is not None and record.after_us < record.before_us


def test_bf16_is_no_fp16() -> None:
    found, _ = judged(net("4096", 4096), Precision.BF16, [4096, 4096])
    assert found.guard and found.sixteen_bit is None


def test_what_nobody_can_judge_is_kept() -> None:
    found, said = judged(net("n", 64), Precision.INT8, [])
    assert "nobody can judge it" in said[0] and found.guard == ()
    assert existing_nodes(found.rewritten.artifact.model) == {"y"}


def test_a_model_without_qdq_is_rewritten_once() -> None:
    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[1] x) => (float[1] y) { y = Relu (x) }'
    )
    assert judged(model, Precision.INT8, [1]) == (OwnQdq(Rewritten(ModelArtifact(model, Path("m.onnx"), "0"))), ())
