"""Modules that are imported when they are first used, although a package imports them at its start.

onnx_ir imports sympy, half of its start-up, for arithmetic with symbolic dimensions, which trtopt does not do.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

_MODULES = frozenset({"sympy", "onnx_ir._symbolic_shapes"})


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules as the other finders do, and loads them lazily."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _MODULES:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


def install() -> None:
    """Import those modules lazily in this process, which has to be the command's own."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
