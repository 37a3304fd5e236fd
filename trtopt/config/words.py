"""Options as words of the command line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trtopt.config.base import field_kinds, flag, options
from trtopt.config.commands import BuildConfig


def given(config: BuildConfig) -> list[str]:
    """The names of the options that are not at their default."""
    default = BuildConfig()
    return [name for name in options(BuildConfig) if getattr(config, name) != getattr(default, name)]


def command_words(values: Mapping[str, Any], names: Iterable[str]) -> Iterator[str]:
    """The named options of ``trtopt build``, by the names of their fields, and their values as the shell has them.

    Example:
        >>> list(command_words({"precision": "int8", "max_shapes": [{"x": (8, 3)}]}, ["precision", "max_shapes"]))
        ['--int8', '--max-shapes', 'x:8x3']
    """
    kinds = field_kinds(BuildConfig)
    for name in names:
        value = values[name]
        if name == "precision":
            yield f"--{value}"
        elif kinds[name] == "flag":
            yield flag(name)
        elif kinds[name] == "batches":
            yield from (flag(name), ",".join(map(str, value)))
        else:
            items = value if isinstance(value, (list, tuple)) else [value]
            yield from (word for item in items for word in (flag(name), _word(item)))


def _word(value: Any) -> str:
    """A number, a text, or shapes as ``name:8x3x224x224,other:8x77``; names with a colon in quotes."""
    if isinstance(value, Mapping):
        names = {name: f"'{name}'" if ":" in name else name for name in value}
        return ",".join(f"{names[name]}:{'x'.join(map(str, dims))}" for name, dims in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)
