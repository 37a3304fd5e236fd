"""Values as JSON has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


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
