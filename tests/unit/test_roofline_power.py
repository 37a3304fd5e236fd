from __future__ import annotations

import dataclasses

import pytest

from trtopt.hardware.spec import GpuSpec, find_gpu
from trtopt.roofline.batch import Batch
from trtopt.roofline.constants import SLOT_POWER_W, constants_for, low_power, sustained_share
from trtopt.roofline.layer import layer_time
from trtopt.roofline.work import Gemm, Work


def product(size: int) -> Work:
    gemm = Gemm(size, size, size)
    return Work("gemm", gemm.flop, 2 * size**2, 2 * size**2, 2 * size**2, "fp16", gemm=gemm)


def stream(size: int) -> Work:
    return Work("memory", 0, size, 0, size, "fp16")


def without_limit(gpu: GpuSpec) -> GpuSpec:
    """The same card with a power limit that does not hold it back."""
    return dataclasses.replace(gpu, tdp_w=300)


@pytest.mark.parametrize("name", ["T4", "L4"])
def test_a_long_product_takes_longer_on_a_low_power_card_by_what_is_missing_of_its_clock(name: str) -> None:
    gpu = find_gpu(name)
    slowed, free = (layer_time(product(8192), each).math_us for each in (gpu, without_limit(gpu)))
    assert slowed / free == pytest.approx(1 / sustained_share(gpu), rel=0.02)


def test_a_power_limit_leaves_the_bandwidth_of_the_memory_and_the_launch_alone() -> None:
    gpu = find_gpu("T4")
    slowed, free = (layer_time(stream(2**30), each) for each in (gpu, without_limit(gpu)))
    assert slowed.memory_us == pytest.approx(free.memory_us, rel=1e-4)
    assert slowed.latency_us == free.latency_us


def test_what_fits_into_the_l2_cache_slows_down_with_the_clock() -> None:
    gpu = find_gpu("L4")
    assert layer_time(stream(2**20), gpu).memory_us > layer_time(stream(2**20), without_limit(gpu)).memory_us


def test_the_bound_of_a_low_power_card_is_that_of_its_datasheet() -> None:
    gpu, works = find_gpu("T4"), [product(4096), stream(2**20)]
    slowed, free = (Batch.of(works, each).predict(constants_for(gpu)) for each in (gpu, without_limit(gpu)))
    assert list(slowed.bound) == list(free.bound)
    assert (slowed.total >= slowed.bound).all()


@pytest.mark.parametrize("name", ["A100", "V100", "H100", "A10", "RTX-4090", "RTX-3060-Laptop"])
def test_other_cards_keep_their_clock(name: str) -> None:
    assert sustained_share(find_gpu(name)) == 1


def test_a_jetson_keeps_the_clock_of_its_power_mode() -> None:
    orin = find_gpu("Orin")
    assert orin.tdp_w <= SLOT_POWER_W
    assert sustained_share(orin) == 1


def test_a_low_power_card_sustains_as_many_sms_times_mhz_per_watt_as_one_of_its_architecture() -> None:
    l4 = find_gpu("L4")
    half = dataclasses.replace(l4, name="own", tdp_w=l4.tdp_w / 2)
    assert sustained_share(half) == pytest.approx(sustained_share(l4) / 2)
    assert sustained_share(dataclasses.replace(half, sm=l4.sm // 2)) == pytest.approx(sustained_share(l4))


@pytest.mark.parametrize("name", ["A2", "RTX A2000", "RTX 2000 Ada"])
def test_a_card_of_few_sms_for_its_power_keeps_its_clock(name: str) -> None:
    assert find_gpu(name).tdp_w <= SLOT_POWER_W
    assert sustained_share(find_gpu(name)) == 1


def test_a_low_power_card_of_an_architecture_never_measured_lies_between_those_that_were() -> None:
    own = dataclasses.replace(find_gpu("A10"), name="own", tdp_w=SLOT_POWER_W)
    as_turing, as_ada = (
        sustained_share(dataclasses.replace(own, compute_capability=entry.compute_capability)) for entry in low_power()
    )
    assert as_turing < sustained_share(own) < as_ada
    assert sustained_share(dataclasses.replace(own, tdp_w=SLOT_POWER_W + 1)) == 1


def test_every_share_has_a_known_gpu_and_its_data() -> None:
    for entry in low_power():
        gpu = find_gpu(entry.name)
        assert gpu.compute_capability == entry.compute_capability and gpu.tdp_w <= SLOT_POWER_W
        assert 0 < entry.sustained_share < 1
        assert entry.data


def test_a_large_bert_sustains_the_published_share_of_the_peak_on_a_t4() -> None:
    """Feed-forward products of BERT large at 16384 tokens: TensorRT reaches 0.30 to 0.35 of the peak on the network."""
    gemm = Gemm(16384, 4096, 1024)
    size = 2 * (16384 * 1024 + 16384 * 4096)
    work = Work("gemm", gemm.flop, size, 2 * 4096 * 1024, 0, "fp16", gemm=gemm)
    gpu = find_gpu("T4")
    reached = gemm.flop / layer_time(work, gpu).predicted_us / (gpu.tflops["fp16"] * 1e6)
    assert 0.30 < reached < 0.45
