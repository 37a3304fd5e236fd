"""One table of a TOML file written anew, the rest of the file as it was."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def with_table(text: str, path: tuple[str, str], values: Mapping[str, Any]) -> str | None:
    """The file with the table ``[first.second]`` replaced, or added at its end; every other byte stays.

    What a table is given in is its lines from a header of its own, or of tables in it, to the next header; comments and
    empty lines before that stay.

    Args:
        text: The file, valid TOML.
        path: The names of the table.
        values: Numbers, truth values and text, or tables of them, which become tables of their own.

    Returns:
        None where the table is not written in lines of its own (an inline table, dotted keys).
    """
    end = "\r\n" if "\r\n" in text else "\n"
    kept, place = _without(re.findall(r"[^\n]*\n|[^\n]+", text), path)
    block = end.join([*_lines(path, values), ""])
    if place is None:
        gap = "" if not text or text.endswith("\n\n") else end if text.endswith("\n") else 2 * end
        changed = f"{text}{gap}{block}"
    else:
        changed = "".join([*kept[:place], block, *kept[place:]])
    old, new = tomllib.loads(text), _loaded(changed)
    old.setdefault(path[0], {})[path[1]] = dict(values)
    return changed if new == old else None


def _without(lines: list[str], path: tuple[str, str]) -> tuple[list[str], int | None]:
    """The lines that are not of a table, and the place where its first was."""
    kept: list[str] = []
    place, inside, pending = None, False, 0
    for line in lines:
        header = _header(line)
        if header is not None:
            was, inside = inside, header[:2] == path
            pending = pending if was and inside else 0
            if inside and place is None:
                place = len(kept)
        bare = line.strip()
        if inside and (not bare or bare.startswith("#")):
            kept.append(line)
            pending += 1
        elif inside:
            if pending:
                del kept[-pending:]  # a comment within the table
                pending = 0
        else:
            kept.append(line)
    return kept, place


def _header(line: str) -> tuple[str, ...] | None:
    """The names of a table's header; None for any other line."""
    if not line.lstrip().startswith("["):
        return None
    found: Any = _loaded(line)
    names = []
    while isinstance(found, dict) and found:
        name, found = next(iter(found.items()))
        names.append(name)
    return tuple(names) or None


def _loaded(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return None


def _lines(path: tuple[str, ...], values: Mapping[str, Any]) -> list[str]:
    found = [f"[{path[0]}.{'.'.join(_quoted(name) for name in path[1:])}]"]
    found += [f"{name} = {_value(value)}" for name, value in values.items() if not isinstance(value, Mapping)]
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += ["", *_lines((*path, name), value)]
    return found


def _quoted(name: str) -> str:
    return name if name.isidentifier() and name.isascii() else json.dumps(name, ensure_ascii=False)


def _value(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (bool, str)) else repr(value)
