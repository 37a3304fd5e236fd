"""One rule of age for all that is kept: an entry is found by its question, and by the code that answers it.

The question is what the answer is about: the content of a graph, samples, options, the version of a compiler. The code
is that of the modules that make the answer. So no entry outlives a change of its code, and no other change ends it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import re
from collections.abc import Iterator
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Traversable

_IMPORT = re.compile(rb"from (trtopt[\w.]*) import (\([^)]*\)|[^\n]*)")
"""The form in which modules of trtopt import each other; a test compares what it finds with Python's own parser."""

_WITHOUT_ANSWERS = tuple(
    f"trtopt.{name}."
    for name in ("cache", "cli", "errors", "events", "report.files", "report.html", "report.text", "support.version")
)
"""What keeps answers, shows them, and says why there are none. It makes none, so that it does not count."""


def entry_key(maker: str, *question: str) -> str:
    """The key of an entry, hex.

    Args:
        maker: The module that makes the answer, or the room.
        question: Everything else that the answer depends on.
    """
    return hashlib.sha256(json.dumps([code_hash(maker), *question]).encode()).hexdigest()


@functools.cache
def code_hash(*makers: str) -> str:
    """A hash, hex, of the code of modules, of all that they import of trtopt, and of the tables in their folders.

    Imports are read from the source, those in functions and those for type checkers too; no module is run.

    Args:
        makers: The names of modules; that of a room stands for all modules in it.

    Raises:
        ValueError: There is no such module.
    """
    return _sources(frozenset(name.partition(".")[0] for name in ("trtopt", *makers))).hash_of(*makers)


@functools.cache
def _sources(packages: frozenset[str]) -> Sources:
    specs = (importlib.util.find_spec(name) for name in sorted(packages))
    return Sources(*(resources.files(importlib.util.module_from_spec(spec)) for spec in specs if spec is not None))


class Sources:
    """The source files of packages, each read once.

    Args:
        packages: Their folders, which may lie in a zip file.
    """

    def __init__(self, *packages: Traversable) -> None:
        self._files = {name: file for folder in packages for name, file in _files(folder, folder.name)}
        self._tables = [name for name in self._files if "/" in name]
        self._known: dict[str, tuple[str, tuple[str, ...]]] = {}

    def hash_of(self, *makers: str) -> str:
        """As :func:`code_hash`."""
        left = [name for name in self._files if f"{name}.".startswith(tuple(f"{maker}." for maker in makers))]
        if not all(any(f"{name}.".startswith(f"{maker}.") for name in left) for maker in makers):
            raise ValueError(f"there is no module of one of these names: {', '.join(makers)}")
        found: dict[str, str] = {}
        while left:
            name = left.pop()
            if name in self._files and name not in found:
                found[name], uses = self._read(name)
                left += uses
        return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()

    def _read(self, name: str) -> tuple[str, tuple[str, ...]]:
        """The hash of a file, and the files that count with it."""
        if name not in self._known:
            content = self._files[name].read_bytes()
            folders = (f"{name}/", f"{name.rpartition('.')[0]}/")
            tables = (table for table in self._tables if table.startswith(folders))
            self._known[name] = hashlib.sha256(content).hexdigest(), (*tables, *_imports(content))
        return self._known[name]


def _files(folder: Traversable, package: str) -> Iterator[tuple[str, Traversable]]:
    """The modules of a package by their names, and its tables by ``PACKAGE/FILE``."""
    for item in folder.iterdir():
        name, _, suffix = item.name.partition(".")
        if suffix == "py":
            yield package if name == "__init__" else f"{package}.{name}", item
        elif suffix == "toml":
            yield f"{package}/{item.name}", item
        elif not suffix and item.is_dir():
            yield from _files(item, f"{package}.{name}")


def _imports(content: bytes) -> Iterator[str]:
    """What a module imports that makes answers; names in modules are among them, which are no files."""
    for module, names in _IMPORT.findall(content.replace(b"\r", b"")):
        for name in (module, *(module + b"." + word for word in re.findall(rb"\w+", names))):
            if name != b"trtopt" and not f"{name.decode()}.".startswith(_WITHOUT_ANSWERS):
                yield name.decode()
