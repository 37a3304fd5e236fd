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
    """The key of an entry, hex: of who makes the answer, a module or a room, and of all else that it depends on."""
    return hashlib.sha256(json.dumps([code_hash(maker), *question]).encode()).hexdigest()


@functools.cache
def code_hash(*makers: str) -> str:
    """A hash, hex, of the code of modules, of all that they import of trtopt, and of the tables that they read.

    Imports are read from the source, those in functions and those for type checkers too; no module is run.

    Args:
        makers: The names of modules; that of a room stands for all modules in it.

    Raises:
        ValueError: There is no such module.
    """
    return _sources(frozenset(name.partition(".")[0] for name in ("trtopt", *makers))).hash_of(*makers)


@functools.cache
def _sources(packages: frozenset[str]) -> SourceFiles:
    specs = (importlib.util.find_spec(name) for name in sorted(packages))
    return SourceFiles(*(resources.files(importlib.util.module_from_spec(spec)) for spec in specs if spec is not None))


class SourceFiles:
    """The source files in the folders of packages, which may lie in a zip file; each is read once."""

    def __init__(self, *packages: Traversable) -> None:
        self._files = {name: files for folder in packages for name, files in _files(folder, folder.name)}
        self._known: dict[str, tuple[str, tuple[str, ...]]] = {}

    def hash_of(self, *makers: str) -> str:
        """As :func:`code_hash`."""
        found: dict[str, str] = {}
        for maker in makers:
            left = [name for name in self._files if f"{name}.".startswith(f"{maker}.")]
            if not left:
                raise ValueError(f"there is no module of the name {maker}")
            while left:
                name = left.pop()
                if name in self._files and name not in found:
                    found[name], imported = self._read(name)
                    left += imported
        return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()

    def _read(self, name: str) -> tuple[str, tuple[str, ...]]:
        """The hash of a module and of the tables beside it that it names, and what it imports."""
        if name not in self._known:
            module, *tables = self._files[name]
            source = module.read_bytes()
            content = [source, *(table.read_bytes() for table in tables if table.name.encode() in source)]
            self._known[name] = hashlib.sha256(b"\0".join(content)).hexdigest(), tuple(_imports(source))
        return self._known[name]


def _files(folder: Traversable, package: str) -> Iterator[tuple[str, list[Traversable]]]:
    """The modules of a package by their names, each with the tables beside it."""
    items = sorted(folder.iterdir(), key=lambda item: item.name)
    tables = [item for item in items if item.name.endswith(".toml")]
    for item in items:
        name, _, suffix = item.name.partition(".")
        if suffix == "py":
            yield package if name == "__init__" else f"{package}.{name}", [item, *tables]
        elif not suffix and item.is_dir():
            yield from _files(item, f"{package}.{name}")


def _imports(content: bytes) -> Iterator[str]:
    """What a module imports that makes answers; names in modules are among them, which are no modules."""
    for module, names in _IMPORT.findall(content.replace(b"\r", b"")):
        for name in (module, *(module + b"." + word for word in re.findall(rb"\w+", names))):
            if name != b"trtopt" and not f"{name.decode()}.".startswith(_WITHOUT_ANSWERS):
                yield name.decode()
