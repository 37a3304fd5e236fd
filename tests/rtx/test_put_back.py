"""FP32 in a 16-bit build: enough for the outputs, where the real compiler finds it cheapest, and said."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import trtopt
from trtopt.precision.fp16.repair import repair
from trtopt.report.schema.build import BuildReport
from trtopt.source.save import save_model

pytest.importorskip("tensorrt_rtx")


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def saved(path: Path, text: str, **weights: np.ndarray) -> Path:
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\ng {text}')
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(a), name) for name, a in weights.items())
    for node in proto.graph.node:
        node.name = node.output[0]
    save_model(ir.from_proto(proto), path)
    return path


def built(model: Path, *, engine: bool = True, precision: str = "fp16", **options: object) -> BuildReport:
    run = trtopt.build if engine else trtopt.optimize
    output = model.with_suffix(".engine" if engine else ".out.onnx")
    return run(model, output=str(output), precision=precision, gpu="L4", recipes="none", **options)


def details(report: BuildReport) -> str:
    return " ".join(text for step in report.steps if step.name == "put-back" for text in step.details)


_BLOCK = """
    r{i} = Reshape(h{i}, three) i{i} = InstanceNormalization <epsilon = 1e-6> (r{i}, one, zero)
    u{i} = Reshape(i{i}, four) m{i} = Mul(u{i}, g) a{i} = Add(m{i}, b) s{i} = Sigmoid(a{i}) k{i} = Mul(a{i}, s{i})
    c{i} = Conv <pads = [1,1,1,1]> (k{i}, w) h{j} = Add(h{i}, c{i})"""


def test_casts_stand_around_a_whole_group_normalization(tmp_path: Path) -> None:
    """Two residual blocks of a VAE's decoder: the sums inside the normalization may overflow FP16."""
    blocks = "".join(_BLOCK.format(i=i, j=i + 1) for i in range(2))
    text = (
        f"(float[1,64,64,64] x) => (float[1,64,64,64] y) {{ h0 = Conv <pads=[1,1,1,1]> (x, w) {blocks} y = Relu(h2) }}"
    )
    weights = {"w": normal(64, 64, 3, 3, scale=0.04), "g": normal(64, 1, 1), "b": normal(64, 1, 1, seed=1)}
    shapes = {"three": np.array([1, 32, -1]), "four": np.array([1, 64, 64, 64])}
    model = saved(tmp_path / "vae.onnx", text, **weights, **shapes, one=np.ones(32, "f4"), zero=np.zeros(32, "f4"))
    report = built(model, calib={"x": normal(4, 64, 64, 64, scale=3)[:1]})
    kept = {item.node for item in report.precision.kept}
    assert {"r0", "i0", "u0", "m0", "a0", "s0", "k0"} <= kept and "c0" not in kept and "h1" not in kept
    assert "nodes in FP32 save Casts" in details(report)
    assert report.engine is not None
    assert not any(item.inputs and "Inor" in item.name for item in report.engine.layers)


_WIDE = "(float[4,64] x) => (float[4,64] y) { u = MatMul(x, wu) a = Relu(u) d = MatMul(a, wd) y = Add(x, d) }"
_GATED = _WIDE.replace("a = Relu(u)", "s = Sigmoid(u) a = Mul(u, s)")


@pytest.mark.parametrize(("scale", "precision"), [(4000, "fp16"), (1e-7, "fp16"), (4000, "int8"), (1e-7, "auto")])
def test_values_out_of_range_are_moved_into_it_by_powers_of_two(tmp_path: Path, scale: float, precision: str) -> None:
    weights = {"wu": normal(64, 256, scale=scale), "wd": normal(256, 64, seed=1, scale=0.004 / scale)}
    model = saved(tmp_path / "wide.onnx", _WIDE, **weights)
    report = built(model, precision=precision, calib={"x": normal(4, 64, seed=2)})
    step = next(step for step in report.steps if step.name == "rescale")
    assert step.changes == 2 and "-> 0 nodes in FP32" in step.details[0]
    assert not report.precision.kept and report.accuracy_cost is None
    assert report.accuracy is not None and report.accuracy.outputs["y"].sqnr_db > 55


@pytest.mark.parametrize("engine", [True, False])
def test_bf16_stays_out_of_a_model_that_others_run(tmp_path: Path, engine: bool) -> None:
    weights = {"wu": normal(64, 256, scale=4000), "wd": normal(256, 64, seed=1, scale=1e-6)}
    model = saved(tmp_path / "wide.onnx", _GATED, **weights)
    report = built(model, engine=engine, calib={"x": normal(4, 64, seed=2)})
    types = {str(item.dtype) for item in report.precision.kept}
    said = any("which has no BF16 products on CPUs" in text for text in report.warnings)
    assert ("bf16" in types) is engine and said is not engine


def test_a_network_that_stays_fp32_is_never_unsaid(tmp_path: Path) -> None:
    model = saved(
        tmp_path / "large.onnx",
        "(float[4,64] x) => (float[4,64] y) { a = MatMul(x, w) b = MatMul(a, w) y = Relu(b) }",
        w=normal(64, 64, scale=1000),
    )
    report = built(model, engine=False, calib={"x": normal(4, 64, scale=100)})
    text = next(text for text in report.warnings if "of the flop stay FP32" in text)
    assert "FP16 was asked for and 100% of the flop" in text and "values up to" in text


def test_the_dearest_node_that_the_outputs_do_not_need_in_fp32_stays_16_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of large values round most; of the products, the large one rounds most, and the outputs bear it. A search
    that ends early puts all of them back."""
    monkeypatch.setattr("trtopt.pipeline.plan_runner.repair", functools.partial(repair, most=2))
    text = """(float[1,64,64,64] x) => (float[1,64,64,64] y) { large = Conv <pads = [3,3,3,3]> (x, w7, b7)
        c = Conv (x, w0, b) d = Conv (x, w1, b) e = Conv (x, w2, b)
        s = Add(c, d) t = Add(s, e) u = Add(t, large) y = Sub(u, all) }"""
    weights = {f"w{seed}": normal(64, 64, 1, 1, seed=seed, scale=0.62 / 8) for seed in range(3)}
    weights |= {"w7": normal(64, 64, 7, 7, scale=0.62 / 56), "b": np.full(64, 24, "f4"), "b7": np.full(64, 31, "f4")}
    model = saved(tmp_path / "sums.onnx", text, **weights, all=np.float32(3 * 24 + 31))
    report = built(model, engine=False, calib={"x": normal(8, 64, 64, 64)[:1]})
    assert {item.node for item in report.precision.kept} >= {"t", "u", "y"}
    assert "large" not in {item.node for item in report.precision.kept}, details(report)
    assert report.accuracy is not None and 40 <= report.accuracy.outputs["y"].sqnr_db < 43
    assert "without 4 nodes that cost most" in details(report)
