"""Options that change nothing beside the others, and what they go with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trtopt.config.base import flag
from trtopt.config.commands import BuildConfig
from trtopt.support._script import DECODE
from trtopt.support.precision import EIGHT_BIT_TYPES, Precision

_OF_BOXES = ("recall", "map50", "map")
_Values = Mapping[str, Any]


def _is_quantized(values: _Values) -> bool:
    return values["precision"] in (*EIGHT_BIT_TYPES, Precision.AUTO)


def _decodes(values: _Values) -> bool:
    return any(str(values[name]).startswith(DECODE) for name in ("calib", "eval"))


_GOES_WITH: tuple[tuple[str, Callable[[_Values], object], str], ...] = (
    ("keep_all_int8", _is_quantized, "--int8, --fp8 and --auto"),
    ("calib_method", _is_quantized, "--int8, --fp8 and --auto"),
    ("keep_all_weights", lambda values: values["weights"], "--weights"),
    ("boxes", lambda values: values["metric"] in _OF_BOXES, "--metric recall, map50 or map"),
    ("steps", _decodes, "prompts, such as --calib decode:prompts.npz"),
    ("strict_recipes", lambda values: values["recipes"] != "none", "--recipes"),
)
"""Options, whether something uses them, and what would."""


def idle(values: _Values) -> Iterator[tuple[str, str]]:
    """The fields that are not as by default and that nothing uses, with what would use them; ``values`` as in
    :func:`idle_options`."""
    default = BuildConfig()
    for name, is_used, others in _GOES_WITH:
        if values[name] != getattr(default, name) and not is_used(values):
            yield name, others


def idle_options(values: _Values) -> Iterator[str]:
    """A sentence for each option that is given and that nothing uses.

    Args:
        values: The fields of a :class:`~trtopt.config.BuildConfig`, with the precision that a default stands for and
            the samples and metric that Python callers hand in.

    Example:
        >>> list(idle_options(vars(BuildConfig(keep_all_weights=True))))
        ['--keep-all-weights has no effect: it goes with --weights']
    """
    for name, others in idle(values):
        yield f"{flag(name)} has no effect: it goes with {others}"
