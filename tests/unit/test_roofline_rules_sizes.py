"""Rules about sizes: each fires where it should, and not on the near miss."""

from __future__ import annotations

import onnx
import pytest
from advice import Net, findings, subject_of

from trtopt.roofline.layer import layer_time
from trtopt.roofline.rules.change import resized
from trtopt.roofline.rules.sizes import multiple_for
from trtopt.support.precision import Precision


@pytest.mark.parametrize(
    ("dtype", "sixteen", "thirty_two", "line"),
    [("tf32", 4, 8, 32), ("fp16", 8, 16, 64), ("bf16", 8, 16, 64), ("int8", 16, 32, 128), ("fp8", 16, 32, 128)],
)
def test_the_elements_of_16_32_and_128_bytes_are_those_of_the_guide(
    dtype: Precision, sixteen: int, thirty_two: int, line: int
) -> None:
    assert [multiple_for(tier, dtype) for tier in (16, 32, 128)] == [sixteen, thirty_two, line]


def wide(size: int, rows: int = 8192) -> Net:
    """Three products, the one in the middle [rows, 4096] x [4096, size]."""
    net = Net()
    x = net.linear(net.input("x", rows, 1024), 1024, 4096, name="first")
    y = net.linear(x, 4096, size, name="middle")
    return net.output(net.linear(y, size, 1024, name="last"))


def test_a_size_that_misses_16_bytes_is_reported_with_the_gain_of_rounding_it_up() -> None:
    net = wide(1001)
    (found,) = findings("alignment", net)
    assert "1001 is no multiple of 8 (16 bytes in FP16)" in found.message
    assert found.remedy == "use 1001 -> 1008"
    assert set(found.nodes) == {"middle", "last"}
    subject = subject_of(net)
    expected = 0.0
    for layer in subject.layers:
        work = layer.work
        if layer.name in ("middle", "last") and work is not None:
            sizes = {"n": 1008} if layer.name == "middle" else {"k": 1008}
            before, after = layer_time(work, subject.gpu), layer_time(resized(work, **sizes), subject.gpu)
            expected += max(0.0, before.predicted_us - after.predicted_us)
    assert found.gain_us == pytest.approx(expected if expected >= 0.05 else 0.0)
    assert found.severity == ("warning" if expected >= 0.05 else "hint")


def test_a_size_that_misses_32_bytes_only_is_a_hint() -> None:
    (found,) = findings("alignment", wide(1000))
    assert found.severity == "hint"
    assert "1000 is no multiple of 16 (32 bytes in FP16)" in found.message


def test_a_size_that_misses_a_cache_line_only_is_information_and_only_from_compute_capability_8_on() -> None:
    (found,) = findings("alignment", wide(1040))
    assert found.severity == "info"
    assert "1040 is no multiple of 64 (128 bytes in FP16)" in found.message
    assert not findings("alignment", wide(1040), "V100")


def test_aligned_sizes_are_not_reported() -> None:
    assert not findings("alignment", wide(1024))


def test_fp32_on_cuda_cores_has_no_alignment_but_tf32_does() -> None:
    assert not findings("alignment", wide(1001), base="fp32")
    (found,) = findings("alignment", wide(1001), base="tf32")
    assert "1001 is no multiple of 4 (16 bytes in TF32)" in found.message


def test_int8_needs_twice_the_elements() -> None:
    names = ["first", "middle", "last"]
    assert "16 bytes in INT8" in findings("alignment", wide(1000), quantized=names)[0].message
    assert "32 bytes in INT8" in findings("alignment", wide(1008), quantized=names)[0].message


def test_layers_of_one_size_are_one_finding() -> None:
    net = Net()
    x = net.conv(net.input("x", 8, 64, 28, 28), 64, 61)
    for _ in range(50):
        x = net.conv(x, 61, 61)
    (found,) = findings("alignment", net.output(net.conv(x, 61, 64)))
    assert len(found.nodes) == 52
    assert found.message.startswith("61 is no multiple of 8")


def test_a_handful_of_classes_is_no_finding_but_1001_of_them_are() -> None:
    def classifier(classes: int) -> Net:
        net = Net()
        return net.output(net.op("Softmax", net.linear(net.input("x", 256, 2048), 2048, classes)))

    assert not findings("alignment", classifier(10))
    assert not findings("alignment", classifier(1000))
    assert "1001 is no multiple of 8" in findings("alignment", classifier(1001))[0].message


def stem(channels: int, stride: int = 2) -> Net:
    net = Net()
    x = net.conv(net.input("x", 32, channels, 224, 224), channels, 64, kernel=7, stride=stride, name="stem")
    return net.output(net.conv(net.op("Relu", x), 64, 64))


def test_a_first_convolution_of_three_channels_is_found_and_told_to_take_four() -> None:
    (found,) = findings("first-layer", stem(3))
    assert found.nodes == ("stem",)
    assert "3 channels" in found.message and "feed 4 channels" in found.remedy


def test_a_first_convolution_that_scales_its_image_first_is_still_the_first() -> None:
    net = Net()
    x = net.op("Mul", net.input("x", 8, 3, 64, 64), net.weight(1))
    assert findings("first-layer", net.output(net.conv(x, 3, 64, stride=2, name="stem")))


@pytest.mark.parametrize(("channels", "stride"), [(4, 2), (8, 1), (16, 2)])
def test_a_first_convolution_of_four_channels_or_a_multiple_of_eight_is_fine(channels: int, stride: int) -> None:
    assert not findings("first-layer", stem(channels, stride))


def test_four_channels_at_stride_one_are_information() -> None:
    (found,) = findings("first-layer", stem(4, stride=1))
    assert (found.severity, found.gain_us) == ("info", 0.0)
    assert "stride 1x1" in found.message


def test_three_channels_further_down_are_no_first_layer() -> None:
    net = Net()
    x = net.conv(net.input("x", 8, 4, 64, 64), 4, 3, stride=2)
    assert not findings("first-layer", net.output(net.conv(x, 3, 8)))


def language_model(words: int) -> Net:
    net = Net()
    x = net.op("Relu", net.linear(net.input("x", 512, 768), 768, 768))
    return net.output(net.op("Softmax", net.linear(x, 768, words, name="head")))


def test_a_vocabulary_of_33708_is_padded_to_33712_for_0_012_percent_more_arithmetic() -> None:
    (found,) = findings("vocabulary", language_model(33708))
    assert found.nodes == ("head",)
    assert "33708 is no multiple of 8" in found.message
    assert "33712 (0.012 % more arithmetic)" in found.remedy
    assert not findings("alignment", language_model(33708))


def test_an_aligned_vocabulary_and_a_wide_inner_layer_are_no_finding() -> None:
    assert not findings("vocabulary", language_model(33712))
    assert not findings("vocabulary", wide(4100))


def attention(length: int, heads: int = 12, size: int = 64) -> Net:
    """Softmax(Q K^T) V over ``length`` tokens, batch 8."""
    net = Net()
    q, v = (net.input(name, 8, heads, length, size) for name in "qv")
    k = net.input("k", 8, heads, size, length)
    scores = net.op("Mul", net.op("MatMul", q, k), net.weight(1))
    return net.output(net.op("MatMul", net.op("Softmax", scores, axis=-1, name="softmax"), v))


@pytest.mark.parametrize(
    ("length", "quantized", "lower", "upper"), [(130, False, 128, 144), (200, False, 192, 208), (144, True, 128, 160)]
)
def test_a_sequence_between_multiples_is_told_both(length: int, quantized: bool, lower: int, upper: int) -> None:
    net = attention(length)
    names = [str(node.name) for node in net.model().graph if node.op_type == "MatMul"] if quantized else []
    (found,) = findings("sequence-length", net, quantized=names)
    assert f"{upper} would take" in found.message
    assert f"{lower} or {upper}" in found.remedy
    assert found.nodes == ("softmax",)


def test_the_effect_of_another_length_is_that_of_the_network_at_that_length() -> None:
    (found,) = findings("sequence-length", attention(250))
    now, shorter = subject_of(attention(250)).total_us, subject_of(attention(240)).total_us
    expected = "as long" if abs(now - shorter) < 0.05 else f"{now - shorter:.1f} us less"
    assert found.message.endswith(f"240 {expected}")


def test_aligned_sequences_softmax_of_scores_and_fp32_are_no_finding() -> None:
    assert not findings("sequence-length", attention(128))
    assert not findings("sequence-length", attention(20))
    assert not findings("sequence-length", attention(130), base="fp32")
    net = Net()
    assert not findings("sequence-length", net.output(net.op("Softmax", net.linear(net.input("x", 8, 64), 64, 130))))


def test_network_inputs_in_fp16_are_seen_through() -> None:
    net = Net()
    x = net.op("Cast", net.input("x", 8, 3, 64, 64, dtype=onnx.TensorProto.UINT8), to=onnx.TensorProto.FLOAT)
    assert findings("first-layer", net.output(net.conv(x, 3, 64, stride=2)))
