"""Classes and functions that have what a table says and nothing else: another name, count or type is an error."""

from __future__ import annotations

import enum
import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

TABLES = Path(__file__).with_name("tables")
_ANYTHING = ("object", "CapsuleType", "capsule", "")
_NUMBERS = {
    **dict.fromkeys(("int", "size_t", "long"), (int, np.integer)),
    "float": (int, float, np.integer, np.floating),
}


@dataclass(frozen=True)
class Parameter:
    """A parameter as a table names it; ``type`` is empty where it takes anything."""

    name: str
    type: str
    is_optional: bool


@functools.cache
def read_table(name: str) -> dict[str, Any]:
    """The table of a release, as ``extract.py`` wrote it."""
    found: dict[str, Any] = json.loads((TABLES / f"{name}.json").read_text(encoding="utf-8"))
    return found


@functools.cache
def enums(release: str) -> dict[str, type[enum.IntEnum]]:
    """The enumerations of a release by name."""
    return {name: enum.IntEnum(name, found) for name, found in read_table(release)["enums"].items()}


@functools.cache
def parameters(signature: str) -> list[Parameter]:
    """The parameters of ``(name: type = default, size_t count) -> result``."""
    inside = signature[1 : signature.rindex(")")]
    found = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\])*", inside):
        left, _, default = part.strip().partition("=")
        name, colon, kind = left.partition(":")
        if not colon:  # as Cython writes it: the type before the name, or none
            *words, name = left.split()
            kind = words[-1] if words else ""
        found.append(Parameter(name.strip(), kind.strip(), bool(default)))
    return found


def fits(value: Any, kind: str) -> bool:
    """Whether an argument is of a type, as pybind11 and Cython convert."""
    if kind in _ANYTHING:
        return True
    if kind in _NUMBERS:
        return isinstance(value, _NUMBERS[kind])
    if kind == "bool":
        return isinstance(value, (bool, np.bool_))
    if kind == "str":
        return isinstance(value, str)
    if kind == "buffer":
        return isinstance(value, (bytes, bytearray, memoryview))
    if kind.startswith("List") or kind in ("Dims", "tuple"):
        items = isinstance(value, (tuple, list))
        return items and all(isinstance(item, (int, np.integer, str)) for item in value)
    names = [cls.__qualname__.split(".")[-1] for cls in type(value).__mro__]
    return kind.split(".")[-1] in names or (value is None and not hasattr(value, "value"))


def bound(name: str, overloads: Sequence[str], arguments: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, for the first overload that takes them. Raises TypeError: none does."""
    for signature in overloads:
        wanted = parameters(signature)
        if len(arguments) > len(wanted):
            continue
        given = {item.name: value for item, value in zip(wanted, arguments, strict=False)}
        if given.keys() & named.keys():
            continue
        given |= named
        kinds = {item.name: item.type for item in wanted}
        required = {item.name for item in wanted if not item.is_optional}
        if required <= given.keys() <= kinds.keys() and all(fits(value, kinds[key]) for key, value in given.items()):
            return given
    shown = ", ".join([*map(repr, arguments), *(f"{key}={value!r}" for key, value in named.items())])
    raise TypeError(f"{name}({shown}): incompatible function arguments; it takes {' or '.join(overloads)}")


def checked(name: str, overloads: Sequence[str], call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` behind the signatures of a table; it gets the arguments in their order."""

    @functools.wraps(call)
    def checks(*arguments: Any, **named: Any) -> Any:
        return call(*bound(name, overloads, arguments, named).values())

    return checks


def declared(table: dict[str, Any], name: str, does: type) -> type | None:
    """A class with the members that the table says, behaving as ``does``; None where the release has no such class.

    What the release lacks raises AttributeError, and what only this stand-in lacks NotImplementedError. Attributes
    that are no property, or cannot be written, cannot be set.
    """
    if name not in table["classes"]:
        return None
    has = table["classes"][name]
    body: dict[str, Any] = {"__qualname__": name}
    for method, overloads in has["methods"].items():
        if method != "__init__":
            body[method] = _method(name, method, overloads, getattr(does, method, None))
    for item, access in has["properties"].items():
        body[item] = _property(name, item, access, getattr(does, item, None))
    for other in dir(does):
        if not other.startswith("_") and other not in body:
            body[other] = property(functools.partial(_missing, name, other))

    def set_attribute(self: Any, item: str, value: Any) -> None:
        if not item.startswith("_") and item not in has["properties"]:
            raise AttributeError(f"{name!r} object has no attribute {item!r}")
        object.__setattr__(self, item, value)

    body["__setattr__"] = set_attribute
    return type(name, (does,), body)


def _missing(cls: str, name: str, _: Any) -> Any:
    raise AttributeError(f"{cls!r} object has no attribute {name!r} in this release")


def _unknown(cls: str, name: str, *_: Any, **__: Any) -> Any:
    raise NotImplementedError(f"the stand-in does not do {cls}.{name}")


def _method(cls: str, name: str, overloads: Sequence[str], does: Callable[..., Any] | None) -> Any:
    if does is None:
        return functools.partial(_unknown, cls, name)

    @functools.wraps(does)
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        return does(self, *bound(f"{cls}.{name}", overloads, arguments, named).values())

    return method


def _property(cls: str, name: str, access: str, does: property | None) -> property:
    if does is None:
        return property(functools.partial(_unknown, cls, name))
    return property(does.fget, does.fset if access == "rw" else None)
