"""Adapters read and merged: files of PEFT, modules found by name, clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from trtopt.errors import UsageError
from trtopt.graph.artifact import ModelArtifact
from trtopt.source.lora import merged, read_adapter
from trtopt.source.safetensors import read_safetensors

RNG = np.random.default_rng(0)
QUERY, DENSE = "base_model.model.encoder.layer.0.query", "base_model.model.encoder.layer.0.dense"
Q_WEIGHT, D_WEIGHT = (RNG.standard_normal(shape).astype(np.float32) for shape in ((8, 8), (4, 8)))


def safetensors(path: Path, **tensors: np.ndarray) -> Path:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, array in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [place, place + array.nbytes]}
        place += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in tensors.values()))
    return path


def pair(module: str, outputs: int, inputs: int, rank: int = 2, name: str = "") -> dict[str, np.ndarray]:
    shapes = {"A": (rank, inputs), "B": (outputs, rank)}
    return {
        f"{module}.lora_{part}{name}.weight": RNG.standard_normal(shape).astype(np.float32)
        for part, shape in shapes.items()
    }


def network() -> ModelArtifact:
    """x [2, 8] -> query (a MatMul of a transposed constant, named by its node) -> dense (a Gemm, by its weight)."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[2, 8] x) => (float[2, 4] y) {
        t = Transpose <perm = [1, 0]> (w)
        q = MatMul (x, t)
        y = Gemm <transB = 1> (q, d)
    }"""
    model = ir.from_onnx_text(text)
    for name, array in (("w", Q_WEIGHT), ("d", D_WEIGHT)):
        value = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(array.shape))
        value.const_value = ir.Tensor(array, name=name)
        model.graph.register_initializer(value)
        for node in model.graph:
            for index, read in enumerate(node.inputs):
                if read is not None and read.name == name:
                    node.replace_input_with(index, value)
    transpose, product, gemm = list(model.graph)
    transpose.name = "/encoder/layer.0/query/Transpose"
    product.name, gemm.name = "/encoder/layer.0/query/MatMul", "node_linear_1"
    gemm.inputs[1].name = "encoder.layer.0.dense.weight"  # type: ignore[union-attr]
    return ModelArtifact(model, None, "0")


def run(artifact: ModelArtifact, x: np.ndarray) -> np.ndarray:
    (y,) = ReferenceEvaluator(ir.to_proto(artifact.model)).run(None, {"x": x})
    return np.asarray(y)


def test_the_weights_get_the_scaled_product_whatever_way_they_are_stored(tmp_path: Path) -> None:
    tensors = {**pair(QUERY, 8, 8), **pair(DENSE, 4, 8, rank=3, name=".default")}
    file = safetensors(tmp_path / "adapter_model.safetensors", **tensors)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": 6, "r": 2}))
    (qa, qb), (da, db) = (list(tensors.values())[index : index + 2] for index in (0, 2))
    x = RNG.standard_normal((2, 8)).astype(np.float32)
    expected = x @ (Q_WEIGHT + 3 * qb @ qa).T @ (D_WEIGHT + 2 * db @ da).T
    before = network()
    for source in (str(file), str(tmp_path)):
        adapter = read_adapter(source)
        assert not adapter.notes
        result = merged(before, [adapter])
        assert np.allclose(run(result, x), expected, atol=1e-4)
    assert np.allclose(run(before, x), x @ Q_WEIGHT.T @ D_WEIGHT.T, atol=1e-4)
    assert len(result.model.graph.initializers) == 2 and result.steps[-1].changes == 2


def test_adapters_add_up_and_may_have_a_scale_of_their_own(tmp_path: Path) -> None:
    one, two = (safetensors(tmp_path / f"{name}.safetensors", **pair(DENSE, 4, 8)) for name in "ab")
    parts = [list(read_safetensors(file).values()) for file in (one, two)]
    adapters = [read_adapter(f"{one}:0.5"), read_adapter(f"{two}:-2")]
    assert not adapters[0].notes
    assert f"give --lora {one}:SCALE" in read_adapter(str(one)).notes[0]
    x = RNG.standard_normal((2, 8)).astype(np.float32)
    weight = D_WEIGHT + 0.5 * parts[0][1] @ parts[0][0] - 2 * parts[1][1] @ parts[1][0]
    assert np.allclose(run(merged(network(), adapters), x), x @ Q_WEIGHT.T @ weight.T, atol=1e-4)


def test_another_scale_is_another_step(tmp_path: Path) -> None:
    file = safetensors(tmp_path / "a.safetensors", **pair(DENSE, 4, 8))
    first, second = (merged(network(), [read_adapter(f"{file}:{scale}")]).steps[-1].name for scale in (1, 2))
    assert first != second


@pytest.mark.parametrize(
    ("tensors", "part"),
    [
        (pair("base_model.model.encoder.layer.1.query", 8, 8), "encoder.layer.1.query is not in the model"),
        (pair(DENSE, 8, 4), "8 outputs and 4 inputs"),
        ({"base_model.model.head.weight": np.zeros((2, 2), np.float32)}, "head.weight"),
        (dict([next(iter(pair(DENSE, 4, 8).items()))]), "has not both"),
        ({**pair(DENSE, 4, 8), f"{DENSE}.lora_B.weight": np.zeros((4, 3), np.float32)}, "do not fit together"),
        ({}, "no lora_A"),
        ({name: array * np.nan for name, array in pair(DENSE, 4, 8).items()}, "numbers that are not finite"),
    ],
)
def test_an_adapter_that_fits_no_layer_is_one_clear_error(
    tensors: dict[str, np.ndarray], part: str, tmp_path: Path
) -> None:
    file = safetensors(tmp_path / "a.safetensors", **tensors)
    with pytest.raises(UsageError, match=part) as caught:
        merged(network(), [read_adapter(str(file))])
    assert caught.value.where and caught.value.remedy


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x08",
        (1 << 60).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (9).to_bytes(8, "little") + b'{"a": [1}',
        (60).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'.ljust(60) + b"1234",
        (63).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}'.ljust(63) + b"1234",
        (60).to_bytes(8, "little") + b'{"a":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}}'.ljust(60) + b"1234",
    ],
)
def test_a_file_that_is_no_safetensors_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(UsageError):
        read_safetensors(tmp_path / "a.safetensors")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="adapter"):
        read_adapter(str(tmp_path / "none.safetensors:2"))


@pytest.mark.parametrize("key", ["use_dora", "alpha_pattern", "rank_pattern", "modules_to_save"])
def test_what_is_not_merged_is_refused(key: str, tmp_path: Path) -> None:
    safetensors(tmp_path / "adapter_model.safetensors", **pair(DENSE, 4, 8))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": 2, key: {"a": 1}}))
    with pytest.raises(UsageError, match=key):
        read_adapter(str(tmp_path))
