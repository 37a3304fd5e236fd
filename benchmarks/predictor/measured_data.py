"""Kernels that `measure.py` timed on a GPU, read from the folder `measured`: kernels alone in a CUDA graph."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from attention_data import attention
from data import Dataset, Sample, in_turn, product
from norms_data import layer_norm, looped, row_work, softmax

from trtopt.hardware.spec import find_gpu
from trtopt.profiling.engine_layers import convolution
from trtopt.roofline.rows import RowSizes
from trtopt.roofline.work import AttentionSizes, Window, Work, alignment_of, sparse_work
from trtopt.support.precision import ELEMENT_BYTES, Precision

MEASURED = Path(__file__).parent / "measured"

GPUS = {"h200": "H200-SXM-141GB", "h100": "H100-SXM5-80GB"}
"""The tables, and the GPU each was measured on."""

_WEIGHTS, _MOST_INPUTS, _INPUT_BYTES, _COLD_BYTES = 5, 16, 240 * 2**20, 120 * 2**20
"""What takes turns in `measure.py`: products with as many weights, attention with as many inputs at most, which exceed
so many bytes, and cold rows with inputs of so many."""

Sizes = Mapping[str, int]
Read = Callable[[str, Precision, Sizes], Work]


def measured(table: str, kind: str, ops: tuple[str, ...] = (), dtypes: tuple[str, ...] = ()) -> Dataset:
    """The kernels of a kind; a group is a case.

    Args:
        table: Of :data:`GPUS`.
        kind: As the table names it.
        ops: The operators, or all.
        dtypes: The types, or all.
    """
    samples = [
        _sample(row)
        for row in _rows_of(table)
        if row["kind"] == kind and (not ops or row["op"] in ops) and (not dtypes or row["dtype"] in dtypes)
    ]
    return Dataset(f"{table} {kind}", find_gpu(GPUS[table]), tuple(samples))


def behind_products(table: str) -> Dataset:
    """What an element-wise kernel on the result of a product adds to the time of the product alone. GELU is not among
    them: PyTorch's takes 1.4 times as long as ReLU there, for its error function."""
    rows = [row for row in _rows_of(table) if row["kind"] == "pair"]
    alone = {row["sizes"]: float(row["us"]) for row in rows if row["op"] == "nothing"}
    samples = []
    for row in rows:
        if row["op"] in ("relu", "add"):
            sizes = _sizes(row)
            work = _memory(row["op"], Precision(row["dtype"]), {"elements": sizes["m"] * sizes["n"]})
            samples.append(Sample(work, float(row["us"]) - alone[row["sizes"]], f"{row['op']} {row['sizes']}"))
    return Dataset(f"{table} behind products", find_gpu(GPUS[table]), tuple(samples))


def _rows_of(table: str) -> list[Mapping[str, str]]:
    with gzip.open(MEASURED / f"{table}.csv.gz", "rt") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def _sizes(row: Mapping[str, str]) -> dict[str, int]:
    return {name: int(value) for name, value in (item.split(":") for item in row["sizes"].split())}


def _sample(row: Mapping[str, str]) -> Sample:
    work = _READ[row["kind"]](row["op"], Precision(row["dtype"]), _sizes(row))
    return Sample(work, float(row["us"]), f"{row['op']} {row['dtype']} {row['sizes']}")


def _gemm(op: str, dtype: Precision, s: Sizes) -> Work:
    """Results have 16 bits, those of INT8 32."""
    work = product(s["m"], s["n"], s["k"], dtype)
    written = s["m"] * s["n"] * (4 if dtype == Precision.INT8 else 2)
    work = dataclasses.replace(work, write_bytes=written)
    return in_turn(sparse_work(work) if op == "sparse" else work, _WEIGHTS)


def _conv(op: str, dtype: Precision, s: Sizes) -> Work:
    padding = s["r"] // 2 if s["stride"] < s["r"] else 0
    out = (s["h"] + 2 * padding - s["r"]) // s["stride"] + 1
    window = Window((s["r"],) * 2, (s["stride"],) * 2, (1, 1), s["groups"])
    return convolution((s["n"], s["c"], s["h"], s["w"]), (s["k"], out, out), window, dtype, dtype)


def _attention(op: str, dtype: Precision, s: Sizes) -> Work:
    sizes = AttentionSizes(
        s["q"],
        s["keys"],
        s["size"],
        s["size"],
        s["b"] * s["heads"],
        s["b"] * s["kv_heads"],
        op.startswith(("causal", "step")),
    )
    work = attention(sizes, dtype, dtype)
    turns = max(1, min(_MOST_INPUTS, math.ceil(_INPUT_BYTES / work.bytes)))
    touched = turns * work.read_bytes + work.write_bytes
    return dataclasses.replace(
        work, network_share=work.read_bytes / (work.read_bytes + work.write_bytes), inference_bytes=touched
    )


def _rows(op: str, dtype: Precision, s: Sizes) -> Work:
    count, length = s["count"], s["length"]
    if op.endswith(("compiled", "cold")):
        work = row_work(count, length, dtype, looped(length), "softmax" if op.startswith("softmax") else "ln")
        turns = max(1, math.ceil(_COLD_BYTES / work.read_bytes)) if op.endswith("cold") else 1
        return dataclasses.replace(work, network_share=1.0, inference_bytes=turns * work.bytes) if turns > 1 else work
    if op == "softmax":
        return row_work(count, length, dtype, softmax(length), "softmax")
    if op == "sum":
        size = int(count * length * ELEMENT_BYTES[dtype])
        rows = RowSizes(count, length, passes=1)
        return Work("memory", count * length, size, 0, int(count * ELEMENT_BYTES[dtype]), dtype, rows=rows)
    return row_work(count, length, dtype, layer_norm(length) if op == "layer_norm" else None)


def _memory(op: str, dtype: Precision, s: Sizes) -> Work:
    elements = s["elements"]
    size = int(elements * ELEMENT_BYTES[dtype])
    written = int(elements * 2) if op == "cast" and dtype == Precision.FP32 else elements * 4 if op == "cast" else size
    return Work("memory", elements, size, 0, written, dtype)


def _layout(op: str, dtype: Precision, s: Sizes) -> Work:
    elements = 1
    for value in s.values():
        elements *= value
    size = int(elements * ELEMENT_BYTES[dtype])
    rows = (s["size"],) if op == "heads" else (s["c"], s["n"]) if op == "transpose" else (s["c"], s["h"] * s["w"])
    return Work("layout", 0, size, 0, size, dtype, alignment_bytes=alignment_of(*rows, dtype=dtype))


_READ: dict[str, Read] = {
    "gemm": _gemm,
    "conv": _conv,
    "attention": _attention,
    "rows": _rows,
    "memory": _memory,
    "layout": _layout,
}
