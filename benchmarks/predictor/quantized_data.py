"""The measured products of 8 and 4 bits, and the kernels that quantize their inputs (folder `profiles/gemm-8bit`)."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import math
from dataclasses import dataclass

from data import IN_TURN, PROFILES, Dataset, Sample, in_turn, product, weights_in_turn

from trtopt.hardware.spec import GpuSpec, find_gpu
from trtopt.roofline.gemm import held_share
from trtopt.roofline.layer import Timing
from trtopt.roofline.rows import RowKernel, RowSizes
from trtopt.roofline.work import Gemm, Work
from trtopt.support.precision import ELEMENT_BYTES, Precision

_RESULT_BYTES = 2
"""Bytes of an element of the input before it is quantized, and of the result: BF16 or FP16."""


_ON_CUDA_CORES, _FEW_ROWS, _THREADS = ("8.9", "12.0"), 8, 128
"""GPUs on which FP8 products of as many rows at most are computed without Tensor Cores in TensorRT-LLM (``linear.py``,
``cuda_scaled_mm``), and the threads of a block of theirs."""

_WIDTH = 12288
"""Columns of the products in front of a plugin's."""


@dataclass(frozen=True)
class Format:
    """How a row of the tables is quantized.

    Attributes:
        dtype: The type of the arithmetic.
        weight_bits, scale_block: As in :class:`~trtopt.roofline.work.Work`.
        scale_bytes: Of one scale of a block.
        quantizes: Whether the timed call quantizes its input first, in a kernel of its own.
        column: The column of the time.
        timing: How it was timed.
    """

    dtype: Precision
    weight_bits: int = 0
    scale_block: int = 0
    scale_bytes: int = 0
    quantizes: bool = False
    column: str = "latency_ms"
    timing: Timing = "graph"

    @property
    def operand_bytes(self) -> float:
        """Bytes of an element of the input, its share of the scales included."""
        return ELEMENT_BYTES[self.dtype] + (self.scale_bytes / self.scale_block if self.scale_block else 0)


FORMATS = {
    "fp8": Format(Precision.FP8, column="gemm_only_ms", timing="difference"),
    "fp8_block": Format(Precision.FP8, scale_block=128, scale_bytes=4, quantizes=True),
    "nvfp4": Format(Precision.FP4, scale_block=16, scale_bytes=1, quantizes=True),
    "int8_wo": Format(Precision.FP16, weight_bits=8, timing="single run"),
    "int4_wo": Format(Precision.FP16, weight_bits=4, timing="single run"),
    "sq": Format(Precision.INT8, timing="single run"),
}
"""By their names in the tables. FP8 is the product alone."""


def quantized_table(name: str, gpu: str, format_name: str, floor_us: float = 0.0, least_m: int = 0) -> Dataset:
    """The products of one format from ``floor_us`` microseconds and ``least_m`` rows on; a group is a pair (n, k)."""
    item, known = FORMATS[format_name], find_gpu(gpu)
    with gzip.open(PROFILES / "gemm-8bit" / f"gemm_8bit_{name}.csv.gz", "rt") as file:
        rows = [row for row in csv.DictReader(file) if row["gemm_dtype"] == format_name]
    samples = []
    for row in rows:
        m, n, k, time = int(row["m"]), int(row["n"]), int(row["k"]), float(row[item.column]) * 1e3
        if m >= least_m and time >= max(floor_us, 1e-3):
            sample = Sample(quantized_product(m, n, k, item), time, f"{n}x{k}")
            in_front = name in IN_TURN
            timed = _behind_quantization(sample, Gemm(m, n, k), known, item) if in_front else _behind_others(sample, k)
            if format_name == "fp8" and known.compute_capability in _ON_CUDA_CORES and m <= _FEW_ROWS:
                timed = dataclasses.replace(timed, work=on_cuda_cores(timed.work, n, k))
            samples.append(timed)
    return Dataset(f"{name} {format_name}", known, tuple(samples), item.timing)


def _behind_quantization(sample: Sample, gemm: Gemm, gpu: GpuSpec, item: Format) -> Sample:
    """A product as it was timed: in turn with others of its shape, each behind kernels that quantize the same input.

    All that they touch can exceed the L2 cache where the input alone does not. What was taken off as the time of the
    quantization was measured on the input alone, so that the difference holds what it costs to read a cold one. And the
    product reads its operand from the DRAM once writing it has driven its beginning out of the cache.
    """
    work = sample.work
    input_bytes = gemm.m * gemm.k * _RESULT_BYTES
    alone_bytes = input_bytes + work.read_bytes
    touched = in_turn(work, weights_in_turn(work, gpu)).inference_bytes + input_bytes
    driven_out = alone_bytes > held_share(gpu.compute_capability) * gpu.l2_mib * 2**20
    share = work.read_bytes / (work.read_bytes + work.write_bytes) if driven_out else 0.0
    sample = dataclasses.replace(sample, work=dataclasses.replace(work, inference_bytes=touched, network_share=share))
    if item.quantizes:
        return dataclasses.replace(sample, beside=quantize(gemm, item))
    read = Work("memory", gemm.m * gemm.k, input_bytes, 0, 0, Precision.BF16, network_share=1.0)
    cold, taken_off = (dataclasses.replace(read, inference_bytes=each) for each in (touched, alone_bytes))
    return dataclasses.replace(sample, beside=cold, taken_off=taken_off)


def _behind_others(sample: Sample, k: int) -> Sample:
    """A product of a plugin as it was timed: the last layer of an engine, behind three others of 16 bits
    (ai-dynamo/aiconfigurator, collector/trtllm/collect_gemm_trt.py: k x w, w x w and w x k, w = 12288)."""
    touched = sample.work.bytes + (2 * k + _WIDTH) * _WIDTH * _RESULT_BYTES
    return dataclasses.replace(sample, work=dataclasses.replace(sample.work, inference_bytes=touched))


def quantized_product(m: int, n: int, k: int, item: Format) -> Work:
    """The product without the kernel that quantizes its input; its result has 16 bits."""
    per_weight = item.weight_bits / 8 if item.weight_bits else item.operand_bytes
    return dataclasses.replace(
        product(m, n, k, item.dtype),
        read_bytes=int(m * k * item.operand_bytes),
        weight_bytes=int(k * n * per_weight),
        write_bytes=m * n * _RESULT_BYTES,
        weight_bits=item.weight_bits,
        scale_block=item.scale_block,
    )


def on_cuda_cores(work: Work, n: int, k: int) -> Work:
    """A product of few rows as TensorRT-LLM computes it without Tensor Cores (``cudaCoreGemm.cu``): a block adds up two
    columns of all rows, 16 elements of k a load and thread, and then the sums of its threads."""
    walk = RowKernel(_THREADS, math.ceil(k / (16 * _THREADS)), 1, idles=True)
    return dataclasses.replace(work, kind="memory", gemm=None, rows=RowSizes(math.ceil(n / 2), k, kernel=walk))


def quantize(gemm: Gemm, item: Format) -> Work:
    """The kernel that quantizes the input [m, k] of a product: largest value and scale of each block."""
    elements = gemm.m * gemm.k
    written = int(elements * item.operand_bytes)
    return Work("memory", 2 * elements, elements * _RESULT_BYTES, 0, written, Precision.BF16)


def quantize_table(name: str, gpu: str, column: str, floor_us: float = 0.0) -> Dataset:
    """The kernels of dynamic FP8 quantization: ``compute_scale_ms`` or ``scale_matrix_ms``; a group is a k."""
    with gzip.open(PROFILES / "gemm-8bit" / f"quantize_fp8_{name}.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    samples = []
    for row in rows:
        work = quantize(Gemm(int(row["m"]), 1, int(row["k"])), FORMATS["fp8"])
        time = float(row[column]) * 1e3
        if time >= max(floor_us, 1e-3):
            written = 0 if column == "compute_scale_ms" else work.write_bytes
            samples.append(Sample(dataclasses.replace(work, write_bytes=written), time, row["k"]))
    return Dataset(f"{name} {column}", find_gpu(gpu), tuple(samples))
