"""The measured kernels the performance model is fitted to and scored on, read from the folder `profiles`.

The files are other people's measurements (see its README for sources and licences); none is part of this repository.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trtopt.engine.layers import read_layer
from trtopt.hardware.spec import GpuSpec, find_gpu
from trtopt.profiling.engine_layers import convolution, layer_work
from trtopt.roofline.layer import Timing
from trtopt.roofline.work import Gemm, Window, Work, alignment_of
from trtopt.support.precision import ELEMENT_BYTES, Precision

PROFILES = Path(__file__).parents[3] / "shared" / "profiles"

TABLES = {
    "a100_sxm": "A100-SXM4-80GB",
    "h100_sxm": "H100-SXM5-80GB",
    "rtx_pro_6000_server": "RTX-PRO-6000-BW-Server",
}
"""Tables of matrix products, and the GPU each was measured on."""

IN_TURN = ("h100_sxm", "rtx_pro_6000_server")
"""Tables whose own constants are fitted to products that take turns, as all do (:func:`taking_turns`). On A100 results
come from the L2 cache no faster than from the DRAM, so that nothing would tell how much of it stays between kernels:
fitted so, the layers of its engines come out 2 points worse."""

_MOST_WEIGHTS = 5


@dataclass(frozen=True)
class Sample:
    """One measured kernel: its work, its time in microseconds, the group that is left out as a whole, the work of
    the kernel beside it that was timed with it, and that of a kernel whose own time was taken off."""

    work: Work
    measured_us: float
    group: str
    beside: Work | None = None
    taken_off: Work | None = None


@dataclass(frozen=True)
class Dataset:
    """Measured kernels of one GPU, how they were timed, and how many tensors the timed operator makes."""

    name: str
    gpu: GpuSpec
    samples: tuple[Sample, ...]
    timing: Timing = "graph"
    tensors: int = 1


def gemm_table(name: str, gpu: str) -> Dataset:
    """The BF16 rows of a table of matrix products; a group is a pair (n, k)."""
    with gzip.open(PROFILES / "gemm" / f"gemm_{name}.csv.gz", "rt") as file:
        rows = [row for row in csv.DictReader(file) if row["gemm_dtype"] == "bfloat16"]
    samples = []
    for row in rows:
        m, n, k = int(row["m"]), int(row["n"]), int(row["k"])
        samples.append(Sample(product(m, n, k, "bf16"), float(row["latency_ms"]) * 1e3, f"{n}x{k}"))
    table = Dataset(name, find_gpu(gpu), tuple(samples))
    return taking_turns(table) if name in IN_TURN else table


def taking_turns(table: Dataset) -> Dataset:
    """The products of a table as they were timed: in turn with others of their shape."""
    works = [in_turn(sample.work, weights_in_turn(sample.work, table.gpu)) for sample in table.samples]
    samples = tuple(replace(sample, work=work) for sample, work in zip(table.samples, works, strict=True))
    return replace(table, samples=samples)


def weights_in_turn(work: Work, gpu: GpuSpec) -> int:
    """How many products of these tables take turns: as many as their weights go into the L2 cache, rounded up, but five
    at most (ai-dynamo/aiconfigurator, collector/trtllm/collect_gemm.py)."""
    return max(1, min(_MOST_WEIGHTS, math.ceil(gpu.l2_mib * 2**20 / work.weight_bytes)))


def in_turn(work: Work, weights: int) -> Work:
    """A product that takes turns with others of its shape that have weights of their own, but the same input and
    output."""
    return replace(work, inference_bytes=weights * work.weight_bytes + work.read_bytes + work.write_bytes)


def product(m: int, n: int, k: int, dtype: Precision) -> Work:
    """A matrix product that reads and writes its operands once."""
    size = ELEMENT_BYTES[dtype]
    gemm = Gemm(m, n, k)
    return Work(
        "gemm",
        gemm.flop,
        int(m * k * size),
        int(k * n * size),
        int(m * n * size),
        dtype,
        gemm=gemm,
        alignment_bytes=alignment_of(n, k, dtype=dtype),
    )


def deepbench(kind: Literal["gemm", "conv"]) -> Dataset:
    """DeepBench on a V100: matrix products or convolutions, FP32 and FP16 with FP32 sums; a group is a row."""
    with (PROFILES / "deepbench" / f"{kind}_v100.csv").open() as file:
        rows = list(csv.DictReader(file))
    read, column = (_deepbench_product, "time_ms") if kind == "gemm" else (_deepbench_convolution, "fwd_ms")
    samples = [
        Sample(read(row, "fp32" if "FP32" in row["sheet"] else "fp16"), float(row[column]) * 1e3, f"{kind} {index}")
        for index, row in enumerate(rows)
    ]
    return Dataset(f"deepbench {kind}", find_gpu("V100"), tuple(samples), "repeated")


def _deepbench_product(row: dict[str, str], dtype: Precision) -> Work:
    return product(int(row["M"]), int(row["N"]), int(row["K"]), dtype)


def _deepbench_convolution(row: dict[str, str], dtype: Precision) -> Work:
    n, c, h, w, k, r, s, p, q = (int(row[key]) for key in ("N", "C", "H", "W", "K", "R", "S", "P", "Q"))
    window = Window((r, s), (int(row["stride_h"]), int(row["stride_w"])), (1, 1))
    return convolution((n, c, h, w), (k, p, q), window, dtype, dtype)


def tensorrt_layers(gpu: str) -> Dataset:
    """TensorRT's own layer profiles; a group is an engine. Layers of zero time are no-ops and left out."""
    if gpu == "A100-PCIe-80GB":
        folder = PROFILES / "tensorrt-layers" / "A100-80GB-PCIe"
        graphs = sorted(folder.glob("*/*.graph.json"))
    else:
        graphs = sorted((PROFILES / "tensorrt-layers" / "RTX-3060-Laptop").glob("*.graph.json"))
    samples = []
    for path in graphs:
        group = path.parent.name if gpu == "A100-PCIe-80GB" else path.name.split("_fp16")[0]
        layers = json.loads(path.read_text())["Layers"]
        count, *times = json.loads(path.with_name(path.name.replace(".graph.", ".profile.")).read_text())
        runs = count["count"]
        for layer, row in zip(layers, times, strict=True):
            if layer["Name"] != row["name"]:
                raise ValueError(f"{path.name}: {layer['Name']} is not {row['name']}")
            work = layer_work(read_layer(layer), layer)
            if work is not None and row["averageMs"] > 0:
                samples.append(Sample(work, row["averageMs"] * 1e3, group))
    timing: Timing = "single run" if runs == 1 else "profile"
    return Dataset(f"tensorrt-{gpu}", find_gpu(gpu), tuple(samples), timing)


def engines_of(dataset: Dataset) -> Iterator[str]:
    """The groups, in order."""
    return iter(dict.fromkeys(sample.group for sample in dataset.samples))
