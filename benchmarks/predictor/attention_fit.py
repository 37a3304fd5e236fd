"""Fits the constants of attention, those of products and of the DRAM being known."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from attention_data import GPUS, context, encoder, generation
from data import Dataset
from fitting import ATTENTION_FIELDS, START, Measured, fit, log_mean

from trtopt.roofline.constants import Constants

LOOSE, STIFF = 0.003, 0.1
"""How strongly constants are held to where they start: for a GPU's own tables; for what is carried over to another."""

MOST = 1500
"""Rows of a table that are fitted to."""

SUM_WEIGHT = 1.0
"""Weight of the ratio of the sums: times range over four orders, and long ones decide about a network."""


def attention_tables() -> dict[str, list[Dataset]]:
    """The tables of each measured GPU."""
    return {
        "a100_sxm": [context("a100_sxm"), generation("a100_sxm")],
        "h100_sxm": [encoder("h100_sxm"), context("h100_sxm"), generation("h100_sxm")],
        "rtx_pro_6000_server": [
            encoder("rtx_pro_6000_server"),
            context("rtx_pro_6000_server"),
            generation("rtx_pro_6000_server"),
        ],
    }


def attention_constants(
    tables: Sequence[Dataset], base: Constants, groups: frozenset[str] | None = None, hold: float = LOOSE
) -> Constants:
    """``base`` with the constants of attention fitted to the rows of ``groups`` (default: all)."""
    start = dataclasses.replace(base, **{name: getattr(START, name) for name in ATTENTION_FIELDS})
    parts = [Measured.of(table, groups, MOST) for table in tables]
    return fit(parts, start, ATTENTION_FIELDS, hold, sum_weight=SUM_WEIGHT)


def stiff_constants(tables: Mapping[str, Sequence[Dataset]], bases: Mapping[str, Constants]) -> list[Constants]:
    """The constants of each GPU, as they are carried over to others."""
    return [attention_constants(parts, bases[name], hold=STIFF) for name, parts in tables.items()]


def with_attention(found: Mapping[str, Constants]) -> dict[str, Constants]:
    """``found``, by the names of GPUs, with the constants of attention: a GPU's own, else the mean of the others'."""
    tables = {GPUS[name]: parts for name, parts in attention_tables().items()}
    known = stiff_constants(tables, found)
    complete = {name: log_mean(known, ATTENTION_FIELDS, constants) for name, constants in found.items()}
    return complete | {name: attention_constants(parts, found[name]) for name, parts in tables.items()}
