"""One emulation with a switch for each node computes what the emulation of each plan does."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

sys.path.append(str(Path(__file__).parents[1] / "property"))
from random_networks import DIALECTS, random_network

from trtopt.accuracy.emulation import fp32_emulation
from trtopt.accuracy.switched import switched_emulation
from trtopt.graph.shapes import infer_shapes
from trtopt.precision.fp16.repair import widened
from trtopt.precision.fp16.to_fp32 import to_fp32
from trtopt.precision.plan import BF16, FP16, NarrowType, PrecisionPlan
from trtopt.precision.write import apply_plan
from trtopt.support.ort_session import OrtSession
from trtopt.support.precision import Precision

EDGES = {
    "fills": """(float[2,3] x) => (float[2,3] y) { s = Shape (x)
        f = ConstantOfShape <value: tensor = float[1] {-3.4e38}> (s) a = Add (x, x) y = Max (a, f) }""",
    "infinite fills": """(float[2,3] x) => (float[2,3] y, float[2,3] f) { s = Shape (x)
        f = ConstantOfShape <value: tensor = float[1] {-inf}> (s) y = Max (x, f) }""",
    "overflow": """(float[2,3] x) => (float[2,3] y, float[2,3] z) {
        a = Exp (x) b = Mul (a, a) y = Mul (b, b) z = Neg (y) }""",
    "several outputs": """(float[2,4] x) => (float[2,1] y, float[2,3] p, int64[2,1] i) { e = Exp (x)
        p, q = Split <axis = 1> (e, sizes) y, i = TopK (p, one) }""",
    "omitted output": """(float[3,2,4] x) => (float[1,2,3] h) {
        , h = LSTM <hidden_size = 3> (x, w, r) }""",
    "integers": """(int64[2,3] n) => (float[2,3] y, int64[2,3] m) {
        f = Cast <to = 1> (n) y = Sqrt (f) m = Cast <to = 7> (y) }""",
    "small constant": "(float[2,3] x) => (float[2,3] y) { a = Mul (x, x) b = Add (a, tiny) y = Reciprocal (b) }",
    "subgraph": """(float[2,3] x, bool c) => (float[2,3] y) { a = Exp (x)
        b = If (c) <then_branch = t () => (float[2,3] p) { p = Add (a, x) },
            else_branch = e () => (float[2,3] q) { q = Mul (a, a) }>
        y = Sin (b) }""",
    "half border": "(float16[2,3] x) => (float16[2,3] y) { a = Exp (x) y = Sin (a) }",
}
CONSTANTS = {
    **{"sizes": np.array([3, 1]), "one": np.array([1]), "tiny": np.float32(1e-12)},
    **{"w": np.linspace(-1, 1, 48, dtype=np.float32).reshape(1, 12, 4)},
    **{"r": np.linspace(-1, 1, 36, dtype=np.float32).reshape(1, 12, 3)},
}


def edge(name: str) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\ng {EDGES[name]}')
    read = {name for node in proto.graph.node for name in node.input}
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in CONSTANTS.items() if name in read
    )
    for index, node in enumerate(proto.graph.node):
        node.name = f"n{index}"
    return proto


def made(value: ir.Value) -> np.ndarray:
    shape = [dim if isinstance(dim, int) else 2 for dim in value.shape or ()]
    numbers = np.random.default_rng(0).standard_normal(shape) * (2 if value.dtype is ir.DataType.FLOAT else 1)
    assert value.dtype is not None
    return np.asarray(np.abs(numbers) if value.dtype.is_integer() else numbers, value.dtype.numpy())


def check(proto: onnx.ModelProto, narrow: NarrowType, bfloat: bool = False) -> None:
    base = to_fp32(infer_shapes(ir.from_proto(proto)))
    for index, node in enumerate(base.graph):
        node.name = node.name or f"n{index}"
    rng, names = random.Random(0), [str(node.name) for node in base.graph]
    plan = PrecisionPlan(Precision.FP16, narrow, bfloat=dict.fromkeys(rng.sample(names, len(names) // 3 * bfloat), ""))
    feeds = {str(value.name): made(value) for value in base.graph.inputs}
    emulation = switched_emulation(base, plan)
    assert emulation is not None and emulation.switches
    with OrtSession(emulation.model, keep_qdq=True) as session:
        for count in (0, 1, len(names) // 2, len(names)):
            chosen = widened(base, plan, dict.fromkeys(rng.sample(names, count), ""))
            switches = emulation.feeds(chosen)
            assert switches is not None
            found = session.run({**feeds, **switches})
            with OrtSession(fp32_emulation(apply_plan(base, chosen)), keep_qdq=True) as written:
                for expected, array in zip(written.run(feeds), found, strict=True):
                    assert expected.dtype == array.dtype
                    np.testing.assert_allclose(array, expected, rtol=2 * narrow.precision, atol=1e-5)


@pytest.mark.parametrize("narrow", [FP16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", EDGES)
def test_each_plan_of_a_written_network(name: str, narrow: NarrowType) -> None:
    check(edge(name), narrow)
    check(edge(name), FP16, bfloat=True)


@pytest.mark.parametrize("seed", [*range(12), *range(DIALECTS, DIALECTS + 4)])
def test_each_plan_of_a_random_network(seed: int) -> None:
    check(random_network(seed), FP16)


def test_other_plans_are_not_run_by_it() -> None:
    base = infer_shapes(ir.from_proto(edge("overflow")))
    emulation = switched_emulation(base, PrecisionPlan(Precision.FP16, FP16, wide={"n0": ""}))
    assert emulation is not None
    assert emulation.feeds(PrecisionPlan(Precision.FP16, FP16)) is None
    assert emulation.feeds(PrecisionPlan(Precision.BF16, BF16, wide={"n0": ""})) is None
    assert emulation.feeds(PrecisionPlan(Precision.FP16, FP16, wide={"n0": ""}, bfloat={"n1": ""})) is None
