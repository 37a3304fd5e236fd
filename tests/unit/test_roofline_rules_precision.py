"""Types, sparsity and accumulators: each rule fires, and not on the near miss."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
from advice import Net, findings, subject_of

from trtopt.roofline.layer import layer_time
from trtopt.roofline.rules.change import retyped


def convolutions(channels: int = 256, kernel: int = 3) -> Net:
    """Three convolutions on [32, channels, 56, 56]; 3x3 ones are limited by arithmetic."""
    net = Net()
    x = net.input("x", 32, channels, 56, 56)
    for index in range(3):
        x = net.op("Relu", net.conv(x, channels, channels, kernel=kernel, name=f"conv{index}"))
    return net.output(x)


def pools() -> Net:
    """Nothing but bytes: pools around one small product."""
    net = Net()
    x = net.input("x", 32, 64, 112, 112)
    for _ in range(6):
        x = net.op("MaxPool", x, kernel_shape=[3, 3], pads=[1] * 4)
    return net.output(net.conv(net.op("GlobalAveragePool", x), 64, 64, kernel=1))


CONVS = ("conv0", "conv1", "conv2")


@pytest.mark.parametrize(("base", "better"), [("fp32", ["FP16", "TF32"]), ("tf32", ["FP16"])])
def test_a_wide_type_is_told_what_narrower_ones_would_save(base: str, better: list[str]) -> None:
    found = findings("precision-too-wide", convolutions(), base=base)  # type: ignore[arg-type]
    assert [item.command.split()[1] for item in found] == [f"--{name.lower()}" for name in better]
    now, narrow = subject_of(convolutions(), base=base), subject_of(convolutions())  # type: ignore[arg-type]
    assert found[0].gain_us == pytest.approx(now.total_us - narrow.total_us, rel=1e-3)
    assert found[0].severity == "warning"


def test_fp16_and_a_gpu_without_tf32_are_not_told_tf32() -> None:
    assert not findings("precision-too-wide", convolutions())
    (found,) = findings("precision-too-wide", convolutions(), "V100", "fp32")  # type: ignore[arg-type]
    assert found.command == "build --fp16 --calib samples.npz"


def test_int8_cannot_help_a_network_that_is_bound_by_memory() -> None:
    (found,) = findings("precision-cannot-help", pools())
    assert (found.severity, found.gain_us) == ("info", 0.0)
    assert not findings("eight-bit", pools())


def test_int8_that_does_not_pay_is_told_to_stay_with_fp16() -> None:
    net = Net()
    x = net.input("x", 32, 64, 112, 112)
    for _ in range(8):
        x = net.op("MaxPool", x, kernel_shape=[3, 3], pads=[1] * 4)
    net.output(net.conv(net.op("GlobalAveragePool", x), 64, 64, kernel=1, name="head"))
    (found,) = findings("precision-cannot-help", net, quantized=["head"])
    assert found.command == "build --fp16"
    assert not findings("precision-cannot-help", convolutions(), quantized=CONVS)


def test_int8_is_predicted_for_the_whole_network_and_ends_in_the_line_to_type() -> None:
    (found,) = findings("eight-bit", convolutions())
    eight = subject_of(convolutions(), quantized=CONVS)
    assert found.gain_us == pytest.approx(subject_of(convolutions()).total_us - eight.total_us)
    assert found.command == "build --int8 --calib samples.npz"
    assert found.severity == "info"
    assert set(CONVS) <= set(found.nodes)
    assert not findings("precision-cannot-help", convolutions())


def test_a_gpu_without_int8_is_not_told_int8() -> None:
    assert not findings("eight-bit", convolutions(), "V100")
    assert not findings("precision-cannot-help", pools(), "V100")


def mixed(wide: bool) -> Net:
    """An FP16 network, in which a softmax may be in FP32."""
    net = Net()
    half = onnx.TensorProto.FLOAT16
    x = net.op("Cast", net.input("x", 4096, 4096), to=half)
    x = net.op("MatMul", x, net.op("Cast", net.weight(4096, 4096), to=half))
    if wide:
        x = net.op("Cast", x, to=onnx.TensorProto.FLOAT)
    x = net.op("Softmax", x, axis=-1, name="softmax")
    if wide:
        x = net.op("Cast", x, to=half)
    x = net.op("MatMul", x, net.op("Cast", net.weight(4096, 4096), to=half))
    return net.output(net.op("Cast", x, to=onnx.TensorProto.FLOAT))


def test_a_layer_that_stays_in_fp32_between_fp16_ones_is_found_with_its_gain() -> None:
    (found,) = findings("precision-hole", mixed(wide=True), base="fp32")
    assert "softmax" in found.nodes
    assert found.gain_us > 0
    subject = subject_of(mixed(wide=True), base="fp32")
    holes = [layer.work for layer in subject.layers if layer.work is not None and layer.work.dtype == "fp32"]
    expected = sum(
        layer_time(work, subject.gpu).predicted_us - layer_time(retyped(work, "fp16"), subject.gpu).predicted_us
        for work in holes
        if work.flop
    )
    assert found.gain_us == pytest.approx(expected)


def test_quantizing_an_fp32_input_is_no_hole() -> None:
    net = Net()
    scale, zero = net.weight(), net.weight(dtype=np.int8)
    x = net.op("QuantizeLinear", net.input("x", 4096, 4096), scale, zero)
    weight = net.op("DequantizeLinear", net.weight(4096, 4096, dtype=np.int8), scale, zero)
    net.output(net.op("MatMul", net.op("DequantizeLinear", x, scale, zero), weight))
    assert any(layer.work and layer.work.dtype == "fp32" for layer in subject_of(net, base="fp32").layers)
    assert not findings("precision-hole", net, base="fp32")


def test_a_network_of_one_type_has_no_hole() -> None:
    assert not findings("precision-hole", mixed(wide=False), base="fp16")
    assert not findings("precision-hole", convolutions(), base="fp32")


def test_sparsity_gains_no_more_than_half_of_the_arithmetic_and_memory_allow() -> None:
    (found,) = findings("sparsity", convolutions())
    assert found.severity == "info"
    assert set(CONVS) <= set(found.nodes)
    rows = subject_of(convolutions()).row
    assert 0 < found.gain_us <= sum(rows[name].predicted_us for name in CONVS) / 2


@pytest.mark.parametrize(
    ("net", "gpu", "base"),
    [
        (convolutions(), "V100", "fp16"),  # no sparse Tensor Cores
        (convolutions(), "A100", "fp32"),  # CUDA cores
        (convolutions(channels=128), "A100", "fp16"),  # too few channels
        (convolutions(kernel=1), "L4", "fp16"),  # 128 flop per byte: limited by memory
    ],
)
def test_where_sparsity_cannot_help_it_is_not_proposed(net: Net, gpu: str, base: str) -> None:
    assert not findings("sparsity", net, gpu, base)  # type: ignore[arg-type]


def test_geforce_gpus_are_told_about_fp16_accumulators_and_others_are_not() -> None:
    def products() -> Net:
        net = Net()
        return net.output(net.linear(net.input("x", 4096, 2048), 2048, 2048, name="product"))

    subject = subject_of(products(), "RTX-4090")
    (found,) = findings("fp16-accumulate", products(), "RTX-4090")
    assert found.severity == "info"
    assert set(found.nodes) == {"product"}
    faster = sum(
        layer_time(dataclasses.replace(layer.work, accumulate_fp16=True), subject.gpu).predicted_us
        for layer in subject.layers
        if layer.work is not None
    )
    assert found.gain_us == pytest.approx(subject.total_us - faster)
    assert not findings("fp16-accumulate", products(), "A100")
    assert not findings("fp16-accumulate", convolutions(), "RTX-4090")  # TensorRT sums those in FP16 by itself
