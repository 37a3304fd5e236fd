"""The tables ``[sweep]`` and ``[prices]`` of a sweep's file."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtopt.config.toml_file import PRICES, SWEEP, load_plain, path_in
from trtopt.errors import UsageError
from trtopt.hardware.spec import PORTABLE, GpuSpec, find_gpu, normalized
from trtopt.support.words import did_you_mean

_RELATIVE_URL = re.compile(r"(?:^|::)(?:file|local)://(?!/)")
"""One that fsspec would take from the current folder."""


@dataclass(frozen=True)
class Settings:
    """What ``[sweep]`` and ``[prices]`` say.

    Attributes:
        store: Folder or fsspec URL that keeps results.
        workers: Builds at once in processes of this machine; 0 for one on each core.
        limit: Jobs from which ``--yes`` is needed.
        retries: How often a job whose worker was lost is started again.
        on_gpu: Whether every job runs on a machine that has its GPU.
        measure: Whether engines are timed there; implies ``on_gpu``.
        currency: What prices are in.
        prices: What an hour of a GPU costs, by the GPU's name in trtopt's table.
    """

    store: str = "sweep-store"
    workers: int = 0
    limit: int = 200
    retries: int = 2
    on_gpu: bool = False
    measure: bool = False
    currency: str = "USD"
    prices: dict[str, float] = field(default_factory=dict)


def load_settings(path: Path, gpus: tuple[GpuSpec, ...]) -> Settings:
    """The settings of a sweep's file; a relative store is in the file's folder, ``~`` is the home folder.

    Raises:
        UsageError: A key is unknown, a value has the wrong type, the store is a relative URL or in no home folder,
            or a price is of no known GPU.
    """
    found = load_plain(path, SWEEP)
    known = {item.name: item for item in dataclasses.fields(Settings) if item.name != PRICES}
    for key, value in found.items():
        where = f"{path}: [{SWEEP}] {key}"
        if key not in known:
            remedy = did_you_mean(key, known) or "see docs/sweep.md"
            raise UsageError(f"Unknown setting {key!r}", where=where, remedy=remedy)
        _check(key, known[key].default, value, where)
    settings = Settings(**found, prices=_prices(path, gpus))
    return dataclasses.replace(settings, store=_place(settings.store, path))


def _place(store: str, path: Path) -> str:
    """The store as a path from the root, or its URL."""
    where = f"{path}: [{SWEEP}] store"
    if _RELATIVE_URL.search(store):
        remedy = "write file:/// and the whole path; or the path alone, which is relative to this file"
        raise UsageError("The file:// URL is relative", where=where, remedy=remedy)
    return store if "://" in store else path_in(path, store, where)


def _check(key: str, default: Any, value: Any, where: str) -> None:
    if type(value) is not type(default):
        kind = {bool: "true or false", int: "a whole number", str: "a text"}[type(default)]
        raise UsageError(f"{key} must be {kind}, not {value!r}", where=where, remedy="see docs/sweep.md")
    if (isinstance(value, int) and value < 0) or value == "":
        raise UsageError(f"{key} is {value!r}", where=where, remedy="see docs/sweep.md")


def _prices(path: Path, gpus: tuple[GpuSpec, ...]) -> dict[str, float]:
    prices: dict[str, float] = {}
    for name, value in load_plain(path, PRICES).items():
        where = f"{path}: [{PRICES}] {name}"
        try:
            gpu = PORTABLE if normalized(name) == PORTABLE else find_gpu(name, gpus).name
        except UsageError as error:
            raise UsageError(error.what, where=where, remedy=error.remedy) from error
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise UsageError(f"{value!r} is no price", where=where, remedy="give what one hour costs, such as 0.71")
        if gpu in prices:
            raise UsageError(f"{gpu} has two prices", where=where, remedy="leave one out")
        prices[gpu] = float(value)
    return prices
