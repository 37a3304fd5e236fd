"""Adapters as inputs of an engine: several for one engine, equal to merged weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from rtx_nets import constant, model

import trtopt
from trtopt.accuracy.compare import Accumulator
from trtopt.accuracy.emulation import fp32_emulation
from trtopt.errors import UsageError
from trtopt.precision.observe.samples import open_samples
from trtopt.precision.observe.stream import FilledSamples
from trtopt.report.schema.build import BuildReport
from trtopt.source.lora import adapter_feeds, lora_inputs
from trtopt.source.onnx_file import load
from trtopt.support.ort_session import OrtSession

pytest.importorskip("tensorrt_rtx")

RNG = np.random.default_rng(0)
LAYERS = ("q", "k", "v", "o")
RANK = 16


def attention(width: int, heads: int, batch: int, tokens: int) -> onnx.ModelProto:
    """x [batch, tokens, width] -> attention of linear layers without biases, and the residual -> y."""
    size = width // heads
    constants = [
        constant(f"attn.{name}.weight", (RNG.standard_normal((width, width)) / np.sqrt(width)).astype(np.float32))
        for name in LAYERS
    ]
    constants += [constant("scale", np.array(size**-0.5, np.float32))]
    constants += [constant("split", np.array([0, tokens, heads, size])), constant("join", np.array([0, tokens, width]))]
    nodes = []
    for name, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        nodes += [
            helper.make_node("MatMul", ["x", f"attn.{name}.weight"], [f"{name}0"], name=name),
            helper.make_node("Reshape", [f"{name}0", "split"], [f"{name}1"]),
            helper.make_node("Transpose", [f"{name}1"], [f"{name}2"], perm=perm),
        ]
    nodes += [
        helper.make_node("Mul", ["q2", "scale"], ["q3"]),
        helper.make_node("MatMul", ["q3", "k2"], ["s"]),
        helper.make_node("Softmax", ["s"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "v2"], ["c"]),
        helper.make_node("Transpose", ["c"], ["t"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["t", "join"], ["j"]),
        helper.make_node("MatMul", ["j", "attn.o.weight"], ["o0"], name="o"),
        helper.make_node("Add", ["o0", "x"], ["y"]),
    ]
    return model(nodes, [("x", np.float32, [batch, tokens, width])], [("y", np.float32)], constants)


def save_adapter(path: Path, width: int, rank: int = RANK) -> str:
    tensors = {}
    for name in LAYERS:
        tensors[f"attn.{name}.lora_A.weight"] = (RNG.standard_normal((rank, width)) / np.sqrt(width)).astype(np.float32)
        tensors[f"attn.{name}.lora_B.weight"] = (RNG.standard_normal((width, rank)) / rank).astype(np.float32)
    header: dict[str, Any] = {}
    place = 0
    for name, array in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [place, place + array.nbytes]}
        place += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in tensors.values()))
    return f"{path}:1"


def built(folder: Path, proto: onnx.ModelProto, **options: Any) -> BuildReport:
    return trtopt.build(
        proto,
        output=folder / "m.engine",
        save_onnx=folder / "m.onnx",
        precision="fp16",
        backend="tensorrt-rtx",
        **options,
    )


def test_three_adapters_of_one_engine_equal_merged_weights(tmp_path: Path) -> None:
    proto = attention(128, 4, 2, 32)
    adapters = [save_adapter(tmp_path / f"{index}.safetensors", 128, rank) for index, rank in enumerate((16, 16, 8))]
    built(tmp_path, proto, lora=adapters[:1], lora_inputs=RANK)
    x = RNG.standard_normal((2, 32, 128)).astype(np.float32)
    results = []
    with OrtSession(fp32_emulation(load(tmp_path / "m.onnx").model)) as session:
        for adapter in adapters:
            half = {name: array.astype(np.float16) for name, array in lora_inputs(adapter, RANK).items()}
            results.append(session.run({"x": x, **half})[0])
    for adapter, result in zip(adapters, results, strict=True):
        trtopt.optimize(proto, output=tmp_path / "merged.onnx", lora=adapter, recipes="none")
        with OrtSession(load(tmp_path / "merged.onnx").model) as session:
            total = Accumulator()
            total.update(session.run({"x": x})[0], result)
        assert 10 * np.log10(total.signal / total.noise) >= 60
    assert not np.allclose(results[0], results[1], atol=1e-2)


def transposing(report: BuildReport) -> int:
    assert report.engine is not None and report.engine.layers is not None
    return sum("Tran" in layer.name for layer in report.engine.layers)


def test_many_rows_change_the_weights_and_no_kernel_transposes_for_it(tmp_path: Path) -> None:
    """Two factors a layer make a new weight in one kernel; those of queries, keys and values are joined by another."""
    proto, adapter = attention(256, 4, 4, 512), save_adapter(tmp_path / "a.safetensors", 256)
    merged = built(tmp_path, proto, lora=adapter)
    as_inputs = built(tmp_path, proto, lora=adapter, lora_inputs=RANK)
    assert {step.name: step.changes for step in as_inputs.steps}["low-rank-weight"] == 2
    assert merged.engine is not None and as_inputs.engine is not None
    assert int(as_inputs.engine.kernels or 0) <= int(merged.engine.kernels or 0) + len(LAYERS) + 1
    assert transposing(as_inputs) <= transposing(merged)


def test_samples_are_fed_the_adapters_in_turn(tmp_path: Path) -> None:
    """Samples of the model's own inputs are enough; a layer that an adapter leaves out gets zeros."""
    first, other = (save_adapter(tmp_path / f"{name}.safetensors", 128) for name in "ab")
    x = RNG.standard_normal((4, 32, 128)).astype(np.float32)
    proto = attention(128, 4, 2, 32)
    report = built(tmp_path, proto, lora=[first, other], lora_inputs=RANK, calib={"x": x})
    assert report.calibration is not None and report.calibration.source == "user"
    assert report.accuracy is not None and report.accuracy.samples == 2
    specs = load(tmp_path / "m.onnx").inputs
    feeds = adapter_feeds(specs, [first, other], RANK)
    whole = open_samples({"x": x}, [spec for spec in specs if spec.name == "x"])
    filled = list(FilledSamples(whole, feeds))
    assert all(np.array_equal(filled[index]["attn.q.lora_A"], feeds[index]["attn.q.lora_A"]) for index in (0, 1))
    assert not np.array_equal(filled[0]["attn.q.lora_A"], filled[1]["attn.q.lora_A"])


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"lora_inputs": 8}, "rank 16"),
        ({"lora_inputs": 0}, "whole rank"),
        ({"lora_inputs": 16, "lora": ()}, "adapters that say"),
    ],
)
def test_what_cannot_be_is_one_clear_error(options: dict[str, Any], part: str, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "a.safetensors", 128)
    with pytest.raises(UsageError, match=part):
        built(tmp_path, attention(128, 4, 2, 32), **{"lora": adapter, **options})
