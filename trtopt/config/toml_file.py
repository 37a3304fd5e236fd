"""The configuration file: TOML, a table for each command, keys as the fields of the configuration are named."""

from __future__ import annotations

import itertools
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trtopt.config.base import Config, FieldKind, Option, checked, field_kinds, options
from trtopt.config.commands import AnalyzeConfig, BuildConfig, ProfileConfig, SensitivityConfig
from trtopt.errors import UsageError
from trtopt.support._script import DECODE
from trtopt.support.files import read_file
from trtopt.support.words import did_you_mean

COMMANDS: dict[str, type[Config]] = {
    "build": BuildConfig,
    "optimize": BuildConfig,
    "analyze": AnalyzeConfig,
    "sensitivity": SensitivityConfig,
    "profile": ProfileConfig,
}
"""The tables of options, and what each configures."""

_PAGES = {"optimize": "build"}
"""Pages that have another name than their command."""

GPUS = "gpu"
"""The table of GPUs, for all commands: ``[gpu.NAME]``."""

MATRIX = "matrix"
"""The table of what ``build`` and ``optimize`` vary: a list of values for each option."""

MODEL = "model"
"""What it may vary beside options."""

SWEEP, PRICES = "sweep", "prices"
"""The tables of ``trtopt sweep``: its settings, and what an hour of a GPU costs."""

_MOST_BYTES = 1 << 20
_DEEP_KEY = re.compile(r"""(?<![\w-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){64}""")
"""A key of more parts than any option has. The time that tomllib takes grows with their square: minutes for 400 KB."""

_MOST_BUILDS = 1000


def load(path: Path, command: str) -> dict[str, Any]:
    """Read the table of ``command`` from a TOML file, and its GPUs.

    Returns:
        Values by field name of the command's configuration, checked. Relative paths are made relative to the file's
        folder, ``~`` is the home folder. Shapes are left as tuples of text, as on the command line. ``gpus`` are the
        tables ``[gpu.NAME]``.

    Raises:
        UsageError: The file cannot be read or parsed, has an unknown table or key, or a value of the wrong type.
    """
    tables = _tables(path)
    gpus = tables.get(GPUS, {})
    if command not in tables and not gpus:
        raise UsageError(f"The configuration file has no table [{command}]", where=str(path), remedy=f"add [{command}]")
    config = COMMANDS[command]
    known, kinds = options(config), field_kinds(config)
    values: dict[str, Any] = {}
    for key, value in tables.get(command, {}).items():
        where = f"{path}: [{command}] {key}"
        if key not in known:
            page = f"see docs/{_PAGES.get(command, command)}.md"
            choices = known["precision"].choices if "precision" in known else ()
            remedy = f'write precision = "{key}"; int8, fp8 and auto imply fp16' if key in choices else page
            raise _unknown(key, () if key in choices else known, where, remedy)
        values[key] = _placed(known[key], _value(key, known[key], kinds[key], value, where), path, where)
    return {**values, "gpus": gpus} if gpus else values


def load_matrix(path: Path, command: str, most: int = _MOST_BUILDS) -> list[dict[str, Any]]:
    """The combinations of the lists in the table ``[matrix]``, at most ``most``, the last list varying fastest.

    Returns:
        Values by field name, checked, paths made relative to the file's folder; the model under ``model``. Empty
        without the table.

    Raises:
        UsageError: As of :func:`load`; or a value is no list, or there is no combination, or there are too many.
    """
    tables = _tables(path)
    if MATRIX not in tables:
        return []
    known, kinds = options(COMMANDS[command]), field_kinds(COMMANDS[command])
    known, kinds = {MODEL: Option("", "", path="file"), **known}, {MODEL: "text", **kinds}
    axes: dict[str, list[Any]] = {}
    for key, items in tables[MATRIX].items():
        where = f"{path}: [{MATRIX}] {key}"
        if key not in known:
            raise _unknown(key, known, where, "see docs/check.md")
        if not isinstance(items, list):
            raise UsageError(f"{key} is no list", where=where, remedy=f"write {key} = [...], with the values to vary")
        values = [_value(key, known[key], kinds[key], item, where) for item in items]
        axes[key] = [_placed(known[key], value, path, where) for value in values]
    empty = next((key for key, items in axes.items() if not items), None)
    count = math.prod(len(items) for items in axes.values())
    if not axes or empty is not None or count > most:
        raise UsageError(
            f"The matrix expands to {count} builds" if axes and empty is None else "The matrix expands to nothing",
            where=f"{path}: [{MATRIX}]{f' {empty}' if empty else ''}",
            remedy=f"give each option 1 or more values, and at most {most} combinations",
        )
    return [dict(zip(axes, items, strict=True)) for items in itertools.product(*axes.values())]


def matrix_word(value: Any) -> str:
    """A value of the matrix as part of a file's name: ``RTX 4090`` becomes ``RTX-4090``."""
    if isinstance(value, Mapping):
        text = "-".join(f"{name}-{'x'.join(map(str, dims))}" for name, dims in value.items())
    else:
        text = "-".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return re.sub(r"[^\w.+-]+", "-", text).strip("-")


def load_plain(path: Path, name: str) -> dict[str, Any]:
    """A table that holds no options of a command, as it stands; empty where the file has none.

    Raises:
        UsageError: The file cannot be read or parsed, or has an unknown table.
    """
    return _tables(path).get(name, {})


def load_gpus(path: Path) -> dict[str, dict[str, Any]]:
    """The tables ``[gpu.NAME]`` of a TOML file by name; their fields are not checked here.

    Raises:
        UsageError: The file cannot be read or parsed, has an unknown table, or no GPU.
    """
    gpus = _tables(path).get(GPUS, {})
    if not gpus:
        raise UsageError("The configuration file has no GPU", where=str(path), remedy='add a table [gpu."NAME"]')
    return gpus


def _tables(path: Path) -> dict[str, dict[str, Any]]:
    """The tables of a file, each of a known name."""
    tables = _parse(path)
    known = (*COMMANDS, GPUS, MATRIX, SWEEP, PRICES)
    for name, table in tables.items():
        if name in known and not isinstance(table, dict):
            raise UsageError(f"{name!r} is no table", where=f"{path}: {name}", remedy=f"write [{name}]")
        if name not in known:
            raise UsageError(
                f"The configuration file has an unknown table or key {name!r}",
                where=f"{path}: {name}",
                remedy=did_you_mean(name, known)
                or f"put options under {' or '.join(f'[{item}]' for item in COMMANDS)}",
            )
    for name, table in tables.get(GPUS, {}).items():
        if not isinstance(table, dict):
            raise UsageError(
                f"The GPU {name!r} is no table", where=f"{path}: [{GPUS}] {name}", remedy=f'write [{GPUS}."NAME"]'
            )
    return tables


def _parse(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    content = read_file(path, "The configuration file", _MOST_BYTES)
    too_deep = UsageError(
        "The configuration file is nested too deep", where=str(path), remedy="write tables of options"
    )
    try:
        text = content.decode()
        if _DEEP_KEY.search(text):
            raise too_deep
        return tomllib.loads(text)
    except RecursionError as error:
        raise too_deep from error
    except UnicodeDecodeError as error:
        raise UsageError(
            "The configuration file is not text", where=str(path), remedy="give TOML in UTF-8, with tables of options"
        ) from error
    except ValueError as error:  # also one that datetime raises, and the limit of digits
        raise UsageError(
            f"The configuration file is not valid TOML: {error}", where=str(path), remedy="correct that line"
        ) from error


def _unknown(key: str, known: Iterable[str], where: str, remedy: str) -> UsageError:
    near = did_you_mean(key.replace("-", "_"), known)
    return UsageError(f"Unknown option {key!r}", where=where, remedy=near or remedy)


def _value(key: str, option: Option, kind: FieldKind, value: Any, where: str) -> Any:
    try:
        return checked(key, option, "texts" if kind == "shapes" else kind, value)
    except UsageError as error:
        raise UsageError(error.what, where=where, remedy=error.remedy) from error


def _placed(option: Option, value: Any, file: Path, where: str) -> Any:
    """What an option is given in a file, its paths made absolute."""
    if not option.path:
        return value
    if isinstance(value, tuple):
        return tuple(path_in(file, item, where) for item in value)
    if not option.is_path(value):
        return value
    kind = DECODE if value.startswith(DECODE) else ""
    return kind + path_in(file, value.removeprefix(kind), where)


def path_in(file: Path, text: str, where: str) -> str:
    """A path that stands in a configuration file, absolute: ``~`` is the home folder, relative is beside the file.

    Raises:
        UsageError: There is no such home folder.
    """
    expanded = os.path.expanduser(text)  # pathlib takes ./~ for the home folder, too
    if expanded.startswith("~"):
        remedy = "write the whole path; ./~ for a folder of that name"
        raise UsageError(f"There is no home folder for {text}", where=where, remedy=remedy)
    return str(file.absolute().parent / expanded)
