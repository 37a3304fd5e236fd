"""Q/DQ that a model came with, judged by the real compiler: what makes the engine slower is said, and goes back."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from rtx_nets import constant, model

import trtopt
from trtopt.engine.build import Compiler
from trtopt.report.schema.build import BuildReport
from trtopt.report.text.build import view

pytest.importorskip("tensorrt_rtx")

PLACES = 3


def quantized(path: Path, kind: str) -> Path:
    """Three products with ReLUs, with Q/DQ at data and weight; ``kind``: ``mlp``, or ``convs`` of many channels."""
    is_mlp = kind == "mlp"
    size, shape = (64, [8, 64]) if is_mlp else (192, [4, 192, 28, 28])
    constants = [constant("s", np.float32(0.03)), constant("z", np.int8(0)), constant("k", np.float32(0.001))]
    nodes, data, rng = [], "x", np.random.default_rng(0)
    for index in range(PLACES):
        names = {name: f"{name}{index}" for name in ("q", "d", "w", "v", "c", "r")}
        weight = rng.integers(-127, 128, (size, size) if is_mlp else (size, size, 3, 3)).astype(np.int8)
        constants.append(constant(names["w"], weight))
        attributes = {} if is_mlp else {"pads": [1, 1, 1, 1]}
        nodes += [
            helper.make_node("QuantizeLinear", [data, "s", "z"], [names["q"]], names["q"]),
            helper.make_node("DequantizeLinear", [names["q"], "s", "z"], [names["d"]], names["d"]),
            helper.make_node("DequantizeLinear", [names["w"], "k", "z"], [names["v"]], names["v"]),
            helper.make_node(
                "MatMul" if is_mlp else "Conv", [names["d"], names["v"]], [names["c"]], names["c"], **attributes
            ),
            helper.make_node("Relu", [names["c"]], [names["r"]], names["r"]),
        ]
        data = names["r"]
    onnx.save(model(nodes, [("x", np.float32, shape)], [(data, np.float32)], constants), path)
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One cache for all: what a region costs is found once."""
    return str(tmp_path_factory.mktemp("cache"))


def optimized(tmp_path: Path, kind: str, cache: str, **options: object) -> BuildReport:
    source = quantized(tmp_path / f"{kind}.onnx", kind)
    return trtopt.optimize(source, output=tmp_path / "o.onnx", cache_dir=cache, gpu="L4", **options)


def dequantizers(path: Path) -> int:
    return sum(node.op_type == "DequantizeLinear" for node in onnx.load(path).graph.node)


def shown(report: BuildReport) -> str:
    from rich.console import Console

    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(view(report, verbose=True))
    return console.export_text()


@pytest.mark.parametrize("precision", ["int8", "auto"])
def test_what_makes_the_engine_slower_is_taken_out(tmp_path: Path, cache: str, precision: str) -> None:
    found = optimized(tmp_path, "mlp", cache, precision=precision)
    kept = sum(record.kept for record in found.guard)
    assert dequantizers(tmp_path / "o.onnx") == 2 * kept
    said = next(text for text in found.warnings if "own Q/DQ" in text)
    assert "makes it slower and is taken out" in said and "us without" in said and "--keep-all-int8" in said
    assert found.sixteen_bit is not None and f"{found.sixteen_bit.predicted_us:.1f} us without" in said
    assert kept < len(found.guard) == PLACES, "its ranges were judged region by region"
    assert next(step for step in found.steps if step.name == "existing-qdq-out").changes == PLACES


@pytest.mark.parametrize("options", [{"precision": "fp16"}, {"precision": "int8", "keep_all_int8": True}, {}])
def test_where_it_stays_both_times_are_said(tmp_path: Path, cache: str, options: dict[str, object]) -> None:
    found = optimized(tmp_path, "mlp", cache, **options)
    assert dequantizers(tmp_path / "o.onnx") == 2 * PLACES
    record = found.guard[0]
    assert record.kept and record.dtype == "int8" and len(record.nodes) == PLACES
    assert record.before_us is not None and record.after_us is not None
    slower = record.after_us > 1.02 * record.before_us
    said = [text for text in found.warnings if "own Q/DQ makes it slower" in text]
    assert bool(said) == slower
    if options:  # as-is, the rest of the model stays FP32, against which INT8 wins
        assert slower and found.sixteen_bit is not None
        assert f"{record.after_us:.1f} us predicted with it, {record.before_us:.1f} us without" in said[0]
        assert found.sixteen_bit.predicted_us == record.before_us


def test_what_pays_stays_with_its_price(tmp_path: Path, cache: str) -> None:
    found = optimized(tmp_path, "convs", cache, precision="auto", max_accuracy_drop=0.9)
    assert dequantizers(tmp_path / "o.onnx") == 2 * PLACES
    record = found.guard[0]
    assert record.before_us is not None and record.after_us is not None and record.after_us < record.before_us
    assert record.nodes == ("c0", "c1", "c2")
    assert not any("own Q/DQ" in text for text in found.warnings)
    text = shown(found)
    assert "no region in 8-bit but the model's own Q/DQ" in text and "no region in 8-bit:" not in text


def test_a_second_verdict_asks_the_compiler_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = str(tmp_path / "cache")
    first = optimized(tmp_path, "mlp", cache, precision="int8")
    monkeypatch.setattr(Compiler, "layers", lambda *_: pytest.fail("the compiler was asked"))
    again = optimized(tmp_path, "mlp", cache, precision="int8")
    assert again.sixteen_bit == first.sixteen_bit and again.guard == first.guard


def test_a_saved_model_ends_as_it_was_judged(tmp_path: Path, cache: str) -> None:
    """Its last product writes FP32 itself, also where a later run writes 16 bits anew."""
    rng = np.random.default_rng(0)
    weights = [
        constant(name, rng.standard_normal(size, dtype=np.float32))
        for name, size in (("a", (256, 256)), ("b", (256, 4096)))
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"], "h"),
        helper.make_node("Relu", ["h"], ["r"], "r"),
        helper.make_node("MatMul", ["r", "b"], ["y"], "y"),
    ]
    source = tmp_path / "logits.onnx"
    onnx.save(model(nodes, [("x", np.float32, [8, 256])], [("y", np.float32)], weights), source)
    options: dict[str, Any] = {"cache_dir": cache, "gpu": "L4"}
    first = trtopt.optimize(source, output=tmp_path / "8.onnx", precision="int8", **options)
    again = trtopt.optimize(tmp_path / "8.onnx", output=tmp_path / "again.onnx", precision="fp16", **options)
    last = [
        next(node for node in onnx.load(tmp_path / f"{name}.onnx").graph.node if "y" in node.output)
        for name in ("8", "again")
    ]
    assert [node.op_type for node in last] == ["MatMul", "MatMul"]
    assert first.shipped is not None and again.shipped == first.shipped
