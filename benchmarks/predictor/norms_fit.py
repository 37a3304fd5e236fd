"""The constants of streams and rows, fitted to NeuSight's timings; those of all other kernels are kept.

python benchmarks/predictor/norms_fit.py    writes these constants, and no others, to constants.toml
"""

from __future__ import annotations

import dataclasses
import re

from data import Dataset
from fitting import ROW_FIELDS, START, Measured, fit, log_mean
from norms_data import Op, neusight

from trtopt.roofline.constants import GENERIC, Constants

OPS: tuple[Op, ...] = ("elementwise", "softmax", "ln")

FROM_A100 = ("A100-SXM4-80GB", "H100-SXM5-80GB", "RTX-PRO-6000-BW-Server", "V100-SXM2-16GB")
"""Sets whose streams reach the share of the DRAM bandwidth that those of A100 do: GPUs with HBM, and with GDDR7, which
corrects errors inside its chips. T4 keeps its check bits in the memory that it reads. Others take the mean."""

_HOLD = 0.003
"""As for other tables of hundreds of kernels: fit.MEDIUM."""


def row_constants(tables: list[Dataset], base: Constants, groups: frozenset[str] | None = None) -> Constants:
    """The constants of one GPU: the share of a stream from its element-wise kernels, which are the first of ``tables``;
    then what a launch and rows cost from all, which weigh the same."""
    parts = [Measured.of(table, groups) for table in tables]
    start = dataclasses.replace(base, **{name: getattr(START, name) for name in ROW_FIELDS})
    known = fit(parts[:1], start=start, fields=("stream_share", "event_us"), hold=_HOLD)
    return fit(parts, start=known, fields=ROW_FIELDS[1:], hold=_HOLD)


def mean_constants(sets: list[Constants], base: Constants) -> Constants:
    """The constants of rows for a GPU that none of ``sets`` is of: their mean; those of streams are the first one's."""
    shared = log_mean(sets, ROW_FIELDS, base)
    return dataclasses.replace(shared, stream_share=sets[0].stream_share)


def with_rows(sets: dict[str, Constants]) -> dict[str, Constants]:
    """``sets`` by name, with the constants of streams and rows, and a set for T4: the generic one but for these."""
    a100 = row_constants([neusight("a100_pcie_40gb", op) for op in OPS], sets["A100-SXM4-80GB"])
    t4 = row_constants([neusight("t4", op) for op in OPS], sets[GENERIC])
    found = {name: log_mean([a100, t4], ROW_FIELDS, base) for name, base in sets.items()}
    found |= {name: mean_constants([a100, t4], sets[name]) for name in FROM_A100}
    return found | {"A100-SXM4-80GB": a100, "T4": t4}


def main() -> None:
    """Write the constants of streams and rows into the shipped file."""
    from fit import OUT

    from trtopt.roofline.constants import all_fits

    found = with_rows({fit.name: fit.constants for fit in all_fits()})
    head, *blocks = re.split(r"(?=\[\[)", OUT.read_text(encoding="utf-8"))
    for at, block in enumerate(blocks):
        name = re.search(r'name = "(.*)"', block)
        if name is not None and block.startswith("[[fit]]"):
            for field in ROW_FIELDS:
                value = f"{field} = {getattr(found[name[1]], field):.6g}"
                block = re.sub(rf"{field} = .*", value, block)
            blocks[at] = block
    OUT.write_text(head + "".join(blocks), encoding="utf-8")


if __name__ == "__main__":
    main()
