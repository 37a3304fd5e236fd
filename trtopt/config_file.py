"""The configuration file: TOML, a table for each command, keys as the fields of the configuration are named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from trtopt.config import (
    AnalyzeConfig,
    BuildConfig,
    Config,
    FieldKind,
    Option,
    ProfileConfig,
    SensitivityConfig,
    checked,
    did_you_mean,
    field_kinds,
    options,
)
from trtopt.errors import UsageError

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

_MOST_BYTES = 1 << 20


def load(path: Path, command: str) -> dict[str, Any]:
    """Read the table of ``command`` from a TOML file, and its GPUs.

    Args:
        path: The file.
        command: The name of the table: a key of :data:`COMMANDS`.

    Returns:
        Values by field name of the command's configuration, checked. Relative paths are made relative to the file's
        folder. Shapes are left as tuples of text, as on the command line. ``gpus`` are the tables ``[gpu.NAME]``.

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
            near = did_you_mean(key.replace("-", "_"), known)
            remedy = near or f"see docs/{_PAGES.get(command, command)}.md"
            raise UsageError(f"Unknown option {key!r}", where=where, remedy=remedy)
        values[key] = _value(key, known[key], kinds[key], value, where)
    anchored = {key: _anchored(known[key], value, path.absolute().parent) for key, value in values.items()}
    return {**anchored, "gpus": gpus} if gpus else anchored


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
    known = (*COMMANDS, GPUS)
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
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError("The configuration file is too large", where=str(path), remedy="give a TOML file")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"Cannot read the configuration file: {error.strerror}", where=str(path), remedy="check the path"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"The configuration file is not valid TOML: {error}", where=str(path), remedy="correct that line"
        ) from error


def _value(key: str, option: Option, kind: FieldKind, value: Any, where: str) -> Any:
    try:
        return checked(key, option, "texts" if kind == "shapes" else kind, value)
    except UsageError as error:
        raise UsageError(error.what, where=where, remedy=error.remedy) from error


def _anchored(option: Option, value: Any, folder: Path) -> Any:
    """Paths in ``value`` relative to ``folder``."""
    if not option.path:
        return value
    if isinstance(value, tuple):
        return tuple(str(folder / item) for item in value)
    return value if value in option.words else str(folder / value)
