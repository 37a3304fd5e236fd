"""The rows of the table for products of 8 and 4 bits: half of the pairs (n, k) left out, and the GPU left out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from data import TABLES, Dataset, gemm_table
from fit import product_constants
from fitting import PRODUCT_FIELDS, START, STIFF, Measured, log_mean
from quantized_data import quantized_table
from quantized_fit import (
    COARSE_US,
    FIELDS_OF,
    FLOOR_US,
    LEAST_ROWS,
    fp8_table,
    quantized_constants,
    weight_only_tables,
)
from scoring import SPLIT_SEEDS, Fold, Row, compare, halves, predictor

from trtopt.roofline.constants import Constants, constants_for

H100, RTX, A100 = "h100_sxm", "rtx_pro_6000_server", "a100_sxm"


def quantized_rows() -> list[Row]:
    """Every row; 16-bit constants are the shipped ones where shapes are left out, and none of the GPU's own where the
    GPU is.
    """
    rows = []
    what = f"FP8 GEMM alone above {COARSE_US:.0f} us"
    blocks = f"FP8 in blocks and quantization, m > {LEAST_ROWS - 1}"
    for name, other in ((H100, RTX), (RTX, H100)):
        table, own, known = fp8_table(name, COARSE_US), fp8_table(name), fp8_table(other)
        rows.append(_products(compare(_name(table, what, "half"), 0.08, _halved("fp8", [table], own))))
        rows.append(_products(compare(_name(table, what, "GPU"), 0.08, [_left_out("fp8", table, known)])))
        table = quantized_table(name, TABLES[name], "fp8_block", FLOOR_US, LEAST_ROWS)
        rows.append(compare(_name(table, blocks, "half"), 0.25, _halved("fp8_block", [table])))
    nvfp4 = quantized_table(RTX, TABLES[RTX], "nvfp4", FLOOR_US, LEAST_ROWS)
    what = f"NVFP4 GEMM and quantization, m > {LEAST_ROWS - 1}"
    rows.append(compare(_name(nvfp4, what, "half"), 0.15, _halved("fp8", [nvfp4], fp8_table(RTX))))
    rows.append(compare(_name(nvfp4, what, "GPU"), 0.15, [_left_out("fp8", nvfp4, fp8_table(H100))]))
    weights = weight_only_tables()
    what = f"INT8 and INT4 weights above {COARSE_US:.0f} us"
    rows.append(compare(_name(weights[0], what, "half"), 0.12, _halved("weights", weights)))
    rows.append(compare(_name(weights[0], what, "GPU"), 0.12, [_left_out("", table, None) for table in weights]))
    smooth = quantized_table(A100, TABLES[A100], "sq", COARSE_US)
    part = Measured.of(smooth)
    what = f"{smooth.gpu.name}: INT8 GEMM above {COARSE_US:.0f} us, no constant of its own"
    rows.append(compare(what, 0.20, [(predictor(constants_for(smooth.gpu)), [part], part)]))
    return rows


def _products(row: Row) -> Row:
    """``row``, whose products on CUDA cores, described as kernels of rows, are in no interval."""
    held = row.held_back
    return dataclasses.replace(row, held_back=held.only(held.kinds == "gemm 8-bit"))


def _name(table: Dataset, what: str, left_out: str) -> str:
    return f"{table.gpu.name}: {what}, {left_out} left out"


def _halved(kind: str, tables: Sequence[Dataset], fitted: Dataset | None = None) -> list[Fold]:
    """Half of the pairs (n, k) of ``tables`` predicted from the other half of them, or of ``fitted``."""
    folds: list[Fold] = []
    for seed in SPLIT_SEEDS:
        for table in tables:
            train, test = halves(table, seed)
            source = tables if fitted is None else [fitted]
            constants = quantized_constants(kind, source, constants_for(table.gpu), train)
            folds.append((predictor(constants), [Measured.of(table, train)], Measured.of(table, test)))
    return folds


def _left_out(kind: str, table: Dataset, known: Dataset | None) -> Fold:
    """A GPU predicted from 16-bit products of the others and ``known``, quantized ones of another; from where
    quantized fits start, where none was measured on another."""
    name = table.name.split()[0]
    constants = log_mean([_stiff(other) for other in TABLES if other != name], PRODUCT_FIELDS, START)
    if known is not None:
        own = quantized_constants(kind, [known], constants_for(known.gpu))
        constants = dataclasses.replace(constants, **{field: getattr(own, field) for field in FIELDS_OF[kind]})
    return predictor(constants), [Measured.of(known or table)], Measured.of(table)


@functools.cache
def _stiff(name: str) -> Constants:
    """The constants of a GPU's 16-bit products, as for a GPU that was never measured."""
    return product_constants(gemm_table(name, TABLES[name]), hold=STIFF)
