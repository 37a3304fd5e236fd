"""The measurements beside the checkout: how they are read, and how well the shipped constants predict them.

The errors here are in-sample: the shipped constants were fitted to these kernels. They guard against a change of the
model that forgets to fit them again; what the model can do on kernels it has not seen is in ``benchmarks/predictor``.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from trtopt.roofline.batch import Batch, Times
from trtopt.roofline.constants import constants_for
from trtopt.roofline.layer import launch_us

ROOT = Path(__file__).parents[2]
PROFILES = ROOT.parent / "shared" / "profiles"

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not PROFILES.is_dir(), reason="the folder profiles is not beside the checkout"),
]

TABLES = {
    "a100_sxm": ("A100-SXM4-80GB", 9240, 0.10),
    "h100_sxm": ("H100-SXM5-80GB", 35700, 0.08),
    "rtx_pro_6000_server": ("RTX-PRO-6000-BW-Server", 35700, 0.13),
}
ENGINES = {
    "A100-PCIe-80GB": ({"fp16", "fp32", "qat", "qat-residual", "qat-residual-qgap"}, 132, "single run"),
    "RTX-3060-Laptop": ({"alexnet", "mobilenet_v2", "resnet18"}, 92, "profile"),
}


DEEPBENCH = {"gemm": 320, "conv": 188}


@cache
def data() -> ModuleType:
    """``benchmarks/predictor/data.py``: the benchmarks are no package."""
    name = "predictor_data"
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / "predictor" / "data.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@cache
def dataset(name: str) -> Any:
    if name in ENGINES:
        return data().tensorrt_layers(name)
    return data().deepbench(name) if name in DEEPBENCH else data().gemm_table(name, TABLES[name][0])


@cache
def predicted(name: str) -> tuple[Times, np.ndarray, np.ndarray]:
    """Times without launch, predictions with it, measurements."""
    found = dataset(name)
    constants = constants_for(found.gpu)
    batch = Batch.of([sample.work for sample in found.samples], found.gpu)
    times = batch.predict(constants)
    launch = launch_us(found.gpu, constants, timing=found.timing)
    return times, times.total + launch, np.array([sample.measured_us for sample in found.samples])


@pytest.mark.parametrize("name", ENGINES)
def test_every_kernel_of_the_engines_is_read(name: str) -> None:
    found, (engines, kernels, timing) = dataset(name), ENGINES[name]
    assert {sample.group for sample in found.samples} == engines
    assert (len(found.samples), found.gpu.name, found.timing) == (kernels, name, timing)
    assert all(sample.measured_us > 0 and sample.work.bytes > 0 for sample in found.samples)


@pytest.mark.parametrize("name", TABLES)
def test_every_bf16_product_of_the_tables_is_read(name: str) -> None:
    found, (gpu, products, _) = dataset(name), TABLES[name]
    assert (len(found.samples), found.gpu.name, found.timing) == (products, gpu, "graph")
    assert {sample.work.dtype for sample in found.samples} == {"bf16"}
    assert all(sample.group == f"{sample.work.gemm.n}x{sample.work.gemm.k}" for sample in found.samples)


@pytest.mark.parametrize(
    ("n", "k", "weights"),
    [
        (8192, 16384, 1),
        (8192, 8192, 1),
        (8192, 7168, 2),
        (4096, 8192, 2),
        (5120, 5120, 3),
        (2048, 5120, 5),
        (128, 128, 5),
    ],
)
def test_products_take_turns_with_weights_that_fill_the_cache(n: int, k: int, weights: int) -> None:
    """128 MiB of L2; 16 bits an element, five at most."""
    work = data().product(16, n, k, "bf16")
    assert data().weights_in_turn(work, dataset("rtx_pro_6000_server").gpu) == weights
    assert data().in_turn(work, weights).inference_bytes == weights * work.weight_bytes + 32 * (n + k)


def test_products_of_an_earlier_release_are_taken_as_alone() -> None:
    assert not any(sample.work.inference_bytes for sample in dataset("a100_sxm").samples)
    assert all(sample.work.inference_bytes for sample in dataset("h100_sxm").samples)


@pytest.mark.parametrize(("kind", "rows"), DEEPBENCH.items())
def test_every_row_of_deepbench_is_read(kind: str, rows: int) -> None:
    found = dataset(kind)
    assert len(found.samples) == rows
    assert {sample.work.kind for sample in found.samples} == {kind}
    assert {sample.work.dtype for sample in found.samples} == {"fp32", "fp16"}


def test_resnet_18_has_its_flop_in_every_engine_of_the_a100() -> None:
    """1.814 G multiply-adds an image, in convolutions and one product."""
    for engine in ENGINES["A100-PCIe-80GB"][0]:
        works = [sample.work for sample in dataset("A100-PCIe-80GB").samples if sample.group == engine]
        flop = sum(work.flop for work in works if work.gemm is not None)
        assert flop / 32 / 1e9 == pytest.approx(3.628, rel=0.005), engine


def test_the_accumulator_is_read_from_the_name_of_the_kernel() -> None:
    laptop, server = (dataset(name).samples for name in ("RTX-3060-Laptop", "A100-PCIe-80GB"))
    products = [sample.work for sample in laptop if sample.work.gemm is not None and sample.work.kind != "depthwise"]
    assert np.mean([work.accumulate_fp16 for work in products]) > 0.8
    assert not any(sample.work.accumulate_fp16 for sample in server if sample.work.dtype != "fp16")


def test_the_type_of_the_arithmetic_is_read_from_the_name_of_the_kernel() -> None:
    """The engine in FP32 was allowed TF32, and took it for all but the first convolution."""
    found = {engine: Counter[str]() for engine in ENGINES["A100-PCIe-80GB"][0]}
    for sample in dataset("A100-PCIe-80GB").samples:
        if sample.work.gemm is not None:
            found[sample.group][sample.work.dtype] += 1
    assert found["fp32"]["fp32"] == 1 and found["fp32"]["tf32"] == 20
    assert set(found["fp16"]) == {"fp16"}
    assert found["qat"]["int8"] >= 19


@pytest.mark.parametrize("name", [*ENGINES, *TABLES, *DEEPBENCH])
def test_no_measured_kernel_beats_its_bound(name: str) -> None:
    times, _, measured = predicted(name)
    below = np.flatnonzero(measured < times.bound)
    assert not len(below), [dataset(name).samples[index] for index in below[:10]]


@pytest.mark.parametrize("name", ENGINES)
def test_kernels_of_the_engines_are_predicted_within_20_percent_in_sample(name: str) -> None:
    _, times, measured = predicted(name)
    assert np.mean(np.abs(times / measured - 1)) < 0.20
    assert 0.9 < times.sum() / measured.sum() < 1.1


@pytest.mark.parametrize("name", TABLES)
def test_products_of_the_tables_are_predicted_in_sample(name: str) -> None:
    _, times, measured = predicted(name)
    assert np.mean(np.abs(times / measured - 1)) < TABLES[name][2]
    assert 0.95 < times.sum() / measured.sum() < 1.05


@pytest.mark.parametrize("kind", DEEPBENCH)
def test_deepbench_is_predicted_within_20_percent_in_sample(kind: str) -> None:
    _, times, measured = predicted(kind)
    assert np.mean(np.abs(times / measured - 1)) < 0.20
