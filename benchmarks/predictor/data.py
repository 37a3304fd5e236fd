"""The measured kernels the performance model is fitted to and scored on, read from the folder `profiles`.

The files are other people's measurements (see its README for sources and licences); none is part of this repository.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtopt.hardware.spec import GpuSpec, find_gpu
from trtopt.roofline.layer import Timing
from trtopt.roofline.work import ELEMENT_BYTES, Gemm, MathType, Window, Work, alignment_of

PROFILES = Path(__file__).parents[3] / "shared" / "profiles"


@dataclass(frozen=True)
class Sample:
    """One measured kernel: its work, its time in microseconds, and the group that is left out as a whole."""

    work: Work
    measured_us: float
    group: str


@dataclass(frozen=True)
class Dataset:
    """Measured kernels of one GPU, and how they were timed."""

    name: str
    gpu: GpuSpec
    samples: tuple[Sample, ...]
    timing: Timing = "graph"


def gemm_table(name: str, gpu: str) -> Dataset:
    """The BF16 rows of a table of matrix products; a group is a pair (n, k)."""
    with gzip.open(PROFILES / "gemm" / f"gemm_{name}.csv.gz", "rt") as file:
        rows = [row for row in csv.DictReader(file) if row["gemm_dtype"] == "bfloat16"]
    samples = []
    for row in rows:
        m, n, k = int(row["m"]), int(row["n"]), int(row["k"])
        samples.append(Sample(product(m, n, k, "bf16"), float(row["latency_ms"]) * 1e3, f"{n}x{k}"))
    return Dataset(name, find_gpu(gpu), tuple(samples))


def product(m: int, n: int, k: int, dtype: MathType) -> Work:
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
    return Dataset(f"deepbench {kind}", find_gpu("V100"), tuple(samples), "profile")


def _deepbench_product(row: dict[str, str], dtype: MathType) -> Work:
    return product(int(row["M"]), int(row["N"]), int(row["K"]), dtype)


def _deepbench_convolution(row: dict[str, str], dtype: MathType) -> Work:
    n, c, h, w, k, r, s, p, q = (int(row[key]) for key in ("N", "C", "H", "W", "K", "R", "S", "P", "Q"))
    window = Window((r, s), (int(row["stride_h"]), int(row["stride_w"])), (1, 1))
    return convolution((n, c, h, w), (k, p, q), window, dtype, dtype)


def convolution(
    data: tuple[int, int, int, int], out: tuple[int, int, int], window: Window, dtype: MathType, out_dtype: MathType
) -> Work:
    """A convolution of [N, C, H, W] to [K, P, Q] per image."""
    n, c, h, w = data
    k, p, q = out
    group, taps = window.group, math.prod(window.kernel)
    gemm = Gemm(n * p * q, k // group, c // group * taps, group)
    size = ELEMENT_BYTES[dtype]
    return Work(
        "depthwise" if c == group and group > 1 else "conv",
        gemm.flop,
        int(n * c * h * w * size),
        int(k * c // group * taps * size),
        int(n * k * p * q * ELEMENT_BYTES[out_dtype]),
        dtype,
        gemm=gemm,
        window=window,
        alignment_bytes=alignment_of(c, k, dtype=dtype),
    )


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
            work = layer_work(layer)
            if work is not None and row["averageMs"] > 0:
                samples.append(Sample(work, row["averageMs"] * 1e3, group))
    timing: Timing = "single run" if runs == 1 else "profile"
    return Dataset(f"tensorrt-{gpu}", find_gpu(gpu), tuple(samples), timing)


_SKIPPED = ("NoOp", "shape_call", "Constant")


def layer_work(layer: dict[str, Any]) -> Work | None:
    """The work of a layer of the inspector's JSON, from that alone; None for layers that are no kernels."""
    kind = layer["LayerType"]
    if kind in _SKIPPED or not layer["Inputs"]:
        return None
    read = sum(_tensor_bytes(item) for item in layer["Inputs"])
    write = sum(_tensor_bytes(item) for item in layer["Outputs"])
    weights = sum(int(layer[key]["Count"] * _SIZES[layer[key]["Type"]]) for key in _WEIGHTS if layer.get(key))
    data, out = layer["Inputs"][0], layer["Outputs"][0]
    if layer.get("ParameterType") == "Convolution" or kind == "ConvActPool":
        return _convolution_layer(layer, data, (read, weights, write))
    if kind == "gemm":
        (m, k), (_, n) = data["Dimensions"][-2:], layer["Inputs"][1]["Dimensions"][-2:]
        dtype = _math_type(layer, data)
        return Work("gemm", 2 * m * n * k, read, weights, write, dtype, _sums_in_fp16(layer), Gemm(m, n, k))
    flop = math.prod(out["Dimensions"]) * (math.prod(layer["WindowSize"]) if "WindowSize" in layer else 1)
    if kind != "Reformat":
        return Work("memory", flop, read, weights, write, _math_type(layer, data))
    rows = [int(item["Dimensions"][1] * _element_bytes(_format(item))) for item in (data, out)]
    return Work("layout", flop, read, weights, write, "fp32", alignment_bytes=alignment_of(*rows, dtype="int8"))


def _convolution_layer(layer: dict[str, Any], data: dict[str, Any], moved: tuple[int, int, int]) -> Work:
    n, c, h, w = data["Dimensions"]
    with_pool = "Conv" if layer["LayerType"] == "ConvActPool" else ""
    kernel, stride = tuple(layer[with_pool + "Kernel"]), tuple(layer[with_pool + "Stride"])
    window = Window(kernel, stride, tuple(layer[with_pool + "Dilation"]), layer[with_pool + "Groups"])
    pads = zip(layer[with_pool + "PrePadding"], layer[with_pool + "PostPadding"], strict=True)
    pad = [before + after for before, after in pads]
    size = [d * (r - 1) + 1 for d, r in zip(window.dilation, kernel, strict=True)]
    p, q = ((have + pad[i] - size[i]) // stride[i] + 1 for i, have in enumerate((h, w)))
    dtype = _math_type(layer, data)
    work = convolution((n, c, h, w), (layer[with_pool + "OutMaps"], p, q), window, dtype, dtype)
    return Work(
        work.kind,
        work.flop,
        *moved,
        dtype,
        accumulate_fp16=_sums_in_fp16(layer),
        gemm=work.gemm,
        window=window,
        alignment_bytes=work.alignment_bytes,
    )


_WEIGHTS = ("Weights", "Bias", "ConvWeights", "ConvBias")
_SIZES = {"Float": 4.0, "Half": 2.0, "Int8": 1.0, "Int32": 4.0}


def _format(tensor: dict[str, Any]) -> str:
    return str(tensor["Format/Datatype"])


def _element_bytes(text: str) -> float:
    for words, size in ((("FP32", "Float"), 4), (("FP16", "Half"), 2), (("Int8", "INT8"), 1), (("Int32",), 4)):
        if any(word in text for word in words):
            return size
    raise ValueError(f"format {text!r}")


def _tensor_bytes(tensor: dict[str, Any]) -> int:
    """As it lies in memory: vectorized formats pad the channels."""
    dims, text = list(tensor["Dimensions"]), _format(tensor)
    packed = re.search(r"channel % (\d+)", text)
    vector = int(packed.group(1)) if packed else 32 if "Thirty-two" in text else 4 if "Four wide" in text else 1
    if len(dims) == 4:
        dims[1] = math.ceil(dims[1] / vector) * vector
    return int(math.prod(dims) * _element_bytes(text))


def _math_type(layer: dict[str, Any], data: dict[str, Any]) -> MathType:
    size = _element_bytes(_format(data))
    if size == 4:
        return "tf32" if "tf32" in layer.get("TacticName", "") else "fp32"
    return "fp16" if size == 2 else "int8"


def _sums_in_fp16(layer: dict[str, Any]) -> bool:
    """From the kernel's name: TensorRT's end their types with that of the sum; cuDNN's say h for FP16 sums."""
    name = layer.get("TacticName", "")
    return bool(re.search(r"f16f16_f16f16_f16(_|$)|_h(1688|16816)", name))


def engines_of(dataset: Dataset) -> Iterator[str]:
    """The groups, in order."""
    return iter(dict.fromkeys(sample.group for sample in dataset.samples))
