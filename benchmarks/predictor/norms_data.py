"""Measured normalizations, softmax and element-wise kernels (the folder `norms`; its README says how they were timed).

The kernels of PyTorch that NeuSight timed walk over rows in their own ways, which their sources tell (`aten/src/ATen/
native/cuda` of 2.1: layer_norm_kernel.cu, PersistentSoftmax.cuh, SoftMax.cu).
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import math
from typing import Literal

from data import PROFILES, Dataset, Sample

from trtopt.hardware.spec import find_gpu
from trtopt.roofline.rows import RowKernel, RowSizes
from trtopt.roofline.work import Work
from trtopt.support.precision import ELEMENT_BYTES, Precision

Op = Literal["ln", "softmax", "elementwise"]

NEUSIGHT = {"a100_pcie_40gb": "A100-PCIe-40GB", "a100_80gb_pcie": "A100-PCIe-80GB", "t4": "T4"}
"""The tables, and the GPU each was measured on."""

_TWO_TENSORS = ("add", "mul", "div", "pow")
_FLOP = {"ln": 7, "softmax": 5}
_TENSORS = {"ln": 3}
"""Tensors that an operator makes: a layer norm writes mean and deviation too."""


def layer_norm(length: int) -> RowKernel:
    """vectorized_layer_norm_kernel: 128 threads per row, four elements a load, one pass for mean and variance."""
    return RowKernel(128, 2 * math.ceil(length / 512), 2, idles=True)


def softmax(length: int) -> RowKernel:
    """softmax_warp_forward holds up to 1024 elements in a warp, all loads under way at once; cunn_SoftMaxForward passes
    three times, four elements a load and the rest one by one."""
    if length <= 1024:
        return RowKernel(32, math.ceil(length / 32) / 4, 1, idles=True)
    threads = 32
    while threads < min(length // 4, 1024) // 2:
        threads *= 2
    whole, rest = divmod(length, 4 * threads)
    return RowKernel(threads, 3 * (whole + math.ceil(rest / threads)), 3, idles=True)


def looped(length: int) -> RowKernel | None:
    """torch.compile reduces up to 1024 elements at once (its persistent reductions); longer rows in steps of 2048 with
    16 warps, twice."""
    return None if length <= 1024 else RowKernel(512, 2 * math.ceil(length / 2048), 2)


def row_work(count: int, length: int, dtype: Precision, kernel: RowKernel | None, op: Op = "ln") -> Work:
    """A kernel that reads and writes ``count`` rows."""
    size = int(count * length * ELEMENT_BYTES[dtype])
    rows = RowSizes(count, length, passes=3 if op == "softmax" else 2, kernel=kernel)
    return Work("memory", _FLOP[op] * count * length, size, 0, size, dtype, rows=rows)


def neusight(table: str, op: Op) -> Dataset:
    """The rows of one kind of kernel, FP32, timed by events around each launch; a group is a shape."""
    with gzip.open(PROFILES / "norms" / f"neusight_{table}.csv.gz", "rt") as file:
        found = list(csv.DictReader(file))
    samples = []
    for row in found:
        if op != (row["op"] if row["op"] in _FLOP else "elementwise"):
            continue
        count, length = int(row["B"]), int(row["H"])
        if op == "elementwise":
            size = 4 * count * length
            work = Work("memory", count * length, size * (1 + (row["op"] in _TWO_TENSORS)), 0, size, "fp32")
        else:
            kernel = layer_norm(length) if op == "ln" else softmax(length)
            work = row_work(count, length, Precision.FP32, kernel, op)
        samples.append(Sample(work, float(row["latency_ms"]) * 1e3, f"{count}x{length}"))
    return Dataset(f"{table} {op}", find_gpu(NEUSIGHT[table]), tuple(samples), "events", _TENSORS.get(op, 1))


def cudnn_norms(table: str, gpu: str, backend: str) -> Dataset:
    """The norms of one backend, BF16: kernels alone, with the L2 flushed: nothing that they read is there, and what
    they write drives out what is. A group is a row."""
    known = find_gpu(gpu)
    with gzip.open(PROFILES / "norms" / f"norms_cudnn_{table}.csv.gz", "rt") as file:
        found = [row for row in csv.DictReader(file) if row["backend"] == backend and row["norm_type"] == "rms_norm"]
    samples = []
    for row in found:
        count, length = int(row["N"]), int(row["C"])
        kernel = None if backend == "cudnn" else looped(length)
        warm = row_work(count, length, Precision.BF16, kernel)
        work = dataclasses.replace(warm, network_share=1.0, inference_bytes=round(2 * known.l2_mib * 2**20))
        samples.append(Sample(work, float(row["fwd_time_from_gbps_us"]), f"{row['norm_name']}"))
    return Dataset(f"{table} {backend}", known, tuple(samples))
