"""Tiles and waves: the better width is found by predicting it."""

from __future__ import annotations

import pytest
from advice import Net, findings, subject_of

from trtopt.roofline.layer import layer_time
from trtopt.roofline.rules.change import resized
from trtopt.roofline.work import Work


def product(m: int, n: int, k: int) -> Net:
    """[m, k] x [k, n], read on by another product."""
    net = Net()
    y = net.op("Relu", net.linear(net.input("x", m, k), k, n, name="product"))
    return net.output(net.linear(y, n, 64, name="next"))


def work_of(net: Net, name: str, gpu: str = "A100") -> Work:
    work = next(layer.work for layer in subject_of(net, gpu).layers if layer.name == name)
    if work is None:
        raise AssertionError(name)
    return work


@pytest.mark.parametrize(
    ("rule", "m", "n", "better"),
    [("tile-quantization", 27648, 136, 128), ("wave-quantization", 2304, 1544, 1536)],
)
def test_a_few_columns_beyond_a_tile_or_a_wave_are_told_the_size_before(rule: str, m: int, n: int, better: int) -> None:
    net = product(m, n, 4096)
    found = next(item for item in findings(rule, net) if "product" in item.nodes)
    assert found.remedy.startswith(f"{better} output channels instead of {n}")
    subject, work = subject_of(net), work_of(net, "product")
    won = layer_time(work, subject.gpu).predicted_us - layer_time(resized(work, n=better), subject.gpu).predicted_us
    assert won > 0.05
    assert found.gain_us == pytest.approx(won)


@pytest.mark.parametrize(("m", "n"), [(27648, 128), (2304, 1536)])
def test_full_tiles_and_waves_are_no_finding(m: int, n: int) -> None:
    for rule in ("tile-quantization", "wave-quantization"):
        assert not any("product" in item.nodes for item in findings(rule, product(m, n, 4096)))


def test_layers_of_one_size_are_one_finding_and_their_gains_add_up() -> None:
    net = Net()
    y = net.op("Relu", net.linear(net.input("x", 2304, 4096), 4096, 1544))
    for _ in range(3):
        y = net.op("Relu", net.linear(net.op("Relu", net.linear(y, 1544, 4096)), 4096, 1544))
    one = findings("wave-quantization", product(2304, 1544, 4096))
    many = findings("wave-quantization", net.output(net.linear(y, 1544, 64)))
    single = next(item for item in one if "product" in item.nodes)
    several = next(item for item in many if "2304x1544x4096" in item.message)
    assert several.gain_us == pytest.approx(4 * single.gain_us, rel=0.05)


def test_the_width_of_the_networks_output_is_no_choice() -> None:
    net = Net()
    net.output(net.linear(net.input("x", 2304, 4096), 4096, 1544))
    assert not findings("wave-quantization", net) and not findings("tile-quantization", net)
