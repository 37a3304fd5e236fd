"""Protobuf's text format, as much of it as a config.pbtxt needs.

Not by ``google.protobuf.text_format``: that needs Triton's generated classes, which come with its client only. The
tests read what is written here with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_ESCAPES = {0x22: r"\"", 0x5C: r"\\", 0x0A: r"\n", 0x0D: r"\r", 0x09: r"\t"}


class Word(str):
    """A value that is written without quotes: one of an enum."""


def text(message: Mapping[str, Any]) -> str:
    """A message as text.

    Args:
        message: Values by field. A mapping is a message, a sequence a repeated field, a string is quoted unless it is a
            :class:`Word`. Fields that are None are left out.
    """
    return "".join(line + "\n" for line in _lines(message, ""))


def entries(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A map field: the text format writes it as repeated messages of key and value."""
    return [{"key": key, "value": value} for key, value in values.items()]


def _lines(message: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, value in message.items():
        if value is None:
            continue
        if isinstance(value, Sequence) and not isinstance(value, str) and not any(map(_is_message, value)):
            yield f"{indent}{name}: [{', '.join(map(_scalar, value))}]"
            continue
        for item in value if isinstance(value, Sequence) and not isinstance(value, str) else (value,):
            if _is_message(item):
                yield f"{indent}{name} {{"
                yield from _lines(item, indent + "  ")
                yield f"{indent}}}"
            else:
                yield f"{indent}{name}: {_scalar(item)}"


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping)


def _scalar(value: Any) -> str:
    if isinstance(value, Word):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return f'"{"".join(map(_escaped, str(value).encode()))}"'


def _escaped(byte: int) -> str:
    if byte in _ESCAPES:
        return _ESCAPES[byte]
    return chr(byte) if 0x20 <= byte < 0x7F else f"\\{byte:03o}"
