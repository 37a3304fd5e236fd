"""Options as words of the command line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trtopt.config.base import field_kinds, flag, options
from trtopt.config.commands import BuildConfig


def given(config: BuildConfig) -> list[str]:
    """The names of the options that are not at their default."""
    default = BuildConfig()
    return [name for name in options(BuildConfig) if getattr(config, name) != getattr(default, name)]


def command_words(config: BuildConfig, names: Iterable[str]) -> Iterator[str]:
    """The named options and their values, as the command line has them.

    Example:
        >>> list(command_words(BuildConfig(precision="int8", max_shapes={"x": (8, 3)}), ["precision", "max_shapes"]))
        ['--int8', '--max-shapes', 'x:8x3']
    """
    kinds = field_kinds(BuildConfig)
    for name in names:
        value = getattr(config, name)
        if name == "precision":
            yield f"--{value}"
        elif kinds[name] == "flag":
            yield flag(name)
        elif kinds[name] == "shapes":
            for profile in value:
                shapes = (f"{key}:{'x'.join(map(str, dims))}" for key, dims in profile.items())
                yield from (flag(name), ",".join(shapes))
        elif kinds[name] == "texts":
            yield from (word for item in value for word in (flag(name), item))
        else:
            yield from (flag(name), str(value))
