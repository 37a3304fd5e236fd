"""2:4 structured sparsity. From Python: masks that stay while a PyTorch module is trained (:func:`prepare`)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtopt.sparsity.training import Prepared, finalize, prepare

__all__ = ["Prepared", "finalize", "prepare"]


def __getattr__(name: str) -> Any:
    """Resolve public names on first use, so that importing the package stays cheap."""
    if name not in __all__:
        raise AttributeError(f"module 'trtopt.sparsity' has no attribute {name!r}")
    return getattr(importlib.import_module("trtopt.sparsity.training"), name)
