"""Fits what products of 8-bit and 4-bit operands and of narrow weights add to the constants of a GPU.

    python benchmarks/predictor/quantized_fit.py       prints the lines of trtopt/roofline/constants.toml

The constants of 16-bit products are given and stay as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from data import TABLES, Dataset
from fitting import FIRM, QUANTIZED_FIELDS, START, Measured, fit, log_mean
from quantized_data import quantized_table

from trtopt.roofline.constants import GENERIC, Constants, all_fits

FLOOR_US = 10.0
"""Calls that quantize their input first: shorter ones are neither fitted nor scored. FP8 products alone are fitted from
there on as well; a higher floor would keep of the short ones those measured too long."""

COARSE_US = 20.0
"""Shorter rows of coarse tables are not scored: those of the A100 count in steps of 1.024 us above a floor of 8.2 us,
and FP8 products alone are a difference of three measurements, of which RTX PRO 6000's count in steps of 2.05 us."""

LEAST_ROWS = 257
"""Rows from which on products with block scales are fitted: kernels for fewer are not modelled."""

MOST = 3000
"""Products of a table that are fitted."""

FIELDS_OF = {
    "fp8": ("fp8_us", "fp8_share"),
    "fp8_block": ("block_share",),
    "weights": ("dequant_cycles",),
}
"""What each kind of table says something about; FP4 and INT8 have no constants of their own."""


def quantized_constants(
    kind: str, tables: Sequence[Dataset], products: Constants, groups: frozenset[str] | None = None
) -> Constants:
    """``products`` with the constants that tables of one kind tell.

    Args:
        kind: A key of :data:`FIELDS_OF`.
        tables: Measured products.
        products: The constants of the GPU's 16-bit products.
        groups: The pairs (n, k) to fit to; None for all.
    """
    parts = [Measured.of(table, groups, MOST) for table in tables]
    start = dataclasses.replace(products, **{field: getattr(START, field) for field in FIELDS_OF[kind]})
    return fit(parts, start=start, fields=FIELDS_OF[kind], hold=FIRM)


def fp8_table(name: str, floor_us: float = FLOOR_US) -> Dataset:
    """FP8 products alone."""
    return quantized_table(name, TABLES[name], "fp8", floor_us)


def weight_only_tables(floor_us: float = COARSE_US) -> list[Dataset]:
    """Products of the A100 with INT8 and INT4 weights."""
    name = "a100_sxm"
    return [quantized_table(name, TABLES[name], item, floor_us) for item in ("int8_wo", "int4_wo")]


def all_quantized_constants(shipped: dict[str, Constants]) -> dict[str, Constants]:
    """Each GPU's constants with those of its quantized products; what was not measured on it is the others' mean.

    Args:
        shipped: The constants by the name of the GPU.
    """
    found = {}
    for name in ("h100_sxm", "rtx_pro_6000_server"):
        with_fp8 = quantized_constants("fp8", [fp8_table(name)], shipped[TABLES[name]])
        blocked = quantized_table(name, TABLES[name], "fp8_block", FLOOR_US, LEAST_ROWS)
        found[TABLES[name]] = quantized_constants("fp8_block", [blocked], with_fp8)
    a100 = TABLES["a100_sxm"]
    weights = quantized_constants("weights", weight_only_tables(), shipped[a100]).dequant_cycles
    result = {}
    for gpu, constants in shipped.items():
        base = dataclasses.replace(constants, dequant_cycles=weights)
        own = found.get(gpu) or log_mean(list(found.values()), [*FIELDS_OF["fp8"], *FIELDS_OF["fp8_block"]], base)
        result[gpu] = dataclasses.replace(own, dequant_cycles=weights)
    return result


def main() -> None:
    """Fit and print."""
    for gpu, constants in all_quantized_constants({item.name: item.constants for item in all_fits()}).items():
        print(f"[{gpu}]" + (" (mean)" if gpu == GENERIC else ""))
        print("\n".join(f"{field} = {getattr(constants, field):.6g}" for field in QUANTIZED_FIELDS))


if __name__ == "__main__":
    main()
