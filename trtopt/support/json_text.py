"""Values as JSON has them, and the JSON of files that anybody may have written: bounded before it is parsed.

The standard library's parser, with what it lets pass refused. msgspec's has no bound either and takes whole numbers
of any size; memory goes into the values that JSON names in two characters (``[]``), which are counted beforehand.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, TypeVar

MOST_VALUES = 2_000_000
"""Of a file. A report of 10,000 layers has 700,000; this many empty lists take 150 MB and about a second."""

_T = TypeVar("_T")
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
"""What may be half of a surrogate pair: JSON can write it, no encoding can."""


def decoded(content: bytes) -> Any:
    """The JSON value in a file's content.

    Raises:
        ValueError: It is no JSON in UTF-8, has too many values, is nested too deep, holds a number that is not finite
            or a whole one beyond 64 bits, or text that cannot be encoded.
    """
    text = content.decode()
    check_count(text)
    try:
        data = json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    check_text(content, data)
    return data


def check_count(text: str) -> None:
    """Refuse JSON of more values than any file has that trtopt reads, unparsed. Raises ValueError: there are more."""
    if text.count(",") + text.count("[") + text.count("{") > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES} values")


def check_text(content: bytes, data: Any) -> None:
    """Refuse half of a surrogate pair in the JSON ``content`` of a value ``data``. Raises ValueError: there is one."""
    if _HALF_PAIR.search(content) is None:
        return
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it holds half of a surrogate pair, which is no text") from error


def converted(content: bytes, kind: type[_T], *, any_text: bool = False) -> _T:
    """The dataclass that was written as JSON, which may hold numbers that are not finite.

    Args:
        any_text: Whether text may be in it that cannot be encoded.

    Raises:
        ValueError: It is something else.
    """
    import msgspec

    try:
        data = json.loads(content)
        if not any_text:
            check_text(content, data)
        return msgspec.convert(data, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ValueError(f"its fields are wrong: {error}") from error


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _whole(text: str) -> int:
    """A number within 64 bits: no figure of a report is larger, and larger ones fit no float."""
    if len(text) > 20 or not -(1 << 63) < (value := int(text)) < 1 << 63:
        raise ValueError(f"the number {text[:20]}... is too large")
    return value


def plain(value: Any) -> Any:
    """``value`` with JSON types only.

    None for NaN and infinity, lists for tuples, strings for paths; what no encoding takes is escaped.
    """
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str):
        # A builder's log may hold halves of surrogate pairs, which no file takes.
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if value is None or isinstance(value, (int, bool)):
        return value
    return value.item() if hasattr(value, "item") else str(value)
