"""The limit of engines that the TensorRT for RTX builder makes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from rtx_nets import attention_net, conv_net, loop_net, lstm_net

import trtopt
from trtopt.report.schema.analysis import Limit

pytest.importorskip("tensorrt_rtx")

MODELS = Path(__file__).resolve().parents[3] / "shared" / "models"
SHARED = ("crepe_tiny", "dscnn_kws", "mnist_cntk", "resnet20_cifar10")


def limit_of(model: Path | onnx.ModelProto, gpu: str = "L4") -> Limit:
    found = trtopt.analyze(model, gpu=gpu, compile=True)
    if found.limit is None:
        raise AssertionError
    bound = found.limit
    assert 0 < bound.limit_us <= bound.predicted_us
    assert bound.products_us <= bound.limit_us
    assert all(item.excess_us > -1e-9 for item in bound.kernels)
    assert math.isclose(bound.predicted_us, found.totals.predicted_us)
    assert math.isclose(bound.limit_us + sum(item.excess_us for item in bound.kernels), bound.predicted_us)
    return bound


@pytest.mark.parametrize("make", [attention_net, conv_net, loop_net, lstm_net])
def test_no_engine_is_predicted_below_its_limit(make: Callable[[], onnx.ModelProto]) -> None:
    limit_of(make())


@pytest.mark.parametrize("name", SHARED)
def test_no_engine_of_a_trained_model_is_predicted_below_its_limit(name: str) -> None:
    path = MODELS / name / "model.onnx"
    if not path.is_file():
        pytest.skip("needs ../shared/models")
    limit_of(path, "RTX 4090")


def test_inputs_outputs_and_weights_count_once() -> None:
    weights, moved = 4 * 128 * 128, 2 * 2 * 64 * 128
    assert limit_of(attention_net()).needed_bytes == pytest.approx(2 * (weights + moved), rel=0.01)
