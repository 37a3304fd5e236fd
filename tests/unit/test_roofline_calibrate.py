"""The factors of a GPU fitted to kernels measured on it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from trtopt.hardware.spec import LARGEST_FACTOR, GpuCalibration, find_gpu
from trtopt.roofline.calibrate import Kernel, fit_factors, left_out_error, mean_error, merged
from trtopt.roofline.constants import constants_for, sustained_share
from trtopt.roofline.layer import Timing, layer_time
from trtopt.roofline.work import AttentionSizes, Gemm, Work
from trtopt.support.precision import Precision

L40S = find_gpu("L40S")
CONSTANTS = constants_for(L40S)


def product(m: int, n: int, k: int) -> Work:
    gemm = Gemm(m, n, k)
    return Work("gemm", gemm.flop, 2 * m * k, 2 * k * n, 2 * m * n, Precision.FP16, gemm=gemm)


def stream(size: int) -> Work:
    return Work("memory", size, 2 * size, 0, 2 * size, Precision.FP16)


def attention(tokens: int) -> Work:
    gemm, shape = Gemm(tokens, tokens, 64, 64), AttentionSizes(tokens, tokens, 64, 64, 64, 64)
    moved = 2 * 64 * 64 * tokens
    work = Work("attention", 2 * gemm.flop, 3 * moved, 0, moved, Precision.FP16, gemm=gemm)
    return dataclasses.replace(work, attention=shape)


PLAIN = (
    *(product(512 * i, 1024, 1024) for i in range(1, 17)),
    *(stream(2**20 * i) for i in (1, 2, 4, 8, 32, 64, 100, 128)),
    *(stream(1000 * i) for i in range(1, 9)),
)


def timed(truth: GpuCalibration, works: tuple[Work, ...] = PLAIN, timing: Timing = "profile") -> list[Kernel]:
    gpu = dataclasses.replace(L40S, calibration=truth)
    return [Kernel(work, layer_time(work, gpu, timing=timing).predicted_us, timing) for work in works]


@pytest.mark.parametrize(
    "truth",
    [
        GpuCalibration(clock=0.8, launch=1.2, bandwidth=0.9),
        GpuCalibration(clock=1.1, launch=0.8, bandwidth=0.8),
        GpuCalibration(),
    ],
)
def test_the_factors_behind_the_times_are_found(truth: GpuCalibration) -> None:
    found = fit_factors(timed(truth), L40S, CONSTANTS)
    for name in ("clock", "launch", "bandwidth"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.04), name
    assert found.attention == 1.0


def test_attention_has_a_factor_where_it_was_measured() -> None:
    truth = GpuCalibration(attention=0.7)
    kernels = timed(truth, (*PLAIN, *(attention(512 * i) for i in range(1, 9))))
    found = fit_factors(kernels, L40S, CONSTANTS)
    assert found.attention == pytest.approx(0.7, rel=0.06)
    assert found.clock == pytest.approx(1.0, rel=0.06)


def test_noise_averages_out_and_left_out_layers_are_predicted_better() -> None:
    noise = np.exp(np.random.default_rng(3).normal(0, 0.08, len(PLAIN)))
    kernels = [
        dataclasses.replace(kernel, us=kernel.us * factor)
        for kernel, factor in zip(timed(GpuCalibration(clock=0.7, launch=1.3)), noise.tolist(), strict=True)
    ]
    found = fit_factors(kernels, L40S, CONSTANTS)
    assert found.clock == pytest.approx(0.7, rel=0.1)
    before = mean_error(kernels, L40S, CONSTANTS, GpuCalibration())
    assert left_out_error(kernels, L40S, CONSTANTS) < 0.5 * before
    assert mean_error(kernels, L40S, CONSTANTS, found) < 0.1


def test_without_a_deviation_there_is_nothing_to_gain_from_noise() -> None:
    noise = np.exp(np.random.default_rng(5).normal(0, 0.1, len(PLAIN)))
    kernels = [
        dataclasses.replace(kernel, us=kernel.us * factor)
        for kernel, factor in zip(timed(GpuCalibration()), noise.tolist(), strict=True)
    ]
    found = fit_factors(kernels, L40S, CONSTANTS)
    for name in ("clock", "launch", "bandwidth"):
        assert getattr(found, name) == pytest.approx(1, abs=0.08)
    assert left_out_error(kernels, L40S, CONSTANTS) > 0.95 * mean_error(kernels, L40S, CONSTANTS, GpuCalibration())


def test_a_few_layers_do_not_run_away() -> None:
    one = fit_factors(timed(GpuCalibration(clock=0.5))[:1], L40S, CONSTANTS)
    assert 0.5 < one.clock < 1
    assert one.bandwidth == pytest.approx(1, abs=0.05)
    for scale in (1e-6, 1e9):
        far = [dataclasses.replace(kernel, us=kernel.us * scale) for kernel in timed(GpuCalibration())]
        found = fit_factors(far, L40S, CONSTANTS)
        for name in ("clock", "launch", "bandwidth"):
            assert 1 / LARGEST_FACTOR - 1e-3 <= getattr(found, name) <= LARGEST_FACTOR + 1e-3


def test_one_wrong_layer_moves_little() -> None:
    kernels = timed(GpuCalibration(clock=0.8))
    kernels[3] = dataclasses.replace(kernels[3], us=kernels[3].us * 50)
    assert fit_factors(kernels, L40S, CONSTANTS).clock == pytest.approx(0.8, rel=0.06)


def test_layers_of_one_work_and_timing_are_merged() -> None:
    first, second = product(64, 64, 64), stream(100)
    found = merged([Kernel(first, 2.0, "profile"), Kernel(second, 3.0, "profile"), Kernel(first, 4.0, "profile")])
    assert found == (Kernel(first, 3.0, "profile", 2), Kernel(second, 3.0, "profile", 1))
    assert len(merged([Kernel(first, 2.0, "profile"), Kernel(first, 2.0, "graph")])) == 2


def test_constants_and_clock_are_those_of_the_calibration() -> None:
    gpu = dataclasses.replace(L40S, calibration=GpuCalibration(clock=0.9, launch=2.0, bandwidth=0.5, attention=2.4))
    found = constants_for(gpu)
    assert found.launch_us == pytest.approx(2 * CONSTANTS.launch_us)
    assert found.dram_share == pytest.approx(0.5 * CONSTANTS.dram_share)
    assert found.attention_share == min(1.0, 2.4 * CONSTANTS.attention_share)
    assert sustained_share(gpu) == pytest.approx(0.9)
    assert found.half_area == CONSTANTS.half_area


def test_no_calibrated_prediction_is_below_the_physical_bound() -> None:
    gpu = dataclasses.replace(L40S, calibration=GpuCalibration(clock=2.5, launch=0.4, bandwidth=2.5, attention=2.5))
    for work in (product(8192, 8192, 8192), attention(4096)):
        assert layer_time(work, gpu).predicted_us >= work.flop / (L40S.tflops["fp16"] * 1e6)
    big = stream(2**30)
    assert layer_time(big, gpu).predicted_us >= (big.bytes - L40S.l2_mib * 2**20) / (L40S.bandwidth_gbs * 1e3)
