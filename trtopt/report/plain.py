"""Values as JSON has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """``value`` with JSON types only: None for NaN and infinity, lists for tuples, paths as strings."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (str, int, bool)):
        return value
    return value.item() if hasattr(value, "item") else str(value)
