"""Triton's own schema of config.pbtxt, from its client package, without the rest of that package (gRPC)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format


@cache
def _schema() -> Any:
    try:
        client = importlib.metadata.distribution("tritonclient")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs Triton's client package: pip install tritonclient")
    path = client.locate_file("tritonclient/grpc/model_config_pb2.py")
    spec = importlib.util.spec_from_file_location("triton_model_config", str(path))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parsed(text: str) -> Any:
    """A ``ModelConfig``; text that is not of the schema is an error."""
    return text_format.Parse(text, _schema().ModelConfig())


def read(folder: Path) -> Any:
    """The configuration of a model in a repository; its name is that of its folder."""
    config = parsed((folder / "config.pbtxt").read_text())
    assert config.name == folder.name
    return config


def type_name(value: int) -> str:
    """``TYPE_FP32`` for its number."""
    return str(_schema().DataType.Name(value))


def check_valid(config: Any) -> None:
    """What the server's core demands beyond the schema (``ValidateModelConfig`` of ``model_config_utils.cc``)."""
    for tensor in (*config.input, *config.output):
        assert tensor.name and tensor.data_type and tensor.dims
        assert all(dim >= 1 or dim == -1 for dim in tensor.dims)
        if tensor.HasField("reshape"):
            assert config.max_batch_size > 0, "a scalar without a batch"
    for size in config.dynamic_batching.preferred_batch_size:
        assert 1 <= size <= config.max_batch_size
    if config.platform == "ensemble":
        assert not config.backend and config.HasField("ensemble_scheduling") and not config.instance_group
        return
    assert (config.backend, config.platform) in (("tensorrt", "tensorrt_plan"), ("onnxruntime", "onnxruntime_onnx"))
    assert config.instance_group
    for group in config.instance_group:
        assert config.platform == "tensorrt_plan" or not group.profile
    for sample in config.model_warmup:
        assert 1 <= sample.batch_size <= max(config.max_batch_size, 1)
        assert set(sample.inputs) == {tensor.name for tensor in config.input}
        for tensor in config.input:
            given = sample.inputs[tensor.name]
            assert given.data_type == tensor.data_type and given.zero_data
            assert len(given.dims) == len(tensor.dims)
            assert all(have >= 1 and want in (-1, have) for have, want in zip(given.dims, tensor.dims, strict=True))
