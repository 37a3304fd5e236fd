"""Measured attention kernels, read from the folder `profiles/attention`."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Mapping

from data import PROFILES, Dataset, Sample

from trtopt.hardware.spec import GpuSpec, find_gpu
from trtopt.roofline.gemm import Chip
from trtopt.roofline.peaks import L2_PORT_BYTES
from trtopt.roofline.work import AttentionSizes, Gemm, Work, alignment_of
from trtopt.support.precision import ELEMENT_BYTES, Precision

GPUS = {
    "a100_sxm": "A100-SXM4-80GB",
    "h100_sxm": "H100-SXM5-80GB",
    "rtx_pro_6000_server": "RTX-PRO-6000-BW-Server",
}
"""Tables of attention kernels, and the GPU each was measured on."""

FLOOR_US = 20.0
"""Rows below it measure launches (see the data's README) and are left out."""

_TYPES = {"bfloat16": Precision.BF16, "fp8": Precision.FP8, "mxfp8": Precision.FP8}

Row = Mapping[str, str]


def attention(sizes: AttentionSizes, dtype: Precision, kv_dtype: Precision) -> Work:
    """An attention that reads Q, K and V once and writes its result in BF16; Q comes in 16 bits."""
    keys = min(sizes.keys, sizes.window) if sizes.window and sizes.queries == 1 else sizes.keys
    key_bytes = int(sizes.kv_heads * keys * (sizes.size + sizes.value_size) * ELEMENT_BYTES[kv_dtype])
    rows = sizes.heads * sizes.queries
    return Work(
        "attention",
        2 * rows * sizes.keys * (sizes.size + sizes.value_size),
        rows * sizes.size * 2 + key_bytes,
        0,
        rows * sizes.value_size * 2,
        dtype,
        gemm=Gemm(sizes.queries, sizes.keys, sizes.size, sizes.heads),
        attention=sizes,
        alignment_bytes=alignment_of(sizes.size, sizes.value_size, dtype=dtype),
    )


def encoder(table: str) -> Dataset:
    """No mask, BF16; a group is a number of heads and a batch."""
    return _dataset(f"encoder {table}", GPUS[table], _rows(f"encoder_{table}"), _encoder)


def context(table: str, *, windowed: bool = False) -> Dataset:
    """Causal attention of prompts in BF16, with RoPE and the writing of the cache, a kernel that moves Q, K and V."""
    rows = [row for row in _rows(f"context_{table}") if _is_bf16(row) and (int(row["window_size"]) > 0) == windowed]
    return _dataset(f"context {table}", GPUS[table], rows, _context)


def generation(table: str) -> Dataset:
    """One query against a BF16 cache; a group is a shape of the heads.

    Left out are rows faster than their bytes beyond the L2 cache take through the DRAM, which no kernel can be (286 of
    the A100's 3531: the cache that was read is not the one that the row names)."""
    gpu = find_gpu(GPUS[table])
    found = _dataset(
        f"generation {table}", gpu.name, [row for row in _rows(f"generation_{table}") if _is_bf16(row)], _step
    )
    kept = tuple(sample for sample in found.samples if sample.measured_us >= _least_us(sample.work, gpu))
    return Dataset(found.name, gpu, kept, found.timing)


def cudnn(causal: bool) -> Dataset:
    """cuDNN's attention of long sequences on a GB200, BF16 and FP8, kernel time alone."""
    rows = [row for row in _rows("sdpa_cudnn_gb200") if (row["attn_mask"] != "no_mask") == causal]
    return _dataset("SDPA", "GB200-per-GPU", rows, _cudnn)


def _dataset(name: str, gpu: str, rows: list[Row], read: Callable[[Row], Sample]) -> Dataset:
    samples = tuple(sample for sample in map(read, rows) if sample.measured_us > FLOOR_US)
    return Dataset(name, find_gpu(gpu), samples, "graph" if gpu.startswith("GB200") else "replay")


def _rows(name: str) -> list[Row]:
    with gzip.open(PROFILES / "attention" / f"{name}.csv.gz", "rt") as file:
        return list(csv.DictReader(file))


def _is_bf16(row: Row) -> bool:
    return row["attn_dtype"] == row["kv_cache_dtype"] == "bfloat16"


def _encoder(row: Row) -> Sample:
    heads, length, size = int(row["num_heads"]) * int(row["batch_size"]), int(row["isl"]), int(row["head_dim"])
    sizes = AttentionSizes(length, length, size, size, heads, heads)
    work = attention(sizes, Precision.BF16, Precision.BF16)
    return Sample(work, float(row["latency_ms"]) * 1e3, f"{row['num_heads']}x{row['batch_size']}")


def _context(row: Row) -> Sample:
    length, size, batch = int(row["isl"]), int(row["head_dim"]), int(row["batch_size"])
    heads, kv_heads = batch * int(row["num_heads"]), batch * int(row["num_key_value_heads"])
    window = int(row["window_size"])
    sizes = AttentionSizes(length, length, size, size, heads, kv_heads, True, window if window < length else 0)
    moved = (heads + 2 * kv_heads) * length * size * 2
    beside = Work("memory", moved, moved, 0, moved, Precision.BF16)
    group = f"{row['num_heads']}x{row['num_key_value_heads']}x{batch}x{size}"
    return Sample(attention(sizes, Precision.BF16, Precision.BF16), float(row["latency_ms"]) * 1e3, group, beside)


def _step(row: Row) -> Sample:
    keys, size, batch = int(row["step"]) + 1, int(row["head_dim"]), int(row["batch_size"])
    heads, kv_heads = batch * int(row["num_heads"]), batch * int(row["num_key_value_heads"])
    window = int(row["window_size"])
    sizes = AttentionSizes(1, keys, size, size, heads, kv_heads, True, window if window < keys else 0)
    group = f"{row['num_heads']}x{row['num_key_value_heads']}x{size}"
    return Sample(attention(sizes, Precision.BF16, Precision.BF16), float(row["latency_ms"]) * 1e3, group)


def _cudnn(row: Row) -> Sample:
    batch, dtype = int(row["batch_size"]), _TYPES[row["data_type"]]
    sizes = AttentionSizes(
        int(row["q_seqlen"]),
        int(row["kv_seqlen"]),
        int(row["head_dim_qk"]),
        int(row["head_dim_vo"]),
        batch * int(row["num_q_heads"]),
        batch * int(row["num_kv_heads"]),
        row["attn_mask"] != "no_mask",
    )
    return Sample(attention(sizes, dtype, dtype), float(row["time_ms"]) * 1e3, row["config_name"])


def _least_us(work: Work, gpu: GpuSpec) -> float:
    chip = Chip(gpu.sm, gpu.clock_tensor_mhz, gpu.bandwidth_gbs * 1e3, gpu.l2_mib * 2**20)
    cached = min(work.bytes, chip.l2_bytes)
    return (work.bytes - cached) / chip.bandwidth + cached / (L2_PORT_BYTES * chip.clock * chip.sm)
